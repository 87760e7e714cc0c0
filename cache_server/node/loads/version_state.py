"""The state of one version on one node: what is desired, loading, served and reported."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass, field

from cache_protocol.storage.row_sets import union
from cache_protocol.storage.shard_files import MappedShard
from cache_server.auth.principals import Viewer
from cache_server.node.desired import DesiredVersion
from cache_server.node.loads.loading import Job, SpooledTables
from cache_server.node.reconcile import ActualVersion
from cache_server.shards.resident_rows import ResidentRows

_COPY_AGAIN_S = 30.0  # after a failed copy, for example for lack of room


def is_erased(shard: MappedShard, places: bytes) -> bool:
    """Whether the rows of a row set are erased in a shard."""
    return union(shard.erased, places) == shard.erased


@dataclass
class Load:
    """A job in the pool."""

    future: Future[None]
    job: Job
    knows: int = 0  # the last act when it began


@dataclass
class VersionState:
    """One version on one node. Changed inside the node's lock.

    The heartbeat thread alone changes what is desired, loaded and served, and may read that without
    the lock. Load threads write failures, waits and ``num_shards``; readers write ``last_read``.

    Attributes:
        tables: that are read whole.
        loads, failures, waits: by shard index; None is the whole query.
        may_pass: the failures that a later load may not meet.
        rows, row_starts: what is served; None before any row is.
        sealed_rows: the sealed shards, with rows numbered by shard; None: made when it is read.
        reported: the sealed shards that the coordinator knows of.
        copy_again_at: monotonic seconds; failed copies wait until then.
        num_shards: of the result of a whole query, once it is known.
        last_read: monotonic seconds; None if no row was read.
        notes: what the loads changed, for people; load threads add to it.
        files_read: by the loads; a file counts once for each shard that is made of it.
        is_retired: it is served no more, and its last loads have yet to end.
        erasing: the shards with rows that must be erased: no one may read them.
        old_rows: that were served, and are still being read.
        forgot: see `ActualVersion.forgot`.
    """

    desired: DesiredVersion
    tables: SpooledTables
    loads: dict[int | None, Load] = field(default_factory=dict)
    failures: dict[int | None, str] = field(default_factory=dict)
    may_pass: set[int | None] = field(default_factory=set)
    waits: dict[int | None, str] = field(default_factory=dict)
    rows: ResidentRows | None = None
    row_starts: Mapping[int, int] | None = None
    sealed_rows: ResidentRows | None = None
    reported: Set[int] = frozenset()
    copy_again_at: float = 0.0
    num_shards: int | None = None
    last_read: float | None = None
    notes: set[str] = field(default_factory=set)
    files_read: int = 0
    is_retired: bool = False
    erasing: frozenset[int] = frozenset()
    old_rows: list[ResidentRows] = field(default_factory=list)
    forgot: int = 0

    def is_seen_by(self, viewer: Viewer) -> bool:
        """Whether a viewer may read its rows."""
        plan = self.desired.plan
        return viewer.can_read(plan.key.dataset, plan.readers)

    def update(self, desired: DesiredVersion) -> None:
        """Notes what is desired now."""
        self.desired = desired
        if desired.num_shards is not None:
            self.num_shards = desired.num_shards

    def retire_rows(self, indices: Collection[int] | None) -> None:
        """Ends all reads: rows of some shards are about to be overwritten.

        Args:
            indices: of these shards; None: all of the version.
        """
        shards = self.row_starts or {}
        self.erasing = frozenset(shards if indices is None else indices)
        if indices is None:  # served again by the next reconciliation
            self.old_rows += [self.rows] if self.rows is not None else []
            self.rows, self.row_starts = None, {}
        self.old_rows += [self.sealed_rows] if self.sealed_rows is not None else []
        self.sealed_rows = None
        for rows in self.old_rows:
            rows.make_old()

    @property
    def is_read(self) -> bool:
        """Whether rows that were served are still being read."""
        self.old_rows = [rows for rows in self.old_rows if rows.is_read]
        return bool(self.old_rows)

    def cancel(self, indices: Set[int | None] | None = None) -> None:
        """Cancels loads; None for all."""
        for index, load in self.loads.items():
            if indices is None or index in indices:
                load.job.cancelled.set()

    def retire(self) -> None:
        """Ends serving and loading."""
        self.is_retired, self.rows, self.sealed_rows = True, None, None
        self.cancel()

    def fail(self, index: int | None, reason: str, *, may_pass: bool = False) -> None:
        """Notes a load that failed for good.

        Args:
            may_pass: the same load may succeed later.
        """
        self.failures[index] = reason
        (self.may_pass.add if may_pass else self.may_pass.discard)(index)
        self.copy_again_at = time.monotonic() + _COPY_AGAIN_S

    def forget(self, indices: Set[int | None]) -> None:
        """Forgets why these loads failed or wait."""
        for index in indices:
            self.failures.pop(index, None)
            self.waits.pop(index, None)

    def unfinished(self) -> dict[int | None, Load]:
        """The loads that have not ended."""
        return {index: load for index, load in self.loads.items() if not load.future.done()}

    def snapshot(self, loading: Mapping[int | None, int]) -> ActualVersion:
        """A copy, without the shards on the disk.

        Args:
            loading: see `ActualVersion`.
        """
        now = time.monotonic()
        return ActualVersion(
            desired=self.desired,
            is_retired=self.is_retired,
            reported=self.reported,
            row_starts=self.row_starts,
            loading=loading,
            running={index for index in loading if self.loads[index].future.running()},
            failures=dict(self.failures),
            may_pass=frozenset(self.may_pass),
            waits=dict(self.waits),
            notes=frozenset(self.notes),
            files_read=self.files_read,
            may_copy_again=now >= self.copy_again_at,
            num_shards=self.num_shards,
            idle_s=None if self.last_read is None else now - self.last_read,
            has_spooled_tables=self.tables.is_used,
            forgot=self.forgot,
        )
