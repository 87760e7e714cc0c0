"""Sums and orders that follow each report equal those that are computed anew."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import pytest

from cache_server.jobs.ranks import NodeWindow, Ranks, RankWindow
from cache_server.jobs.verdict import judge


def window(chance: random.Random) -> RankWindow:
    steps = chance.randrange(20)
    return RankWindow(
        rank=chance.randrange(8),
        batches=steps,
        elapsed_s=chance.choice([1e-9, 1.0, 1e15]),
        waited_s=chance.random() * steps,
        computed_s=chance.random(),
        fetch_s=chance.choice([0.0, 5.0, 1e15]),
        rows=chance.choice([0, 100, 10**15]),
        local_rows=chance.randrange(100),
        nodes={chance.choice("abc"): NodeWindow(chance.randrange(99), chance.random())},
    )


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_came_and_went_leave_nothing_behind(seed: int) -> None:
    chance = random.Random(seed)
    ranks, known = Ranks(), {}
    for _ in range(400):
        number = chance.randrange(30)
        if chance.random() < 0.3:
            ranks.drop(number)
            known.pop(number, None)
        else:
            known[number] = window(chance)
            ranks.put(number, known[number], epoch=number % 3, step=number)
    anew = Ranks(known.values())

    measured = [each for each in known.values() if each.took_batches]
    by_wait = sorted(each.per_step(each.waited_s) for each in measured)
    assert ranks.slowest() is not None and ranks.slowest()[1] == median(by_wait[:-1])
    assert len(ranks.worst(5)) == 5
    assert ranks.behind() == min(known, key=lambda number: (number % 3, number))
    for name in ("num_ranks", "rows_per_s", "mean_wait_share", "most_wait_share", "local_share"):
        assert getattr(ranks, name) == getattr(anew, name), name
    assert dict(ranks.node_rows) == dict(anew.node_rows)
    assert dict(ranks.node_waits) == dict(anew.node_waits)
    assert judge(ranks).kind == judge(anew).kind
    for number in known:
        ranks.drop(number)
    assert (len(ranks), ranks.num_ranks, ranks.rows_per_s, len(ranks.node_rows)) == (0, 0, 0, 0)


def test_made_up_nodes_are_bounded_in_the_sums() -> None:
    empty = RankWindow(0, 1, 1.0, 1.0, 1.0)
    ranks = Ranks(
        replace(empty, nodes={f"{rank}-{name}": NodeWindow(1) for name in range(16)})
        for rank in range(100)
    )
    assert len(ranks.node_rows) == 1000
    for number in range(100):
        ranks.drop(number)
    assert not ranks.node_rows
