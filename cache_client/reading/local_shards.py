"""Reads shard files of nodes on this machine, without their server.

A file is read only if it is certainly the one in the shard map: the cache directory names the same
node, its manifest has the shard with the same checksum, and the file has the same size. It must
belong to the owner of the manifest, and must not be newer. Some of its bytes are compared with the
checksum when it is mapped. All other shards are read over Flight.
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cache_client.flight.routing import ShardFile, ShardMap
from cache_protocol.errors import CacheError, ErasedRowsError, NotReadyError, some_of
from cache_protocol.storage.disk_reads import DiskReads
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.mapped_table import MAPS_PER_COLUMN, MappedTable
from cache_protocol.storage.row_index import Ids, Indices, RowIndex
from cache_protocol.storage.row_sets import among, decode_rows
from cache_protocol.storage.shard_files import (
    DIGEST_BYTES,
    MANIFEST,
    MAPS_PER_SHARD,
    NODE_ID_FILE,
    DamagedShardError,
    MappedShard,
    SealedShard,
    Selection,
    checksum_of,
    num_pieces,
    piece_digest,
    read_manifest,
    shard_file_name,
)

logger = logging.getLogger(__name__)

# By default Linux allows a process 65,530 memory maps; a process that runs out of them crashes.
_MAX_MAPS = 32_768
_FEW_FILES = 16  # a look at all of them costs less than to find those of a window
_SAMPLED_PIECES = 4  # of each file, of 1 MiB: about half a millisecond


class ShardFileLostError(CacheError):
    """A shard file was removed or replaced; its rows must be read over Flight."""


class LocalShards:
    """The shards whose files this process can read, of one or more versions. Thread-safe.

    A file is mapped read-only when its first row is asked for, and stays mapped as long as this
    object lives. So its rows can be read even after the node drops them.

    Args:
        shards: the shard map, with the files.
        columns: to gather, of ``shards.logical``; empty for all.

    Attributes:
        leased_at: monotonic seconds of the last renewal of the lease. `cache_client.reading.lease`
            sets it here, because a pass, and its `Lease` object, may be shorter than a lease.
    """

    def __init__(self, shards: ShardMap, columns: Sequence[str] = ()) -> None:
        self.leased_at = shards.leased_at
        self._starts = shards.starts
        self._index = RowIndex(shards.starts, shards.stop)
        self._columns = columns
        self._null_names = tuple(shards.layout.nulls.units)
        self._lock = threading.Lock()
        self._table: MappedTable | None = None
        self._selection: Selection | None = None
        self._layout: Layout | None = None  # of the files
        self._files: dict[int, tuple[Path, _Line]] = {}
        manifests = _Manifests()
        num_rows = shards.rows_of_shards
        maps = MAPS_PER_SHARD + MAPS_PER_COLUMN * len(shards.layout.columns)
        most = _MAX_MAPS // maps
        for shard, files in enumerate(shards.files[:most]):
            for file in files:
                line = manifests.find(file)
                if line is not None and line.sealed.num_rows == num_rows[shard]:
                    self._files[shard] = (Path(file.path), line)
                    break
        self._num_bytes = sum(line.sealed.num_bytes for _, line in self._files.values())
        self._num_rows = [n if shard in self._files else 0 for shard, n in enumerate(num_rows)]
        self._is_mapped = np.zeros(len(num_rows), np.bool_)
        self._mapped: dict[int, MappedShard] = {}
        erased = [
            decode_rows(base64.b64decode(line.sealed.erased)) + int(shards.starts[shard])
            for shard, (_, line) in self._files.items()
            if line.sealed.erased
        ]
        self._erased: Ids = np.sort(np.concatenate([*erased, np.empty(0, np.int64)]))

    @property
    def shards(self) -> set[int]:
        """Indices of the shards that can be read here."""
        with self._lock:
            return set(self._files)

    def gather(self, row_ids: Ids) -> list[pa.RecordBatch]:
        """The rows of these ids, in this order, as stored batches; see `MappedTable.gather`.

        Rows in memory are one batch.

        Args:
            row_ids: of `shards` only; at least one.

        Raises:
            ShardFileLostError: some files cannot be read any more; they are removed from `shards`.
        """
        shard_of = self._index.find(row_ids)
        table, selection, touched = self._mapped_shards(shard_of)
        if (erased := among(row_ids, self._erased)).any():
            rows = some_of(row_ids[erased][:100].tolist())
            raise ErasedRowsError(f"row {rows} was forgotten: read the erased rows again")
        try:
            batches = [*table.parts(row_ids, shard_of, selection, len(row_ids))]
        except DamagedShardError as error:
            raise self._lost(error.shard, str(error)) from None
        self._check_unchanged(touched)
        return batches

    def _check_unchanged(self, touched: Iterable[MappedShard]) -> None:
        """Gives up files that were changed in place.

        A node changes the time of a file before it erases rows in it. So a batch that was gathered
        before this look has none of the zeros in their place. Another thread may have given the
        file up meanwhile.

        Args:
            touched: those that rows were gathered from.
        """
        lost = [
            self._lost(mapped, f"{mapped.path} was changed while it was mapped")
            for mapped in touched
            if not mapped.is_unchanged()
        ]
        if lost:
            raise lost[0]

    def _lost(self, mapped: MappedShard, reason: str) -> ShardFileLostError:
        """Gives up a file that is mapped; its rows are read over Flight from now on."""
        with self._lock:
            for shard in [number for number, each in self._mapped.items() if each is mapped]:
                logger.warning("shard file given up: %s", reason)
                del self._files[shard], self._mapped[shard]
                self._is_mapped[shard] = False
        return ShardFileLostError(reason)

    def _mapped_shards(self, shard_of: Indices) -> tuple[MappedTable, Selection, list[MappedShard]]:
        """Maps these shards, if they are not mapped yet; also returns them, with some others."""
        with self._lock:
            is_mapped = self._is_mapped[shard_of]
            lost: ShardFileLostError | None = None
            for shard in [] if is_mapped.all() else np.unique(shard_of[~is_mapped]).tolist():
                try:
                    self._map(shard)
                except ShardFileLostError as error:  # first find all lost files
                    lost = lost or error
            if lost is not None:
                raise lost
            assert self._table is not None and self._selection is not None
            touched = [*self._mapped.values()]
            if len(touched) > _FEW_FILES:
                found = np.flatnonzero(np.bincount(shard_of)).tolist()
                touched = [self._mapped[shard] for shard in found]
            return self._table, self._selection, touched

    def _map(self, shard: int) -> None:
        found = self._files.get(shard)
        if found is None:
            raise ShardFileLostError(f"shard {shard} has no file on this machine")
        (path, line), sealed = found, found[1].sealed
        try:
            mapped = _map_file(line, path)
            if mapped.file.size != sealed.num_bytes:
                raise ValueError(f"{mapped.file.size} bytes instead of {sealed.num_bytes}")
            layout = mapped.layout.with_nulls(self._null_names)
            if self._layout is not None and layout.schema != self._layout.schema:
                raise ValueError("other columns than in the other shards")
            Selection(mapped.layout, self._columns, self._null_names)  # no others have nulls
            if mapped.batch.num_rows != sealed.num_rows:
                raise ValueError(f"{mapped.batch.num_rows} rows, not {sealed.num_rows}")
            _check_bytes(mapped)
            if self._table is None:
                self._layout = layout
                selection = self._selection = Selection(layout, self._columns, self._null_names)
                self._table = MappedTable(
                    layout,
                    self._starts,
                    self._num_rows,
                    only=[index for index, _ in selection.picks if index is not None],
                    disk=DiskReads.of_files(path, self._num_bytes, sum(self._num_rows)),
                )
            self._table.attach(shard, mapped)
        except (OSError, ValueError, pa.ArrowException, NotReadyError) as error:
            del self._files[shard]
            logger.info("shard file lost path=%s reason=%s", path, error)
            raise ShardFileLostError(f"cannot read {path}: {error}") from None
        self._is_mapped[shard] = True
        self._mapped[shard] = mapped


class _Line(NamedTuple):
    """What a manifest says of a shard, and its time in nanoseconds before it was read."""

    sealed: SealedShard
    read_ns: int


def _map_file(line: _Line, path: Path) -> MappedShard:
    """Maps a file of this machine, and checks its digests, its owner and its time.

    A manifest that was written since may name rows that were erased in the file.

    Raises:
        ValueError: they are not those of a file that its node sealed, or its manifest has no
            digests.
    """
    sealed, digests = line.sealed, line.sealed.digests
    if checksum_of(digests) != sealed.checksum or len(digests) != DIGEST_BYTES * num_pieces(
        sealed.num_bytes
    ):
        raise ValueError("its manifest has other digests")
    mapped = MappedShard(sealed, path)
    file, manifest = path.stat(), path.with_name(MANIFEST).stat()
    if file.st_uid != manifest.st_uid or file.st_mtime_ns > line.read_ns:
        raise ValueError("its owner changed, or it was written after it was sealed")
    return mapped


def _check_bytes(mapped: MappedShard) -> None:
    """Checks a sample of the bytes of a file.

    Raises:
        ValueError: they are not as its node sealed them.
    """
    sealed, count = mapped.sealed, num_pieces(mapped.sealed.num_bytes)
    few = count <= _SAMPLED_PIECES
    for number in range(min(count, _SAMPLED_PIECES)):
        index = number if few else secrets.randbelow(count)
        start = index * DIGEST_BYTES
        if piece_digest(mapped.piece(index)) != sealed.digests[start : start + DIGEST_BYTES]:
            raise ValueError(f"piece {index} has another checksum")


class _Manifests:
    """The node ids and manifests of cache directories, each read once."""

    def __init__(self) -> None:
        self._node_ids: dict[str, str] = {}
        self._manifests: dict[str, dict[str, _Line]] = {}

    def find(self, file: ShardFile) -> _Line | None:
        """The manifest line of ``file``; None unless node, checksum and size are the same."""
        version, _, name = file.path.rpartition("/")
        cache_dir = version.rsplit("/", 2)[0]
        if self._node_id(cache_dir) != file.node_id:
            return None
        line = self._manifest(version).get(name)
        if line is None or not (sealed := line.sealed).checksum:
            return None
        same = (sealed.num_bytes, sealed.checksum) == (file.num_bytes, file.checksum)
        return line if same else None

    def _node_id(self, cache_dir: str) -> str:
        found = self._node_ids.get(cache_dir)
        if found is None:
            try:
                found = Path(cache_dir, NODE_ID_FILE).read_text(encoding="utf-8").strip()
            except (OSError, ValueError):
                found = ""  # the path is on another machine, or not readable
            self._node_ids[cache_dir] = found
        return found

    def _manifest(self, version: str) -> dict[str, _Line]:
        found = self._manifests.get(version)
        if found is None:
            path, found = Path(version, MANIFEST), {}
            try:
                read_ns = path.stat().st_mtime_ns
                lines = read_manifest(path)
                found = {shard_file_name(each.index): _Line(each, read_ns) for each in lines}
            except OSError:
                pass  # there is none
            self._manifests[version] = found
        return found
