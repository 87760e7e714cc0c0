"""A client of Kubeflow Trainer's data cache (KEP-2655), as published, against these nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from cache_client import CacheClient, DatasetSpec
from cache_protocol.errors import RequestError, from_proto
from cache_protocol.v1 import cache_pb2 as pb
from cache_server import LocalCluster
from tests.conftest import numbered_table, write_numbered
from tests.waiting import wait_until

NUM_ROWS = 1003


@pytest.fixture(scope="module")
def alone() -> Iterator[LocalCluster]:
    """A cache in which these tests alone load datasets: the ancestor knows no names."""
    with LocalCluster(nodes=2, insecure=True) as cluster:
        yield cluster


@pytest.fixture
def only_dataset(alone: LocalCluster, tmp_path: Path) -> Iterator[pa.Schema]:
    """One dataset of several shards, each on both nodes."""
    client = CacheClient(alone.endpoint)
    source = write_numbered(tmp_path / "source", NUM_ROWS, files=5)
    info = client.load(DatasetSpec("only", source, target_shard_bytes=1, replicas=2))
    wait_until(
        lambda: all(len(nodes) == 2 for nodes in client.describe("only").placement.values()),
        20,
        "two replicas of each shard",
    )
    yield info.schema
    client.drop("only")


def read_as_the_ancestor_does(endpoint: str, index: int, total: int) -> list[pa.RecordBatch]:
    """Its whole protocol: this many lines, no name, no message of ours."""
    client = flight.FlightClient(endpoint)
    descriptor = flight.FlightDescriptor.for_path(str(index), str(total))
    info = client.get_flight_info(descriptor)
    batches = []
    for part in info.endpoints:
        for location in part.locations:
            node = flight.FlightClient(location)
            batches += [chunk.data for chunk in node.do_get(part.ticket)]
            node.close()
    client.close()
    return batches


@pytest.mark.parametrize("total", [1, 2, 3, 7])
def test_the_parts_of_all_ranks_together_are_the_source_rows_in_order(
    alone: LocalCluster, only_dataset: pa.Schema, total: int
) -> None:
    parts = [read_as_the_ancestor_does(alone.endpoint, index, total) for index in range(total)]

    table = pa.Table.from_batches([batch for part in parts for batch in part])
    assert table.equals(numbered_table(NUM_ROWS).cast(only_dataset))
    sizes = [sum(batch.num_rows for batch in part) for part in parts]
    assert sizes == [NUM_ROWS * (i + 1) // total - NUM_ROWS * i // total for i in range(total)]


def test_any_node_answers_not_only_the_coordinator(
    alone: LocalCluster, only_dataset: pa.Schema
) -> None:
    batches = read_as_the_ancestor_does(alone.nodes[1].endpoint, 1, 2)

    rows = pa.Table.from_batches(batches).column("row").to_pylist()
    assert rows == [*range(NUM_ROWS // 2, NUM_ROWS)]


def test_a_cache_without_a_dataset_says_that_there_is_none(alone: LocalCluster) -> None:
    with (
        flight.connect(alone.endpoint) as client,
        pytest.raises(flight.FlightError) as caught,
    ):
        client.get_flight_info(flight.FlightDescriptor.for_path("0", "1"))

    error = from_proto(pb.Error.FromString(bytes(caught.value.extra_info)))
    assert type(error) is RequestError
    assert "got datasets: none" in str(error)
