"""`Reader`: a healthy node that gathers slowly is waited for, and is not called failed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cache_client.reading import reader
from cache_protocol.errors import NodeUnavailableError
from cache_protocol.storage.layout import from_matrix
from tests.fake_streams import Clock, FakeStream, FakeStreams, location, shard_map

DEADLINE_S = 60.0


class SlowStream(FakeStream):
    """Brings some rows of a request before its time is over.

    Args:
        clock: of the test.
        rows: that it brings at most.
    """

    def __init__(self, clock: Clock, rows: int) -> None:
        super().__init__()
        self._clock, self._rows = clock, rows
        self._asked = np.empty(0, np.int64)

    def send(self, row_ids: np.ndarray) -> None:
        self._asked = row_ids

    def receive(self, num_rows: int) -> list[pa.RecordBatch]:
        self._clock.now += 20.0
        layout = shard_map(1).layout
        stored = from_matrix(self._asked[: self._rows, None].copy(), layout.columns[0].field)
        return [pa.RecordBatch.from_arrays([stored], schema=layout.schema)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake = SimpleNamespace(monotonic=clock, perf_counter_ns=lambda: 0)
    monkeypatch.setattr(reader, "time", fake)
    return clock


def reader_of(monkeypatch: pytest.MonkeyPatch, stream: FakeStream) -> reader.Reader:
    shards = shard_map(1)
    streams: Any = FakeStreams(shards)
    streams.streams = {location(0): stream}
    monkeypatch.setattr(reader, "NodeStreams", lambda open_stream, **_: streams)
    monkeypatch.setattr(reader.Lease, "renew_if_due", lambda self: None)
    monkeypatch.setattr(reader.Lease, "record_use", lambda self: None)
    monkeypatch.setattr(reader.NodeProbe, "start_if_due", lambda self: None)
    monkeypatch.setattr(reader.NodeProbe, "refresh_map", lambda self, deadline: None)
    return reader.Reader("grpc://node-0:1", shards, deadline_s=DEADLINE_S)


def test_rows_that_come_for_longer_than_the_deadline_all_come_in_order(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = reader_of(monkeypatch, SlowStream(clock, 2))
    wanted = np.array([7, 3, 9, 0, 1, 2, 8, 4, 6, 5], np.int64)
    begun = clock.now

    with caplog.at_level(logging.WARNING):
        pieces = slow.fetch(wanted)

    assert [row for piece in pieces for row in piece.to_batch().column("row").to_pylist()] == (
        wanted.tolist()
    )
    assert clock.now - begun > DEADLINE_S
    assert not caplog.records


def test_a_node_that_brings_no_more_rows_is_given_up_at_the_deadline(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = reader_of(monkeypatch, SlowStream(clock, 0))
    with pytest.raises(NodeUnavailableError, match="did not bring its rows"):
        stuck.fetch(np.arange(4, dtype=np.int64))
