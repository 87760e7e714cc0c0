"""Streams of rows -> shards: how they are cut, and which streams are refused."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cache_protocol.errors import (
    InvalidTicketError,
    LoadError,
    NodeUnavailableError,
    RequestError,
)
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.desired import OpenWrite
from cache_server.node.load_memory import LoadMemory
from cache_server.node.puts import PutMessage, Puts
from cache_server.node.write_schemas import WriteSchemas
from cache_server.shards.store import ShardStore
from cache_server.shards.version_key import VersionKey

WRITE = "0" * 32
SCHEMA = pa.schema([pa.field("row", pa.int64(), nullable=False)])
SHARD_ROWS = 10


class Harness:
    """The puts of one node, whose heartbeats do nothing."""

    def __init__(self, store: ShardStore, container_bytes: int | None = None) -> None:
        self.store, self.stop = store, threading.Event()
        self.memory = LoadMemory(container_bytes, lambda: 0)
        self.schema, self.fetched = SCHEMA, 0
        schemas = WriteSchemas(self.fetch)
        self.puts = Puts(store, self.memory, schemas, "node", self.beat, self.stop)
        self.beats = 0
        self.open()

    def beat(self) -> None:
        self.beats += 1

    def fetch(self, write_id: str) -> bytes:
        self.fetched += 1
        return self.schema.serialize().to_pybytes()

    def open(
        self,
        *,
        schema: pa.Schema = SCHEMA,
        committed: bool = False,
        earlier_release: bool = False,
        full_wait_s: float = 0.0,
    ) -> None:
        self.schema = schema
        data = schema.serialize().to_pybytes()
        digest = hashlib.sha256(data).hexdigest()
        size = 8 * SHARD_ROWS
        write = OpenWrite(WRITE, "t", digest, size, False, full_wait_s, committed)
        if earlier_release:
            write = replace(write, schema_digest="", schema=data)
        self.puts.update({WRITE: write})

    def put(
        self, messages: Iterator[PutMessage], attempt: int = 0, schema: pa.Schema = SCHEMA
    ) -> pb.PutResult:
        request = pb.PutRequest(dataset="t", write_id=WRITE, partition=3, attempt=attempt)
        return self.puts.put(request, schema, messages)

    def shards(self) -> list[list[int]]:
        """The rows of each shard of the only put."""
        ((_, shards),) = self.store.versions().items()
        return [
            shards[index].layout.unpack(shards[index].batch).column("row").to_pylist()
            for index in sorted(shards)
        ]


class Load:
    """Holds memory, and never has to wait for it."""

    def check_wanted(self) -> None:
        raise AssertionError("it waits")


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with ShardStore(tmp_path) as store:
        yield Harness(store)


def rows(*sizes: int, announce: dict[int, int] | None = None) -> Iterator[PutMessage]:
    """Batches of so many rows, numbered through.

    Args:
        announce: number of a batch -> rows of the shard that begins with it.
    """
    start = 0
    for number, size in enumerate(sizes):
        values = np.arange(start, start + size)
        batch = pa.record_batch([values], schema=SCHEMA)
        shard = (announce or {}).get(number, 0)
        yield PutMessage(batch, pb.PutShard(num_rows=shard).SerializeToString())
        start += size


def end(num_rows: int) -> Iterator[PutMessage]:
    yield PutMessage(None, pb.PutEnd(num_rows=num_rows).SerializeToString())


def chained(*parts: Iterator[PutMessage]) -> Iterator[PutMessage]:
    for part in parts:
        yield from part


@pytest.mark.parametrize(
    ("sizes", "announce", "shards"),
    [
        ((25,), {}, [10, 10, 5]),
        ((3, 3, 3, 3), {}, [10, 2]),
        ((4, 6, 8), {0: 10, 2: 8}, [10, 8]),
        ((30,), {0: 30}, [30]),
        ((4, 2, 7), {2: 7}, [6, 7]),
        ((0, 5, 0), {}, [5]),
        ((), {}, []),
    ],
)
def test_rows_are_cut_where_they_were_announced_or_at_the_target_size(
    harness: Harness, sizes: tuple[int, ...], announce: dict[int, int], shards: list[int]
) -> None:
    result = harness.put(chained(rows(*sizes, announce=announce), end(sum(sizes))))

    assert [shard.num_rows for shard in result.shards] == shards
    assert result.num_rows == sum(sizes)
    (num_shards,) = harness.puts.complete().values()
    assert num_shards == len(shards)
    if shards:
        stored = [row for shard in harness.shards() for row in shard]
        assert stored == list(range(sum(sizes)))
    assert harness.beats == 1


def breaking() -> Iterator[PutMessage]:
    yield from rows(25)
    raise pa.ArrowInvalid("the connection broke")


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        (lambda: rows(25), RequestError, "without a PutEnd"),
        (lambda: chained(rows(25), end(24)), RequestError, "after 24 rows, and 25 came"),
        (lambda: chained(rows(5, announce={0: 9}), end(5)), RequestError, "9 rows, and 5 came"),
        (lambda: chained(rows(9, announce={0: 5}), end(9)), RequestError, "5 rows, and 9 came"),
        (lambda: iter([PutMessage(None, b"\xff")]), InvalidTicketError, "PutEnd"),
        (breaking, pa.ArrowInvalid, "broke"),
    ],
)
def test_a_stream_that_does_not_end_as_it_should_leaves_nothing(
    harness: Harness, messages: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        harness.put(messages())  # type: ignore[operator]

    assert harness.store.versions() == {} and harness.puts.complete() == {}
    assert harness.store.stored_bytes == 0


def test_a_repeated_attempt_keeps_its_rows_and_must_have_as_many(harness: Harness) -> None:
    first = harness.put(chained(rows(25), end(25)))

    assert harness.put(chained(rows(20, 5), end(25))) == first
    with pytest.raises(RequestError, match="25 rows, and now with 24"):
        harness.put(chained(rows(24), end(24)))
    assert len(harness.store.versions()) == 1


def test_rows_of_other_columns_or_types_are_refused(harness: Harness) -> None:
    for schema, text in (
        (pa.schema([("line", pa.int64())]), "line instead of row"),
        (pa.schema([("row", pa.float32())]), "'row' as float, stored as int64"),
        (pa.schema([("row", pa.struct([("x", pa.int8())]))]), "as struct"),
    ):
        with pytest.raises(RequestError, match=text):
            harness.put(end(0), schema=schema)


def test_a_put_ends_with_its_write_and_with_its_node(harness: Harness) -> None:
    def closing() -> Iterator[PutMessage]:
        yield from rows(25)
        harness.puts.update({})
        yield from end(25)

    with pytest.raises(RequestError, match="not open"):
        harness.put(closing())
    with pytest.raises(RequestError, match="not open"):
        harness.put(end(0))
    harness.open(committed=True)
    with pytest.raises(RequestError, match="not open"):
        harness.put(end(0))

    def stopping() -> Iterator[PutMessage]:
        yield from rows(25)
        harness.stop.set()
        yield from end(25)

    harness.open()
    with pytest.raises(NodeUnavailableError, match="stops"):
        harness.put(stopping())
    assert harness.store.versions() == {}


def test_nulls_and_a_lack_of_memory_are_named(tmp_path: Path) -> None:
    with ShardStore(tmp_path) as store:
        small = Harness(store, container_bytes=1 << 30)
        batch = pa.record_batch([pa.array([1, None])], schema=pa.schema([("row", pa.int64())]))
        message = PutMessage(batch, b"")
        with pytest.raises(LoadError, match="'row'"):
            small.put(chained(iter([message]), end(2)))

        with small.memory.hold(Load(), 890 << 20), pytest.raises(LoadError, match="all memory"):
            small.put(end(0))
        small.put(end(0))


def test_a_moved_shard_has_its_bytes_once_under_its_new_name(harness: Harness) -> None:
    harness.put(chained(rows(25), end(25)))
    ((put, shards),) = harness.store.versions().items()
    stored = harness.store.stored_bytes
    version = VersionKey("t", "f")

    for index in range(3):
        harness.store.move(put, index, version, index + 5)

    moved = harness.store.shards(version)
    assert {i: s.sealed.checksum for i, s in moved.items()} == {
        i + 5: s.sealed.checksum for i, s in shards.items()
    }
    assert harness.store.shards(put) == {} and harness.store.stored_bytes == stored
    with pytest.raises(LoadError, match="not on this node"):
        harness.store.move(put, 0, version, 0)
    harness.store.close()
    with ShardStore(harness.store.cache_dir) as again:
        assert again.shards(version).keys() == moved.keys()


@pytest.mark.parametrize("earlier_release", [True, False])
def test_a_schema_is_asked_for_once(harness: Harness, earlier_release: bool) -> None:
    harness.open(earlier_release=earlier_release)

    for attempt in range(3):
        harness.put(chained(rows(5), end(5)), attempt)
        harness.open(earlier_release=earlier_release)

    assert harness.fetched == (0 if earlier_release else 1)


def test_a_schema_with_another_digest_is_refused(harness: Harness) -> None:
    harness.schema = pa.schema([("row", pa.int32())])

    with pytest.raises(InvalidTicketError, match="another digest"):
        harness.put(chained(rows(5), end(5)))
    assert harness.store.versions() == {}
