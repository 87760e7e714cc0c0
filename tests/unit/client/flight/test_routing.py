from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_client.flight import routing

SHARD_ROWS = 10


def shard_map(replicas: list[tuple[int, ...]], nodes: int) -> routing.ShardMap:
    return routing.ShardMap(
        "table", "f", pa.schema([("row", pa.int64())]), SHARD_ROWS * len(replicas),
        np.arange(len(replicas), dtype=np.int64) * SHARD_ROWS,
        tuple(routing.NodeRef(f"node-{i}", f"grpc://{i}") for i in range(nodes)), tuple(replicas),
    )  # fmt: skip


@settings(max_examples=200)
@given(data=st.data())
def test_the_parts_bring_every_row_to_its_place_from_a_node_that_holds_it(
    data: st.DataObject,
) -> None:
    nodes = data.draw(st.integers(1, 4))
    homes = st.lists(st.integers(0, nodes - 1), min_size=1, max_size=nodes, unique=True).map(tuple)
    shards = shard_map(data.draw(st.lists(homes, min_size=1, max_size=12)), nodes)
    avoid = data.draw(st.sets(st.integers(0, nodes - 1)))
    local = data.draw(st.sets(st.integers(0, len(shards.replicas) - 1)))
    router = routing.Router(shards, data.draw(st.integers(0, 3)), avoid, local)
    ids = data.draw(st.lists(st.integers(0, shards.num_rows - 1), max_size=60))
    row_ids = np.array(ids, np.int64)

    window = np.full(len(ids), -1, np.int64)
    for part in router.route(row_ids):
        window[slice(None) if part.positions is None else part.positions] = part.row_ids
        if part.positions is not None:  # in the order of the window
            assert (np.diff(part.positions) > 0).all()
        of_part = set((part.row_ids // SHARD_ROWS).tolist())
        if part.node is None:
            assert of_part <= local
            continue
        assert not of_part & local
        index = shards.nodes.index(part.node)
        for shard in of_part:
            assert index in shards.replicas[shard]
            if index in avoid:
                assert set(shards.replicas[shard]) <= avoid
    assert window.tolist() == ids


def test_a_window_of_one_node_is_one_part_in_its_order() -> None:
    router = routing.Router(shard_map([(0,), (0,), (1,)], 2))
    (part,) = router.route(np.array([3, 1, 2]))
    assert part.positions is None and part.row_ids.tolist() == [3, 1, 2]
    (part,) = router.route(np.array([13, 1, 12]))
    assert part.positions is None and part.row_ids.tolist() == [13, 1, 12]
    assert len(router.route(np.array([1, 25, 2]))) == 2


@given(order=st.lists(st.permutations(range(3)).map(tuple), min_size=1, max_size=12))
def test_nodes_that_hold_everything_are_asked_for_as_many_shards_each(
    order: list[tuple[int, ...]],
) -> None:
    shards = shard_map(order, 3)
    firsts = np.arange(len(order)) * SHARD_ROWS
    for turn in range(3):
        parts = routing.Router(shards, turn).route(firsts)
        counts = {part.node: len(part.row_ids) for part in parts}
        assert sum(counts.values()) == len(order)
        assert len(counts) == min(3, len(order))
        assert max(counts.values()) - min(counts.values()) <= 1


def test_ranks_that_differ_prefer_different_replicas() -> None:
    shards = shard_map([(0, 1)], 2)
    row = np.array([0])
    assert (
        routing.Router(shards, 0).route(row)[0].node != routing.Router(shards, 1).route(row)[0].node
    )


def test_more_shards_than_sixteen_bits_are_grouped_by_node_all_the_same() -> None:
    count, nodes = 200_000, 7
    shards = shard_map([(index * index % nodes,) for index in range(count)], nodes)
    ids = np.random.default_rng(0).integers(0, shards.num_rows, 5_000)

    router = routing.Router(shards)
    parts = router.route(ids)

    held = [node for index, node in enumerate(shards.nodes) if index in {0, 1, 2, 4}]
    assert router.num_nodes == len(held)
    assert [part.node for part in parts] == held
    for part in parts:
        assert part.positions is not None
        assert (ids[part.positions] == part.row_ids).all()
    assert sum(len(part.row_ids) for part in parts) == len(ids)


@given(data=st.data())
def test_a_reader_asks_nodes_of_its_zone_unless_all_of_them_failed(data: st.DataObject) -> None:
    zones = data.draw(st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=5))
    nodes = st.integers(0, len(zones) - 1)
    homes = st.lists(nodes, min_size=1, unique=True).map(tuple)
    shards = shard_map(data.draw(st.lists(homes, min_size=1, max_size=12)), len(zones))
    refs = [replace(node, zone=zone) for node, zone in zip(shards.nodes, zones, strict=True)]
    shards = replace(shards, nodes=tuple(refs))
    avoid = data.draw(st.sets(nodes))
    router = routing.Router(shards, data.draw(st.integers(0, 3)), avoid, zone="a")

    for shard, held in enumerate(shards.replicas):
        (part,) = router.route(np.array([shard * SHARD_ROWS]))
        near = [at for at in held if zones[at] == "a" and at not in avoid]
        far = [at for at in held if at not in avoid]
        assert part.node in {shards.nodes[at] for at in near or far or held}
        if not far and any(zones[at] == "a" for at in held):
            assert part.node is not None and part.node.zone == "a"
