"""The nodes that are drained: they take no shards, and theirs move to other nodes.

A drain ends when it is taken back, or when the node starts again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cache_protocol.errors import RequestError, some_of
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.catalogue import Catalogue
from cache_server.shards.version_key import Moves

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drain:
    """The drain of one node.

    Attributes:
        process: of the node.
        moves: see `DrainPlan`.
    """

    process: str
    moves: Moves = field(default_factory=dict)


class Drains:
    """The drains of a cache. One thread at a time.

    Args:
        catalogue: keeps them over a restart.

    Attributes:
        by_node: another object after every change.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self.by_node: Mapping[str, Drain] = {
            node_id: Drain(process, moves)
            for node_id, (process, moves) in catalogue.read_drains().items()
        }

    def begin(self, node_id: str, drain: Drain) -> None:
        """Begins a drain."""
        self._change({**self.by_node, node_id: drain})

    def end(self, *node_ids: str) -> None:
        """Ends drains."""
        left = {node: drain for node, drain in self.by_node.items() if node not in node_ids}
        if len(left) < len(self.by_node):
            self._change(left)

    def ended(self, processes: Mapping[str, str]) -> list[str]:
        """The drained nodes that started again, or are no members any more.

        Args:
            processes: of those that are members; empty: it has not reported since the coordinator
                started.
        """
        return [
            node_id
            for node_id, drain in self.by_node.items()
            if processes.get(node_id, "left") not in {"", drain.process}
        ]

    def _change(self, by_node: Mapping[str, Drain]) -> None:
        self.by_node = by_node
        try:
            drains = {n: (drain.process, drain.moves) for n, drain in by_node.items()}
            self._catalogue.write_drains(drains)
        except OSError as error:  # after a restart the nodes take shards again
            logger.error("drained nodes not written reason=%s", error.strerror)


def find_node(nodes: Iterable[pb.Node], name: str) -> pb.Node:
    """The node that a person means. Pure.

    Args:
        name: an id, a Flight or control endpoint, the name that the page shows, a host, or the
            first label of one, as of a pod.

    Raises:
        RequestError: no node has this name, or several have; lists them.
    """
    known = list(nodes)
    for names in (_exact_names, _host_names):
        found = [node for node in known if name in names(node)]
        if len(found) == 1:
            return found[0]
        if found:
            ids = some_of(f"{node.id} at {node.flight_location}" for node in found)
            raise RequestError(f"{name!r} names {len(found)} nodes, {ids}: give an id")
    ids = some_of((f"{node.id} at {node.flight_location}" for node in known), like=name)
    raise RequestError(f"no node {name[:200]!r}; nodes: {ids}")


def _exact_names(node: pb.Node) -> set[str]:
    flight = node.flight_location
    return {node.id, flight, flight.rpartition("/")[2], node.control_location} - {""}


def _host_names(node: pb.Node) -> set[str]:
    host = urlsplit(node.flight_location).hostname or ""
    return {node.name, host, host.partition(".")[0]} - {""}
