"""Which node has which rows: the shard map, and row ids -> requests to nodes. Pure, no I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from protos.layout import Layout

Ids = npt.NDArray[np.int64]
Indices = npt.NDArray[np.signedinteger]

_MOST_BUCKETS_PER_SHARD = 64
_MOST_KEYS = 1 << 16


@dataclass(frozen=True)
class NodeRef:
    """A cache node: its name and its Flight location."""

    id: str
    location: str

    def __str__(self) -> str:
        return f"{self.id} ({self.location})"


@dataclass(frozen=True)
class ShardFile:
    """The sealed file of a shard in the cache directory of one of its nodes.

    Attributes:
        node_id: whose cache directory it is.
        path: on that node's machine.
        num_bytes, checksum: of the file, as it was sealed.
    """

    node_id: str
    path: str
    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class ShardMap:
    """Where the rows of one version are.

    Attributes:
        dataset, fingerprint: the version.
        logical: schema of the columns that are read.
        num_rows: of the version.
        starts: first row id of each shard that has rows, ascending; int64.
        nodes: every node that holds a shard.
        replicas: for each shard indices into ``nodes``, in order of preference.
        files: for each shard its files, for whoever runs on the machine of a node.
        lease_s: so long after its last use the version is kept when it is replaced.
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

    @property
    def layout(self) -> Layout:
        """The packed layout of the columns that are read."""
        return Layout(self.logical)


@dataclass(frozen=True)
class Part:
    """One request to one node, or to the files of this machine.

    Attributes:
        node: that holds the rows; None for files of this machine.
        positions: where the rows belong in the window; None when they are all of it, in order.
        row_ids: grouped by shard, or nearly so, which spares the node to sort them.
        shards: the shard of each row.
    """

    node: NodeRef | None
    positions: Indices | None
    row_ids: Ids
    shards: Indices


class _Buckets:
    """Row id -> shard by a table lookup, several times as fast as a binary search.

    Rows are cut into buckets of a power of two, so small that no bucket holds the first rows of
    two shards. The shard of a row is then that of its bucket's first row, or the next one.
    """

    def __init__(self, starts: Ids, num_rows: int, shift: int) -> None:
        self._shift = shift
        count = ((num_rows - 1) >> shift) + 1
        first_rows = np.arange(count, dtype=np.int64) << shift
        shard_of_bucket = np.searchsorted(starts, first_rows, side="right") - 1
        self._shard_of_bucket = shard_of_bucket.astype(np.int32)  # half the cache lines
        self._next_start = np.append(starts[1:], num_rows)

    @classmethod
    def build(cls, starts: Ids, num_rows: int) -> _Buckets | None:
        """None where shards differ so much in size that the table would be large."""
        if not len(starts):
            return None
        for shift in range((num_rows // len(starts)).bit_length(), -1, -1):
            if num_rows >> shift > _MOST_BUCKETS_PER_SHARD * len(starts):
                return None
            if (np.diff(starts >> shift) > 0).all():
                return cls(starts, num_rows, shift)
        return None

    def find(self, row_ids: Ids) -> Indices:
        """The shard of each row, all of them inside the dataset."""
        shard_of: Indices = self._shard_of_bucket[row_ids >> self._shift]
        shard_of += row_ids >= self._next_start[shard_of]
        return shard_of


@dataclass
class Router:
    """Chooses a replica for each shard and cuts windows of row ids into requests.

    Args:
        shards: the map.
        turn: which replica to prefer where there are several; ranks that differ spread the load.
        avoid: indices of nodes that did not answer lately, used only where no other replica is.
        local: shards to read from files of this machine instead.

    Attributes:
        num_nodes: that a window may be cut into requests to, without this machine's files.
    """

    shards: ShardMap
    turn: int = 0
    avoid: Collection[int] = ()
    local: Collection[int] = ()
    num_nodes: int = field(init=False)
    _node_of: npt.NDArray[np.int32] = field(init=False)
    _sort_key: npt.NDArray[np.unsignedinteger] = field(init=False)
    _nodes: tuple[NodeRef | None, ...] = field(init=False)
    _buckets: _Buckets | None = field(init=False)

    def __post_init__(self) -> None:
        chosen = [self._choose(index, r) for index, r in enumerate(self.shards.replicas)]
        self._node_of = np.array(chosen, np.int32)
        self._node_of[list(self.local)] = len(self.shards.nodes)
        self._nodes = (*self.shards.nodes, None)
        self._buckets = _Buckets.build(self.shards.starts, self.shards.num_rows)
        self._sort_key = _sort_keys(self._node_of)
        self.num_nodes = len(np.unique(self._node_of[self._node_of < len(self.shards.nodes)]))

    def route(self, row_ids: Ids, positions: Indices | None = None) -> list[Part]:
        """The requests that together bring ``row_ids``; each goes to one node.

        Args:
            row_ids: inside the dataset.
            positions: where the rows belong in the window; None for 0, 1, 2, ...
        """
        if not len(row_ids):
            return []
        first, last = self._shard_of(np.array([row_ids.min(), row_ids.max()]))
        if first == last:  # as all windows of a table in source order but a few
            shard_of = np.broadcast_to(first, row_ids.shape)
            return [Part(self._nodes[self._node_of[first]], positions, row_ids, shard_of)]
        shard_of = self._shard_of(row_ids)
        keys = self._sort_key[shard_of]
        if not bool((keys[1:] >= keys[:-1]).all()):
            order = np.argsort(keys, kind="stable")
            row_ids, shard_of = row_ids[order], shard_of[order]
            positions = order if positions is None else positions[order]
        first, last = self._node_of[shard_of[0]], self._node_of[shard_of[-1]]
        if first == last:  # grouped, so all in between are the same
            return [Part(self._nodes[first], positions, row_ids, shard_of)]
        nodes = self._node_of[shard_of]
        if positions is None:
            positions = np.arange(len(row_ids))
        bounds = [0, *(np.flatnonzero(np.diff(nodes)) + 1).tolist(), len(nodes)]
        return [
            Part(self._nodes[nodes[a]], positions[a:b], row_ids[a:b], shard_of[a:b])
            for a, b in itertools.pairwise(bounds)
        ]

    def _shard_of(self, row_ids: Ids) -> Indices:
        if self._buckets is None:
            return np.searchsorted(self.shards.starts, row_ids, side="right") - 1
        return self._buckets.find(row_ids)

    def _choose(self, shard: int, replicas: Sequence[int]) -> int:
        reachable = [node for node in replicas if node not in self.avoid] or replicas
        return reachable[(self.turn + shard) % len(reachable)]


def _sort_keys(node_of: npt.NDArray[np.int32]) -> npt.NDArray[np.unsignedinteger]:
    """For each shard a number that groups a window by node, and by shard inside a node.

    At most 16 bits, which numpy sorts by radix, ten times as fast as more: of very many shards,
    neighbours on a node share a number. Nodes never do.
    """
    if not len(node_of):
        return np.zeros(0, np.uint8)
    counts = np.bincount(node_of)
    order = np.argsort(node_of, kind="stable")
    inside = np.empty(len(node_of), np.int64)  # position among the shards of the node
    inside[order] = np.arange(len(node_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    shift = 0
    while (sizes := -(-counts >> shift)).sum() > _MOST_KEYS and shift < 31:
        shift += 1
    keys: Ids = (np.cumsum(sizes) - sizes)[node_of] + (inside >> shift)
    return keys.astype(np.uint8) if keys.max() < 1 << 8 else keys.astype(np.uint16)
