"""Rows that were erased since a job opened what it reads: its batches leave them out.

The order stays as it is until an amendment or the next version, so ranks need not agree on when
they learn of it: each leaves out its own rows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cache_client.control.erasures import read_erased
from cache_client.flight.routing import ShardMap
from cache_client.job.connection import Access
from cache_client.order.erased import Erased, joined_rows
from cache_client.order.permutation import Int64Array
from cache_protocol.errors import ErasedRowsError, some_of
from cache_protocol.storage.row_sets import among

logger = logging.getLogger(__name__)

MOST_ASKS = 8  # for rows that are erased one act after the other


@dataclass(frozen=True)
class Known:
    """What is known of one version.

    Attributes:
        shards: the version.
        erased: its rows that were erased, as far as known; a view leaves out the first acts.
        first: where its rows begin among those of all versions.
    """

    shards: ShardMap
    erased: Erased
    first: int = 0


class LeftOut:
    """The rows that batches leave out, of one version or several joined. Thread-safe.

    Args:
        access: to the cache.
        known: of each version.
    """

    def __init__(self, access: Access, known: Sequence[Known]) -> None:
        self._access, self.known = access, tuple(known)
        self.rows = joined_rows([each.erased.gone + each.first for each in known])
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {"access": self._access, "known": self.known}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # as when it was made

    @property
    def any(self) -> bool:
        """Whether rows of a version were erased."""
        return any(each.erased.acts for each in self.known)

    @property
    def every(self) -> Int64Array:
        """All rows that were erased: a batch that is filled up may begin its epoch again."""
        lists = [each.erased.left_out + each.first for each in self.known]
        return joined_rows([self.rows, *lists])

    @property
    def erased(self) -> Erased:
        """Of the only version."""
        return self.known[0].erased

    def learn(self, since: Int64Array) -> bool:
        """Whether there are more rows than ``rows`` was; asks the cache, unless another thread did.

        Raises:
            CacheError: as `read_erased`.
        """
        with self._lock:
            if self.rows is not since:
                return True
            found = []
            for each in self.known:
                now = read_erased(self._access, replace(each.shards, erased=each.erased))
                found.append(replace(each, erased=replace(each.erased, acts=now.acts)))
            more = sum(len(each.erased.acts) for each in found)
            if more == sum(len(each.erased.acts) for each in self.known):
                return False
            logger.warning(
                "rows of dataset %s were forgotten: batches leave them out, and are shorter until "
                "the job is amended or starts again, see docs/amend.md",
                some_of(sorted({repr(each.shards.dataset) for each in found})),
            )
            self.known = tuple(found)
            self.rows = joined_rows([each.erased.gone + each.first for each in found])
            return True

    def another(self, row_ids: Int64Array) -> int:
        """A row that is there, one of some if one of them is."""
        there = row_ids[~among(row_ids, self.every)]
        if len(there):
            return int(there[0])
        for each in self.known:
            out = np.union1d(each.erased.left_out, each.erased.gone)
            near = np.arange(min(len(out) + 1, each.shards.num_rows), dtype=np.int64)
            there = near[~among(near, out)]
            if len(there):
                return int(there[0]) + each.first
        raise ErasedRowsError("every row of the dataset was erased")
