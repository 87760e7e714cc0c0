"""Tables of long values: a window has the bytes it should, whatever its rows are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_client import (
    CacheClient,
    CacheDataset,
    CacheIterableDataset,
    Connection,
    DatasetSpec,
    Reading,
)
from cache_client.flight import streams
from cache_server import LocalCluster
from tests.waiting import wait_until

ROWS, LONG_BYTES, IMAGE_BYTES = 300, 100_000, 2000
MEBI = 1024 * 1024


@pytest.fixture(scope="module")
def table(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Rows of 100 KB, 15 shards; each document says its row."""
    source = tmp_path_factory.mktemp("long") / "t.parquet"
    images = [[row % 251] * IMAGE_BYTES for row in range(ROWS)]
    rows = pa.table(
        {
            "row": np.arange(ROWS),
            "image": pa.array(images, pa.list_(pa.uint8(), IMAGE_BYTES)),
            "doc": [row.to_bytes(4, "little") * (LONG_BYTES // 4) for row in range(ROWS)],
        }
    )
    pq.write_table(rows, source, row_group_size=20)
    CacheClient(cluster.endpoint).load(DatasetSpec("long-rows", source, target_shard_bytes=1))
    yield "long-rows"
    CacheClient(cluster.endpoint).drop("long-rows")


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each message of a node had."""
    sizes: list[int] = []

    def note(kind: type[streams.GatherStream | streams.RowStream]) -> None:
        receive = kind.receive

        def noting(self: Any, num_rows: int) -> Any:
            batches = receive(self, num_rows)
            sizes.extend(batch.num_rows for batch in batches)
            return batches

        monkeypatch.setattr(kind, "receive", noting)

    note(streams.GatherStream)
    note(streams.RowStream)
    return sizes


def docs_say_their_row(batch: dict[str, Any]) -> bool:
    said = [int.from_bytes(doc[:4], "little") for doc in batch["doc"]]
    return said == batch["row"].tolist() and {len(doc) for doc in batch["doc"]} == {LONG_BYTES}


@pytest.mark.parametrize(
    ("local", "shuffle", "window_bytes", "message_bytes"),
    [
        *((True, False, 16 * MEBI, 0), (True, True, 16 * MEBI, 0)),
        *((False, True, 16 * MEBI, 4 * MEBI), (False, False, 4 * MEBI, 4 * MEBI)),
    ],
)
def test_the_first_window_is_not_the_whole_table(
    cluster: LocalCluster,
    table: str,
    fetches: list[int],
    messages: list[int],
    local: bool,
    shuffle: bool,
    window_bytes: int,
    message_bytes: int,
) -> None:
    dataset = CacheIterableDataset(
        table,
        cache=Connection(cluster.endpoint, local=local),
        batch_size=4,
        reading=Reading(prefetch_batches=1),
        shuffle=shuffle,
    )
    rows: list[int] = []
    for batch in dataset:
        assert docs_say_their_row(batch)
        rows += batch["row"].tolist()

    assert sorted(rows) == list(range(ROWS))
    assert 0.8 * window_bytes < fetches[0] * LONG_BYTES <= window_bytes
    assert local != bool(messages)
    assert all(size * LONG_BYTES <= message_bytes for size in messages)


def test_a_batch_may_be_longer_than_a_message(
    cluster: LocalCluster, table: str, messages: list[int]
) -> None:
    dataset = CacheIterableDataset(
        table, cache=Connection(cluster.endpoint, local=False), batch_size=128
    )
    batches = list(dataset)
    assert [len(batch["doc"]) for batch in batches] == [128, 128, 44]
    assert all(docs_say_their_row(batch) for batch in batches)
    assert all((batch["image"][:, 5] == batch["row"] % 251).all() for batch in batches)
    assert max(messages) * LONG_BYTES <= 4 * MEBI


@pytest.mark.parametrize(("given", "ahead"), [(None, 8), (12, 12)])
def test_large_batches_are_fetched_ahead_by_their_bytes_unless_a_number_is_given(
    cluster: LocalCluster,
    table: str,
    fetches: list[int],
    monkeypatch: pytest.MonkeyPatch,
    given: int | None,
    ahead: int,
) -> None:
    monkeypatch.setattr("cache_client.reading.window_sizes._PREFETCHED_BYTES", 8 * MEBI)
    monkeypatch.setattr("cache_client.reading.window_sizes._WINDOW_BYTES", MEBI)  # a batch
    dataset = CacheIterableDataset(
        table,
        cache=Connection(cluster.endpoint, local=False),
        batch_size=10,
        reading=Reading(prefetch_batches=given, message_bytes=MEBI // 4),
    )
    batches = iter(dataset)
    next(batches)
    # What is taken makes room for one more.
    wait_until(lambda: len(fetches) > ahead, 30.0, "the batches that are fetched ahead")
    batches.close()
    assert fetches == [10] * (ahead + 1)


def test_the_fixed_columns_that_are_left_out_do_not_count(
    cluster: LocalCluster, table: str, fetches: list[int]
) -> None:
    def first_window(*columns: str) -> int:
        fetches.clear()
        dataset = CacheIterableDataset(
            table, cache=Connection(cluster.endpoint, local=False), batch_size=1, columns=columns
        )
        for _ in dataset:
            pass
        return fetches[0]

    fixed_bytes = 8 + IMAGE_BYTES
    assert first_window("doc") == 4 * MEBI // LONG_BYTES
    assert first_window("doc", "row", "image") == 4 * MEBI // (LONG_BYTES + fixed_bytes)
    assert first_window("row", "image") == ROWS  # which are 600 KB


def test_rows_by_number_are_fetched_in_several_goes(
    cluster: LocalCluster, table: str, fetches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_client.training.random_access.FETCH_BYTES", MEBI)
    numbers = [299, 0, *range(100, 130)]
    with CacheDataset(table, cache=cluster.endpoint) as dataset:
        batch = dataset.fetch(numbers)
    assert batch["row"].tolist() == numbers and docs_say_their_row(batch)
    assert max(fetches) == MEBI // (LONG_BYTES + IMAGE_BYTES + 100)
