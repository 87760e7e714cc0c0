"""How an order is cut into buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_server.scratch.sizes import Sizes


@given(memory=st.integers(1 << 28, 1 << 42), size=st.integers(0, 1 << 48))
def test_buckets_fit_in_memory_together(memory: int, size: int) -> None:
    sizes = Sizes(memory)
    taken = sizes.loaded_bytes + sizes.buffer_bytes + 2 * sizes.chunk_bytes
    assert taken <= memory // 4
    count = sizes.num_buckets(size)
    if count is None:
        assert size > 64 * sizes.bucket_bytes
        return
    assert 1 <= count < 2**16
    assert size // count <= sizes.loaded_bytes // 4


@pytest.mark.parametrize(
    ("memory", "table", "buckets"), [(1 << 30, 4 << 30, 256), (64 << 30, 1 << 40, 16_384)]
)
def test_tables_of_several_times_the_memory_have_buckets_of_a_sixty_fourth(
    memory: int, table: int, buckets: int
) -> None:
    assert Sizes(memory).num_buckets(table) == buckets
