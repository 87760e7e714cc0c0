"""Shard files of nodes on this machine, read without their server.

A file counts only where it is certain to be the one that the shard map means: the cache directory
says the name of the node, the manifest in it names the shard with the checksum that the coordinator
told, and the file has the size that it was sealed with. Everything else is left to Flight.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from cache_client.routing import ShardFile, ShardMap
from cache_protocol.errors import CacheError
from cache_protocol.storage.mapped_table import MAPS_PER_COLUMN, MappedTable
from cache_protocol.storage.row_index import Ids, Indices, RowIndex
from cache_protocol.storage.shard_files import (
    MANIFEST,
    MAPS_PER_SHARD,
    NODE_ID_FILE,
    MappedShard,
    SealedShard,
    Selection,
    read_manifest,
    shard_file_name,
)

logger = logging.getLogger(__name__)

# Linux allows a process 65,530 memory maps by default, and a process without one left ends.
_MOST_MAPS = 32_768


class ShardFileLostError(CacheError):
    """A file that was there is not there any more, or is another one; Flight has the rows."""


class LocalShards:
    """The shards of one version whose files this process can read. Thread-safe.

    Files are mapped, read-only, when their first row is asked for, and stay mapped as long as this
    object lives: the rows are there even when the node drops them meanwhile.

    Args:
        shards: with the files.
        columns: to gather, of ``shards.logical``; empty for all.

    Attributes:
        leased_at: monotonic seconds when the cache was last told that the version is in use. Set by
            whoever tells it so: passes may be many, and each shorter than a lease.
    """

    def __init__(self, shards: ShardMap, columns: Sequence[str] = ()) -> None:
        self.leased_at = shards.leased_at
        self._starts = shards.starts
        self._index = RowIndex(shards.starts, shards.num_rows)
        self._columns = columns
        self._lock = threading.Lock()
        self._adjacent: MappedTable | None = None
        self._selection: Selection | None = None
        self._files: dict[int, tuple[ShardFile, SealedShard]] = {}
        directories = _Directories()
        num_rows = np.diff(shards.starts, append=shards.num_rows).tolist()
        maps = MAPS_PER_SHARD + MAPS_PER_COLUMN * len(shards.layout.columns)
        for shard, files in enumerate(shards.files[: _MOST_MAPS // maps]):
            for file in files:
                sealed = directories.sealed(file)
                if sealed is not None and sealed.num_rows == num_rows[shard]:
                    self._files[shard] = (file, sealed)
                    break
        self._num_rows = [n if shard in self._files else 0 for shard, n in enumerate(num_rows)]
        self._is_mapped = np.zeros(len(num_rows), np.bool_)

    @property
    def shards(self) -> set[int]:
        """Indices into the shard map of the shards to be read here."""
        with self._lock:
            return set(self._files)

    def gather(self, row_ids: Ids) -> pa.RecordBatch:
        """The rows of these ids, in this order, as one stored batch; see `MappedTable.gather`.

        Args:
            row_ids: of `shards` only; at least one.

        Raises:
            ShardFileLostError: files cannot be read any more; `shards` is without any of them then.
        """
        shard_of = self._index.find(row_ids)
        adjacent, selection = self._mapped_shards(shard_of)
        return adjacent.gather(row_ids, shard_of, selection)

    def _mapped_shards(self, shard_of: Indices) -> tuple[MappedTable, Selection]:
        """All these shards, mapped."""
        with self._lock:
            is_mapped = self._is_mapped[shard_of]
            lost: ShardFileLostError | None = None
            for shard in [] if is_mapped.all() else np.unique(shard_of[~is_mapped]).tolist():
                try:
                    self._map(shard)
                except ShardFileLostError as error:  # find out about the others before it counts
                    lost = lost or error
            if lost is not None:
                raise lost
            assert self._adjacent is not None and self._selection is not None
            return self._adjacent, self._selection

    def _map(self, shard: int) -> None:
        found = self._files.get(shard)
        if found is None:
            raise ShardFileLostError(f"shard {shard} is not read on this machine")
        file, sealed = found
        path = Path(file.path)
        try:
            mapped = MappedShard(sealed, path)
            if mapped.file.size != sealed.num_bytes:
                raise ValueError(f"{mapped.file.size} bytes instead of {sealed.num_bytes}")
            if mapped.batch.num_rows != sealed.num_rows:
                raise ValueError(f"{mapped.batch.num_rows} rows, not {sealed.num_rows}")
            if self._adjacent is None:
                selection = self._selection = Selection(mapped.layout, self._columns)
                self._adjacent = MappedTable(
                    mapped.layout,
                    self._starts,
                    self._num_rows,
                    only=[index for index, _ in selection.picks],
                )
            self._adjacent.attach(shard, mapped)
        except (OSError, ValueError, pa.ArrowException) as error:
            del self._files[shard]
            logger.info("shard file lost path=%s reason=%s", path, error)
            raise ShardFileLostError(f"cannot read {path}: {error}") from None
        self._is_mapped[shard] = True


class _Directories:
    """What cache directories and manifests say, each read once."""

    def __init__(self) -> None:
        self._node_ids: dict[str, str] = {}
        self._manifests: dict[str, dict[str, SealedShard]] = {}

    def sealed(self, file: ShardFile) -> SealedShard | None:
        """The line of the manifest that names ``file``; None unless everything agrees."""
        version, _, name = file.path.rpartition("/")
        cache_dir = version.rsplit("/", 2)[0]
        if self._node_id(cache_dir) != file.node_id:
            return None
        sealed = self._manifest(version).get(name)
        if sealed is None or not sealed.checksum:
            return None
        same = (sealed.num_bytes, sealed.checksum) == (file.num_bytes, file.checksum)
        return sealed if same else None

    def _node_id(self, cache_dir: str) -> str:
        found = self._node_ids.get(cache_dir)
        if found is None:
            try:
                found = Path(cache_dir, NODE_ID_FILE).read_text(encoding="utf-8").strip()
            except (OSError, ValueError):
                found = ""  # of another machine, or not for this user
            self._node_ids[cache_dir] = found
        return found

    def _manifest(self, version: str) -> dict[str, SealedShard]:
        found = self._manifests.get(version)
        if found is None:
            try:
                lines = read_manifest(Path(version, MANIFEST))
            except OSError:
                lines = []
            found = {shard_file_name(line.index): line for line in lines}
            self._manifests[version] = found
        return found
