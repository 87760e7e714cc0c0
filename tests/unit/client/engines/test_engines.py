"""What the tasks of engines put and read, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pytest

from cache_client import NodeUnavailableError
from cache_client.control import client as control_client
from cache_client.engines import tasks
from cache_client.writing import writes
from cache_protocol.wire.credentials import NO_CREDENTIALS

SCHEMA = pa.schema({"row": pa.int64()})


class FakeWrite(writes.Write):
    """Notes what is put; the first puts fail."""

    def __init__(self, failures: int = 0) -> None:
        client: Any = None
        super().__init__("t", "id", SCHEMA, SCHEMA, 1 << 20, (), NO_CREDENTIALS, client)
        self.__dict__.update(failures=failures, puts=[])

    def put(self, partition: int, attempt: int, data: Any, **_: Any) -> writes.PartitionAck:
        rows = data.read_all()["row"].to_pylist()
        self.__dict__["puts"].append((partition, attempt, rows))
        if len(self.__dict__["puts"]) <= self.__dict__["failures"]:
            raise NodeUnavailableError("stopped")
        return writes.PartitionAck(partition, attempt, len(rows), 8 * len(rows), "c", "n", ("s",))


def batches(*columns: Iterable[Any]) -> list[pa.RecordBatch]:
    return [pa.record_batch({"row": [*column]}) for column in columns]


@pytest.mark.parametrize(
    "put", [tasks.put_again, lambda write, *rest: tasks.put_batches(write, 3, 1, rest[1])]
)
def test_a_task_puts_batches_of_other_types_and_nothing_without_rows(
    put: Callable[[writes.Write, int, list[pa.RecordBatch]], writes.PartitionAck | None],
) -> None:
    write = FakeWrite()
    empty = pa.record_batch({"other": pa.array([], pa.string())})
    assert put(write, 3, [empty]) is None
    ack = put(
        write, 3, [empty, *batches([0, 1]), pa.record_batch({"row": pa.array([2], pa.int8())})]
    )
    assert ack is not None and ack.partition == 3
    assert [rows for _, _, rows in write.__dict__["puts"]] == [[0, 1, 2]]


def test_rows_in_memory_are_put_again_by_other_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "_LONGEST_PAUSE_S", 0.0)
    write = FakeWrite(failures=4)
    tasks.put_again(write, 0, batches([7]))
    puts = write.__dict__["puts"]
    assert len({attempt for _, attempt, _ in puts}) == len(puts) == 5
    with pytest.raises(NodeUnavailableError):
        tasks.put_again(FakeWrite(failures=5), 0, batches([7]))


@pytest.mark.parametrize(
    ("num_rows", "num_parts", "sizes"),
    [(10, 3, [3, 3, 4]), (2, 3, [1, 1]), (0, 3, [0]), (10, None, [5, 5])],
)
def test_parts_are_nearly_equal_and_have_each_row_once(
    num_rows: int, num_parts: int | None, sizes: list[int]
) -> None:
    client = control_client.CacheClient("grpc://127.0.0.1:1")
    num_bytes = 2 * tasks.PARTITION_BYTES
    parts = tasks.RowParts(client, "t", "f", num_rows, num_bytes, ("row",), SCHEMA).split(num_parts)
    assert [len(part) for part in parts] == sizes
    assert [row for part in parts for row in part] == list(range(num_rows))


STORED = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float16(), pa.float32(), pa.float64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
]


@pytest.mark.frameworks
def test_spark_has_a_type_for_all_stored_columns() -> None:
    pytest.importorskip("pyspark")
    from cache_client.engines import spark_source

    columns = {str(dtype): pa.array([1, 2], pa.int8()).cast(dtype) for dtype in STORED}
    columns |= {
        "text": pa.array(["a", None]),
        "large_text": pa.array(["a", None], pa.large_string()),
        "bytes": pa.array([b"a", None]),
        "large_bytes": pa.array([b"a", None], pa.large_binary()),
        "list": pa.array([[1], []], pa.list_(pa.uint16())),
        "large_list": pa.array([["a"], None], pa.large_list(pa.string())),
        "image": pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.float32(), 2), 1)),
    }
    batch = pa.record_batch(columns)
    read = spark_source.read_as(
        batch, spark_source.arrow_schema(spark_source.spark_schema(batch.schema))
    )
    assert read.to_pylist() == batch.to_pylist()
    types = {
        field.name: field.dataType.simpleString()
        for field in spark_source.spark_schema(batch.schema)
    }
    assert (types["uint32"], types["uint64"]) == ("bigint", "decimal(20,0)")
    assert types["image"] == "array<array<float>>"
