"""How many nodes a load needs, against where its shards would lie."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_server.coordination.placement import bytes_by_node, nodes_needed, place


@settings(max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    replicas=st.integers(1, 4),
    limit=st.integers(1, 400),
)
def test_so_many_nodes_hold_every_replica(sizes: list[int], replicas: int, limit: int) -> None:
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
    begun = time.monotonic()

    assert nodes_needed(many, 2, 64 * 1024**2 + 1) == 40_000
    assert time.monotonic() - begun < 5
