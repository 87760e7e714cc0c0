"""Proves from digests which rows a job was given. Pure.

The record of a pass has two digests: one depends on the order of the rows, the other does not. Both
are sums over the steps, so the steps of DataLoader workers add up in any order. `audit` computes
the same sums from the order of the epoch, and compares them with the records of all ranks.

The digests find mistakes. They do not stop someone who forges a record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal

import numpy as np

from cache_client.order.digests import (
    WORD_MASK,
    Words,
    set_digest,
    set_digest_of_all,
    step_digests,
    total_of,
    weights,
)
from cache_client.order.order import EpochOrder, StepPlan, step_windows
from cache_client.order.permutation import Int64Array
from cache_protocol.errors import ConfigError

AuditMode = Literal["off", "reports", "states"]
AUDIT_MODES: Final = ("off", "reports", "states")
AUDIT_FORMAT: Final = 1


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """What one rank was given in one pass over (the rest of) an epoch. Constant in size.

    Attributes:
        run: random name of the dataset object; ``number`` counts its passes.
        rows_consumed: of the epoch, by all ranks, before the pass.
        steps: that the training loop has taken.
        rows: in these steps.
        set_digest, order_digest: sums over the steps.
        checkpoints: pairs of steps and the ``order_digest`` after them, evenly spread.
        groups: as in `EpochOrder`; those that were known when the record was made.
        view: what was read other than each row once, for people.
    """

    format: int = AUDIT_FORMAT
    run: str
    number: int
    dataset: str
    fingerprint: str
    num_rows: int
    seed: int
    shuffle: bool
    shuffle_block_size: int | None
    epoch: int
    rows_consumed: int
    rank: int
    world_size: int
    batch_size: int
    drop_last: bool
    pad: bool
    skipped: tuple[tuple[int, int], ...] = ()
    groups: tuple[int, ...] = ()
    view: str = ""
    steps: int
    rows: int
    set_digest: int
    order_digest: int
    checkpoints: tuple[tuple[int, int], ...] = ()

    @property
    def plan(self) -> StepPlan:
        """The steps of the pass."""
        return StepPlan(
            self.order.num_left,
            self.world_size,
            self.batch_size,
            drop_last=self.drop_last,
            pad=self.pad,
            rows_consumed=self.rows_consumed,
        )

    @property
    def order(self) -> EpochOrder:
        """The order of the epoch."""
        return EpochOrder(
            self.num_rows,
            shuffle=self.shuffle,
            shuffle_block_size=self.shuffle_block_size,
            seed=self.seed,
            epoch=self.epoch,
            skipped=self.skipped,
            groups=self.groups,
        )

    @property
    def reached(self) -> int:
        """Rows of the epoch that all ranks together have consumed if each is where this one is."""
        return self.plan.rows_consumed_after(min(self.steps, self.plan.num_steps))

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON types."""
        pairs = ("checkpoints", "skipped")
        values = {**asdict(self), **{name: [*map(list, getattr(self, name))] for name in pairs}}
        rare = {"groups": list(values.pop("groups")), "view": values.pop("view")}
        return values | {name: value for name, value in rare.items() if value}

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> AuditRecord:
        """Reads what `to_dict` wrote.

        Raises:
            ConfigError: it is no such record, or one of another format; quotes it.
        """
        try:
            if mapping["format"] != AUDIT_FORMAT:
                raise ValueError(f"format must be {AUDIT_FORMAT}, got {mapping['format']!r}")
            mapping = {"groups": (), "view": "", **mapping}
            values = {each.name: mapping[each.name] for each in fields(cls)}
            values["checkpoints"] = tuple((int(a), int(b)) for a, b in values["checkpoints"])
            values["skipped"] = tuple((int(a), int(b)) for a, b in values["skipped"])
            values["groups"] = tuple(map(int, values["groups"]))
            values["view"] = str(values["view"])
            record = cls(**values)
            record.plan, record.order  # noqa: B018  # checks the numbers
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"bad audit record: {error!r}") from None
        return record


# -- verification ----------------------------------------------------------------------------------

Outcome = Literal["proven", "open", "wrong"]


@dataclass(frozen=True)
class Evidence:
    """A record, and when it was made.

    Attributes:
        begun_at, last_at: seconds; of the first and the last report. Equal for a state.
    """

    record: AuditRecord
    begun_at: float = 0.0
    last_at: float = 0.0


@dataclass(frozen=True)
class EpochAudit:
    """What the records prove about one reading of an epoch.

    Attributes:
        outcome: ``proven``: each row was given once, as far as ``rows`` says; ``open``: nothing is
            wrong, but records are missing; ``wrong``: ``findings`` name the first wrong step.
        rows: proven, of ``num_rows``.
        findings: sentences for people.
        view: what was read other than each row once; empty: nothing else.
    """

    epoch: int
    outcome: Outcome
    rows: int
    num_rows: int
    findings: tuple[str, ...]
    view: str = ""


def audit(evidence: Sequence[Evidence], *, seed: int | None = None) -> list[EpochAudit]:
    """Checks the records of a job, of all ranks and epochs.

    Args:
        seed: that the job should have used; None: that of most records.

    Returns:
        One entry for each reading of an epoch, in order.
    """
    epochs = sorted({each.record.epoch for each in evidence})
    return [
        found
        for epoch in epochs
        for found in _audit_epoch(
            _with_newest_groups([e for e in evidence if e.record.epoch == epoch]), seed
        )
    ]


_SAME: Final = (
    *("dataset", "fingerprint", "num_rows", "groups", "seed", "shuffle", "shuffle_block_size"),
)


def _with_newest_groups(evidence: Sequence[Evidence]) -> list[Evidence]:
    """The records of an epoch that was read while its version loaded, with all known groups.

    Some were made when there were fewer. Groups that contradict the others stay as they are.
    """
    newest = max((each.record for each in evidence), key=lambda record: len(record.groups))
    return [
        replace(each, record=replace(record, num_rows=newest.num_rows, groups=newest.groups))
        if record.groups
        and record.fingerprint == newest.fingerprint
        and record.groups == newest.groups[: len(record.groups)]
        else each
        for each in evidence
        for record in [each.record]
    ]


def _audit_epoch(evidence: Sequence[Evidence], seed: int | None) -> Iterator[EpochAudit]:
    reading = _Reading(evidence[0].record)
    odd = list(_odd_ones(evidence, seed))
    for group in _groups(evidence):
        if reading.groups and group.rows_consumed == 0:
            yield reading.result()
            reading = _Reading(group.members[0].record)
        reading.add(group)
    reading.problems[:0] = odd
    yield reading.result()


def _odd_ones(evidence: Sequence[Evidence], seed: int | None) -> Iterator[str]:
    """Ranks that read in another order than most."""
    for name in _SAME:
        values = Counter(getattr(each.record, name) for each in evidence)
        usual = seed if name == "seed" and seed is not None else values.most_common(1)[0][0]
        for value in values:
            ranks = sorted({e.record.rank for e in evidence if getattr(e.record, name) == value})
            if value != usual:
                yield (
                    f"{_ranks(ranks)} read with {name}={value!r} instead of {usual!r}: "
                    "wrong from step 0 on"
                )


@dataclass
class _Group:
    """The ranks that read the same part of an epoch together."""

    members: list[Evidence]

    @property
    def rows_consumed(self) -> int:
        return self.members[0].record.rows_consumed

    @property
    def begun_at(self) -> float:
        return min(each.begun_at for each in self.members)

    @property
    def runs(self) -> set[str]:
        return {each.record.run for each in self.members}


def _groups(evidence: Sequence[Evidence]) -> list[_Group]:
    """Groups of ranks, the earliest first.

    A rank that occurs again later, without an overlap in time, or in the same process, began anew.
    """
    groups: dict[tuple[object, ...], _Group] = {}
    seen: dict[tuple[object, ...], list[Evidence]] = {}
    for each in sorted(evidence, key=lambda e: (e.begun_at, e.record.number)):
        record = each.record
        if record.steps <= 1 < record.plan.num_steps and any(
            other.record.run == record.run and other.record.number > record.number
            for other in evidence
        ):
            continue  # a look at the first batch, of a pass that was given up
        key = (
            record.rows_consumed, record.world_size, record.batch_size,
            record.drop_last, record.pad, record.skipped,
        )  # fmt: skip
        before = seen.setdefault((*key, record.rank), [])
        earlier = sum(
            other.record.run == record.run or other.last_at < each.begun_at for other in before
        )
        before.append(each)
        groups.setdefault((*key, earlier), _Group([])).members.append(each)
    return sorted(groups.values(), key=lambda group: (group.begun_at, group.rows_consumed))


class _Reading:
    """One reading of an epoch: each group continues where the one before it stopped."""

    def __init__(self, first: AuditRecord) -> None:
        self._first = first
        self.groups: list[_Group] = []
        self.problems: list[str] = []
        self._gaps: list[str] = []
        self._notes: list[str] = []
        self._reached = 0
        self._set_digest: int | None = 0

    def add(self, group: _Group) -> None:
        start = group.rows_consumed
        shared = bool(self.groups) and bool(group.runs & self.groups[-1].runs)
        if start > self._reached:
            text = f"no record of positions {self._reached:,} to {start - 1:,}"
            if shared:
                self.problems.append(
                    f"{text}: the pass before ended at row {self._reached:,}, and the next one "
                    f"began at row {start:,}"
                )
            else:
                self._gaps.append(text)
            self._set_digest = None
        elif start < self._reached:
            text = (
                f"the position of row {start:,} was loaded after row {self._reached:,} was reached"
            )
            step = start // self.groups[-1].members[0].record.plan.rows_per_step
            if shared:
                self.problems.append(
                    f"a state was applied twice: {text}, in the same process; its rows were given "
                    f"again from step {step} of the epoch on"
                )
            else:
                self._notes.append(f"restarted from a checkpoint: {text}")
            self._set_digest = None
        self._reached = self._check(group, start)
        self.groups.append(group)

    def _check(self, group: _Group, start: int) -> int:
        """Checks the records of a group; returns how many rows of the epoch are proven then."""
        record = group.members[0].record
        world = record.world_size
        times = Counter(each.record.rank for each in group.members)
        for rank, count in sorted(times.items()):
            if count > 1:
                step = start // record.plan.rows_per_step
                self.problems.append(
                    f"{count} processes were rank {rank} of {world} at once: they were given the "
                    f"same rows from step {step} of the epoch on"
                )
        missing = sorted(set(range(world)) - times.keys())
        if missing:
            self._gaps.append(f"no record of {_ranks(missing)} of {world}")
            self._set_digest = None
        for each in group.members:
            self.problems += _wrong_steps(each.record)
        steps = min(each.record.steps for each in group.members)
        if {each.record.steps for each in group.members} != {steps}:
            self._set_digest = None  # they are compared up to the step that all have taken
        if self._set_digest is not None:
            self._set_digest += sum(each.record.set_digest for each in group.members)
        return (
            start if missing else record.plan.rows_consumed_after(min(steps, record.plan.num_steps))
        )

    def result(self) -> EpochAudit:
        record = self.groups[-1].members[0].record if self.groups else self._first
        num_rows = record.order.num_left
        if self._set_digest is not None and self._reached == num_rows:
            self._check_the_set(record)
        outcome: Outcome = "wrong" if self.problems else "open" if self._gaps else "proven"
        if num_rows < record.num_rows:
            self._notes.append(f"skip_steps left out {record.num_rows - num_rows:,} more rows")
        findings = [*self.problems, *self._gaps, *self._notes]
        return EpochAudit(
            record.epoch, outcome, self._reached, num_rows, tuple(findings), record.view
        )

    def _check_the_set(self, record: AuditRecord) -> None:
        """Compares the sum of all ranks with that of all rows."""
        plan = record.plan
        if plan.num_steps == 0:
            return
        last = plan.num_steps - 1
        taken = np.concatenate(
            [plan.window(range(last, last + 1), rank)[0] for rank in range(record.world_size)]
        )
        start = plan.rows_consumed + last * plan.rows_per_step
        stop = min(start + plan.rows_per_step, plan.num_rows)
        digest, row_ids = set_digest, record.order.row_ids
        # All rows, without those that drop_last leaves out, and with those that are repeated.
        expected = set_digest_of_all(record.num_rows)
        expected -= digest(row_ids(np.arange(stop, plan.num_rows, dtype=np.int64)))
        whole = replace(record.order, skipped=())
        for first, end in record.skipped:
            expected -= digest(whole.row_ids(np.arange(first, end, dtype=np.int64)))
        expected += digest(row_ids(taken)) - digest(row_ids(np.arange(start, stop)))
        assert self._set_digest is not None
        if (expected - self._set_digest) & WORD_MASK:
            self.problems.append(
                "the rows of all ranks together are not all rows, each once: their digest is "
                f"{self._set_digest & WORD_MASK:016x}, not {expected & WORD_MASK:016x}"
            )


def _wrong_steps(record: AuditRecord) -> list[str]:
    """Compares a record with the order of its epoch; names the first wrong step."""
    plan, who = record.plan, f"rank {record.rank} of {record.world_size}"
    if record.steps > plan.num_steps:
        return [f"{who} was given {record.steps} steps, but the pass has {plan.num_steps}"]
    sets, orders, rows = expected_digests(record, min(record.steps + 1, plan.num_steps))
    numbers = np.arange(len(orders), dtype=np.int64)
    factors = weights(numbers)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(orders * factors, dtype=np.uint64)])
    marks = [*record.checkpoints]
    if not marks or marks[-1][0] < record.steps:
        marks.append((record.steps, record.order_digest))
    right = 0
    for after, digest in marks:
        if after > record.steps:
            return [f"{who} has a checkpoint after step {after} of {record.steps}"]
        if int(sums[after]) != digest:
            return [f"{who}: {_first_wrong(right, after, digest, orders, factors, sums)}"]
        right = after
    done = total_of(sets[: record.steps]), int(rows[: record.steps].sum())
    if done != (record.set_digest, record.rows):
        return [f"{who} has {record.rows} rows in {record.steps} steps, not {done[1]}"]
    return []


def _first_wrong(
    right: int, after: int, digest: int, orders: Words, factors: Words, sums: Words
) -> str:
    """Which of the steps ``[right, after)`` was wrong, and how: tries the likely mistakes."""
    for shift, what in ((-1, "was given twice"), (1, "was lost")):
        moved = np.zeros(len(orders), np.uint64)
        if shift < 0:
            moved[1:] = orders[:-1]
        else:
            moved[:-1] = orders[1:]
        later = np.concatenate(
            [np.zeros(1, np.uint64), np.cumsum(moved * factors, dtype=np.uint64)]
        )
        if after + max(0, shift) > len(orders):
            continue
        # The steps before k as planned, those from k on moved by one.
        guess = sums[right:after] + (later[after] - later[right:after])
        hits = np.flatnonzero(guess == np.uint64(digest))
        if len(hits):
            step = right + int(hits[0]) + min(0, shift)
            return f"the batch of step {max(step, 0)} {what}"
    # One step had the rows of another one: the difference names it for each possible step.
    between = np.arange(right, after)
    inverse = _inverse(factors[right:after])
    needed = orders[between] + np.uint64((digest - int(sums[after])) & WORD_MASK) * inverse
    found = np.flatnonzero(np.isin(needed, orders))
    if len(found):
        step = int(between[found[0]])
        other = int(np.flatnonzero(orders == needed[found[0]])[0])
        return f"step {step} had the rows of step {other}"
    if after - right == 1:
        return f"step {right} has other rows than planned"
    return f"the first wrong step is one of {right} to {after - 1}"


def _inverse(odd: Words) -> Words:
    """The inverse of odd words modulo 2**64, by Newton's method."""
    inverse = odd.copy()  # right in the last 3 bits
    for _ in range(5):
        inverse *= np.uint64(2) - odd * inverse
    return inverse


def expected_digests(record: AuditRecord, steps: int) -> tuple[Words, Words, Int64Array]:
    """The digests and rows of the first steps of a pass, computed from the order of its epoch."""
    sets, orders, rows = [], [], []
    at_once = max(1, 262_144 // record.batch_size)
    for window in step_windows(range(steps), at_once):
        positions, sizes = record.plan.window(window, record.rank)
        found = step_digests(record.order.row_ids(positions), sizes)
        sets.append(found[0])
        orders.append(found[1])
        rows += sizes
    none = np.empty(0, np.uint64)
    return (
        np.concatenate([none, *sets]),
        np.concatenate([none, *orders]),
        np.array(rows, np.int64),
    )


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks for people, in runs."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
