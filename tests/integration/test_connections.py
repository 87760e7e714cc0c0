"""A Flight connection that is closed while it is in use: by another thread, or before a fork."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.flight as flight
import pytest

from cache_client import CacheClient, DatasetNotFoundError, DatasetSpec, StaleVersionError
from cache_client.flight import connections, shared_handle
from cache_client.flight import streams as flight_streams
from cache_client.job import ranks
from cache_client.reading import node_streams
from cache_protocol.errors import CacheError, NodeUnavailableError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server import LocalCluster
from tests.conftest import write_numbered
from tests.waiting import wait_until

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
    connection = connections.NodeConnection(f"grpc://127.0.0.1:{server.port}")
    call = pool.submit(connection.coordinator, WAIT_S)
    assert server.asked.wait(WAIT_S)

    connection.close()

    assert connection.is_closed
    server.answer.set()
    assert call.result(WAIT_S).control_location == "there"
    with pytest.raises(
        shared_handle.ConnectionClosedError, match=f"127.0.0.1:{server.port} was closed"
    ):
        connection.coordinator(WAIT_S)


def test_a_receive_that_runs_when_its_stream_is_closed_is_broken_off_at_once(
    server: SlowServer, pool: ThreadPoolExecutor
) -> None:
    with connections.NodeConnection(f"grpc://127.0.0.1:{server.port}") as connection:
        stream = connection.open_gather("table", "", (), WAIT_S)
        receive = pool.submit(stream.receive, 1)
        assert server.asked.wait(WAIT_S)

        stream.close()

        with pytest.raises(shared_handle.ConnectionClosedError, match=r"stream from .* was closed"):
            receive.result(WAIT_S / 2)  # the server has not answered yet


def test_a_stream_that_opens_too_late_is_refused_and_closed_once_it_is_open(
    server: SlowServer,
) -> None:
    let_open = threading.Event()
    opened: list[flight_streams.GatherStream] = []

    def open_late(connection: connections.NodeConnection) -> flight_streams.GatherStream:
        assert let_open.wait(WAIT_S)
        opened.append(connection.open_gather("table", "", (), WAIT_S))
        return opened[0]

    location = f"grpc://127.0.0.1:{server.port}"
    streams = node_streams.NodeStreams(open_late, timeout_s=0.05)
    (refused,) = streams.take([location])
    assert isinstance(refused, NodeUnavailableError)
    assert str(refused) == f"node at {location} did not answer within 0.05 s"

    let_open.set()
    wait_until(lambda: opened and not opened[0].is_fresh, WAIT_S, "the late stream is closed")
    streams.close()


def test_streams_that_are_being_opened_are_waited_for_no_longer_once_all_is_closed(
    pool: ThreadPoolExecutor,
) -> None:
    asked, let_open = threading.Event(), threading.Event()

    def open_never(connection: connections.NodeConnection) -> flight_streams.GatherStream:
        asked.set()
        assert let_open.wait(WAIT_S)
        raise NodeUnavailableError("never")

    streams = node_streams.NodeStreams(open_never, timeout_s=WAIT_S)
    taking = pool.submit(streams.take, ["grpc://127.0.0.1:1"])
    assert asked.wait(WAIT_S)
    streams.close()

    (refused,) = taking.result(WAIT_S / 2)
    assert str(refused) == node_streams.CLOSED
    let_open.set()


def test_nodes_that_were_not_asked_as_others_hang_are_told_from_those(
    server: SlowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_streams, "_MAX_OPENED_AT_ONCE", 1)
    let_open = threading.Event()

    def open_late(connection: connections.NodeConnection) -> flight_streams.GatherStream:
        assert let_open.wait(WAIT_S)
        raise NodeUnavailableError("never")

    streams = node_streams.NodeStreams(open_late, timeout_s=0.05)
    hangs, not_asked = streams.take(["grpc://127.0.0.1:1", "grpc://127.0.0.1:2"])
    assert isinstance(hangs, NodeUnavailableError) and not isinstance(
        hangs, node_streams.NotAskedError
    )
    assert isinstance(not_asked, node_streams.NotAskedError)
    assert str(not_asked) == "node at grpc://127.0.0.1:2 was not asked before the time limit"
    let_open.set()
    streams.close()


def test_a_stream_that_breaks_while_it_is_opened_is_closed(
    server: SlowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[flight_streams.GatherStream] = []

    def begin(stream: flight_streams.GatherStream) -> None:
        broken.append(stream)
        raise NodeUnavailableError("broke")

    monkeypatch.setattr(flight_streams.GatherStream, "begin", begin)
    with connections.NodeConnection(f"grpc://127.0.0.1:{server.port}") as connection:
        with pytest.raises(NodeUnavailableError, match="broke"):
            connection.open_gather("table", "", (), WAIT_S)
        assert not broken[0].is_fresh


def test_a_connection_that_is_never_made_is_given_up_before_the_time_of_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never says a word
        location = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        with (
            connections.NodeConnection(location) as connection,
            pytest.raises(NodeUnavailableError),
        ):
            connection.open_gather("table", "", (), 10 * WAIT_S)
    assert time.monotonic() - begun < 2 * WAIT_S


def test_streams_that_are_given_back_are_taken_again_and_closed_with_the_rest(
    server: SlowServer,
) -> None:
    location = f"grpc://127.0.0.1:{server.port}"
    streams = node_streams.NodeStreams(
        lambda c: c.open_gather("table", "", (), WAIT_S), timeout_s=WAIT_S
    )
    first, second = streams.take([location, location])
    assert isinstance(first, flight_streams.GatherStream) and isinstance(
        second, flight_streams.GatherStream
    )
    streams.give_back(location, first)
    assert streams.take([location]) == [first]
    streams.give_back(location, second)

    streams.close()

    assert not first.is_fresh and not second.is_fresh
    (refused,) = streams.take([location])
    assert isinstance(refused, CacheError) and "closed" in str(refused)


def test_a_fork_waits_for_a_running_call_and_closes_the_connection_behind_it(
    server: SlowServer, pool: ThreadPoolExecutor
) -> None:
    connection = connections.NodeConnection(f"grpc://127.0.0.1:{server.port}")
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


def test_a_schema_or_a_lease_that_is_refused_says_why_and_shows_no_traceback(
    cluster: LocalCluster, client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    info = client.load(DatasetSpec(dataset_name, write_numbered(tmp_path, 10)))
    with connections.NodeConnection(
        cluster.endpoint, ranks.find_credentials(cluster.endpoint)
    ) as connection:
        for call in (connection.read_schema, connection.renew_lease):
            with pytest.raises(DatasetNotFoundError, match="no dataset 'nowhere'") as missing:
                call("nowhere", "", WAIT_S)
            with pytest.raises(StaleVersionError) as stale:
                call(dataset_name, "another", WAIT_S)
            for caught in (missing, stale):
                assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
        assert connection.read_schema(dataset_name, "", WAIT_S).equals(info.schema)
