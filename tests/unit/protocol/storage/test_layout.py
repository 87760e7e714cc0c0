import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.errors import RequestError
from cache_protocol.storage.flat_columns import list_shape, numpy_dtype
from cache_protocol.storage.layout import (
    GUESSED_VALUE_BYTES,
    Layout,
    as_matrix,
    equal_lists,
    from_equal_lists,
    from_matrix,
    pool_array,
    pool_matrix,
    schema_from_bytes,
)
from cache_server.shards.packing import ShardBuilder, logical_schema

quick = settings(max_examples=80)

SCALARS = (
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
)
PLAIN = (pa.string(), pa.large_string(), pa.binary(), pa.list_(pa.int32()), pa.list_(pa.string()))

scalars = st.sampled_from(SCALARS)
matrices = st.recursive(
    st.builds(lambda dtype, width: pa.list_(dtype, width), scalars, st.integers(1, 3)),
    lambda inner: st.builds(lambda dtype, width: pa.list_(dtype, width), inner, st.integers(1, 3)),
    max_leaves=3,
)
types = st.one_of(scalars, scalars, matrices, st.sampled_from(PLAIN))
# Names that the stored columns themselves have, too.
names = st.one_of(
    st.sampled_from(["a", "b", "A", "packed_float", "packed_int64", "item", "", "ü 1", 'q"']),
    st.text(st.characters(blacklist_categories=["Cs"]), max_size=5),
)
schemas = st.dictionaries(names, types, min_size=1, max_size=6).map(
    lambda fields: logical_schema(pa.schema(list(fields.items())))
)


def values_of(dtype: pa.DataType, count: int, rng: np.random.Generator) -> pa.Array:
    if pa.types.is_fixed_size_list(dtype):
        inner = values_of(dtype.value_type, count * dtype.list_size, rng)
        return pa.FixedSizeListArray.from_arrays(inner, type=dtype)
    if pa.types.is_integer(dtype) or pa.types.is_floating(dtype):
        return pa.array(rng.integers(0, 100, count).astype(numpy_dtype(dtype)))
    numbers = [None if n == 0 else n for n in rng.integers(0, 9, count).tolist()]
    if pa.types.is_list(dtype):
        inner_type = dtype.value_type
        item = [None, 1] if pa.types.is_integer(inner_type) else [None, "x"]
        return pa.array([n and item * (n % 3) for n in numbers], dtype)
    return pa.array([None if n is None else "é" * n for n in numbers]).cast(dtype)


def batch_of(schema: pa.Schema, count: int, seed: int = 0) -> pa.RecordBatch:
    rng = np.random.default_rng(seed)
    arrays = [values_of(field.type, count, rng) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def pack(batch: pa.RecordBatch) -> tuple[Layout, pa.RecordBatch]:
    builder = ShardBuilder(batch.schema)
    builder.append(batch)
    stored = builder.finish()
    return Layout.of_stored(stored.schema), stored


def columns_of(layout: Layout) -> list[tuple[str, tuple[str, ...]]]:
    return [(column.kind, column.names) for column in layout.columns]


def write_ipc(path: Path, batch: pa.RecordBatch) -> pa.RecordBatch:
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)


# -- what lies where -----------------------------------------------------------------------------


def test_scalars_of_one_type_share_a_column_whatever_their_names() -> None:
    layout = Layout(
        pa.schema(
            [
                ("a", pa.float32()),
                ("packed_float", pa.string()),
                ("b", pa.int64()),
                ("image", pa.list_(pa.uint8(), 4)),
                ("packed_int64", pa.float32()),
                ("c", pa.float32()),
                ("tags", pa.list_(pa.int32())),
            ]
        )
    )

    assert columns_of(layout) == [
        ("packed", ("b",)),
        ("packed", ("a", "packed_int64", "c")),
        ("matrix", ("image",)),
        ("plain", ("packed_float",)),
        ("plain", ("tags",)),
    ]
    assert layout.fixed_row_bytes == 3 * 4 + 8 + 4
    assert layout.guessed_row_bytes == layout.fixed_row_bytes + 2 * GUESSED_VALUE_BYTES


def test_columns_named_like_stored_ones_come_back_as_themselves() -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "packed_float": pa.array(["x", None]),
            "a": pa.array([1, 2], pa.float32()),
            "packed_int64": pa.array([3, 4], pa.float32()),
            "b": pa.array([5, 6], pa.int64()),
        }
    )

    layout, stored = pack(batch)

    assert layout.unpack(stored).equals(batch)


@quick
@given(schemas)
def test_every_column_has_one_place(schema: pa.Schema) -> None:
    layout = Layout(schema)

    places = [layout.place(name) for name in schema.names]

    assert len(set(places)) == len(schema.names)
    assert [layout.columns[i].names[p] for i, p in places] == schema.names
    assert sum(len(column.names) for column in layout.columns) == len(schema.names)


@pytest.mark.parametrize(
    "name",
    [
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *("float16", "float32", "float64"),
    ],
)
def test_a_scalar_type_has_the_numpy_dtype_of_its_name(name: str) -> None:
    assert numpy_dtype(getattr(pa, name)()) == np.dtype(name)


@pytest.mark.parametrize(
    ("dtype", "shape", "width"),
    [
        (pa.list_(pa.uint8(), 784), (784,), 784),
        (pa.list_(pa.list_(pa.uint8(), 28), 3), (3, 28), 84),
        (pa.list_(pa.list_(pa.list_(pa.float16(), 2), 3), 4), (4, 3, 2), 24),
    ],
)
def test_a_fixed_size_list_is_a_flat_matrix_of_its_shape(
    dtype: pa.DataType, shape: tuple[int, ...], width: int
) -> None:
    (column,) = Layout(pa.schema([("x", dtype)])).columns

    assert (column.kind, column.shape, column.width) == ("matrix", shape, width)
    assert column.dtype == numpy_dtype(list_shape(dtype)[1])
    assert column.field.type.list_size == width


def test_a_fixed_size_list_of_strings_is_plain() -> None:
    layout = Layout(pa.schema([("x", pa.list_(pa.string(), 2))]))

    assert columns_of(layout) == [("plain", ("x",))]


# -- pack and unpack -----------------------------------------------------------------------------


@quick
@given(schemas, st.integers(0, 5), st.integers(0, 9))
def test_unpacking_restores_packed_columns(schema: pa.Schema, count: int, seed: int) -> None:
    batch = batch_of(schema, count, seed)

    layout, stored = pack(batch)
    unpacked = layout.unpack(stored)

    stored.validate(full=True)
    unpacked.validate(full=True)
    assert unpacked.schema.equals(schema, check_metadata=True)
    assert unpacked.equals(batch)


@quick
@given(schemas, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_slice_unpacks_to_the_slice(schema: pa.Schema, count: int, start: int, rows: int) -> None:
    batch = batch_of(schema, count)

    layout, stored = pack(batch)

    assert layout.unpack(stored.slice(start, rows)).equals(batch.slice(start, rows))


@quick
@given(schemas, st.integers(0, 4))
def test_a_file_has_its_layout_in_its_metadata(
    tmp_path_factory: pytest.TempPathFactory, schema: pa.Schema, count: int
) -> None:
    batch = batch_of(schema, count)
    layout, stored = pack(batch)

    read = write_ipc(tmp_path_factory.getbasetemp() / "layout.arrow", stored)
    found = Layout.of_stored(read.schema)

    assert found.logical.equals(layout.logical, check_metadata=True)
    assert columns_of(found) == columns_of(layout)
    assert found.unpack(read).equals(batch)


def test_a_foreign_schema_is_no_stored_batch() -> None:
    with pytest.raises(ValueError, match="has no logical schema"):
        Layout.of_stored(pa.schema([("a", pa.int64())]))


def test_a_stored_schema_that_contradicts_itself_is_refused() -> None:
    layout = Layout(pa.schema([("a", pa.int64()), ("b", pa.int64())]))
    lying = pa.schema([layout.schema.field(0).with_name("other")], layout.schema.metadata)

    with pytest.raises(ValueError, match="does not match"):
        Layout.of_stored(lying)


# -- select ----------------------------------------------------------------------------------------


@quick
@given(schemas, st.data())
def test_a_selection_is_the_layout_of_those_columns_in_that_order(
    schema: pa.Schema, data: st.DataObject
) -> None:
    layout = Layout(schema)
    wanted = data.draw(st.lists(st.sampled_from(schema.names), min_size=1, unique=True))

    selected = layout.select(wanted)

    assert selected.logical.names == wanted
    assert columns_of(selected) == columns_of(Layout(selected.logical))
    for name in wanted:
        assert selected.logical.field(name).equals(schema.field(name), check_metadata=True)


@pytest.mark.parametrize("wanted", [[], ["a", "b"]])
def test_all_columns_in_their_order_are_the_layout_itself(wanted: Sequence[str]) -> None:
    layout = Layout(pa.schema([("a", pa.int64()), ("b", pa.string())]))

    assert layout.select(wanted) is layout


def test_unknown_columns_are_quoted_with_the_known_ones() -> None:
    layout = Layout(pa.schema([("a", pa.int64()), ("b", pa.string())]))

    with pytest.raises(RequestError, match="no column 'x', 'A'; columns: a, b"):
        layout.select(["x", "a", "A"])


def test_a_repeated_column_is_refused() -> None:
    layout = Layout(pa.schema([("a", pa.int64()), ("b", pa.string())]))

    with pytest.raises(RequestError, match=r"repeat a name, got \['a', 'a'\]"):
        layout.select(["a", "a"])


# -- matrices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.int64, np.float64])
def test_a_matrix_and_its_column_share_their_bytes(dtype: type[np.generic]) -> None:
    values = np.arange(12).astype(dtype).reshape(4, 3)
    field = pa.field("x", pa.list_(pa.from_numpy_dtype(dtype), 3))

    column = from_matrix(values, field)
    back = as_matrix(column)

    assert column.to_pylist() == values.tolist()
    assert back.ctypes.data == values.ctypes.data
    assert as_matrix(column.slice(1, 2)).tolist() == values[1:3].tolist()


def test_a_column_of_pool_memory_holds_no_python_object() -> None:
    matrix = pool_matrix(4, 3, np.dtype(np.int64))
    matrix[:] = np.arange(12).reshape(4, 3)
    held = sys.getrefcount(matrix)

    part = from_matrix(matrix[1:3], pa.field("x", pa.list_(pa.int64(), 3)))
    numbers = pool_array(np.array([1, 2, 3]))

    assert sys.getrefcount(matrix) == held
    del matrix
    assert part.to_pylist() == [[3, 4, 5], [6, 7, 8]]
    assert numbers.to_pylist() == [1, 2, 3]


def test_a_pool_matrix_is_room_to_write_to() -> None:
    matrix = pool_matrix(1000, 8, np.dtype(np.float64))
    matrix[:] = 1.5

    assert matrix.shape == (1000, 8)
    assert matrix.flags.c_contiguous
    assert matrix.sum() == 12_000


def test_a_schema_comes_back_from_its_message() -> None:
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False, metadata={"k": "v"})])

    found = schema_from_bytes(schema.serialize().to_pybytes())

    assert found.equals(schema, check_metadata=True)


list_rows = st.lists(st.lists(st.integers(0, 9) | st.none(), max_size=3) | st.none(), max_size=5)
equal_rows = st.integers(0, 3).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 9), min_size=width, max_size=width), max_size=5)
)


@quick
@given(
    list_rows | equal_rows,
    list_rows | equal_rows,
    st.sampled_from([pa.list_(pa.int16()), pa.large_list(pa.float64())]),
)
def test_lists_are_a_matrix_if_all_have_one_length_and_no_null(
    before: list[list[int | None] | None], rows: list[list[int | None] | None], dtype: pa.DataType
) -> None:
    lists = pa.array([*before, *rows], dtype).slice(len(before))

    matrix = equal_lists(lists)

    lengths = {0 if row is None or None in row else len(row) for row in rows}
    if len(lengths) != 1 or lengths == {0}:
        assert matrix is None
    else:
        assert matrix is not None and matrix.tolist() == rows
        assert from_equal_lists(matrix, dtype).equals(lists)


def test_only_lists_of_numbers_are_a_matrix() -> None:
    for values in ([["a"], ["b"]], [[[1]], [[2]]], ["a", "b"], [1, 2], [[True], [False]]):
        assert equal_lists(pa.array(values)) is None


def test_codes_count_with_the_bytes_of_their_values() -> None:
    words = pa.array(["x" * 1000, "y"])
    codes = pa.array([0] * 500 + [1] * 500, pa.int8())
    batch = pa.RecordBatch.from_pydict(
        {
            "word": pa.DictionaryArray.from_arrays(codes, words),
            "list": pa.array(
                [["x" * 1000]] * 1000, pa.list_(pa.dictionary(pa.int8(), pa.string()))
            ),
        }
    )

    assert 1_500_000 < Layout(batch.schema).stored_bytes(batch) < 1_600_000
