"""Callers that hold the HTTP port of a node: probes and metrics are answered beside them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cache_server.config import NodeConfig
from cache_server.server import CacheServer
from cache_server.web import service
from tests.http_pages import ask
from tests.waiting import wait_until

WAIT_S, MANY = 30.0, 3 * service.MAX_CONNECTIONS
PATHS = ("/live", "/ready", "/metrics", "/metrics/node", "/")
# What a caller sends, and what it then does not do: send the rest, or read.
FLOODS = {
    "nothing": b"",
    "half a line": b"GET /live HT",
    "half a head": b"GET / HTTP/1.1\r\nHost: x\r\n",
    "costly pages": b"GET / HTTP/1.1\r\n\r\n",
    "open metrics": b"GET /metrics/node HTTP/1.1\r\n\r\n",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    directory = tmp_path_factory.mktemp("floods")
    config = NodeConfig(cache_dir=directory, flight_port=0, control_port=0, http_port=0)
    with CacheServer(config) as running:
        wait_until(lambda: ask(running.page, "/ready")[0] == 200, WAIT_S, "it is ready")
        yield running


def handlers() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("flood", FLOODS)
def test_probes_and_metrics_are_answered_beside_a_flood(server: CacheServer, flood: str) -> None:
    address = urlsplit(server.page).hostname or "", urlsplit(server.page).port or 0
    with ExitStack() as stack:
        for number in range(MANY):
            caller = stack.enter_context(socket.create_connection(address, WAIT_S))
            caller.sendall(FLOODS[flood])
            if number % 50 == 49:
                assert handlers() <= service.MAX_CONNECTIONS
                assert all(ask(server.page, path)[0] == 200 for path in PATHS)
    wait_until(lambda: not handlers(), WAIT_S, "every thread has ended")


def test_a_caller_that_sends_a_byte_at_a_time_is_cut_off(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_REQUEST_S", 0.5)
    address = urlsplit(server.page).hostname or "", urlsplit(server.page).port or 0
    with socket.create_connection(address, WAIT_S) as caller:
        begun = time.monotonic()
        caller.settimeout(0.05)
        while time.monotonic() - begun < WAIT_S:
            try:
                caller.sendall(b"G")
                if caller.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert time.monotonic() - begun < WAIT_S


def test_an_address_takes_no_place_of_another_one(tmp_path: Path) -> None:
    config = NodeConfig(cache_dir=tmp_path, flight_port=0, control_port=0, http_port=0)
    with CacheServer(config) as running, ExitStack() as stack:
        port = urlsplit(running.page).port or 0
        quiet = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
        for number in range(MANY):
            source = f"127.0.0.{2 + number % 2}", 0
            stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S, source))
        quiet.sendall(b"GET /live HTTP/1.0\r\n\r\n")
        assert quiet.recv(100).startswith(b"HTTP/1.0 200")
