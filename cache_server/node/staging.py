"""Staging: whatever a table is made of, its splits become local files that the loader reads.

A file of this machine is read where it lies. The bytes of an object that a split needs are fetched
into a sparse file at their own places, so that it is cut and read like any other; the rows of any
other table are written as an Arrow file. A few splits are staged ahead while one is read. Small
files are read together: in one folder, where those of this machine are links. Nothing is left
behind. Knows neither queries nor shards.
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
from cache_server.source.pinned import PinnedTable, Split
from cache_server.sql.loader import LocalFile
from cache_server.tables import arrow_reader, files, parquet

# Staged at once for one shard: enough to hide the latency of a store behind the reading.
_MAX_AHEAD = 8
_MAX_AHEAD_BYTES = 64 * 1024 * 1024
# Below this, fetching a whole object costs less than asking where its columns are.
_MAX_WHOLE_BYTES = 4 * 1024 * 1024
# Whole files up to this size are read together, so many of them, and so many bytes, at once.
_MAX_SMALL_BYTES = 1024 * 1024
_MAX_GROUP_FILES, _MAX_GROUP_BYTES = 32, 8 * 1024 * 1024


def stage(
    table: PinnedTable, splits: Sequence[Split], secrets: Mapping[str, str], directory: Path
) -> Generator[tuple[LocalFile, ...], None, None]:
    """Local files with the rows of the splits, in order; they are there until the next are asked.

    Args:
        table: whose splits they are.
        directory: for what must be fetched; each call uses a folder of its own, and removes it.

    Returns:
        one file at a time, or several that may be read together: whole Parquet files with the same
        partition values, alone in a folder, their names in the order of their splits.

    Raises:
        LoadError: naming file, split and reason; also when a file changed since it was planned.
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

    Unlike the file format, it lets each batch have dictionaries of its own, and DataFusion reads it
    batch by batch.
    """
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _fetched(
    table: PinnedTable, splits: Sequence[Split], secrets: Mapping[str, str], directory: Path
) -> Generator[tuple[LocalFile, ...], None, None]:
    """Of splits that must be fetched, a few ahead."""
    folder = _new_folder(directory)
    # As many as the files that are read together: of small ones, most of the time is latency.
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
            files.check_unchanged(split.file)
        if len(group) == 1:
            yield (LocalFile(Path(group[0].file.path), table.format, group[0]),)
        else:
            yield from _linked(table, group, directory)
        for split in group:
            files.check_unchanged(split.file)


def _linked(
    table: PinnedTable, group: Sequence[Split], directory: Path
) -> Generator[tuple[LocalFile, ...], None, None]:
    """Links to the files of a group, alone in a folder."""
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
    """The splits in their order, runs of small files together."""
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
        path = target.with_suffix(".arrow")
        write_arrow(path, table.read_schema, tables.read(table, split, secrets))
        return LocalFile(path, "arrow", split)
    if table.is_for_arrow and not object_stores.is_remote(split.file.path):
        files.check_unchanged(split.file)
        decoded = _decoded(table, split, Path(split.file.path), target)
        files.check_unchanged(split.file)
        return decoded
    path = target.with_suffix(f".{table.format}")
    wanted, tail = None, b""
    if table.format == "parquet":
        wanted, tail = _wanted_ranges(table, split, secrets)
    object_stores.download(split.file, path, table.options, secrets, wanted, tail=tail)
    if table.is_for_arrow:
        return _decoded(table, split, path, target)
    return LocalFile(path, table.format, split)


def _decoded(table: PinnedTable, split: Split, path: Path, target: Path) -> LocalFile:
    """The rows of a split of Parquet that DataFusion would not read right."""
    decoded = target.with_suffix(".arrow")
    write_arrow(decoded, table.read_schema, arrow_reader.read(path, split, table))
    return LocalFile(decoded, "arrow", split)


def _wanted_ranges(
    table: PinnedTable, split: Split, secrets: Mapping[str, str]
) -> tuple[list[parquet.Range] | None, bytes]:
    """Which bytes of a Parquet object are needed, None for all of it, and its end, where known."""
    if split.parts == 1 and (split.file.size <= _MAX_WHOLE_BYTES or table.columns is None):
        return None, b""
    tail = b""

    def read_tail(num_bytes: int) -> bytes:
        nonlocal tail
        tail = object_stores.read_tail(split.file, num_bytes, table.options, secrets)
        return tail

    ranges = parquet.ranges(files.read_remote_footer(split.file, read_tail), split, table.columns)
    if sum(b - a for a, b in ranges) > split.file.size * 0.75:
        return None, b""
    return ranges, tail
