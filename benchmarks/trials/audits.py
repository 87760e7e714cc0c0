"""Makes up epochs of jobs, most of them with a fault, and checks that each verdict is true.

``make audits`` makes 2,000; ``python -m benchmarks.trials.audits --cases 1 --seed 77`` repeats one.
A case has a view, ranks, workers, kills and restarts with other ranks and batch sizes, and records
that end early or are missing. What each rank is given is also computed from the definitions in
docs/order.md, row by row, and compared. No case needs a node.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from cache_client.order.audit import EpochAudit, audit
from cache_client.order.audit_record import AuditRecord, Evidence
from cache_client.order.digests import Trail, step_digests
from cache_client.order.order import EpochOrder, StepPlan, runs_of_steps, step_windows, worker_steps
from cache_client.view_options.options import View
from cache_client.view_options.sampling import make_sampling
from cache_client.views import groups, length_buckets, mixing, packing, rows_view
from cache_client.views.due import due_of, samples_of
from cache_client.views.mixture_view import MixedSource, MixtureView
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import PlainView, Shuffle, SlotView

Rows = tuple[int, ...]
"""The rows of one slot."""
_TRIES: Final = 20  # to put a fault in: many change nothing
Batch = list[tuple[int, Rows]]
"""Slots of one step of one rank, each with its rows."""

FAULTS: Final = (
    *("row lost", "row repeated", "row of another rank", "batch of another rank"),
    *("batch lost", "batch twice", "batches swapped", "another seed", "another view", "rank twice"),
)


# -- views -----------------------------------------------------------------------------------------


def _some(rng: random.Random, size: int) -> SlotView:
    """A view of some rows of a version."""
    kind = rng.choice(("plain", "where", "subset"))
    if kind == "plain":
        return PlainView(size)
    if kind == "where":
        shards = [np.array([n for n in range(part) if rng.random() < 0.7], np.uint32)
                  for part in (size - size // 3, size // 3)]  # fmt: skip
        firsts = np.array([0, size - size // 3], np.int64)
        most = rng.choice((1, 2**32))
        return rows_view.rows_of_shards("where", shards, firsts, size, most_rows_of_one_block=most)
    listed = [rng.randrange(size) for _ in range(rng.randint(1, 2 * size))]
    return rows_view.rows_in_order("subset", np.array(listed, np.int64), size)


def _sampled(rng: random.Random, size: int, shuffle: Shuffle) -> SlotView:
    """Rows more or less often than once, one in each slot."""
    inner = _some(rng, size)
    slots = inner.num_slots(0)
    rows = inner.samples(np.arange(slots), 0).row_ids.tolist()
    weights = [rng.choice((0.0, 1.0, 1.0, 2.5)) for _ in range(size)]
    weights[rows[0] if rows else 0] = 1.0
    columns = {"w": weights, "label": [rng.randrange(3) for _ in range(size)]}
    most = 3 * slots + 3
    kinds = [View(), View(epoch_rows=rng.randint(1, most))]
    if shuffle.shuffle_block_size is None:
        kinds += [
            View(weights="w", epoch_rows=rng.randint(1, most)),
            View(weights="w", replacement=False),
            View(per_class="label", epoch_rows=rng.randint(3, most)),
        ]
    return make_sampling(
        rng.choice(kinds),
        inner,
        shuffle=shuffle,
        columns=columns,
        values=lambda sql: pa.chunked_array([columns[sql.strip('"')]]),
    )


def _grouped(rng: random.Random, size: int) -> SlotView:
    inner = _some(rng, size)
    rows = inner.samples(np.arange(inner.num_slots(0)), 0).row_ids
    keys = pa.array([rng.randrange(4) for _ in rows], pa.int64())
    window = rng.choice((None, (2, 1), (3, 3), (2, 5)))
    found, offsets = groups.group_table(rows, keys, None)
    ends = None if window is None else SharedArray(groups.window_ends(offsets, window))
    return groups.GroupsView(SharedArray(found), SharedArray(offsets), "groups", window, ends)


def _mixed(rng: random.Random, size: int, shuffle: Shuffle) -> SlotView:
    views = [_some(rng, size), _some(rng, size)]
    views = [view for view in views if view.num_slots(0)]
    sources = tuple(
        MixedSource(name, name, rows, view, replace(shuffle, seed=rng.randrange(9)))
        for name, rows, view in zip("ab", (size, size), views, strict=False)
    )
    stop = rng.choice(("first_exhausted", "all_exhausted", rng.randint(1, 3 * size)))
    weights = tuple(rng.randint(1, 3) for _ in sources)
    draw: Any = rng.choice(mixing.DRAWS)
    rows = [view.num_slots(0) for view in views]
    return MixtureView(
        sources, mixing.mixing(rows, [(0, weights)], stop=stop, draw=draw, seed=rng.randrange(9))
    )


def made_view(rng: random.Random, size: int, shuffle: Shuffle) -> SlotView:
    """A view of a version of so many rows."""
    if rng.random() < 0.15:
        return PlainView(size)
    kind = rng.choice(("one row", "one row", "buckets", "packed", "groups", "mixture"))
    lengths = SharedArray(np.array([rng.randrange(6) for _ in range(size)], np.uint16))
    if kind == "buckets":
        inner = _sampled(rng, size, shuffle)
        return length_buckets.LengthBucketsView(inner, lengths, rng.randint(1, 4), shuffle, "n")
    if kind == "packed":
        inner, cut = _sampled(rng, size, shuffle), rng.random() < 0.5
        return packing.PackingView(inner, lengths, rng.randint(1, 8), cut, shuffle, "n")
    if kind == "groups":
        return _grouped(rng, size)
    if kind == "mixture":
        return _mixed(rng, size, shuffle)
    return _sampled(rng, size, shuffle)


# -- what ranks are given --------------------------------------------------------------------------


def by_definition(plan: StepPlan, order: list[int], step: int, rank: int) -> list[int]:
    """The slots of a rank in a step, as docs/order.md defines them."""
    world, batch = plan.world_size, plan.batch_size
    start = plan.rows_consumed + step * world * batch
    of_step = list(range(start, min(start + world * batch, len(order))))
    rows = len(of_step)
    if plan.pad:
        places = of_step[rank * batch : (rank + 1) * batch]
        places += [place % len(order) for place in range(batch - len(places))]
    elif rows == world * batch:
        places = of_step[rank * batch : (rank + 1) * batch]
    else:
        places = of_step[rows * rank // world : rows * (rank + 1) // world]
        places = places or [of_step[rank % rows]]
    return [order[place] for place in places]


@dataclass
class Attempt:
    """What the ranks of one attempt at an epoch were given, and what they recorded.

    Attributes:
        given: by rank, then by step.
        recorded: steps in the record of each rank; None: it has none.
        twins: ranks that two processes are.
    """

    number: int
    plan: StepPlan
    order: EpochOrder
    given: list[list[Batch]]
    recorded: list[int | None] = field(default_factory=list)
    seeds: dict[int, int] = field(default_factory=dict)
    fingerprints: dict[int, str] = field(default_factory=dict)
    twins: list[int] = field(default_factory=list)


class Case:
    """One made-up epoch; three of five get a fault, if there is a place for one.

    Attributes:
        fault: that was put in, and that records tell of; "": none.
        unseen: a fault that no record reaches; "": none.
    """

    def __init__(self, number: int) -> None:
        self.rng = rng = random.Random(f"audit {number}")
        self.num_rows, self.epoch = rng.randint(1, 60), rng.randrange(4)
        block = rng.choice((None, None, 3))
        self.shuffle = Shuffle(rng.random() < 0.8, None, rng.randrange(5))
        if self.shuffle.shuffle:
            self.shuffle = replace(self.shuffle, shuffle_block_size=block)
        self.view = made_view(rng, self.num_rows, self.shuffle)
        self.num_slots = self.view.num_slots(self.epoch)
        self.rows_of_slots = self._rows_of_slots()
        self.skipped: tuple[tuple[int, int], ...] = ()
        self.attempts: list[Attempt] = []
        self.fault = self.unseen = ""
        self._train()
        for _ in range(_TRIES if number % 5 > 1 else 0):
            if not (self.fault or self.unseen):
                self._put_fault_in()

    def _rows_of_slots(self) -> list[Rows]:
        """The rows of every slot."""
        samples = self.view.samples(np.arange(self.num_slots), self.epoch)
        lengths = np.ones(self.num_slots, int) if samples.lengths is None else samples.lengths
        rows = iter(samples.row_ids.tolist())
        return [tuple(itertools.islice(rows, length)) for length in lengths.tolist()]

    def _plan(self, consumed: int) -> StepPlan:
        rng = self.rng
        end = rng.choice(({}, {}, {"drop_last": True}, {"pad": True}))
        order = self.shuffle.order(self.view, self.epoch, self.skipped)
        return StepPlan(
            order.num_left, rng.randint(1, 4), rng.randint(1, 6), **end, rows_consumed=consumed
        )

    def _train(self) -> None:
        """Attempts; each begins at a checkpoint of the one before."""
        rng, consumed = self.rng, 0
        if rng.random() < 0.3 and self.num_slots:
            whole = StepPlan(self.num_slots, rng.randint(1, 3), rng.randint(1, 4))
            steps = {rng.randrange(whole.num_steps) for _ in range(rng.randint(1, 3))}
            self.skipped = runs_of_steps(steps, whole)
        for number in range(rng.choice((1, 1, 2, 2, 3))):
            plan = self._plan(consumed)
            order = self.shuffle.order(self.view, self.epoch, self.skipped)
            taken = plan.num_steps if rng.random() < 0.6 else rng.randint(0, plan.num_steps)
            steps = [min(taken + rng.randrange(2), plan.num_steps) for _ in range(plan.world_size)]
            given = [self._given(plan, order, rank, count) for rank, count in enumerate(steps)]
            attempt = Attempt(number, plan, order, given)
            lags = rng.random() < 0.3
            attempt.recorded = [rng.randint(0, count) if lags else count for count in steps]
            if rng.random() < 0.15:
                attempt.recorded[rng.randrange(plan.world_size)] = None
            self.attempts.append(attempt)
            checkpoint = min(steps) if rng.random() < 0.5 else rng.randint(0, min(steps))
            consumed = plan.rows_consumed_after(checkpoint)

    def _given(self, plan: StepPlan, order: EpochOrder, rank: int, steps: int) -> list[Batch]:
        """The batches of a rank, as its workers make them, window by window."""
        num_workers = self.rng.choice((1, 1, 2, 3))
        slots_of = order.row_ids(np.arange(order.num_left)).tolist()
        batches: dict[int, Batch] = {}
        for worker in range(num_workers):
            own = worker_steps(plan.num_steps, worker, num_workers)
            for window in step_windows(own, self.rng.randint(1, 5)):
                slots, sizes, samples, _ = samples_of(self.view, plan, order, window, rank)
                assert slots.tolist() == [
                    s for each in window for s in by_definition(plan, slots_of, each, rank)
                ]
                joined = np.split(samples.row_ids, np.cumsum(samples.rows_of_steps(sizes))[:-1])
                of_steps = np.split(slots, np.cumsum(sizes)[:-1])
                for step, rows, of_step in zip(window, joined, of_steps, strict=True):
                    batch = [(s, self.rows_of_slots[s]) for s in of_step.tolist()]
                    self._check_rows(plan, order, step, rank, batch, rows.tolist())
                    batches[step] = batch
        return [batches[step] for step in range(steps)]

    def _check_rows(
        self, plan: StepPlan, order: EpochOrder, step: int, rank: int, batch: Batch, rows: list[int]
    ) -> None:
        """Compares what ``cachectl rows`` shows with what the rank is given."""
        one = range(step, step + 1)
        shown = samples_of(self.view, plan, order, one, rank)[2].row_ids.tolist()
        assert shown == rows, (step, rank, shown, rows)
        # A row that ends a packed slot and begins the next one is given once.
        is_packed = isinstance(self.view, packing.PackingView)
        expected = [row for _, of_slot in batch for row in of_slot]
        if is_packed:
            assert {*shown} == {*expected}
        else:
            assert shown == expected, (step, rank, shown, expected)

    # -- faults --------------------------------------------------------------------------------

    def _put_fault_in(self) -> None:
        """Changes what one rank was given, or who it was."""
        rng = self.rng
        places = [
            (attempt, rank, step)
            for attempt in self.attempts
            for rank, of_rank in enumerate(attempt.given)
            for step in range(len(of_rank))
        ]
        if not places:
            return
        attempt, rank, step = rng.choice(places)
        fault = rng.choice(FAULTS)
        of_rank, recorded = attempt.given[rank], attempt.recorded[rank]
        before = [[slot for slot, _ in batch] for batch in of_rank]
        if fault in ("another seed", "another view", "rank twice"):
            if recorded is None or not self._give_identity(attempt, rank, fault):
                return
            self.fault = fault
            return
        attempt.given[rank] = self._changed(attempt, rank, step, fault)
        after = [[slot for slot, _ in batch] for batch in attempt.given[rank]]
        if recorded is not None:
            recorded = attempt.recorded[rank] = min(recorded, len(after))
            if before[:recorded] != after[:recorded]:
                self.fault = fault
                return
        self.unseen = "no record of it" if before != after else ""

    def _give_identity(self, attempt: Attempt, rank: int, fault: str) -> bool:
        """Lets a rank be another one; returns whether an audit can tell."""
        others = [
            n for n, steps in enumerate(attempt.recorded) if n != rank and steps is not None
        ] + [
            None for other in self.attempts if other is not attempt and self._joined(other, attempt)
        ]
        if fault == "rank twice":
            attempt.twins.append(rank)
            return True
        if not others:
            return False
        if fault == "another seed":
            attempt.seeds[rank] = self.shuffle.seed + 1
        else:
            attempt.fingerprints[rank] = "f-other"
        return True

    def _joined(self, other: Attempt, attempt: Attempt) -> bool:
        """Whether two attempts are parts of one reading, and both have records."""
        return self._reading_of(other) == self._reading_of(attempt) and any(
            steps is not None for steps in other.recorded
        )

    def _reading_of(self, attempt: Attempt) -> int:
        recorded = [a for a in self.attempts if any(r is not None for r in a.recorded)]
        begins = [a.number for a in recorded if a.plan.rows_consumed == 0]
        return max((n for n in begins if n <= attempt.number), default=-1)

    def _changed(self, attempt: Attempt, rank: int, step: int, fault: str) -> list[Batch]:
        rng, batches = self.rng, [list(batch) for batch in attempt.given[rank]]
        batch = batches[step]
        at, plan = rng.randrange(len(batch)), attempt.plan
        other = (rank + 1) % plan.world_size
        theirs = attempt.given[other][step] if step < len(attempt.given[other]) else batch
        if fault == "row lost":
            del batch[at]
        elif fault == "row repeated":
            batch.insert(at, batch[rng.randrange(len(batch))])
        elif fault == "row of another rank":
            batch[at] = rng.choice(theirs)
        elif fault == "batch of another rank":
            batches[step] = list(theirs)
        elif fault == "batch lost":
            del batches[step]
        elif fault == "batch twice":
            batches.insert(step, list(batch))
            del batches[-1]
        elif step + 1 < len(batches):
            batches[step : step + 2] = batches[step : step + 2][::-1]
        return batches

    # -- records -------------------------------------------------------------------------------

    def evidence(self) -> list[Evidence]:
        """The records of all attempts, with the times of their reports."""
        found = []
        for attempt in self.attempts:
            begun = 100.0 * attempt.number
            for rank, steps in enumerate(attempt.recorded):
                if steps is None:
                    continue
                for twin in range(1 + attempt.twins.count(rank)):
                    record = self._record(attempt, rank, steps, f"{attempt.number}-{rank}-{twin}")
                    found.append(Evidence(record, begun + self.rng.random(), begun + 50.0))
        self.rng.shuffle(found)
        return found

    def _record(self, attempt: Attempt, rank: int, steps: int, run: str) -> AuditRecord:
        trail, plan, order = Trail(), attempt.plan, attempt.order
        for batch in attempt.given[rank][:steps]:
            slots = np.array([slot for slot, _ in batch], np.int64)
            none = np.zeros(1, np.uint64), np.zeros(1, np.uint64)  # the only row was lost
            trail.add(*(step_digests(slots, [len(slots)]) if len(slots) else none), len(slots))
        record = AuditRecord(
            run=run,
            number=1,
            dataset="t",
            fingerprint=attempt.fingerprints.get(rank, "f"),
            num_rows=order.num_rows,
            seed=attempt.seeds.get(rank, order.seed),
            shuffle=order.shuffle,
            shuffle_block_size=order.shuffle_block_size,
            epoch=self.epoch,
            rows_consumed=plan.rows_consumed,
            rank=rank,
            world_size=plan.world_size,
            batch_size=plan.batch_size,
            drop_last=plan.drop_last,
            pad=plan.pad,
            skipped=order.skipped,
            due=due_of(self.view, self.epoch, self.num_rows),
            job_shuffle=(self.shuffle.shuffle, self.shuffle.shuffle_block_size),
            steps=trail.steps,
            rows=trail.rows,
            set_digest=trail.set_digest,
            order_digest=trail.order_digest,
            checkpoints=tuple(trail.checkpoints),
        )
        return AuditRecord.from_dict(record.to_dict())

    # -- verdicts ------------------------------------------------------------------------------

    def check(self) -> list[EpochAudit]:
        """Audits the case; raises AssertionError where a verdict is not true."""
        evidence = self.evidence()
        verdicts = audit(evidence)
        assert bool(verdicts) is bool(evidence)
        is_wrong = any(each.outcome == "wrong" for each in verdicts)
        assert is_wrong is bool(self.fault), (self.fault, verdicts)
        if not self.fault and self._is_recorded():
            shown = verdicts[-1]
            assert shown.outcome == "proven" or not shown.rows, verdicts
        for each, attempts in zip(verdicts, self._readings(), strict=True):
            if each.outcome != "wrong":
                self._check_statement(each, attempts)
        return verdicts

    def _is_recorded(self) -> bool:
        """Whether the records of all attempts reach to where the next one began."""
        for attempt, after in zip(self.attempts, [*self.attempts[1:], None], strict=True):
            plan, recorded = attempt.plan, attempt.recorded
            if None in recorded:
                return False
            reached = plan.rows_consumed_after(min(r for r in recorded if r is not None))
            if after is not None and reached < after.plan.rows_consumed:
                return False
        return True

    def _readings(self) -> Iterator[list[Attempt]]:
        """Attempts that have records; a reading begins where one begins at row 0."""
        reading: list[Attempt] = []
        for attempt in self.attempts:
            if all(steps is None for steps in attempt.recorded):
                continue
            if reading and attempt.plan.rows_consumed == 0:
                yield reading
                reading = []
            reading.append(attempt)
        if reading:
            yield reading

    def _check_statement(self, found: EpochAudit, attempts: list[Attempt]) -> None:
        """Compares what a verdict says with what the ranks were given."""
        if found.outcome == "open":  # what is shown ends at a gap, or begins behind one
            assert found.findings or not found.rows
            return
        slots: Counter[int] = Counter()
        for attempt, after in zip(attempts, [*attempts[1:], None], strict=True):
            steps = min(r for r in attempt.recorded if r is not None)
            if after is not None:
                plan = attempt.plan
                steps = min(
                    s for s in range(steps + 1)
                    if plan.rows_consumed_after(s) >= after.plan.rows_consumed
                )  # fmt: skip
            for of_rank in attempt.given:
                slots.update(slot for batch in of_rank[:steps] for slot, _ in batch)
        self._check_numbers(found, slots)

    def _check_numbers(self, found: EpochAudit, slots: Counter[int]) -> None:
        due, text = due_of(self.view, self.epoch, self.num_rows), found.statement
        assert found.rows == len(slots), (found, slots)
        again = sum(slots.values()) - len(slots)
        assert _number(r"([\d,]+) given again", text) == again, (found, slots)
        left_out = self.num_slots - len(slots)
        reasons = ("left out by drop_last", "left out by skip_steps", "not shown")
        told = sum(_number(rf"([\d,]+) {reason}", text) for reason in reasons)
        assert told == left_out, (found, left_out)
        rows = Counter(row for slot in slots for row in {*self.rows_of_slots[slot]})
        if due.is_distinct:
            assert {*rows.values()} <= {1}
            of = self.num_rows if due.of is None else due.of
            assert told + len(rows) + _number(r"([\d,]+) not due", text) == of, found
            if rows:
                assert _number(r"^each of ([\d,]+) rows", text) == len(rows), found
        elif due.rows is not None and not due.shares:
            self._check_times(due.least, due.most, due.rows, rows, whole=not left_out)
        for number, share in enumerate(due.shares):  # every source has as many rows
            own = {row: n for row, n in rows.items() if row // self.num_rows == number}
            assert share.due.rows is not None
            self._check_times(
                share.due.least, share.due.most, share.due.rows, Counter(own), whole=not left_out
            )
            if not left_out:
                assert share.slots == sum(own.values())

    def _check_times(
        self, least: int, most: int | None, num_rows: int, rows: Counter[int], *, whole: bool
    ) -> None:
        """Compares how often rows came with what the view owes."""
        if isinstance(self.view, packing.PackingView):
            return  # parts of rows: a test counts their tokens
        assert len(rows) <= num_rows
        if most is not None:
            assert max(rows.values(), default=0) <= most, (most, rows)
        if whole and least and num_rows:
            assert len(rows) == num_rows and min(rows.values()) >= least, (least, rows)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1].replace(",", "")) if found else 0


def run(cases: int, seed: int, say: Callable[[str], None] = lambda _: None) -> Counter[str]:
    """Checks so many cases; returns how many verdicts and faults there were of each kind."""
    counts: Counter[str] = Counter()
    for number in range(seed, seed + cases):
        try:
            case = Case(number)
            verdicts = case.check()
        except Exception as error:
            raise AssertionError(f"case --seed {number} --cases 1: {error!r}") from error
        counts[f"fault: {case.fault or case.unseen or 'none'}"] += 1
        counts[f"view: {type(case.view).__name__}"] += 1
        counts.update(f"verdict: {each.outcome}" for each in verdicts)
        for each in verdicts if cases == 1 else ():
            say(repr(each))
    return counts


def main() -> None:
    """Checks made-up epochs, and prints how many there were of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begun = time.monotonic()
    counts = run(arguments.cases, arguments.seed, print)
    for what, count in sorted(counts.items()):
        print(f"{what:32} {count:6,}")
    print(f"{arguments.cases:,} cases in {time.monotonic() - begun:.1f} s: each verdict was true")


if __name__ == "__main__":
    main()
