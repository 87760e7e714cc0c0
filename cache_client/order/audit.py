"""Proves from digests which rows a job was given. Pure.

The record of a pass has two digests: one depends on the order of the rows, the other does not. Both
are sums over the steps, so the steps of DataLoader workers add up in any order. `audit` computes
the same sums from the order of the epoch, and compares them with the records of all ranks.

The digests find mistakes. They do not stop someone who forges a record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from cache_client.order.audit_record import AuditRecord, Evidence
from cache_client.order.digests import (
    WORD_MASK,
    Words,
    set_digest,
    set_digest_of_all,
    step_digests,
    total_of,
    weights,
)
from cache_client.order.due import Shown
from cache_client.order.order import step_windows
from cache_client.order.permutation import Int64Array
from cache_client.order.view_text import view_differences

Outcome = Literal["proven", "open", "wrong"]


@dataclass(frozen=True)
class EpochAudit:
    """What the records prove about one reading of an epoch.

    Attributes:
        outcome: ``proven``: what ``statement`` says; ``open``: nothing is wrong, but not all can be
            shown, and ``findings`` say why; ``wrong``: ``findings`` name the first wrong step.
        rows: slots that were shown to be given once, of ``num_rows`` that the job has to give.
        statement: exactly what was shown, for people.
        findings: sentences for people.
        view: what was read other than each row once, see `cache_client.order.view_text`.
    """

    epoch: int
    outcome: Outcome
    rows: int
    num_rows: int
    statement: str
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
    "job_shuffle",
)


def _with_newest_groups(evidence: Sequence[Evidence]) -> list[Evidence]:
    """The records of an epoch that was read while its version loaded, with all known groups.

    Some were made when there were fewer. Groups that contradict the others stay as they are.
    """
    newest = max((each.record for each in evidence), key=lambda r: (len(r.groups), r.ends))
    news = {name: getattr(newest, name) for name in ("num_rows", "groups", "due")}
    return [
        replace(each, record=replace(record, **news))
        if record.groups
        and record.fingerprint == newest.fingerprint
        and record.groups == newest.groups[: len(record.groups)]
        else each
        for each in evidence
        for record in [each.record]
    ]


def _audit_epoch(evidence: Sequence[Evidence], seed: int | None) -> Iterator[EpochAudit]:
    """Audits an epoch; each segment of an amended one apart."""
    ends = sorted({each.record.amended_at for each in evidence}, key=lambda ends: (len(ends), ends))
    for number, own in enumerate(ends):
        longer = [each for each in ends[number + 1 :] if each[: len(own)] == own]
        of_segment = [each for each in evidence if each.record.amended_at == own]
        record = of_segment[0].record
        begin = _left(record, own[-1]) if own else 0
        end = _left(record, longer[0][len(own)]) if longer else None
        yield from _audit_segment(of_segment, seed, begin, end)


def _left(record: AuditRecord, position: int) -> int:
    """A position without those that are skipped before it."""
    return position - sum(max(0, min(stop, position) - start) for start, stop in record.skipped)


def _audit_segment(
    evidence: Sequence[Evidence], seed: int | None, begin: int, end: int | None
) -> Iterator[EpochAudit]:
    kept, looks = _passes(evidence)
    reading = _Reading(evidence[0].record, begin, end)
    for group in _groups(kept):
        if reading.groups and group.rows_consumed == begin:
            yield reading.result(seed)
            reading = _Reading(group.members[0].record, begin, end)
        reading.add(group, looks)
    yield reading.result(seed)


def _passes(evidence: Sequence[Evidence]) -> tuple[list[Evidence], list[Evidence]]:
    """The last record of each pass, and of these the looks at a first batch.

    A look is a pass that was given up after a batch, before the same process began anew.
    """
    last: dict[tuple[str, int, int], Evidence] = {}
    for each in evidence:
        key = each.record.run, each.record.number, each.record.rank
        if key not in last or last[key].record.steps <= each.record.steps:
            last[key] = each
    newest: dict[str, int] = {}
    for run, number, _ in last:
        newest[run] = max(number, newest.get(run, number))
    kept: list[Evidence] = []
    looks: list[Evidence] = []
    for each in last.values():
        record = each.record
        is_look = record.steps <= 1 < record.plan.num_steps and record.number < newest[record.run]
        (looks if is_look else kept).append(each)
    return kept, looks


def _odd_ones(evidence: Sequence[Evidence], seed: int | None) -> Iterator[str]:
    """Ranks that read in another order than most."""
    records = [each.record for each in evidence]
    for name in _SAME:
        values = Counter(getattr(record, name) for record in records)
        if not values:
            continue
        usual = seed if name == "seed" and seed is not None else values.most_common(1)[0][0]
        for value in values:
            if value == usual:
                continue
            odd = [record for record in records if getattr(record, name) == value]
            how = f"{name}={value!r} instead of {usual!r}"
            if name == "fingerprint":
                others = [record for record in records if record.fingerprint == usual]
                told = view_differences(odd[0].view, others[0].view, of="there", to="elsewhere")
                how = f"another view: {told}" if told else how
            ranks = sorted({record.rank for record in odd})
            yield f"{_ranks(ranks)} read with {how}: wrong from step 0 on"


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
    """One reading of an epoch: each group continues where the one before it stopped.

    Args:
        begin, end: of its segment; without an end, the epoch ends with it.
    """

    def __init__(self, first: AuditRecord, begin: int, end: int | None) -> None:
        self._first, self._begin, self._end = first, begin, end
        self.groups: list[_Group] = []
        self._problems: list[str] = []
        self._gaps: list[str] = []
        self._notes: list[str] = []
        self._reached = begin  # shown up to here
        self._furthest = begin  # some rank was given rows up to here
        self._dropped = self._again = 0  # at the end of the epoch, once it is reached
        self._set_digest: int | None = None if begin or end is not None else 0

    def add(self, group: _Group, looks: Sequence[Evidence]) -> None:
        """Adds the group that read next; ``looks`` are passes that were given up."""
        start = group.rows_consumed
        own = self._reached_by(group.runs)  # None: none of these processes read before
        if start > self._reached:
            text = f"no record of positions {self._reached:,} to {start - 1:,}"
            if own is not None and start > own:
                self._problems.append(
                    f"{text}: the pass before ended at row {own:,}, and the next one began at row "
                    f"{start:,}, in the same process"
                )
            else:
                self._gaps.append(text)
            self._set_digest = None
        elif start < self._furthest:
            text = (
                f"the position of row {start:,} was loaded after row {self._furthest:,} was reached"
            )
            step = start // self.groups[-1].members[0].record.plan.rows_per_step
            if own is not None and start < self._reached:
                self._problems.append(
                    f"a state was applied twice: {text}, in the same process; its rows were given "
                    f"again from step {step} of the epoch on"
                )
            else:
                self._notes.append(
                    f"restarted from a checkpoint: {text}; what was given after the checkpoint "
                    "was undone, and is not counted"
                )
            self._set_digest = None
        looked = sorted({e.record.rank for e in looks if e.record.run in group.runs})
        if looked and not self.groups:
            self._notes.append(f"{_ranks(looked)} looked at a first batch before, not counted")
        self._check(group, start)
        self.groups.append(group)

    def _reached_by(self, runs: set[str]) -> int | None:
        """How far the processes of these runs read in the group before; None: in none."""
        before = self.groups[-1].members if self.groups else []
        records = [each.record for each in before if each.record.run in runs]
        plans = [(each.plan, each.steps) for each in records]
        return max(
            (plan.rows_consumed_after(min(steps, plan.num_steps)) for plan, steps in plans),
            default=None,
        )

    def _check(self, group: _Group, start: int) -> None:
        """Checks the records of a group, and how far they show the epoch."""
        record = group.members[0].record
        world, plan = record.world_size, record.plan
        times = Counter(each.record.rank for each in group.members)
        for rank, count in sorted(times.items()):
            if count > 1:
                self._name_repeated(group, rank, count, start // plan.rows_per_step)
        missing = sorted(set(range(world)) - times.keys())
        if missing:
            self._gaps.append(f"no record of {_ranks(missing)} of {world}")
        for each in group.members:
            self._problems += _wrong_steps(each.record)
        taken = [min(each.record.steps, plan.num_steps) for each in group.members]
        steps = 0 if missing else min(taken)
        if missing or len({*taken}) > 1:
            self._set_digest = None  # they are compared up to the step that all have taken
        if self._set_digest is not None:
            self._set_digest += sum(each.record.set_digest for each in group.members)
        self._furthest = plan.rows_consumed_after(max(taken))
        if missing:
            self._reached = start
            return
        if not record.ends:
            self._reached = min(start + steps * plan.rows_per_step, plan.num_rows)
            return
        self._reached = plan.rows_consumed_after(steps)
        if steps < plan.num_steps or start == plan.num_rows > 0:
            return  # the end is not reached, or was reached before
        self._dropped = self._again = 0
        stop = plan.rows_consumed + steps * plan.rows_per_step
        if plan.drop_last:
            self._dropped = plan.num_rows - stop
        elif steps:
            last = range(steps - 1, steps)
            given = sum(plan.window(last, rank)[1][0] for rank in range(world))
            self._again = given - (plan.num_rows - (stop - plan.rows_per_step))

    def _name_repeated(self, group: _Group, rank: int, count: int, step: int) -> None:
        """Names a rank that several processes were, as far as their times tell."""
        of = f"{rank} of {group.members[0].record.world_size}"
        same = [each for each in group.members if each.record.rank == rank]
        if any(each.last_at for each in same):
            self._problems.append(
                f"{count} processes were rank {of} at once: they were given the same rows from "
                f"step {step} of the epoch on"
            )
        else:
            self._gaps.append(
                f"{count} processes were rank {of}, at once or one after the other: their records "
                "have no times"
            )

    def result(self, seed: int | None) -> EpochAudit:
        """What was shown.

        Args:
            seed: that the job should have used; None: that of most records.
        """
        record = self.groups[-1].members[0].record if self.groups else self._first
        members = [each for group in self.groups for each in group.members]
        problems = [*_odd_ones(members, seed), *self._problems]
        num_left = record.order.num_left
        if self._end is not None:
            return self._result_of_segment(record, problems)
        is_whole = record.ends and self._reached == num_left
        if self._set_digest is not None and is_whole:
            problems += self._check_the_set(record)
        dropped, again = (self._dropped, self._again) if is_whole else (0, 0)
        of = record.due.of if record.groups else None
        slots = record.num_rows if of is None else of  # more than those of the known groups
        before = record.amended_at[-1] if record.amended_at else 0  # positions, with skipped ones
        slots -= before
        shown = Shown(
            slots=slots,
            given=self._reached - dropped - self._begin,
            again=again,
            dropped=dropped,
            skipped=record.num_rows - num_left - (before - self._begin),
        )
        nothing = not shown.given and bool(shown.missing)
        outcome: Outcome = "wrong" if problems else "open" if self._gaps or nothing else "proven"
        return EpochAudit(
            record.epoch,
            outcome,
            shown.given,
            slots - shown.skipped - dropped,
            self._stated(shown, record),
            (*problems, *self._gaps, *self._notes),
            record.view,
        )

    def _stated(self, shown: Shown, record: AuditRecord) -> str:
        if not self._begin:
            return shown.stated(record.due)
        due = replace(record.due, rows=None, of=shown.slots)
        return f"amended at position {self._begin:,}: {shown.stated(due)}"

    def _result_of_segment(self, record: AuditRecord, problems: list[str]) -> EpochAudit:
        """What was shown of a segment that an amendment ended."""
        begin, end = self._begin, self._end
        assert end is not None
        if self._furthest > end:
            problems.append(
                f"the epoch was amended at position {end:,}, and some ranks read on as before, to "
                f"position {self._furthest:,}"
            )
        reached = min(self._reached, end)
        gaps = [*self._gaps]
        if reached < end:
            gaps.append(f"no record of positions {reached:,} to {end - 1:,}")
        return EpochAudit(
            record.epoch,
            "wrong" if problems else "open" if gaps else "proven",
            reached - begin,
            end - begin,
            f"each of {reached - begin:,} positions from {begin:,} on once; amended at {end:,}",
            (*problems, *gaps, *self._notes),
            record.view,
        )

    def _check_the_set(self, record: AuditRecord) -> list[str]:
        """Compares the sum of all ranks with that of all slots."""
        plan = record.plan
        if plan.num_steps == 0:
            return []
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
        if not (expected - self._set_digest) & WORD_MASK:
            return []
        return [
            "the rows of all ranks together are not those that are due: their digest is "
            f"{self._set_digest & WORD_MASK:016x}, not {expected & WORD_MASK:016x}"
        ]


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
