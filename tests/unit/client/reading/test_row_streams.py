"""Which windows take their rows from the stream of the one before, and what becomes of streams."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from cache_client.flight import routing, streams
from cache_client.reading import row_streams
from cache_protocol.errors import NodeUnavailableError, RequestError
from cache_protocol.storage.row_index import Ids, RowRuns
from tests.waiting import wait_until

NODE, OTHER = routing.NodeRef("a", "grpc://a:1"), routing.NodeRef("b", "grpc://b:1")


class Stream(streams.RowStream):
    """Rows of runs, as many as are asked for."""

    def __init__(self, runs: RowRuns) -> None:
        self.left = runs
        self.is_old = self.is_shut = False
        self.error: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def is_fresh(self) -> bool:
        return not (self.is_old or self.is_shut)

    def receive(self, num_rows: int) -> list[pa.RecordBatch]:
        assert self.may_answer.wait(60)
        if self.error is not None:
            raise self.error
        start, length = self.left.start, self.left.length or num_rows
        runs = range(0, num_rows, length)
        rows = [start + at // length * self.left.stride + i for at in runs for i in range(length)]
        self.left = self.left.after(num_rows) or RowRuns(-1)
        return [pa.record_batch({"row": rows[:num_rows]})]

    def close(self) -> None:
        self.is_shut = True


class Node:
    """Opens streams, and has them all."""

    def __init__(self) -> None:
        self.opened: list[tuple[routing.NodeRef, Stream]] = []
        self.error: Exception | None = None
        self.streams = row_streams.RowStreams(self._open, timeout_s=20.0)

    def _open(self, node: routing.NodeRef, runs: RowRuns) -> Stream:
        if self.error is not None:
            raise self.error
        self.opened.append((node, Stream(runs)))
        return self.opened[-1][1]

    def read(self, ids: Ids, node: routing.NodeRef = NODE) -> list[int] | None:
        batches = self.streams.receive(node, ids)
        if batches is None:
            return None
        return [row for batch in batches for row in batch.column("row").to_pylist()]


def rows(start: int, stop: int) -> Ids:
    return np.arange(start, stop, dtype=np.int64)


def of_rank(window: int) -> Ids:
    """Two steps of three rows each, of every other rank."""
    return np.concatenate([rows(12 * window + at, 12 * window + at + 3) for at in (0, 6)])


@pytest.mark.parametrize("window", [lambda n: rows(7 * n, 7 * n + 7), of_rank])
def test_windows_that_follow_one_another_take_their_rows_from_one_stream(
    window: Callable[[int], Ids],
) -> None:
    node = Node()
    assert node.read(window(0)) is None  # single reads open no stream
    for number in range(1, 5):
        assert node.read(window(number)) == window(number).tolist()
    assert len(node.opened) == 1


def test_rows_that_follow_no_others_open_no_stream() -> None:
    node = Node()
    for ids in (rows(0, 5), rows(6, 9), np.array([9, 11, 12]), np.array([3, 1, 2]), rows(0, 5)):
        assert node.read(ids) is None
    assert not node.opened


def test_another_node_and_an_old_stream_make_a_new_one() -> None:
    node = Node()
    node.read(rows(0, 5))
    assert node.read(rows(5, 10)) == [*range(5, 10)]
    assert node.read(rows(10, 15), OTHER) == [*range(10, 15)]
    node.opened[-1][1].is_old = True
    assert node.read(rows(15, 20), OTHER) == [*range(15, 20)]
    assert [each for each, _ in node.opened] == [NODE, OTHER, OTHER]
    assert [stream.is_shut for _, stream in node.opened] == [False, True, False]
    node.streams.close()
    assert all(stream.is_shut for _, stream in node.opened)
    assert node.read(rows(20, 25)) is None


def test_a_broken_stream_is_closed_and_the_next_window_opens_another() -> None:
    node = Node()
    node.read(rows(0, 5))
    node.read(rows(5, 10))
    node.opened[0][1].error = NodeUnavailableError("gone")
    with pytest.raises(NodeUnavailableError, match="gone"):
        node.read(rows(10, 15))
    assert node.opened[0][1].is_shut
    assert node.read(rows(15, 20)) == [*range(15, 20)]
    assert len(node.opened) == 2


def test_a_node_that_refuses_streams_is_asked_for_none_again() -> None:
    node = Node()
    node.error = RequestError("not here")
    node.read(rows(0, 5))
    assert node.read(rows(5, 10)) is None
    node.error = None
    assert node.read(rows(10, 15)) is None


def test_a_window_waits_for_the_one_before_in_another_thread() -> None:
    node = Node()
    node.read(rows(0, 5))
    node.read(rows(5, 10))
    _, stream = node.opened[0]
    stream.may_answer.clear()
    found: dict[int, list[int] | None] = {}

    def read(start: int) -> None:
        found[start] = node.read(rows(start, start + 5))

    first = threading.Thread(target=read, args=(10,))
    first.start()
    wait_until(lambda: node.streams._streams[0].is_busy, 20, "the first window")
    second = threading.Thread(target=read, args=(15,))
    second.start()
    stream.may_answer.set()
    first.join(60)
    second.join(60)
    assert found == {10: [*range(10, 15)], 15: [*range(15, 20)]}
    assert len(node.opened) == 1


def test_streams_that_nothing_continues_are_closed() -> None:
    node = Node()
    for start in range(0, 1000, 100):
        node.read(rows(start, start + 5))
        node.read(rows(start + 5, start + 10))
    assert sum(not stream.is_shut for _, stream in node.opened) == 4
