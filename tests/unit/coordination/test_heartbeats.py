"""The cost of heartbeats: without news, nothing is computed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.holdings import Holdings
from tests.fake_nodes import TIMEOUT_S, Clock, FakeNode, settle, spec


@pytest.fixture
def nodes(coordinator: Coordinator, source: Path) -> list[FakeNode]:
    """Three that serve a dataset, and have nothing new to say."""
    nodes = [FakeNode(coordinator, name) for name in ("one", "two", "three")]
    coordinator.create(spec(source))
    settle(*nodes)
    assert coordinator.get("table").state == pb.DATASET_STATE_READY
    return nodes


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For which nodes it was gone through all shards, or for ``describe``."""
    calls: list[str] = []
    desired, describe = Holdings._build_desired, Holdings._build_description

    def noting_desired(self: Holdings, node_id: str) -> object:
        calls.append(node_id)
        return desired(self, node_id)

    def noting_describe(self: Holdings, lease_s: float) -> object:
        calls.append("describe")
        return describe(self, lease_s)

    monkeypatch.setattr(Holdings, "_build_desired", noting_desired)
    monkeypatch.setattr(Holdings, "_build_description", noting_describe)
    return calls


def test_reports_that_say_nothing_new_are_answered_as_before(
    coordinator: Coordinator, nodes: list[FakeNode], drawn: list[str]
) -> None:
    before = {node.id: node.beat() for node in nodes}
    coordinator.get("table", lease=True)
    drawn.clear()
    for idle_s in (3.0, 4.0, None):  # how long ago rows were read is all that differs
        for node in nodes:
            node.idle_s = idle_s
            assert node.beat() == before[node.id]
        coordinator.get("table", lease=True)
    assert drawn == []


def test_news_of_one_node_are_computed_for_all(
    coordinator: Coordinator, nodes: list[FakeNode], drawn: list[str]
) -> None:
    (sealed,) = nodes[0].sealed.values()
    assert sealed
    sealed.clear()
    drawn.clear()
    for node in nodes:
        node.beat(load=())
    assert drawn == [node.id for node in nodes]
    assert coordinator.get("table").state == pb.DATASET_STATE_LOADING
    settle(*nodes)
    assert coordinator.get("table").state == pb.DATASET_STATE_READY


def test_a_node_that_is_silent_is_found_lost_by_the_next_report_of_another(
    coordinator: Coordinator, nodes: list[FakeNode], clock: Clock, drawn: list[str]
) -> None:
    wanted = nodes[0].beat()["table"]
    clock.now += TIMEOUT_S / 2
    nodes[0].beat()
    drawn.clear()
    clock.now += TIMEOUT_S / 2 + 1
    assert nodes[0].beat(load=())["table"] > wanted
    assert drawn == ["one"]
