"""Batches of any length -> groups of rows of about one size."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_client.writing import arrow_sources
from cache_protocol.errors import ConfigError


@given(
    sizes=st.lists(st.integers(0, 30), max_size=12),
    row_bytes=st.integers(1, 9),
    target=st.integers(1, 60),
)
def test_groups_of_rows_of_one_size_do_not_depend_on_the_batches(
    sizes: list[int], row_bytes: int, target: int
) -> None:
    rows = pa.table({"row": range(sum(sizes))})
    batches, start = [], 0
    for size in sizes:
        batches += rows.slice(start, size).to_batches()
        start += size

    groups = list(arrow_sources.slices(batches, lambda batch: batch.num_rows * row_bytes, target))

    lengths = [sum(batch.num_rows for batch in group) for group in groups]
    full = max(1, target // row_bytes)
    assert lengths == [min(full, sum(sizes) - at) for at in range(0, sum(sizes), full)]
    joined = [row for group in groups for batch in group for row in batch["row"].to_pylist()]
    assert joined == list(range(sum(sizes)))


def test_a_table_is_read_in_place_and_dictionaries_stay() -> None:
    table = pa.table({"x": [1, 2], "kind": pa.array(["a", "b"]).dictionary_encode()})

    plain = arrow_sources.arrow_source(table.select(["x"]))
    decoded = arrow_sources.arrow_source(table)

    (batch,) = plain.batches
    assert plain.is_resident and plain.num_rows == 2
    assert batch["x"].buffers()[1].address == table["x"].chunk(0).buffers()[1].address
    assert decoded.schema.equals(table.schema)
    assert next(decoded.batches).equals(table.to_batches()[0])


@pytest.mark.parametrize("data", [None, 3, "table", b"x", [1], object()])
def test_what_is_no_table_is_refused_with_what_is(data: object) -> None:
    with pytest.raises(ConfigError, match=f"pandas.*got a {type(data).__name__}"):
        arrow_sources.arrow_source(data)
