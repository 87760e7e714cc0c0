"""A Flight connection that is closed while it is in use: by another thread, or before a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow.flight as flight
import pytest

from cache_client.connections import Connection, ConnectionClosedError
from protos.cache.v1 import cache_pb2 as pb

WAIT_S = 30.0


class SlowServer(flight.FlightServerBase):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.asked, self.answer = threading.Event(), threading.Event()

    def do_action(self, context: object, action: object) -> Iterator[bytes]:
        self.asked.set()
        assert self.answer.wait(WAIT_S)
        yield pb.CoordinatorEndpoints(control_location="there").SerializeToString()

    def do_exchange(
        self, context: object, descriptor: object, reader: object, writer: object
    ) -> None:
        self.asked.set()
        assert self.answer.wait(WAIT_S)


@pytest.fixture
def server() -> Iterator[SlowServer]:
    with SlowServer() as running:
        yield running
        running.answer.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as running:
        yield running


def test_a_call_that_runs_when_its_connection_is_closed_still_gets_its_answer(
    server: SlowServer, pool: ThreadPoolExecutor
) -> None:
    connection = Connection(f"grpc://127.0.0.1:{server.port}")
    call = pool.submit(connection.coordinator, WAIT_S)
    assert server.asked.wait(WAIT_S)

    connection.close()

    assert connection.is_closed
    server.answer.set()
    assert call.result(WAIT_S).control_location == "there"
    with pytest.raises(ConnectionClosedError, match=f"127.0.0.1:{server.port} was closed"):
        connection.coordinator(WAIT_S)


def test_a_receive_that_runs_when_its_stream_is_closed_is_broken_off_at_once(
    server: SlowServer, pool: ThreadPoolExecutor
) -> None:
    with Connection(f"grpc://127.0.0.1:{server.port}") as connection:
        stream = connection.open_gather("table", "", (), WAIT_S)
        receive = pool.submit(stream.receive, 1)
        assert server.asked.wait(WAIT_S)

        stream.close()

        with pytest.raises(ConnectionClosedError, match=r"stream from .* was closed"):
            receive.result(WAIT_S / 2)  # the server has not answered yet


def test_a_fork_waits_for_a_running_call_and_closes_the_connection_behind_it(
    server: SlowServer, pool: ThreadPoolExecutor
) -> None:
    connection = Connection(f"grpc://127.0.0.1:{server.port}")
    call = pool.submit(connection.coordinator, WAIT_S)
    assert server.asked.wait(WAIT_S)
    threading.Timer(0.1, server.answer.set).start()

    child = os.fork()
    if child == 0:
        os._exit(0)

    assert server.answer.is_set()
    assert call.result(WAIT_S).control_location == "there"
    assert connection.is_closed
    assert os.waitpid(child, 0)[1] == 0
