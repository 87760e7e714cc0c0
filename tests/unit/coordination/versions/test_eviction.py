"""What goes when there is no room: a table of thousands of made-up caches, and some by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cache_server.coordination.versions.eviction import (
    EvictionPlan,
    Resident,
    Room,
    chance_of,
    plan_eviction,
    worth_of,
)
from cache_server.shards.version_key import VersionKey

DAY_S = 86_400.0
NODES, NAMESPACES = ("one", "two", "three"), ("a", "b", "c")


def resident(name: str, num_bytes: int = 10, **others: object) -> Resident:
    return Resident(VersionKey(name, "f"), "a", {"one": num_bytes}, num_bytes, **others)  # type: ignore[arg-type]


def goes(plan: EvictionPlan) -> list[str]:
    return [each.key.dataset for each in plan.goes]


def made_up(seed: int) -> tuple[list[Resident], Room, dict[str, int]]:
    """A cache with up to ten versions, what is lacking, and what is guaranteed."""
    chosen = random.Random(seed)
    residents = []
    for number in range(chosen.randrange(11)):
        on = {node: chosen.randrange(20) for node in chosen.sample(NODES, chosen.randrange(1, 4))}
        residents.append(
            Resident(
                VersionKey(f"d{number}", "f"),
                chosen.choice(NAMESPACES),
                on,
                sum(on.values()) + chosen.randrange(5),  # some share files with others
                chosen.random(),
                chosen.choice([0, 0, 0, -1, 3]),
                chosen.choice(["", "", "", "is pinned"]),
            )
        )
    lacks = {node: chosen.randrange(-5, 30) for node in NODES if chosen.random() < 0.6}
    room = Room(chosen.choice(NAMESPACES), lacks, chosen.choice([0, 0, chosen.randrange(40)]))
    guaranteed = {name: chosen.randrange(40) for name in NAMESPACES if chosen.random() < 0.5}
    return residents, room, guaranteed


def freed(plan: EvictionPlan, room: Room) -> tuple[Counter[str], int]:
    on: Counter[str] = Counter()
    for each in plan.goes:
        on.update(each.on)
    return on, sum(each.num_bytes for each in plan.goes if each.namespace == room.namespace)


def covers(plan: EvictionPlan, room: Room) -> bool:
    on, of_namespace = freed(plan, room)
    fits = all(on[node] >= lack for node, lack in room.on.items())
    return fits and of_namespace >= room.of_namespace


@pytest.mark.parametrize("first", range(0, 4000, 1000))
def test_enough_goes_or_nothing_and_never_what_is_kept_or_guaranteed(first: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + 1000):
        residents, room, guaranteed = made_up(seed)
        plan = plan_eviction(residents, room, guaranteed)
        outcomes["nothing" if not plan.goes else "some"] += 1
        outcomes["refused"] += not plan.is_enough

        assert not any(each.kept_because for each in plan.goes), seed
        assert plan.is_enough == covers(plan, room) or room.is_there, seed
        assert plan.is_enough or not plan.goes, seed
        assert all(each.kept_because for each in plan.stays), seed
        held: Counter[str] = Counter()
        for each in residents:
            held[each.namespace] += each.num_bytes
        left = held - Counter({each.namespace: 0 for each in residents})
        for each in plan.goes:
            left[each.namespace] -= each.num_bytes
        for name in {each.namespace for each in plan.goes} - {room.namespace}:
            assert left[name] >= guaranteed.get(name, 0), seed
        for each in plan.goes:  # all of it is needed
            fewer = EvictionPlan(tuple(other for other in plan.goes if other is not each))
            assert not covers(fewer, room), seed
        assert plan == plan_eviction(random.Random(seed).sample(residents, len(residents)), room,
                                     guaranteed) or len(plan.stays) > 1, seed  # fmt: skip
    assert min(outcomes["nothing"], outcomes["some"], outcomes["refused"]) > 50


def test_a_refusal_is_right_everything_that_may_go_is_not_enough() -> None:
    for seed in range(2000):
        residents, room, _ = made_up(seed)
        if not plan_eviction(residents, room).is_enough:
            may_go = tuple(each for each in residents if not each.kept_because)
            assert not covers(EvictionPlan(may_go), room), seed


def test_what_is_worth_least_goes_and_lower_priorities_before_it() -> None:
    cache = [
        resident("dear", worth=3.0),
        resident("cheap", worth=1.0),
        resident("low", worth=2.0, priority=-1),
    ]

    assert goes(plan_eviction(cache, Room("a", {"one": 10}))) == ["low"]
    assert goes(plan_eviction(cache, Room("a", {"one": 20}))) == ["low", "cheap"]


def test_small_ones_stay_if_a_larger_one_that_goes_is_enough() -> None:
    cache = [resident("small", 1, worth=1.0), resident("large", 100, worth=2.0)]

    assert goes(plan_eviction(cache, Room("a", {"one": 50}))) == ["large"]


def test_others_leave_what_is_guaranteed_and_the_namespace_itself_takes_it_last() -> None:
    mine, theirs = resident("mine", worth=0.0), resident("theirs", worth=9.0)
    theirs = Resident(theirs.key, "b", theirs.on, theirs.num_bytes, theirs.worth)

    refused = plan_eviction([mine], Room("b", {"one": 5}), {"a": 10})
    assert not refused.is_enough and "guaranteed" in refused.stays[0].kept_because
    assert goes(plan_eviction([mine], Room("a", {"one": 5}), {"a": 10})) == ["mine"]
    assert goes(plan_eviction([mine, theirs], Room("a", {"one": 5}), {"a": 10})) == ["theirs"]


def test_a_namespace_beyond_its_largest_size_makes_its_own_room() -> None:
    other = Resident(VersionKey("b/other", "f"), "b", {"one": 50}, 50)
    cache = [resident("mine", worth=5.0), other]

    assert goes(plan_eviction(cache, Room("a", of_namespace=5))) == ["mine"]
    assert not plan_eviction([other], Room("a", of_namespace=5)).is_enough


def test_what_was_read_more_often_and_later_is_expected_more() -> None:
    now = 100 * DAY_S
    daily = chance_of([now - days * DAY_S for days in (3, 2, 1)], now)

    assert daily > chance_of([now - DAY_S], now) > chance_of([now - 30 * DAY_S], now) > 0
    assert daily > chance_of([now - days * DAY_S for days in (33, 32, 31)], now)


def test_what_was_read_each_hour_and_then_never_is_over_before_what_is_read_each_week() -> None:
    now = 100 * DAY_S
    weekly = [now - days * DAY_S for days in (24, 17, 10, 3)]
    hourly = [now - 3 * DAY_S - hours * 3600 for hours in range(8, 0, -1)]

    assert chance_of(weekly, now) > chance_of(hourly, now) > 0
    assert chance_of(hourly, hourly[-1] + 3600) > chance_of(weekly, now)


def test_what_was_never_read_is_not_expected_and_no_clock_breaks_it() -> None:
    now = 100 * DAY_S
    assert chance_of([], now) == 0.0
    assert chance_of([now + DAY_S], now) > 0


def test_a_dear_load_is_worth_more_a_byte_and_one_of_unknown_time_counts_its_bytes() -> None:
    assert worth_of(100.0, 1000, 1.0) > worth_of(10.0, 1000, 1.0) > worth_of(10.0, 2000, 1.0)
    assert worth_of(0.0, 10**9, 2.0) == 2 * worth_of(0.0, 10**6, 1.0) > 0
