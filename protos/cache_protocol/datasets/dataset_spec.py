"""`DatasetSpec`: what to cache, from Python, YAML or the wire.

Only this module validates a spec. It must not look at the source: the coordinator does that.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from cache_protocol.datasets import strict_yaml
from cache_protocol.datasets.dataset_names import EVERY_NAMESPACE, NAMESPACE, is_dataset_name
from cache_protocol.datasets.secret_settings import (
    CATALOG_PREFIX,
    URI,
    shown,
    split_options,
    without_password,
)
from cache_protocol.datasets.values import as_integer, is_text
from cache_protocol.errors import ConfigError, some_of
from cache_protocol.v1 import cache_pb2 as pb

FORMATS = ("parquet", "arrow", "csv", "json", "iceberg", "delta", "postgres")
FILE_SUFFIXES = {  # lower-case suffix of a file -> its format
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
TABLE = "source"  # the table of a spec with one source
TYPED_FORMATS = ("csv", "json")  # whose types are inferred, unless they are given
_TABLE_FORMATS = ("iceberg", "delta", "postgres")  # tables that list their files
DEFAULT_TARGET_SHARD_BYTES = 64 * 1024 * 1024
_MAX_SHARD_BYTES = 1024**5
_MAX_REPLICAS = 65_535
_LAST_SNAPSHOT = 2**63 - 1  # Iceberg's and Delta's are longs

_TABLE_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_TABLE_KEYS = (  # the arguments of `DatasetSpec` for one table
    *("source", "format", "types", "escape", "snapshot", "catalog", "missing_columns"),
    *("storage_options", "ignore", "schema"),
)

# A path, glob or URI, or several of them in row order.
Source = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def parse_bytes(value: object) -> int:
    """Bytes from an int or a string such as ``"8GiB"`` or ``"512 MB"``.

    Raises:
        ValueError: it is not a size; quotes it.
    """
    if (size := as_integer(value)) is not None and size >= 0:
        return size
    if isinstance(value, str):
        # Imported here: it would be a fifth of the client's import time.
        from pydantic import ByteSize, TypeAdapter, ValidationError

        with suppress(ValidationError):
            return int(TypeAdapter(ByteSize).validate_python(value))
    raise ValueError(f"must be a size in bytes such as 64MiB, got {shown(value)}")


@dataclass(frozen=True)
class TableSpec:
    """One table of a dataset. Made and checked by `DatasetSpec`.

    Attributes:
        name: in the query.
        source: paths, globs and URIs, in row order.
        format: one of `FORMATS`; None: by the names.
        snapshot: Iceberg snapshot id, tag or branch, or Delta version; None: the current one.
        missing_columns: ``refuse`` or ``null``.
        options: public settings of the store or catalogue.
        secrets: the other settings. They are never shown or written.
        ignore: patterns of the file names to leave out.
        types: column -> Arrow type, of CSV and JSON; the other columns are inferred.
        schema: ``same`` or ``union``.
        escape: of quotes in CSV: a backslash, or nothing.
    """

    name: str
    source: tuple[str, ...]
    format: str | None = None
    snapshot: int | str | None = None
    missing_columns: str = "refuse"
    options: Mapping[str, str] = field(default_factory=dict, hash=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    ignore: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict, hash=False)
    schema: str = "same"
    escape: str = ""

    def to_proto(self) -> pb.TableSpec:
        """The wire form, without the secrets."""
        return pb.TableSpec(
            name=self.name,
            source=self.source,
            format=self.format or "",
            snapshot=self.snapshot if isinstance(self.snapshot, int) else None,
            snapshot_name=self.snapshot if isinstance(self.snapshot, str) else "",
            missing_columns=self.missing_columns,
            options=self.options,
            ignore=self.ignore,
            types=self.types,
            schema=self.schema if self.schema != "same" else "",
            escape=self.escape,
        )


@dataclass(frozen=True)
class DatasetSpec:
    """The tables to cache, and the rows and columns to keep of them.

    Args:
        name: letters, digits, ``.``, ``_`` and ``-``; at most 128 characters. In a cache with
            namespaces also ``NAMESPACE/NAME``.
        source: a file, a directory, a glob or a URI (``file``, ``s3``, ``gs``, ``az``, ``abfss``,
            ``http``, ``https``, ``hf``, ``postgresql``), or several of them; with a catalogue, the
            name of a table in it. A relative path and a leading ``~`` are resolved by the process
            that makes the spec; the nodes read the same path. Row order: sources as given, files of
            a source by name, rows as in the file.
        format: one of ``parquet``, ``arrow``, ``csv``, ``json`` (one object a line), ``iceberg``,
            ``delta``, ``postgres``. Default: by the names.
        types: column -> Arrow type, such as ``{"zip": "string"}``, of a CSV or newline JSON. The
            column is read as exactly that type; others are inferred from the first rows.
        escape: a backslash, for a CSV that writes it before each quote and backslash in quotes, as
            Spark does. Default: a quote in quotes is doubled.
        sql: a query over the table ``source``, or over the names of ``sources``.
        columns: shortcut for ``sql``: the columns to keep, in this order.
        filter: shortcut for ``sql``: an SQL condition over the columns of ``source``.
        snapshot: Iceberg snapshot id, or the name of a tag or a branch; or Delta version. Default:
            the current one.
        catalog: properties of an Iceberg catalogue, by pyiceberg's names: ``type``, ``uri``.
        missing_columns: for a column that some files lack: ``refuse`` or ``null``.
        storage_options: settings of the store by its usual names, such as ``AWS_ENDPOINT_URL``, in
            upper or lower case. Settings that are not known to be public are secrets: they are in
            no log, file, fingerprint or description.
        sources: instead of ``source``: table name -> a source, or a mapping with the arguments
            ``source``, ``format``, ``types``, ``escape``, ``snapshot``, ``catalog``,
            ``missing_columns``, ``storage_options``, ``ignore`` and ``schema`` of that table.
        ignore: patterns of files to leave out, such as ``*.json``: shell wildcards (`fnmatch`,
            whose ``*`` also matches a ``/``) over the path of a file relative to the source. Only
            for files.
        schema: of Parquet and Arrow files that differ: ``same`` refuses other types of values;
            ``union`` widens numbers, and makes columns and fields null in files that lack them.
        allow_unordered: accept a query whose result has no defined order.
        nulls: ``keep`` loads them; a reader decides what they become. ``refuse`` fails a load with
            a null.
        replicas: the number of nodes that hold each shard.
        readers: other namespaces whose principals may read the dataset; ``*``: every namespace.
        target_shard_bytes: approximate decoded bytes of a shard; an int or a string such as
            ``64MiB``.

    Attributes:
        tables: one for each source, in the given order.

    Raises:
        ConfigError: quoting every bad field, but no secret.
    """

    name: str
    tables: tuple[TableSpec, ...]
    sql: str | None
    columns: tuple[str, ...] | None
    filter: str | None
    allow_unordered: bool
    nulls: str
    replicas: int
    target_shard_bytes: int
    readers: tuple[str, ...]

    # Written by hand: the arguments differ from the attributes.
    def __init__(
        self,
        name: str,
        source: Source | None = None,
        *,
        format: str | None = None,  # the usual word
        types: Mapping[str, object] | None = None,
        escape: str | None = None,
        sql: str | None = None,
        columns: Iterable[str] | None = None,
        filter: str | None = None,
        snapshot: int | str | None = None,
        catalog: Mapping[str, object] | None = None,
        missing_columns: str = "refuse",
        storage_options: Mapping[str, object] | None = None,
        sources: Mapping[str, object] | None = None,
        ignore: Iterable[str] | None = None,
        schema: str = "same",
        allow_unordered: bool = False,
        nulls: str = "keep",
        replicas: int = 1,
        target_shard_bytes: int | str = DEFAULT_TARGET_SHARD_BYTES,
        readers: Iterable[str] | None = None,
    ) -> None:
        problems: list[str] = []
        if not is_dataset_name(name):
            problems.append(
                "name must be 1 to 128 letters, digits, '.', '_' or '-', starting with a letter "
                f"or digit, got {shown(name)}"
            )
        one = {
            "source": source,
            "format": format,
            "types": types,
            "escape": escape,
            "snapshot": snapshot,
            "catalog": catalog,
            "missing_columns": missing_columns,
            "storage_options": storage_options,
            "ignore": ignore,
            "schema": schema,
        }
        if sources is None:
            tables: tuple[TableSpec, ...] = (_table(TABLE, one, problems),)
        else:
            given = [key for key, value in one.items() if value not in (None, "refuse", "same")]
            if given:
                problems.append(f"{', '.join(given)} cannot be combined with sources")
            tables = _named_tables(sources, problems)
            if sql is None:
                problems.append("sources needs a sql that says what to make of them")
        if sql is not None and (not isinstance(sql, str) or not sql.strip()):
            problems.append(f"sql must be a query over {_names(tables)}, got {shown(sql)}")
        if sql is not None and (columns is not None or filter is not None):
            problems.append("sql cannot be combined with columns or filter: write them in the sql")
        if filter is not None and (not isinstance(filter, str) or not filter.strip()):
            problems.append(f"filter must be an SQL condition, got {shown(filter)}")
        names = _columns(columns, problems)
        for field_name, texts in {"sql": [sql], "filter": [filter], "columns": names or ()}.items():
            problems += _text_problems(field_name, texts)
        if not isinstance(allow_unordered, bool):
            problems.append(f"allow_unordered must be true or false, got {shown(allow_unordered)}")
        if not isinstance(nulls, str) or nulls not in ("keep", "refuse"):
            problems.append(f"nulls must be keep or refuse, got {shown(nulls)}")
        copies = _replicas(replicas, problems)
        shard_bytes = _shard_bytes(target_shard_bytes, problems)
        namespaces = _readers(readers, problems)
        if problems:
            raise ConfigError("bad dataset spec: " + "; ".join(problems))
        values: dict[str, object] = {
            "name": name,
            "tables": tables,
            "sql": sql,
            "columns": names,
            "filter": filter,
            "allow_unordered": allow_unordered,
            "nulls": nulls,
            "replicas": copies,
            "target_shard_bytes": shard_bytes,
            "readers": namespaces,
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)

    @property
    def source(self) -> tuple[str, ...]:
        """Paths, globs and URIs of the first table."""
        return self.tables[0].source

    @property
    def format(self) -> str | None:
        """The format of the first table, if it is given."""
        return self.tables[0].format

    def to_proto(self) -> pb.DatasetSpec:
        """The wire form, without the secrets; see `secrets_to_proto`."""
        return pb.DatasetSpec(
            name=self.name,
            tables=[table.to_proto() for table in self.tables],
            sql=self.sql or "",
            columns=self.columns or (),
            filter=self.filter or "",
            allow_unordered=self.allow_unordered,
            nulls="" if self.nulls == "keep" else self.nulls,
            replicas=self.replicas,
            target_shard_bytes=self.target_shard_bytes,
            readers=self.readers,
        )

    def secrets_to_proto(self) -> pb.Secrets:
        """The secrets, which `to_proto` leaves out."""
        tables = {t.name: pb.TableSecrets(values=t.secrets) for t in self.tables if t.secrets}
        return pb.Secrets(tables=tables)

    def renamed(self, name: str) -> DatasetSpec:
        """The same spec, secrets too, under another name."""
        content = self.to_proto()
        content.name = name
        return self.from_proto(content, self.secrets_to_proto())

    @classmethod
    def from_proto(cls, spec: pb.DatasetSpec, secrets: pb.Secrets | None = None) -> DatasetSpec:
        """The spec of a message; validated like any other."""
        known = secrets.tables if secrets is not None else {}
        tables: dict[str, dict[str, object]] = {}
        for table in spec.tables:
            values = known[table.name].values if table.name in known else {}
            tables[table.name] = {
                "source": list(table.source) or None,
                "format": table.format or None,
                "types": dict(table.types) or None,
                "escape": table.escape or None,
                "snapshot": table.snapshot_name
                or (table.snapshot if table.HasField("snapshot") else None),
                "missing_columns": table.missing_columns or "refuse",
                "storage_options": {**table.options, **values} or None,
                "ignore": list(table.ignore) or None,
                "schema": table.schema or "same",
            }
        single = list(tables) in ([TABLE], [])
        arguments: dict[str, Any] = dict(tables.get(TABLE, {})) if single else {"sources": tables}
        return cls(
            spec.name,
            sql=spec.sql or None,
            columns=list(spec.columns) or None,
            filter=spec.filter or None,
            allow_unordered=spec.allow_unordered,
            nulls=spec.nulls or "keep",
            replicas=spec.replicas or 1,
            target_shard_bytes=spec.target_shard_bytes or DEFAULT_TARGET_SHARD_BYTES,
            readers=list(spec.readers),
            **arguments,
        )

    @classmethod
    def from_mapping(cls, mapping: object) -> DatasetSpec:
        """The spec of a mapping with the argument names as keys.

        Raises:
            ConfigError: it is not a mapping; or it has unknown keys, missing keys or bad fields,
                which are all named.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"a dataset spec must be a mapping, got {shown(mapping)}")
        known = inspect.signature(cls).parameters
        problems: list[str] = []
        if unknown := [key for key in mapping if key not in known]:
            problems.append(
                f"unknown key {some_of(map(repr, unknown))} in the dataset spec; "
                f"known keys: {', '.join(known)}"
            )
        has = {"name": "name" in mapping, "source": "source" in mapping or "sources" in mapping}
        missing = [key for key, given in has.items() if not given]
        if missing:
            problems.append(f"the dataset spec lacks {', '.join(missing)}")
        # Placeholders for missing arguments, so that the other fields are checked.
        arguments: dict[str, Any] = dict.fromkeys(missing, "missing")
        arguments |= {key: value for key, value in mapping.items() if key in known}
        try:
            spec = cls(**arguments)
        except ConfigError as error:
            problems.append(str(error))
        if problems:
            raise ConfigError("; ".join(problems))
        return spec

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> DatasetSpec:
        """The spec in a YAML file.

        Raises:
            ConfigError: the file cannot be read, or is not YAML or not a spec; names the file.
        """
        try:
            mapping = strict_yaml.parse(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the dataset spec {path}: {error.strerror}") from None
        except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a bad date
            raise ConfigError(f"{path} is not YAML: {_yaml_problem(error)}") from None
        try:
            return cls.from_mapping(mapping)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except RecursionError:
            raise ConfigError(f"{path}: a value of the dataset spec holds itself") from None


def _yaml_problem(error: Exception) -> str:
    """The error without the lines that PyYAML quotes, which may hold secrets."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        return f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}"
    return str(error)


def _is_list(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether ``value`` is an ordered collection."""
    unordered = isinstance(value, str | bytes | os.PathLike | Mapping | Set)
    # An array without dimensions has no items, and one of two holds no strings.
    return isinstance(value, Iterable) and not unordered and getattr(value, "ndim", 1) == 1


def _names(tables: Sequence[TableSpec]) -> str:
    if [table.name for table in tables] == [TABLE]:
        return f"the table {TABLE!r}"
    return f"the tables {some_of(table.name for table in tables)}"


def _named_tables(sources: object, problems: list[str]) -> tuple[TableSpec, ...]:
    if not isinstance(sources, Mapping) or not sources:
        problems.append(
            f"sources must be a mapping of table names to sources, got {shown(sources)}"
        )
        return ()
    tables = []
    for name, value in sources.items():
        if not isinstance(name, str) or not _TABLE_NAME.fullmatch(name):
            problems.append(
                "the names of sources must be lower-case letters, digits and '_', starting with a "
                f"letter, got {shown(name)}"
            )
            continue
        arguments = dict(value) if isinstance(value, Mapping) else {"source": value}
        found: list[str] = []
        unknown = [key for key in arguments if key not in _TABLE_KEYS]
        if unknown:
            found.append(
                f"unknown key {', '.join(map(repr, unknown))}; known keys: {', '.join(_TABLE_KEYS)}"
            )
        tables.append(_table(name, arguments, found))
        problems += [f"sources.{name}: {problem}" for problem in found]
    return tuple(tables)


def _table(name: str, arguments: Mapping[str, object], problems: list[str]) -> TableSpec:
    """One table, from the arguments of `DatasetSpec`."""
    format = arguments.get("format")
    if format is not None and not (isinstance(format, str) and format in FORMATS):
        problems.append(f"format must be one of {', '.join(FORMATS)}, got {shown(format)}")
        format = None
    snapshot = _snapshot(arguments.get("snapshot"), problems)
    policy = arguments.get("missing_columns", "refuse")
    if not isinstance(policy, str) or policy not in ("refuse", "null"):
        problems.append(f"missing_columns must be refuse or null, got {shown(policy)}")
    schema = arguments.get("schema", "same")
    if not isinstance(schema, str) or schema not in ("same", "union"):
        problems.append(f"schema must be same or union, got {shown(schema)}")
    options, secrets = split_options(arguments.get("storage_options"), "storage_options", problems)
    if arguments.get("catalog") is not None:
        public, private = split_options(arguments["catalog"], "catalog", problems)
        options |= {f"{CATALOG_PREFIX}{key}": value for key, value in public.items()}
        secrets |= {f"{CATALOG_PREFIX}{key}": value for key, value in private.items()}
    named = any(key.startswith(CATALOG_PREFIX) for key in (*options, *secrets))
    source = _sources(arguments.get("source"), named, secrets, problems)
    ignore = _ignored(arguments.get("ignore"), problems)
    problems += _text_problems("source", source) + _text_problems("ignore", ignore)
    if ignore and (named or format in _TABLE_FORMATS):
        problems.append(
            f"ignore, got {list(ignore)!r}, is for files: a table of a catalogue or of format "
            f"{', '.join(_TABLE_FORMATS)} says itself what is in it"
        )
    types = _types(arguments.get("types"), problems)
    if types and (named or format not in (None, *TYPED_FORMATS)):
        problems.append(f"types, got {types!r}, is for {' and '.join(TYPED_FORMATS)}")
    escape = arguments.get("escape")
    if escape not in (None, "\\"):
        problems.append(f"escape must be one backslash, got {shown(escape)}")
    elif escape and (named or format not in (None, "csv")):
        problems.append("escape is for csv")
    return TableSpec(
        name,
        source,
        str(format) if format is not None else None,
        snapshot,
        str(policy),
        options,
        secrets,
        ignore,
        types,
        str(schema),
        "\\" if escape else "",
    )


def _types(given: object, problems: list[str]) -> dict[str, str]:
    if given is None:
        return {}
    from cache_protocol.datasets.column_types import parse_types  # imports pyarrow

    return parse_types(given, problems)


def _snapshot(given: object, problems: list[str]) -> int | str | None:
    if isinstance(given, str) and given:
        problems += _text_problems("snapshot", [given])
        return given
    snapshot = as_integer(given)
    if given is not None and (snapshot is None or not 0 <= snapshot <= _LAST_SNAPSHOT):
        problems.append(
            "snapshot must be the number of a snapshot or version, or the name of a tag or branch, "
            f"got {shown(given)}"
        )
    return snapshot


def _ignored(patterns: object, problems: list[str]) -> tuple[str, ...]:
    if patterns is None:
        return ()
    items = list(patterns) if _is_list(patterns) else []
    if not _is_list(patterns) or not all(isinstance(item, str) and item for item in items):
        problems.append(f"ignore must be a list of patterns of file names, got {shown(patterns)}")
        return ()
    return tuple(items)


def _sources(
    source: object, named: bool, secrets: dict[str, str], problems: list[str]
) -> tuple[str, ...]:
    """The normalised sources; the password of a URI becomes a secret.

    Args:
        named: they are names in a catalogue, not paths.
    """
    items = list(source) if _is_list(source) else [source]
    result = []
    for item in items:
        if not isinstance(item, str | os.PathLike) or not os.fspath(item):
            problems.append(f"source must be a path, glob or URI, got {shown(item)}")
            continue
        text = str(os.fspath(item))
        if text.startswith("file:/") and not URI.match(text):  # as Hadoop writes it
            text = f"file://{text.removeprefix('file:')}"
        if URI.match(text):
            result.append(without_password(text, secrets, problems))
        else:
            result.append(text if named else os.path.abspath(os.path.expanduser(text)))
    if not items:
        problems.append("source must name at least one path, glob or URI, got an empty list")
    return tuple(result)


def _text_problems(what: str, texts: Iterable[object]) -> list[str]:
    """Strings that protobuf cannot carry, such as a file name that is not UTF-8."""
    return [
        f"{what} must be text in UTF-8, got {shown(text)}"
        for text in texts
        if isinstance(text, str) and not is_text(text)
    ]


def _columns(columns: object, problems: list[str]) -> tuple[str, ...] | None:
    if columns is None:
        return None
    if not _is_list(columns):
        problems.append(f"columns must be a list of column names, got {shown(columns)}")
        return None
    names = list(columns)
    bad = [name for name in names if not isinstance(name, str) or not name]
    if bad or not names:
        problems.append(f"columns must be a list of column names, got {shown(names)}")
        return None
    if len(set(names)) != len(names):
        problems.append(f"columns must not repeat a name, got {names!r}")
    return tuple(names)


def _readers(readers: object, problems: list[str]) -> tuple[str, ...]:
    names: list[Any] = [] if readers is None else list(readers) if _is_list(readers) else [readers]
    for name in names:
        if not isinstance(name, str) or not (name == EVERY_NAMESPACE or NAMESPACE.fullmatch(name)):
            problems.append(f"readers must be a list of namespaces, or '*', got {shown(readers)}")
            return ()
    return tuple(dict.fromkeys(names))


def _replicas(replicas: object, problems: list[str]) -> int | None:
    copies = as_integer(replicas)
    if copies is None or copies < 1:
        problems.append(f"replicas must be a number of at least 1, got {shown(replicas)}")
    elif copies > _MAX_REPLICAS:
        problems.append(f"replicas must be at most {_MAX_REPLICAS}, got {copies}")
    return copies


def _shard_bytes(size: object, problems: list[str]) -> int | None:
    try:
        num_bytes = parse_bytes(size)
    except ValueError as error:
        problems.append(f"target_shard_bytes {error}")
        return None
    if not 1 <= num_bytes <= _MAX_SHARD_BYTES:
        problems.append(f"target_shard_bytes must be from 1 byte to 1 PiB, got {size!r}")
    return num_bytes
