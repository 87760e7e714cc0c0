"""`GatherStream`: a node that is slow, and one that says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from cache_client.flight import streams
from cache_protocol.errors import NodeUnavailableError
from tests.fake_streams import Clock

TIMEOUT_S = 10.0


class Writer:
    """The end that sends."""

    def close(self) -> None:
        pass


class Messages:
    """The end that receives: messages of some rows, each after some seconds, then a broken stream.

    Args:
        clock: of the test.
        messages: rows of each, and the seconds before it.
        ends_after_s: the seconds between the last one and the end.
    """

    def __init__(
        self, clock: Clock, messages: list[tuple[int, float]], ends_after_s: float
    ) -> None:
        self._clock, self._left = clock, iter(messages)
        self._ends_after_s = ends_after_s

    def read_chunk(self) -> Any:
        for rows, seconds in self._left:
            self._clock.now += seconds
            return SimpleNamespace(data=pa.record_batch({"row": pa.array(range(rows))}))
        self._clock.now += self._ends_after_s
        raise pa.ArrowInvalid("Deadline Exceeded")

    def cancel(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=clock))
    return clock


def stream_of(
    clock: Clock, messages: list[tuple[int, float]], ends_after_s: float
) -> streams.GatherStream:
    return streams.GatherStream(
        "grpc://node:1",
        (Writer(), Messages(clock, messages, ends_after_s)),
        usable_until=clock.now + TIMEOUT_S,
        ends_at=clock.now + 2 * TIMEOUT_S,
    )


def test_a_slow_node_whose_messages_come_until_the_end_of_the_stream_has_not_failed(
    clock: Clock,
) -> None:
    stream = stream_of(clock, [(100, 9.0), (100, 9.0)], ends_after_s=2.0)

    batches = stream.receive(1000)

    assert [batch.num_rows for batch in batches] == [100, 100]
    assert not stream.is_fresh


def test_a_node_that_says_nothing_until_the_end_of_the_stream_has_failed(clock: Clock) -> None:
    stream = stream_of(clock, [(100, 9.0)], ends_after_s=11.0)

    with pytest.raises(NodeUnavailableError, match="Deadline Exceeded"):
        stream.receive(1000)


def test_a_stream_that_breaks_before_its_end_has_failed_though_messages_came(clock: Clock) -> None:
    stream = stream_of(clock, [(100, 1.0)], ends_after_s=0.5)

    with pytest.raises(NodeUnavailableError):
        stream.receive(1000)
