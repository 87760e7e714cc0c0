"""Datasets that make room for others on nodes that do what they are told, and how they return."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_protocol.errors import LoadError, NotReadyError, RequestError, require_ready
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.namespace_shares import NamespaceShare
from cache_server.auth.principals import Principal, Role
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.versions.states import State
from cache_server.plan.pinned_version import PinnedVersion
from tests.fake_nodes import (
    FILES,
    LEASE_S,
    Clock,
    FakeNode,
    make_coordinator,
    settle,
    spec,
    state,
)

SIZE = FILES * 100  # of a dataset on the fake nodes; what is estimated before is more


@pytest.fixture
def node(coordinator: Coordinator) -> FakeNode:
    """With room for two datasets, and not for three."""
    node = FakeNode(coordinator, "one", limit_bytes=int(2.9 * SIZE))
    node.beat()
    return node


def load(coordinator: Coordinator, node: FakeNode, source: Path, *names: str) -> None:
    """Loads datasets of unknown size: the nodes ask for room, if they need it."""
    for name in names:
        coordinator.create(spec(source, name, filter="row < 1000"))
        settle(node)
        assert state(coordinator, name) == "ready"


def unread(clock: Clock) -> None:
    """Ends every lease."""
    clock.now += LEASE_S + 1


def ask_room(node: FakeNode, dataset: str, num_bytes: int) -> str:
    """Asks as a load does that has no room; then the node removes what it is told."""
    request = node.report()
    request.lacks.add(dataset=dataset, num_bytes=num_bytes)
    (no_room,) = node.coordinator.heartbeat(request, by=node.by).no_room
    settle(node)
    return no_room


def sized(coordinator: Coordinator, source: Path, name: str) -> pb.DatasetInfo:
    """Asks for a load whose size is known before."""
    return coordinator.create(spec(source, name))


def test_a_load_that_does_not_fit_evicts_what_nobody_has_read_for_a_lease(
    coordinator: Coordinator, node: FakeNode, source: Path, clock: Clock
) -> None:
    load(coordinator, node, source, "old", "new")
    with pytest.raises(LoadError, match=r"'new' of .* was read or loaded in the last 100 s"):
        sized(coordinator, source, "third")

    unread(clock)
    node.beat()
    coordinator.get("new", lease=True)  # someone reads it
    sized(coordinator, source, "third")
    settle(node)

    assert [state(coordinator, name) for name in ("old", "new", "third")] == [
        "evicted",
        "ready",
        "ready",
    ]
    assert not node.holds("old")
    assert coordinator.evictions.num_evicted == 1 and coordinator.evictions.bytes_evicted == SIZE


def test_a_forecast_says_what_would_go_and_evicts_nothing(
    coordinator: Coordinator, node: FakeNode, source: Path, clock: Clock
) -> None:
    load(coordinator, node, source, "old", "new")
    unread(clock)
    node.beat()

    forecast = coordinator.plan(spec(source, "third"))
    coordinator.keep("new", pinned=True)
    coordinator.keep("old", pinned=True)
    refused = coordinator.plan(spec(source, "third"))

    assert forecast.refusal == "" and forecast.evicts_datasets == len(forecast.evicts) >= 1
    assert forecast.evicts_bytes == SIZE * forecast.evicts_datasets
    assert "'old' of 800 B is pinned" in refused.refusal and not refused.evicts
    assert state(coordinator, "old") == state(coordinator, "new") == "ready"


def test_an_evicted_dataset_is_loaded_again_when_it_is_read_and_not_when_it_is_listed(
    coordinator: Coordinator, node: FakeNode, source: Path, clock: Clock
) -> None:
    load(coordinator, node, source, "old", "new")
    before = coordinator.get("old")
    unread(clock)
    node.beat()
    assert ask_room(node, "third", 2 * SIZE) == ""

    coordinator.datasets()
    with pytest.raises(NotReadyError, match="was evicted to make room: it loads again"):
        require_ready(coordinator.get("old"))
    assert coordinator.get("old", lease=True).state == pb.DATASET_STATE_LOADING
    assert coordinator.get("old").progress.shards_done == 0
    settle(node)

    after = coordinator.get("old", before.fingerprint)
    assert after.state == pb.DATASET_STATE_READY
    assert [s.rows for s in after.shards] == [s.rows for s in before.shards]
    assert after.log == before.log  # a first epoch can be resumed


def test_a_load_of_the_same_spec_brings_an_evicted_dataset_back(
    coordinator: Coordinator, node: FakeNode, source: Path, clock: Clock
) -> None:
    load(coordinator, node, source, "old")
    unread(clock)
    node.beat()
    assert ask_room(node, "third", 1) == ""
    assert state(coordinator, "old") == "evicted"

    assert coordinator.create(spec(source, "old", filter="row < 1000")).state == (
        pb.DATASET_STATE_LOADING
    )
    settle(node)

    assert state(coordinator, "old") == "ready"


def test_files_of_a_node_that_was_away_do_not_count_once_it_was_told_to_remove_them(
    coordinator: Coordinator, node: FakeNode, source: Path, clock: Clock
) -> None:
    load(coordinator, node, source, "old")
    unread(clock)
    node.beat()
    request = node.report()
    request.lacks.add(dataset="third", num_bytes=SIZE)
    assert [gone.dataset for gone in coordinator.heartbeat(request).gone] == ["old"]
    assert [gone.dataset for gone in coordinator.heartbeat(node.restart().report()).gone] == ["old"]

    coordinator.get("old", lease=True)  # the node is removing the files now

    assert state(coordinator, "old") == "loading"


def test_what_is_evicted_stays_so_over_a_restart_of_the_coordinator(
    tmp_path: Path, coordinator: Coordinator, node: FakeNode, source: Path, clock: Clock
) -> None:
    load(coordinator, node, source, "old")
    coordinator.keep("old", priority=-3)
    coordinator.get("old", lease=True)
    unread(clock)
    node.beat()
    log = coordinator.get("old").log
    assert ask_room(node, "third", 1) == ""
    coordinator.close()

    again = make_coordinator(tmp_path, clock)
    node = node.restart(again)
    settle(node)

    assert state(again, "old") == "evicted" and not node.holds("old")
    (info,) = again.datasets()
    assert info.priority == -3 and info.HasField("last_read_s") and info.log == log
    again.get("old", lease=True)
    settle(node)
    assert state(again, "old") == "ready"


def test_written_rows_unfinished_loads_and_pinned_datasets_stay(
    coordinator: Coordinator,
    node: FakeNode,
    source: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load(coordinator, node, source, "pinned", "written")
    coordinator.keep("pinned", pinned=True)
    coordinator.create(spec(source, "loading", filter="row < 1000"))
    unread(clock)
    node.beat(load=())
    monkeypatch.setattr(
        PinnedVersion, "is_written", property(lambda self: self.key.dataset == "written")
    )

    why_not = ask_room(node, "third", 10)

    assert "'pinned' of 800 B is pinned" in why_not
    assert "'written' of 800 B was written, so no source has its rows" in why_not
    assert all(v.state is not State.EVICTED for v in coordinator.state.versions.values())


def test_a_reader_of_an_evicted_dataset_is_told_what_holds_the_room_until_there_is_some(
    coordinator: Coordinator, node: FakeNode, source: Path, clock: Clock
) -> None:
    load(coordinator, node, source, "old")
    unread(clock)
    node.beat()
    assert ask_room(node, "third", 1) == ""
    load(coordinator, node, source, "busy", "busier")

    with pytest.raises(NotReadyError, match=r"'old' was evicted, and waits for room: .*'bus") as e:
        require_ready(coordinator.get("old", lease=True))
    assert len(str(e.value)) <= 600

    coordinator.delete("busy")
    clock.now += 2  # the next look
    assert coordinator.get("old", lease=True).state == pb.DATASET_STATE_LOADING


def test_nobody_learns_the_names_of_datasets_that_they_cannot_see(
    coordinator: Coordinator, node: FakeNode, source: Path, clock: Clock
) -> None:
    load(coordinator, node, source, "secret/old", "secret/new")
    unread(clock)
    node.beat()
    admin = coordinator.plan(spec(source, "theirs/third"))
    stranger = Principal("stranger", "theirs", frozenset({Role.WRITER}))
    found = coordinator.plan(spec(source, "theirs/third"), by=stranger)
    coordinator.keep("secret/old", pinned=True)
    coordinator.keep("secret/new", pinned=True)
    why_not = ask_room(node, "theirs/third", 10)

    assert not found.evicts and found.evicts_datasets == len(admin.evicts) >= 1
    assert "secret" not in why_not and "2 of other namespaces may not go" in why_not


def test_a_namespace_makes_room_for_itself_beyond_its_largest_size(
    tmp_path: Path, clock: Clock, source: Path
) -> None:
    coordinator = make_coordinator(
        tmp_path, clock, shares=[NamespaceShare("team", guaranteed=100, largest=2 * SIZE)]
    )
    node = FakeNode(coordinator, "one")  # without a limit
    node.beat()
    load(coordinator, node, source, "team/a", "team/b", "other/c")

    with pytest.raises(LoadError, match=r"namespace 'team' may hold 1600; .*'team/"):
        sized(coordinator, source, "team/d")
    unread(clock)
    node.beat()
    sized(coordinator, source, "team/d")
    settle(node)

    evicted = [
        info.spec.name
        for info in coordinator.datasets()
        if state(coordinator, info.spec.name) == "evicted"
    ]
    assert evicted and all(name.startswith("team/") for name in evicted)
    shares = {share.namespace: share for share in coordinator.shares()}
    assert shares["team"].num_bytes <= shares["team"].largest_bytes == 2 * SIZE
    assert shares["other"].num_bytes == SIZE and not shares["other"].HasField("largest_bytes")


def test_a_priority_out_of_range_is_refused_with_the_value(
    coordinator: Coordinator, node: FakeNode, source: Path
) -> None:
    load(coordinator, node, source, "old")

    with pytest.raises(RequestError, match="got 1001"):
        coordinator.keep("old", priority=1001)


def test_a_recalled_load_without_room_waits_and_a_new_one_fails(
    coordinator: Coordinator, node: FakeNode, source: Path, clock: Clock
) -> None:
    load(coordinator, node, source, "old")
    unread(clock)
    node.beat()
    assert ask_room(node, "third", 1) == ""
    for _ in range(8):  # no node was lost or came back lately
        clock.now += 9
        node.beat()
    coordinator.get("old", lease=True)
    coordinator.create(spec(source, "new", filter="row < 1000"))

    for dataset, waits in (("old", True), ("new", False)):
        request = node.report()
        request.lacks.add(dataset=dataset, num_bytes=10**6)
        answer = coordinator.heartbeat(request)
        assert answer.no_room[0] and answer.room_may_come is waits
