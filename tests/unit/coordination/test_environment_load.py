"""The load that an environment asks for, while its nodes come and go."""

from __future__ import annotations

import threading
from pathlib import Path

from cache_protocol.errors import CacheError
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.environment_load import EnvironmentLoad
from tests.fake_nodes import TIMEOUT_S, Clock, FakeNode, failing, settle, spec, state
from tests.waiting import wait_until

WAIT_S = 60.0


def test_a_first_load_that_failed_while_a_node_was_away_is_done_again_when_it_is_back(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    ready, failures = threading.Event(), list[CacheError]()
    load = EnvironmentLoad(
        coordinator,
        spec(source),
        num_nodes=2,
        join_timeout_s=WAIT_S,
        on_ready=ready.set,
        on_failure=failures.append,
    )
    load.start()
    try:
        wait_until(lambda: bool(coordinator.datasets()), WAIT_S, "the load has begun")
        clock.now += TIMEOUT_S + 1
        one.beat(load=[])
        wait_until(lambda: load._lacked_a_node, WAIT_S, "the node is missed")
        one.failing = failing("a shard does not fit")
        for _ in range(2):
            one.beat()
        assert state(coordinator) == "failed"

        one.failing = {}

        def beats() -> bool:
            settle(one, two)
            return ready.is_set()

        wait_until(beats, WAIT_S, "it is ready")
        assert not failures
    finally:
        assert load.close(WAIT_S)
