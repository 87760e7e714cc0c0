"""What a job does with a cache, by the public API that the last release has too.

A program: it reads one JSON object a line, calls the function that it names, and prints the result.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import pyarrow as pa

import cache_client
from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec


def where_it_is(endpoint: str) -> str:
    """The file of the package, which tells the release."""
    return cache_client.__file__


def load(endpoint: str, name: str, source: str) -> int:
    """Loads a folder of Parquet files in small shards."""
    spec = DatasetSpec(name, source, target_shard_bytes=1)
    return CacheClient(endpoint).load(spec, timeout_s=60.0).num_rows


def write(endpoint: str, name: str, start: int, stop: int, append: bool) -> int:
    """Writes numbered rows, as a new dataset or after those of another."""
    rows = pa.table({"row": range(start, stop)})
    client = CacheClient(endpoint)
    return client.write(name, rows, append=append, timeout_s=60.0).num_rows


def drop(endpoint: str, name: str) -> list[str]:
    """Drops a dataset; returns the names of the others."""
    client = CacheClient(endpoint)
    client.drop(name)
    return [info.name for info in client.datasets()]


def read(
    endpoint: str, name: str, local: bool, state: dict[str, Any] | None, steps: int | None
) -> tuple[list[int], dict[str, Any]]:
    """Rows of the steps after a state, in shuffled order; None: to the end. And the next state."""
    cache = Connection(endpoint, local=local, deadline_s=30.0)
    dataset = CacheIterableDataset(name, cache=cache, batch_size=8, shuffle=True, seed=5)
    if state is not None:
        dataset.load_state_dict(state)
    rows: list[int] = []
    for step, batch in enumerate(dataset, 1):
        rows += batch["row"].tolist()
        if step == steps:
            break
    return rows, dataset.state_dict(steps=steps)


def main() -> None:
    """Runs the steps of standard input."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": globals()[request.pop("step")](**request)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


main()
