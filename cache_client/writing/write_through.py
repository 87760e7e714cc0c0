"""Writes rows as a Parquet file, from which the cache then loads them: and again, after a loss.

Each write makes a folder, and an append adds a file to it. Knows pyarrow's file systems, and no
cache.
"""

from __future__ import annotations

import base64
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from cache_client.writing.arrow_sources import ArrowSource, conformed, slices
from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.datasets.secret_settings import URI
from cache_protocol.errors import (
    ConfigError,
    LoadError,
    RequestError,
    SchemaError,
    StaleVersionError,
    UnauthenticatedError,
    some_of,
)
from cache_protocol.storage.lossless import column_problems, require_no_nulls

logger = logging.getLogger(__name__)

T = TypeVar("T")
_FOLDER = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9a-f]{8}")  # of one write
_NUMBER = re.compile(r"([0-9]{20})-[0-9a-f]{8}\.parquet")  # of a file: loads read in this order
_WRITTEN_SCHEMA = b"ARROW:schema"  # pyarrow keeps there what it was given
_S3_ARGUMENTS = {  # options of a spec, without their prefix -> arguments of pyarrow
    "access_key_id": "access_key",
    "secret_access_key": "secret_key",
    "session_token": "session_token",
    "token": "session_token",
    "region": "region",
    "default_region": "region",
    "endpoint": "endpoint_override",
    "endpoint_url": "endpoint_override",
    "endpoint_url_s3": "endpoint_override",
    "role_arn": "role_arn",
    "role_session_name": "session_name",
    "external_id": "external_id",
    "skip_signature": "anonymous",
    "anonymous": "anonymous",
    "virtual_hosted_style_request": "force_virtual_addressing",
    "force_virtual_addressing": "force_virtual_addressing",
}
_FLAGS = ("anonymous", "force_virtual_addressing")
_OF_READERS = ("allow_http", "connect_timeout", "timeout", "max_retries", "retry_timeout_s")
_MOST_LOADS = 20  # while appends that began later are faster
_REFUSALS = (ConfigError, RequestError, LoadError)


class Newest(NamedTuple):
    """The newest version of a dataset: its spec, and whether it has failed."""

    spec: DatasetSpec
    has_failed: bool


def write_through(
    spec: DatasetSpec,
    source: ArrowSource,
    before: Newest | None,
    load: Callable[[DatasetSpec], T],
) -> T:
    """Writes the rows as a file, and loads the dataset from its folder.

    If the load is refused, the file is removed. If its outcome is unknown, the file stays, and a
    warning names it.

    Args:
        spec: of the dataset; its source is where folders are made.
        before: the version to append to; None: make a folder.
        load: loads a spec; an append must not replace the rows of another source.

    Raises:
        ConfigError: the place is not one for files. RequestError: the version to append to is
            elsewhere, has other columns, or has NaN for nulls and ``spec`` refuses them.
        LoadError: the file cannot be written. Or as ``load``.
    """
    (root,) = spec.source
    files, path = _file_system(root, spec)
    sql = seconds_sql(source.schema)
    if before is None:
        folder = f"{spec.name}/{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{_random()}"
        spec = _with_source(spec, f"{root.rstrip('/')}/{folder}", sql)
    else:
        spec = _appended(spec, before.spec)
        folder = spec.source[0].removeprefix(root.rstrip("/")).strip("/")
    folder = f"{path.rstrip('/')}/{folder}"
    if before is not None:
        known = _known_schema(files, folder, spec.name, is_new=before.has_failed)
        if known is None:
            spec = _with_source(spec, spec.source[0], sql)
        else:
            source = _with_columns_of(known, source, spec.name)
    if spec.nulls == "refuse":
        source = replace(source, batches=map(_without_nulls, source.batches))
    file = _write_file(files, folder, source, spec.target_shard_bytes, is_hidden=before is not None)
    overtaken = retry_if_exception_type(StaleVersionError)  # by a version with this file, too
    try:
        return Retrying(retry=overtaken, stop=stop_after_attempt(_MOST_LOADS), reraise=True)(
            load, spec
        )
    except BaseException as error:
        # A token may expire while the load continues.
        if isinstance(error, _REFUSALS) and not isinstance(error, UnauthenticatedError):
            _remove(files, file)
        else:
            logger.warning("file stays, because its load may continue path=%s", file)
        raise


def _appended(spec: DatasetSpec, before: DatasetSpec) -> DatasetSpec:
    """The spec of the version before, with the secrets of ``spec``, and as many replicas."""
    root, name = spec.source[0].rstrip("/"), spec.name
    start, _, last = before.source[0].rstrip("/").rpartition("/")
    if len(before.source) > 1 or not _FOLDER.fullmatch(last) or not start.startswith(f"{root}/"):
        raise RequestError(
            f"cannot append to {name!r} through {root!r}: its rows come from "
            f"{some_of(before.source)}, and no write through {root!r} made that"
        )
    if spec.nulls == "refuse" != before.nulls:
        raise RequestError(
            f"cannot append to {name!r} with nulls='refuse': its nulls of floats become NaN. "
            "Append without nulls, or write all rows again without append"
        )
    content = before.to_proto()
    content.name = name
    content.replicas = max(before.replicas, spec.replicas)
    content.readers.extend(reader for reader in spec.readers if reader not in before.readers)
    return DatasetSpec.from_proto(content, spec.secrets_to_proto())


def _known_schema(files: Any, folder: str, name: str, *, is_new: bool) -> pa.Schema | None:
    """The columns of the files that are there, as they were written.

    Args:
        is_new: the folder may have no file yet: None.

    Raises:
        LoadError: the files cannot be read, or are gone.
    """
    from pyarrow import parquet

    with _failing_as_load(folder, "read"):
        shown = _shown(files, folder)
        if not shown and is_new:
            return None
        if not shown:
            raise LoadError(
                f"cannot append to {name!r}, because its files in {folder} are gone: write all "
                "rows again without append"
            )
        read = parquet.read_metadata(shown[0], filesystem=files)
        written = (read.metadata or {}).get(_WRITTEN_SCHEMA)
        if written is None:
            return read.schema.to_arrow_schema().remove_metadata()
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(written))).remove_metadata()


def _with_columns_of(known: pa.Schema, source: ArrowSource, name: str) -> ArrowSource:
    """The rows with the columns that are known.

    Raises:
        SchemaError: they have other ones. The batches raise it for a value.
    """
    if problems := column_problems(source.schema, known):
        raise SchemaError(
            f"cannot append to {name!r}: {some_of(problems, '; ')}. Cast the rows before you write "
            "them, or write all rows again without append"
        )
    return replace(source, schema=known, batches=conformed(source.batches, known))


def seconds_sql(schema: pa.Schema) -> str:
    """SQL that gives columns the types back that Parquet does not have; empty: there is none.

    Parquet has times of milliseconds and finer, and days of 32 bits.

    Raises:
        SchemaError: such a type is in a struct or a map.
    """
    columns, is_needed = [], False
    for field in schema:
        name = '"' + field.name.replace('"', '""') + '"'
        if _has_seconds(field.type):
            spelt = _spelt(field).replace("'", "''")
            name, is_needed = f"arrow_cast({name}, '{spelt}') AS {name}", True
        columns.append(name)
    return f"SELECT {', '.join(columns)} FROM source" if is_needed else ""


def _has_seconds(dtype: pa.DataType) -> bool:
    kinds = pa.types
    is_time = kinds.is_timestamp(dtype) or kinds.is_time(dtype)
    if kinds.is_date64(dtype) or (is_time and dtype.unit == "s"):
        return True
    return any(_has_seconds(dtype.field(place).type) for place in range(dtype.num_fields))


def _spelt(field: pa.Field) -> str:
    """The type of a column as DataFusion spells it, of times and lists of them."""
    kinds, dtype = pa.types, field.type
    if kinds.is_date64(dtype):
        return "Date64"
    if kinds.is_time(dtype):
        return "Time32(Second)"
    if kinds.is_timestamp(dtype):
        return f"Timestamp(Second, {f'Some({chr(34)}{dtype.tz}{chr(34)})' if dtype.tz else 'None'})"
    if kinds.is_list(dtype) or kinds.is_large_list(dtype) or kinds.is_fixed_size_list(dtype):
        inner = _spelt(field.with_type(dtype.value_type))
        if kinds.is_fixed_size_list(dtype):
            return f"FixedSizeList({dtype.list_size}, {inner})"
        return f"{'Large' if kinds.is_large_list(dtype) else ''}List({inner})"
    raise SchemaError(
        f"column {field.name!r} has {dtype}, and Parquet has no seconds and no date64 in it: cast "
        "them to timestamp[ms], time32[ms] or date32 before you write them through files"
    )


def _without_nulls(batch: pa.RecordBatch) -> pa.RecordBatch:
    floats = [field.name for field in batch.schema if pa.types.is_floating(field.type)]
    require_no_nulls({name: batch.column(name).null_count for name in floats})
    return batch


def _shown(files: Any, folder: str) -> list[str]:
    """The paths of the files that loads read, in their order."""
    from pyarrow import fs

    found = files.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    paths = (file.path for file in found)
    return sorted(path for path in paths if not path.rpartition("/")[2].startswith("."))


def _with_source(spec: DatasetSpec, folder: str, sql: str) -> DatasetSpec:
    content = spec.to_proto()
    content.tables[0].source[:] = [folder]
    content.sql = sql
    return DatasetSpec.from_proto(content, spec.secrets_to_proto())


def _random() -> str:
    return uuid.uuid4().hex[:8]


def _file_system(root: str, spec: DatasetSpec) -> tuple[Any, str]:
    """The file system of a path or URI, and the path there."""
    from pyarrow import fs  # slow to import

    if not URI.match(root):
        return fs.LocalFileSystem(), root
    scheme, _, path = root.partition("://")
    if scheme == "file":
        return fs.LocalFileSystem(), fs.FileSystem.from_uri(root)[1]
    if scheme not in ("s3", "s3a"):
        raise ConfigError(
            f"through must be a path that the nodes have too, or s3://BUCKET/PREFIX, got {root!r}: "
            "write Parquet files there by another library, and load them"
        )
    (table,) = spec.tables
    try:
        return fs.S3FileSystem(**_s3_arguments({**table.options, **table.secrets})), path
    except (ValueError, OSError) as error:
        raise ConfigError(f"bad storage_options of {root}: {error}") from None


def _s3_arguments(options: Mapping[str, str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        plain = name.replace("-", "_").removeprefix("aws_").removeprefix("s3.")
        argument = _S3_ARGUMENTS.get(plain)
        if argument is None and plain not in _OF_READERS:
            known = some_of(sorted({*_S3_ARGUMENTS, *_OF_READERS}), like=plain)
            raise ValueError(f"through cannot use {name!r}; it knows {known}")
        if argument is not None:
            arguments[argument] = value.lower() == "true" if argument in _FLAGS else value
    if "endpoint_override" in arguments:
        scheme, _, address = arguments["endpoint_override"].rpartition("://")
        arguments |= {"endpoint_override": address, "scheme": scheme or "https"}
    return arguments


def _write_file(
    files: Any, folder: str, source: ArrowSource, row_group_bytes: int, *, is_hidden: bool
) -> str:
    """Writes a Parquet file, the last one of its folder; returns its path.

    Args:
        is_hidden: until it is complete, by a name that loads skip. A store copies the file for its
            second name.
    """
    from pyarrow import parquet

    hidden = f"{folder}/.{_random()}.parquet"
    written = path = hidden if is_hidden else _next_path(files, folder)
    groups = slices(source.batches, lambda batch: int(batch.nbytes), row_group_bytes)
    try:
        with _failing_as_load(path):
            if files.type_name == "local":
                files.create_dir(folder)
            writer = parquet.ParquetWriter(written, source.schema, filesystem=files)
        try:
            for group in groups:
                table = pa.Table.from_batches(group)
                with _failing_as_load(path):
                    writer.write_table(table, row_group_size=table.num_rows)
        finally:
            with _failing_as_load(path):
                writer.close()
        if is_hidden:
            with _failing_as_load(folder):
                path = _next_path(files, folder)
                files.move(written, path)
    except BaseException:
        for name in {written, path}:  # a store copies first, and may then refuse the removal
            _remove(files, name)
        raise
    return path


def _next_path(files: Any, folder: str) -> str:
    """A path after those of all files in a folder, also if the clock of this machine is late."""
    numbers = [int(number) for number in _NUMBER.findall(" ".join(_shown(files, folder)))]
    return f"{folder}/{max([time.time_ns(), *(n + 1 for n in numbers)]):020d}-{_random()}.parquet"


@contextmanager
def _failing_as_load(path: str, what: str = "write") -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise LoadError(f"cannot {what} {path}: {str(error).partition(chr(10))[0]}") from None


def _remove(files: Any, path: str) -> None:
    try:
        files.delete_file(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("file not removed path=%s reason=%s", path, error)
