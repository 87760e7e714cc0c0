"""One version on one node: what is asked of it, what is under way, what is served and reported."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from cache_protocol.storage.layout import Layout, schema_from_bytes
from cache_protocol.storage.shard_files import MappedShard
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.loading import Job, WholeTables
from cache_server.shards.resident_rows import ResidentRows
from cache_server.shards.version_key import VersionKey

_COPY_AGAIN_S = 30.0  # after a copy that failed, such as for want of room


@dataclass
class Load:
    """A job in the pool."""

    future: Future[None]
    job: Job


@dataclass
class Serving:
    """What a node has to do for one version. Inside the node's lock.

    Attributes:
        wanted: the shards that the node should hold, by number.
        reported: the sealed shards that the coordinator knows of.
        loads, failures: by shard.
        waits: why a load is to be begun again, by shard; None is the whole query.
        copy_again_at: monotonic seconds; until then shards whose copy failed are left alone.
        whole_run, failure, num_shards: of a whole query, if this node is asked to run one.
        last_read: monotonic seconds; None while nobody has read its rows here.
        retired: not wanted any more, but some of its loads have yet to end.
    """

    key: VersionKey
    desired: pb.DesiredDataset
    whole_tables: WholeTables
    wanted: Mapping[int, pb.DesiredShard] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    loads: dict[int, Load] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    waits: dict[int | None, str] = field(default_factory=dict)
    copy_again_at: float = 0.0
    whole_run: Load | None = None
    failure: str = ""
    num_shards: int | None = None
    rows: ResidentRows | None = None
    row_starts: dict[int, int] = field(default_factory=dict)
    last_read: float | None = None
    retired: bool = False

    def all_loads(self) -> list[Load]:
        """The jobs under way, or just ended."""
        return [*self.loads.values(), *([self.whole_run] if self.whole_run else [])]

    def want(self, desired: pb.DesiredDataset) -> None:
        """Takes in what is asked of it now."""
        self.desired = desired
        self.wanted = {shard.index: shard for shard in desired.shards}

    def wanted_bytes(self) -> int:
        """Of all shards that it should hold, estimated where they are not sealed anywhere yet."""
        return sum(
            shard.num_bytes or sum(split.estimated_bytes for split in shard.splits)
            for shard in self.wanted.values()
        )

    def fail(self, index: int | None, reason: str) -> None:
        """A load ended for good; ``index`` is None of a whole query."""
        if index is None:
            self.failure = reason
        else:
            self.failures[index] = reason
            self.copy_again_at = time.monotonic() + _COPY_AGAIN_S

    def forget_unwanted(self) -> None:
        """Forgets what failed or waits of that which is another node's now.

        What comes back is tried again; until then it is no failure of this one.
        """
        wanted: set[int | None] = {*self.wanted}
        if self.desired.run_whole:
            wanted.add(None)
        else:
            self.failure = ""
        self.failures = {i: reason for i, reason in self.failures.items() if i in wanted}
        self.waits = {i: reason for i, reason in self.waits.items() if i in wanted}

    def forgive_copies(self) -> None:
        """Lets copies that failed be tried again: there may be room by now.

        What a source said, it would say again.
        """
        if self.failures and time.monotonic() >= self.copy_again_at:
            wanted = self.wanted
            for index in [i for i in self.failures if i in wanted and wanted[i].copy_from]:
                del self.failures[index]

    def publish(self, sealed: Mapping[int, MappedShard]) -> bool:
        """Gives readers what is sealed, once row ids are known; whether that is something new."""
        if not self.desired.rows_fixed:
            return False
        starts = {index: shard.row_start for index, shard in self.wanted.items() if index in sealed}
        if self.rows is not None and starts == self.row_starts:
            return False
        layout = Layout(schema_from_bytes(self.desired.plan.logical_schema))
        # Shards without rows share their start with the next one; they serve nothing.
        shards = {start: sealed[i] for i, start in starts.items() if sealed[i].sealed.num_rows}
        self.rows = ResidentRows(self.key, layout, self.desired.num_rows, shards)
        self.row_starts = starts
        return True

    def is_settled(self) -> bool:
        """Whether every shard asked for is served, or failed: nothing is waited for any more."""
        settled = self.row_starts.keys() | self.failures.keys()
        return self.rows is not None and self.wanted.keys() <= settled

    def report(self, actual: pb.ActualDataset, num_shards: int | None) -> None:
        """Adds what is under way, what failed and when rows were read.

        Args:
            num_shards: of a whole query that has run here.
        """
        actual.attempt = self.desired.plan.attempt
        for index, load in self.loads.items():
            actual.shards.add(index=index, rows_loaded=load.job.rows)
        for index, reason in self.failures.items():
            actual.shards.add(index=index, failure=reason)
        if self.whole_run is not None:
            actual.rows_loaded = self.whole_run.job.rows
        actual.waits = max(self.waits.values(), default="")
        if self.last_read is not None:
            actual.idle_s = time.monotonic() - self.last_read
        if num_shards is not None:
            actual.num_shards = num_shards
        actual.failure = self.failure
