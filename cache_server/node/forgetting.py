"""What a node knows of rows that were forgotten: the tombstones of datasets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import pyarrow as pa

from cache_protocol.errors import CacheError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.desired import DesiredState
from cache_server.shards.tombstones import Tombstones
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
            if number > self.number(dataset):
                try:
                    got = self._ask(dataset)
                except CacheError as error:
                    logger.warning("tombstones not read dataset=%s reason=%s", dataset, error)
                    continue
                with self._lock:
                    self._known[dataset] = Tombstones(got.number, got.key, got.tombstones)

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
