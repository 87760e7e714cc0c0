"""Shard files: write, seal, adopt, map, gather, slice.

    <cache_dir>/<dataset>/<fingerprint>/shard-00007.arrow     one Arrow IPC file, one record batch
    <cache_dir>/<dataset>/<fingerprint>/manifest.jsonl        a line for each sealed shard
    <cache_dir>/.lock, .node-id                               one process, one lasting name
    <cache_dir>/.scratch/                                     what is needed for a moment

A shard is written under a temporary name, checksummed, fsynced, renamed, then named in the
manifest, and from then on memory-mapped. A file that the manifest does not name, or whose checksum
differs, never counts. The store knows rows and files; it knows neither sources nor the network.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import xxhash

from cache_server.draft import ShardDraft
from cache_server.planning import VersionKey
from protos.errors import (
    ConfigError,
    InvalidRowsError,
    LoadError,
    NodeUnavailableError,
    NotReadyError,
)
from protos.layout import Layout, from_matrix
from protos.row_index import Ids, Indices, RowIndex, group_by_shard
from protos.shards import (
    MANIFEST,
    NODE_ID_FILE,
    MappedShard,
    Run,
    SealedShard,
    Selection,
    are_consecutive,
    empty_batch,
    gather,
    manifest_line,
    read_manifest,
    shard_file_name,
)

logger = logging.getLogger(__name__)

SCRATCH = ".scratch"
_CHECKSUM_CHUNK_BYTES = 256 * 1024  # stays in the processor's cache; a map costs page faults
_ROWS_PER_SHARD = 64  # of a request that is gathered at once, about; a message may have fewer


class ResidentRows:
    """The rows of one version that this node serves: an immutable snapshot, any thread.

    Args:
        key: for messages.
        layout: of the stored batches.
        num_rows: of the whole version.
        shards: each with its first row id.
    """

    def __init__(
        self, key: VersionKey, layout: Layout, num_rows: int, shards: Mapping[int, MappedShard]
    ) -> None:
        self.key = key
        self.layout = layout
        self.num_rows = num_rows
        ordered = sorted((start, s) for start, s in shards.items() if s.sealed.num_rows)
        self._shards = [shard for _, shard in ordered]
        self._starts = np.array([start for start, _ in ordered], np.int64)
        self._stops = self._starts + np.array([s.sealed.num_rows for s in self._shards], np.int64)
        self._index = RowIndex(self._starts, num_rows)
        self._whole = int((self._stops - self._starts).sum()) == num_rows

    def gather(
        self, row_ids: Ids, selection: Selection, rows_per_message: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """The rows of these ids, in this order, as stored batches of the selection.

        Consecutive ids are slices of the mapped files; others are copied, one short run of bytes a
        row.

        Args:
            rows_per_message: the most rows of a batch; 0: as many as there are.

        Raises:
            InvalidRowsError: for an id outside the dataset; before the first batch.
            NotReadyError: for an id of a shard that this node does not hold; likewise.
        """
        if not len(row_ids):
            yield empty_batch(selection.layout)
            return
        low, high = int(row_ids.min()), int(row_ids.max())
        self._check_bounds(low, high)
        first = self._shard_at(low)
        step, one_shard = rows_per_message or len(row_ids), high < self._stops[first]
        if are_consecutive(row_ids) and (one_shard or rows_per_message):
            self.check_range(low, high + 1)
            yield from self.slices(low, high + 1, step, selection)
        elif one_shard:
            shard, start = self._shards[first], int(self._starts[first])
            for at in range(0, len(row_ids), step):
                rows = row_ids[at : at + step]
                yield gather([Run(shard, start, 0, len(rows))], rows, selection)
        else:
            shard_of = self._locate(row_ids)
            # Each shard costs some calls: enough rows at once that there are some of each.
            block = -(-max(step, _ROWS_PER_SHARD * len(self._shards)) // step) * step
            for at in range(0, len(row_ids), block):
                stop = at + block
                batch = self._gather_some(row_ids[at:stop], shard_of[at:stop], selection)
                for start in range(0, batch.num_rows, step):
                    yield batch.slice(start, step)

    def check_range(self, start: int, stop: int) -> None:
        """Raises unless rows ``[start, stop)`` exist (InvalidRowsError) and are here (NotReady)."""
        if not 0 <= start <= stop <= self.num_rows:
            raise InvalidRowsError(
                f"rows [{start}, {stop}) are outside dataset {self.key.dataset!r}, "
                f"which has rows [0, {self.num_rows})"
            )
        at = start
        while at < stop:
            at = int(self._stops[self._shard_at(at)])

    def slices(
        self, start: int, stop: int, max_rows: int, selection: Selection
    ) -> Iterator[pa.RecordBatch]:
        """Rows ``[start, stop)`` as stored batches of at most ``max_rows``; check the range first.

        Whole columns are views of the mapped files.
        """
        at = start
        while at < stop:
            shard = self._shard_at(at)
            offset = at - int(self._starts[shard])
            rows = min(max_rows, stop - at, int(self._stops[shard]) - at)
            yield self._slice(self._shards[shard], offset, rows, selection)
            at += rows

    def _check_bounds(self, low: int, high: int) -> None:
        if low < 0 or high >= self.num_rows:
            bad = low if low < 0 else high
            raise InvalidRowsError(
                f"row id {bad} is outside dataset {self.key.dataset!r}, "
                f"which has rows [0, {self.num_rows})"
            )

    def _shard_at(self, row: int) -> int:
        """Index of the shard with this row."""
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        if shard < 0 or row >= self._stops[shard]:
            raise NotReadyError(f"row {row} of {self.key.dataset!r} is not on this node")
        return shard

    def _locate(self, row_ids: Ids) -> Indices:
        """Index of the shard of each row; the smallest id must be here."""
        shard_of = self._index.find(row_ids)
        if not self._whole:
            missing = row_ids >= self._stops[shard_of]
            if missing.any():
                self._shard_at(int(row_ids[np.argmax(missing)]))
        return shard_of

    def _gather_some(self, row_ids: Ids, shard_of: Indices, selection: Selection) -> pa.RecordBatch:
        grouped = group_by_shard(row_ids, shard_of)
        runs = [
            Run(self._shards[shard], int(self._starts[shard]), start, stop)
            for shard, start, stop in grouped.runs()
        ]
        return gather(runs, grouped.rows, selection, grouped.inverse)

    def _slice(
        self, shard: MappedShard, offset: int, rows: int, selection: Selection
    ) -> pa.RecordBatch:
        arrays: list[pa.Array] = []
        for pick, (index, positions) in enumerate(selection.picks):
            if positions is None:
                arrays.append(shard.batch.column(index).slice(offset, rows))
            else:
                part = shard.matrices[index][offset : offset + rows]
                field = selection.layout.columns[pick].field
                arrays.append(from_matrix(selection.narrow(pick, part), field))
        return pa.RecordBatch.from_arrays(arrays, schema=selection.layout.schema)


class ShardStore:
    """All shards of one node, in one directory that no other process uses. Thread-safe.

    Args:
        cache_dir: made when missing.
        memory_limit_bytes: of all shard files together; None for no limit but the file system's.

    Raises:
        ConfigError: when the directory cannot be made or another node uses it.
    """

    def __init__(self, cache_dir: Path, memory_limit_bytes: int | None = None) -> None:
        self.cache_dir = cache_dir
        self.memory_limit_bytes = memory_limit_bytes
        self._lock = threading.Lock()
        self._shards: dict[VersionKey, dict[int, MappedShard]] = {}
        self._reserved: dict[Path, int] = {}  # of files being written
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            self._lock_file = (cache_dir / ".lock").open("a+")
        except OSError as error:
            raise ConfigError(f"cannot use cache_dir {cache_dir}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock_file.close()
            raise ConfigError(f"cache_dir {cache_dir} is used by another cache node") from None
        self.node_id = self._load_node_id()
        shutil.rmtree(self.scratch, ignore_errors=True)  # of a process that was killed
        self._adopt_all()

    def __enter__(self) -> ShardStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forgets the maps and releases the directory; the files stay."""
        with self._lock:
            self._shards.clear()
        self._lock_file.close()

    @property
    def scratch(self) -> Path:
        """A folder for what is needed for a moment; emptied when the store opens."""
        return self.cache_dir / SCRATCH

    @property
    def stored_bytes(self) -> int:
        """Size of all sealed shard files."""
        with self._lock:
            return self._stored_bytes()

    def versions(self) -> dict[VersionKey, dict[int, MappedShard]]:
        """A copy of what is sealed: version -> shard index -> shard."""
        with self._lock:
            return {key: dict(shards) for key, shards in self._shards.items()}

    @contextlib.contextmanager
    def draft(
        self, key: VersionKey, index: int, layout: Layout, num_rows: int
    ) -> Iterator[ShardDraft]:
        """A file to fill and then to `seal` as shard ``index``; removed if it is not.

        Args:
            num_rows: at least 1; the rows of the shard, exactly.

        Raises:
            LoadError: when it does not fit in the memory limit or on the file system.
        """
        directory = self._directory(key)
        path = directory / _temporary_name(index)
        size = num_rows * layout.fixed_row_bytes
        self._reserve(path, size)
        try:
            try:
                self._create(path)
                draft = ShardDraft(path, layout, num_rows)
            except OSError as error:
                raise _cannot_write(key, index, size, directory, error) from None
            with draft:
                yield draft
        finally:
            _remove_file(path)
            self._release(path)
            self._remove_empty(directory)

    def seal(
        self, key: VersionKey, index: int, batch: pa.RecordBatch, draft: ShardDraft | None = None
    ) -> MappedShard:
        """Writes ``batch`` as shard ``index`` and maps it.

        Args:
            draft: from `draft`, whose columns those of ``batch`` are.

        Raises:
            LoadError: when it does not fit in the memory limit or on the file system; nothing is
                left behind.
        """
        size = batch.nbytes
        temporary = self._directory(key) / _temporary_name(index) if draft is None else draft.path

        def write() -> SealedShard:
            if draft is not None:
                draft.complete(batch)
            else:
                write_shard_file(temporary, batch)
            num_bytes = temporary.stat().st_size
            return SealedShard(index, batch.num_rows, num_bytes, file_checksum(temporary))

        return self._keep(key, index, temporary, size, write)

    def receive(
        self, key: VersionKey, sealed: SealedShard, chunks: Iterable[pa.Buffer]
    ) -> MappedShard:
        """Keeps the file of a shard that was sealed elsewhere.

        Args:
            chunks: the bytes of the file, in order.

        Raises:
            NodeUnavailableError: they are not the bytes that were sealed. LoadError: they do not
                fit in the memory limit or on the file system. Nothing is left behind.
        """
        temporary = self._directory(key) / _temporary_name(sealed.index)

        def write() -> SealedShard:
            with temporary.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
            if file_checksum(temporary) != sealed.checksum:
                raise NodeUnavailableError(
                    f"shard {sealed.index} of {key.dataset!r} did not arrive as it was sealed"
                )
            return sealed

        return self._keep(key, sealed.index, temporary, sealed.num_bytes, write)

    def _keep(
        self,
        key: VersionKey,
        index: int,
        temporary: Path,
        size: int,
        write: Callable[[], SealedShard],
    ) -> MappedShard:
        """Has a file written under a temporary name, and makes a sealed shard of it."""
        directory = self._directory(key)
        final = directory / shard_file_name(index)
        self._reserve(temporary, size)
        try:
            self._create(temporary)
            sealed = write()
            _fsync(temporary)
            os.replace(temporary, final)
            _fsync(directory)
            with (directory / MANIFEST).open("a", encoding="utf-8") as manifest:
                manifest.write(manifest_line(sealed))
                manifest.flush()
                os.fsync(manifest.fileno())
            shard = MappedShard(sealed, final)
        except OSError as error:
            _remove_file(final)
            raise _cannot_write(key, index, size, directory, error) from None
        finally:
            _remove_file(temporary)
            self._release(temporary)
            self._remove_empty(directory)
        with self._lock:
            self._shards.setdefault(key, {})[index] = shard
        logger.info(
            "shard sealed dataset=%s shard=%d rows=%d bytes=%d",
            key.dataset, index, sealed.num_rows, sealed.num_bytes,
        )  # fmt: skip
        return shard

    def drop(self, key: VersionKey, index: int) -> None:
        """Removes one shard. Readers that have it mapped keep their rows."""
        with self._lock:
            shards = self._shards.get(key, {})
            shard = shards.pop(index, None)
            if not shards:
                self._shards.pop(key, None)
        if shard is not None:
            shard.path.unlink(missing_ok=True)
            logger.info("shard dropped dataset=%s shard=%d", key.dataset, index)

    def drop_version(self, key: VersionKey) -> None:
        """Removes everything that was written for one version."""
        with self._lock:
            self._shards.pop(key, None)
        directory = self._directory(key)
        if directory.exists():
            shutil.rmtree(directory, ignore_errors=True)
            logger.info("version dropped dataset=%s fingerprint=%s", key.dataset, key.fingerprint)
        self._remove_empty(directory)

    def _directory(self, key: VersionKey) -> Path:
        return self.cache_dir / key.dataset / key.fingerprint

    def _create(self, path: Path) -> None:
        """Makes an empty file and the directories it needs, which `_remove_empty` leaves then."""
        with self._lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def _remove_empty(self, directory: Path) -> None:
        """Removes the directories of a version and of its dataset where nothing is left in them."""
        with self._lock:
            for path in (directory, directory.parent):
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()

    def _stored_bytes(self) -> int:
        return sum(s.sealed.num_bytes for v in self._shards.values() for s in v.values())

    def _reserve(self, path: Path, size: int) -> None:
        """Makes sure that there is room for a file, which may have some reserved already."""
        with self._lock:
            before = self._reserved.get(path, 0)
            held = self._stored_bytes() + sum(self._reserved.values()) - before
            limit = self.memory_limit_bytes
            if limit is not None and held + size > limit:
                raise LoadError(
                    f"a shard of {size} bytes does not fit: {held} of the memory limit of "
                    f"{limit} bytes are used"
                )
            free = shutil.disk_usage(self.cache_dir).free
            if size - before > free:
                raise LoadError(
                    f"a shard of {size} bytes does not fit in {self.cache_dir}: {free} bytes free"
                )
            self._reserved[path] = size

    def _release(self, path: Path) -> None:
        with self._lock:
            self._reserved.pop(path, None)

    def _load_node_id(self) -> str:
        path = self.cache_dir / NODE_ID_FILE
        if not path.exists() or not path.read_text(encoding="utf-8"):
            path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()

    def _adopt_all(self) -> None:
        for directory in sorted(self.cache_dir.glob("*/*/")):
            adopted = self._adopt(directory, read_manifest(directory / MANIFEST))
            sound = {shard.path for shard in adopted}
            for path in (*directory.glob("shard-*.arrow"), *directory.glob(".*.tmp")):
                if path not in sound:
                    logger.warning("file removed path=%s reason=damaged or never sealed", path)
                    _remove_file(path)
            # Without torn lines, which would spoil the next one to be added.
            _write_manifest(directory / MANIFEST, [shard.sealed for shard in adopted])
            self._remove_empty(directory)

    def _adopt(self, directory: Path, listed: Iterable[SealedShard]) -> list[MappedShard]:
        """Maps the listed shards whose files are sound."""
        key = VersionKey(directory.parent.name, directory.name)
        adopted = []
        for sealed in listed:
            path = directory / shard_file_name(sealed.index)
            try:
                shard = _map_sound(path, sealed)
            except (OSError, ValueError) as error:
                logger.warning("shard damaged path=%s reason=%s", path, error)
                continue
            self._shards.setdefault(key, {})[sealed.index] = shard
            adopted.append(shard)
            logger.info("shard adopted dataset=%s shard=%d", key.dataset, sealed.index)
        return adopted


def write_shard_file(path: Path, batch: pa.RecordBatch) -> None:
    """Writes a stored batch as one Arrow IPC file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def file_checksum(path: Path) -> str:
    """XXH3-128 of a file, as hexadecimal digits."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHECKSUM_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def _map_sound(path: Path, sealed: SealedShard) -> MappedShard:
    """Maps a file that must be the one that was sealed.

    Raises:
        OSError: it is missing. ValueError: it is another one, or of another layout.
    """
    size = path.stat().st_size
    if size != sealed.num_bytes:
        raise ValueError(f"{size} bytes instead of {sealed.num_bytes}")
    checksum = file_checksum(path)
    if checksum != sealed.checksum:
        raise ValueError(f"checksum {checksum} instead of {sealed.checksum}")
    return MappedShard(sealed, path)


def _write_manifest(path: Path, shards: Iterable[SealedShard]) -> None:
    """Replaces a manifest; removes it when there is no shard."""
    text = "".join(map(manifest_line, shards))
    if not text:
        _remove_file(path)
    elif path.read_text(encoding="utf-8", errors="replace") != text:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        _fsync(temporary)
        os.replace(temporary, path)


def _temporary_name(index: int) -> str:
    return f".{shard_file_name(index)}.{uuid.uuid4().hex}.tmp"


def _cannot_write(
    key: VersionKey, index: int, size: int, directory: Path, error: OSError
) -> LoadError:
    return LoadError(
        f"cannot write shard {index} of {key.dataset!r} ({size} bytes) to {directory}: "
        f"{error.strerror}"
    )


def _remove_file(path: Path) -> None:
    """Removes a file; none there, and none that could be there, is as good."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
