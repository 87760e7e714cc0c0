"""Forgets rows on a node: finds them, overwrites them, and knows the tombstones of datasets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pyarrow as pa

from cache_protocol.errors import CacheError, NodeUnavailableError
from cache_protocol.storage.row_sets import encode_rows
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.desired import DesiredState
from cache_server.node.loads.version_state import VersionState, is_erased
from cache_server.node.row_values import RowValues
from cache_server.shards.resident_rows import ResidentRows
from cache_server.shards.store import ShardStore
from cache_server.shards.tombstones import Tombstones, tombstones_of
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)


class KnownTombstones:
    """The tombstones of datasets. Thread-safe.

    Args:
        ask: the coordinator for those of a dataset.
    """

    def __init__(self, ask: Callable[[str], pb.GetTombstonesResponse]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._known: dict[str, Tombstones] = {}

    def update(self, desired: DesiredState) -> None:
        """Gets what is new; what cannot be had now is asked for again."""
        wanted = {(key.dataset, each.tombstones) for key, each in desired.versions.items()}
        wanted |= {(each.dataset, each.tombstones) for each in desired.writes.values()}
        for dataset, number in sorted(wanted):
            try:
                self.require(dataset, number)
            except NodeUnavailableError as error:
                logger.warning("%s", error)

    def require(self, dataset: str, number: int) -> None:
        """Gets the tombstones up to an act, if they are not here. No load begins without them.

        Raises:
            NodeUnavailableError: they cannot be had now.
        """
        if number <= self.number(dataset):
            return
        try:
            got = self._ask(dataset)
        except CacheError as error:
            raise NodeUnavailableError(
                f"the rows of {dataset!r} that were forgotten are not known yet: {error}"
            ) from None
        with self._lock:
            known = self._known.get(dataset)
            if known is None or known.number < got.number:
                self._known[dataset] = Tombstones(got.number, got.key, got.tombstones)
        if got.number < number:
            raise NodeUnavailableError(
                f"the rows of {dataset!r} that were forgotten are not known yet: the coordinator "
                f"told of act {number}, and has {got.number}"
            )

    def number(self, dataset: str) -> int:
        """The last act on a dataset that this node knows."""
        with self._lock:
            known = self._known.get(dataset)
        return 0 if known is None else known.number

    def left_out(self, key: VersionKey, index: int, batch: pa.RecordBatch) -> bytes:
        """A row set of the rows of a stored batch that were forgotten."""
        with self._lock:
            known = self._known.get(key.dataset)
        return b"" if known is None else known.find(batch)


class Forgetting:
    """Finds and overwrites rows in the shards of a node.

    Args:
        store: of the node.
        states: of its versions, which the heartbeat thread changes.
        lock: of the states.
        row_values: of the node.
        tombstones: that the node knows.
        forget: removes what is kept of rows of a version, other than its shards.
    """

    def __init__(
        self,
        store: ShardStore,
        states: Mapping[VersionKey, VersionState],
        lock: threading.Lock,
        row_values: RowValues,
        tombstones: KnownTombstones,
        forget: Callable[[VersionKey], None],
    ) -> None:
        self._store = store
        self._states = states
        self._lock = lock
        self._row_values = row_values
        self._tombstones = tombstones
        self._forget = forget

    def find(self, rows: ResidentRows, request: pb.FindRowsRequest) -> pb.FindRowsResponse:
        """The rows of a shard that fulfil conditions, with their tombstones.

        Raises:
            CacheError: as `RowValues.answer`.
        """
        start, stop = request.rows.start, request.rows.stop
        _, pieces = self._row_values.answer(rows, start, stop, "", tuple(request.where))
        places = pieces[0].to_numpy().astype(np.int64)
        found = pb.FindRowsResponse(places=encode_rows(places))
        if len(places):
            shard = rows.shard_of(start)
            found.tombstones = b"".join(tombstones_of(shard.batch, places, request.key))
        return found

    def erase(self, key: VersionKey, places: Mapping[int, bytes]) -> None:
        """Overwrites rows of shards that are served no more, once no one reads them.

        In the heartbeat thread, which tries again while someone does.

        Args:
            places: by shard, a row set.
        """
        sharing = {
            name
            for name, shards in self._store.versions().items()
            for other in shards.values()
            for index in places
            if (mine := self._store.shards(key).get(index)) and other.inode == mine.inode
        }
        with self._lock:
            states = [state for name in sharing if (state := self._states.get(name))]
            for state in states:
                state.retire_rows(places.keys() if state is self._states.get(key) else None)
            if any(state.is_read for state in states):
                return  # the next heartbeat tries again
        for name in sharing:
            self._forget(name)
        for index, rows in places.items():
            self._store.erase(key, index, rows)
        with self._lock:
            for state in states:
                state.erasing = frozenset()

    def note(self) -> None:
        """Notes for each version which act is done on this node. In the heartbeat thread."""
        for key, state in self._states.items():
            desired, shards = state.desired, self._store.shards(key)
            lacking = any(
                index in shards and not is_erased(shards[index], rows)
                for index, rows in desired.erased.items()
            )
            is_free = not (lacking or state.tables.is_used or self._store.is_removing)
            state.forgot = nothing_older(
                self._tombstones.number(key.dataset),
                desired.tombstones,
                [load.knows for load in state.unfinished().values()],
                is_free=is_free,
            )


def nothing_older(known: int, wanted: int, began: Iterable[int], *, is_free: bool) -> int:
    """The act that nothing of a version on this node is older than. Pure.

    Args:
        known: the last act whose tombstones are here.
        wanted: the last act that the coordinator told of.
        began: the acts that were known when the running loads began.
        is_free: no other file has, or will have, older rows.
    """
    if not is_free or known < wanted:
        return 0
    return min([wanted, *began])
