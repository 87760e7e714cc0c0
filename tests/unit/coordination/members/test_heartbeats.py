"""The cost of heartbeats: without news, nothing is computed again."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Principal
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.holdings import holdings, shard_holders
from tests.fake_nodes import (
    LEASE_S,
    TIMEOUT_S,
    Clock,
    FakeNode,
    make_coordinator,
    settle,
    shortened,
    spec,
)

WAIT_S = 60.0


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
    desired, describe = holdings.Holdings._build_desired, holdings.Holdings._build_description

    def noting_desired(self: holdings.Holdings, node_id: str) -> object:
        calls.append(node_id)
        return desired(self, node_id)

    def noting_describe(self: holdings.Holdings, lease_s: float) -> object:
        calls.append("describe")
        return describe(self, lease_s)

    monkeypatch.setattr(holdings.Holdings, "_build_desired", noting_desired)
    monkeypatch.setattr(holdings.Holdings, "_build_description", noting_describe)
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


def test_a_report_that_changes_one_node_is_looked_at_and_no_other(
    nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    put_in = shard_holders.ShardHolders._put_in

    def noting(self: shard_holders.ShardHolders, node_id: str, *arguments: Any) -> None:
        taken.append(node_id)
        put_in(self, node_id, *arguments)

    monkeypatch.setattr(shard_holders.ShardHolders, "_put_in", noting)
    (sealed,) = nodes[0].sealed.values()
    sealed.popitem()
    for node in nodes:
        node.beat(load=())
    assert set(taken) == {"one"}


# -- what is not sent again ------------------------------------------------------------------------


def test_a_report_and_an_answer_without_news_name_what_did_not_change(
    coordinator: Coordinator, nodes: list[FakeNode]
) -> None:
    known = numbered(nodes[0], 100)
    told = coordinator.heartbeat(known)
    report = numbered(nodes[0], 101, answer=told.answer)

    answer = coordinator.heartbeat(shortened(report, known))

    assert answer == pb.HeartbeatResponse(
        interval_s=told.interval_s,
        coordinator=told.coordinator,
        report=101,
        answer=told.answer,
        unchanged=True,
    )
    assert coordinator.get("table").state == pb.DATASET_STATE_READY
    whole = coordinator.heartbeat(shortened(numbered(nodes[0], 102), report))
    assert (whole.datasets, whole.unchanged) == (told.datasets, False)


def test_when_rows_were_last_read_is_taken_from_a_short_report(
    coordinator: Coordinator, nodes: list[FakeNode], source: Path, clock: Clock
) -> None:
    old = coordinator.get("table").fingerprint
    coordinator.create(spec(source, columns=["row"]))
    clock.now += LEASE_S + 1
    for node in nodes:
        node.idle_s = 1.0
        node.beat()
    settle(*nodes)
    assert coordinator.get("table").fingerprint != old
    assert coordinator.get("table", old).state == pb.DATASET_STATE_READY  # it is still read


@pytest.mark.parametrize("loss", ["report", "answer", "coordinator", "process", "principal"])
def test_a_short_report_that_cannot_be_completed_changes_nothing_and_everything_is_asked_for(
    coordinator: Coordinator, nodes: list[FakeNode], tmp_path: Path, clock: Clock, loss: str
) -> None:
    node, by = nodes[0], None
    known = numbered(node, 100)
    coordinator.heartbeat(known)
    if loss == "coordinator":
        coordinator = make_coordinator(tmp_path, clock)
    elif loss == "answer":  # the coordinator has a report that the node does not know of
        coordinator.heartbeat(shortened(numbered(node, 101), known))
    elif loss == "principal":
        by = Principal("another")
    report = shortened(numbered(node, 102), known)
    if loss == "report":
        report.since = 101
    elif loss == "process":
        report.node.process = "another"
    before = coordinator.nodes()

    answer = coordinator.heartbeat(report, by=by)

    assert answer.resend and not answer.datasets and not answer.report
    assert coordinator.nodes() == before
    assert coordinator.heartbeat(numbered(node, 103)).report == 103


def numbered(node: FakeNode, number: int, answer: int = 0) -> pb.HeartbeatRequest:
    report = node.report()
    report.report, report.answer = number, answer
    return report


def test_news_of_one_node_are_computed_for_it_and_not_for_those_that_have_what_they_should(
    coordinator: Coordinator, nodes: list[FakeNode], drawn: list[str]
) -> None:
    (sealed,) = nodes[0].sealed.values()
    assert sealed
    sealed.clear()
    drawn.clear()
    for node in nodes:
        node.beat(load=())
    assert drawn == ["one"]
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


def test_no_node_waits_while_the_proof_of_another_is_written(
    coordinator: Coordinator, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    begun, may_end, written = threading.Event(), threading.Event(), list[set[str]]()

    def write(node_ids: Iterable[str]) -> None:
        begun.set()
        assert may_end.wait(WAIT_S)
        written.append(set(node_ids))

    monkeypatch.setattr(coordinator.state.catalogue, "write_proven", write)
    for node in (one, two):
        node.beat()
    coordinator.create(spec(source))
    for node in (one, two):
        node.beat()  # it is told what to load, and loads it
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(one.beat)
        assert begun.wait(WAIT_S)
        two.beat()
        assert not first.done()
        may_end.set()
        first.result()
    assert written == [{"one"}, {"one", "two"}]
