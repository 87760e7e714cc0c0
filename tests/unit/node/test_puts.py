"""Streams of rows -> shards: how they are cut, and which streams are refused."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from cache_protocol.errors import (
    InvalidTicketError,
    LoadError,
    NodeUnavailableError,
    RequestError,
    SchemaError,
)
from cache_protocol.storage.memory_budget import memory_of_container
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Principal
from cache_server.node import puts as puts_module
from cache_server.node.desired import OpenWrite
from cache_server.node.links.room_requests import RoomAnswer
from cache_server.node.links.write_schemas import WriteSchemas
from cache_server.node.loads.load_memory import LoadMemory
from cache_server.node.puts import PutMessage, Puts
from cache_server.shards import draft
from cache_server.shards.store import ShardStore
from cache_server.shards.version_key import VersionKey
from tests.waiting import wait_until

WAIT_S = 60.0
WRITE = "0" * 32
SCHEMA = pa.schema([pa.field("row", pa.int64(), nullable=False)])
SHARD_ROWS = 10


class Harness:
    """The puts of one node, whose heartbeats do nothing."""

    def __init__(self, store: ShardStore, container_bytes: int | None = None) -> None:
        self.store, self.stop = store, threading.Event()
        self.memory = LoadMemory(
            container_bytes and memory_of_container(container_bytes), lambda: 0
        )
        self.schema, self.fetched, self.act = SCHEMA, 0, 0
        schemas = WriteSchemas(self.fetch)
        self.puts = Puts(
            store,
            self.memory,
            schemas,
            "node",
            self.beat,
            lambda *_: RoomAnswer("no dataset makes room"),
            self.stop,
            self.require_tombstones,
        )
        self.beats = 0
        self.open()

    def require_tombstones(self, dataset: str, number: int) -> None:
        if number > self.act:
            raise NodeUnavailableError("the coordinator does not answer")

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
        full_wait_s: float = 0.0,
        tombstones: int = 0,
    ) -> None:
        self.schema = schema
        data = schema.serialize().to_pybytes()
        digest = hashlib.sha256(data).hexdigest()
        size = 8 * SHARD_ROWS
        write = OpenWrite(WRITE, "t", digest, size, False, full_wait_s, committed, tombstones)
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


def test_a_put_without_the_tombstones_that_it_needs_is_to_be_sent_again(harness: Harness) -> None:
    harness.open(tombstones=2)
    with pytest.raises(NodeUnavailableError, match="does not answer"):
        harness.put(chained(rows(25), end(25)))
    assert harness.store.versions() == {}
    harness.act = 2
    assert harness.put(chained(rows(25), end(25))).num_rows == 25


def test_rows_of_other_columns_or_types_are_refused(harness: Harness) -> None:
    for schema, text in (
        (pa.schema([("line", pa.int64())]), "must have a column 'row'; .* have a column 'line'"),
        (pa.schema([("row", pa.float32())]), "'row' comes as float, which cannot become int64"),
        (pa.schema([("row", pa.struct([("x", pa.int8())]))]), "'row' comes as struct"),
        (pa.schema([("row", pa.null())]), "'row' comes as null, which a put cannot have"),
        (pa.schema([("row", pa.dictionary(pa.int8(), pa.null()))]), "which a put cannot have"),
        (pa.schema([("row", pa.list_(pa.list_view(pa.int8())))]), "'row' comes as list"),
    ):
        with pytest.raises(SchemaError, match=text):
            harness.put(end(0), schema=schema)
    assert harness.beats == 0


def test_rows_of_other_types_are_stored_exactly_or_refused_by_their_row(harness: Harness) -> None:
    unsigned = pa.schema([("row", pa.uint64())])

    def put(*values: int, announced: int = 0) -> pb.PutResult:
        batch = pa.record_batch([pa.array(values, pa.uint64())], schema=unsigned)
        shard = pb.PutShard(num_rows=announced).SerializeToString()
        message = iter([PutMessage(batch, shard)])
        return harness.put(chained(message, end(len(values))), schema=unsigned)

    with pytest.raises(SchemaError, match="9223372036854775808 in row 24 cannot become int64"):
        put(*range(24), 2**63)
    assert harness.store.versions() == {}
    put(*range(25), announced=25)
    assert harness.shards() == [[*range(25)]]


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


def test_a_schema_is_asked_for_once(harness: Harness) -> None:
    harness.open()

    for attempt in range(3):
        harness.put(chained(rows(5), end(5)), attempt)
        harness.open()

    assert harness.fetched == 1


def test_a_schema_with_another_digest_is_refused(harness: Harness) -> None:
    harness.schema = pa.schema([("row", pa.int32())])

    with pytest.raises(InvalidTicketError, match="another digest"):
        harness.put(chained(rows(5), end(5)))
    assert harness.store.versions() == {}


LIMIT_ROWS = 2000


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """The puts of a node with room for `LIMIT_ROWS` rows and little more."""
    monkeypatch.setattr(draft, "_STEP_BYTES", 80)
    with ShardStore(tmp_path, memory_limit_bytes=8 * LIMIT_ROWS + 2000) as store:
        harness = Harness(store)
        harness.open(full_wait_s=WAIT_S)
        yield harness


class SlowPut:
    """A put of 1,500 rows that were announced; they come when the test says so.

    Args:
        together: the first 860 rows come as those of the other puts do.
    """

    def __init__(
        self,
        harness: Harness,
        attempt: int,
        by: Principal,
        together: threading.Barrier | None = None,
    ) -> None:
        self.may_go_on, self.failure = threading.Event(), ""
        self._together = together or threading.Barrier(1)
        self._thread = threading.Thread(target=self._put, args=(harness, attempt, by), daemon=True)
        before = harness.store.free_bytes()
        self._thread.start()
        wait_until(lambda: harness.store.free_bytes() != before, WAIT_S, "the first rows")

    def _put(self, harness: Harness, attempt: int, by: Principal) -> None:
        def messages() -> Iterator[PutMessage]:
            yield from rows(10, announce={0: 1500})
            self.may_go_on.wait(WAIT_S)
            for _ in range(85):
                self._together.wait(WAIT_S)
                yield from rows(10)
            yield from rows(*[10] * 64)
            yield from end(1500)

        request = pb.PutRequest(dataset="t", write_id=WRITE, partition=3, attempt=attempt)
        try:
            harness.puts.put(request, SCHEMA, messages(), by)
        except LoadError as error:
            self.failure = str(error)

    def end(self) -> str:
        """Lets it go on; returns why it failed, or nothing."""
        self.may_go_on.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.failure


def test_an_idle_put_holds_room_only_for_the_rows_that_came(small: Harness) -> None:
    small.open(full_wait_s=0.1)
    free = small.store.free_bytes()
    idle = SlowPut(small, 0, Principal("bob"))
    assert small.store.free_bytes() == free - 80

    small.put(chained(rows(1800, announce={0: 1800}), end(1800)), attempt=1)

    assert "was full for 0.1 s" in idle.end()
    assert [key.fingerprint.split("-")[3] for key in small.store.versions()] == ["1"]
    assert small.store.free_bytes() == free - small.store.stored_bytes


def test_of_two_puts_that_do_not_fit_together_one_gives_way_at_once(small: Harness) -> None:
    together = threading.Barrier(2)  # neither ends before the other is stuck
    puts = [SlowPut(small, attempt, Principal("bob"), together) for attempt in range(2)]

    for put in puts:
        put.may_go_on.set()
    failures = [put.end() for put in puts]

    assert sorted(map(bool, failures)) == [False, True]
    assert "other puts go first" in "".join(failures)


@pytest.mark.parametrize(
    ("running", "first"),
    [
        ([("a", "x", 5), ("a", "x", 5)], 0),
        ([("a", "x", 5), ("a", "y", 4)], 1),
        ([("a", "x", 5), ("b", "y", 4)], 1),
        ([("a", "x", 5), ("a", "x", 1), ("a", "y", 5)], 2),
        ([("a", "x", 5), ("a", "y", 1), ("b", "z", 5)], 2),
        ([("a", "x", 9), ("b", "z", 5), ("b", "y", 5)], 0),
    ],
)
def test_the_put_of_those_that_hold_least_goes_first(
    running: list[tuple[str, str, int]], first: int
) -> None:
    waits = [
        SimpleNamespace(namespace=namespace, owner=owner, held_bytes=held, is_stuck=True)
        for namespace, owner, held in running
    ]
    assert puts_module._first(waits) is waits[first]  # type: ignore[arg-type,comparison-overlap]


def test_puts_of_one_team_leave_memory_for_others(tmp_path: Path) -> None:
    of_node = memory_of_container(1 << 40)
    memory = LoadMemory(of_node, lambda: 0)
    all_bytes = of_node.loading_bytes
    shares = {"a/bob": 0.5, "a": 0.75}
    half = all_bytes // 2

    with memory.hold(Load(), half, shares):
        with pytest.raises(AssertionError, match="it waits"), memory.hold(Load(), 1, shares):
            pass
        with memory.hold(Load(), half // 2, {"a/ben": 0.5, "a": 0.75}):
            with pytest.raises(AssertionError), memory.hold(Load(), 1, {"a/bea": 0.5, "a": 0.75}):
                pass
            with memory.hold(Load(), half // 2, {"b/ann": 0.5, "b": 0.75}):
                pass
    with memory.hold(Load(), all_bytes, shares):  # one may always run
        pass
    with memory.hold(Load(), all_bytes):
        pass
