"""Nodes that end while they load a shard: it is not given to one node after another."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_protocol.errors import from_proto
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.members import ended_nodes
from tests.fake_nodes import (
    SHARDS,
    TIMEOUT_S,
    Clock,
    FakeNode,
    homes,
    settle,
    spec,
    state,
    told,
)

KILLER = 3


def test_a_shard_is_given_up_when_two_processes_ended_while_they_loaded_it() -> None:
    ended = ended_nodes.EndedNodes()
    ended.apply_report("a", "1", frozenset())
    ended.note_asked("a", frozenset({1, 2}))
    ended.apply_report("a", "1", frozenset({1}))  # shard 2 waits for a thread
    ended.note_asked("a", frozenset())
    ended.apply_report("a", "2", frozenset())  # the node started again
    ended.apply_report("b", "1", frozenset({1, ended_nodes.WHOLE_QUERY}))
    assert ended.given_up() == {}
    ended.note_lost({"a"})
    assert ended.given_up() == {1: ["a", "b"]}


def test_a_node_that_was_only_silent_has_not_ended() -> None:
    ended = ended_nodes.EndedNodes()
    for node_id in ("a", "b"):
        ended.apply_report(node_id, "1", frozenset({1}))
    ended.note_lost(set())
    assert ended.given_up() == {1: ["a", "b"]}
    ended.apply_report("b", "1", frozenset({1}))
    assert ended.given_up() == {}


def test_every_split_that_may_have_ended_the_nodes_is_named(
    coordinator: Coordinator, source: Path
) -> None:
    settle(FakeNode(coordinator, "one"))
    coordinator.create(spec(source))
    (record,) = coordinator.state.versions.values()
    error = str(record.ended_error({KILLER: ["one", "two"], 1: ["one", "two"]}))
    parts = [f"{source}/part-{number:03}.parquet" for number in (1, KILLER)]
    assert f"cannot load {' or '.join(parts)}: node one, node two ended meanwhile" in error


class MortalNode(FakeNode):
    """A node whose process ends when it begins to load `KILLER`."""

    def __init__(self, coordinator: Coordinator, node_id: str) -> None:
        super().__init__(coordinator, node_id)
        self.num_starts = 0
        self.running = False

    def report(self) -> pb.HeartbeatRequest:
        request = super().report()
        request.node.process = str(self.num_starts)
        if self.running:
            request.datasets[0].shards.add(index=KILLER, running=True)
        return request


@pytest.mark.parametrize("is_seen_running", [True, False])
@pytest.mark.parametrize("starts_again", [True, False])
def test_a_load_fails_when_two_nodes_ended_at_the_same_split(
    coordinator: Coordinator,
    clock: Clock,
    source: Path,
    starts_again: bool,
    is_seen_running: bool,
) -> None:
    nodes = {name: MortalNode(coordinator, name) for name in ("one", "two", "three")}
    settle(*nodes.values())
    coordinator.create(spec(source))
    for _ in range(2):
        for node in nodes.values():
            node.beat(load=SHARDS - {KILLER})
        (ending,) = (node for node in nodes.values() if KILLER in node.beat(load=())["table"])
        ending.running = is_seen_running
        told(coordinator, ending)
        ending.running = False
        if starts_again:
            ending.num_starts += 1
        else:
            del nodes[ending.id]
            clock.now += TIMEOUT_S / 2
            for node in nodes.values():
                node.beat(load=())
            clock.now += TIMEOUT_S / 2 + 1
        assert state(coordinator) == "loading"
    for node in nodes.values():
        node.beat(load=())

    error = str(from_proto(coordinator.get("table").error))
    assert f"cannot load {source}/part-003.parquet: node " in error
    assert "ended meanwhile" in error
    assert all(node.beat() == {} for node in nodes.values())


def test_no_third_node_gets_a_split_when_a_reader_looked_before_the_second_was_noticed(
    coordinator: Coordinator, clock: Clock, source: Path
) -> None:
    nodes = {name: FakeNode(coordinator, name) for name in "abcdefgh"}
    settle(*nodes.values())
    coordinator.create(spec(source))
    settle(*nodes.values())
    (holder,) = homes(coordinator)[KILLER]
    del nodes[holder]
    ended = 0
    for _ in range(5):
        clock.now += TIMEOUT_S / 2
        for _ in range(4):
            for node in nodes.values():
                node.beat(load=SHARDS - {KILLER})
        clock.now += TIMEOUT_S / 2 + 1
        coordinator.get("table")
        asked = [
            name
            for name, node in nodes.items()
            if any(
                shard.index == KILLER and shard.splits
                for desired in node._exchange().datasets
                for shard in desired.shards
            )
        ]
        for name in asked:
            ended += 1
            del nodes[name]
    assert ended == 2
    assert "ended meanwhile" in str(from_proto(coordinator.get("table").error))
