from __future__ import annotations

import pytest

from cache_protocol.storage.memory_budget import (
    load_bytes,
    loads_at_once,
    memory_of_container,
    memory_of_machine,
    min_load_bytes,
    shard_bytes,
)

_GIB = 1 << 30


@pytest.mark.parametrize(("processors", "expected"), [(1, 2), (2, 2), (3, 3), (8, 8), (64, 8)])
def test_a_node_loads_a_shard_a_processor_from_two_to_eight(processors: int, expected: int) -> None:
    assert loads_at_once(processors) == expected


@pytest.mark.parametrize("container", [2 * _GIB, 4 * _GIB, 6 * _GIB, 64 * _GIB])
def test_shards_and_loads_together_leave_a_container_something(container: int) -> None:
    memory = memory_of_container(container)
    assert memory.shard_limit_bytes == memory.most_shard_bytes == shard_bytes(container)
    assert 0 < container - shard_bytes(container) - memory.loading_bytes < _GIB // 4


def test_a_small_container_loads_three_shards_of_small_row_groups_at_once() -> None:
    assert memory_of_container(4 * _GIB).loading_bytes // load_bytes(0) == 3


@pytest.mark.parametrize("group", [0, 145 << 20, _GIB])
def test_a_load_needs_more_than_it_takes_at_the_least(group: int) -> None:
    assert load_bytes(group) > min_load_bytes(group) >= 3 * group
    assert load_bytes(group, 7) == load_bytes(group) + 7


@pytest.mark.parametrize(
    ("container", "expected"),
    [(4 * _GIB, False), (8 * _GIB, False), (32 * _GIB, True)],
)
def test_freed_memory_is_kept_where_there_is_enough(container: int, expected: bool) -> None:
    assert memory_of_container(container).may_keep_freed is expected


def test_freed_memory_is_kept_where_nothing_limits_a_node() -> None:
    assert memory_of_machine(_GIB, None, None, share=1.0, in_memory=True).may_keep_freed
