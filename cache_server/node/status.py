"""One node at one moment, as its page and its metrics show it."""

from __future__ import annotations

from dataclasses import dataclass

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.traffic import Counts
from cache_server.shards.version_key import VersionKey


@dataclass(frozen=True)
class VersionStatus:
    """One version on a node.

    Attributes:
        served: shards whose rows are served.
        sealed: shards on disk; those that are not served yet wait for their row ids.
        loading, failed: shards under way, and shards that could not be loaded or copied.
        num_bytes: of the sealed shards.
    """

    key: VersionKey
    served: int
    sealed: int
    loading: int
    failed: int
    num_bytes: int


@dataclass(frozen=True)
class CacheStatus:
    """What a coordinator knows of the whole cache.

    Attributes:
        nodes: every node heard of.
        datasets: as `Coordinator.summaries` has them.
    """

    nodes: tuple[pb.Node, ...]
    datasets: tuple[pb.DatasetInfo, ...]


@dataclass(frozen=True)
class NodeStatus:
    """One node.

    Attributes:
        node: id, locations and memory; ``alive`` is always true.
        ready: what readiness probes are told.
        coordinator: ``host:port`` of the control port of the coordinator; empty until it answered.
        versions: what this node has of each version.
        huge_page_bytes: of the shard files, that lie in huge pages.
        counts: what it served.
        cache: of a coordinator only.
    """

    node: pb.Node
    ready: bool
    coordinator: str
    versions: tuple[VersionStatus, ...]
    huge_page_bytes: int
    counts: Counts
    cache: CacheStatus | None
