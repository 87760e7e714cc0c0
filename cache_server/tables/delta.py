"""Delta Lake tables: a root and a version -> the files of its log -> a split a file.

Only this module imports deltalake, which reads the log and the deletion vectors. The Parquet files
are read one by one, so that rows keep their order. Features that this does not support, such as
column mapping, are refused by name before a row is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler

from cache_protocol.datasets.dataset_spec import TableSpec
from cache_protocol.errors import LoadError, RequestError, some_of
from cache_protocol.storage.layout import GUESSED_VALUE_BYTES
from cache_server.object_stores.client import Location, kind_of
from cache_server.object_stores.connections import pass_for, settings_for_delta
from cache_server.source.listings import DELTA_LOG
from cache_server.source.pinned import Pin, PinnedTable, SourceFile, Split, source_column
from cache_server.tables import footers, lake, plain_files
from cache_server.tables.column_sizes import Place, value_bytes

# Supported reader features, or ones that do not change what is read.
_HONOURED_FEATURES = {
    "deletionVectors",
    "timestampNtz",
    "v2Checkpoint",
    "columnMapping",  # if its mode is none
}
_MAPPING_MODE = "delta.columnMapping.mode"
_MAX_READER_VERSION = 3
# deltalake's names of S3's settings; those of other stores have plain names.
_S3_NAMES = {
    "endpoint": "AWS_ENDPOINT_URL",
    "role_arn": "AWS_IAM_ROLE_ARN",
    "role_session_name": "AWS_IAM_ROLE_SESSION_NAME",
    "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
    "region": "AWS_REGION",
    "allow_http": "AWS_ALLOW_HTTP",
    "skip_signature": "AWS_SKIP_SIGNATURE",
    "virtual_hosted_style_request": "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    "unsigned_payload": "AWS_UNSIGNED_PAYLOAD",
    "imdsv1_fallback": "AWS_IMDSV1_FALLBACK",
}
_SECONDS = {"connect_timeout": "connect_timeout", "timeout": "timeout",
            "retry_timeout_s": "retry_timeout"}  # fmt: skip
_FOOTER_THREADS = 8
# deltalake's messages: no log, a log with a gap, and each version next to the gap.
_NO_LOG = "No files in log segment"
_GAP = "Expected contiguous commit files"
_LOGGED = re.compile(r"version: (\d+), file_type: Commit")


@dataclass(frozen=True)
class _State:
    """Identifies a version: kept in `PinnedTable.snapshot`, so without secrets.

    Attributes:
        table_id: differs if another table replaced this one.
    """

    uri: str
    version: int
    table_id: str

    def to_json(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True)

    def __str__(self) -> str:
        return f"{self.uri} version {self.version}"


@dataclass(frozen=True)
class _File:
    """One file of a version.

    Attributes:
        path: relative to the root of the table, as in the store.
        num_rows: before any deletion vector; None if the log does not tell.
        written: milliseconds since 1970.
        partition: the value of each partition column, with its type.
        keep: a mask of live rows, in order; rows past its end are live. None: all are live.
    """

    path: str
    size: int
    num_rows: int | None
    written: int
    partition: Mapping[str, pa.Scalar]
    keep: pa.BooleanArray | None

    @property
    def deletes(self) -> str:
        """Identifies the rows that are not live; empty if all are."""
        if self.keep is None:
            return ""
        return hashlib.sha256(self.keep.to_numpy(zero_copy_only=False).tobytes()).hexdigest()


@dataclass(frozen=True)
class _Version:
    """A version of a table, with its files by the URI in their splits."""

    schema: pa.Schema
    files: Mapping[str, _File]
    filesystem: pa.fs.FileSystem


_VERSIONS = lake.OpenedSnapshots[_Version]()


def pin(table: TableSpec) -> Pin:
    """The version that ``table`` names, or the current one.

    Splits are ordered by the time that their file was written, then by path. So rows that are added
    come last.

    Raises:
        LoadError: there is no table, or its log cannot be read.
        RequestError: the table does not have the version, or needs an unsupported feature: column
            mapping, a type that Arrow lacks, an unknown feature.
    """
    if len(table.source) != 1:
        raise RequestError(
            f"a Delta table has one source, its root; got {len(table.source)}: "
            f"{some_of(table.source)}"
        )
    (uri,) = table.source
    what = f"Delta table {uri}"
    if isinstance(table.snapshot, str):
        raise RequestError(
            f"{what} has no snapshot {table.snapshot!r}: its versions have numbers, without quotes"
        )
    with lake.naming(what, table.options, table.secrets):
        storage = _storage_options(uri, table.options, table.secrets)
        opened = _open(uri, table.snapshot, storage)
        version = _version(opened, storage, f"{what} version {opened.version()}")
        state = _State(uri, opened.version(), str(opened.metadata().id))
        files = _counted(version)

    @lru_cache(maxsize=lake.MOST_FOOTERS)
    def footer_of(data: lake.DataFile) -> lake.Footer:
        path = data.file.path
        with lake.naming(f"file {path} of {what}", table.options, table.secrets):
            return _footer(version, version.files[path])

    def cut(stored_schema: pa.Schema, target_bytes: int) -> tuple[Split, ...]:
        with lake.naming(what, table.options, table.secrets):
            return lake.cut(files, stored_schema, footer_of)

    return Pin(
        schema=version.schema,
        content=_content(state, version),
        cut=cut,
        snapshot=state.to_json(),
        split_content=json.dumps([state.table_id, *_columns(version)]),
        bytes_by=lake.bytes_by(len(files)),
        exact_rows=all(file.keep is None for file in version.files.values()),
    )


def read(table: PinnedTable, split: Split, secrets: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """The live rows of one file, in order. Thread-safe.

    Args:
        secrets: of the store.

    Raises:
        LoadError: the file or the log cannot be read, or another table replaced the pinned one;
            names the file.
    """
    state, version, file = _file_of(table, split, secrets)
    with lake.naming(f"file {split.file.path} of Delta table {state}", table.options, secrets):
        yield from _rows(version, file, table.read_schema)


def plain_file(
    table: PinnedTable, split: Split, secrets: Mapping[str, str]
) -> plain_files.PlainFile | None:
    """The file, if it holds the rows of the split as they are.

    It then has no deletion vector, and each column that is read has the name and the type of the
    table, or is not in the file.

    Raises:
        as `read`.
    """
    state, version, file = _file_of(table, split, secrets)
    if file.keep is not None:
        return None
    path = split.file.path
    what = f"file {path} of Delta table {state}"
    named = partial(lake.naming, what, table.options, secrets)
    with named():
        opened = partial(version.filesystem.open_input_file, file.path)
        footer = plain_files.footer_of(opened)
        stored = _stored_names(footer.schema.to_arrow_schema())
        absent = {
            field.name: file.partition.get(field.name, pa.scalar(None)).cast(field.type)
            for field in table.read_schema
            if field.name in file.partition or field.name.lower() not in stored
        }
        if not plain_files.is_plain(footer, split, table.read_schema, absent):
            return None
    uri = urlsplit(path)
    local = Path(unquote(uri.path)) if uri.scheme == "file" else None
    return plain_files.PlainFile(local, opened, footer, named, absent)


def _file_of(
    table: PinnedTable, split: Split, secrets: Mapping[str, str]
) -> tuple[_State, _Version, _File]:
    state = _State(**json.loads(table.snapshot))
    with lake.naming(f"Delta table {state}", table.options, secrets):
        version = _loaded(state, table.options, secrets)
    file = version.files.get(split.file.path)
    if file is None:
        raise LoadError(f"Delta table {state} has no file {split.file.path}")
    return state, version, file


def _open(uri: str, version: int | None, storage: dict[str, str]) -> DeltaTable:
    try:
        return DeltaTable(uri, version=version, storage_options=storage)
    except Exception as error:
        text = str(error)
        if _NO_LOG in text and version is None:
            raise ValueError(f"there is no such table: it has no log ({DELTA_LOG})") from None
        if _GAP in text:
            before, after = (int(number) for number in _LOGGED.findall(text)[:2])
            lacking = f"version {before + 1}"
            if before + 2 < after:
                lacking += f" to {after - 1}"
            raise ValueError(f"its log lacks {lacking}") from None
        if version is None:
            raise
        latest = _open(uri, None, storage).version()
        if version <= latest:
            raise ValueError(
                f"the log of version {version} is gone or unreadable: {error}"
            ) from None
        raise RequestError(
            f"Delta table {uri} has no version {version}; its versions go up to {latest}"
        ) from None


def _storage_options(
    uri: str, options: Mapping[str, str], secrets: Mapping[str, str]
) -> dict[str, str]:
    kind = kind_of(uri)
    settings = settings_for_delta(kind, options, secrets)
    way = pass_for(Location.of(uri), options, secrets, mixes=True) if kind else None
    if way is not None:
        settings["proxy_url"] = way.url
    for ours, theirs in _SECONDS.items():
        if ours in settings:
            settings[theirs] = f"{settings.pop(ours)}s"
    if kind != "s3":
        return settings
    if settings.get("endpoint", "").startswith("http://"):
        settings.setdefault("allow_http", "true")
    if "endpoint" in settings:
        settings.setdefault("region", "us-east-1")  # used to sign, but not looked up by deltalake
    return {_S3_NAMES.get(name, name): value for name, value in settings.items()}


def _version(table: DeltaTable, storage: dict[str, str], what: str) -> _Version:
    """Everything in the log about the open version."""
    _check_features(table, what)
    schema = lake.plain_schema(pa.schema(table.schema().to_arrow()))
    partition_columns = table.metadata().partition_columns
    for name in partition_columns:
        if pa.types.is_binary(schema.field(name).type):  # deltalake reads the escapes as a string
            raise RequestError(
                f"{what} is partitioned by {name}, which is binary: such values cannot be read here"
            )
    root = table.table_uri.rstrip("/")
    vectors = _deletion_vectors(table)
    files = {}
    for add in pa.table(table.get_add_actions()).to_batches():
        for i in range(add.num_rows):
            logged = add.column("path")[i].as_py()
            path = unquote(logged)
            if urlsplit(path).scheme:
                raise RequestError(
                    f"{what} has a file outside of its root, {path}, which cannot be read here"
                )
            values = add.column("partition")[i] if partition_columns else {}
            uri = f"{root}/{logged}"
            files[uri] = _File(
                path,
                add.column("size_bytes")[i].as_py(),
                add.column("num_records")[i].as_py(),
                add.column("modification_time")[i].as_py(),
                {name: values[name] for name in partition_columns},
                vectors.pop(uri, None),
            )
    if vectors:
        raise LoadError(f"{what} has a deletion vector for an unknown file: {min(vectors)}")
    sizes = {file.path: file.size for file in files.values()}
    store = DeltaStorageHandler(table.table_uri, storage, sizes)
    as_written = sorted(files.items(), key=lambda item: (item[1].written, item[0]))
    return _Version(schema, dict(as_written), pa.fs.PyFileSystem(store))


def _deletion_vectors(table: DeltaTable) -> dict[str, pa.BooleanArray]:
    """The masks of live rows, by the URI of the file."""
    vectors = {}
    for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
        for row in range(batch.num_rows):
            uri = batch.column("filepath")[row].as_py()
            vectors[uri] = batch.column("selection_vector")[row].values
    return vectors


def _check_features(table: DeltaTable, what: str) -> None:
    protocol = table.protocol()
    mode = table.metadata().configuration.get(_MAPPING_MODE, "none")
    if mode != "none":
        raise RequestError(
            f"{what} has column mapping (mode {mode}), which is not honoured here: rewrite the "
            "table without it"
        )
    if protocol.min_reader_version > _MAX_READER_VERSION:
        raise RequestError(
            f"{what} needs reader version {protocol.min_reader_version}; here it is at most "
            f"{_MAX_READER_VERSION}"
        )
    unknown = sorted(set(protocol.reader_features or ()) - _HONOURED_FEATURES)
    if unknown:
        raise RequestError(
            f"{what} needs reader features that are not honoured here: {some_of(unknown)}"
        )


def _counted(version: _Version) -> list[lake.DataFile]:
    """Each file with its number of rows, from its footer if the log does not tell."""

    def rows(file: _File) -> int:
        if file.num_rows is not None:
            return file.num_rows
        return int(_fragment(version, file).count_rows())

    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        counts = pool.map(rows, version.files.values())
        return [
            lake.DataFile(
                SourceFile(uri, file.size, 0),
                count,
                0 if file.keep is not None else min(file.size, lake.MOST_GROUP_BYTES),
                deletes=file.deletes,
            )
            for (uri, file), count in zip(version.files.items(), counts, strict=True)
        ]


def _content(state: _State, version: _Version) -> list[object]:
    files = [[file.path, file.size, file.keep is not None] for file in version.files.values()]
    return ["delta", state.table_id, state.version, _columns(version), files]


def _columns(version: _Version) -> list[list[str]]:
    return [[field.name, str(field.type)] for field in version.schema]


def _loaded(state: _State, options: Mapping[str, str], secrets: Mapping[str, str]) -> _Version:
    """The pinned version, opened once for all its splits."""
    return _VERSIONS.get(state, options, secrets, lambda: _reopen(state, options, secrets))


def _reopen(state: _State, options: Mapping[str, str], secrets: Mapping[str, str]) -> _Version:
    storage = _storage_options(state.uri, options, secrets)
    opened = _open(state.uri, state.version, storage)
    found = str(opened.metadata().id)
    if found != state.table_id:
        raise LoadError(
            f"Delta table {state} changed since the dataset was planned: its id was "
            f"{state.table_id}, now {found}"
        )
    return _version(opened, storage, f"Delta table {state}")


def _fragment(version: _Version, file: _File) -> ds.ParquetFileFragment:
    return lake.PARQUET.make_fragment(file.path, filesystem=version.filesystem)


def _footer(version: _Version, file: _File) -> lake.Footer:
    with version.filesystem.open_input_file(file.path) as opened:
        footer = footers.of_file(opened)
    stored = _stored_names(footer.schema.to_arrow_schema())

    def place(field: pa.Field) -> Place:
        source = source_column(field)
        if not source:
            return GUESSED_VALUE_BYTES
        if source in file.partition:
            return value_bytes(field, file.partition[source].as_py())
        return stored.get(source.lower(), source)

    return footer, place


def _stored_names(schema: pa.Schema) -> dict[str, str]:
    """The columns of a file by their lower-case names, which are unique in a table."""
    return {name.lower(): name for name in schema.names}


def _rows(version: _Version, file: _File, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The live rows of ``file``; a column that it lacks is null."""
    with pq.ParquetFile(
        file.path, filesystem=version.filesystem, coerce_int96_timestamp_unit="us", pre_buffer=True
    ) as opened:
        stored = _stored_names(opened.schema_arrow)
        absent = {f.name: pa.scalar(None, f.type) for f in schema if f.name.lower() not in stored}
        constants = {**absent, **file.partition}
        present = [name for name in schema.names if name not in constants]
        start = 0
        for batch in lake.parquet_batches(opened, [stored[name.lower()] for name in present]):
            batch = batch.rename_columns(present)
            stop = start + batch.num_rows
            if file.keep is not None:
                keep = file.keep.slice(start, batch.num_rows)
                if len(keep) < batch.num_rows:
                    rest = pa.repeat(pa.scalar(True), batch.num_rows - len(keep))
                    keep = pa.concat_arrays([keep, rest])
                batch = batch.filter(keep)
            start = stop
            if batch.num_rows:
                yield from lake.conform(batch, schema, constants)
    if file.keep is not None and len(file.keep) > start:
        raise LoadError(
            f"the deletion vector of {file.path} is of {len(file.keep)} rows, the file of {start}"
        )
