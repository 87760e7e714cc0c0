"""Generated tables of every Arrow type that can be stored, and their rows as they are stored.

Columns are built from buffers, so that there are nulls at each level, values below nulls, offsets
of slices, and lists with values that no row has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from cache_client.reading.rows import Rows
from cache_protocol.storage.flat_columns import take_apart
from cache_protocol.storage.layout import Layout, from_matrix, pool_matrix, with_large_offsets
from cache_protocol.storage.nested_values import retyped

Random = np.random.Generator
_UNITS = ("s", "ms", "us", "ns")
_DAY_S = 86_400
_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_TEXTS = ["", "a", "a\0b", "日本", "x" * 20]

NUMBERS = (
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
)
TIMES = (
    *(pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    *(pa.duration(unit) for unit in _UNITS),
    *(pa.timestamp(unit) for unit in _UNITS),
    *(pa.timestamp("us", zone) for zone in ("UTC", "Europe/Zurich", "+05:30")),
)
DECIMALS = (
    *(pa.decimal32(9, 2), pa.decimal64(18, -3), pa.decimal128(1, 0), pa.decimal128(18, 4)),
    *(pa.decimal128(19, 18), pa.decimal128(38, 30), pa.decimal256(10, 2), pa.decimal256(76, 5)),
)
TEXTS = (
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view()),
)
DICTIONARIES = tuple(
    pa.dictionary(index, values)
    for index in (pa.int8(), pa.uint16(), pa.int32(), pa.int64())
    for values in (pa.string(), pa.large_string(), pa.int64(), pa.float32(), pa.timestamp("us"))
)
OTHERS = (
    *(pa.bool_(), pa.null(), pa.month_day_nano_interval()),
    *(pa.binary(1), pa.binary(3), pa.binary(16)),
    *(pa.uuid(), pa.bool8(), pa.json_(pa.string()), pa.fixed_shape_tensor(pa.int32(), [2, 2])),
    *(pa.run_end_encoded(pa.int32(), pa.int64()), pa.run_end_encoded(pa.int16(), pa.string())),
)


def random_type(rng: Random, depth: int) -> pa.DataType:
    """A type with so many levels of lists, structs and maps at most."""
    if not depth or rng.random() < 0.2:
        groups = (NUMBERS, TIMES, DECIMALS, TEXTS, DICTIONARIES, OTHERS)
        return _one(rng, _one(rng, groups))
    item = _random_field(rng, "item", depth - 1)
    kind = rng.integers(0, 8)
    if kind < 3:
        names = ["a", "b", "c d"][: rng.integers(0, 4)]
        return pa.struct([_random_field(rng, name, depth - 1) for name in names])
    if kind < 5:
        return pa.list_(item, int(rng.integers(0, 4)))
    if kind == 5:
        return pa.map_(_one(rng, (pa.string(), pa.int32(), pa.date32())), item.type)
    return _one(rng, (pa.list_, pa.large_list, pa.list_view, pa.large_list_view))(item)


def _random_field(rng: Random, name: str, depth: int) -> pa.Field:
    metadata = {"unit": "m"} if rng.random() < 0.2 else None
    dtype = random_type(rng, depth)
    return pa.field(name, dtype, rng.random() < 0.7 or pa.types.is_null(dtype), metadata)


def _one(rng: Random, choices: Sequence[Any]) -> Any:
    return choices[rng.integers(0, len(choices))]


def random_batch(seed: int, depth: int, num_columns: int = 3) -> pa.RecordBatch:
    """A batch of 0 to 9 rows, which is a slice of a longer one."""
    rng = np.random.default_rng(seed)
    before, count, after = (int(rng.integers(0, most)) for most in (4, 10, 3))
    schema = pa.schema([_random_field(rng, name, depth) for name in "xyz"[:num_columns]])
    arrays = [array_of(field, before + count + after, rng) for field in schema]
    whole = pa.RecordBatch.from_arrays(arrays, schema=schema)
    whole.validate(full=True)
    return whole.slice(before, count)


seeds = st.integers(0, 2**32 - 1)
"""Of `random_batch`: a strategy of types and values would be too slow."""


def array_of(field: pa.Field, count: int, rng: Random) -> pa.Array:
    """Values of a field, with nulls if it may have them."""
    dtype, types = field.type, pa.types
    nulls = None
    if field.nullable and rng.random() < 0.7:
        nulls = rng.random(count) < rng.choice([0.3, 0.3, 1.0])
    if isinstance(dtype, pa.BaseExtensionType):
        storage = array_of(field.with_type(dtype.storage_type), count, rng)
        return pa.ExtensionArray.from_storage(dtype, storage)
    if types.is_null(dtype):
        return pa.nulls(count)
    if types.is_dictionary(dtype):
        values = array_of(pa.field("", dtype.value_type, nullable=False), 4, rng).unique()
        codes = pa.array(rng.integers(0, len(values), count), dtype.index_type, mask=nulls)
        return pa.DictionaryArray.from_arrays(codes, values)
    if types.is_run_end_encoded(dtype):
        values = array_of(field.with_type(dtype.value_type), count, rng)
        return pa.compute.run_end_encode(values, run_end_type=dtype.run_end_type)
    if types.is_struct(dtype):
        children = [array_of(child, count, rng) for child in dtype]
        return _of_buffers(dtype, count, nulls, [], children)
    if types.is_fixed_size_list(dtype):
        child = array_of(dtype.value_field, count * dtype.list_size, rng)
        return _of_buffers(dtype, count, nulls, [], [child])
    if types.is_map(dtype):
        return _lists(dtype, count, nulls, rng, lambda n: _entries(dtype, n, rng))
    if types.is_nested(dtype):
        return _lists(dtype, count, nulls, rng, lambda n: array_of(dtype.value_field, n, rng))
    if dtype in TEXTS:
        texts = [_TEXTS[n] for n in rng.integers(0, len(_TEXTS), count)]
        kind = pa.large_string() if "string" in str(dtype) else pa.large_binary()
        return pa.array(texts, kind, mask=nulls).cast(dtype)
    if types.is_boolean(dtype):
        return pa.array(rng.random(count) < 0.5, mask=nulls)
    return _of_buffers(dtype, count, nulls, [pa.py_buffer(_numbers(dtype, count, rng))], [])


def _numbers(dtype: pa.DataType, count: int, rng: Random) -> bytes:
    types = pa.types
    if types.is_floating(dtype):
        values = rng.choice([0.0, -0.0, 1.5, -2.25, np.inf, 1e-5], count)
        return values.astype(f"f{dtype.bit_width // 8}").tobytes()
    if types.is_decimal(dtype):
        most = 10**dtype.precision - 1
        size = dtype.bit_width // 8
        found = [int(rng.random() * 2 * most) - most for _ in range(count)]
        ends = [max(-most, min(most, n)) for n in found]
        return b"".join(n.to_bytes(size, "little", signed=True) for n in ends)
    if types.is_time(dtype):
        values = rng.integers(0, _DAY_S * _PER_S[dtype.unit], count)
        return values.astype(f"i{dtype.bit_width // 8}").tobytes()
    if dtype == pa.date64():
        return (rng.integers(-10_000, 30_000, count) * (_DAY_S * 1000)).tobytes()
    if types.is_timestamp(dtype) or types.is_duration(dtype) or types.is_date32(dtype):
        scale = 1 if types.is_date32(dtype) else _PER_S[dtype.unit] * _DAY_S
        values = rng.integers(-10_000, 30_000, count) * scale
        return values.astype(f"i{dtype.bit_width // 8}").tobytes()
    return rng.bytes(count * (dtype.bit_width // 8))


def _lists(
    dtype: pa.DataType,
    count: int,
    nulls: np.ndarray | None,  # type: ignore[type-arg]
    rng: Random,
    child_of: Callable[[int], pa.Array],
) -> pa.Array:
    """Lists after values that no row has; null ones may have values."""
    lengths = rng.integers(0, 3, count)
    skipped = int(rng.integers(0, 3))
    offsets = skipped + np.concatenate([[0], np.cumsum(lengths)])
    child = child_of(int(offsets[-1]) + 1)
    types = pa.types
    is_large = types.is_large_list(dtype) or types.is_large_list_view(dtype)
    number = np.int64 if is_large else np.int32
    if types.is_list_view(dtype) or types.is_large_list_view(dtype):
        order = rng.permutation(count)  # views may lie in any order
        starts, sizes = offsets[:-1][order], lengths[order]
        buffers = [pa.py_buffer(each.astype(number).tobytes()) for each in (starts, sizes)]
    else:
        buffers = [pa.py_buffer(offsets.astype(number).tobytes())]
    return _of_buffers(dtype, count, nulls, buffers, [child])


def _entries(dtype: pa.MapType, count: int, rng: Random) -> pa.Array:
    keys = array_of(dtype.key_field, count, rng)
    items = array_of(dtype.item_field, count, rng)
    fields = [dtype.key_field, dtype.item_field]
    return pa.StructArray.from_arrays([keys, items], fields=fields)


def _of_buffers(
    dtype: pa.DataType,
    count: int,
    nulls: np.ndarray | None,  # type: ignore[type-arg]
    buffers: Sequence[pa.Buffer],
    children: Sequence[pa.Array],
) -> pa.Array:
    valid = None
    if nulls is not None:
        valid = pa.py_buffer(np.packbits(~nulls, bitorder="little").tobytes())
    return pa.Array.from_buffers(dtype, count, [valid, *buffers], children=list(children))


def stored_batches(
    pieces: Sequence[pa.RecordBatch], *, is_large: bool = False
) -> tuple[Layout, list[pa.RecordBatch]]:
    """Batches of one schema as they are stored, with null bits for what is null in any of them.

    Args:
        is_large: with offsets of 64 bits.
    """
    schema = pieces[0].schema
    plain = Layout(with_large_offsets(schema) if is_large else schema)
    flats = [take_apart(plain.tree, piece.columns) for piece in pieces]
    layout = plain.with_nulls({name for flat in flats for name in flat.nulls})
    stored = []
    for piece, flat in zip(pieces, flats, strict=True):
        arrays = []
        for column in layout.columns:
            if column.kind == "plain":
                arrays.append(retyped(flat.values[column.names[0]], column.field.type))
                continue
            if column.kind == "nulls":
                matrix = layout.nulls.pack(flat.nulls, piece.num_rows)
            elif column.kind == "matrix":
                matrix = np.ascontiguousarray(flat.values[column.names[0]])
            else:
                assert column.dtype is not None
                matrix = pool_matrix(piece.num_rows, column.width, column.dtype)
                for index, name in enumerate(column.names):
                    matrix[:, index] = flat.values[name]
            arrays.append(from_matrix(matrix, column.field))
        stored.append(pa.RecordBatch.from_arrays(arrays, schema=layout.schema))
    return layout, stored


def rows_of(batch: pa.RecordBatch) -> Rows:
    """The rows of a logical batch, as a reader has them."""
    layout, (stored,) = stored_batches([batch])
    return Rows.of_batch(layout, stored)


def cut_at(batch: pa.RecordBatch, places: Sequence[int]) -> list[pa.RecordBatch]:
    """The pieces of a batch between these rows."""
    bounds = sorted({0, batch.num_rows, *(min(place, batch.num_rows) for place in places)})
    return [batch.slice(a, b - a) for a, b in pairwise(bounds)] or [batch]
