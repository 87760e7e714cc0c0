"""The state of one version in the coordinator."""

from __future__ import annotations

import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from cache_protocol.errors import (
    CacheError,
    LoadError,
    PermissionDeniedError,
    TransientLoadError,
    some_of,
)
from cache_protocol.storage.row_index import row_starts
from cache_protocol.storage.row_sets import RowIds
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire import tracing
from cache_server.auth.principals import Principal, Role
from cache_server.coordination.catalogue import (
    Catalogue,
    CatalogueEntry,
    CatalogueLog,
    SealedSummary,
)
from cache_server.coordination.catalogue_store import CatalogueLostError
from cache_server.coordination.erasures import Erasures
from cache_server.coordination.members.ended_nodes import WHOLE_QUERY, EndedNodes
from cache_server.coordination.versions.load_run import LoadRun
from cache_server.coordination.versions.sealed_groups import SealedGroups
from cache_server.coordination.versions.states import TRANSITIONS, State, Step
from cache_server.coordination.versions.writes import ChosenRows, puts_of
from cache_server.plan.pinned_version import PinnedVersion
from cache_server.plan.shard_plan import same_shards
from cache_server.shards.version_key import VersionKey
from cache_server.source.pinned import Pin

logger = logging.getLogger(__name__)


@dataclass
class SealedSums:
    """Sums over the sealed shards of a version.

    Attributes:
        nulls: see `SealedSummary`.
    """

    num_shards: int = 0
    num_rows: int = 0
    num_bytes: int = 0
    nulls: Counter[str] = field(default_factory=Counter)


@dataclass
class VersionRecord:
    """One version, as planned and as the nodes report it.

    Attributes:
        state: what became of it; only `advance` changes it.
        failure: why it failed; the first failure stays.
        pins: keep the source unchanged; closed after the last split was read.
        result_shards: number of shards of a whole query; None until it has run.
        last_used: time of the last read; None if there was none.
        asked_at: time of the request; None for a version from before a restart.
        owner: the principal that asked for the load.
        waiting: node -> the shards without a record that it holds.
        contradicted: the nodes that hold shards other than those of the record.
        put_by: shard -> the node whose put it is, until that node has moved it.
        ended: the nodes that ended while they loaded shards of it.
        notes: what the load changed, for people; not in the catalogue.
        base: an earlier version that has some of its shards too; it may be forgotten meanwhile.
        reused: shard -> the shard of ``base`` with the same content.
        homes: the nodes that had the content of each shard before; empty: none had any.
        holders: the nodes that had the rows of its write, or all replicas of it.
        complete_at: the number of the heartbeat that completed the replicas of its write; None:
            they are not complete. See `is_confirmed`.
        changes: counted, so that a view of the version tells whether it is outdated.
        log: the groups in which its shards were sealed.
        span: of its load; None: it is not traced.
        run: its load, for lineage; None: it began before.
        load_s: seconds that its load took; 0: unknown.
        wanted_at: when someone last asked for its load, or it became ready.
        evictions: since the coordinator started; also one before.
        recall_error: why it could not be loaded again when it was last read; None: it could.
        erasures: its rows that were forgotten.
        unerased: the shards whose record is of before their last erasure, or may be.
        tombstones: the number of the last act on its dataset.
    """

    pinned: PinnedVersion
    created: int
    secrets: pb.Secrets = field(default_factory=pb.Secrets)
    pins: tuple[Pin, ...] = ()
    sealed: dict[int, SealedSummary] = field(default_factory=dict)
    failure: CacheError | None = None
    attempt: int = 0
    state: State = State.LOADING
    result_shards: int | None = None
    last_used: float | None = None
    asked_at: float | None = None
    ended: EndedNodes = field(default_factory=EndedNodes)
    notes: set[str] = field(default_factory=set)
    owner: str = ""
    waiting: dict[str, frozenset[int]] = field(default_factory=dict)
    contradicted: set[str] = field(default_factory=set)
    put_by: dict[int, str] = field(default_factory=dict)
    base: VersionKey | None = None
    reused: Mapping[int, int] = field(default_factory=dict)
    homes: Sequence[Sequence[str]] = ()
    holders: tuple[str, ...] = ()
    complete_at: int | None = None
    changes: int = 0
    log: SealedGroups = field(default_factory=lambda: SealedGroups(secrets.token_hex(8)))
    span: Any = field(default=None, compare=False, repr=False)
    run: LoadRun | None = field(default=None, compare=False, repr=False)
    load_s: float = 0.0
    wanted_at: float | None = None
    evictions: int = 0
    recall_error: CacheError | None = None
    erasures: Erasures = field(default_factory=Erasures)
    unerased: set[int] = field(default_factory=set)
    tombstones: int = 0
    _row_starts: tuple[int, ...] | None = field(default=None, init=False, repr=False)
    _sums: SealedSums = field(default_factory=SealedSums, init=False, repr=False)

    @classmethod
    def from_catalogue(cls, entry: CatalogueEntry) -> VersionRecord:
        """A version from before a restart."""
        has_run = entry.was_ready or bool(entry.sealed)
        state = State.SERVED if entry.was_ready else State.RESUMED
        state = State.EVICTED if entry.evicted else state
        version = cls(
            entry.pinned,
            entry.created,
            sealed=dict(enumerate(entry.sealed)),
            failure=entry.failure,
            attempt=entry.attempt,
            state=State.FAILED if entry.failure is not None else state,
            result_shards=len(entry.sealed) if has_run else None,
            owner=entry.owner,
            homes=entry.homes,
            holders=entry.holders,
            load_s=entry.load_s,
            evictions=int(entry.evicted),
        )
        version.erasures = Erasures(entry.erased, version.row_starts() or ())
        version.unerased = set(version.erasures.places)
        if entry.log is not None:
            version.log = SealedGroups(entry.log.log_id, entry.log.groups)
            for index, sealed in entry.log.sealed.items():
                version.sealed.setdefault(index, sealed)
        return version

    @classmethod
    def written(
        cls, rows: ChosenRows, created: int, *, attempt: int, asked_at: float, owner: str
    ) -> VersionRecord:
        """A version of rows that nodes hold already; `reuse` must follow if it has others."""
        first = len(rows.version.shards or ()) - len(rows.shards)
        sealed = (
            SealedSummary(shard.num_rows, shard.num_bytes, shard.checksum, dict(shard.nulls))
            for shard in rows.shards
        )
        return cls(
            rows.version,
            created,
            sealed=dict(enumerate(sealed, first)),
            attempt=attempt,
            asked_at=asked_at,
            owner=owner,
            put_by=dict(enumerate(rows.node_ids, first)),
            holders=tuple(sorted(set(rows.node_ids))),
        )

    def reuse(self, base: VersionRecord, placement: Sequence[Sequence[str]] = ()) -> None:
        """Takes over the shards that an earlier version has too: they are known to be sealed.

        Args:
            placement: of ``base``; empty: `homes` stay.
        """
        self.base = base.pinned.key
        self.reused = same_shards(self.pinned.shards or (), base.pinned.shards or ())
        for index, other in self.reused.items():
            self.sealed.setdefault(index, base.sealed[other])
            self.erasures.note(index, base.erasures.places.get(other, b""))
            if other in base.unerased:
                self.unerased.add(index)
        if placement:
            self.homes = tuple(
                placement[self.reused[index]] if index in self.reused else ()
                for index in range(self.num_shards or 0)
            )

    def save(self, catalogue: Catalogue) -> None:
        """Writes the version to the catalogue.

        Raises:
            LoadError: it cannot be written; the entry before stays.
            CatalogueLostError: another node coordinates the cache.
        """
        sealed: list[SealedSummary] = []
        if self.row_starts() is not None:
            sealed = [self.sealed[index] for index in range(self.num_shards or 0)]
        try:
            catalogue.write(
                self.pinned,
                self.attempt,
                sealed,
                self.created,
                was_ready=self.state.was_served,
                failure=self.failure,
                owner=self.owner,
                homes=self.homes,
                holders=self.holders,
                evicted=self.state.is_evicted,
                load_s=self.load_s,
            )
        except CatalogueLostError:
            raise
        except OSError as error:
            raise LoadError(
                f"cannot write the catalogue entry of {self.pinned.spec.name!r}: {error.strerror}"
            ) from None

    def save_failure(self, catalogue: Catalogue) -> None:
        """Writes a failure to the catalogue, unless it was written before."""
        if self.state is not State.FAILING:
            return
        try:
            self.save(catalogue)
            self.advance(Step.SAVE)
        except LoadError as error:  # matters only after a restart
            logger.error("failure not written reason=%s", error)

    def extend_log(self, catalogue: Catalogue) -> bool:
        """Writes the next group of shards to the log, if there is one; returns whether it did.

        The shards of a whole query are all made at once: they are one group, once it has been
        served. A group that cannot be written is no part of the log.
        """
        if self.num_shards is None or (self.pinned.shards is None and not self.state.was_served):
            return False
        group = self.log.next_group(self.sealed.keys(), self.num_shards)
        if not group:
            return False
        longer = self.log.extended(group)
        if not self._write_log(longer, catalogue):
            return False
        self.log = longer
        return True

    def _write_log(self, log: SealedGroups, catalogue: Catalogue) -> bool:
        """Writes a log for this attempt; returns whether it could."""
        sealed = {index: self.sealed[index] for each in log.groups for index in each}
        written = CatalogueLog(log.log_id, self.attempt, log.groups, sealed)
        try:
            catalogue.write_log(self.pinned.key, written)
        except OSError as error:
            logger.error("log of a load not written reason=%s", error.strerror)
            return False
        return True

    def log_message(self) -> pb.LoadLog:
        """The log for readers."""
        message = pb.LoadLog(id=self.log.log_id, closed=self.log.num_shards == self.num_shards)
        for group in self.log.groups:
            message.groups.add(
                shards=group, num_rows=[self.sealed[index].num_rows for index in group]
            )
        if (starts := self.row_starts()) is not None:
            message.num_rows = starts[-1]
        elif self.pinned.keeps_every_row:
            message.num_rows = self.pinned.max_rows
        return message

    @property
    def num_shards(self) -> int | None:
        """Number of shards; None before a whole query has run."""
        return self.result_shards if self.pinned.shards is None else len(self.pinned.shards)

    @property
    def lacks_secrets(self) -> bool:
        """Whether its source needs secrets that the coordinator does not have."""
        return self.pinned.has_secrets and not self.secrets.tables

    def require_secrets(self, given: pb.Secrets, by: Principal) -> None:
        """Refuses a caller that does not know the secrets of another principal's version.

        Raises:
            PermissionDeniedError: names the dataset and its owner.
        """
        if Role.ADMIN in by.roles or self.may_be_read(given, by.name):
            return
        raise PermissionDeniedError(
            f"dataset {self.pinned.spec.name!r} of {self.owner or 'its node'!r} was loaded with "
            "other credentials: give the same ones, or load it under another name"
        )

    def may_be_read(self, given: pb.Secrets, name: str) -> bool:
        """Whether a principal may have the rows for another version: it could load them too."""
        is_own = name == self.owner or (bool(given.tables) and given == self.secrets)
        return is_own or not self.pinned.has_secrets

    def row_starts(self) -> tuple[int, ...] | None:
        """First row id of each shard, and the total; None until every shard was sealed once."""
        if self._row_starts is None and len(self.sealed) == self.num_shards:
            self._row_starts = row_starts(
                [self.sealed[i].num_rows for i in range(len(self.sealed))]
            )
        return self._row_starts

    def sealed_sums(self) -> SealedSums:
        """The sums over ``sealed``, to which shards are only added; do not change them."""
        for shard in islice(self.sealed.values(), self._sums.num_shards, None):
            self._sums.num_shards += 1
            self._sums.num_rows += shard.num_rows
            self._sums.num_bytes += shard.num_bytes
            self._sums.nulls.update(shard.nulls)
        return self._sums

    @cached_property
    def puts(self) -> Set[str]:
        """The names of the puts that it is made of; none for a load."""
        return puts_of(self.pinned) if self.pinned.is_written else frozenset()

    def release(self) -> None:
        """Closes the pins of the source."""
        for pin in self.pins:
            pin.close()
        self.pins = ()

    def apply_report(
        self, actual: pb.ActualDataset, node_id: str, may_record: Callable[[int | None], bool]
    ) -> set[int]:
        """Applies a node's report of this attempt: sealed shards and failures.

        The first report of a shard makes its record: every other one is compared with it.

        Args:
            may_record: whether the node is believed about a shard, or about the whole query.

        Returns:
            The shards whose record it made.
        """
        self.notes.update(actual.notes)
        if actual.failure and not self.state.was_served:
            self.fail(self.load_error(actual.failure, may_pass=actual.failure_may_pass))
        if actual.HasField("num_shards") and self.result_shards is None and may_record(WHOLE_QUERY):
            self.result_shards = actual.num_shards
        recorded: set[int] = set()
        waiting: set[int] = set()
        is_contradicted = False
        for shard in actual.shards:
            if shard.failure:
                if not self.state.was_served:
                    self.fail(self.load_error(shard.failure, may_pass=shard.failure_may_pass))
            elif not shard.sealed:
                continue
            elif self._takes_erasure(shard):
                recorded.add(shard.index)
            elif shard.index in self.sealed:
                if not self.agrees(shard):
                    is_contradicted = True
                    if not self.state.was_served and may_record(shard.index):  # both had to
                        self.fail(self.load_error(self.contradiction(shard, node_id)))
            elif shard.index < (self.num_shards or 0) and may_record(shard.index):
                self.sealed[shard.index] = SealedSummary(
                    shard.num_rows, shard.num_bytes, shard.checksum, dict(shard.nulls)
                )
                self.erasures.note(shard.index, shard.erased)
                recorded.add(shard.index)
            else:
                waiting.add(shard.index)
        self.forget_claims(node_id)
        if waiting:
            self.waiting[node_id] = frozenset(waiting)
        if is_contradicted:
            self.contradicted.add(node_id)
        return recorded

    def _takes_erasure(self, shard: pb.ActualShard) -> bool:
        """Makes the record of a shard anew, if this is the first one whose rows are erased."""
        known = self.sealed.get(shard.index)
        if known is None or shard.index not in self.unerased or self.is_outdated(shard):
            return False
        if (known.num_rows, known.num_bytes) != (shard.num_rows, shard.num_bytes):
            return False
        self.unerased.discard(shard.index)
        self.sealed[shard.index] = replace(known, checksum=shard.checksum)
        return True

    def is_outdated(self, shard: pb.ActualShard) -> bool:
        """Whether a sealed shard still has rows that were forgotten: it does not count."""
        return not self.erasures.has(shard.index, shard.erased)

    def erase(self, number: int, rows: RowIds, catalogue: Catalogue) -> None:
        """Adds the rows of an act; nodes erase them.

        Raises:
            OSError: the catalogue cannot be written. Then nothing has changed.
        """
        if any(act.number == number for act in self.erasures.acts):
            return
        made = self.erasures.with_act(number, rows, self.row_starts() or ())
        self._take_erasures(made, catalogue)

    def erase_noted(self, catalogue: Catalogue) -> None:
        """Makes what its load left out the rows of an act.

        Raises:
            OSError: as `erase`.
        """
        if self.erasures.has_noted and (starts := self.row_starts()):
            self._take_erasures(self.erasures.with_noted(self.tombstones, starts), catalogue)

    def _take_erasures(self, erasures: Erasures, catalogue: Catalogue) -> None:
        self.erasures.has_noted = False
        if erasures is self.erasures:
            return
        catalogue.write_erased(self.pinned.key, erasures.acts)
        changed = {i for i, p in erasures.places.items() if p != self.erasures.places.get(i)}
        self.erasures = erasures
        self.unerased |= changed

    def forget_claims(self, node_id: str) -> None:
        """Forgets which shards of a node had no record, or another one."""
        self.waiting.pop(node_id, None)
        self.contradicted.discard(node_id)

    def waiting_for(self, recorded: Set[int]) -> Set[str]:
        """The nodes that hold one of these shards and waited for its record."""
        return {
            node_id for node_id, indices in self.waiting.items() if not indices.isdisjoint(recorded)
        }

    def take_put(self, node_id: str, indices: Set[int]) -> Set[int]:
        """The shards of these that the node took from writers: its put made their record."""
        moved = {index for index in indices if self.put_by.get(index) == node_id}
        for index in moved:
            del self.put_by[index]
        return moved

    def agrees(self, shard: pb.ActualShard) -> bool:
        """Whether a sealed shard is what the version has under this index."""
        known = self.sealed.get(shard.index)
        if known is None:
            return False
        if self.pinned.shards is None or self.pinned.is_written:
            same = known.num_rows == shard.num_rows and self.is_outdated(shard)
            return same or known.checksum == shard.checksum
        return known.num_rows == shard.num_rows

    def contradiction(self, shard: pb.ActualShard, node_id: str) -> str:
        """How a sealed shard differs from the known one."""
        known = self.sealed[shard.index]
        return (
            f"shard {shard.index} has {shard.num_rows} rows on node {node_id} and "
            f"{known.num_rows} on another node, or other values: load it again"
        )

    def is_current(self, actual: pb.ActualDataset) -> bool:
        """Whether a report is about this attempt.

        A restarted node reports none. It may just have been told to remove an evicted version.
        """
        if actual.HasField("attempt"):
            return actual.attempt == self.attempt
        return not self.evictions

    def fail(self, error: CacheError) -> None:
        """Marks the version as failed. The first failure stays."""
        if not self.state.has_failed:
            self.failure = error
            self.release()
            logger.error("dataset failed reason=%s", error)
        self.advance(Step.FAIL)

    def evict(self, catalogue: Catalogue) -> None:
        """Takes it to `State.EVICTED`. Reports of its shards do not count any more.

        Raises:
            LoadError: the catalogue cannot be written. Then nothing has changed.
        """
        evicted = TRANSITIONS[self.state, Step.EVICT]
        replace(self, state=evicted, attempt=self.attempt + 1).save(catalogue)
        self.attempt, self.evictions = self.attempt + 1, self.evictions + 1
        self.waiting.clear()
        self.contradicted.clear()
        self.ended = EndedNodes()
        self._write_log(self.log, catalogue)  # it counts for this attempt only
        self.advance(Step.EVICT)

    def recall(self, catalogue: Catalogue) -> None:
        """Takes it back to `State.SERVED`; nodes load its shards again.

        Raises:
            LoadError: the catalogue cannot be written. Then nothing has changed.
        """
        replace(self, state=TRANSITIONS[self.state, Step.RECALL]).save(catalogue)
        self.recall_error = None
        self.advance(Step.RECALL)

    def advance(self, step: Step) -> None:
        """Takes a step of `TRANSITIONS`."""
        self.state = TRANSITIONS[self.state, step]
        if self.state.is_loading:
            return
        tracing.end(self.span, self.failure)
        if self.run is not None and self.state.has_failed:
            self.run.fail(self.failure)
        elif self.run is not None:
            self.run.complete(self.sealed_sums().num_rows, self.sealed_sums().num_bytes)

    def abort(self) -> None:
        """Ends the span and the run of its load: the version is forgotten meanwhile."""
        tracing.end(self.span)
        if self.run is not None:
            self.run.abort()

    def is_confirmed(self, heard: int, last_heard: Iterable[int]) -> bool:
        """Whether the nodes with its replicas said once more that they have them.

        A node that ended right after it had reported a replica says nothing more.

        Args:
            heard: the number of the last heartbeat of any node.
            last_heard: that of each of these nodes.
        """
        if self.complete_at is None:
            self.complete_at = heard
        return all(number > self.complete_at for number in last_heard)

    def note_load_time(self, elapsed_s: float) -> None:
        """Notes how long all of its shards take to load, by those that this load did not share."""
        shards = self.pinned.shards or ()
        sizes = [max(1, shard.estimated_bytes) for shard in shards]
        new = sum(num for i, num in enumerate(sizes) if i not in self.reused)
        self.load_s = elapsed_s * sum(sizes) / new if new else elapsed_s

    def is_wanted_since(self, time_s: float) -> bool:
        """Whether it was read, or a load of it was asked for or ended, after a time."""
        times = [at for at in (self.last_used, self.wanted_at) if at is not None]
        return max(times, default=-math.inf) > time_s

    def is_read_since(self, time_s: float) -> bool:
        """Whether it was served, and read after a time."""
        is_read = self.last_used is not None and self.last_used > time_s
        return is_read and self.state.was_served

    def ended_error(self, ends: Mapping[int | None, list[str]]) -> LoadError:
        """A `LoadError` about shards that are given to no further node.

        Args:
            ends: see `EndedNodes.given_up`; any of its shards may have ended the nodes.
        """
        what, shards = "run the whole query", self.pinned.shards
        if shards is not None:
            indices = sorted(index for index in ends if index is not WHOLE_QUERY)  # pyright: ignore
            read = [split for index in indices for split in shards[index].splits]
            what = f"load {some_of(read, ' or ')}"
        node_ids = sorted({node_id for of_shard in ends.values() for node_id in of_shard})
        return self.load_error(
            f"cannot {what}: node {some_of(node_ids, ', node ')} ended meanwhile. See the logs: "
            "the data may be damaged, or need more memory than a node has"
        )

    def load_error(self, reason: str, *, may_pass: bool = False) -> LoadError:
        """A `LoadError` that names the dataset.

        Args:
            may_pass: the same load may succeed later.
        """
        kind = TransientLoadError if may_pass else LoadError
        return kind(f"dataset {self.pinned.spec.name!r}: {reason}")
