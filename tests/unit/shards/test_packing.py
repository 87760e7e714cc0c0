import datetime
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.errors import LoadError, RequestError
from cache_protocol.storage.layout import numpy_dtype
from cache_server.shards.packing import ShardBuilder, storage_schema, storage_type
from cache_server.sql.queries import check_query

DAY = datetime.date(2024, 2, 29)
NOON = datetime.datetime(2024, 2, 29, 12, 30, 15, 250_000)
LATE = datetime.time(23, 59, 58)
NAN = float("nan")
FSL = pa.list_(pa.float32(), 2)


def batch_of(*arrays: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(arrays), names=[f"c{i}" for i in range(len(arrays))])


def pack(*batches: pa.RecordBatch, expected_rows: int | None = None) -> pa.RecordBatch:
    """The logical columns of the shard that these batches make."""
    builder = ShardBuilder(storage_schema(batches[0].schema), expected_rows)
    for batch in batches:
        builder.append(batch)
    stored = builder.finish()
    stored.validate(full=True)
    return builder.layout.unpack(stored)


def pack_column(*chunks: pa.Array) -> pa.Array:
    return pack(*(batch_of(chunk) for chunk in chunks)).column(0)


def problem_of(*batches: pa.RecordBatch) -> str:
    with pytest.raises(LoadError) as caught:
        pack(*batches)
    return str(caught.value)


def same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Equal, with NaN equal to itself."""
    return repr(list(found)) == repr(list(expected))


def lists(values: pa.Array) -> pa.Array:
    """One list a value."""
    return pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), values)


def encoded(values: pa.Array) -> pa.Array:
    return values.dictionary_encode()


# -- the type mapping ----------------------------------------------------------------------------

INTEGERS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_stored_as_they_are(dtype: pa.DataType) -> None:
    limits = np.iinfo(numpy_dtype(dtype))
    array = pa.array([limits.min, 0, limits.max], dtype)

    assert pack_column(array).equals(array)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_stored_as_they_are_and_nulls_become_nan(dtype: pa.DataType) -> None:
    limit = np.finfo(numpy_dtype(dtype)).max
    values = np.array([limit, -0.0, 0.5, 1.0, NAN, math.inf], numpy_dtype(dtype))

    packed = pack_column(pa.array(values, mask=np.arange(6) == 3))

    assert packed.type == dtype
    assert same(packed.to_pylist(), [float(limit), -0.0, 0.5, NAN, NAN, math.inf])


# what comes, the type and the values it is stored with
MAPPING = {
    "decimal32": (
        pa.array([Decimal("-1.25"), None], pa.decimal32(5, 2)),
        pa.float64(),
        [-1.25, NAN],
    ),
    "decimal64": (pa.array([Decimal("1.25"), None], pa.decimal64(9, 2)), pa.float64(), [1.25, NAN]),
    "decimal128": (
        pa.array([Decimal("12345678.75"), None], pa.decimal128(38, 2)),
        pa.float64(),
        [12345678.75, NAN],
    ),
    "decimal256": (
        pa.array([Decimal("-0.5"), None], pa.decimal256(76, 3)),
        pa.float64(),
        [-0.5, NAN],
    ),
    "bool": (pa.array([True, False, True]), pa.uint8(), [1, 0, 1]),
    "date32": (pa.array([DAY], pa.date32()), pa.int32(), [19782]),
    "date64": (pa.array([DAY], pa.date64()), pa.int64(), [19782 * 86_400_000]),
    "time32[s]": (pa.array([LATE], pa.time32("s")), pa.int32(), [86_398]),
    "time32[ms]": (pa.array([LATE], pa.time32("ms")), pa.int32(), [86_398_000]),
    "time64[us]": (pa.array([LATE], pa.time64("us")), pa.int64(), [86_398_000_000]),
    "time64[ns]": (pa.array([LATE], pa.time64("ns")), pa.int64(), [86_398_000_000_000]),
    "timestamp[s]": (pa.array([-1, 5], pa.timestamp("s")), pa.int64(), [-1, 5]),
    "timestamp[ms]": (pa.array([NOON], pa.timestamp("ms")), pa.int64(), [1_709_209_815_250]),
    "timestamp[us]": (pa.array([NOON], pa.timestamp("us")), pa.int64(), [1_709_209_815_250_000]),
    "timestamp[ns]": (pa.array([2**62], pa.timestamp("ns")), pa.int64(), [2**62]),
    "timestamp[us, tz]": (
        pa.array([NOON], pa.timestamp("us", "Europe/Berlin")),
        pa.int64(),
        [1_709_209_815_250_000],
    ),
    "duration[ms]": (
        pa.array([datetime.timedelta(seconds=-2)], pa.duration("ms")),
        pa.int64(),
        [-2000],
    ),
    "string": (pa.array(["a", None, "ü"]), pa.string(), ["a", None, "ü"]),
    "large_string": (pa.array(["a", None], pa.large_string()), pa.large_string(), ["a", None]),
    "string_view": (pa.array(["a", None], pa.string_view()), pa.string(), ["a", None]),
    "binary": (pa.array([b"\0", None]), pa.binary(), [b"\0", None]),
    "large_binary": (pa.array([b"a", None], pa.large_binary()), pa.large_binary(), [b"a", None]),
    "binary_view": (pa.array([b"a", None], pa.binary_view()), pa.binary(), [b"a", None]),
    "fixed_size_binary": (pa.array([b"ab", None], pa.binary(2)), pa.binary(), [b"ab", None]),
    "dictionary of string": (
        encoded(pa.array(["a", None, "a", "b"])),
        pa.string(),
        ["a", None, "a", "b"],
    ),
    "dictionary of int": (encoded(pa.array([7, 5, 7], pa.int16())), pa.int16(), [7, 5, 7]),
    "dictionary of float": (encoded(pa.array([0.5, None])), pa.float64(), [0.5, NAN]),
    "dictionary of date": (encoded(pa.array([DAY, DAY], pa.date32())), pa.int32(), [19782] * 2),
    "list of int": (
        pa.array([[1, None], None, []], pa.list_(pa.int32())),
        pa.list_(pa.int32()),
        [[1, None], None, []],
    ),
    "large_list of float": (
        pa.array([[0.5], None], pa.large_list(pa.float32())),
        pa.large_list(pa.float32()),
        [[0.5], None],
    ),
    "list of string_view": (
        lists(pa.array(["a", None], pa.string_view())),
        pa.list_(pa.string()),
        [["a"], [None]],
    ),
    "list of dictionary": (
        lists(encoded(pa.array(["a", "b"]))),
        pa.list_(pa.string()),
        [["a"], ["b"]],
    ),
    "list of date": (
        pa.array([[DAY], None], pa.list_(pa.date32())),
        pa.list_(pa.int32()),
        [[19782], None],
    ),
    "list of bool": (pa.array([[True, None]]), pa.list_(pa.uint8()), [[1, None]]),
    "list of decimal": (
        pa.array([[Decimal("1.5"), None]], pa.list_(pa.decimal128(5, 1))),
        pa.list_(pa.float64()),
        [[1.5, None]],
    ),
    "list of list of time": (
        pa.array([[[LATE]], None], pa.list_(pa.list_(pa.time32("s")))),
        pa.list_(pa.list_(pa.int32())),
        [[[86_398]], None],
    ),
    "fixed_size_list of uint8": (
        pa.array([[1, 2], [3, 4]], pa.list_(pa.uint8(), 2)),
        pa.list_(pa.field("item", pa.uint8(), nullable=False), 2),
        [[1, 2], [3, 4]],
    ),
    "fixed_size_list of float16": (
        pa.FixedSizeListArray.from_arrays(pa.array(np.array([0.5, 2], np.float16)), 1),
        pa.list_(pa.field("item", pa.float16(), nullable=False), 1),
        [[0.5], [2.0]],
    ),
    "fixed_size_list of bool": (
        pa.array([[True, False]], pa.list_(pa.bool_(), 2)),
        pa.list_(pa.field("item", pa.uint8(), nullable=False), 2),
        [[1, 0]],
    ),
    "fixed_size_list of timestamp": (
        pa.array([[5, 6]], pa.list_(pa.timestamp("us"), 2)),
        pa.list_(pa.field("item", pa.int64(), nullable=False), 2),
        [[5, 6]],
    ),
    "fixed_size_list of fixed_size_list": (
        pa.array([[[1, 2], [3, 4], [5, 6]]], pa.list_(pa.list_(pa.int16(), 2), 3)),
        storage_type(pa.list_(pa.list_(pa.int16(), 2), 3)),
        [[[1, 2], [3, 4], [5, 6]]],
    ),
    "fixed_size_list of string": (
        pa.array([["a", None], None], pa.list_(pa.string(), 2)),
        pa.list_(pa.string()),
        [["a", None], None],
    ),
    "dictionary of fixed_size_list": (
        pa.DictionaryArray.from_arrays(
            [1, 0, 1], pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2))
        ),
        pa.list_(pa.field("item", pa.int8(), nullable=False), 2),
        [[3, 4], [1, 2], [3, 4]],
    ),
}


@pytest.mark.parametrize(("array", "stored", "values"), MAPPING.values(), ids=MAPPING)
def test_a_column_is_stored_as_the_mapping_says(
    array: pa.Array, stored: pa.DataType, values: list[Any]
) -> None:
    packed = pack_column(array)

    assert packed.type.equals(stored)
    assert same(packed.to_pylist(), values)


@pytest.mark.parametrize(("array", "stored", "values"), MAPPING.values(), ids=MAPPING)
def test_a_sliced_column_gives_the_rows_of_the_slice(
    array: pa.Array, stored: pa.DataType, values: list[Any]
) -> None:
    doubled = pa.chunked_array([array, array]).combine_chunks()
    sliced = doubled.slice(1, len(array))

    assert same(pack_column(sliced).to_pylist(), [*values[1:], values[0]])


@pytest.mark.parametrize(("array", "stored", "values"), MAPPING.values(), ids=MAPPING)
def test_several_batches_are_the_rows_one_after_the_other(
    array: pa.Array, stored: pa.DataType, values: list[Any]
) -> None:
    packed = pack_column(array, array.slice(0, 0), array.slice(1), array)

    assert same(packed.to_pylist(), [*values, *values[1:], *values])


@pytest.mark.parametrize(("array", "stored", "values"), MAPPING.values(), ids=MAPPING)
def test_no_rows_are_a_shard_of_the_same_schema(
    array: pa.Array, stored: pa.DataType, values: list[Any]
) -> None:
    without_batches = ShardBuilder(storage_schema(batch_of(array).schema)).finish()

    assert without_batches.num_rows == 0
    assert pack_column(array.slice(0, 0)).type.equals(stored)


@pytest.mark.parametrize(
    "stored", [dtype for _, dtype, _ in MAPPING.values()] + INTEGERS + FLOATS, ids=str
)
def test_a_storage_type_is_stored_as_itself(stored: pa.DataType) -> None:
    assert storage_type(stored) == stored


@pytest.mark.parametrize(
    ("dtype", "metadata"),
    [
        (pa.int64(), None),
        (pa.string(), None),
        (pa.list_(pa.int8()), None),
        (pa.dictionary(pa.int8(), pa.string()), None),
        (pa.bool_(), {b"cache.source_type": b"bool"}),
        (pa.decimal128(10, 2), {b"cache.source_type": b"decimal128(10, 2)"}),
        (pa.string_view(), {b"cache.source_type": b"string_view"}),
        (pa.date32(), {b"cache.source_type": b"date32[day]", b"cache.unit": b"D"}),
        (pa.date64(), {b"cache.source_type": b"date64[ms]", b"cache.unit": b"ms"}),
        (pa.time64("us"), {b"cache.source_type": b"time64[us]", b"cache.unit": b"us"}),
        (pa.duration("s"), {b"cache.source_type": b"duration[s]", b"cache.unit": b"s"}),
        (pa.timestamp("ns"), {b"cache.source_type": b"timestamp[ns]", b"cache.unit": b"ns"}),
        (
            pa.timestamp("us", "UTC"),
            {
                b"cache.source_type": b"timestamp[us, tz=UTC]",
                b"cache.unit": b"us",
                b"cache.timezone": b"UTC",
            },
        ),
        (
            pa.dictionary(pa.int8(), pa.date32()),
            {b"cache.source_type": b"date32[day]", b"cache.unit": b"D"},
        ),
        (
            pa.list_(pa.list_(pa.date32(), 2)),
            {b"cache.source_type": b"date32[day]", b"cache.unit": b"D"},
        ),
    ],
    ids=str,
)
def test_the_field_says_what_its_values_were(
    dtype: pa.DataType, metadata: dict[bytes, bytes] | None
) -> None:
    assert storage_schema(pa.schema([("x", dtype)])).field("x").metadata == metadata


# -- what cannot be stored -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        pa.struct([("a", pa.int64())]),
        pa.map_(pa.string(), pa.int64()),
        pa.null(),
        pa.month_day_nano_interval(),
        pa.sparse_union([pa.field("a", pa.int64())]),
        pa.list_view(pa.int64()),
        pa.run_end_encoded(pa.int32(), pa.int64()),
        pa.list_(pa.struct([("a", pa.int64())])),
        pa.list_(pa.null(), 2),
        pa.list_(pa.float32(), 0),
        pa.list_(pa.list_(pa.float32(), 0), 3),
        pa.dictionary(pa.int8(), pa.struct([("a", pa.int64())])),
    ],
    ids=str,
)
def test_other_types_are_refused_by_name(dtype: pa.DataType) -> None:
    schema = pa.schema([("good", pa.int64()), ("bad", dtype), ("worse", dtype)])

    with pytest.raises(RequestError) as caught:
        storage_schema(schema)
    assert f"bad: {dtype}, worse: {dtype}" in str(caught.value)
    assert "good" not in str(caught.value)


def test_columns_of_one_name_are_refused() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64()), ("a", pa.string())])

    with pytest.raises(RequestError, match=r"several columns named a$"):
        storage_schema(schema)


def test_a_query_without_columns_is_refused() -> None:
    with pytest.raises(RequestError, match="no columns"):
        storage_schema(pa.schema([]))


# -- nulls -----------------------------------------------------------------------------------------


def test_nulls_of_all_batches_are_counted_by_column() -> None:
    first = batch_of(pa.array([1, None, None], pa.int32()), pa.array([True, None, False]))
    second = batch_of(pa.array([None, 4, 5], pa.int32()), pa.array([True, True, True]))

    problem = problem_of(first, second)

    assert "column 'c0' holds 3 nulls" in problem
    assert "column 'c1' holds 1 null," in problem


FIXED_WIDTH = [
    *INTEGERS,
    *(pa.bool_(), pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms")),
    *(pa.time64("us"), pa.time64("ns"), pa.duration("s"), pa.duration("ns")),
    *(pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("ns", "Europe/Berlin")),
]


@pytest.mark.parametrize("dtype", FIXED_WIDTH, ids=str)
def test_the_coalesce_of_the_message_mends_the_query_and_keeps_the_type(
    dtype: pa.DataType,
) -> None:
    column = 'an "odd" name'
    batch = pa.RecordBatch.from_arrays([pa.nulls(1, dtype)], names=[column])
    problem = problem_of(batch)
    assert f"column {column!r} holds 1 null," in problem

    coalesce = problem.partition("write ")[2].partition(" in the sql")[0]
    mended = check_query(f"SELECT {coalesce} FROM source", {"source": batch.schema})

    assert coalesce.startswith("COALESCE(")
    assert mended.schema.names == [column]
    assert mended.schema.field(0).type == dtype


@pytest.mark.parametrize(
    "dtype",
    [
        pa.list_(pa.int32(), 2),
        pa.list_(pa.float32(), 2),
        pa.list_(pa.bool_(), 2),
        pa.list_(pa.decimal128(5, 1), 2),
        pa.list_(pa.date32(), 2),
        pa.list_(pa.list_(pa.int32(), 2), 2),
        pa.list_(pa.list_(pa.float32(), 2), 2),
    ],
    ids=str,
)
def test_a_null_in_place_of_a_fixed_size_list_is_refused(dtype: pa.DataType) -> None:
    problem = problem_of(batch_of(pa.array([None, None], dtype)), batch_of(pa.nulls(1, dtype)))

    assert "column 'c0' holds 3 nulls" in problem
    assert "COALESCE" not in problem


def test_a_null_inside_a_fixed_size_list_is_nan_or_refused() -> None:
    floats = pa.array([[0.5, None], [1.5, 2.5]], FSL)
    integers = pa.array([[1, None], [None, 2]], pa.list_(pa.int32(), 2))

    assert same(pack_column(floats).to_pylist(), [[0.5, NAN], [1.5, 2.5]])
    assert "column 'c0' holds 2 nulls" in problem_of(batch_of(integers))


def test_a_null_list_within_a_fixed_size_list_is_refused() -> None:
    array = pa.array([[[0.5, 1.5], None]], pa.list_(FSL, 2))

    assert "column 'c0' holds 1 null," in problem_of(batch_of(array))


def test_a_null_outside_of_a_slice_does_not_count() -> None:
    array = pa.array([None, [1, 2], [3, 4], None], pa.list_(pa.int32(), 2))

    assert pack_column(array.slice(1, 2)).to_pylist() == [[1, 2], [3, 4]]


def test_values_under_a_null_do_not_come_through() -> None:
    values = pa.array([1.0, 2.0], pa.float32())
    masked = pa.Array.from_buffers(
        pa.float32(), 2, [pa.py_buffer(b"\x01"), values.buffers()[1]], null_count=1
    )

    assert same(pack_column(masked).to_pylist(), [1.0, NAN])


# -- rows ------------------------------------------------------------------------------------------


def test_rows_of_unknown_number_may_be_of_many_megabytes() -> None:
    width = 2**26  # of which there is no memory for tens of thousands
    image = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(width, np.uint8)), width)

    assert pack(batch_of(image)).num_rows == 1


@pytest.mark.parametrize("expected_rows", [None, 0, 5, 99, 100, 101, 100_000])
def test_the_expected_rows_are_a_hint_only(expected_rows: int | None) -> None:
    batches = [
        batch_of(pa.array(range(start, start + 10)), pa.array([str(start)] * 10))
        for start in range(0, 100, 10)
    ]

    packed = pack(*batches, expected_rows=expected_rows)

    assert packed.column(0).to_pylist() == list(range(100))
    assert packed.column(1)[99].as_py() == "90"


def test_room_grows_far_beyond_the_first_guess() -> None:
    big = pa.array(np.arange(70_000))
    images = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(140_000) % 251), 2)
    batch = batch_of(big, images)

    packed = pack(batch, batch.slice(5), batch)

    assert packed.num_rows == 3 * 70_000 - 5
    assert packed.column(0).slice(70_000, 69_995).equals(big.slice(5))
    assert packed.column(1).slice(139_995).to_pylist()[-1] == images[69_999].as_py()


@settings(max_examples=40)
@given(st.lists(st.integers(0, 20), max_size=6), st.one_of(st.none(), st.integers(0, 60)))
def test_any_batches_make_the_same_shard_as_one(
    sizes: list[int], expected_rows: int | None
) -> None:
    total = sum(sizes)
    whole = batch_of(
        pa.array(np.arange(total, dtype=np.int32)),
        pa.array(np.arange(total) / 2),
        pa.array([None if i % 3 == 0 else f"row {i}" for i in range(total)], pa.string()),
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * total, dtype=np.uint8)), 2),
    )
    parts, start = [], 0
    for size in sizes:
        parts.append(whole.slice(start, size))
        start += size

    packed = pack(*(parts or [whole]), expected_rows=expected_rows)

    assert packed.to_pylist() == whole.to_pylist()


def test_columns_are_taken_by_name_in_any_order() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1, 2], "b": [3, 4]})
    builder = ShardBuilder(storage_schema(batch.schema))

    builder.append(batch.select(["b", "a"]))

    assert builder.layout.unpack(builder.finish()).to_pydict() == {"a": [1, 2], "b": [3, 4]}


def test_the_builder_counts_its_rows_and_bytes() -> None:
    batch = batch_of(pa.array([1, 2, 3]), pa.array(["a", "bc", "d"]))
    builder = ShardBuilder(storage_schema(batch.schema))
    assert (builder.num_rows, builder.num_bytes) == (0, 0)

    builder.append(batch)

    assert builder.num_rows == 3
    assert builder.num_bytes == 3 * 8 + batch.column(1).nbytes
