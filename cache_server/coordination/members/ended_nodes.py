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
    _ends: dict[int | None, set[tuple[str, str]]] = field(default_factory=dict)

    def apply_report(self, node_id: str, process: str, running: Indices) -> None:
        """Notes the running loads of a process: it lives, so the one before it has ended.

        Args:
            process: changes when the node starts again.
        """
        before, indices = self._loading.get(node_id, (process, frozenset[int | None]()))
        if before != process:
            self._note_end(node_id, before, indices)
        for ends in self._ends.values():
            ends.discard((node_id, process))  # it was silent, and is back
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
        for index in indices:
            self._ends.setdefault(index, set()).add((node_id, process))

    def given_up(self) -> dict[int | None, list[str]]:
        """The shards that are given to no further node, each with the nodes that ended."""
        if not self._ends:
            return {}
        return {
            index: sorted(node_id for node_id, _ in ends)
            for index, ends in self._ends.items()
            if len(ends) >= _MOST_ENDS
        }
