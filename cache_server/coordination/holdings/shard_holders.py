"""The live nodes that hold each shard of one version, brought up to date node by node.

A cache may have 1,000 nodes with 100,000 shards, and most reports change a few shards of one node.
So an update costs as much as the reports that changed, not as much as the version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.holdings.holder_checks import HolderChecks
from cache_server.coordination.versions.version_record import VersionRecord

NOTHING = pb.ActualDataset()


@dataclass(slots=True)
class NodeReport:
    """What the last report of a live node says of a version.

    Attributes:
        actual: the report.
        revision: of the proofs of its claims.
        saying, holding, serving: the shards that it says it holds, holds, and serves.
        unrecorded: sealed shards without a record yet.
        loading: shard -> rows loaded, of those that are not sealed.
        has_trouble: it has a failure, or a shard that contradicts the record.
    """

    actual: pb.ActualDataset
    revision: int
    saying: list[int] = field(default_factory=list)
    holding: list[int] = field(default_factory=list)
    serving: list[int] = field(default_factory=list)
    unrecorded: list[int] = field(default_factory=list)
    loading: dict[int, int] = field(default_factory=dict)
    has_trouble: bool = False

    def has_only(self, shards: Sequence[int]) -> bool:
        """Whether the node holds these shards for certain, and says nothing of others."""
        is_all = len(self.holding) == len(self.actual.shards) == len(shards)
        return is_all and not self.has_trouble and set(self.holding) == set(shards)


class ShardHolders:
    """The holders of the shards of one version. One thread at a time.

    Attributes:
        saying, holding, serving: shard -> the live nodes that say that they hold it, that hold it
            for certain, and that serve it. Only shards that have such a node.
        reports: by live node.
        unready_at: a shard that was not ready when it was last looked at; see `Holdings.is_ready`.
        changed: nodes whose claims may have changed since the last update.
    """

    def __init__(self, version: VersionRecord, checks: HolderChecks) -> None:
        self._version = version
        self._checks = checks
        self.saying: dict[int, set[str]] = {}
        self.holding: dict[int, set[str]] = {}
        self.serving: dict[int, set[str]] = {}
        self.reports: dict[str, NodeReport] = {}
        self.unready_at = 0
        self.changed: set[str] = set()
        self._as_of: object = None
        self._unrecorded: dict[int, set[str]] = {}
        self._num_sealed = 0
        self._has_starts = False
        self._erasures = version.erasures

    def update(
        self, alive: Set[str], said_by: Callable[[str], pb.ActualDataset], as_of: object
    ) -> None:
        """Takes what changed since the last call: reports, proofs, records and live nodes.

        Args:
            alive: the live nodes.
            said_by: the last report of a live node about this attempt of the version. A report
                that did not change is the same object as before.
            as_of: None, or equal to that of the last call if only ``changed`` nodes have changed.
        """
        key = self._version.pinned.key
        outdated = frozenset(self._outdated())
        nodes = alive
        if as_of is not None and as_of == self._as_of:
            nodes = (self.changed | outdated) & alive
        else:
            for node_id in self.reports.keys() - alive:
                self._take_out(node_id)
        for node_id in nodes:
            actual, revision = said_by(node_id), self._checks.revision(key, node_id)
            known = self.reports.get(node_id)
            if known is None:
                self._put_in(node_id, actual, revision)
            elif known.actual is not actual or known.revision != revision or node_id in outdated:
                self._take_out(node_id)
                self._put_in(node_id, actual, revision)
        self._as_of = as_of
        self.changed.clear()

    def _outdated(self) -> Set[str]:
        """The nodes whose claims count differently by the records since the last call."""
        sealed = self._version.sealed
        new = islice(sealed, self._num_sealed, None) if self._unrecorded else ()
        outdated = set().union(*(self._unrecorded.get(index, ()) for index in new))
        self._num_sealed = len(sealed)
        has_starts = self._version.row_starts() is not None
        if self._erasures is not self._version.erasures:
            self._erasures = self._version.erasures
            return self.reports.keys()
        if has_starts and not self._has_starts:
            self._has_starts = True
            return self.reports.keys()
        return outdated

    def _put_in(self, node_id: str, actual: pb.ActualDataset, revision: int) -> None:
        version, starts = self._version, self._version.row_starts()
        proven = self._checks.holders(version.pinned.key)
        report = NodeReport(actual, revision, has_trouble=bool(actual.failure))
        for shard in actual.shards:
            index = shard.index
            if not shard.sealed:
                report.has_trouble |= bool(shard.failure)
                report.loading[index] = shard.rows_loaded
            elif index not in version.sealed:
                # From an earlier, dropped version with the same content.
                report.unrecorded.append(index)
            elif not version.agrees(shard):
                report.has_trouble = True
            else:
                report.saying.append(index)
                if version.is_outdated(shard):
                    continue
                if node_id in proven.get(index, ()):
                    report.holding.append(index)
                    if starts and shard.rows_fixed and shard.row_start == starts[index]:
                        report.serving.append(index)
        self.reports[node_id] = report
        for nodes, indices in self._by_shard(report):
            for index in indices:
                nodes.setdefault(index, set()).add(node_id)

    def _take_out(self, node_id: str) -> None:
        for nodes, indices in self._by_shard(self.reports.pop(node_id)):
            for index in indices:
                nodes[index].discard(node_id)
                if not nodes[index]:
                    del nodes[index]

    def _by_shard(self, report: NodeReport) -> Iterable[tuple[dict[int, set[str]], list[int]]]:
        return (
            (self.saying, report.saying),
            (self.holding, report.holding),
            (self.serving, report.serving),
            (self._unrecorded, report.unrecorded),
        )
