"""Makes up jobs whose epochs are amended and whose rows are erased, and checks every row.

``make soak-epochs`` makes 1,000; ``python -m benchmarks.trials.epochs --cases 1 --seed 77`` repeats
one. A case has up to 20 amendments: rows are appended or erased, and views change, with conditions
and weights. One to seven ranks read, with any batch size, some with workers; the job is killed
anywhere, and other ranks continue from its state, in later epochs, too. `due` is the reference, in
plain Python: after each amendment, a row is due as often as the view says, less what was given. The
rows of any number of ranks, by step and rank, are those of one. And what `cachectl seen` says of a
state is what a log has of every row that was given. No case needs a node: `MadeUp` answers in place
of the cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import random
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_client import CacheIterableDataset, CacheMixture, View
from cache_client.cli import step_rows
from cache_client.cli.seen import Wanted, seen_by_state
from cache_client.cli.step_rows import NotShownError
from cache_client.control import erasures
from cache_client.flight.routing import NodeRef, ShardMap
from cache_client.job.connection import access_to
from cache_client.order.erased import Erased
from cache_client.order.states import OrderState, read_state
from cache_client.reading.rows import Answer, Rows
from cache_client.reading.source import Source
from cache_client.training import amendments, left_out, opened
from cache_client.view_options import columns, open_view, selection
from cache_protocol.errors import ConfigError, ErasedRowsError
from cache_protocol.storage.layout import Layout
from cache_server.shards.packing import ShardBuilder, logical_schema

_SCHEMA = logical_schema(pa.schema([("row", pa.int64()), ("label", pa.int64())]))
CONDITIONS: dict[str, Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]] = {
    "label < 2": lambda label: label < 2,
    "label <> 3": lambda label: label != 3,
    "label > 4": lambda label: label > 4,
}
ENDPOINT, ALL_ROWS = "grpc://127.0.0.1:1", "label >= 0"
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


def word(number: int, key: int = 0) -> int:
    """A word of splitmix64."""
    mixed = (number * 0x9E3779B97F4A7C15 + key) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


def due(
    view: str, labels: Sequence[int], gone: set[int], seed: int, epoch: int
) -> Counter[int] | None:
    """How often each row is due in an epoch; None: as often as a job gives it that begins now."""
    rows = [row for row in range(len(labels)) if row not in gone]
    text = f"weights seed={seed} epoch={epoch}".encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    if view == "drawn":
        sums = list(accumulate(labels[row] for row in rows))
        points = [word(slot + 1, key) * sums[-1] >> 64 for slot in range(25)]
        rows = [rows[bisect_right(sums, point)] for point in points]
    elif view == "weights":
        clocks = {
            row: -math.log1p(-word(at + 1, key) / 2**64) / labels[row]
            for at, row in enumerate(rows)
            if labels[row]
        }
        rows = sorted(clocks, key=clocks.__getitem__)[:8]
    elif view == "train":
        rows = [row for row in rows if word(row ^ 0x2545F4914F6CDD1D) < 7 * 2**64 // 10]
    elif view == "list":
        rows = [row for row in [*range(0, 30, 2), 4, 4] if row not in gone]
    elif view != "all":
        if view not in CONDITIONS:
            return None
        _, sign, number = view.split()
        holds = {"<": int.__lt__, "<>": int.__ne__, ">": int.__gt__}[sign]
        rows = [row for row in rows if holds(labels[row], int(number))]
    return Counter(rows)


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

    def shard_map(
        self, _: Any, name: str = "rows", *__: Any, fingerprint: str = "", **___: Any
    ) -> ShardMap:
        count = int(fingerprint, 16) if fingerprint else len(self.shards)
        ends = np.cumsum([0, *self.shards[:count]])
        return ShardMap(
            name, f"{count:032x}", _SCHEMA, int(ends[-1]), ends[:-1], (NodeRef("n", "grpc://n:1"),),
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
        if where == ALL_ROWS:
            held[[row for row in self.gone if row < len(held)]] = False
        for each in () if where == ALL_ROWS else where:
            held &= CONDITIONS[each](self.values(version.shards))
        parts = np.split(held, starts[1:])
        return [np.flatnonzero(part).astype(np.uint32) for part in parts]

    def fetch(self, row_ids: npt.NDArray[np.int64]) -> list[Rows]:
        return [Rows.of_batch(Layout(_SCHEMA), self._stored(row_ids))]

    def ask(
        self, row_ids: npt.NDArray[np.int64], positions: Any, **_: Any
    ) -> Callable[[], list[Answer]]:
        """As `fetch`, for readers of several datasets."""
        return lambda: [Answer(positions, [self._stored(row_ids)])]

    def _stored(self, row_ids: npt.NDArray[np.int64]) -> pa.RecordBatch:
        if np.isin(row_ids, [*self.gone]).any():
            raise ErasedRowsError("rows were forgotten")
        builder = ShardBuilder(_SCHEMA)
        builder.append(pa.record_batch({"row": row_ids, "label": self.labels[row_ids]}))
        return builder.finish()

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Answers in place of the cache."""
        made_up = self

        class Read:
            num_nodes, is_closed = 0, False
            fetch, ask, request = made_up.fetch, made_up.ask, None
            close = keep_lease = staticmethod(lambda: None)

            def __enter__(self) -> Self:
                return self

            def __exit__(self, *_: object) -> None:
                pass

        with ExitStack() as stack:
            for module in (opened, amendments):
                stack.enter_context(patch.object(module, "wait_for_shard_map", self.shard_map))
            of_seen = lambda access, name, fingerprint, **_: self.shard_map(  # noqa: E731
                access, name, fingerprint=fingerprint
            )
            stack.enter_context(patch.object(step_rows, "open_version", of_seen))
            stack.enter_context(patch.object(columns, "selected_rows", self.selected))
            for module in (erasures, left_out):
                stack.enter_context(patch.object(module, "read_erased", self.read_erased))
            stack.enter_context(patch.object(selection, "selected_rows", self.selected))
            values = lambda version, _: pa.chunked_array([self.values(version.shards)])  # noqa: E731
            stack.enter_context(patch.object(open_view, "row_values", values))
            stack.enter_context(patch.object(Source, "open_reader", lambda *_, **__: Read()))
            stack.enter_context(patch.object(opened, "Reporter", lambda *_, **__: None))
            yield self


def reader(view: str, seed: int, shuffle: bool, **arguments: Any) -> CacheIterableDataset:
    given = {"batch_size": 5, "cache": ENDPOINT, "job": None, **arguments}
    return CacheIterableDataset(
        given.pop("name", "rows"), view=VIEWS[view], seed=seed, shuffle=shuffle, **given
    )


def rows_of(batches: Any, count: int | None = None) -> list[list[int]]:
    """The rows of the next batches."""
    found: list[list[int]] = []
    while count is None or len(found) < count:
        batch = next(batches, None)
        if batch is None:
            break
        found.append(batch["row"].tolist())
    return found


class Refused(Exception):
    """A view needs values of erased rows: the docs name it."""


class Case:
    """One job, and what it was given.

    Attributes:
        did: what happened how often.
    """

    def __init__(self, seed: int) -> None:
        self.did = Counter[str]()
        self._rng = random.Random(seed)
        self._cache = MadeUp(self._rng)
        self._how: dict[str, Any] = {"seed": seed, "shuffle": self._rng.random() < 0.8}
        reads_values = self._rng.random() < 0.6  # rows that went make some states unreadable
        self._choice = [each for each in VIEWS if reads_values or each not in READS_VALUES]
        self._first = self._view = self._rng.choice(self._choice)
        self._views = {self._first}
        self._num_rows = len(self._cache.labels)  # of the version that it reads
        self._lost = False  # the job had a view whose values are gone
        self._state: Any = None
        self._epoch = 0
        self._log: dict[int, list[int]] = {0: []}  # of each epoch, in the order of the job
        self._blurred: set[int] = set()  # epochs in which rows went while they were read

    def run(self) -> None:
        """Amends the job, and kills it.

        Raises:
            AssertionError: a row came that was not due, or did not come, or in another order; or
                what is said of a state is not what the log has.
        """
        with self._cache.running():
            try:
                for _ in range(self._rng.randint(1, 20)):
                    self._segment()
                    if self._rng.random() < 0.2:
                        self._check_seen()
                self._check_seen()
            except Refused:
                self.did["refused"] += 1

    def _segment(self) -> None:
        """Other ranks continue, the job is amended or not, and ends with a state."""
        rng = self._rng
        world, batch = rng.randint(1, 7), rng.randint(1, 6)
        ranks = [
            self._reader(rank=rank, world_size=world, batch_size=batch) for rank in range(world)
        ]
        alone = self._reader(batch_size=10_000)  # in one step
        with self._may_be_refused():
            for each in (*ranks, alone) if self._state else ():
                each.load_state_dict(json.loads(json.dumps(self._state)))
        left = ranks[0].steps_left
        steps = rng.randint(0, min(rng.choice([4, 4, 30]), left))
        self._read(ranks, alone, steps)
        if steps == left:
            self._epoch += 1
            self._log[self._epoch] = []
            self._passes = []  # workers that run would know nothing of an amendment
            for each in ranks:
                each.set_epoch(self._epoch)
            self.did["epochs"] += 1
        is_amended = rng.random() < 0.8
        if is_amended:
            self._amend(ranks)
        else:
            self.did["killed without an amendment"] += 1
        states = [each.state_dict() for each in ranks]
        # A rank that was given none of the rows that went has no notes on them.
        told = states if is_amended else [{**each, "notes": ""} for each in states]
        assert all(each == told[0] for each in told), states
        self._state = states[0]
        assert len(json.dumps(self._state)) < MOST_STATE_BYTES
        self._check_rest()

    def _reader(self, **arguments: Any) -> CacheIterableDataset:
        return reader(self._first, **self._how, **arguments)

    @contextmanager
    def _may_be_refused(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            assert "rows were erased since" in str(error), error
            assert self._lost, "the state knows what it needs"
            raise Refused from None

    def _read(
        self, ranks: list[CacheIterableDataset], alone: CacheIterableDataset, steps: int
    ) -> None:
        """Reads some steps, and compares them with those of one rank."""
        rng, log = self._rng, self._log[self._epoch]
        if steps and rng.random() < 0.2:  # a few are erased while the job reads
            self._erase(rng.randint(1, 3))
            self._blurred.add(self._epoch)
            self.did["erased while it read"] += 1
            self._lost |= bool(self._views & READS_VALUES)
        workers = rng.randint(1, 2) if len(ranks) == 1 and rng.random() < 0.1 else 0
        self.did["passes with workers"] += bool(workers)
        self._passes = [
            iter(each.loader(num_workers=workers) if workers else each) for each in ranks
        ]
        by_rank = [rows_of(each, steps) for each in self._passes]
        by_step = [[row for rows in step for row in rows] for step in zip(*by_rank, strict=True)]
        together = [row for step in by_step for row in step]
        expected = rows_of(iter(alone))[0] if together else []
        if len(ranks) > 1 or self._epoch not in self._blurred:  # else it amends by itself
            last = by_step[-1] if by_step else []
            whole = together[: len(together) - len(last)]
            rest = expected[len(whole) :]
            if len(rest) < len(ranks):  # some have a row that another has, too
                assert whole == expected[: len(whole)] and {*last} == {*rest}, (together, expected)
                together = expected
            assert together == expected[: len(together)], (together, expected)
        log += together

    def _erase(self, count: int) -> None:
        self._cache.erase(self._rng.sample(range(len(self._cache.labels)), count))

    def _amend(self, ranks: list[CacheIterableDataset]) -> None:
        rng, labels = self._rng, self._cache.labels
        for act in rng.sample(["append", "erase", "view"], rng.randint(1, 3)):
            self.did[act] += 1
            if act == "append":
                self._cache.append(rng, rng.randint(1, 40))
            elif act == "erase":
                self._erase(rng.randint(1, max(1, len(labels) // 10)))
                self._lost |= bool(self._views & {"weights", "drawn"})
            else:
                self._view = rng.choice(self._choice)
        with self._may_be_refused():
            for each in ranks:
                each.amend(view=VIEWS[self._view])
        self._views.add(self._view)
        self.did["amended"] += 1
        self._num_rows = len(self._cache.labels)

    def _check_rest(self) -> None:
        """What a job gives from the state on: each row as often as due, less what was given."""
        cache, epoch, seed = self._cache, self._epoch, self._how["seed"]
        labels = cache.labels[: self._num_rows].tolist()
        wanted = due(self._view, labels, cache.gone, seed, epoch)
        if wanted is None:
            begun = reader(self._view, **self._how)
            begun.set_epoch(epoch)
            wanted = Counter(row for rows in rows_of(iter(begun)) for row in rows)
        job = self._reader()
        try:
            job.load_state_dict(self._state)
        except ConfigError:
            return  # which the next part judges
        rest = Counter(row for rows in rows_of(iter(job)) for row in rows)
        wanted -= Counter(self._log[epoch])
        assert rest == wanted, (rest, wanted)

    def _check_seen(self) -> None:
        """What is said of the state is what the log has."""
        state, access, cache = read_state(self._state), access_to(ENDPOINT), self._cache
        wanted = [Wanted(access, "rows", ALL_ROWS)]
        wanted += [Wanted(access, "rows", None, number) for number in cache.acts]
        try:
            told = told_of_epochs(state, wanted)
        except (ConfigError, NotShownError) as error:
            assert self._views & READS_VALUES, error  # values of rows that went are gone
            self.did["seen refused"] += 1
            return
        for epoch, found in told.items():
            log = self._log[epoch]
            if epoch in self._blurred:  # a position counts as given, if its row went meanwhile
                more = Counter(row for _, row in found)
                more.subtract(log)
                assert min(more.values(), default=0) >= 0, (epoch, found, log)
                assert {row for row, count in more.items() if count} <= cache.gone, (found, log)
            else:
                assert found == [*enumerate(log)], (epoch, found, log)
        self.did["states seen"] += 1
        self.did["rows seen"] += sum(map(len, self._log.values()))


def told_of_epochs(state: OrderState, wanted: Sequence[Wanted]) -> dict[int, list[tuple[int, int]]]:
    """Epoch -> position and row of each time that `seen_by_state` has, by position."""
    told: dict[int, list[tuple[int, int]]] = {}
    for each in wanted:
        for found in seen_by_state(access_to(ENDPOINT), state, each, batch_size=1, world_size=1):
            assert found.steps is not None
            places = zip(found.steps.tolist(), found.rows.tolist(), strict=True)
            told.setdefault(found.epoch, []).extend(places)
    return {epoch: sorted(found) for epoch, found in told.items()}


def mixture(seed: int) -> Counter[str]:
    """Reads a mixture, and compares what is said of its states with a log.

    Raises:
        AssertionError: it is something else.
    """
    rng, did = random.Random(seed), Counter[str]()
    views = [rng.choice([each for each in VIEWS if each != "list"]) for _ in range(2)]
    with MadeUp(rng).running():
        world, batch = rng.randint(1, 7), rng.randint(1, 6)
        stops: tuple[Any, ...] = ("first_exhausted", "all_exhausted", 7)
        stop = rng.choice(stops)
        ranks = [
            CacheMixture(
                {
                    name: (
                        reader(
                            view, seed, True, name=name, job=f"mixture-{seed}",
                            rank=rank, world_size=world, batch_size=batch,
                        ),
                        1 + seed % 3,
                    )
                    for name, view in zip(("rows", "more"), views, strict=True)
                },
                stop=stop, source_column="source", seed=seed,
            )
            for rank in range(world)
        ]  # fmt: skip
        log: dict[int, list[tuple[int, int]]] = {}
        for epoch in range(rng.randint(1, 4)):
            for each in ranks:
                each.set_epoch(epoch)
            steps = rng.randint(0, max(0, ranks[0].steps_left - 1))
            by_rank = [
                [(b["source"], b["row"].tolist()) for b, _ in zip(r, range(steps), strict=False)]
                for r in ranks
            ]
            given = [
                pair
                for step in zip(*by_rank, strict=True)
                for sources, rows in step
                for pair in zip(sources, rows, strict=True)
            ]
            log[epoch] = [(at, row) for at, (source, row) in enumerate(given) if source == "rows"]
            state = {k: v for k, v in ranks[0].state_dict(steps=steps).items() if k != "mixture"}
            wanted = Wanted(access_to(ENDPOINT), "rows", ALL_ROWS)
            told = told_of_epochs(read_state(state), [wanted])
            assert told[epoch] == log[epoch], (told[epoch], log[epoch])
            did["states of mixtures seen"] += 1
            did["rows seen"] += len(log[epoch])
    return did


def run(seed: int) -> Counter[str]:
    """One case; what it had. Raises AssertionError as `Case.run` and `mixture`."""
    case = Case(seed)
    case.run()
    return case.did + mixture(seed)


def main() -> None:
    """Runs the cases, and says what they had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after them")
    parser.add_argument("--json", type=Path, help="file to which the result is added")
    arguments = parser.parse_args()
    logging.getLogger("cache_client").setLevel(logging.ERROR)  # it says what is asked for here
    begin, total = time.monotonic(), Counter[str]()
    cases = 0
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        if time.monotonic() - begin > arguments.seconds:
            break
        try:
            total += run(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
        cases += 1
    result = {
        "seed": arguments.seed,
        "cases": cases,
        "deviations": 0,
        "did": dict(sorted(total.items())),
        "wall_s": round(time.monotonic() - begin),
    }
    print(json.dumps(result, indent=2))
    if arguments.json is not None:
        earlier = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        arguments.json.write_text(json.dumps([*earlier, result], indent=2) + "\n")


if __name__ == "__main__":
    main()
