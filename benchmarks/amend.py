"""What does an epoch cost that was amended, beside a plain one?

    python -m benchmarks.amend [--rows N] [--quick]

A job reads shuffled rows of 32 float32 columns and a label, in batches of 1024, from files of this
machine. One epoch was amended twenty times in its first steps, and lost 1 % of its rows so: each
time another 0.05 % was not due any more. Measured is the rest of the epoch, beside the rest of an
epoch that was not amended; in turn. And, in numbers only: a table of 10^8 rows grows twenty times,
and loses 0.05 % of its rows each time; and the steps of 10,000 rows in ten of its epochs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.common import (
    Contender,
    measure,
    memory_directory,
    print_ratios,
    print_table,
    write_timings,
)
from benchmarks.contenders import BATCH_SIZE
from benchmarks.tables import FEATURES, ROW_BYTES, floats
from benchmarks.views import cpu_ratio, ratio_in_turn
from cache_client import CacheClient, CacheIterableDataset, DatasetSpec, View
from cache_client.order.erased import Rest
from cache_client.order.order import StepPlan
from cache_client.order.states import OrderState
from cache_client.training.replays import steps_of
from cache_client.views.amended import Part, amended_view
from cache_client.views.rows_view import RestView
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import PlainView, Shuffle, SlotView
from cache_server import LocalCluster

PLAIN, AMENDED = "plain", "amended 20 times, 1 % left out"
AMENDMENTS = 20
VIRTUAL_ROWS = 10**8
RATIO = f"{AMENDED} / {PLAIN}"
TARGETS = {RATIO: 0.8}


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000, help="4 million are 544 MB")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a look in seconds")
    arguments = parser.parse_args()
    rows: int = 400_000 if arguments.quick else arguments.rows
    with (
        memory_directory("cache-bench-") as directory,
        LocalCluster(1, directory / "cache") as cluster,
    ):
        CacheClient(cluster.endpoint).load(DatasetSpec("table", floats(rows)))
        jobs = {PLAIN: begun(cluster.endpoint), AMENDED: begun(cluster.endpoint, AMENDMENTS)}

        def begin_again() -> None:
            for dataset, state in jobs.values():
                dataset.load_state_dict(state)

        begin_again()
        timings = measure(
            [
                Contender(name, rest_of(dataset), left, left * ROW_BYTES, "exact global")
                for name, (dataset, _) in jobs.items()
                for left in [dataset.num_samples - AMENDMENTS * BATCH_SIZE]
            ],
            repeats=2 if arguments.quick else arguments.repeats,
            settle=begin_again,
        )
    print_table(timings)
    virtual_s = statistics.median(first_batch_of_virtual_rows() for _ in range(5))
    print(f"{VIRTUAL_ROWS:,} rows grow {AMENDMENTS} times: first batch after {virtual_s:.3f} s")
    steps_s = statistics.median(steps_of_rows() for _ in range(5))
    print(f"the steps of 10,000 rows in ten epochs: {steps_s:.3f} s")
    ratios = {
        RATIO: ratio_in_turn(timings[AMENDED], timings[PLAIN]),
        f"{RATIO}, processor time": cpu_ratio(timings[AMENDED], timings[PLAIN]),
    }
    print_ratios(ratios, TARGETS)
    write_timings(
        "amend",
        timings,
        ratios,
        TARGETS,
        quick=arguments.quick,
        rows=rows,
        row_bytes=ROW_BYTES,
        batch_size=BATCH_SIZE,
        virtual_rows=VIRTUAL_ROWS,
        virtual_first_batch_s=round(virtual_s, 4),
        steps_of_10_000_rows_s=round(steps_s, 4),
    )


def begun(endpoint: str, amendments: int = 0) -> tuple[CacheIterableDataset, dict[str, object]]:
    """A job after its first steps, and its state there."""
    dataset = CacheIterableDataset(
        "table",
        cache=endpoint,
        batch_size=BATCH_SIZE,
        shuffle=True,
        stack={"features": FEATURES},
        columns=[*FEATURES, "label"],
    )
    for step, _ in enumerate(dataset, 1):
        if step <= amendments:
            kept = f"CAST(abs(f0) * 1000000 AS BIGINT) % 2000 >= {step}"
            dataset.amend(view=View(where=kept), version="same")
        if step == AMENDMENTS:
            break
    return dataset, dataset.state_dict()


def rest_of(dataset: CacheIterableDataset) -> Callable[[], int]:
    """Reads the rest of the epoch; rows that came."""
    return lambda: sum(len(batch["label"]) for batch in dataset)


def first_batch_of_virtual_rows() -> float:
    """Seconds until the row ids of a batch are known, after the last of all amendments."""
    erased = np.random.default_rng(1).permutation(VIRTUAL_ROWS // 100)
    parts = []
    for step in range(AMENDMENTS + 1):
        rows = VIRTUAL_ROWS + step * 5_000
        gone = np.sort(erased[: len(erased) * step // AMENDMENTS]) * 100
        rest = Rest(range(rows), SharedArray(gone), SharedArray)
        view: SlotView = RestView(rest, f"erased={step}") if step else PlainView(rows)
        parts.append(Part(step * BATCH_SIZE, rows, view, step))
    shuffle = Shuffle(True)
    before = amended_view(0, shuffle, parts[:-1])
    begin = time.perf_counter()
    amended = amended_view(0, shuffle, parts, before)
    amended.samples(np.arange(BATCH_SIZE, dtype=np.int64) + parts[-1].at, 0)
    return time.perf_counter() - begin


def steps_of_rows() -> float:
    """Seconds to find the steps of 10,000 rows in ten epochs of a plain read."""
    shuffle, view = Shuffle(True), PlainView(VIRTUAL_ROWS)
    state = OrderState(
        dataset="table", fingerprint="1", seed=0, epoch=9, shuffle=True, shuffle_block_size=None,
        rows_consumed=VIRTUAL_ROWS // 2,
    )  # fmt: skip
    rows = np.random.default_rng(2).integers(0, VIRTUAL_ROWS, 10_000)
    begin = time.perf_counter()
    steps_of(
        state,
        rows,
        lambda epoch: (view, shuffle.order(view, epoch)),
        lambda num_rows: StepPlan(num_rows, 8, BATCH_SIZE),
    )
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
