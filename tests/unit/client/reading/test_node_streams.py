"""`OrderedStreams`: several requests on one stream to a node, and when it is closed."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest

from cache_client.flight import shared_handle
from cache_client.flight import streams as flight_streams
from cache_client.reading import node_streams
from tests.fake_streams import FakeStream, location

FIRST, SECOND = location(0), location(1)


class OpenStream(FakeStream):
    """A stream that is fresh until a test says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh, self.closed = True, False

    @property
    def is_fresh(self) -> bool:
        return self.fresh and not self.closed

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> node_streams.OrderedStreams:
    monkeypatch.setattr(node_streams.NodeStreams, "connection", lambda self, location: None)
    return node_streams.OrderedStreams(
        node_streams.NodeStreams(lambda _: OpenStream(), timeout_s=10.0)
    )


def test_the_requests_of_several_windows_share_the_stream_to_a_node(
    streams: node_streams.OrderedStreams,
) -> None:
    first, second = streams.take([FIRST, SECOND])
    assert first is not second
    assert streams.take([SECOND, FIRST]) == [second, first]


def test_a_stream_that_is_no_longer_fresh_is_closed_at_its_last_answer(
    streams: node_streams.OrderedStreams,
) -> None:
    (old,) = streams.take([FIRST])
    assert streams.take([FIRST]) == [old]
    old.fresh = False
    (new,) = streams.take([FIRST])
    assert new is not old
    streams.give_back(FIRST, old)
    assert not old.closed
    streams.give_back(FIRST, old)
    assert old.closed and not new.closed

    streams.give_back(FIRST, new)
    assert not new.closed
    new.fresh = False
    streams.take([FIRST])
    assert new.closed


def test_a_broken_stream_is_replaced_and_may_be_discarded_by_each_of_its_requests(
    streams: node_streams.OrderedStreams,
) -> None:
    (broken,) = streams.take([FIRST])
    streams.take([FIRST])
    streams.discard(broken)
    assert broken.closed
    (new,) = streams.take([FIRST])
    assert new is not broken
    streams.discard(broken)
    assert not new.closed


def test_a_stream_that_ended_while_others_were_received_is_no_failure_of_its_node() -> None:
    end = Mock()
    stream = flight_streams.GatherStream(
        FIRST, (end, end), usable_until=0.0, ends_at=time.monotonic()
    )
    with pytest.raises(
        shared_handle.ConnectionClosedError, match="ended before its answer was taken"
    ):
        stream.receive(1)
    stream.close()
