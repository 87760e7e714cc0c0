"""Makes up jobs whose epochs are amended and whose rows are erased, and checks every row.

``make soak-epochs`` makes 1,000; ``python -m benchmarks.trials.epochs --cases 1 --seed 77`` repeats
one. A case has up to 20 amendments: rows are appended or erased, and views change, with conditions
and weights. One to seven ranks read, with any batch size; the job is killed anywhere, and other
ranks continue from its state. The reference counts rows: after each amendment, a row is due as
often as the view says, less what was given. And the rows of any number of ranks, by step and rank,
are those of one. No case needs a node: `MadeUp` answers in place of the cache.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_client import CacheIterableDataset, View
from cache_client.control import erasures
from cache_client.flight.routing import NodeRef, ShardMap
from cache_client.order.erased import Erased
from cache_client.reading.rows import Rows
from cache_client.reading.source import Source
from cache_client.training import amendments, left_out, opened
from cache_client.view_options import open_view, selection
from cache_protocol.errors import ConfigError, ErasedRowsError
from cache_server.shards.packing import ShardBuilder, logical_schema

_SCHEMA = logical_schema(pa.schema([("row", pa.int64()), ("label", pa.int64())]))
CONDITIONS: dict[str, Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]] = {
    "label < 2": lambda label: label < 2,
    "label <> 3": lambda label: label != 3,
    "label > 4": lambda label: label > 4,
}
VIEWS = {
    "all": View(),
    **{where: View(where=where) for where in CONDITIONS},
    "train": View(split={"train": 0.7, "val": 0.3}, part="train"),
    "short": View(epoch_rows=40),
    "list": View(subset=[*range(0, 30, 2), 4, 4]),
    "weights": View(weights="label", replacement=False, epoch_rows=8),
    "drawn": View(weights="label", epoch_rows=25),
}
READS_VALUES = {*CONDITIONS, "weights", "drawn"}
MOST_STATE_BYTES = 4096


class MadeUp:
    """A cache of one dataset, in this process: rows of a number and a label.

    Attributes:
        shards: rows of each shard.
        acts: the acts of erasing.
    """

    def __init__(self, rng: random.Random) -> None:
        self.shards = [rng.randint(40, 400), rng.randint(1, 20)]
        self.labels = np.array([rng.randrange(7) for _ in range(sum(self.shards))])
        self.acts: dict[int, npt.NDArray[np.int64]] = {}

    def append(self, rng: random.Random, count: int) -> None:
        self.shards.append(count)
        self.labels = np.append(self.labels, [rng.randrange(7) for _ in range(count)])

    def erase(self, rows: list[int]) -> None:
        new = np.setdiff1d(np.array(rows, np.int64), [*self.gone])
        if len(new):
            self.acts[len(self.acts) * 3 + 2] = new

    @property
    def gone(self) -> set[int]:
        return {row for rows in self.acts.values() for row in rows.tolist()}

    def shard_map(self, *_: Any, fingerprint: str = "", **__: Any) -> ShardMap:
        count = int(fingerprint, 16) if fingerprint else len(self.shards)
        ends = np.cumsum([0, *self.shards[:count]])
        return ShardMap(
            "rows", f"{count:032x}", _SCHEMA, int(ends[-1]), ends[:-1], (NodeRef("n", "grpc://n:1"),),
            ((0,),) * count, checksums=tuple(map(str, range(count))), erasures=len(self.acts),
        )  # fmt: skip

    def read_erased(self, _: Any, shards: ShardMap) -> Erased:
        return Erased(dict(self.acts), [0, *self.acts][shards.erasures]).first(shards.num_rows)

    def values(self, shards: ShardMap) -> npt.NDArray[np.int64]:
        """The labels; those of erased rows are gone."""
        found = self.labels[: shards.num_rows].copy()
        found[[row for row in self.gone if row < len(found)]] = 1
        return found

    def selected(self, version: Any, where: Any) -> list[npt.NDArray[np.uint32]]:
        starts = version.shards.starts.tolist()
        held = np.ones(version.shards.num_rows, np.bool_)
        for each in where:
            held &= CONDITIONS[each](self.values(version.shards))
        parts = np.split(held, starts[1:])
        return [np.flatnonzero(part).astype(np.uint32) for part in parts]

    def fetch(self, row_ids: npt.NDArray[np.int64]) -> list[Rows]:
        if np.isin(row_ids, [*self.gone]).any():
            raise ErasedRowsError("rows were forgotten")
        builder = ShardBuilder(_SCHEMA)
        builder.append(pa.record_batch({"row": row_ids, "label": self.labels[row_ids]}))
        return [Rows.of_batch(builder.layout, builder.finish())]

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Answers in place of the cache."""
        made_up = self

        class Read:
            num_nodes, is_closed = 0, False
            fetch, request = made_up.fetch, None
            close = keep_lease = staticmethod(lambda: None)

            def __enter__(self) -> Self:
                return self

            def __exit__(self, *_: object) -> None:
                pass

        with ExitStack() as stack:
            for module in (opened, amendments):
                stack.enter_context(patch.object(module, "wait_for_shard_map", self.shard_map))
            for module in (erasures, left_out):
                stack.enter_context(patch.object(module, "read_erased", self.read_erased))
            stack.enter_context(patch.object(selection, "selected_rows", self.selected))
            values = lambda version, _: pa.chunked_array([self.values(version.shards)])  # noqa: E731
            stack.enter_context(patch.object(open_view, "row_values", values))
            stack.enter_context(patch.object(Source, "open_reader", lambda *_, **__: Read()))
            stack.enter_context(patch.object(opened, "Reporter", lambda *_, **__: None))
            yield self


def reader(view: str, seed: int, shuffle: bool, **arguments: Any) -> CacheIterableDataset:
    given = {"batch_size": 5, "cache": "grpc://127.0.0.1:1", "job": None, **arguments}
    return CacheIterableDataset("rows", view=VIEWS[view], seed=seed, shuffle=shuffle, **given)


def rows_of(batches: Any, count: int | None = None) -> list[list[int]]:
    """The rows of the next batches."""
    found: list[list[int]] = []
    while count is None or len(found) < count:
        batch = next(batches, None)
        if batch is None:
            break
        found.append(batch["row"].tolist())
    return found


def run(seed: int) -> Counter[str]:
    """One case; what it had.

    Raises:
        AssertionError: a row came that was not due, or did not come, or in another order.
    """
    rng, did = random.Random(seed), Counter[str]()
    with MadeUp(rng).running() as cache:
        shuffle, first = rng.random() < 0.8, rng.choice([*VIEWS])
        how: dict[str, Any] = {"seed": seed, "shuffle": shuffle}
        view, state, given = first, None, Counter[int]()
        lost = False  # the epoch had a view whose values are gone
        views = {first}
        for _ in range(rng.randint(1, 20)):
            world, batch = rng.randint(1, 7), rng.randint(1, 6)
            ranks = [
                reader(first, rank=rank, world_size=world, batch_size=batch, **how)
                for rank in range(world)
            ]
            alone = reader(first, batch_size=10_000, **how)  # in one step
            try:
                for each in (*ranks, alone)[: len(ranks) + 1 if state else 0]:
                    each.load_state_dict(json.loads(json.dumps(state)))
            except ConfigError as error:
                assert "rows were erased since" in str(error), error
                assert lost, "the state knows what it needs"
                did["refused"] += 1
                return did
            left = ranks[0].steps_left
            steps = rng.randint(0, min(4, left))
            if steps and rng.random() < 0.2:  # a few are erased while the job reads
                cache.erase(rng.sample(range(len(cache.labels)), rng.randint(1, 3)))
                did["erased while it read"] += 1
                lost |= bool(views & READS_VALUES)
            passes = [iter(each) for each in ranks]
            by_rank = [rows_of(each, steps) for each in passes]
            together = [row for step in zip(*by_rank, strict=True) for rows in step for row in rows]
            whole = steps < left or not steps
            expected = rows_of(iter(alone))[0][: len(together)] if together else []
            if whole and world > 1:  # a short last step repeats rows; one rank amends by itself
                assert together == expected, (together, expected)
            given.update(together if whole else dict.fromkeys(together, 1))
            if not whole:
                did["to its end"] += 1
                return did
            for act in rng.sample(["append", "erase", "view"], rng.randint(1, 3)):
                did[act] += 1
                if act == "append":
                    cache.append(rng, rng.randint(1, 40))
                elif act == "erase":
                    count = rng.randint(1, max(1, len(cache.labels) // 10))
                    cache.erase(rng.sample(range(len(cache.labels)), count))
                    lost |= bool(views & {"weights", "drawn"})
                else:
                    view = rng.choice([*VIEWS])
            try:
                for each in ranks:
                    each.amend(view=VIEWS[view])
            except ConfigError as error:
                assert "rows were erased since" in str(error), error
                assert lost
                did["refused"] += 1
                return did
            views.add(view)
            did["amended"] += 1
            states = [each.state_dict() for each in ranks]
            assert all(each == states[0] for each in states), states
            state = states[0]
            check_rest(cache, view, how, first, state, given)
            assert len(json.dumps(state)) < MOST_STATE_BYTES
    return did


def check_rest(
    cache: MadeUp, view: str, how: Any, first: str, state: Any, given: Counter[int]
) -> None:
    """What a job gives from a state on: each row as often as it is due, less what was given."""
    due = Counter(row for rows in rows_of(iter(reader(view, **how))) for row in rows)
    try:
        job = reader(first, **how)
        job.load_state_dict(state)
    except ConfigError:
        return  # which the next part judges
    rest = Counter(row for rows in rows_of(iter(job)) for row in rows)
    assert rest == due - given, (rest, due - given)
    assert not rest.keys() & cache.gone


def main() -> None:
    """Runs the cases, and says what they had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin, total = time.monotonic(), Counter[str]()
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        try:
            total += run(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
    took_s = time.monotonic() - begin
    print(f"{arguments.cases} cases, 0 deviations, {took_s:.0f} s: {dict(total)}")


if __name__ == "__main__":
    main()
