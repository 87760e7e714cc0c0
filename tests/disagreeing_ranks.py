"""One of two processes that should be the ranks of some jobs, and differ by mistake.

    python disagreeing_ranks.py ENDPOINT DATASET SIDE

Side 0 reads as it should, side 1 makes a mistake in each job. Reads each job in a thread, until it
raises an error or the program gets a line. Prints a JSON object: job -> when its loop began, when
it ended, and the error.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from cache_client import CacheIterableDataset, RanksDisagreeError, View

ENDPOINT, DATASET, SIDE = sys.argv[1], sys.argv[2], int(sys.argv[3])
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

done = threading.Event()
results: dict[str, dict[str, Any]] = {}


def read(job: str) -> None:
    given = {"batch_size": 16, "shuffle": True, **JOBS[job][SIDE]}
    dataset = CacheIterableDataset(DATASET, cache=ENDPOINT, job=job, **given)
    results[job] = {"begun": time.time(), "error": ""}
    try:
        for epoch in range(10**9):
            dataset.set_epoch(epoch)
            for _ in dataset:
                if done.wait(0.02):
                    return
    except RanksDisagreeError as error:
        results[job]["error"] = str(error)
    finally:
        results[job]["ended"] = time.time()


if __name__ == "__main__":
    threads = [threading.Thread(target=read, args=(job,)) for job in JOBS]
    for thread in threads:
        thread.start()
    print("reads", flush=True)
    sys.stdin.readline()
    done.set()
    for thread in threads:
        thread.join()
    print(json.dumps(results))
