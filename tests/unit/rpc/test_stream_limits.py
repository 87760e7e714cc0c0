"""What one caller may take of a Flight port."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from cache_client.reading import fetch_ahead
from cache_protocol.errors import NodeUnavailableError
from cache_server.rpc.stream_limits import (
    MAX_BYTES_OF_CONNECTION,
    MAX_BYTES_OF_PRINCIPAL,
    MAX_CALLS_OF_CONNECTION,
    MIN_CALLS_OF_PRINCIPAL,
    StreamLimits,
    calls_of_principal,
    shut_down,
)
from tests.fake_nodes import Clock
from tests.waiting import wait_until

TIMEOUT_S = 60.0


def test_more_calls_than_the_limit_are_refused_by_its_name_until_some_end() -> None:
    limits = StreamLimits(TIMEOUT_S)
    calls = [limits.begin("ann", "one") for _ in range(MAX_CALLS_OF_CONNECTION)]
    with pytest.raises(NodeUnavailableError, match=r"connection has at most 128 running calls"):
        limits.begin("bob", "one")
    for number in range(1, MIN_CALLS_OF_PRINCIPAL // MAX_CALLS_OF_CONNECTION):
        calls += [limits.begin("ann", str(number)) for _ in range(MAX_CALLS_OF_CONNECTION)]
    with pytest.raises(NodeUnavailableError, match=r"principal has at most 4096 .*'ann'"):
        limits.begin("ann", "another")
    limits.begin("bob", "another")
    calls[0].end()
    calls[0].end()  # twice, as at the end of a call that broke
    limits.begin("ann", "another")
    with pytest.raises(NodeUnavailableError):
        limits.begin("ann", "another")


@pytest.mark.parametrize(
    ("container_gib", "ranks"), [(1, 2_048), (12, 3_072), (40, 10_240), (64, 12_288), (512, 12_288)]
)
def test_a_job_may_have_as_many_ranks_as_the_streams_of_each_fit_in_the_memory_of_a_node(
    container_gib: int, ranks: int
) -> None:
    allowed = calls_of_principal(container_gib << 30)
    assert allowed // fetch_ahead.FETCH_THREADS == ranks
    limits = StreamLimits(TIMEOUT_S, max_calls_of_principal=allowed)
    for rank in range(ranks):
        for _ in range(fetch_ahead.FETCH_THREADS):
            limits.begin("job", str(rank))
    with pytest.raises(NodeUnavailableError, match=f"at most {allowed} running calls"):
        limits.begin("job", "one more")


def test_a_message_is_made_when_there_is_memory_for_it() -> None:
    limits = StreamLimits(TIMEOUT_S)
    made: list[int] = []

    def messages() -> Iterator[int]:
        for number in range(3):
            made.append(number)
            yield number

    first = limits.begin("ann", "one").paced(messages(), MAX_BYTES_OF_CONNECTION)
    second = limits.begin("ann", "one").paced(messages(), 1)
    assert next(first) == 0
    waiting = threading.Thread(target=lambda: next(second))
    waiting.start()
    assert next(limits.begin("ann", "two").paced([7], 1)) == 7  # another connection
    assert made == [0]
    first.close()  # the call ended
    waiting.join(TIMEOUT_S)
    assert made == [0, 0]
    assert list(second) == [1, 2]


def test_a_caller_whose_messages_are_not_taken_is_refused_in_time() -> None:
    limits = StreamLimits(0.01)
    stalled = limits.begin("ann", "one").paced([1, 2], MAX_BYTES_OF_CONNECTION)
    next(stalled)
    with pytest.raises(NodeUnavailableError, match=r"'ann' reads too slowly: .* 67108864 bytes"):
        next(limits.begin("ann", "one").paced([1], 1))
    assert next(limits.begin("bob", "two").paced([1], 2 * MAX_BYTES_OF_PRINCIPAL)) == 1  # alone


def test_requests_that_wait_are_refused_when_they_are_too_many() -> None:
    limits = StreamLimits(TIMEOUT_S)
    stalled = limits.begin("ann", "one").paced([1, 2], MAX_BYTES_OF_CONNECTION)
    next(stalled)
    waiting = limits.begin("ann", "one").paced([3], 1, MAX_BYTES_OF_CONNECTION)
    thread = threading.Thread(target=lambda: next(waiting))
    thread.start()
    wait_until(lambda: limits._waiting, TIMEOUT_S, "it waits")
    with pytest.raises(NodeUnavailableError, match="reads too slowly"):
        next(limits.begin("ann", "one").paced([4], 1, 1))
    stalled.close()
    thread.join(TIMEOUT_S)
    assert not limits._waiting


def test_a_connection_is_slow_while_a_message_of_it_waits_for_too_long() -> None:
    clock = Clock()
    limits = StreamLimits(TIMEOUT_S, clock)
    call = limits.begin("ann", "one")
    messages = call.paced([1, 2], 1)
    next(messages)
    clock.now += TIMEOUT_S
    assert limits.slow_peers() == set()
    clock.now += 1
    assert limits.slow_peers() == {"one"}
    next(messages)
    assert limits.slow_peers() == set()
    clock.now += TIMEOUT_S + 1
    call.end()
    assert limits.slow_peers() == set()


@pytest.mark.parametrize(
    ("bind", "host", "peer"),
    [
        ("127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1:{}"),
        ("::1", "::1", "ipv6:%5B::1%5D:{}"),
        ("::", "127.0.0.1", "ipv4:127.0.0.1:{}"),
    ],
)
def test_the_connection_of_a_peer_is_shut_down_and_no_other(
    bind: str, host: str, peer: str
) -> None:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.create_server((bind, 0), family=family, dualstack_ipv6=bind == "::") as server:
        ours = server.getsockname()[1]
        near = [socket.create_connection((host, ours)) for _ in range(2)]
        far = [server.accept()[0] for _ in near]
        port = near[0].getsockname()[1]
        near[0].settimeout(TIMEOUT_S)
        before = os.listdir("/proc/self/fd")
        assert not shut_down(peer.format(port), 1)  # to another port
        assert shut_down(peer.format(port), ours)
        assert len(os.listdir("/proc/self/fd")) == len(before)
        assert near[0].recv(1) == b""
        near[1].sendall(b"x")
        assert far[1].recv(1) == b"x"
        for connection in (*near, *far):
            connection.close()
    assert not shut_down(peer.format(port), ours)
    assert not shut_down("unix:", ours)
