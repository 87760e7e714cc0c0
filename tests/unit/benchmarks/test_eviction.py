"""The simulation of evictions: its traces, and caches that a hand can follow."""

from __future__ import annotations

import json

from benchmarks import common, eviction
from benchmarks.eviction import Read, Table, Trace, lru, make_trace, optimal, simulate

DAY_S = 86_400.0


def test_a_seed_gives_one_trace_of_every_team() -> None:
    trace = make_trace(3)

    assert trace == make_trace(3) != make_trace(4)
    assert {table.team for table in trace.tables} == set(range(eviction.TEAMS))
    assert [*trace.reads] == sorted(trace.reads) and len(trace.reads) > 1000


def test_a_cycle_through_one_dataset_too_many_is_what_lru_never_has() -> None:
    tables = [Table(number, 0, 10, 1.0) for number in range(3)]
    days = range(eviction.WARM_DAYS, eviction.WARM_DAYS + 30)
    trace = Trace(tables, [Read(day * DAY_S + 1, day % 3, day * DAY_S + 2) for day in days])

    assert simulate(trace, 20, lru).num_bytes == 27 * 10  # all but the first loads
    assert simulate(trace, 20, optimal(trace.reads)).num_bytes < 27 * 10 / 1.5
    assert simulate(trace, 30, lru).num_bytes == 0


def test_what_is_read_is_not_evicted_and_a_read_that_finds_no_room_is_counted() -> None:
    tables = [Table(number, 0, 10, 1.0) for number in range(2)]
    trace = Trace(tables, [Read(0.0, 0, DAY_S), Read(1.0, 1, 2.0), Read(3 * DAY_S, 1, 4 * DAY_S)])

    assert simulate(trace, 10, lru).refused == 1


def test_the_result_is_of_other_traces_than_the_parameters() -> None:
    result = json.loads((common.RESULTS / "eviction.json").read_text())

    assert not set(result["seeds"]) & set(eviction.CHOSEN_WITH)
