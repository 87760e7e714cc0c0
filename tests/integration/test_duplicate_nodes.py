"""Two nodes that take themselves for one: their settings are wrong, and they are told so."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_server.config import NodeConfig
from cache_server.server import CacheServer
from tests.free_ports import free_port
from tests.waiting import wait_until

WAIT_S = 30.0


def test_two_nodes_that_advertise_the_same_address_are_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port("127.0.0.1", "127.0.0.2")

    def config(bind: str, coordinator: str | None = None) -> NodeConfig:
        return NodeConfig(
            cache_dir=tmp_path / bind, bind=bind, advertise="127.0.0.1",
            flight_port=port, control_port=0, coordinator=coordinator,
        )  # fmt: skip

    with (
        CacheServer(config("127.0.0.1")) as first,
        CacheServer(config("127.0.0.2", first.endpoints.control_location)),
    ):
        problem = f"two nodes are at grpc://127.0.0.1:{port} and have the same id {first.node_id}"
        wait_until(lambda: problem in caplog.text, WAIT_S, problem)
