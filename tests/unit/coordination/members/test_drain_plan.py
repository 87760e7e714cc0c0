"""Where the shards of a drained node go: a table of shards and rooms."""

from __future__ import annotations

import pytest

from cache_server.coordination.members.drain_plan import DrainPlan, LeavingShard, plan_drain
from cache_server.shards.version_key import VersionKey

KEY = VersionKey("table", "f")
Room = dict[str, int | None]


def shard(index: int, num_bytes: int, *homes: str, held: str = "") -> LeavingShard:
    return LeavingShard(KEY, index, num_bytes, homes, frozenset(held.split()))


@pytest.mark.parametrize(
    ("shards", "room", "moves"),
    [
        ([], {}, {}),
        ([], {"b": 0}, {}),
        ([shard(0, 10, "b")], {"b": None}, {}),
        ([shard(0, 10, "b"), shard(1, 10, "c")], {"b": 10, "c": 10}, {}),
        # Where another node holds it, nothing is copied.
        ([shard(0, 10, "b", held="b")], {"b": 0}, {}),
        # The named node is full: the one with the most room takes it.
        ([shard(0, 10, "b")], {"b": 9, "c": 10, "d": 11}, {0: ("d",)}),
        ([shard(0, 10, "b"), shard(1, 10, "b")], {"b": 10, "c": None}, {1: ("c",)}),
        # A large shard elsewhere takes no room that a small one was to have.
        ([shard(0, 10, "b"), shard(1, 8, "c")], {"b": 0, "c": 10, "d": 10}, {0: ("d",)}),
        # Two replicas never meet on a node.
        ([shard(0, 10, "b", "c", held="b")], {"b": 90, "c": 9, "d": 10}, {0: ("b", "d")}),
        ([shard(0, 10, "c", "d", held="b")], {"b": 90, "c": 10, "d": 10}, {}),
    ],
)  # fmt: skip
def test_shards_go_where_they_are_placed_and_else_where_most_room_is(
    shards: list[LeavingShard], room: Room, moves: dict[int, tuple[str, ...]]
) -> None:
    assert plan_drain(shards, room) == DrainPlan({KEY: moves} if moves else {})


def test_a_shard_that_does_not_fit_at_its_home_goes_to_another_zone_than_its_replica() -> None:
    shards = [shard(0, 10, "a1", "b1", held="a1")]
    zones = {"a1": "a", "a2": "a", "b1": "b", "b2": "b"}

    for room, home in (
        ({"a1": 0, "a2": 99, "b1": 9, "b2": 10}, "b2"),
        ({"a1": 0, "a2": 99, "b1": 9, "b2": 9}, "a2"),  # one zone is better than none
    ):
        assert plan_drain(shards, dict(room), zones) == DrainPlan({KEY: {0: ("a1", home)}})


@pytest.mark.parametrize(
    ("shards", "room", "words"),
    [
        ([shard(0, 10, "b")], {}, "no other node"),
        ([shard(0, 10, "b")], {"b": 9}, "1 shards of 10 bytes, the largest of 10"),
        ([shard(0, 10, "b")], {"b": 9, "c": -1}, "b has room for 9, c has room for 0"),
        ([shard(0, 6, "b"), shard(1, 6, "b")], {"b": 11, "c": 5}, "2 shards of 12 bytes"),
        ([shard(0, 10, "b", "c", held="b")], {"b": 90, "c": 9}, "c has room for 9"),
    ],
)
def test_a_drain_that_does_not_fit_says_which_node_has_how_much_room(
    shards: list[LeavingShard], room: Room, words: str
) -> None:
    plan = plan_drain(shards, room)
    assert words in plan.why_not and not plan.moves and len(plan.why_not) < 600


def test_every_order_of_the_shards_gives_the_same_plan() -> None:
    shards = [shard(index, 10 + index % 3, "b") for index in range(9)]
    room: Room = {"b": 20, "c": 40, "d": 60}
    assert plan_drain(shards, room).moves
    assert plan_drain(shards, room) == plan_drain(reversed(shards), room)
