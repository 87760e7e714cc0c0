from __future__ import annotations

import pytest

from cache_protocol.storage.memory_budget import (
    load_bytes,
    loading_bytes,
    loads_at_once,
    may_keep_freed_memory,
    min_load_bytes,
    shard_bytes,
)

_GIB = 1 << 30


@pytest.mark.parametrize(("processors", "expected"), [(1, 2), (2, 2), (3, 3), (8, 8), (64, 8)])
def test_a_node_loads_a_shard_a_processor_from_two_to_eight(processors: int, expected: int) -> None:
    assert loads_at_once(processors) == expected


@pytest.mark.parametrize("container", [2 * _GIB, 4 * _GIB, 6 * _GIB, 64 * _GIB])
def test_shards_and_loads_together_leave_a_container_something(container: int) -> None:
    assert 0 < container - shard_bytes(container) - loading_bytes(container) < _GIB // 4
    assert loading_bytes(container, 0) == loading_bytes(container) + shard_bytes(container)


def test_a_small_container_loads_three_shards_of_small_row_groups_at_once() -> None:
    assert loading_bytes(4 * _GIB) // load_bytes(0) == 3


@pytest.mark.parametrize("group", [0, 145 << 20, _GIB])
def test_a_load_needs_more_than_it_takes_at_the_least(group: int) -> None:
    assert load_bytes(group) > min_load_bytes(group) >= 3 * group
    assert load_bytes(group, 7) == load_bytes(group) + 7


@pytest.mark.parametrize(
    ("container", "expected"),
    [(None, True), (4 * _GIB, False), (8 * _GIB, False), (32 * _GIB, True)],
)
def test_freed_memory_is_kept_where_there_is_enough(container: int | None, expected: bool) -> None:
    assert may_keep_freed_memory(container) is expected
