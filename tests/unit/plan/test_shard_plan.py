import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.storage.row_index import row_starts
from cache_server.coordination.placement import bytes_by_node, desired_shards, place
from cache_server.plan.shard_plan import ShardPlan, cut_shards
from cache_server.source.pinned import SourceFile, Split

quick = settings(max_examples=100)

clusters = st.integers(1, 9).map(lambda count: [f"node-{i}" for i in range(count)])
fingerprints = st.text("0123456789abcdef", min_size=1, max_size=8)
counts = st.integers(0, 40)
replicas = st.integers(1, 5)


def split(index: int, size: int, rows: int | None = 1) -> Split:
    return Split(SourceFile("/data/a.parquet", 1000, 0), index, 1000, rows, size)


def loads(placement: Sequence[Sequence[str]]) -> Counter[str]:
    return Counter(node for homes in placement for node in homes)


# -- splits -> shards ----------------------------------------------------------------------------


@quick
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 120))
def test_shards_hold_every_split_once_in_order(sizes: list[int], target: int) -> None:
    splits = [split(index, size) for index, size in enumerate(sizes)]

    shards = cut_shards(iter(splits), target)

    assert [s for shard in shards for s in shard.splits] == splits
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert all(shard.splits for shard in shards)


@quick
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 120))
def test_a_shard_passes_the_target_only_with_a_single_large_split(
    sizes: list[int], target: int
) -> None:
    shards = cut_shards([split(index, size) for index, size in enumerate(sizes)], target)

    for shard in shards:
        assert shard.estimated_bytes <= target or len(shard.splits) == 1
    for left, right in itertools.pairwise(shards):
        assert left.estimated_bytes + right.splits[0].estimated_bytes > target


def test_no_splits_make_no_shards() -> None:
    assert cut_shards([], 100) == ()


def test_a_shard_knows_its_rows_only_when_every_split_does() -> None:
    known, unknown = split(0, 10, rows=3), split(1, 10, rows=None)

    assert ShardPlan(0, (known, known)).max_rows == 6
    assert ShardPlan(0, (known, unknown)).max_rows is None
    assert ShardPlan(0, (split(0, 1, rows=0),)).max_rows == 0


def test_a_split_is_named_by_its_file_and_its_part() -> None:
    file = SourceFile("/data/a.parquet", 10, 0)

    assert str(Split(file, 0, 1, 5, 100)) == "/data/a.parquet"
    assert str(Split(file, 1, 3, 5, 100)) == "/data/a.parquet (split 2 of 3)"


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


def test_the_shards_of_a_lost_node_are_spread_over_the_others() -> None:
    nodes = [f"node-{i}" for i in range(5)]
    before = place("f", 500, nodes, 1)

    after = place("f", 500, nodes, 1, alive=nodes[1:])

    moved = Counter(new[0] for old, new in zip(before, after, strict=True) if old != new)
    assert sum(moved.values()) == 100
    assert min(moved.values()) >= 10
    assert len(moved) == 4


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


@quick
@given(st.data())
def test_no_shard_is_dropped_before_all_its_new_homes_hold_it(data: st.DataObject) -> None:
    nodes = ["a", "b", "c", "d"]
    num_shards = data.draw(st.integers(0, 6))
    some = st.frozensets(st.sampled_from(nodes))
    placement = [tuple(data.draw(some)) for _ in range(num_shards)]
    holders = {shard: data.draw(some) for shard in range(num_shards)}

    for node in nodes:
        wanted = desired_shards(node, placement, holders)
        for shard, homes in enumerate(placement):
            moved = set(homes) <= holders[shard]
            held = node in holders[shard]
            assert (shard in wanted) == (node in homes or (held and not moved))


def test_a_move_passes_through_both_nodes() -> None:
    placement = [("new",)]

    assert desired_shards("old", placement, {0: {"old"}}) == {0}
    assert desired_shards("new", placement, {0: {"old"}}) == {0}
    assert desired_shards("old", placement, {0: {"old", "new"}}) == frozenset()
    assert desired_shards("new", placement, {0: {"old", "new"}}) == {0}


def test_a_shard_that_nobody_holds_is_loaded_by_its_homes_only() -> None:
    placement = [("a", "b"), ("b",)]

    assert desired_shards("a", placement, {}) == {0}
    assert desired_shards("b", placement, {}) == {0, 1}
    assert desired_shards("c", placement, {}) == frozenset()


# -- sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "starts"), [([], (0,)), ([5], (0, 5)), ([3, 0, 2], (0, 3, 3, 5)), ([0], (0, 0))]
)
def test_row_starts_are_the_rows_before_each_shard_and_the_total(
    rows: list[int], starts: tuple[int, ...]
) -> None:
    assert row_starts(rows) == starts


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
