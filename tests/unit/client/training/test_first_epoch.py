"""The order of the first epoch of a version that loads, against a definition in a few lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_client.epochs import passes
from cache_client.flight import routing
from cache_client.job.connection import Access
from cache_client.order import load_log
from cache_client.order import order as ordering
from cache_client.reading import node_health, shard_maps
from cache_client.training import first_epoch, left_out, windows
from cache_client.view_options import job_view
from cache_client.views import view as views_view
from cache_protocol.errors import (
    LoadError,
    NodeUnavailableError,
    NotReadyError,
    StaleVersionError,
)
from cache_protocol.storage.row_index import ROWS_OF_A_SHARD
from cache_protocol.wire.credentials import NO_CREDENTIALS

SEED, EPOCH = 7, 0
Groups = list[list[int]]  # rows of the shards of each group; shards are numbered backwards


def log_of(groups: Groups, known: int, *, total: bool) -> load_log.GroupLog:
    """The first groups of a log; shards that were sealed later have smaller numbers."""
    ends = [*accumulate((len(group) for group in groups), initial=0)]
    made = [
        load_log.LoggedGroup(tuple(range(ends[-1] - stop, ends[-1] - start)), tuple(group))
        for group, start, stop in zip(groups, ends, ends[1:], strict=False)
    ]
    closed = known == len(groups)
    num_rows = sum(map(sum, groups))
    return load_log.GroupLog(
        "log", tuple(made[:known]), closed, num_rows if closed or total else None
    )


def map_of(log: load_log.GroupLog) -> routing.ShardMap:
    pairs = sorted(
        pair for each in log.groups for pair in zip(each.shards, each.num_rows, strict=True)
    )
    held = [index for index, rows in pairs if rows]
    return routing.ShardMap(
        "table", "f", pa.schema([("row", pa.int64())]), log.num_rows,
        np.array(held, np.int64) * ROWS_OF_A_SHARD,
        (routing.NodeRef("a", "grpc://a:1"), routing.NodeRef("b", "grpc://b:1")),
        tuple((index % 2,) for index in held),
        log=log,
    )  # fmt: skip


def rows_in_order(groups: Groups, block_size: int | None = None) -> list[int]:
    """The definition: the rows of each group shuffled, one group after the other."""
    rows: list[int] = []
    log = log_of(groups, len(groups), total=True)
    for number, group in enumerate(log.groups):
        pairs = zip(group.shards, group.num_rows, strict=True)
        held = [shard * ROWS_OF_A_SHARD + row for shard, count in pairs for row in range(count)]
        order = ordering.EpochOrder(
            len(held), shuffle=True, shuffle_block_size=block_size,
            seed=SEED * 2**32 + number, epoch=EPOCH,
        )  # fmt: skip
        rows += [held[place] for place in order.row_ids(np.arange(len(held))).tolist()]
    return rows


def batches_of(rows: list[int], start: int, world: int, size: int, rank: int) -> list[list[int]]:
    """The definition: runs of each step, and the rule for a last step with few rows."""
    batches = []
    for at in range(start, len(rows), world * size):
        step = rows[at : at + world * size]
        first, last = len(step) * rank // world, len(step) * (rank + 1) // world
        batches.append(step[first:last] or [step[rank % len(step)]])
    return batches


class Growing(first_epoch.LoadingSource):
    """A version that loads: each question brings one more group."""

    def __init__(self, groups: Groups, known: int, *, total: bool, fails: bool = False) -> None:
        self.groups, self.number, self.total, self.fails = groups, known, total, fails
        self.block_size: int | None = None
        self.unavailable: set[str] = set()
        super().__init__(
            "grpc://a:1", map_of(log_of(groups, known, total=total)), (), NO_CREDENTIALS,
            deadline_s=1.0, local=False, shuffle=views_view.Shuffle(True, None, SEED),
            ready_deadline_s=1.0,
        )  # fmt: skip

    def _read(self, given_up: Any, first: str) -> routing.ShardMap:
        if self.fails:
            raise LoadError("the load failed")
        if first in self.unavailable:
            raise NodeUnavailableError(first)
        self.number = min(self.number + 1, len(self.groups))
        return map_of(log_of(self.groups, self.number, total=self.total))


def ask_nodes(source: first_epoch.LoadingSource, row_ids: Any) -> Callable[[], list[Any]]:
    """Stands for a reader: checks that each row is asked of the node that has it."""
    for part in routing.Router(source.shards).route(row_ids):
        assert part.node is not None
        shards = set((part.row_ids // ROWS_OF_A_SHARD).tolist())
        assert {"ab"[index % 2] for index in shards} == {part.node.id}
    return list


def steps_of_pass(
    source: first_epoch.LoadingSource, this: passes.Pass, rank: int, window: int
) -> Iterator[list[int]]:
    """The rows of each step that a process makes, as a dataset reads them."""
    read = SimpleNamespace(
        job_view=job_view.JobView(views_view.LoggedView(source.log)),
        loading=source,
        left_out=left_out.LeftOut(Access("", NO_CREDENTIALS, 1.0, False), ()),
    )

    def fetch(steps: range) -> Any:
        ask = partial(
            windows.ask_for_window, audits=True, given_up=lambda: False, fetch=lambda _: []
        )
        return ask(this, cast("Any", read), rank, partial(ask_nodes, source), steps)()

    for found in windows.all_windows(map(fetch, ordering.step_windows(this.steps, window)), fetch):
        assert found.digests is not None and len(found.digests[0]) == len(found.sizes)
        ends = np.cumsum(found.sizes)[:-1]
        yield from (part.tolist() for part in np.split(found.samples.row_ids, ends))


def begun(
    source: first_epoch.LoadingSource,
    plan: ordering.StepPlan,
    worker: int = 0,
    workers: int = 1,
) -> passes.Pass:
    this = passes.Pass(worker=worker, num_workers=workers, in_worker=workers > 1)
    this.epoch, this.plan = EPOCH, replace(plan, num_rows=source.log.num_slots)
    source.tell(this)
    return this


groups_of_shards = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=6
)
part = st.tuples(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(0, 4)
)  # ranks, batch size, workers, steps of a window, steps until it stops


@settings(max_examples=25)
@given(groups_of_shards, st.booleans(), st.lists(part, min_size=1, max_size=3), st.data())
def test_ranks_workers_and_resumes_read_what_the_log_says(
    groups: Groups, total: bool, parts: Sequence[tuple[int, ...]], data: st.DataObject
) -> None:
    rows, consumed = rows_in_order(groups), 0
    for number, (world, size, workers, window, stop) in enumerate(parts):
        is_last = number == len(parts) - 1
        num_steps = set()
        for rank in range(world):
            expected = batches_of(rows, consumed, world, size, rank)
            by_worker = []
            for worker in range(workers):
                known = data.draw(st.integers(0, len(groups)))
                source = Growing(groups, known, total=total)
                plan = ordering.StepPlan(load_log.UNKNOWN_ROWS, world, size, rows_consumed=consumed)
                this = begun(source, plan, worker, workers)
                found = [*steps_of_pass(source, this, rank, window)]
                by_worker.append(found)
                assert this.plan.num_steps == len(expected)
                assert sum(this.order.groups) == source.log.num_rows
            merged = [
                by_worker[step % workers][step // workers]
                for step in range(sum(map(len, by_worker)))
            ]
            assert merged == expected
            num_steps.add(len(merged))
        assert len(num_steps) == 1
        if is_last:
            break
        consumed = ordering.StepPlan(
            len(rows), world, size, rows_consumed=consumed
        ).rows_consumed_after(min(stop, *num_steps))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("pad", [False, True])
def test_an_epoch_of_unknown_length_ends_as_one_of_known_length(drop_last: bool, pad: bool) -> None:
    if drop_last and pad:
        return
    groups = [[5], [4, 0, 3], [9]]
    options = {"drop_last": drop_last, "pad": pad}
    for rank in range(2):
        found = []
        for total in (False, True):
            source = Growing(groups, 1, total=total)
            this = begun(source, ordering.StepPlan(load_log.UNKNOWN_ROWS, 2, 4, **options))
            found.append([*steps_of_pass(source, this, rank, 2)])
        assert found[0] == found[1]
        assert len(found[0]) == (math.floor if drop_last else math.ceil)(21 / 8)


def test_no_row_is_waited_for_that_the_first_step_does_not_need() -> None:
    source = Growing([[10], [10], [10]], 1, total=True)
    this = begun(source, ordering.StepPlan(load_log.UNKNOWN_ROWS, 1, 4))
    steps = steps_of_pass(source, this, 0, 7)
    for wanted in (1, 1, 2):
        next(steps)
        assert source.number == wanted


def test_a_map_that_was_asked_for_before_a_load_went_on_is_not_the_newest() -> None:
    maps = [map_of(log_of([[10], [10]], known, total=True)) for known in (1, 2)]
    health = node_health.NodeHealth(maps[0])
    for found in (maps[1], maps[0]):
        health.shards = found
        assert health.shards is maps[1]


def test_a_load_that_fails_ends_the_pass_by_name() -> None:
    source = Growing([[10], [10]], 1, total=True, fails=True)
    steps = steps_of_pass(
        source, begun(source, ordering.StepPlan(load_log.UNKNOWN_ROWS, 1, 5)), 0, 4
    )
    next(steps)
    next(steps)
    with pytest.raises(LoadError, match="the load failed"):
        next(steps)


def test_a_pass_ends_by_name_when_its_version_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Growing([[10], [10]], 1, total=True)
    steps = steps_of_pass(
        source, begun(source, ordering.StepPlan(load_log.UNKNOWN_ROWS, 1, 5)), 0, 4
    )
    next(steps)
    next(steps)
    other = replace(log_of([[10], [10]], 2, total=True), log_id="another")
    monkeypatch.setattr(source, "_read", lambda *_: map_of(other))
    with pytest.raises(StaleVersionError, match=r"loaded again .* its log is another"):
        next(steps)
    assert source.log.log_id != "another"


def test_groups_are_learned_from_another_node_when_the_endpoint_is_gone() -> None:
    source = Growing([[10], [10]], 1, total=False)
    source.unavailable = {source.endpoint}
    source.look()
    assert source.number == 2 and source.log.closed


def test_nodes_that_say_the_same_in_turn_do_not_move_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def read(location: str, *_: Any) -> routing.ShardMap:
        asked.append(location)
        raise NotReadyError(f"{location} is loading")

    monkeypatch.setattr(shard_maps, "_read_shard_map", read)
    with pytest.raises(NotReadyError, match="is loading"):
        shard_maps.wait_for_shard_map(
            "grpc://a:1", "t", (), 0.2, known_groups=1, others=["grpc://b:1"],
            given_up=lambda: len(asked) > 100,
        )  # fmt: skip
    assert {"grpc://a:1", "grpc://b:1"} == {*asked} and len(asked) < 100


def test_more_groups_change_nothing_before_them() -> None:
    sizes = (30, 1, 0, 50, 300)
    for block_size in (None, 4):
        orders = [
            ordering.EpochOrder(
                sum(sizes[:count]), shuffle=True, shuffle_block_size=block_size, seed=3,
                groups=sizes[:count],
            )
            for count in range(1, 6)
        ]  # fmt: skip
        rows = [order.row_ids(np.arange(order.num_rows)).tolist() for order in orders]
        for fewer, more in pairwise(rows):
            assert more[: len(fewer)] == fewer
            assert sorted(more) == [*range(len(more))]
        assert sorted(rows[-1][31:81]) == [*range(31, 81)] != rows[-1][31:81]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shuffle": False, "groups": (4,)}, "shuffle=True"),
        ({"shuffle": True, "groups": (3,)}, "num_rows=4"),
        ({"shuffle": True, "groups": (5, -1)}, "at least 0"),
    ],
)
def test_groups_that_cannot_be_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ordering.EpochOrder(4, **arguments)
