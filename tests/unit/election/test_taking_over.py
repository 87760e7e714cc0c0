"""Coordinators of one catalogue, one after the other and, by a pause, at the same time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cache_protocol.errors import NodeUnavailableError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.credentials import NO_CREDENTIALS
from cache_server.coordinating import Coordinating
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.catalogue_store import CatalogueLostError
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.members.membership import REPORT_S
from cache_server.election import elector, lease
from cache_server.election.elected_link import ElectedLink
from cache_server.election.election import Election
from cache_server.election.objects import ElectionStore
from cache_server.election.shared_catalogue import SharedCatalogue
from tests.api_server import ApiServer, Fault
from tests.conftest import write_numbered
from tests.fake_nodes import (
    FILES,
    ROWS_PER_FILE,
    SHARDS,
    TIMEOUT_S,
    Clock,
    FakeNode,
    homes,
    make_coordinator,
    settle,
    spec,
    state,
)
from tests.waiting import wait_until

Lead = Callable[[], Coordinator]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "source", FILES * ROWS_PER_FILE, files=FILES)


@pytest.fixture
def lead(objects: ElectionStore) -> Lead:
    """Makes the coordinator of the next term."""

    def make() -> Coordinator:
        store = SharedCatalogue(objects, lambda: True, lambda: None)
        return make_coordinator(store, Clock())

    return make


def move(coordinator: Coordinator, *nodes: FakeNode) -> None:
    """The nodes report to another coordinator from now on."""
    for node in nodes:
        node.coordinator = coordinator
    settle(*nodes)


def test_the_next_coordinator_serves_the_same_versions_from_what_nodes_report(
    lead: Lead, source: Path
) -> None:
    first = lead()
    nodes = [FakeNode(first, name) for name in ("a", "b", "c")]
    settle(*nodes)
    first.create(spec(source, replicas=2))
    settle(*nodes)
    before, loads = homes(first), [node.loads for node in nodes]
    second = lead()
    left = nodes[1:]  # the first coordinator is lost with its node
    move(second, *left)
    assert state(second) == "ready"
    assert second.get("table").fingerprint == first.get("table").fingerprint
    for of, now in zip(before, homes(second), strict=True):
        assert {*of} - {"a"} <= {*now}
    assert [node.loads for node in left] == loads[1:]


def test_a_coordinator_that_wakes_late_can_neither_load_drop_nor_have_files_removed(
    lead: Lead, source: Path
) -> None:
    stale = lead()
    nodes = [FakeNode(stale, name) for name in ("a", "b")]
    settle(*nodes)
    stale.create(spec(source))
    settle(*nodes)
    current = lead()
    with pytest.raises(CatalogueLostError):
        stale.create(spec(source, "other"))
    with pytest.raises(CatalogueLostError):
        stale.delete("table")
    move(current, *nodes)
    assert state(current) == "ready"
    assert [info.spec.name for info in current.datasets()] == ["table"]
    assert sum(len(node.holds("table")) for node in nodes) == FILES


def test_a_load_goes_on_in_the_next_term(lead: Lead, source: Path) -> None:
    first = lead()
    nodes = [FakeNode(first, name) for name in ("a", "b")]
    settle(*nodes)
    first.create(spec(source))
    nodes[0].beat()
    assert state(first) == "loading"
    second = lead()
    move(second, *nodes)
    assert state(second) == "ready"


def test_nodes_that_were_lost_with_the_coordinator_are_soon_known_to_be(
    objects: ElectionStore, source: Path
) -> None:
    clock = Clock()

    def make(_: Catalogue, term: int) -> Coordinator:
        return make_coordinator(SharedCatalogue(objects, lambda: True, lambda: None), clock)

    with Coordinating(make, NO_CREDENTIALS) as own:
        first = own.begin(Catalogue(Path("unused")))
        a, b, late = (FakeNode(first, name) for name in ("a", "b", "c"))
        settle(a, b, late)
        first.create(spec(source))
        settle(a, b, late)
        own.end()
        second = own.begin(Catalogue(Path("unused")), silent_s=lease.DURATION_S)
        move(second, b)
        clock.now += REPORT_S - 0.1
        move(second, late)
        assert state(second) == "loading"  # a may come
        clock.now += 0.2
        settle(b, late)
        assert state(second) == "ready"
        assert b.holds("table") | late.holds("table") == SHARDS


def test_a_lost_coordinator_is_followed_no_more(lead: Lead) -> None:
    leads = True
    own = Coordinating(lambda catalogue, term: lead(), NO_CREDENTIALS, lambda: leads)
    link = ElectedLink(own, NO_CREDENTIALS)
    with pytest.raises(NodeUnavailableError, match="elect a coordinator"):
        link.datasets()
    with own:
        own.begin(Catalogue(Path("unused")))
        assert link.datasets() == []
        leads = False
        with pytest.raises(NodeUnavailableError, match="elect a coordinator"):
            link.datasets()
        with pytest.raises(NodeUnavailableError, match="does not coordinate the cache now"):
            own.required()


def test_the_answer_of_an_earlier_term_is_refused(tmp_path: Path) -> None:
    """It comes late, of a coordinator that was paused."""
    terms = iter([2, 1])

    def make(catalogue: Catalogue, term: int) -> Coordinator:
        return make_coordinator(
            tmp_path / str(term), Clock(), endpoints=pb.CoordinatorEndpoints(term=term)
        )

    own = Coordinating(make, NO_CREDENTIALS)
    link = ElectedLink(own, NO_CREDENTIALS)
    with own:
        request = FakeNode(own.begin(Catalogue(tmp_path / "c"), next(terms)), "a").report()
        assert link.heartbeat(request).coordinator.term == 2
        assert link.is_heard()
        own.end()
        own.begin(Catalogue(tmp_path / "c"), next(terms))
        with pytest.raises(CatalogueLostError):
            link.heartbeat(request)
        assert not link.is_heard()


def test_a_cache_has_one_coordinator_after_another_in_real_time(
    objects: ElectionStore, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("DURATION_S", 1.0), ("VALID_S", 0.8), ("RENEW_S", 0.2), ("LOOK_S", 0.1)):
        monkeypatch.setattr(elector, name, value)

    def make(catalogue: Catalogue, term: int) -> Coordinator:
        endpoints = pb.CoordinatorEndpoints(control_location=f"127.0.0.1:{term}", term=term)
        return Coordinator(
            catalogue, endpoints=endpoints, heartbeat_interval_s=0.1, node_timeout_s=TIMEOUT_S
        )

    elections = [
        Election(objects, lease.identity(f"127.0.0.1:{n}", "p"), make, NO_CREDENTIALS)
        for n in range(3)
    ]

    def leaders() -> list[Election]:
        return [each for each in elections if each.own.coordinator is not None]

    try:
        for each in elections:
            each.start(lambda: None)
        for _ in range(2):
            (first,) = wait_until(leaders, 10.0, "a coordinator")
            assert first.own.required().datasets() == []
            first.close()  # it frees the lease
            elections.remove(first)
            assert first.own.coordinator is None
        (last,) = wait_until(leaders, 10.0, "the last coordinator")
        # Another process takes the catalogue over.
        SharedCatalogue(objects, lambda: True, lambda: None)
        with pytest.raises(CatalogueLostError):
            last.own.required().state.catalogue.write_members(["a"])
        wait_until(lambda: not leaders(), 10.0, "the end of its lead")
        wait_until(leaders, 10.0, "its next lead")

        earlier = last.own.required()
        api.faults.append(Fault(503, resource="leases"))
        wait_until(lambda: not leaders(), 10.0, "the end of a lead that cannot be renewed")
        api.faults.clear()
        wait_until(leaders, 10.0, "the lead after it")
        with pytest.raises(CatalogueLostError):  # of a call that still runs
            earlier.state.catalogue.write_members(["b"])
        assert leaders() == [last]
        last.own.required().state.catalogue.write_members(["c"])
    finally:
        for each in elections:
            each.close()
    assert objects.read_lease() is not None
