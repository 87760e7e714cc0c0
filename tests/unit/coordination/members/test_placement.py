"""Which nodes hold which shards, and how many nodes are enough."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_server.coordination.members.placement import (
    bytes_by_node,
    desired_shards,
    nodes_needed,
    place,
    shards_by_node,
)

quick = settings(deadline=None, max_examples=100)

clusters = st.integers(1, 9).map(lambda count: [f"node-{i}" for i in range(count)])
fingerprints = st.text("0123456789abcdef", min_size=1, max_size=8)
counts = st.integers(0, 40)
replicas = st.integers(1, 5)


def loads(placement: Sequence[Sequence[str]]) -> Counter[str]:
    return Counter(node for homes in placement for node in homes)


# -- shards -> nodes -----------------------------------------------------------------------------


@quick
@given(fingerprints, counts, clusters, replicas)
def test_every_shard_gets_as_many_distinct_homes_as_there_can_be(
    fingerprint: str, num_shards: int, nodes: list[str], wanted: int
) -> None:
    placement = place(fingerprint, num_shards, nodes, wanted)

    assert len(placement) == num_shards
    for homes in placement:
        assert len(homes) == len(set(homes)) == min(wanted, len(nodes))
        assert set(homes) <= set(nodes)


@quick
@given(fingerprints, counts, clusters, replicas, st.randoms())
def test_placement_depends_on_the_names_only(
    fingerprint: str, num_shards: int, nodes: list[str], wanted: int, random: object
) -> None:
    shuffled = [*nodes, nodes[0]]
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    first = place(fingerprint, num_shards, nodes, wanted)

    assert place(fingerprint, num_shards, iter(shuffled), wanted) == first
    assert place(fingerprint, num_shards, nodes, wanted, alive=set(nodes)) == first


@quick
@given(fingerprints, counts, clusters, replicas)
def test_no_node_gets_more_than_its_even_share(
    fingerprint: str, num_shards: int, nodes: list[str], wanted: int
) -> None:
    placement = place(fingerprint, num_shards, nodes, wanted)

    total = num_shards * min(wanted, len(nodes))
    assert max(loads(placement).values(), default=0) <= -(-total // len(nodes))


@quick
@given(fingerprints, st.integers(1, 40), st.integers(2, 9), replicas, st.data())
def test_a_lost_node_moves_its_own_shards_only(
    fingerprint: str, num_shards: int, count: int, wanted: int, data: st.DataObject
) -> None:
    nodes = [f"node-{i}" for i in range(count)]
    lost = data.draw(st.sampled_from(nodes))
    alive = [node for node in nodes if node != lost]

    before = place(fingerprint, num_shards, nodes, wanted)
    after = place(fingerprint, num_shards, nodes, wanted, alive=alive)

    for old, new in zip(before, after, strict=True):
        kept = [node for node in old if node != lost]
        assert list(new[: len(kept)]) == kept
        assert lost not in new
        assert len(new) == min(wanted, len(alive))
        if lost not in old:
            assert new == old


# -- zones ---------------------------------------------------------------------------------------


@st.composite
def zoned(draw: st.DrawFn) -> dict[str, str]:
    """Nodes and their zones; some have none."""
    names = draw(st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=1, max_size=9))
    return {f"node-{i}": zone for i, zone in enumerate(names)}


def zones_of(homes: Sequence[str], zones: Mapping[str, str]) -> Counter[str]:
    return Counter(zones[node] or node for node in homes)


@quick
@given(fingerprints, counts, zoned(), replicas)
def test_replicas_are_spread_evenly_over_as_many_zones_as_there_are(
    fingerprint: str, num_shards: int, zones: dict[str, str], wanted: int
) -> None:
    sizes = zones_of(list(zones), zones)
    copies = min(wanted, len(zones))
    most = next(n for n in range(1, 10) if sum(min(n, s) for s in sizes.values()) >= copies)

    placement = place(fingerprint, num_shards, zones, wanted, zones=zones)

    for homes in placement:
        used = zones_of(homes, zones)
        assert len(homes) == len(set(homes)) == copies
        assert len(used) == min(copies, len(sizes))
        assert max(used.values()) <= most
        for zone, size in sizes.items():
            assert used[zone] >= min(most - 1, size)


@quick
@given(fingerprints, counts, zoned(), replicas)
def test_no_node_gets_more_than_the_smallest_share_that_spreads_over_zones(
    fingerprint: str, num_shards: int, zones: dict[str, str], wanted: int
) -> None:
    sizes = zones_of(list(zones), zones)
    copies = min(wanted, len(zones))
    most = next(n for n in range(1, 10) if sum(min(n, s) for s in sizes.values()) >= copies)

    def holds(share: int) -> bool:
        """Whether the zones hold all replicas with so many shards a node."""
        few = {zone: num_shards * min(most - 1, size) for zone, size in sizes.items()}
        if any(share * size < few[zone] for zone, size in sizes.items()):
            return False
        held = (min(share * size, num_shards * min(most, size)) for zone, size in sizes.items())
        return sum(held) >= num_shards * copies

    share = next(share for share in range(num_shards + 1) if holds(share))

    placement = place(fingerprint, num_shards, zones, wanted, zones=zones)

    assert max(loads(placement).values(), default=0) <= share


@quick
@given(fingerprints, counts, clusters, replicas)
def test_nodes_that_are_all_in_one_zone_or_each_in_another_are_placed_as_without(
    fingerprint: str, num_shards: int, nodes: list[str], wanted: int
) -> None:
    without = place(fingerprint, num_shards, nodes, wanted)

    for zones in ({node: "a" for node in nodes}, {node: f"z{node}" for node in nodes}):
        assert place(fingerprint, num_shards, nodes, wanted, zones=zones) == without


@quick
@given(fingerprints, counts, zoned(), replicas, st.data())
def test_lost_nodes_move_their_own_shards_only_and_into_other_zones(
    fingerprint: str, num_shards: int, zones: dict[str, str], wanted: int, data: st.DataObject
) -> None:
    lost = data.draw(st.sets(st.sampled_from(sorted(zones)), max_size=len(zones) - 1))
    alive = zones.keys() - lost

    before = place(fingerprint, num_shards, zones, wanted, zones=zones)
    after = place(fingerprint, num_shards, zones, wanted, alive=alive, zones=zones)

    for old, new in zip(before, after, strict=True):
        kept = [node for node in old if node in alive]
        assert list(new[: len(kept)]) == kept
        assert len(new) == len(set(new)) == min(wanted, len(alive))
        free = zones_of(sorted(alive), zones).keys() - zones_of(kept, zones).keys()
        fresh = len(zones_of(new, zones)) - len(zones_of(kept, zones))
        assert fresh == min(len(new) - len(kept), len(free))


@quick
@given(fingerprints, st.integers(1, 40), zoned(), replicas, st.data())
def test_shards_of_an_earlier_version_stay_where_the_zones_allow_it(
    fingerprint: str, num_shards: int, zones: dict[str, str], wanted: int, data: st.DataObject
) -> None:
    before = place("another", num_shards, zones, wanted, zones=zones)
    kept = data.draw(st.lists(st.booleans(), min_size=num_shards, max_size=num_shards))
    there = [homes if keeps else () for homes, keeps in zip(before, kept, strict=True)]

    after = place(fingerprint, num_shards, zones, wanted, wanted=there, zones=zones)

    sizes = zones_of(list(zones), zones)
    for homes in after:
        assert len(zones_of(homes, zones)) == min(wanted, len(zones), len(sizes))
    if all(kept):
        assert [set(homes) for homes in after] == [set(homes) for homes in before]


def test_a_node_that_joins_a_zone_takes_shards_of_its_zone_only() -> None:
    zones = {"a1": "a", "a2": "a", "b1": "b", "b2": "b"}

    before = place("f", 300, zones, 2, zones=zones)
    after = place("f", 300, [*zones, "b3"], 2, zones={**zones, "b3": "b"})

    assert [homes.count("a1") for homes in before] == [homes.count("a1") for homes in after]
    assert [loads(after)[f"b{i}"] for i in (1, 2, 3)] == [100, 100, 100]


# -- lost nodes ----------------------------------------------------------------------------------


def test_the_shards_of_a_lost_node_are_spread_over_the_others() -> None:
    nodes = [f"node-{i}" for i in range(5)]
    before = place("f", 500, nodes, 1)

    after = place("f", 500, nodes, 1, alive=nodes[1:])

    moved = Counter(new[0] for old, new in zip(before, after, strict=True) if old != new)
    assert sum(moved.values()) == 100
    assert min(moved.values()) >= 10
    assert len(moved) == 4


def test_many_shards_are_placed_at_once_and_a_lost_node_costs_its_own_shards_only() -> None:
    nodes = [f"node-{index}" for index in range(500)]
    begun = time.process_time()

    before = place("f", 10_000, nodes, 2)
    placed_s = time.process_time() - begun
    after = place("f", 10_000, nodes, 2, alive=nodes[1:])

    assert placed_s < 5
    assert time.process_time() - begun - placed_s < placed_s / 2
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 40


def test_two_datasets_lie_differently() -> None:
    nodes = ["a", "b", "c"]

    assert place("f", 30, nodes, 1) != place("g", 30, nodes, 1)


def test_one_shard_of_many_datasets_is_spread_over_the_nodes() -> None:
    homes = Counter(place(f"fingerprint-{i}", 1, ["a", "b", "c"], 1)[0][0] for i in range(300))

    assert set(homes) == {"a", "b", "c"}
    assert min(homes.values()) > 60


def test_without_nodes_a_shard_has_no_home() -> None:
    assert place("f", 2, [], 3) == ((), ())
    assert place("f", 2, ["a", "b"], 1, alive=()) == ((), ())


# -- what a node should hold ---------------------------------------------------------------------


def desired(
    node: str, placement: Sequence[Sequence[str]], holders: Mapping[int, Collection[str]]
) -> frozenset[int]:
    """What a node should hold that serves what it holds."""
    held = [shard for shard, nodes in holders.items() if node in nodes]
    assigned = shards_by_node(placement).get(node, ())
    serving = {shard: frozenset(nodes) for shard, nodes in holders.items()}
    return desired_shards(assigned, held, placement, serving)


@quick
@given(st.data())
def test_no_shard_is_dropped_before_all_its_new_homes_hold_it(data: st.DataObject) -> None:
    nodes = ["a", "b", "c", "d"]
    num_shards = data.draw(st.integers(0, 6))
    some = st.frozensets(st.sampled_from(nodes))
    placement = [tuple(data.draw(some)) for _ in range(num_shards)]
    holders = {shard: data.draw(some) for shard in range(num_shards)}

    for node in nodes:
        wanted = desired(node, placement, holders)
        for shard, homes in enumerate(placement):
            moved = set(homes) <= holders[shard]
            held = node in holders[shard]
            assert (shard in wanted) == (node in homes or (held and not moved))


def test_a_move_passes_through_both_nodes() -> None:
    placement = [("new",)]

    assert desired("old", placement, {0: {"old"}}) == {0}
    assert desired("new", placement, {0: {"old"}}) == {0}
    assert desired("old", placement, {0: {"old", "new"}}) == frozenset()
    assert desired("new", placement, {0: {"old", "new"}}) == {0}


def test_a_shard_that_no_node_holds_is_loaded_only_by_its_homes() -> None:
    placement = [("a", "b"), ("b",)]

    assert desired("a", placement, {}) == {0}
    assert desired("b", placement, {}) == {0, 1}
    assert desired("c", placement, {}) == frozenset()


# -- bytes -----------------------------------------------------------------------------------------


@quick
@given(fingerprints, counts, clusters, replicas, st.integers(1, 99))
def test_the_bytes_of_all_nodes_are_those_of_all_replicas(
    fingerprint: str, num_shards: int, nodes: list[str], wanted: int, size: int
) -> None:
    placement = place(fingerprint, num_shards, nodes, wanted)
    sizes = [size + shard for shard in range(num_shards)]

    totals = bytes_by_node(placement, sizes)

    assert sum(totals.values()) == sum(sizes) * min(wanted, len(nodes))
    assert set(totals) == set(loads(placement))


def test_a_node_counts_each_of_its_shards_once() -> None:
    assert bytes_by_node([("a", "b"), ("b",), ()], [5, 7, 100]) == {"a": 5, "b": 12}


# -- nodes needed ----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    replicas=st.integers(1, 4),
    limit=st.integers(1, 400),
)
def test_the_needed_nodes_hold_every_replica(sizes: list[int], replicas: int, limit: int) -> None:
    needed = nodes_needed(sizes, replicas, limit)

    if max(sizes) > limit:
        assert needed == 0
        return
    assert replicas <= needed <= len(sizes) * replicas
    names = [f"node-{index}" for index in range(needed)]
    placement = place("fingerprint", len(sizes), names, replicas)
    assert max(bytes_by_node(placement, sizes).values()) <= limit


@pytest.mark.parametrize(
    ("sizes", "replicas", "limit", "needed"),
    [
        ([10] * 10, 1, 100, 1),
        ([10] * 10, 1, 99, 2),
        ([10] * 10, 2, 50, 4),
        ([10] * 10, 3, 10**9, 3),
        ([10] * 10, 1, 10, 10),
        ([10] * 10, 1, 9, 0),
        ([10] * 10, 2, 0, 2),
        ([], 1, 5, 1),
    ],
)
def test_shards_of_one_size_need_as_many_nodes_as_hold_an_even_share(
    sizes: list[int], replicas: int, limit: int, needed: int
) -> None:
    assert nodes_needed(sizes, replicas, limit) == needed


def test_the_nodes_of_many_shards_are_known_at_once() -> None:
    many = [64 * 1024**2] * 20_000
    begun = time.process_time()

    assert nodes_needed(many, 2, 64 * 1024**2 + 1) == 40_000
    assert time.process_time() - begun < 5


# -- shards that another version has ---------------------------------------------------------------


@quick
@given(fingerprints, st.integers(1, 30), st.integers(0, 10), clusters, replicas, st.data())
def test_shards_of_the_version_before_stay_within_the_even_share(
    fingerprint: str,
    num_shards: int,
    added: int,
    nodes: list[str],
    copies: int,
    data: st.DataObject,
) -> None:
    before = place("before", num_shards, nodes, copies)
    wanted: list[Sequence[str]] = list(before)
    for _ in range(added):
        wanted.insert(data.draw(st.integers(0, len(wanted))), ())

    after = place(fingerprint, len(wanted), nodes, copies, wanted=wanted)

    total = len(wanted) * min(copies, len(nodes))
    assert max(loads(after).values(), default=0) <= -(-total // len(nodes))
    assert all(len(set(homes)) == min(copies, len(nodes)) for homes in after)
    moved = sum(bool(wish) and homes != wish for homes, wish in zip(after, wanted, strict=True))
    # At worst the last shards move, to let each shard have distinct nodes.
    assert moved <= len(nodes)
    if added == 0 or min(copies, len(nodes)) == 1:
        assert moved == 0


def test_wishes_for_nodes_that_left_or_are_full_are_no_rule() -> None:
    placed = place("f", 4, ["a", "b"], 1, wanted=[("a",), ("a",), ("a",), ("gone",)])

    assert placed[:2] == (("a",), ("a",))
    assert loads(placed) == {"a": 2, "b": 2}
