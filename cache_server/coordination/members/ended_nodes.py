"""Which shards nodes were loading when they ended. Pure.

A split that ends the process that reads it would end one node after another. So a shard that was
being loaded on two nodes when these ended is given to no further node.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass, field

_MOST_ENDS = 2  # then a shard is given to no further node
WHOLE_QUERY = None  # in place of the index of a shard

Indices = Set[int | None]


@dataclass
class EndedNodes:
    """The processes that load one version, and those that ended meanwhile. One thread at a time."""

    _loading: dict[str, tuple[str, Indices]] = field(default_factory=dict)  # by node id
    _seen_alive: Collection[str] = ()
    _ended: dict[tuple[str, str], Indices] = field(default_factory=dict)  # by node id and process
    _given_up: dict[int | None, list[str]] | None = None

    def apply_report(self, node_id: str, process: str, running: Indices) -> None:
        """Notes the running loads of a process: it lives, so the one before it has ended.

        Args:
            process: changes when the node starts again.
        """
        before, indices = self._loading.get(node_id, (process, frozenset[int | None]()))
        if before != process:
            self._note_end(node_id, before, indices)
        if self._ended.pop((node_id, process), None):  # it was silent, and is back
            self._given_up = None
        self._loading[node_id] = process, running

    def note_asked(self, node_id: str, asked: Indices) -> None:
        """Notes the loads that an answer asks of a node: they may begin before its next report."""
        process, running = self._loading[node_id]
        self._loading[node_id] = process, running | asked

    def note_lost(self, alive: Collection[str]) -> bool:
        """Counts the nodes that do not answer any more as ended.

        Args:
            alive: the same object until the nodes change.
        """
        if alive is self._seen_alive:
            return False
        self._seen_alive = alive
        lost = self._loading.keys() - alive
        for node_id in lost:
            self._note_end(node_id, *self._loading.pop(node_id))
        return bool(lost)

    def _note_end(self, node_id: str, process: str, indices: Indices) -> None:
        if indices:
            self._ended[node_id, process] = (
                self._ended.get((node_id, process), frozenset()) | indices
            )
            self._given_up = None

    def given_up(self) -> dict[int | None, list[str]]:
        """The shards that are given to no further node, each with the nodes that ended."""
        if self._given_up is None:
            ends: dict[int | None, list[str]] = {}
            for (node_id, _), indices in sorted(self._ended.items()):
                for index in indices:
                    ends.setdefault(index, []).append(node_id)
            self._given_up = {i: nodes for i, nodes in ends.items() if len(nodes) >= _MOST_ENDS}
        return self._given_up
