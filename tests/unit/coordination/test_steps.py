"""Histories of nodes and of a coordinator, a step at a time; `test_any_order.py` makes others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.coordinator import Coordinator
from tests.fake_nodes import (
    FILES,
    TIMEOUT_S,
    Clock,
    FakeNode,
    failing,
    homes,
    make_coordinator,
    serving,
    settle,
    spec,
    state,
)


class World:
    """A coordinator, its nodes, and a table of one replica.

    Attributes:
        report: the last one that "one" made and did not send.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        source: Path,
        folder: Path,
        clock: Clock,
        nodes: Iterable[FakeNode],
    ) -> None:
        self.coordinator, self._source = coordinator, source
        self._folder, self._clock = folder, clock
        self.nodes = {node.id: node for node in nodes}
        self.report = pb.HeartbeatRequest()

    def take(self, steps: str) -> None:
        """Takes steps, which are names of methods."""
        for name in steps.split():
            getattr(self, name)()

    def ask(self) -> None:
        self.coordinator.create(spec(self._source))

    def ask_for_less(self) -> None:
        self.coordinator.create(spec(self._source, columns=["row"]))

    def drop(self) -> None:
        self.coordinator.delete("table")

    def silence(self) -> None:
        """Until each node that does not report counts as lost."""
        self._clock.now += TIMEOUT_S + 1

    def break_source(self) -> None:
        for node in self.nodes.values():
            node.failing = failing("the source is gone")

    def mend_source(self) -> None:
        for node in self.nodes.values():
            node.failing = {}

    def restart_coordinator(self) -> None:
        """Each node starts again, too, and has reported nothing."""
        self.coordinator = make_coordinator(self._folder, self._clock)
        restarted = [node.restart(self.coordinator) for node in self.nodes.values()]
        self.nodes = {node.id: node for node in restarted}

    def restart_two(self) -> None:
        self.nodes["two"] = self.nodes["two"].restart()

    def one(self) -> None:
        settle(self.nodes["one"])

    def both(self) -> None:
        settle(*self.nodes.values())

    def keep_report(self) -> None:
        self.report = self.nodes["one"].report()

    def late_report(self) -> None:
        self.coordinator.heartbeat(self.report)


ALL_ON_ONE, AS_BEFORE = [["one"]] * FILES, None
FAILED = "silence break_source one"  # two is gone, and its shards with it
# What happens -> steps, each line of them with the state after it; where the shards are then.
HISTORIES: dict[str, tuple[list[tuple[str, str]], list[list[str]] | None]] = {
    "the shards of a lost node move": ([("silence one", "ready")], ALL_ON_ONE),
    "a lost node that comes back takes its shards again": (
        [("silence one", "ready"), ("restart_two both", "ready")],
        AS_BEFORE,
    ),
    "nodes that do not report after a restart are lost": (
        [("restart_coordinator one", "loading"), ("silence one", "ready")],
        ALL_ON_ONE,
    ),
    "a lost shard that cannot be loaded is a failure until its node comes back": (
        [(FAILED, "failed"), ("restart_two both", "ready")],
        AS_BEFORE,
    ),
    "a lost shard is loaded again for a new request": (
        [(FAILED, "failed"), ("mend_source ask one", "ready")],
        ALL_ON_ONE,
    ),
}


@pytest.mark.parametrize("history", HISTORIES)
def test_a_history(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock, history: str
) -> None:
    nodes = serving(coordinator, spec(source), "one", "two")
    before, world = homes(coordinator), World(coordinator, source, tmp_path, clock, nodes)
    steps, where = HISTORIES[history]
    for names, expected in steps:
        world.take(names)
        assert state(world.coordinator) == expected, names
    assert homes(world.coordinator) == (before if where is AS_BEFORE else where)
    if where is AS_BEFORE:  # a node that comes back has what it had
        assert world.nodes["two"].loads == 0


@pytest.mark.parametrize(
    ("meanwhile", "loads"),
    [
        ("late_report one ask", 2 * FILES - 1),  # seven of the first attempt, and all again
        ("late_report drop ask", 2 * FILES - 1),
        ("drop restart_coordinator ask", 1),  # a node that starts again has kept seven
        ("ask_for_less mend_source one ask", None),
    ],
    ids=["failed", "dropped", "dropped before a restart", "replaced"],
)
def test_late_reports_of_an_attempt_that_failed_do_not_fail_the_next_one(
    coordinator: Coordinator,
    source: Path,
    tmp_path: Path,
    clock: Clock,
    meanwhile: str,
    loads: int | None,
) -> None:
    node = FakeNode(coordinator, "one")
    world = World(coordinator, source, tmp_path, clock, [node])
    asked = coordinator.create(spec(source)).fingerprint
    node.failing = {("table", 3): "corrupt"}
    node.beat()
    world.take(f"keep_report {meanwhile}")

    again = world.coordinator.get("table", asked)
    assert (again.state, again.progress.shards_done) == (pb.DATASET_STATE_LOADING, 0)
    world.take("late_report")

    assert world.coordinator.get("table", asked).state == pb.DATASET_STATE_LOADING
    world.take("mend_source one")
    assert state(world.coordinator) == "ready"
    assert loads in (None, world.nodes["one"].loads)
