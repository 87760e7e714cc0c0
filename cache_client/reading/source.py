"""One version, and how this process reads its rows."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Self

from cache_client.flight.routing import ShardMap
from cache_client.reading.counts import ReadCounts
from cache_client.reading.local_shards import LocalShards
from cache_client.reading.node_health import NodeHealth
from cache_client.reading.per_process import PerProcess
from cache_client.reading.reader import Reader
from cache_protocol.wire.credentials import Credentials


class Source:
    """Opens readers of one version.

    Mapped files and the health of nodes are kept for later readers of the same process. A pickle
    has neither.

    Args:
        endpoint: of any node.
        shards: the version, with the columns to read.
        columns: to read, of ``shards.logical``; empty for all.
        credentials: of this process.
        deadline_s: how long a window may wait for nodes that do not answer.
        local: read files of this machine without a node.

    Thread-safety: use it from one thread; readers may be used from any.
    """

    def __init__(
        self,
        endpoint: str,
        shards: ShardMap,
        columns: tuple[str, ...],
        credentials: Credentials,
        *,
        deadline_s: float,
        local: bool,
    ) -> None:
        self.endpoint = endpoint
        self.shards = shards
        self.columns = columns
        self._credentials = credentials
        self._deadline_s = deadline_s
        self.local = local
        self._order = ""
        self._process_shards: PerProcess[LocalShards] = PerProcess()
        self._process_health: PerProcess[NodeHealth] = PerProcess()

    def with_nulls(self, null_names: Collection[str]) -> Source:
        """The same rows, with these units of null bits."""
        layout = self.shards.layout
        if layout.nulls.units.keys() == set(null_names):
            return self
        return Source(
            self.endpoint,
            replace(self.shards, logical=layout.with_nulls(null_names).described),
            self.columns,
            self._credentials,
            deadline_s=self._deadline_s,
            local=self.local,
        )

    def in_order(self, order: str) -> Self:
        """The same rows, of nodes that were told in which order they will be asked for."""
        other = copy.copy(self)
        other._order, other.local = order, False
        return other

    def open_reader(
        self, *, replica_offset: int, rows_per_message: int, counts: ReadCounts
    ) -> Reader:
        """A reader for one pass; see `Reader` for the arguments."""
        return Reader(
            self.endpoint,
            self.shards,
            columns=self.columns,
            replica_offset=replica_offset,
            rows_per_message=rows_per_message,
            deadline_s=self._deadline_s,
            local=self.local_shards(),
            credentials=self._credentials,
            health=self._node_health(),
            counts=counts,
            order=self._order,
        )

    def local_shards(self) -> LocalShards | None:
        """The mapped files, shared by the passes of a process: first reads of a map are slow."""
        if not self.local:
            return None
        return self._process_shards.get(lambda: LocalShards(self.shards, self.columns))

    def _node_health(self) -> NodeHealth:
        """The health of nodes, shared by the passes of a process."""
        before = self._process_health.latest()
        return self._process_health.get(lambda: NodeHealth((before or self).shards))
