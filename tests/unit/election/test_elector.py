"""One lease and several nodes, step by step, by a clock that a test moves."""

from __future__ import annotations

from collections.abc import Iterable

from cache_server.election.elector import Elector
from cache_server.election.lease import DURATION_S, RENEW_S, VALID_S, identity
from cache_server.election.objects import ElectionStore
from tests.api_server import ApiServer, Fault
from tests.fake_nodes import Clock


class Candidate:
    """A node.

    Attributes:
        wins: +1 for each win, -1 for each loss.
        holder: the location that it follows; None: it did not look.
        heard: whether the coordinator answers it.
        silent_s: for which the holder before was silent.
    """

    def __init__(self, objects: ElectionStore, name: str, clock: Clock) -> None:
        self.wins: list[int] = []
        self.holder: str | None = None
        self.heard = False
        self.elector = Elector(
            objects,
            identity(f"{name}:1", "p"),
            is_heard=lambda: self.heard,
            on_holder=lambda location: setattr(self, "holder", location),
            on_win=self._win,
            on_loss=lambda: self.wins.append(-1),
            clock=clock,
        )

    def _win(self, silent_s: float) -> None:
        self.wins.append(1)
        self.silent_s = silent_s

    def step(self) -> float:
        self.holder = None
        return self.elector.step()


def candidates(objects: ElectionStore, clock: Clock, names: Iterable[str]) -> list[Candidate]:
    return [Candidate(objects, name, clock) for name in names]


def test_one_node_leads_and_the_others_follow_it(objects: ElectionStore) -> None:
    clock = Clock()
    a, b, c = candidates(objects, clock, "abc")
    assert a.step() == RENEW_S
    for follower in (b, c):
        follower.step()
        assert (follower.holder, follower.wins) == ("a:1", [])
    assert a.elector.leads() and not b.elector.leads()


def test_a_leader_that_renews_keeps_the_lease(objects: ElectionStore) -> None:
    clock = Clock()
    a, b = candidates(objects, clock, "ab")
    for _ in range(20):
        a.step()
        b.step()
        clock.now += RENEW_S
    assert (a.wins, b.wins) == ([1], [])


def test_a_leader_that_is_gone_is_replaced_once_its_lease_is_over(objects: ElectionStore) -> None:
    clock = Clock()
    a, b, c = candidates(objects, clock, "abc")
    for each in (a, b, c):
        each.step()
    clock.now += DURATION_S - 0.5
    assert b.step() <= 0.5  # it looks again when the lease is over
    assert not a.elector.leads() and b.wins == []
    clock.now += 0.5
    b.step()
    c.step()
    assert (b.wins, c.wins, c.holder) == ([1], [], "b:1")
    assert (a.silent_s, b.silent_s) == (0.0, DURATION_S)


def test_a_leader_that_was_paused_does_not_lead_when_it_wakes(objects: ElectionStore) -> None:
    clock = Clock()
    a, b = candidates(objects, clock, "ab")
    a.step()
    b.step()
    clock.now += DURATION_S
    b.step()
    assert not a.elector.leads()
    a.step()
    assert (a.wins, a.holder, b.wins) == ([1, -1], "b:1", [1])
    assert b.elector.leads()


def test_a_leader_whose_lease_is_deleted_begins_again(
    objects: ElectionStore, api: ApiServer
) -> None:
    """An operator who puts back a catalogue does so: the next leader reads it."""
    (a,) = candidates(objects, Clock(), "a")
    a.step()
    (lease,) = api.store.find("leases", "team")
    api.store.delete("leases", lease["metadata"]["name"], "team")
    a.step()
    assert (a.wins, a.elector.leads()) == ([1, -1], False)
    a.step()
    assert (a.wins, a.elector.leads()) == ([1, -1, 1], True)


def test_a_leader_that_cannot_reach_the_lease_stops_before_another_one_begins(
    objects: ElectionStore, api: ApiServer
) -> None:
    clock = Clock()
    a, b = candidates(objects, clock, "ab")
    a.step()
    b.step()
    api.faults.append(Fault(503, resource="leases"))
    clock.now += VALID_S
    assert not a.elector.leads()
    a.step()
    assert a.wins == [1, -1]
    api.faults.clear()
    b.step()
    assert b.wins == []
    clock.now += DURATION_S - VALID_S
    b.step()
    assert b.wins == [1]


def test_a_renewal_without_an_answer_is_repeated(objects: ElectionStore, api: ApiServer) -> None:
    clock = Clock()
    (a,) = candidates(objects, clock, "a")
    a.step()
    for carried_out in (False, True):
        clock.now += RENEW_S
        api.faults.append(Fault(0, verb="update", times=1, carried_out=carried_out))
        a.step()
        a.step()
    clock.now += VALID_S - 0.1
    assert a.elector.leads() and a.wins == [1]


def test_of_two_nodes_that_take_the_lease_at_once_one_gets_it(
    objects: ElectionStore, api: ApiServer
) -> None:
    clock = Clock()
    a, b = candidates(objects, clock, "ab")

    def overtake(number: int) -> None:
        api.on_write = lambda number: None
        b.step()

    a.step()
    clock.now += DURATION_S
    a.elector.resign()
    api.on_write = overtake  # a frees the lease, and b is faster than its next look
    a.step()
    assert (a.wins, b.wins, a.holder) == ([1, -1], [1], "b:1")


def test_a_node_that_resigns_lets_others_try_first(objects: ElectionStore) -> None:
    clock = Clock()
    a, b = candidates(objects, clock, "ab")
    a.step()
    b.step()
    a.elector.resign()
    a.step()
    assert (a.wins, a.holder) == ([1, -1], "")
    b.step()
    assert b.wins == [1]
    clock.now += DURATION_S
    a.step()  # the first look at the lease of b
    assert a.holder == "b:1"


def test_a_node_that_hears_its_coordinator_asks_the_api_server_nothing(
    objects: ElectionStore, api: ApiServer
) -> None:
    clock = Clock()
    a, b = candidates(objects, clock, "ab")
    a.step()
    b.heard = True
    asked = len(api.calls)
    b.step()
    assert len(api.calls) == asked and b.holder is None
