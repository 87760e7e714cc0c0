from __future__ import annotations

import pytest

from protos.memory import loads_at_once, shard_bytes

_GIB = 1 << 30


@pytest.mark.parametrize(("processors", "expected"), [(1, 2), (2, 2), (3, 3), (8, 8), (64, 8)])
def test_a_node_loads_a_shard_a_processor_from_two_to_eight(processors: int, expected: int) -> None:
    assert loads_at_once(processors, None) == expected


@pytest.mark.parametrize(
    ("container", "expected"), [(_GIB, 4), (4 * _GIB, 4), (6 * _GIB, 6), (64 * _GIB, 8)]
)
def test_a_small_container_loads_no_more_than_its_process_has_room_for(
    container: int, expected: int
) -> None:
    assert loads_at_once(16, container) == expected
    assert (container - shard_bytes(container)) // expected >= 256 << 20
