"""From the first sealed shard to a dataset that is ready, and how far that is meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from cache_protocol.errors import NotReadyError, require_ready
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import ANYONE
from cache_server.coordination import readers
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.holdings import holder_checks
from cache_server.coordination.versions import forecast as forecast_module
from tests.conftest import write_numbered
from tests.fake_nodes import (
    FILES,
    LEASE_S,
    SHARDS,
    TIMEOUT_S,
    Clock,
    FakeNode,
    settle,
    spec,
    state,
)


def test_row_ids_are_fixed_only_when_every_shard_is_sealed(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source, filter="label > 2"))  # so that no footer tells the rows
    node.rows_of = {index: index for index in SHARDS}  # 0, 1, 2, ... rows

    for index in range(FILES - 1):
        node.beat(load=[index])
        answer = coordinator.heartbeat(node.report())
        assert not answer.datasets[0].rows_fixed
        assert coordinator.get("table").num_rows == 0
    node.beat(load=[FILES - 1])
    (desired,) = coordinator.heartbeat(node.report()).datasets

    assert desired.rows_fixed
    assert [shard.row_start for shard in desired.shards] == [0, 0, 1, 3, 6, 10, 15, 21]
    assert desired.num_rows == 28


def test_a_dataset_is_ready_only_when_live_nodes_report_every_shard_with_its_row_ids(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    settle(one, two)
    coordinator.create(spec(source))

    one.beat()
    two.beat()  # both have loaded, neither has said so
    assert state(coordinator) == "loading"
    one.beat()
    two.beat()  # both have reported: the ids are fixed, and the second node gets them
    assert state(coordinator) == "loading"
    two.beat()
    assert state(coordinator) == "loading"
    one.beat()
    assert state(coordinator) == "loading"  # it has the ids, but does not serve them yet
    one.beat()

    assert state(coordinator) == "ready"
    info = coordinator.get("table")
    assert [(s.rows.start, s.rows.stop) for s in info.shards] == [
        (5 * index, 5 * index + 5) for index in range(FILES)
    ]


def test_progress_says_how_far_a_load_is(coordinator: Coordinator, source: Path) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    node.beat(load=[0, 1])
    request = node.report()
    request.datasets[0].shards.add(index=2, rows_loaded=3)

    coordinator.heartbeat(request)

    info = coordinator.get("table")
    assert info.progress == pb.LoadProgress(
        shards_done=2, shards_total=8, rows_done=13, estimated_rows=40, bytes_done=200
    )
    with pytest.raises(NotReadyError, match=r"'table' is loading: 2 of 8 shards, 13 rows"):
        require_ready(info)


def test_a_source_without_a_row_group_is_ready_without_a_node(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    info = coordinator.create(spec(write_numbered(tmp_path / "empty", 0)))

    assert info.state == pb.DATASET_STATE_READY
    assert info.num_rows == 0


def test_the_rate_of_a_load_is_that_of_the_nodes_that_had_something_to_read(
    coordinator: Coordinator, source: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast_module, "_FEWEST_RATED_BYTES", 1)
    nodes = [FakeNode(coordinator, f"node-{index}") for index in range(2 * FILES)]
    settle(*nodes)

    for filter in (None, "row < 3"):  # what it drops was read, too
        coordinator.create(spec(source, filter=filter))
        clock.now += 4.0
        settle(*nodes)

        assert state(coordinator) == "ready"
        foretold = coordinator.plan(spec(source, "another", filter=filter))
        assert foretold.load_s == pytest.approx(4.0)


# -- watching --------------------------------------------------------------------------------------


def test_watching_gives_the_present_state_at_once_and_ends_when_ready(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    info = coordinator.create(spec(source))
    watch = coordinator.watch("table", info.fingerprint, lambda: True)

    assert next(watch).state == pb.DATASET_STATE_LOADING
    settle(node)
    assert next(watch).state == pb.DATASET_STATE_READY
    assert list(watch) == []


def test_a_watch_lists_the_shards_only_when_the_load_has_ended(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    watch = coordinator.watch("table", "", lambda: True)

    assert not next(watch).shards
    settle(node)
    assert next(watch).shards


def test_a_change_between_two_looks_is_told_at_once(
    coordinator: Coordinator, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = FakeNode(coordinator, "one")
    info = coordinator.create(spec(source))
    monkeypatch.setattr(readers, "_WATCH_S", 60.0)
    patient = readers.Readers(coordinator.state, coordinator.evictions, 60.0, threading.Event())
    watch = patient.watch("table", info.fingerprint, lambda: True)
    next(watch)
    settle(node)  # while the watcher is busy
    began = time.monotonic()
    assert next(watch).state == pb.DATASET_STATE_READY
    assert time.monotonic() - began < 30.0


def test_a_watch_ends_with_its_caller(coordinator: Coordinator, source: Path) -> None:
    coordinator.create(spec(source))
    watching = [True]
    watch = coordinator.watch("table", "", lambda: watching[0])
    next(watch)

    watching[0] = False

    assert list(watch) == []


def test_a_shard_that_was_made_anew_while_it_was_read_back_counts_when_that_ends(
    tmp_path: Path, source: Path, clock: Clock
) -> None:
    coordinator = Coordinator(
        Catalogue(tmp_path / "catalogue"), endpoints=pb.CoordinatorEndpoints(),
        heartbeat_interval_s=0.01, node_timeout_s=TIMEOUT_S, lease_s=LEASE_S, clock=clock,
        checks=holder_checks.HolderChecks(5.0),
    )  # fmt: skip
    nodes = {name: FakeNode(coordinator, name, by=ANYONE) for name in ("one", "two")}
    settle(*nodes.values())
    coordinator.create(spec(source))
    settle(*nodes.values())
    for _ in range(2):
        clock.now += 3.0
        for node in nodes.values():
            node.beat()
    check = coordinator.next_check(0)
    assert check is not None and not check.is_first

    node = nodes[check.claim.node_id]
    (key,) = node.sealed
    made = node.sealed[key].pop(check.claim.shard)
    node.beat(load=())
    node.beat()
    node.sealed[key][check.claim.shard] = made
    settle(*nodes.values())
    assert state(coordinator) == "loading"
    coordinator.apply_check(check, holder_checks.Outcome.MATCHES)
    settle(*nodes.values())
    assert state(coordinator) == "ready"
