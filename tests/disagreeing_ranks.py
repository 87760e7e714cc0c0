"""One of two processes that should be the ranks of some jobs, and differ by mistake.

    python disagreeing_ranks.py ENDPOINT DATASET SIDE

Side 0 reads as it should, side 1 makes a mistake in each job. Reads each job in a thread, until it
is told that its ranks disagree, or the process ends.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import Any

from cache_client import CacheIterableDataset, RanksDisagreeError, View

ENDPOINT, DATASET, SIDE = sys.argv[1], sys.argv[2], int(sys.argv[3])
STEP_S = 0.02
RANK = {"rank": SIDE, "world_size": 2}
WHERE = View(where="row >= 0")
# What side 0 and side 1 give.
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no-rank": ({}, {}),
    "same-rank": ({"rank": 0, "world_size": 2}, {"rank": 0, "world_size": 2}),
    "world-size": (RANK, {"rank": SIDE, "world_size": 3}),
    "batch-size": (RANK, {**RANK, "batch_size": 32}),
    "where": ({**RANK, "view": WHERE}, {**RANK, "view": View(where="row >= 1")}),
    "seed": (RANK, {**RANK, "seed": 7}),
    "restart": (RANK, RANK),
}


def read(job: str) -> None:
    given = {"batch_size": 16, "shuffle": True, **JOBS[job][SIDE]}
    dataset = CacheIterableDataset(DATASET, cache=ENDPOINT, job=job, **given)
    with suppress(RanksDisagreeError):
        for epoch in range(10**9):
            dataset.set_epoch(epoch)
            for _ in dataset:
                time.sleep(STEP_S)  # a training loop computes


if __name__ == "__main__":
    print("reads", flush=True)
    threads = [threading.Thread(target=read, args=(job,)) for job in JOBS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
