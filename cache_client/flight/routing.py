"""The shard map of a version, and row ids -> requests to nodes. Pure, no I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_client.order.erased import Erased
from cache_client.order.load_log import GroupLog
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.row_index import ROWS_OF_A_SHARD, Ids, Indices, RowIndex, group_rows


@dataclass(frozen=True)
class NodeRef:
    """A cache node: its name, its Flight location, and its zone if it has one."""

    id: str
    location: str
    zone: str = ""

    def __str__(self) -> str:
        return f"{self.id} ({self.location})"


@dataclass(frozen=True)
class ShardFile:
    """The sealed file of a shard in the cache directory of one of its nodes.

    Attributes:
        node_id: node that owns the cache directory.
        shard: its number in the version.
        path: on the machine of the node.
        num_bytes, checksum: of the sealed file.
    """

    node_id: str
    shard: int
    path: str
    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class ShardMap:
    """Which nodes hold the shards of one version. Immutable.

    Attributes:
        dataset, fingerprint: the version.
        logical: schema of the columns to read.
        num_rows: of the version.
        starts: first row id of each shard that has rows, ascending; int64.
        nodes: every node that holds a shard.
        replicas: for each shard indices into ``nodes``, in order of preference.
        files: for each shard its files, for clients on the machine of a node.
        lease_s: how long a replaced version is kept after its last use.
        leased_at: monotonic seconds of this machine when the map was requested, which is a use.
        num_bytes: of the stored shards, one replica. `cache_client.reading.shard_maps`
            subtracts the fixed-size columns that are not read.
        layout: of the columns to read, packed.
        checksums: of the sealed file of each shard.
        full_name: of the dataset, with its namespace; empty: of a node that does not tell.
        erasures: how many acts erased some of its rows, as the cache said.
        erased: the rows that they erased.
        preparing: ids of nodes that prepare announced orders of the version.
        log: of a version that may load: the map has the shards of its groups, ``num_rows`` rows
            together, and its row ids are numbers by shard. None: of a ready version.
    """

    dataset: str
    fingerprint: str
    logical: pa.Schema
    num_rows: int
    starts: Ids
    nodes: tuple[NodeRef, ...]
    replicas: tuple[tuple[int, ...], ...]
    files: tuple[tuple[ShardFile, ...], ...] = ()
    lease_s: float = math.inf
    num_bytes: int = 0
    leased_at: float = field(default=0.0, repr=False, compare=False)
    log: GroupLog | None = None
    checksums: tuple[str, ...] = field(default=(), repr=False, compare=False)
    full_name: str = field(default="", repr=False, compare=False)
    erasures: int = field(default=0, compare=False)
    erased: Erased = field(default=Erased(), repr=False, compare=False)
    preparing: tuple[str, ...] = field(default=(), repr=False, compare=False)
    layout: Layout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout(self.logical))

    @property
    def stop(self) -> int:
        """Above every row id."""
        if self.log is None:
            return self.num_rows
        return int(self.starts[-1]) + ROWS_OF_A_SHARD if len(self.starts) else 0

    @property
    def rows_of_shards(self) -> list[int]:
        """Rows of each shard of the map."""
        if self.log is None:
            rows: list[int] = np.diff(self.starts, append=self.num_rows).tolist()
            return rows
        return self.log.rows_of_shards

    def begins_with(self, other: ShardMap) -> bool:
        """Whether the first rows of this version are those of another one, in its order."""
        count = len(other.starts)
        ends = [*self.starts.tolist(), self.num_rows]
        return (
            other.checksums == self.checksums[:count]
            and other.starts.tolist() == self.starts[:count].tolist()
            and ends[count] == other.num_rows
        )

    def first_rows(self, num_rows: int) -> ShardMap:
        """The map of the first shards, which have so many rows.

        Raises:
            ValueError: no shard ends there; quotes the number.
        """
        ends = [*self.starts.tolist(), self.num_rows]
        if num_rows not in ends:
            raise ValueError(f"no shard of {self.dataset!r} ends at row {num_rows:,}")
        count = ends.index(num_rows)
        return replace(
            self,
            num_rows=num_rows,
            starts=self.starts[:count],
            replicas=self.replicas[:count],
            files=self.files[:count],
            checksums=self.checksums[:count],
            erased=self.erased.first(num_rows),
        )

    def locations(self, first: str) -> list[str]:
        """``first``, then every node: each can answer questions about the version."""
        return list(dict.fromkeys((first, *(node.location for node in self.nodes))))


@dataclass(frozen=True)
class Part:
    """One request, to one node or to the files of this machine.

    Attributes:
        node: that holds the rows; None for files of this machine.
        positions: of the rows in the window; None if the part is the whole window, in order.
        row_ids: in the order of the window.
    """

    node: NodeRef | None
    positions: Indices | None
    row_ids: Ids

    def divided(self, num_rows: int) -> tuple[Part, Part]:
        """Its first rows, and the others."""
        positions = np.arange(len(self.row_ids)) if self.positions is None else self.positions
        return (
            Part(self.node, positions[:num_rows], self.row_ids[:num_rows]),
            Part(self.node, positions[num_rows:], self.row_ids[num_rows:]),
        )


@dataclass
class Router:
    """Chooses a replica for each shard and cuts windows of row ids into requests.

    Args:
        shards: the shard map.
        replica_offset: which replica to prefer; ranks with different offsets spread the load.
        avoid: indices of nodes that failed lately, used only if there is no other replica.
        local: indices of shards to read from files of this machine.
        zone: of this process: replicas in it come first, unless all are to be avoided; None: it is
            not known.

    Attributes:
        num_nodes: the most nodes that one window is requested from.
    """

    shards: ShardMap
    replica_offset: int = 0
    avoid: Collection[int] = ()
    local: Collection[int] = ()
    zone: str | None = None
    num_nodes: int = field(init=False)
    _node_of: npt.NDArray[np.signedinteger] = field(init=False)
    _nodes: tuple[NodeRef | None, ...] = field(init=False)
    _only: int | None = field(init=False)
    _index: RowIndex = field(init=False)

    def __post_init__(self) -> None:
        chosen = [self._choose(index, r) for index, r in enumerate(self.shards.replicas)]
        here = len(self.shards.nodes)
        self._node_of = np.array(
            chosen, np.min_scalar_type(-here - 1)
        )  # a short type: sorted by radix
        self._node_of[list(self.local)] = here
        self._nodes = (*self.shards.nodes, None)
        used = np.unique(self._node_of)
        self._only = int(used[0]) if len(used) == 1 else None
        self._index = RowIndex(self.shards.starts, self.shards.stop)
        self.num_nodes = int((used < here).sum())

    def route(self, row_ids: Ids, positions: Indices | None = None) -> list[Part]:
        """The requests for ``row_ids``, one for each node; each keeps the order of the rows.

        Args:
            row_ids: of the shards of the map.
            positions: of the rows in the window; None for 0, 1, 2, ...
        """
        if not len(row_ids):
            return []
        if self._only is not None:
            return [Part(self._nodes[self._only], positions, row_ids)]
        ends = self._index.find(np.array([row_ids.min(), row_ids.max()]))
        if ends[0] == ends[1]:  # one shard: as nearly all windows in source order
            return [Part(self._nodes[self._node_of[ends[0]]], positions, row_ids)]
        grouped = group_rows(row_ids, np.take(self._node_of, self._index.find(row_ids)))
        runs = list(grouped.runs())
        if len(runs) == 1:
            return [Part(self._nodes[runs[0][0]], positions, row_ids)]
        order = np.arange(len(row_ids)) if grouped.order is None else grouped.order
        positions = order if positions is None else positions[order]
        return [
            Part(self._nodes[node], positions[start:stop], grouped.rows[start:stop])
            for node, start, stop in runs
        ]

    def end_of_node(self, row: int) -> int:
        """The end of the rows from ``row`` on that are requested from one node."""
        (first,) = self._index.find(np.array([row]))
        others = np.flatnonzero(self._node_of[first:] != self._node_of[first])
        return int(self.shards.starts[first + others[0]]) if len(others) else self.shards.num_rows

    def _choose(self, shard: int, replicas: Sequence[int]) -> int:
        # In the order of the nodes. That of the replicas is random for each shard: by it, one node
        # could get the requests for all shards, and another one none.
        reachable = sorted([node for node in replicas if node not in self.avoid] or replicas)
        if self.zone is not None:
            nodes = self.shards.nodes
            reachable = [at for at in reachable if nodes[at].zone == self.zone] or reachable
        return reachable[(self.replica_offset + shard) % len(reachable)]
