"""Writes rows as a Parquet file, from which the cache then loads them: and again, after a loss.

Each write makes a folder, and an append adds a file to it. Knows pyarrow's file systems, and no
cache.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from cache_client.arrow_sources import ArrowSource, plain_batch, slices
from cache_protocol.errors import (
    ConfigError,
    LoadError,
    PermissionDeniedError,
    RequestError,
    StaleVersionError,
)
from cache_protocol.spec.dataset_spec import DatasetSpec
from cache_protocol.spec.secret_settings import URI

logger = logging.getLogger(__name__)

T = TypeVar("T")
_FOLDER = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9a-f]{8}")  # of one write
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
}
_MOST_LOADS = 20  # while appends that began later are faster
_REFUSALS = (ConfigError, RequestError, LoadError, PermissionDeniedError)


def write_through(
    spec: DatasetSpec,
    source: ArrowSource,
    before: DatasetSpec | None,
    load: Callable[[DatasetSpec], T],
) -> T:
    """Writes the rows as a file, and loads the dataset from its folder.

    If the load is refused, the file is removed. If its outcome is unknown, the file stays.

    Args:
        spec: of the dataset; its source is where folders are made.
        before: of the version to append to; None: make a folder.
        load: loads a spec.

    Raises:
        ConfigError: the place is not one for files. RequestError: ``before`` is elsewhere.
        LoadError: the file cannot be written. Or as ``load``.
    """
    (root,) = spec.source
    files, path = _file_system(root, spec)
    if before is None:
        folder = f"{spec.name}/{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{_random()}"
        spec = _with_source(spec, f"{root.rstrip('/')}/{folder}")
    else:
        spec = _appended(spec, before)
        folder = spec.source[0].removeprefix(root.rstrip("/")).strip("/")
        source = _with_columns_of(files, f"{path.rstrip('/')}/{folder}", source, spec.name)
    file = f"{path.rstrip('/')}/{folder}/{time.time_ns():020d}-{_random()}.parquet"
    _write_file(files, file, source, spec.target_shard_bytes, is_hidden=before is not None)
    overtaken = retry_if_exception_type(StaleVersionError)  # by a version with this file, too
    try:
        return Retrying(retry=overtaken, stop=stop_after_attempt(_MOST_LOADS), reraise=True)(
            load, spec
        )
    except _REFUSALS:
        _remove(files, file)
        raise


def _appended(spec: DatasetSpec, before: DatasetSpec) -> DatasetSpec:
    """The spec of the version before, with the secrets of ``spec``, and as many replicas."""
    root, name = spec.source[0].rstrip("/"), spec.name
    start, _, last = before.source[0].rstrip("/").rpartition("/")
    if len(before.source) > 1 or not _FOLDER.fullmatch(last) or not start.startswith(f"{root}/"):
        raise RequestError(
            f"cannot append to {name!r} through {root!r}: its rows come from "
            f"{', '.join(before.source)}, and no write through {root!r} made that"
        )
    content = before.to_proto()
    content.name = name
    content.replicas = max(before.replicas, spec.replicas)
    content.readers.extend(reader for reader in spec.readers if reader not in before.readers)
    return DatasetSpec.from_proto(content, spec.secrets_to_proto())


def _with_columns_of(files: Any, folder: str, source: ArrowSource, name: str) -> ArrowSource:
    """The rows with the columns in the order of the files that are there.

    Raises:
        RequestError: they have other columns. LoadError: the files cannot be read.
    """
    from pyarrow import fs, parquet

    with _failing_as_load(folder, "read"):
        there = [file.path for file in files.get_file_info(fs.FileSelector(folder))]
        shown = sorted(path for path in there if not path.rpartition("/")[2].startswith("."))
        known = parquet.read_schema(shown[0], filesystem=files).remove_metadata()
    if sorted(map(str, known)) != sorted(map(str, source.schema)):
        raise RequestError(
            f"cannot append to {name!r}, which has other columns: {known.to_string()!r}, and the "
            f"rows have {source.schema.to_string()!r}. Cast the rows, or write all rows again "
            "without append"
        )
    batches = (plain_batch(batch, known) for batch in source.batches)
    return replace(source, schema=known, batches=batches)


def _with_source(spec: DatasetSpec, folder: str) -> DatasetSpec:
    content = spec.to_proto()
    content.tables[0].source[:] = [folder]
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
        plain = name.removeprefix("aws_").removeprefix("s3.")
        if plain in _S3_ARGUMENTS:
            arguments[_S3_ARGUMENTS[plain]] = value
    if "endpoint_override" in arguments:
        scheme, _, address = arguments["endpoint_override"].rpartition("://")
        arguments |= {"endpoint_override": address, "scheme": scheme or "https"}
    return arguments


def _write_file(
    files: Any, path: str, source: ArrowSource, row_group_bytes: int, *, is_hidden: bool
) -> None:
    """Writes a Parquet file.

    Args:
        is_hidden: until it is complete, by a name that loads skip. A store copies the file for its
            second name.
    """
    from pyarrow import parquet

    folder, _, name = path.rpartition("/")
    written = f"{folder}/.{name}" if is_hidden else path
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
        with _failing_as_load(path):
            if is_hidden:
                files.move(written, path)
    except BaseException:
        _remove(files, written)
        raise


@contextmanager
def _failing_as_load(path: str, what: str = "write") -> Iterator[None]:
    try:
        yield
    except (OSError, IndexError, pa.ArrowException) as error:
        raise LoadError(f"cannot {what} {path}: {str(error).partition(chr(10))[0]}") from None


def _remove(files: Any, path: str) -> None:
    try:
        files.delete_file(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("file not removed path=%s reason=%s", path, error)
