"""What a user asks the cache to hold: `DatasetSpec`, from Python, YAML or the wire.

The only place where a spec is validated. It must not look at the source itself: whether the files
exist is a question for the node that reads them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from pydantic import ByteSize, TypeAdapter, ValidationError

from protos.cache.v1 import cache_pb2 as pb
from protos.errors import ConfigError

FORMATS = ("parquet", "arrow", "csv", "json")
DEFAULT_TARGET_SHARD_BYTES = 64 * 1024 * 1024
_MAX_SHARD_BYTES = 1024**5
_MAX_REPLICAS = 65_535

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BYTE_SIZE = TypeAdapter(ByteSize)


def parse_bytes(value: object) -> int:
    """Bytes from an int or a text such as ``"8GiB"`` or ``"512 MB"``.

    Raises:
        ValueError: quoting a value that is no size.
    """
    try:
        if isinstance(value, int | str) and not isinstance(value, bool):
            return int(_BYTE_SIZE.validate_python(value))
    except ValidationError:
        pass
    raise ValueError(f"must be a size in bytes such as 64MiB, got {value!r}")


@dataclass(frozen=True)
class DatasetSpec:
    """A table to cache and the rows and columns to keep of it.

    Args:
        name: letters, digits, ``.``, ``_`` and ``-``; at most 128 characters.
        source: a file, a directory, a glob or a ``file://`` URI, or several of them. A relative
            path is taken from the working directory of whoever writes the spec. The nodes must
            be able to read it under the same path. Rows keep this order: sources as given, the
            files of one source by name, the rows of a file as they stand in it.
        format: one of ``parquet``, ``arrow``, ``csv``, ``json`` (one object a line). Default: by
            the file names.
        sql: a row-wise query (projection, filter, unnest) over the table ``source``.
        columns: shortcut for ``sql``: the columns to keep, in this order.
        filter: shortcut for ``sql``: an SQL condition over the columns of ``source``.
        replicas: on how many nodes each shard is held.
        target_shard_bytes: decoded bytes of a shard, about; an int or a text such as ``64MiB``.

    Raises:
        ConfigError: quoting every bad field.
    """

    name: str
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
    format: str | None = None
    sql: str | None = None
    columns: Iterable[str] | None = None
    filter: str | None = None
    replicas: int = 1
    target_shard_bytes: int | str = DEFAULT_TARGET_SHARD_BYTES

    # The keyword-only part is spelt by hand, so that the fields above stay in one place.
    def __init__(
        self,
        name: str,
        source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        format: str | None = None,  # the word users know
        sql: str | None = None,
        columns: Iterable[str] | None = None,
        filter: str | None = None,
        replicas: int = 1,
        target_shard_bytes: int | str = DEFAULT_TARGET_SHARD_BYTES,
    ) -> None:
        problems: list[str] = []
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            problems.append(
                "name must be 1 to 128 letters, digits, '.', '_' or '-', starting with a letter "
                f"or digit, got {name!r}"
            )
        sources = _sources(source, problems)
        if format is not None and format not in FORMATS:
            problems.append(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
        if sql is not None and (not isinstance(sql, str) or not sql.strip()):
            problems.append(f"sql must be a query over the table 'source', got {sql!r}")
        if sql is not None and (columns is not None or filter is not None):
            problems.append("sql cannot be combined with columns or filter: write them in the sql")
        if filter is not None and (not isinstance(filter, str) or not filter.strip()):
            problems.append(f"filter must be an SQL condition, got {filter!r}")
        names = _columns(columns, problems)
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
            problems.append(f"replicas must be a number of at least 1, got {replicas!r}")
        elif replicas > _MAX_REPLICAS:
            problems.append(f"replicas must be at most {_MAX_REPLICAS}, got {replicas}")
        shard_bytes = 0
        try:
            shard_bytes = parse_bytes(target_shard_bytes)
            if not 1 <= shard_bytes <= _MAX_SHARD_BYTES:
                problems.append(
                    f"target_shard_bytes must be from 1 byte to 1 PiB, got {target_shard_bytes!r}"
                )
        except ValueError as error:
            problems.append(f"target_shard_bytes {error}")
        if problems:
            raise ConfigError("bad dataset spec: " + "; ".join(problems))
        values: dict[str, object] = {
            "name": name,
            "source": sources,
            "format": format,
            "sql": sql,
            "columns": names,
            "filter": filter,
            "replicas": replicas,
            "target_shard_bytes": shard_bytes,
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def to_proto(self) -> pb.DatasetSpec:
        """The wire form."""
        return pb.DatasetSpec(
            name=self.name,
            source=self.source,  # type: ignore[arg-type]  # a tuple of str after __init__
            format=self.format or "",
            sql=self.sql or "",
            columns=self.columns or (),
            filter=self.filter or "",
            replicas=self.replicas,
            target_shard_bytes=int(self.target_shard_bytes),
        )

    @classmethod
    def from_proto(cls, spec: pb.DatasetSpec) -> DatasetSpec:
        """The spec of a message; validated like any other."""
        return cls(
            spec.name,
            list(spec.source),
            format=spec.format or None,
            sql=spec.sql or None,
            columns=list(spec.columns) or None,
            filter=spec.filter or None,
            replicas=spec.replicas or 1,
            target_shard_bytes=spec.target_shard_bytes or DEFAULT_TARGET_SHARD_BYTES,
        )

    @classmethod
    def from_mapping(cls, mapping: object) -> DatasetSpec:
        """The spec of a mapping with the argument names as keys.

        Raises:
            ConfigError: for something else than a mapping, unknown keys and missing ones.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"a dataset spec must be a mapping, got {mapping!r}")
        known = [field.name for field in fields(cls)]
        unknown = [key for key in mapping if key not in known]
        if unknown:
            raise ConfigError(
                f"unknown key {', '.join(map(repr, unknown))} in the dataset spec; "
                f"known keys: {', '.join(known)}"
            )
        missing = [key for key in ("name", "source") if key not in mapping]
        if missing:
            raise ConfigError(f"the dataset spec lacks {', '.join(missing)}")
        arguments: dict[str, Any] = dict(mapping)
        return cls(arguments.pop("name"), arguments.pop("source"), **arguments)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> DatasetSpec:
        """The spec in a YAML file.

        Raises:
            ConfigError: when the file cannot be read, is no YAML, or is no spec; names the file.
        """
        try:
            mapping = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the dataset spec {path}: {error.strerror}") from None
        except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or no such date
            raise ConfigError(f"{path} is not YAML: {error}") from None
        try:
            return cls.from_mapping(mapping)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def _is_list(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether ``value`` holds several things in an order of their own."""
    unordered = isinstance(value, str | bytes | os.PathLike | Mapping | Set)
    return isinstance(value, Iterable) and not unordered


def _sources(source: object, problems: list[str]) -> tuple[str, ...]:
    items = list(source) if _is_list(source) else [source]
    result = []
    for item in items:
        if not isinstance(item, str | os.PathLike) or not os.fspath(item):
            problems.append(f"source must be a path, glob or URI, got {item!r}")
            continue
        text = str(os.fspath(item))
        result.append(text if _URI.match(text) else os.path.abspath(text))
    if not items:
        problems.append("source must name at least one path, glob or URI, got an empty list")
    return tuple(result)


def _columns(columns: object, problems: list[str]) -> tuple[str, ...] | None:
    if columns is None:
        return None
    if not _is_list(columns):
        problems.append(f"columns must be a list of column names, got {columns!r}")
        return None
    names = list(columns)
    bad = [name for name in names if not isinstance(name, str) or not name]
    if bad or not names:
        problems.append(f"columns must be a list of column names, got {names!r}")
        return None
    if len(set(names)) != len(names):
        problems.append(f"columns must not repeat a name, got {names!r}")
    return tuple(names)
