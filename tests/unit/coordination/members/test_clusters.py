"""Nodes that come and go while placing takes seconds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from cache_server.coordination.claims import Claims
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.members.clusters import Clusters
from tests.fake_nodes import TIMEOUT_S, Clock, FakeNode, serving, settle, spec, state


@pytest.fixture
def clusters(coordinator: Coordinator, clock: Clock) -> Clusters:
    """As the coordinator has them, by the clock of the test."""
    coordinator.state.clusters = Clusters(coordinator.state.membership, clock)
    return coordinator.state.clusters


def test_nodes_that_join_while_placing_is_slow_are_placed_together_and_lose_nothing_meanwhile(
    coordinator: Coordinator, clusters: Clusters, source: Path, clock: Clock
) -> None:
    (one,) = serving(coordinator, spec(source), "one")
    held = one.holds("table")
    clusters.look().spent.took_s = 1.0

    two, three = FakeNode(coordinator, "two"), FakeNode(coordinator, "three")
    two.sealed = {key: dict(shards) for key, shards in one.sealed.items()}
    settle(one, two, three)

    assert clusters.look().names == ("one",)
    assert one.holds("table") == two.holds("table") == held
    assert three.holds("table") == set()
    clock.now += 5.0
    settle(one, two, three)
    assert clusters.look().names == ("one", "three", "two")
    assert one.holds("table") | two.holds("table") | three.holds("table") == held
    assert three.holds("table") and state(coordinator) == "ready"


def test_a_lost_node_is_seen_though_new_versions_were_placed_all_day(
    coordinator: Coordinator, clusters: Clusters, source: Path, clock: Clock
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    clock.now += 3_600.0
    settle(one, two)
    clusters.look().spent.took_s = 20.0
    for number in range(5):
        coordinator.create(spec(source, name=f"table-{number}"))
        for _ in range(12):
            clock.now += TIMEOUT_S / 2
            two.beat()
    assert clusters.look().alive == {"two"} and state(coordinator, "table-4") == "ready"


def test_the_time_in_which_reports_wait_counts_for_no_node_as_silence(
    coordinator: Coordinator, clusters: Clusters, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    node.beat()
    came_at = clock.now + TIMEOUT_S - 1.0
    coordinator.watch_backlog(lambda: came_at)
    clock.now += 100.0

    assert clusters.look().alive == {"one"}
    came_at += 2.0  # that one was taken, the next waits
    assert clusters.look().alive == frozenset()


def test_a_node_whose_report_nobody_read_in_time_was_not_silent_before_it(
    coordinator: Coordinator, clusters: Clusters, clock: Clock
) -> None:
    gone, late = FakeNode(coordinator, "gone"), FakeNode(coordinator, "late")
    gone.beat()
    clock.now += TIMEOUT_S + 1.0
    late.beat()
    assert clusters.look().alive == {"late"}
    # Its next report waits until the node gives up, and so may the one after.
    came_at = clock.now + TIMEOUT_S / 2
    coordinator.watch_backlog(lambda: math.inf, lambda: came_at)
    clock.now = came_at + TIMEOUT_S

    assert clusters.look().alive == {"late"}  # and not the one that was lost before
    clock.now += 1.0
    assert clusters.look().alive == frozenset()


def test_a_node_that_is_not_trusted_any_more_is_placed_nowhere_at_once(
    coordinator: Coordinator, clusters: Clusters, clock: Clock
) -> None:
    for name in ("one", "two"):
        FakeNode(coordinator, name).beat()
    clusters.look().spent.took_s = 100.0

    with coordinator.state.changed:
        Claims(coordinator.state).distrust("one", "it lies")

    assert clusters.look().alive == {"two"}
