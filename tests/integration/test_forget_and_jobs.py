"""Jobs under a real `forget`: every other row once, states resume, replays give the old order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cache_client import CacheClient, CacheIterableDataset, Connection
from cache_server import LocalCluster

ROWS, USERS, PERSON, BATCH = 1200, 40, 7, 16
GONE = set(range(PERSON, ROWS, USERS))


@pytest.fixture
def client() -> Iterator[CacheClient]:
    with LocalCluster(2) as running:
        rows = np.arange(ROWS)
        table = pa.table({"row": rows, "user": rows % USERS, "text": [f"t{i}" for i in rows]})
        client = CacheClient(running.endpoint)
        client.write("people", table, replicas=2, target_shard_bytes=65_536)
        yield client


def reader(client: CacheClient, local: bool = True, **given: Any) -> CacheIterableDataset:
    cache = Connection(client.endpoint, local=local)
    arguments = {"batch_size": BATCH, "shuffle": True, "seed": 3, "cache": cache, **given}
    return CacheIterableDataset("people", **arguments)


def checked(batch: Any) -> list[int]:
    """The rows of a batch, whose values are theirs and not the zeros of an erased row."""
    rows: list[int] = batch["row"].tolist()
    assert batch["user"].tolist() == [row % USERS for row in rows]
    assert batch["text"] == [f"t{row}" for row in rows]
    return rows


@pytest.mark.parametrize("local", [True, False], ids=["files", "flight"])
def test_readers_in_flight_get_every_other_row_once(client: CacheClient, local: bool) -> None:
    ranks = [reader(client, local, rank=rank, world_size=2) for rank in range(2)]
    passes = [iter(each) for each in ranks]
    given = [row for _ in range(4) for each in passes for row in checked(next(each))]
    states = [each.state_dict() for each in ranks]
    before = set(given)

    client.forget("people", f"user = {PERSON}", reason="request 12")

    for each in passes:
        for batch in each:
            given += checked(batch)
    counts = Counter(given)
    assert all(counts[row] == 1 for row in range(ROWS) if row not in GONE)
    assert all(counts[row] <= 1 for row in GONE)

    again = reader(client, local)
    again.load_state_dict(json.loads(json.dumps(states[0])))
    rest = [row for batch in again for row in checked(batch)]
    assert sorted(rest) == sorted(set(range(ROWS)) - GONE - before)


def test_a_replay_by_the_attestation_has_the_old_order(client: CacheClient) -> None:
    job = reader(client)
    clean, order = job.state_dict(), [checked(batch) for batch in job]
    act = client.forget("people", f"user = {PERSON}", reason="request 12")

    replay = reader(client, replay=clean, without=act.attestation)

    left = [[row for row in batch if row not in GONE] for batch in order]
    assert [checked(batch) for batch in replay] == [batch for batch in left if batch]
    assert sorted(row for batch in reader(client) for row in checked(batch)) == sorted(
        set(range(ROWS)) - GONE
    )
