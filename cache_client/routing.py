"""Which node has which rows: the shard map, and row ids -> requests to nodes. Pure, no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from protos.layout import Layout

Ids = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class NodeRef:
    """A cache node: its name and its Flight location."""

    id: str
    location: str

    def __str__(self) -> str:
        return f"{self.id} ({self.location})"


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
    """

    dataset: str
    fingerprint: str
    logical: pa.Schema
    num_rows: int
    starts: Ids
    nodes: tuple[NodeRef, ...]
    replicas: tuple[tuple[int, ...], ...]

    @property
    def layout(self) -> Layout:
        """The packed layout of the columns that are read."""
        return Layout(self.logical)


@dataclass(frozen=True)
class Part:
    """One request to one node.

    Attributes:
        node: that holds the rows.
        positions: where the rows belong in the window; None when they are all of it, in order.
        row_ids: grouped by shard, so that the node need not sort them.
    """

    node: NodeRef
    positions: Indices | None
    row_ids: Ids


@dataclass
class Router:
    """Chooses a replica for each shard and cuts windows of row ids into requests.

    Args:
        shards: the map.
        turn: which replica to prefer where there are several; ranks that differ spread the load.
        avoid: indices of nodes that did not answer lately, used only where no other replica is.
    """

    shards: ShardMap
    turn: int = 0
    avoid: Collection[int] = ()
    _node_of: npt.NDArray[np.int32] = field(init=False)
    _sort_key: npt.NDArray[np.unsignedinteger] = field(init=False)

    def __post_init__(self) -> None:
        chosen = [self._choose(index, r) for index, r in enumerate(self.shards.replicas)]
        self._node_of = np.array(chosen, np.int32)
        # Sorting a window by this key groups it by node, and by shard inside a node.
        order = np.argsort(self._node_of, kind="stable")
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        self._sort_key = ranks.astype(_narrowest(len(order)))

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
            return [Part(self.shards.nodes[self._node_of[first]], positions, row_ids)]
        shard_of = self._shard_of(row_ids)
        keys = self._sort_key[shard_of]
        if bool((keys[1:] >= keys[:-1]).all()):
            order = None
            nodes = self._node_of[shard_of]
        else:
            order = np.argsort(keys, kind="stable")
            nodes = self._node_of[shard_of[order]]
            row_ids = row_ids[order]
            positions = order if positions is None else positions[order]
        if nodes[0] == nodes[-1]:  # grouped, so all in between are the same
            return [Part(self.shards.nodes[nodes[0]], positions, row_ids)]
        if positions is None:
            positions = np.arange(len(row_ids))
        bounds = [0, *(np.flatnonzero(np.diff(nodes)) + 1).tolist(), len(nodes)]
        return [
            Part(self.shards.nodes[nodes[a]], positions[a:b], row_ids[a:b])
            for a, b in itertools.pairwise(bounds)
        ]

    def _shard_of(self, row_ids: Ids) -> Indices:
        return np.searchsorted(self.shards.starts, row_ids, side="right") - 1

    def _choose(self, shard: int, replicas: Sequence[int]) -> int:
        reachable = [node for node in replicas if node not in self.avoid] or replicas
        return reachable[(self.turn + shard) % len(reachable)]


def _narrowest(count: int) -> type[np.unsignedinteger]:
    """The smallest unsigned type for values below ``count``: numpy sorts 8 and 16 bits by radix."""
    return np.uint8 if count <= 1 << 8 else np.uint16 if count <= 1 << 16 else np.uint32
