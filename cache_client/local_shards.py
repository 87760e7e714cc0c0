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
from protos.errors import CacheError
from protos.row_index import Ids, RowIndex, group_rows
from protos.shards import (
    MANIFEST,
    NODE_ID_FILE,
    MappedShard,
    Run,
    SealedShard,
    Selection,
    gather,
    read_manifest,
    shard_file_name,
)

logger = logging.getLogger(__name__)

# Each shard takes a memory map or two, of which Linux allows a process 65,530 by default.
_MOST_SHARDS = 16_384


class ShardFileLostError(CacheError):
    """A file that was there is not there any more, or is another one; Flight has the rows."""


class LocalShards:
    """The shards of one version whose files this process can read. Thread-safe.

    Files are mapped, read-only, when their first row is asked for, and stay mapped as long as this
    object lives: the rows are there even when the node drops them meanwhile.

    Args:
        shards: with the files.
        columns: to gather, of ``shards.logical``; empty for all.
    """

    def __init__(self, shards: ShardMap, columns: Sequence[str] = ()) -> None:
        self._starts = shards.starts
        self._index = RowIndex(shards.starts, shards.num_rows)
        self._columns = columns
        self._lock = threading.Lock()
        self._mapped: dict[int, MappedShard] = {}
        self._selection: Selection | None = None
        self._files: dict[int, tuple[ShardFile, SealedShard]] = {}
        directories = _Directories()
        num_rows = np.diff(shards.starts, append=shards.num_rows).tolist()
        for shard, files in enumerate(shards.files[:_MOST_SHARDS]):
            for file in files:
                sealed = directories.sealed(file)
                if sealed is not None and sealed.num_rows == num_rows[shard]:
                    self._files[shard] = (file, sealed)
                    break

    @property
    def shards(self) -> set[int]:
        """Indices into the shard map of the shards to be read here."""
        with self._lock:
            return set(self._files)

    def gather(self, row_ids: Ids) -> pa.RecordBatch:
        """The rows of these ids, in this order, as one stored batch in memory of its own.

        Args:
            row_ids: of `shards` only; at least one.

        Raises:
            ShardFileLostError: files cannot be read any more; `shards` is without any of them then.
        """
        grouped = group_rows(row_ids, self._index.find(row_ids))
        runs: list[Run] = []
        lost: ShardFileLostError | None = None
        for shard, start, stop in grouped.runs():
            try:
                runs.append(Run(self._map(shard), int(self._starts[shard]), start, stop))
            except ShardFileLostError as error:  # find out about the others, too, before it counts
                lost = lost or error
        if lost is not None:
            raise lost
        selection = self._selection
        if selection is None:
            selection = self._selection = Selection(runs[0].shard.layout, self._columns)
        return gather(runs, grouped.rows, selection, grouped.inverse)

    def _map(self, shard: int) -> MappedShard:
        with self._lock:
            mapped = self._mapped.get(shard)
            if mapped is not None:
                return mapped
            found = self._files.get(shard)
            if found is None:
                raise ShardFileLostError(f"shard {shard} is not read on this machine")
            file, sealed = found
            path = Path(file.path)
            try:
                mapped = MappedShard(sealed, path)
                if mapped.file_bytes != sealed.num_bytes:
                    raise ValueError(f"{mapped.file_bytes} bytes instead of {sealed.num_bytes}")
                if mapped.batch.num_rows != sealed.num_rows:
                    raise ValueError(f"{mapped.batch.num_rows} rows, not {sealed.num_rows}")
            except (OSError, ValueError, pa.ArrowException) as error:
                del self._files[shard]
                logger.info("shard file lost path=%s reason=%s", path, error)
                raise ShardFileLostError(f"cannot read {path}: {error}") from None
            self._mapped[shard] = mapped
            return mapped


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
