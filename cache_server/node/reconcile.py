"""Decides what a node does to come from what it holds to what it should hold. Pure."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from cache_protocol.storage.row_sets import union
from cache_server.coordination.members.ended_nodes import WHOLE_QUERY
from cache_server.node.desired import DesiredShard, DesiredState, DesiredVersion
from cache_server.shards.version_key import VersionKey


@dataclass(frozen=True)
class ActualVersion:
    """One version on a node at one moment.

    Attributes:
        desired: as last requested; None for a version that only lies on the disk.
        is_retired: it is served no more, and its last loads have yet to end.
        sealed: the shards on the disk.
        reported: the sealed shards that the coordinator knows of.
        row_starts: first row id of each served shard; None before any row is served.
        loading: rows loaded so far by each load under way.
        running: of these, the loads that have begun.
        failures: the reason of each failed load.
        may_pass: the failures that a later load may not meet.
        waits: why a load is tried again later.
        notes: what the loads changed, for people.
        files_read: by the loads.
        may_copy_again: enough time has passed since the last failure.
        num_shards: of the result of a whole query, once it is known.
        idle_s: since rows were last read; None if they never were.
        has_spooled_tables: of tables that are read whole.
        erased: of the sealed shards: see `SealedShard.erased`.
        forgot: nothing older than this act is here: see `ActualDataset.forgot`.
    """

    desired: DesiredVersion | None = None
    is_retired: bool = False
    sealed: Set[int] = frozenset()
    reported: Set[int] = frozenset()
    row_starts: Mapping[int, int] | None = None
    loading: Mapping[int | None, int] = field(default_factory=dict)
    running: Set[int | None] = frozenset()
    failures: Mapping[int | None, str] = field(default_factory=dict)
    may_pass: frozenset[int | None] = frozenset()
    waits: Mapping[int | None, str] = field(default_factory=dict)
    notes: Set[str] = frozenset()
    files_read: int = 0
    may_copy_again: bool = False
    num_shards: int | None = None
    idle_s: float | None = None
    has_spooled_tables: bool = False
    erased: Mapping[int, str] = field(default_factory=dict)
    forgot: int = 0

    def lacks_erasure(self, wanted: DesiredVersion) -> frozenset[int]:
        """The sealed shards with rows that must be erased."""
        return frozenset(
            index
            for index, places in wanted.erased.items()
            if index in self.sealed
            and union(places, erased := base64.b64decode(self.erased.get(index, ""))) != erased
        )


@dataclass(frozen=True)
class Retire:
    """Stop serving a version, cancel its loads and drop its sealed shards; loads must still end."""

    key: VersionKey


@dataclass(frozen=True)
class Remove:
    """Stop serving a version without running loads, and remove its files."""

    key: VersionKey


@dataclass(frozen=True)
class Update:
    """Note what is desired of a version, which may be new."""

    desired: DesiredVersion


@dataclass(frozen=True)
class Forget:
    """Forget why these loads failed or wait."""

    key: VersionKey
    indices: frozenset[int | None]


@dataclass(frozen=True)
class Cancel:
    """Cancel these loads."""

    key: VersionKey
    indices: frozenset[int | None]


@dataclass(frozen=True)
class Publish:
    """Serve the rows of these sealed shards, each from its first row id, and report that."""

    key: VersionKey
    row_starts: Mapping[int, int]


@dataclass(frozen=True)
class Erase:
    """Overwrite rows in the files of these shards, which are not served meanwhile."""

    key: VersionKey
    places: Mapping[int, bytes]


@dataclass(frozen=True)
class DropShards:
    """Remove the files of these sealed shards."""

    key: VersionKey
    indices: frozenset[int]


@dataclass(frozen=True)
class CloseTables:
    """Remove the spooled tables of a version that loads nothing."""

    key: VersionKey


@dataclass(frozen=True)
class StartLoads:
    """Load or copy these shards."""

    key: VersionKey
    shards: tuple[DesiredShard, ...]


@dataclass(frozen=True)
class StartWholeQuery:
    """Run the whole query.

    Attributes:
        missing: the shards to keep of it; empty: all of them.
    """

    key: VersionKey
    missing: frozenset[int]


Action = (
    Retire
    | Remove
    | Update
    | Forget
    | Cancel
    | Publish
    | Erase
    | DropShards
    | CloseTables
    | StartLoads
    | StartWholeQuery
)


@dataclass(frozen=True)
class Reconciliation:
    """What a node does now.

    Attributes:
        actions: to be done in this order.
        is_ready: after them, every desired shard of a loaded version is served, or failed.
            Loads that run do not count: a node serves other versions meanwhile.
    """

    actions: tuple[Action, ...]
    is_ready: bool


class Orphans:
    """Files that the coordinator does not know, and since when.

    Args:
        keep_s: seconds for which they stay.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._since: dict[VersionKey, float] = {}

    def expired(self, orphans: Iterable[VersionKey], now: float) -> set[VersionKey]:
        """Those that stayed for long enough; the others are forgotten once they are none.

        Args:
            now: monotonic seconds.
        """
        self._since = {key: self._since.get(key, now) for key in orphans}
        return {key for key, since in self._since.items() if now - since >= self._keep_s}


def reconcile(
    desired: DesiredState,
    actual: Mapping[VersionKey, ActualVersion],
    expired: Set[VersionKey] = frozenset(),
) -> Reconciliation:
    """The actions that bring a node from ``actual`` towards ``desired``.

    Files go only if the coordinator names them: see `coordination.versions.file_fates`.

    Args:
        actual: every version that the node should hold or stores.
        expired: the orphans that the node keeps no longer.
    """
    actions: list[Action] = []
    is_ready = True
    for key, version in actual.items():
        if key not in desired.versions and (
            version.is_retired
            or key in desired.gone
            or key in expired
            or (key in desired.orphans and not version.sealed)
        ):
            actions.append(_leave(key, version))
    for key, wanted in desired.versions.items():
        version = actual.get(key, ActualVersion())
        if version.is_retired or _is_other_attempt(version, wanted):
            actions.append(_leave(key, version))
            if version.loading:
                continue
            version = ActualVersion()
        row_starts = _row_starts(wanted, version)
        actions += _actions(wanted, version, row_starts)
        is_ready &= row_starts is None or _is_settled(wanted, version, row_starts)
    return Reconciliation(tuple(actions), is_ready)


def _is_other_attempt(version: ActualVersion, wanted: DesiredVersion) -> bool:
    return version.desired is not None and version.desired.plan.attempt != wanted.plan.attempt


def _leave(key: VersionKey, version: ActualVersion) -> Action:
    return Retire(key) if version.loading else Remove(key)


def _actions(
    wanted: DesiredVersion, version: ActualVersion, row_starts: Mapping[int, int] | None
) -> Iterator[Action]:
    key = wanted.plan.key
    if version.desired is not wanted:
        yield Update(wanted)
    forgotten = _forgotten(wanted, version)
    if forgotten:
        yield Forget(key, forgotten)
    unwanted = frozenset(index for index in version.loading if not _is_wanted(wanted, index))
    if unwanted:
        yield Cancel(key, unwanted)
    if row_starts is not None and row_starts != version.row_starts:
        yield Publish(key, row_starts)
    if stale := version.lacks_erasure(wanted):
        yield Erase(key, {index: wanted.erased[index] for index in stale})
    surplus = _surplus(wanted, version)
    if surplus:
        yield DropShards(key, surplus)
    busy = version.loading.keys() | (version.failures.keys() - forgotten)
    shards = tuple(
        shard
        for shard in wanted.obtainable
        if shard.index not in version.sealed and shard.index not in busy
    )
    if shards:
        yield StartLoads(key, shards)
    elif version.has_spooled_tables and not version.loading:
        yield CloseTables(key)
    if wanted.run_whole and WHOLE_QUERY not in busy and not _has_run(wanted, version):
        yield StartWholeQuery(key, wanted.missing)


def _is_wanted(wanted: DesiredVersion, index: int | None) -> bool:
    return wanted.run_whole if index is WHOLE_QUERY else index in wanted.shards


def _forgotten(wanted: DesiredVersion, version: ActualVersion) -> frozenset[int | None]:
    """Loads that other nodes do now, and failed copies: there may be room for them by now.

    A source that failed would fail again.
    """
    forgotten = {
        index for index in (*version.failures, *version.waits) if not _is_wanted(wanted, index)
    }
    if version.may_copy_again:
        copies = {index for index, shard in wanted.shards.items() if shard.copy}
        forgotten |= copies & version.failures.keys()
    return frozenset(forgotten)


def _surplus(wanted: DesiredVersion, version: ActualVersion) -> frozenset[int]:
    """Sealed shards to drop: not those that the coordinator has not decided about yet."""
    if wanted.run_whole:
        return frozenset()
    return frozenset(
        index
        for index in version.sealed
        if index not in wanted.shards and index in version.reported
    )


def _has_run(wanted: DesiredVersion, version: ActualVersion) -> bool:
    """Whether the whole query left nothing to seal."""
    num_shards = version.num_shards if wanted.num_shards is None else wanted.num_shards
    return num_shards is not None and wanted.missing <= version.sealed


def _row_starts(wanted: DesiredVersion, version: ActualVersion) -> Mapping[int, int] | None:
    """First row id of each shard to serve; None where no row is served yet."""
    if not wanted.rows_fixed:
        return version.row_starts
    stale = version.lacks_erasure(wanted)
    return {
        index: shard.row_start
        for index, shard in wanted.shards.items()
        if index in version.sealed and index not in stale
    }


def _is_settled(
    wanted: DesiredVersion, version: ActualVersion, row_starts: Mapping[int, int]
) -> bool:
    """Whether every desired shard is served, or failed."""
    failed = version.failures.keys() - _forgotten(wanted, version)
    return wanted.shards.keys() <= row_starts.keys() | failed
