"""How large a row is taken to be, and so how many rows are asked for at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from cache_client.flight import connections, routing
from cache_client.reading import window_sizes
from cache_protocol.v1 import cache_pb2 as pb

LONG_BYTES = 100_000
MEBI = 1024 * 1024


def shard_map(schema: dict[str, pa.DataType], num_rows: int, num_bytes: int) -> routing.ShardMap:
    return routing.ShardMap(
        "table", "f", pa.schema(list(schema.items())), num_rows, np.zeros(1, np.int64),
        (routing.NodeRef("node-0", "grpc://0"),), ((0,),), num_bytes=num_bytes,
    )  # fmt: skip


def long_table(num_rows: int = 1000) -> routing.ShardMap:
    row = 8 + 4 + LONG_BYTES
    return shard_map({"row": pa.int64(), "doc": pa.binary()}, num_rows, row * num_rows)


def test_a_row_with_strings_is_as_large_as_the_mean_of_the_stored_ones() -> None:
    assert window_sizes.row_bytes(long_table()) == 8 + 4 + LONG_BYTES
    assert window_sizes.row_bytes(shard_map({"text": pa.string()}, 3, 10)) == 4  # rounded up


def test_the_bytes_of_a_row_without_strings_are_those_of_its_columns() -> None:
    fixed = {"row": pa.int64(), "image": pa.list_(pa.uint8(), 784)}
    assert window_sizes.row_bytes(shard_map(fixed, 10, 1_000_000)) == 792


def test_a_row_is_never_smaller_than_its_fixed_columns_or_a_byte() -> None:
    mixed = {"row": pa.int64(), "text": pa.string()}
    assert window_sizes.row_bytes(shard_map(mixed, 10, 0)) == 8
    assert window_sizes.row_bytes(shard_map({"text": pa.string()}, 0, 0)) == 1


@pytest.mark.parametrize(("nodes", "window_bytes"), [(0, 16 * MEBI), (2, 8 * MEBI)])
def test_a_window_of_long_strings_has_the_bytes_it_should(nodes: int, window_bytes: int) -> None:
    sizes = window_sizes.WindowSizes(long_table(), batch_size=4, message_bytes=2 * MEBI)
    steps = sizes.steps_per_window(nodes)
    assert 0.9 * window_bytes < steps * 4 * LONG_BYTES <= window_bytes
    assert 0.7 * 2 * MEBI < sizes.rows_per_message() * LONG_BYTES <= 2 * MEBI
    assert sizes.rows_per_message() % 4 == 0  # so that batches are views


@pytest.mark.parametrize(("step_mebi", "steps"), [(1, 8), (3, 4), (5, 3), (17, 1)])
def test_a_window_of_nodes_has_several_messages_also_where_a_step_is_larger_than_one_should_be(
    step_mebi: int, steps: int
) -> None:
    shards = shard_map({"embedding": pa.list_(pa.float32(), 256 * step_mebi)}, 1024, 10)
    sizes = window_sizes.WindowSizes(shards, batch_size=1024, message_bytes=2 * MEBI)
    assert sizes.steps_per_window(num_nodes=1) == steps  # of at most 16 MiB


def test_a_batch_of_more_than_flight_sends_in_a_message_comes_in_several() -> None:
    wide = shard_map({"image": pa.list_(pa.float32(), MEBI)}, 1000, 4000 * MEBI)
    sizes = window_sizes.WindowSizes(wide, batch_size=1000)
    assert (sizes.steps_per_window(2), sizes.rows_per_message()) == (1, 256)
    narrow = window_sizes.WindowSizes(shard_map({"x": pa.uint8()}, 10, 10), batch_size=2**40)
    assert narrow.rows_per_message() == 2**30  # a request can say no more than 2**32 - 1


def test_a_message_holds_less_than_a_batch_of_long_strings() -> None:
    sizes = window_sizes.WindowSizes(long_table(), batch_size=256, message_bytes=2 * MEBI)
    assert (sizes.steps_per_window(2), sizes.rows_per_message()) == (1, 20)
    sizes = window_sizes.WindowSizes(long_table(), batch_size=256, message_bytes=1)
    assert (sizes.steps_per_window(2), sizes.rows_per_message()) == (1, 1)


def test_a_message_of_fixed_columns_holds_whole_batches() -> None:
    shards = shard_map({"image": pa.list_(pa.uint8(), 100_000)}, 1000, 10)
    sizes = window_sizes.WindowSizes(shards, batch_size=256, message_bytes=2 * MEBI)
    assert (sizes.steps_per_window(2), sizes.rows_per_message()) == (1, 256)


def test_the_bytes_of_all_shards_are_counted_once_a_shard_without_files_too() -> None:
    import pyarrow.flight as flight

    endpoints = [
        flight.FlightEndpoint(
            b"",
            ["grpc://a:1", "grpc://b:1"],
            None,
            pb.ShardPlacement(
                index=index,
                rows=pb.RowRange(start=10 * index, stop=10 * index + 10),
                num_bytes=1000 + index,
                node_ids=["a", "b"],
            ).SerializeToString(),
        )
        for index in range(3)
    ]
    info = flight.FlightInfo(
        pa.schema([("text", pa.string())]), flight.FlightDescriptor.for_command(b""), endpoints,
        30, -1, app_metadata=pb.ReadPlan(dataset="t", fingerprint="f").SerializeToString(),
    )  # fmt: skip
    shards = connections._shard_map(info, 0.0)
    assert shards.num_bytes == 3003
    assert window_sizes.row_bytes(shards) == 101
