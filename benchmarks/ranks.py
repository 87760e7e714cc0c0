"""How do rows per second grow with the ranks of a job, and with jobs that share a cache?

    python -m benchmarks.ranks [--quick]

Ranks: 1, 2, 4 and 8 processes, each its rank of one job, read one shuffled epoch together. Jobs: 1,
2 and 4 processes, each a job of one rank with a different seed, read an epoch each from the same
cache. Rows per second are all rows over the time from a common start, when every process has its
dataset, to the end of the last one. One node; every path is the default one, and again without
reading mapped files of this machine (``local=False``) where the dataset can do that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.common import Timing, memory_directory, print_table, write_timings
from benchmarks.processes import child_process
from benchmarks.tables import FEATURES, ROW_BYTES, floats
from cache_client import CacheClient, CacheIterableDataset, DatasetSpec
from cache_server import LocalCluster

BATCH_SIZE = 1024
RANKS = (1, 2, 4, 8)
JOBS = (1, 2, 4)
TARGET = 0.9


@dataclass(frozen=True)
class Case:
    """Processes that read at the same time.

    Args:
        jobs: each with another seed; reads all rows.
        ranks: of each job.
        options: for `CacheIterableDataset`.
    """

    jobs: int
    ranks: int
    options: dict[str, Any]

    @property
    def processes(self) -> int:
        """In all."""
        return self.jobs * self.ranks

    @property
    def name(self) -> str:
        """For people."""
        shown = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{counted(self.jobs, 'job')} of {counted(self.ranks, 'rank')}{shown}"


@dataclass(frozen=True)
class Task:
    """What one process does for a case: makes the dataset, waits for the others, reads."""

    endpoint: str
    rank: int
    world_size: int
    seed: int
    epoch: int
    options: dict[str, Any]
    processes: int

    def run(self, barrier: Barrier) -> tuple[int, float, float]:
        """Rows that were read, and when that began and ended, by a clock that all share."""
        dataset = CacheIterableDataset(
            "table",
            cache=self.endpoint,
            batch_size=BATCH_SIZE,
            stack={"features": FEATURES},
            shuffle=True,
            seed=self.seed,
            rank=self.rank,
            world_size=self.world_size,
            **self.options,
        )
        dataset.set_epoch(self.epoch)
        barrier.wait(60.0)
        start = time.monotonic()
        rows = sum(len(batch["features"]) for batch in dataset)
        return rows, start, time.monotonic()


class Runnable(Protocol):
    """What a process does: waits for the others at the barrier, then reads; as `Task.run`."""

    @property
    def processes(self) -> int:
        """That do it at the same time."""

    def run(self, barrier: Barrier) -> tuple[int, float, float]:
        """Rows that were read, and when that began and ended."""


class Readers:
    """Processes that live as long as the benchmark, so that their start is not measured."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        barriers = {n: context.Barrier(n) for n in range(1, count + 1)}
        self._processes = ExitStack()
        self._pipes = [
            self._processes.enter_context(child_process(_serve, barriers)) for _ in range(count)
        ]

    def run(self, tasks: Sequence[Runnable]) -> tuple[int, float]:
        """Rows of all tasks, and seconds from the common start to the last end."""
        pipes = self._pipes[: len(tasks)]
        for pipe, task in zip(pipes, tasks, strict=True):
            pipe.send(task)
        done = [pipe.recv() for pipe in pipes]
        start = min(each[1] for each in done)
        return sum(each[0] for each in done), max(each[2] for each in done) - start

    def close(self) -> None:
        """Ends the processes."""
        self._processes.close()


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000, help="2 million are 272 MB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a look in seconds")
    arguments = parser.parse_args()
    rows: int = 200_000 if arguments.quick else arguments.rows
    repeats: int = 3 if arguments.quick else arguments.repeats
    cases = all_cases(most_processes=2 if arguments.quick else max(RANKS))
    table = floats(rows)
    with memory_directory("cache-bench-") as directory:
        timings = measure(cases, table, directory, rows, repeats)
    print(f"\n{rows:,} rows of {ROW_BYTES} bytes an epoch\n")
    print_table(timings)
    ratios = over_one(cases, timings)
    targets = {name: TARGET for name in ratios if name.startswith("2 jobs")}
    print()
    for name, value in ratios.items():
        target = f"  (to reach: {targets[name]:g})" if name in targets else ""
        print(f"{name:56} {value:6.2f}{target}")
    write_timings(
        "ranks",
        timings,
        ratios,
        targets,
        quick=arguments.quick,
        rows=rows,
        row_bytes=ROW_BYTES,
        batch_size=BATCH_SIZE,
    )


def all_cases(most_processes: int) -> list[Case]:
    """One job of one rank serves both questions."""
    choices: list[dict[str, Any]] = [{}, {"local": False}]
    sizes = [(1, ranks) for ranks in RANKS] + [(jobs, 1) for jobs in JOBS if jobs > 1]
    return [
        Case(jobs, ranks, options)
        for options in choices
        for jobs, ranks in sizes
        if jobs * ranks <= most_processes
    ]


def measure(
    cases: list[Case], table: Path, directory: Path, num_rows: int, repeats: int
) -> dict[str, Timing]:
    """The cases in turn, each repeat in another epoch; the first round is not counted."""
    timings = {
        case.name: Timing(case.name, num_rows * case.jobs, num_rows * case.jobs * ROW_BYTES)
        for case in cases
    }
    with LocalCluster(1, directory) as cluster:
        CacheClient(cluster.endpoint).load(DatasetSpec("table", table))
        with reading_processes(max(case.processes for case in cases)) as readers:
            for turn in range(1 + repeats):
                for case in cases:
                    tasks = [
                        Task(
                            cluster.endpoint, rank, case.ranks, seed, turn, case.options,
                            case.processes,
                        )
                        for seed in range(case.jobs)
                        for rank in range(case.ranks)
                    ]  # fmt: skip
                    handled, seconds = readers.run(tasks)
                    expected = timings[case.name].num_rows
                    assert handled == expected, f"{case.name}: {handled} rows, not {expected}"
                    if turn:
                        timings[case.name].seconds.append(seconds)
    return timings


@contextmanager
def reading_processes(count: int) -> Iterator[Readers]:
    """`Readers`, closed in the end."""
    readers = Readers(count)
    try:
        yield readers
    finally:
        readers.close()


def _serve(pipe: Connection, barriers: dict[int, Barrier]) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            task: Runnable = pipe.recv()
        except EOFError:
            return
        pipe.send(task.run(barriers[task.processes]))


def counted(number: int, noun: str) -> str:
    """``1 job``, ``2 jobs``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def over_one(cases: list[Case], timings: dict[str, Timing]) -> dict[str, float]:
    """Rows per second of each case over those of one job of one rank with the same options."""
    ratios = {}
    for case in cases:
        if case.processes > 1:
            one = Case(1, 1, case.options)
            ratio = timings[case.name].rows_per_s / timings[one.name].rows_per_s
            ratios[f"{case.name} over {counted(1, 'rank')}"] = ratio
    return ratios


if __name__ == "__main__":
    main()
