from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    ConfigError,
    DatasetNotFoundError,
    DatasetSpec,
    NodeUnavailableError,
    RequestError,
    StaleVersionError,
)
from cache_server import LocalCluster
from tests.conftest import write_numbered


@pytest.fixture
def table(client: CacheClient, dataset_name: str, tmp_path: Path) -> str:
    client.load(DatasetSpec(dataset_name, write_numbered(tmp_path / "t", 100, files=2)))
    return dataset_name


def test_every_bad_argument_is_quoted_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        CacheIterableDataset(
            "", endpoint="grpc://127.0.0.1:1", batch_size=0, rank=3, world_size=3,
            shuffle_block_size=4, prefetch_batches=0, message_bytes=0, deadline_s=-1,
        )  # fmt: skip
    quoted = ("''", "batch_size", "message_bytes must be at least 1, got 0", "rank=3 world_size=3")
    for words in (*quoted, "got 4", "got -1"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"columns": ["nope"]}, RequestError, "'nope'"),
        ({"stack": {"x": ["text"]}}, ConfigError, "'text'"),
        ({"batch_format": "pandas"}, ConfigError, "'pandas'"),
    ],
)
def test_what_the_dataset_does_not_have_is_named(
    cluster: LocalCluster, table: str, arguments: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        CacheIterableDataset(table, endpoint=cluster.endpoint, batch_size=1, **arguments)


def test_an_unknown_dataset_is_named(cluster: LocalCluster) -> None:
    with pytest.raises(DatasetNotFoundError, match="'not-there'"):
        CacheIterableDataset("not-there", endpoint=cluster.endpoint, batch_size=1)


def test_a_cache_that_is_not_there_is_an_error_at_the_deadline() -> None:
    start = time.monotonic()
    with pytest.raises(NodeUnavailableError, match=r"127\.0\.0\.1:9"):
        CacheIterableDataset("t", endpoint="grpc://127.0.0.1:9", batch_size=1, deadline_s=1.0)
    assert time.monotonic() - start < 15


def test_the_endpoint_comes_from_the_environment(
    cluster: LocalCluster, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_ENDPOINT", cluster.endpoint)
    assert len(CacheIterableDataset(table, batch_size=7)) == 15


def test_batches_may_be_changed_in_place_without_touching_others(
    cluster: LocalCluster, table: str
) -> None:
    for shuffle in (False, True):
        dataset = CacheIterableDataset(
            table, endpoint=cluster.endpoint, batch_size=10, shuffle=shuffle
        )
        sums = []
        for batch in dataset:
            sums.append(int(batch["row"].sum()))
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        assert sum(sums) == sum(range(100))
        assert sum(int(batch["row"].sum()) for batch in dataset) == sum(range(100))


def test_a_state_of_something_else_is_refused_naming_both(
    cluster: LocalCluster, client: CacheClient, table: str
) -> None:
    dataset = CacheIterableDataset(table, endpoint=cluster.endpoint, batch_size=10, shuffle=True)
    state = dataset.state_dict()
    with pytest.raises(StaleVersionError) as caught:
        dataset.load_state_dict({**state, "fingerprint": "other"})
    assert "other" in str(caught.value) and dataset.fingerprint in str(caught.value)
    with pytest.raises(ConfigError, match=r"seed=5.*seed=0"):
        dataset.load_state_dict({**state, "seed": 5})
    with pytest.raises(ConfigError, match="rows_consumed"):
        dataset.load_state_dict({**state, "rows_consumed": 101})
    with pytest.raises(ConfigError, match="bad state"):
        dataset.load_state_dict({})


def test_a_transform_and_the_last_states_of_an_epoch(cluster: LocalCluster, table: str) -> None:
    dataset = CacheIterableDataset(
        table, endpoint=cluster.endpoint, batch_size=30, transform=lambda batch: batch["row"]
    )
    states = [dataset.state_dict() for rows in dataset if rows.dtype == torch.int64]
    assert [(s["epoch"], s["rows_consumed"]) for s in states] == [(0, 30), (0, 60), (0, 90), (1, 0)]
