"""Staging: turns the splits of any table into local files for the loader.

- A local file is read in place.
- The bytes that a split needs of an object are downloaded to the same offsets of a sparse file.
- Parquet files of Iceberg and Delta tables are treated alike, if they hold the rows as they are.
- The rows of other tables are written as an Arrow file.

A few splits are staged ahead. Small files are read together, from one folder, which holds links to
local files. Staged files are removed. This module knows neither queries nor shards.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from cache_protocol.errors import LoadError
from cache_server import object_stores, tables
from cache_server.source import byte_ranges
from cache_server.source.pinned import PinnedTable, Split
from cache_server.sql.local_tables import LocalFile
from cache_server.tables import arrow_reader, footers, local_files, parquet

# Staged at once for one shard: enough to hide the latency of an object store.
_MAX_AHEAD = 8
_MAX_AHEAD_BYTES = 64 * 1024 * 1024
# A smaller object is downloaded whole: that costs less than reading its footer first.
_MAX_WHOLE_BYTES = 4 * 1024 * 1024
# Whole files up to this size are read in groups.
_MAX_SMALL_BYTES = 1024 * 1024
_MAX_GROUP_FILES, _MAX_GROUP_BYTES = 32, 8 * 1024 * 1024


def stage(
    table: PinnedTable, splits: Sequence[Split], secrets: Mapping[str, str], directory: Path
) -> Generator[tuple[LocalFile, ...], None, None]:
    """Local files with the rows of the splits, in order. Each lasts until the next is requested.

    Args:
        table: of the splits.
        directory: each call makes a folder in it, and removes the folder.

    Returns:
        One file at a time, or a group of whole Parquet files with equal partition values. A group
        has a folder, where the order of names is the order of splits.

    Raises:
        LoadError: names file, split and reason; also when a file changed since it was planned.
    """
    try:
        if (
            table.format in tables.FILE_FORMATS
            and not table.is_for_arrow
            and not any(object_stores.is_remote(split.file.path) for split in splits)
        ):
            yield from _read_in_place(table, splits, directory)
        else:
            yield from _fetched(table, splits, secrets, directory)
    except OSError as error:
        raise LoadError(f"cannot stage {table.name!r} in {directory}: {error.strerror}") from None


def write_arrow(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """Writes batches as one Arrow IPC stream that the loader reads.

    Unlike in the file format, each batch can have other dictionaries. DataFusion reads a stream
    batch by batch.
    """
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _fetched(
    table: PinnedTable, splits: Sequence[Split], secrets: Mapping[str, str], directory: Path
) -> Generator[tuple[LocalFile, ...], None, None]:
    """Stages splits that must be downloaded or decoded, a few ahead."""
    folder = _new_folder(directory)
    # One thread for each file of a group: for small files, most of the time is latency.
    pool = ThreadPoolExecutor(_MAX_GROUP_FILES, thread_name_prefix="stage")
    under_way: deque[tuple[Path, int, list[Future[LocalFile]]]] = deque()
    waiting = deque(enumerate(_groups(table, splits)))
    staged_bytes = 0
    try:
        while waiting or under_way:
            while waiting and (
                not under_way or (len(under_way) < _MAX_AHEAD and staged_bytes < _MAX_AHEAD_BYTES)
            ):
                number, group = waiting.popleft()
                place = folder / str(number)
                place.mkdir()
                fetches = [
                    pool.submit(_fetch, table, split, secrets, place / f"{index:06d}")
                    for index, split in enumerate(group)
                ]
                size = sum(split.file.size or split.estimated_bytes for split in group)
                under_way.append((place, size, fetches))
                staged_bytes += size
            place, size, fetches = under_way.popleft()
            yield tuple(fetch.result() for fetch in fetches)
            shutil.rmtree(place, ignore_errors=True)
            staged_bytes -= size
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(folder, ignore_errors=True)


def _new_folder(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=directory))


def _read_in_place(
    table: PinnedTable, splits: Sequence[Split], directory: Path
) -> Generator[tuple[LocalFile, ...], None, None]:
    for group in _groups(table, splits):
        for split in group:
            local_files.check_unchanged(split.file)
        if len(group) == 1:
            yield (_local(table, group[0], Path(group[0].file.path)),)
        else:
            yield from _linked(table, group, directory)
        for split in group:
            local_files.check_unchanged(split.file)


def _linked(
    table: PinnedTable, group: Sequence[Split], directory: Path
) -> Generator[tuple[LocalFile, ...], None, None]:
    """A folder with links to the files of a group."""
    folder = _new_folder(directory)
    try:
        linked = []
        for index, split in enumerate(group):
            link = folder / f"{index:06d}.{table.format}"
            link.symlink_to(split.file.path)
            linked.append(LocalFile(link, table.format, split))
        yield tuple(linked)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _groups(table: PinnedTable, splits: Sequence[Split]) -> Iterator[list[Split]]:
    """The splits in order; small files in groups."""
    group: list[Split] = []
    size = 0
    partition: dict[str, pa.Scalar] = {}  # of the group
    for split in splits:
        small = (
            table.format == "parquet"
            and not table.is_for_arrow
            and split.parts == 1
            and split.file.size <= _MAX_SMALL_BYTES
        )
        found = table.partition_of(split)
        if group and not (
            small
            and len(group) < _MAX_GROUP_FILES
            and size + split.file.size <= _MAX_GROUP_BYTES
            and found == partition
        ):
            yield group
            group, size = [], 0
        group.append(split)
        partition = found
        size += split.file.size if small else _MAX_GROUP_BYTES
    if group:
        yield group


def _fetch(table: PinnedTable, split: Split, secrets: Mapping[str, str], target: Path) -> LocalFile:
    if table.format not in tables.FILE_FORMATS:
        if (plain := tables.plain_file(table, split, secrets)) is not None:
            path = plain.local(table, split, target.with_suffix(".parquet"))
            row_bytes = plain.row_bytes(table)
            return LocalFile(path, "parquet", split, row_bytes=row_bytes, absent=plain.absent)
        path = target.with_suffix(".arrow")
        write_arrow(path, table.read_schema, tables.read(table, split, secrets))
        return LocalFile(path, "arrow", split, is_staged=True)
    if table.is_for_arrow and not object_stores.is_remote(split.file.path):
        local_files.check_unchanged(split.file)
        decoded = _decoded(table, split, Path(split.file.path), target)
        local_files.check_unchanged(split.file)
        return decoded
    path = target.with_suffix(f".{table.format}")
    wanted, tail = None, b""
    if table.format == "parquet":
        wanted, tail = _wanted_ranges(table, split, secrets)
    object_stores.download(split.file, path, table.options, secrets, wanted, tail=tail)
    if table.is_for_arrow:
        return _decoded(table, split, path, target)
    return _local(table, split, path)


def _local(table: PinnedTable, split: Split, path: Path) -> LocalFile:
    is_parquet = table.format == "parquet"
    row_bytes = parquet.read_row_bytes(path, split, table.read_schema) if is_parquet else 0
    return LocalFile(path, table.format, split, row_bytes=row_bytes)


def _decoded(table: PinnedTable, split: Split, path: Path, target: Path) -> LocalFile:
    """The rows of a split that only Arrow reads correctly."""
    decoded = target.with_suffix(".arrow")
    write_arrow(decoded, table.read_schema, arrow_reader.read(path, split, table))
    return LocalFile(decoded, "arrow", split, is_staged=True)


def _wanted_ranges(
    table: PinnedTable, split: Split, secrets: Mapping[str, str]
) -> tuple[list[byte_ranges.Range] | None, bytes]:
    """The needed bytes of a Parquet object (None: all of them), and its tail if it was read."""
    if split.parts == 1 and (split.file.size <= _MAX_WHOLE_BYTES or table.columns is None):
        return None, b""
    tail = b""

    def read_tail(num_bytes: int) -> bytes:
        nonlocal tail
        tail = object_stores.read_tail(split.file, num_bytes, table.options, secrets)
        return tail

    ranges = parquet.ranges(footers.read_remote_footer(split.file, read_tail), split, table.columns)
    if sum(b - a for a, b in ranges) > split.file.size * 0.75:
        return None, b""
    return ranges, tail
