"""Digests of steps, and what the records of all ranks prove."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cache_client.order import audit, audit_record, digests, due
from cache_client.order import order as ordering
from cache_protocol.errors import ConfigError

ROWS, WORLD, BATCH = 1003, 3, 10
PLAN = ordering.StepPlan(ROWS, WORLD, BATCH)


def record(
    rank: int,
    *,
    steps: Sequence[int] | None = None,
    start: int = 0,
    world_size: int = WORLD,
    seed: int = 5,
    run: str = "",
    number: int = 1,
    epoch: int = 0,
    drop_last: bool = False,
    pad: bool = False,
) -> audit_record.AuditRecord:
    """What a rank records that is given these steps, one after the other; default: all."""
    plan = ordering.StepPlan(
        ROWS, world_size, BATCH, drop_last=drop_last, pad=pad, rows_consumed=start
    )
    order = ordering.EpochOrder(ROWS, shuffle=True, seed=seed, epoch=epoch)
    trail = digests.Trail()
    for step in range(plan.num_steps) if steps is None else steps:
        positions, sizes = plan.window(range(step, step + 1), rank)
        trail.add(*digests.step_digests(order.row_ids(positions), sizes), sum(sizes))
    return audit_record.AuditRecord(
        run=run or f"run-{rank}",
        number=number,
        dataset="t",
        fingerprint="f",
        num_rows=ROWS,
        seed=seed,
        shuffle=True,
        shuffle_block_size=None,
        epoch=epoch,
        rows_consumed=start,
        rank=rank,
        world_size=world_size,
        batch_size=BATCH,
        drop_last=drop_last,
        pad=pad,
        due=due.Due(rows=ROWS, of=ROWS),
        job_shuffle=(True, None),
        steps=trail.steps,
        rows=trail.rows,
        set_digest=trail.set_digest,
        order_digest=trail.order_digest,
        checkpoints=tuple(trail.checkpoints),
    )


def outcome(records: Sequence[audit_record.AuditRecord], **options: int) -> tuple[str, int, str]:
    (found,) = audit.audit([audit_record.Evidence(each) for each in records], **options)
    return found.outcome, found.rows, " | ".join(found.findings)


def stated(records: Sequence[audit_record.AuditRecord]) -> str:
    (found,) = audit.audit([audit_record.Evidence(each) for each in records])
    return found.statement


ALL = range(PLAN.num_steps)


def test_the_digest_of_a_set_depends_on_no_order_and_that_of_a_step_does() -> None:
    rows = np.arange(50, dtype=np.int64)
    moved = rows[::-1].copy()

    assert digests.set_digest(rows) == digests.set_digest(moved) == digests.set_digest_of_all(50)
    assert digests.set_digest(rows) != digests.set_digest(np.append(rows[:-1], 7))
    assert digests.step_digests(rows, [50])[1] != digests.step_digests(moved, [50])[1]


@pytest.mark.parametrize("size", [1, 7, 40_000])
def test_digests_do_not_depend_on_how_steps_are_cut_into_windows(size: int) -> None:
    rows = np.random.default_rng(0).integers(0, 10**9, 5 * size + size // 2)
    sizes = [size] * 5 + [size // 2] * bool(size // 2)

    joined = digests.step_digests(rows, sizes)
    parts = [
        digests.step_digests(rows[: 2 * size], sizes[:2]),
        digests.step_digests(rows[2 * size :], sizes[2:]),
    ]

    for whole, first, second in zip(joined, *parts, strict=True):
        assert (whole == np.concatenate([first, second])).all()


def test_a_trail_is_the_same_however_its_steps_arrive_and_stays_small() -> None:
    rows = np.arange(5000, dtype=np.int64)
    sets, orders = digests.step_digests(rows, [1] * 5000)
    one_by_one, at_once = digests.Trail(), digests.Trail()
    for step in range(5000):
        one_by_one.add(sets[step : step + 1], orders[step : step + 1], 1)
    at_once.add(sets, orders, 5000)

    assert one_by_one == at_once
    assert 8 <= len(at_once.checkpoints) <= 16


def test_digests_of_steps_are_taken_in_order_and_lost_ones_are_noticed() -> None:
    sets, orders = digests.step_digests(np.arange(10, dtype=np.int64), [1] * 10)
    made = digests.StepDigests()
    made.put(sets[:6], orders[:6])
    made.put(sets[6:], orders[6:])

    first, second = made.take(range(4)), made.take(range(4, 9))

    assert first is not None and second is not None
    assert (np.concatenate([first, second])[:, 0] == sets[:9]).all()
    assert made.take(range(9, 12)) is None


@pytest.mark.parametrize(
    ("options", "rows", "text"),
    [
        ({}, ROWS, "each of 1,003 rows once"),
        ({"drop_last": True}, 990, "each of 990 rows of 1,003 once; 13 left out by drop_last"),
        ({"pad": True}, ROWS, "each of 1,003 rows once; 17 given again to fill the last step"),
    ],
)
def test_a_whole_epoch_is_proven_and_the_verdict_says_what_was_given(
    options: dict[str, bool], rows: int, text: str
) -> None:
    records = [record(rank, **options) for rank in range(WORLD)]
    assert outcome(records) == ("proven", rows, "")
    assert stated(records) == text


@pytest.mark.parametrize("pad", [False, True])
def test_rows_dropped_by_the_attempt_that_reached_the_end_stay_dropped(pad: bool) -> None:
    whole = [record(rank, drop_last=True) for rank in range(WORLD)]
    again = [record(rank, start=ROWS, run=f"b{rank}", pad=pad) for rank in range(WORLD)]

    found = audit.audit(
        [audit_record.Evidence(each, i, i) for i, each in enumerate([*whole, *again])]
    )

    assert [each.statement for each in found] == [
        "each of 990 rows of 1,003 once; 13 left out by drop_last"
    ]
    assert (found[0].rows, found[0].num_rows) == (990, 990)


def test_ranks_whose_view_orders_rows_by_another_shuffle_are_wrong() -> None:
    records = [replace(record(rank), job_shuffle=(rank != 1, None)) for rank in range(WORLD)]
    found, _, findings = outcome(records)
    assert found == "wrong" and "rank 1 read with job_shuffle=(False, None)" in findings


def test_ranks_with_another_view_are_told_which_option_differs() -> None:
    views = ['{"where":"a > 1"}', '{"where":"a > 2"}', '{"where":"a > 1"}']
    records = [
        replace(record(rank), view=view, fingerprint=f"f-{view[-3]}")
        for rank, view in enumerate(views)
    ]
    found, _, findings = outcome(records)
    assert found == "wrong"
    assert "rank 1 read with another view: where is 'a > 2' there and 'a > 1'" in findings


def test_a_wrong_reading_does_not_blame_another_reading_of_the_epoch() -> None:
    wrong = [audit_record.Evidence(record(r, seed=5 + (r == 1)), 0, 9) for r in range(WORLD)]
    right = [audit_record.Evidence(record(r, run=f"b{r}"), 20, 30) for r in range(WORLD)]
    assert [each.outcome for each in audit.audit([*wrong, *right])] == ["wrong", "proven"]


def test_several_records_of_one_pass_count_as_the_last_of_them() -> None:
    early = [record(r, start=30, steps=range(4), run=f"b{r}") for r in range(WORLD)]
    late = [record(r, start=30, steps=range(9), run=f"b{r}") for r in range(WORLD)]
    first = [record(r, steps=[0]) for r in range(WORLD)]
    assert outcome([*first, *early, *late]) == ("proven", 300, "")


def test_the_set_of_all_ranks_is_compared_with_all_rows_without_the_order() -> None:
    records = [record(rank) for rank in range(WORLD)]
    wrong = replace(records[0], set_digest=records[0].set_digest ^ 1)

    assert outcome([wrong, *records[1:]])[0] == "wrong"


def test_records_of_dataloader_workers_add_up_in_any_order() -> None:
    order = ordering.EpochOrder(ROWS, shuffle=True, seed=5, epoch=0)
    made = {}
    for worker in (1, 0):
        for step in ordering.worker_steps(PLAN.num_steps, worker, 2):
            positions, sizes = PLAN.window(range(step, step + 1), 0)
            made[step] = (*digests.step_digests(order.row_ids(positions), sizes), sum(sizes))
    trail = digests.Trail()
    for step in ALL:
        trail.add(*made[step])

    assert (trail.set_digest, trail.order_digest) == (
        record(0).set_digest,
        record(0).order_digest,
    )


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([*range(9), 8, *range(9, 33)], "the batch of step 8 was given twice"),
        ([*range(21), *range(22, 34)], "the batch of step 21 was lost"),
        ([0, *range(33)], "the batch of step 0 was given twice"),
        ([*range(1, 34)], "the batch of step 0 was lost"),
    ],
)
def test_a_repeated_and_a_lost_batch_are_named(steps: list[int], text: str) -> None:
    records = [record(0), record(1, steps=steps), record(2)]

    found, _, findings = outcome(records)

    assert found == "wrong"
    assert f"rank 1 of 3: {text}" in findings


def test_a_step_that_had_the_rows_of_another_one_is_named() -> None:
    steps = [*range(20), 3, *range(21, 34)]

    found, _, findings = outcome([record(0, steps=steps), record(1), record(2)])

    assert found == "wrong"
    assert "rank 0 of 3: step 20 had the rows of step 3" in findings


def test_two_ranks_with_one_number_are_named() -> None:
    records = [record(0), record(1, run="a"), record(1, run="b")]

    (found,) = audit.audit([audit_record.Evidence(each, 1.0, 9.0) for each in records])
    untimed = outcome(records)

    assert found.outcome == "wrong"
    assert "2 processes were rank 1 of 3 at once" in found.findings[0]
    assert "no record of rank 2 of 3" in found.findings[1]
    assert untimed[0] == "open" and "at once or one after the other" in untimed[2]


def test_a_wrong_seed_is_named() -> None:
    found, _, findings = outcome([record(0), record(1, seed=6), record(2)])
    assert found == "wrong"
    assert "rank 1 read with seed=6 instead of 5: wrong from step 0 on" in findings

    every = [record(rank, seed=6) for rank in range(WORLD)]
    assert outcome(every, seed=5)[0] == "wrong"
    assert outcome(every)[0] == "proven"


def test_a_seed_that_differs_from_the_recorded_one_is_wrong_from_step_0() -> None:
    lying = replace(record(1, seed=6), seed=5)

    found, _, findings = outcome([record(0), lying, record(2)])

    assert found == "wrong"
    assert "rank 1 of 3: the first wrong step is one of 0 to 3" in findings


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_a_resumed_epoch_is_proven_also_with_another_world_size(world_size: int) -> None:
    first = [audit_record.Evidence(record(r, steps=range(12)), 0, 10) for r in range(WORLD)]
    start = PLAN.rows_consumed_after(12)
    rest = [
        audit_record.Evidence(record(r, start=start, world_size=world_size, run=f"b{r}"), 20, 30)
        for r in range(world_size)
    ]

    (found,) = audit.audit([*first, *rest])

    assert (found.outcome, found.rows, found.findings) == ("proven", ROWS, ())


def test_a_restart_from_an_older_checkpoint_is_noted_and_proven() -> None:
    first = [audit_record.Evidence(record(r, steps=range(12)), 0, 10) for r in range(WORLD)]
    start = PLAN.rows_consumed_after(8)
    rest = [
        audit_record.Evidence(record(r, start=start, run=f"b{r}"), 20, 30) for r in range(WORLD)
    ]

    (found,) = audit.audit([*first, *rest])

    assert found.outcome == "proven"
    assert "restarted from a checkpoint" in found.findings[0]


def test_a_state_that_is_applied_twice_in_one_process_is_named() -> None:
    start = PLAN.rows_consumed_after(8)
    passes = [
        audit_record.Evidence(
            record(r, start=start, run=f"b{r}", number=number), 20 * number, 20 * number + 9
        )
        for r in range(WORLD)
        for number in (1, 2)
    ]
    first = [audit_record.Evidence(record(r, steps=range(8)), 0, 10) for r in range(WORLD)]

    (found,) = audit.audit([*first, *passes])

    assert found.outcome == "wrong"
    assert "a state was applied twice" in found.findings[0]
    assert "from step 8 of the epoch on" in found.findings[0]


def test_rows_between_two_parts_without_a_record_are_open() -> None:
    first = [audit_record.Evidence(record(r, steps=range(8)), 0, 10) for r in range(WORLD)]
    start = PLAN.rows_consumed_after(10)
    rest = [
        audit_record.Evidence(record(r, start=start, run=f"b{r}"), 20, 30) for r in range(WORLD)
    ]

    (found,) = audit.audit([*first, *rest])

    assert found.outcome == "open"
    assert found.findings == ("no record of positions 240 to 299",)


def test_an_epoch_under_way_is_proven_up_to_the_step_that_all_ranks_have_taken() -> None:
    records = [record(0, steps=range(7)), record(1, steps=range(5)), record(2, steps=range(6))]

    assert outcome(records) == ("proven", 150, "")


def test_an_epoch_that_is_read_again_is_another_reading() -> None:
    again = [record(rank, number=number) for number in (1, 2) for rank in range(WORLD)]

    found = audit.audit([audit_record.Evidence(each, each.number, each.number) for each in again])

    assert [each.outcome for each in found] == ["proven", "proven"]


def test_a_look_at_the_first_batch_counts_for_nothing() -> None:
    looks = [record(rank, steps=[0], number=1) for rank in range(WORLD)]
    passes = [record(rank, number=2) for rank in range(WORLD)]

    assert outcome([*looks, *passes]) == (
        "proven", ROWS, "ranks 0-2 looked at a first batch before, not counted"
    )  # fmt: skip


def test_a_record_survives_json_and_a_bad_one_is_refused() -> None:
    assert audit_record.AuditRecord.from_dict(record(1).to_dict()) == record(1)
    for bad in ({}, {**record(1).to_dict(), "format": 9}):
        with pytest.raises(ConfigError, match="bad audit record"):
            audit_record.AuditRecord.from_dict(bad)


def test_a_record_that_ends_early_beside_a_reload_in_one_process_is_a_gap_and_no_mistake() -> None:
    first = [record(0, steps=range(12)), record(1, steps=range(5)), record(2, steps=range(12))]
    start = PLAN.rows_consumed_after(12)
    rest = [record(r, start=start, number=2) for r in range(WORLD)]

    found, _, findings = outcome([*first, *rest])
    lost = outcome([record(r, steps=range(10)) for r in range(WORLD)] + rest)

    assert (found, findings) == ("open", "no record of positions 150 to 359")
    assert lost[0] == "wrong" and "ended at row 300, and the next one began at row 360" in lost[2]
