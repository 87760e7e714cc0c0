"""Every Arrow type: taken apart to what is stored, and put together again."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.errors import RequestError
from cache_protocol.storage.flat_columns import flat_tree, leaves
from cache_protocol.storage.layout import Layout
from tests.arrow_values import cut_at, random_batch, seeds, stored_batches

quick = settings(max_examples=150)


def assert_same(found: pa.RecordBatch, expected: pa.RecordBatch) -> None:
    found.validate(full=True)
    assert found.schema.equals(expected.schema, check_metadata=True)
    for name, one, other in zip(found.schema.names, found, expected, strict=True):
        if "dictionary" in str(other.type):  # other codes may stand for the same values
            assert one.to_pylist() == other.to_pylist(), name
        else:
            assert one.equals(other), (name, one, other)


@pytest.mark.unversioned  # nodes store, with pyarrow 22; earlier ones cannot fill float16
@quick
@given(seeds, st.lists(st.integers(0, 9), max_size=2), st.booleans())
def test_any_table_comes_out_of_storage_as_it_went_in(
    seed: int, places: list[int], is_large: bool
) -> None:
    pieces = cut_at(random_batch(seed, 3), places)
    layout, stored = stored_batches(pieces, is_large=is_large)
    of_stored = Layout.of_stored(stored[0].schema)
    assert of_stored.nulls.units == layout.nulls.units
    for piece, each in zip(pieces, stored, strict=True):
        each.validate(full=True)
        assert_same(of_stored.unpack(each), piece)
        if piece.num_rows:  # as a node sends it
            assert_same(of_stored.unpack(each.slice(1)), piece.slice(1))


@pytest.mark.unversioned
@quick
@given(seeds, st.integers(0, 99))
def test_any_column_or_field_can_be_selected(seed: int, pick: int) -> None:
    layout, (stored,) = stored_batches([random_batch(seed, 2)])
    name = list(layout.flat)[pick % len(layout.flat)]
    selected = layout.select([name])
    assert list(selected.flat) == [name]
    assert selected.nulls.units.items() <= layout.nulls.units.items()
    (column,) = selected.logical
    for field in name.split(".")[1:]:  # structs with only that field
        assert column.type.num_fields == 1
        column = column.type.field(field)
    assert column.type.equals(layout.flat[name].dtype)
    assert layout.unpack(stored).schema.equals(layout.logical)


@pytest.mark.unversioned  # without pandas, an earlier pyarrow has no objects for nanoseconds
@quick
@given(seeds)
def test_what_is_null_and_only_that_has_a_bit(seed: int) -> None:
    batch = random_batch(seed, 0)
    layout, _ = stored_batches([batch])
    bits = {} if layout.null_index is None else layout.nulls.units
    for column in leaves(layout.tree):
        array = batch.column(column.name)
        if column.kind == "arrow":
            assert column.name not in bits
            continue
        nulls = [value is None for value in array.to_pylist()]
        assert (column.name in bits) == any(nulls)


@pytest.mark.parametrize(
    "dtype",
    [
        pa.sparse_union([pa.field("a", pa.int8())]),
        pa.dense_union([pa.field("a", pa.int8()), pa.field("b", pa.string())]),
        pa.list_(pa.dense_union([pa.field("a", pa.int8())])),
        pa.struct([("u", pa.sparse_union([pa.field("a", pa.int8())]))]),
    ],
)
def test_unions_are_refused_by_name(dtype: pa.DataType) -> None:
    with pytest.raises(RequestError, match=r"'some'.*union.*cannot be stored"):
        flat_tree(pa.schema([("fine", pa.int8()), ("some", dtype)]))
