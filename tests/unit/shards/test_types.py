"""Every type of a column, through a shard and back, against the values that pyarrow itself has."""

import itertools
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from datafusion import SessionContext
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.errors import LoadError, RequestError
from cache_protocol.storage.layout import Layout, numpy_dtype
from cache_server.shards.packing import ShardBuilder, storage_schema, storage_type

NAN = float("nan")
UNITS = ("s", "ms", "us", "ns")
ZONES = ("UTC", "Europe/Berlin", "America/St_Johns", "+05:30")


def pack(*batches: pa.RecordBatch) -> pa.RecordBatch:
    """The logical columns of a shard of these batches, as a reader of its file has them."""
    builder = ShardBuilder(storage_schema(batches[0].schema))
    for batch in batches:
        builder.append(batch)
    stored = builder.finish()
    stored.validate(full=True)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, stored.schema) as writer:
        writer.write_batch(stored)
    again = pa.ipc.open_file(sink.getvalue()).get_batch(0)
    unpacked = Layout.of_stored(again.schema).unpack(again)
    unpacked.validate(full=True)
    return unpacked


def batch_of(array: pa.Array, name: str = "x") -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([array], names=[name])


def pack_column(*chunks: pa.Array) -> pa.Array:
    return pack(*map(batch_of, chunks)).column(0)


def field_of(dtype: pa.DataType) -> pa.Field:
    return storage_schema(pa.schema([("x", dtype)])).field(0)


def problem_of(*chunks: pa.Array, name: str = "x") -> str:
    with pytest.raises(LoadError) as caught:
        pack(*(batch_of(chunk, name) for chunk in chunks))
    return str(caught.value)


def query(sql: str, array: pa.Array, name: str = "x") -> pa.Array:
    """The one column of a real query over ``array``."""
    context = SessionContext()
    context.register_record_batches("source", [[batch_of(array, name)]])
    table = context.sql(sql).to_arrow_table()
    assert table.schema.names == [name]
    return table.column(0).combine_chunks()


def suggested(problem: str, function: str) -> str:
    """The SQL that a message advises."""
    match = re.search(rf'{function}\(.*\) AS "(?:[^"]|"")*"', problem)
    assert match is not None, problem
    return match[0]


# -- what is expected ------------------------------------------------------------------------------


def physical(array: pa.Array) -> list[Any]:
    """The values of ``array`` as they should be stored, by nothing that `packing` uses.

    Temporal values by their bytes, decimals and truth values by Python, lists by their parts.
    """
    types, dtype = pa.types, array.type
    if types.is_dictionary(dtype):
        values = physical(array.dictionary)
        return [None if code is None else values[code] for code in array.indices.to_pylist()]
    if types.is_nested(dtype):
        return [physical(item.values) if item.is_valid else None for item in array]
    if types.is_decimal(dtype) or types.is_boolean(dtype):
        convert = float if types.is_decimal(dtype) else int
        return [None if value is None else convert(value) for value in array.to_pylist()]
    if types.is_temporal(dtype):
        array = array.view(pa.int32() if dtype.bit_width == 32 else pa.int64())
    return array.to_pylist()


def with_nan(values: object) -> object:
    """Nulls as NaN, at any depth."""
    if isinstance(values, list):
        return [with_nan(value) for value in values]
    return NAN if values is None else values


def leaf_of(dtype: pa.DataType) -> pa.DataType:
    while pa.types.is_nested(dtype) or pa.types.is_dictionary(dtype):
        dtype = dtype.value_type
    return dtype


def is_fixed(dtype: pa.DataType) -> bool:
    """Whether all rows have one size, which leaves no place for a null."""
    while pa.types.is_fixed_size_list(dtype) or pa.types.is_dictionary(dtype):
        dtype = dtype.value_type
    return bool(pa.types.is_primitive(dtype) or pa.types.is_decimal(dtype))


def becomes_nan(dtype: pa.DataType) -> bool:
    leaf = leaf_of(dtype)
    return is_fixed(dtype) and bool(pa.types.is_floating(leaf) or pa.types.is_decimal(leaf))


def assert_stored(chunks: Sequence[pa.Array], whole: pa.Array) -> None:
    found = pack_column(*chunks)

    values = physical(whole)
    assert found.type == storage_type(whole.type)
    assert repr(found.to_pylist()) == repr(with_nan(values) if becomes_nan(whole.type) else values)


# -- values of every type --------------------------------------------------------------------------


def _integers(dtype: pa.DataType) -> st.SearchStrategy[Any]:
    limits = np.iinfo(numpy_dtype(dtype))
    return st.integers(int(limits.min), int(limits.max))


def _decimals(dtype: pa.DataType) -> st.SearchStrategy[Any]:
    most = 10**dtype.precision - 1
    return st.integers(-most, most).map(lambda number: Decimal(f"{number}E{-dtype.scale}"))


_MILLIS = 86_400_000
RANGES = {
    **{pa.time32("s"): (0, 86_399), pa.time32("ms"): (0, _MILLIS - 1)},
    **{pa.time64("us"): (0, _MILLIS * 10**3 - 1), pa.time64("ns"): (0, _MILLIS * 10**6 - 1)},
    pa.date32(): (-(2**31), 2**31 - 1),
}


def values_of(dtype: pa.DataType, free: bool | None = None) -> st.SearchStrategy[Any]:
    """Python values for `array_of`; of temporal types, the numbers they are kept as.

    Args:
        free: nulls may stand anywhere in them; else where NaN can take their place.
    """
    types = pa.types
    free = not is_fixed(dtype) if free is None else free
    if types.is_nested(dtype):
        size = dtype.list_size if types.is_fixed_size_list(dtype) else None
        inner = values_of(dtype.value_type, free)
        values: st.SearchStrategy[Any] = st.lists(inner, min_size=size or 0, max_size=size or 3)
        return st.none() | values if free else values
    values = _scalars(dtype)
    return st.none() | values if free or becomes_nan(dtype) else values


def _scalars(dtype: pa.DataType) -> st.SearchStrategy[Any]:
    types = pa.types
    if types.is_temporal(dtype):
        return st.integers(*RANGES.get(dtype, (-(2**63), 2**63 - 1)))
    if types.is_integer(dtype):
        return _integers(dtype)
    if types.is_floating(dtype):
        return st.floats(width=dtype.bit_width, allow_nan=False)
    if types.is_decimal(dtype):
        return _decimals(dtype)
    if types.is_boolean(dtype):
        return st.booleans()
    if types.is_fixed_size_binary(dtype):
        return st.binary(min_size=dtype.byte_width, max_size=dtype.byte_width)
    if dtype in (pa.string(), pa.large_string(), pa.string_view()):
        return st.text(max_size=20)
    return st.binary(max_size=20)


def _numbers(dtype: pa.DataType) -> pa.DataType:
    """``dtype`` with the numbers that its temporal values are kept as."""
    types = pa.types
    if types.is_fixed_size_list(dtype):
        return pa.list_(_numbers(dtype.value_type), dtype.list_size)
    if types.is_list(dtype):
        return pa.list_(_numbers(dtype.value_type))
    if types.is_large_list(dtype):
        return pa.large_list(_numbers(dtype.value_type))
    if types.is_temporal(dtype):
        return pa.int32() if dtype.bit_width == 32 else pa.int64()
    return dtype


def array_of(values: Sequence[Any], dtype: pa.DataType) -> pa.Array:
    return pa.array(values, _numbers(dtype)).cast(dtype)


SCALARS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64(), pa.bool_()),
    *(pa.decimal32(9, 2), pa.decimal64(18, 9), pa.decimal128(15, 0), pa.decimal128(38, 10)),
    *(pa.decimal128(38, 38), pa.decimal128(5, -3), pa.decimal256(76, 20), pa.decimal256(40, 0)),
    *(pa.date32(), pa.date64(), *RANGES),
    *(pa.timestamp(unit) for unit in UNITS),
    *(pa.timestamp(unit, zone) for unit in UNITS for zone in ZONES),
    *(pa.duration(unit) for unit in UNITS),
]
SCALARS = list(dict.fromkeys(SCALARS))
TEXTS = [
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3), pa.binary(0)),
]
LISTS = [
    *(pa.list_(dtype) for dtype in (pa.int8(), pa.uint64(), pa.float16(), pa.float32())),
    *(pa.list_(dtype) for dtype in (pa.bool_(), pa.date32(), pa.decimal128(20, 3))),
    *(pa.list_(dtype) for dtype in (pa.string(), pa.large_string(), pa.binary(), pa.binary(2))),
    pa.list_(pa.timestamp("us", "Europe/Berlin")),
    *(pa.large_list(dtype) for dtype in (pa.int64(), pa.bool_(), pa.string(), pa.time64("ns"))),
    *(pa.list_(pa.list_(pa.int32())), pa.list_(pa.list_(pa.list_(pa.string())))),
    *(pa.large_list(pa.list_(pa.float64())), pa.list_(pa.large_list(pa.duration("ms")))),
    *(pa.list_(pa.list_(pa.int16(), 2)), pa.list_(pa.list_(pa.list_(pa.float32(), 2), 1))),
]
FIXED_LISTS = [
    *(pa.list_(dtype, 3) for dtype in (pa.int8(), pa.uint8(), pa.int64(), pa.bool_())),
    *(pa.list_(dtype, 2) for dtype in (pa.float32(), pa.float64(), pa.decimal128(10, 4))),
    *(pa.list_(dtype, 1) for dtype in (pa.date32(), pa.time64("us"), pa.duration("s"))),
    pa.list_(pa.timestamp("ns", "America/St_Johns"), 2),
    *(pa.list_(pa.list_(pa.int32(), 2), 3), pa.list_(pa.list_(pa.float32(), 3), 2)),
    *(pa.list_(pa.list_(pa.date32(), 1), 1), pa.list_(pa.list_(pa.bool_(), 2), 2)),
    *(pa.list_(pa.list_(pa.list_(pa.uint8(), 2), 1), 3),),
    *(pa.list_(pa.string(), 2), pa.list_(pa.binary(2), 1), pa.list_(pa.list_(pa.int8()), 2)),
    pa.list_(pa.list_(pa.string(), 1), 2),
]


@pytest.mark.parametrize("dtype", [*SCALARS, *TEXTS, *LISTS, *FIXED_LISTS], ids=str)
@settings(max_examples=12)
@given(data=st.data())
def test_any_values_in_any_batches_come_back_as_pyarrow_has_them(
    dtype: pa.DataType, data: st.DataObject
) -> None:
    values = data.draw(st.lists(values_of(dtype), max_size=12))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3)))
    whole = array_of(values, dtype)

    ends = [0, *cuts, len(values)]
    chunks = [whole.slice(start, stop - start) for start, stop in itertools.pairwise(ends)]
    assert_stored(chunks, whole)


@pytest.mark.parametrize("dtype", [*SCALARS, *TEXTS, *LISTS, *FIXED_LISTS], ids=str)
def test_rows_from_the_middle_of_a_batch_and_no_rows_at_all_come_back(dtype: pa.DataType) -> None:
    values = values_at(dtype, 11)
    whole = array_of(values, dtype)

    assert_stored([whole.slice(3, 5)], array_of(values[3:8], dtype))
    assert_stored([whole.slice(11)], array_of([], dtype))
    assert_stored([whole.slice(4, 0), whole.slice(9), whole.slice(2, 0)], whole.slice(9))


def values_at(dtype: pa.DataType, count: int) -> list[Any]:
    """Ever the same values, each another one where the type has room for that."""
    types = pa.types
    if types.is_nested(dtype):
        inner = values_at(dtype.value_type, 64)
        fixed = dtype.list_size if types.is_fixed_size_list(dtype) else None
        return [inner[row : row + (row if fixed is None else fixed)] for row in range(count)]
    if types.is_decimal(dtype):
        return [Decimal(f"{row * 57 - 100}E{-dtype.scale}") for row in range(count)]
    if types.is_boolean(dtype):
        return [row % 3 == 0 for row in range(count)]
    if types.is_floating(dtype):
        return [row / 4 - 1 for row in range(count)]
    if types.is_integer(dtype) or types.is_temporal(dtype):
        return list(range(count))
    if types.is_fixed_size_binary(dtype):
        return [bytes([row] * dtype.byte_width) for row in range(count)]
    texts = ["ü" * (row % 5) + str(row) for row in range(count)]
    is_text = dtype in (pa.string(), pa.large_string(), pa.string_view())
    return list(texts) if is_text else [text.encode() for text in texts]


# -- decimals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [pa.decimal32(7, 2), pa.decimal64(15, 2), pa.decimal128(15, 2), pa.decimal256(50, 2)],
    ids=str,
)
def test_a_price_is_stored_as_python_reads_it(dtype: pa.DataType) -> None:
    cents = range(-2000, 2000)
    prices = pa.array([Decimal(f"{cent}E-2") for cent in cents], dtype)

    assert pack_column(prices).to_pylist() == [cent / 100 for cent in cents]
    assert 57 * 0.01 != 0.57  # as a cast of pyarrow has it


@pytest.mark.parametrize("last", [None, Decimal(2**53), Decimal(2**53 + 1), Decimal(10**25 + 1)])
def test_a_decimal_is_the_nearest_float_beside_nulls_and_large_ones(last: Decimal | None) -> None:
    numbers = [Decimal("0.57"), None, Decimal("-0.57"), last]
    array = pa.array(numbers, pa.decimal128(38, 2))

    found = pack_column(array, array.slice(1, 2))

    expected = [0.57, NAN, -0.57, NAN if last is None else float(last), NAN, -0.57]
    assert repr(found.to_pylist()) == repr(expected)


def test_what_lies_under_a_null_decimal_does_not_come_through() -> None:
    array = pa.array([Decimal("1.5"), Decimal(10**30)], pa.decimal128(38, 2))
    masked = pa.Array.from_buffers(array.type, 2, [pa.py_buffer(b"\1"), array.buffers()[1]])

    assert repr(pack_column(masked).to_pylist()) == repr([1.5, NAN])


# -- times and zones -------------------------------------------------------------------------------


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("unit", UNITS)
def test_a_time_with_a_zone_is_what_a_clock_there_says(unit: str, zone: str) -> None:
    dtype = pa.timestamp(unit, zone)
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    hour = 3600 * per_second
    # Either side of both changes of the clock in Berlin in 2024, and before 1970.
    moments = [1_711_846_800 * per_second, 1_729_990_800 * per_second, -7 * hour]
    array = pa.array([at + step for at in moments for step in (-hour, -1, 0, 1, hour)], dtype)

    found = pack_column(array)

    metadata = field_of(dtype).metadata
    back = found.cast(pa.timestamp(metadata[b"cache.unit"].decode()))
    zoned = pa.timestamp(unit, metadata[b"cache.timezone"].decode())
    assert back.view(pa.int64()).view(zoned).equals(array)
    assert metadata[b"cache.source_type"].decode() == str(dtype)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (pa.timestamp("us"), pa.timestamp("ns")),
        (pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC")),
        (pa.duration("s"), pa.duration("ms")),
        (pa.time32("s"), pa.time32("ms")),
        (pa.int64(), pa.timestamp("us")),
        (pa.date64(), pa.timestamp("us")),
        (pa.list_(pa.timestamp("us")), pa.list_(pa.timestamp("ns"))),
        (pa.list_(pa.duration("us"), 2), pa.list_(pa.duration("ns"), 2)),
    ],
    ids=str,
)
def test_batches_that_count_time_otherwise_are_refused(
    first: pa.DataType, later: pa.DataType
) -> None:
    arrays = [array_of(values_at(dtype, 1), dtype) for dtype in (first, later)]

    problem = problem_of(*arrays)

    assert f"column 'x' comes as {later}" in problem


@pytest.mark.parametrize("dtype", [pa.timestamp("us", "UTC"), pa.date32(), pa.bool_()], ids=str)
def test_a_batch_that_is_stored_values_already_is_taken_as_it_is(dtype: pa.DataType) -> None:
    array = array_of(values_at(dtype, 3), dtype)
    stored = pack_column(array)

    assert pack_column(array, stored).to_pylist() == 2 * stored.to_pylist()


# -- dictionaries ----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(st.none() | st.text(max_size=5), min_size=1, max_size=4),
            st.lists(st.none() | st.integers(0, 9), max_size=6),
            st.sampled_from([pa.int8(), pa.uint16(), pa.int32(), pa.int64()]),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(
        [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.binary_view()]
    ),
)
def test_dictionaries_that_differ_between_batches_give_their_values(
    parts: list[tuple[list[str | None], list[int | None], pa.DataType, bool]], dtype: pa.DataType
) -> None:
    chunks, expected = [], []
    for values, codes, index_type, ordered in parts:
        codes = [None if code is None else code % len(values) for code in codes]
        dictionary = pa.array(values, pa.string()).cast(dtype)
        indices = pa.array(codes, index_type)
        chunks.append(pa.DictionaryArray.from_arrays(indices, dictionary, ordered=ordered))
        known = dictionary.to_pylist()
        expected += [None if code is None else known[code] for code in codes]

    found = pack_column(*chunks)

    assert found.type == storage_type(dtype)
    assert found.to_pylist() == expected


@pytest.mark.parametrize("dtype", [*SCALARS, *FIXED_LISTS, pa.list_(pa.int8())], ids=str)
def test_dictionaries_of_other_values_give_their_values_too(dtype: pa.DataType) -> None:
    dictionary = array_of(values_at(dtype, 4), dtype)
    codes = [3, 0, 0, 2, 1, 3]
    first = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int8()), dictionary)
    second = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int8()), dictionary.slice(1, 2))

    found = pack_column(first.slice(1), second)

    plain = physical(dictionary)
    assert found.type == storage_type(dtype)
    assert found.to_pylist() == [plain[code] for code in [*codes[1:], 1, 1]]
    assert field_of(first.type).equals(field_of(dtype), check_metadata=True)


def test_a_null_among_the_codes_and_one_among_the_values_are_both_counted() -> None:
    codes = pa.array([0, 1, None, 0], pa.int8())
    integers = pa.DictionaryArray.from_arrays(codes, pa.array([7, None], pa.int64()))
    floats = pa.DictionaryArray.from_arrays(codes, pa.array([0.5, None], pa.float32()))

    assert "column 'x' holds 2 nulls" in problem_of(integers)
    assert repr(pack_column(floats).to_pylist()) == repr([0.5, NAN, NAN, 0.5])


def test_dictionaries_within_lists_give_their_values() -> None:
    codes = pa.array([0, 1, 1, None], pa.int8())
    words = pa.DictionaryArray.from_arrays(codes, pa.array(["a", "b"]))
    offsets = pa.array([0, 1, 4], pa.int32())
    points = pa.DictionaryArray.from_arrays(
        pa.array([1, 0], pa.int8()), pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2))
    )

    lists = pack_column(pa.ListArray.from_arrays(offsets, words))
    fixed = pack_column(pa.FixedSizeListArray.from_arrays(points, 2))

    assert lists.to_pylist() == [["a"], ["b", "b", None]]
    assert fixed.to_pylist() == [[[3, 4], [1, 2]]]


# -- nulls -----------------------------------------------------------------------------------------

NO_PLACE_FOR_NULL = [
    dtype for dtype in SCALARS if not (pa.types.is_floating(dtype) or pa.types.is_decimal(dtype))
]
ODD_NAME = 'an "odd" Name'


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("dtype", NO_PLACE_FOR_NULL, ids=str)
def test_the_coalesce_of_the_message_runs_and_puts_a_zero_in_place_of_each_null(
    dtype: pa.DataType, encoded: bool
) -> None:
    one, zero = [True, False] if dtype == pa.bool_() else [1, 0]
    array = array_of([one, None, zero, None], dtype)
    if encoded:
        array = pa.DictionaryArray.from_arrays(
            pa.array([0, None, 1, 2], pa.int32()), array_of([one, zero, None], dtype)
        )
    problem = problem_of(array, name=ODD_NAME)
    assert f"column {ODD_NAME!r} holds 2 nulls" in problem

    mended = query(f"SELECT {suggested(problem, 'COALESCE')} FROM source", array, ODD_NAME)

    assert pack_column(mended).to_pylist() == [1, 0, 0, 0]
    assert field_of(mended.type).equals(field_of(dtype), check_metadata=True)


@pytest.mark.parametrize("dtype", [d for d in SCALARS if d not in NO_PLACE_FOR_NULL], ids=str)
def test_a_null_among_floats_and_decimals_is_nan(dtype: pa.DataType) -> None:
    array = array_of([None, *values_at(dtype, 2), None], dtype)

    assert np.isnan(pack_column(array).to_pylist()).tolist() == [True, False, False, True]


@pytest.mark.parametrize("dtype", [*TEXTS, *LISTS], ids=str)
def test_a_null_text_or_list_stays_null(dtype: pa.DataType) -> None:
    array = array_of([None, *values_at(dtype, 2), None], dtype)

    assert [value is None for value in pack_column(array).to_pylist()] == [True, False, False, True]
    assert field_of(dtype).nullable


def test_a_null_within_a_list_of_fixed_size_lists_stays_null_and_the_type_says_so() -> None:
    array = pa.array([[[1, None], None], None], pa.list_(pa.list_(pa.int16(), 2)))

    found = pack_column(array)

    assert found.to_pylist() == [[[1, None], None], None]
    assert found.type.value_type.value_field.nullable


@pytest.mark.parametrize("dtype", [d for d in FIXED_LISTS if is_fixed(d)], ids=str)
def test_the_cast_of_the_message_makes_room_for_a_null_in_place_of_a_fixed_size_list(
    dtype: pa.DataType,
) -> None:
    array = pa.concat_arrays([array_of(values_at(dtype, 2), dtype), pa.nulls(1, dtype)])
    problem = problem_of(array, name=ODD_NAME)
    assert f"column {ODD_NAME!r} holds 1 null," in problem
    assert "filter those rows out" in problem

    if pa.types.is_temporal(leaf_of(dtype)):  # whose unit a cast to numbers would lose
        assert "arrow_cast" not in problem
    else:
        mended = query(f"SELECT {suggested(problem, 'arrow_cast')} FROM source", array, ODD_NAME)
        assert pack_column(mended).to_pylist() == physical(array)


# -- what cannot be stored -------------------------------------------------------------------------

REFUSED = [
    *(pa.null(), pa.struct([("a", pa.int8())]), pa.map_(pa.string(), pa.int8())),
    *(pa.dense_union([pa.field("a", pa.int8())]), pa.sparse_union([pa.field("a", pa.int8())])),
    *(pa.month_day_nano_interval(), pa.run_end_encoded(pa.int32(), pa.int8())),
    *(pa.list_view(pa.int8()), pa.large_list_view(pa.int8()), pa.list_(pa.int8(), 0)),
    *(pa.uuid(), pa.json_(), pa.bool8(), pa.fixed_shape_tensor(pa.int8(), [2, 2])),
]


@pytest.mark.parametrize("inner", REFUSED, ids=str)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda dtype: dtype,
        pa.list_,
        pa.large_list,
        lambda dtype: pa.list_(dtype, 2),
        lambda dtype: pa.list_(pa.list_(dtype)),
        lambda dtype: pa.dictionary(pa.int8(), dtype),
    ],
    ids=["itself", "list", "large_list", "fixed_size_list", "list of lists", "dictionary"],
)
def test_a_type_that_cannot_be_stored_is_refused_by_name(inner: pa.DataType, wrap: Any) -> None:
    dtype = wrap(inner)
    schema = pa.schema([("fine", pa.int8()), ("odd", dtype)])

    with pytest.raises(RequestError) as caught:
        storage_schema(schema)
    assert str(caught.value).endswith(f": odd: {dtype}")


def test_a_value_that_its_storage_type_cannot_hold_is_refused_by_column() -> None:
    for later in (pa.array([2.5]), pa.array([Decimal("2.5")])):
        problem = problem_of(pa.array([1], pa.int32()), later)
        assert problem.startswith("column 'x' cannot be stored as int32: ")


# -- more than 2 GiB in a shard --------------------------------------------------------------------

_CHUNK_BYTES = 2**26
_CHUNKS = 2**31 // _CHUNK_BYTES + 1


def _text(dtype: pa.DataType) -> pa.Array:
    """64 rows of 1 MiB."""
    return pa.array(["x" * 2**20] * 64, pa.large_string()).cast(dtype)


def _bytes_in_lists(list_type: type) -> pa.Array:
    """One row of 2**26 numbers."""
    offsets = pa.array([0, _CHUNK_BYTES])
    values = pa.array(np.zeros(_CHUNK_BYTES, np.uint8))
    if list_type is pa.ListArray:
        offsets = offsets.cast(pa.int32())
    return list_type.from_arrays(offsets, values)


# One batch again and again: what it holds is in memory once.
TOO_LONG = {
    "string": (lambda: _text(pa.string()), "LargeUtf8"),
    "binary": (lambda: _text(pa.string()).cast(pa.binary()), "LargeBinary"),
    "list of numbers": (lambda: _bytes_in_lists(pa.ListArray), "LargeList(UInt8)"),
    "list of strings": (
        lambda: pa.ListArray.from_arrays(pa.array([0, 64], pa.int32()), _text(pa.string())),
        "LargeList(LargeUtf8)",
    ),
    "large list of strings": (
        lambda: pa.LargeListArray.from_arrays(pa.array([0, 64]), _text(pa.string())),
        "LargeList(LargeUtf8)",
    ),
}


@pytest.mark.parametrize(("make", "large"), TOO_LONG.values(), ids=TOO_LONG)
def test_a_column_that_outgrows_its_offsets_fails_by_name_with_a_cast_that_mends_it(
    make: Any, large: str
) -> None:
    chunk = make()

    problem = problem_of(*[chunk] * _CHUNKS)

    cast = f'arrow_cast("x", \'{large}\') AS "x"'
    assert problem.startswith(f"column 'x' of type {chunk.type} does not fit in one shard")
    assert problem.endswith(f"choose a smaller target_shard_bytes, or write {cast} in the sql")
    row = chunk.slice(0, 1)
    mended = query(f"SELECT {suggested(problem, 'arrow_cast')} FROM source", row)
    assert pa.types.is_large_list(mended.type) or mended.type == {
        "LargeUtf8": pa.large_string(),
        "LargeBinary": pa.large_binary(),
    }.get(large)
    assert pack_column(mended).cast(chunk.type).equals(row)


def test_lists_of_times_that_outgrow_their_offsets_are_not_cast_to_bare_numbers() -> None:
    times = pa.array(np.zeros(2**23, "M8[us]"))
    batch = batch_of(pa.ListArray.from_arrays(pa.array([0, 2**23], pa.int32()), times))
    builder = ShardBuilder(storage_schema(batch.schema))
    for _ in range(2**31 // 2**23 + 1):
        builder.append(batch)

    with pytest.raises(LoadError, match=r"does not fit in one shard .*target_shard_bytes$"):
        builder.finish()


@pytest.mark.skipif(
    psutil.virtual_memory().available < 6 * 2**30, reason="takes 3 GiB: less than 6 GiB are free"
)
def test_large_strings_go_past_2_gib_in_a_shard() -> None:
    chunk = _text(pa.large_string())
    last = pa.array(["the", None, "end"], pa.large_string())
    builder = ShardBuilder(storage_schema(batch_of(chunk).schema))
    for array in [*[chunk] * _CHUNKS, last]:
        builder.append(batch_of(array))

    stored = builder.finish()

    found = builder.layout.unpack(stored).column(0)
    assert found.nbytes > 2**31 + 2**26
    assert found.slice(len(found) - 4).to_pylist() == ["x" * 2**20, "the", None, "end"]
    assert found[0].as_py() == "x" * 2**20
