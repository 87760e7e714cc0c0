"""A snapshot of one node, for its page and its metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, field

from cache_protocol.storage.shard_files import MappedShard
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Viewer
from cache_server.node.loads.version_state import VersionState
from cache_server.node.traffic import Counts
from cache_server.scratch.scratch import Counts as OrderCounts
from cache_server.shards.put_key import PutKey
from cache_server.shards.version_key import VersionKey


@dataclass(frozen=True)
class VersionStatus:
    """One version on a node.

    Attributes:
        served: shards whose rows are served.
        sealed: shards on disk; a shard is served once its row ids are known.
        loading: running loads and copies.
        failed: loads and copies that failed.
        num_bytes: of the sealed shards.
    """

    key: VersionKey
    served: int
    sealed: int
    loading: int
    failed: int
    num_bytes: int

    @classmethod
    def of(
        cls, key: VersionKey, sealed: Collection[MappedShard], state: VersionState | None
    ) -> VersionStatus:
        """The status of a version that is stored, or has a state, or both."""
        return cls(
            key,
            served=len(state.row_starts or ()) if state and state.rows else 0,
            sealed=len(sealed),
            loading=len(state.unfinished()) if state else 0,
            failed=len(state.failures) if state else 0,
            num_bytes=sum(shard.sealed.num_bytes for shard in sealed),
        )


def version_statuses(
    stored: Mapping[VersionKey, Mapping[int, MappedShard]],
    states: Mapping[VersionKey, VersionState],
    viewer: Viewer,
) -> tuple[VersionStatus, ...]:
    """The versions on a node that a viewer sees, by name. All puts of a write are shown as one.

    Args:
        stored: the sealed shards.
        states: of the versions that the node should hold.
    """
    sealed: dict[VersionKey, list[MappedShard]] = {}
    for key, shards in stored.items():
        put = PutKey.of(key.fingerprint)
        shown = key if put is None else VersionKey(key.dataset, f"write-{put.write_id}")
        sealed.setdefault(shown, []).extend(shards.values())
    return tuple(
        VersionStatus.of(key, sealed.get(key, ()), state)
        for key in sorted({*sealed, *states}, key=astuple)
        for state in [states.get(key)]
        if viewer.can_read(key.dataset, ()) or (state is not None and state.is_seen_by(viewer))
    )


@dataclass(frozen=True)
class CacheStatus:
    """The whole cache, as the coordinator knows it.

    Attributes:
        nodes: lost ones too.
        datasets: from `Coordinator.summaries`.
        jobs: from `Jobs.jobs`, without ranks.
        job: those of the name that was asked for, with ranks.
        damaged_entries: catalogue entries that cannot be read.
        num_evicted, bytes_evicted: see `Evictions`.
    """

    nodes: tuple[pb.Node, ...]
    datasets: tuple[pb.DatasetInfo, ...]
    jobs: tuple[pb.JobInfo, ...] = ()
    job: tuple[pb.JobInfo, ...] = ()
    damaged_entries: int = 0
    num_evicted: int = 0
    bytes_evicted: int = 0


@dataclass(frozen=True)
class NodeStatus:
    """One node.

    Attributes:
        node: id, locations and memory; ``alive`` is always true.
        ready: the answer to readiness probes.
        coordinator: ``host:port`` of the coordinator's control port; empty until it answers.
        coordinator_page: address of its status page; empty until it answers.
        versions: those on this node that the viewer sees.
        huge_page_bytes: bytes of the shard files in huge pages.
        counts: of its requests.
        cache: only on a coordinator.
        loads_running: loads and copies of all versions on this node.
        scrubbed_bytes, damaged_shards: see `Scrub`.
        orders: that readers announced.
    """

    node: pb.Node
    ready: bool
    coordinator: str
    coordinator_page: str
    versions: tuple[VersionStatus, ...]
    huge_page_bytes: int
    counts: Counts
    cache: CacheStatus | None
    loads_running: int = 0
    scrubbed_bytes: int = 0
    damaged_shards: int = 0
    orders: OrderCounts = field(default_factory=OrderCounts)
