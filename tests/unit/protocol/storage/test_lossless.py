"""Every pair of types, at the edges of both: a value survives exactly, or is refused by its row.

The reference computes with Python's integers, fractions and decimals, and casts nothing.
"""

from __future__ import annotations

import decimal
import functools
import itertools
import math
import re
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cache_protocol.errors import SchemaError
from cache_protocol.storage.lossless import (
    Verdict,
    can_become,
    column_problems,
    conform,
    conform_batch,
)
from cache_protocol.storage.type_rules import may_expand

DAY_NS = 86_400 * 10**9
UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
EDGES_32, EDGES_64 = [-(2**31), -1, 0, 1, 2**31 - 1], [-(2**63), -1, 0, 1, 2**63 - 1]
YEARS = [-9_223_372_037, 9_223_372_036, 9_223_372_037]  # seconds of 1677 and 2262
NEVER = object()

pytestmark = pytest.mark.filterwarnings("error")


def ints(bits: int, *, signed: bool) -> list[Any]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    odd = [2**p + d for p in (8, 11, 24, 53) for d in (-1, 0, 1)]
    inside = [127, 128, 255, 256, 2**15, 2**16, 65_504, 65_520, 2**31, 2**32, 2**60, 2**63, -1, 1]
    wanted = [low, low + 1, high, high - 1, 0, *inside, *odd, *(-value for value in odd)]
    return [value for value in dict.fromkeys(wanted) if low <= value <= high]


def floats(bits: int) -> list[Any]:
    kind = {16: "e", 32: "f", 64: "d"}[bits]
    tiny = {16: 2.0**-24, 32: 2.0**-149, 64: 5e-324}[bits]
    large = {16: 65504.0, 32: (2 - 2.0**-23) * 2.0**127, 64: 1.7976931348623157e308}[bits]
    values = [0.0, -0.0, 1.5, -2.0, tiny, -tiny, large, -large, math.inf, -math.inf, math.nan]
    values += [2.0**53 - 1, 0.1, 1e300, 2.0**-24, 2.0**-149, 65504.0, 65520.0, 2.0**-25]
    kept = []
    for value in values:
        try:
            kept.append(struct.unpack(kind, struct.pack(kind, value))[0])
        except OverflowError:
            continue
    return kept


def decimals(precision: int, scale: int) -> list[Any]:
    most = 10**precision - 1
    numbers = [0, 1, -1, most, -most, 10 ** (precision // 2), 255, 256, 12, 2**63]
    numbers += [5 * 10 ** max(scale, 0)]
    with decimal.localcontext(prec=100):
        return [Decimal(n).scaleb(-scale) for n in dict.fromkeys(numbers) if abs(n) <= most]


def column(dtype: pa.DataType, values: list[Any]) -> pa.Array:
    """Values as a column; of times, from their counts."""
    if pa.types.is_temporal(dtype) and not pa.types.is_interval(dtype):
        return pa.array(values, f"int{dtype.bit_width}").view(dtype)
    if dtype == pa.float16():
        return pa.array([None if v is None else np.float16(v) for v in values], dtype)
    return pa.array(values, dtype)


ZONES = (None, "UTC", "Asia/Tokyo")
STAMPS = {
    unit: [
        value
        for value in [*EDGES_64, DAY_NS // ns, *(year * (10**9 // ns) for year in YEARS)]
        if -(2**63) <= value < 2**63
    ]
    for unit, ns in UNITS.items()
}
TEXTS = ["", "a", "a\0", "é" * 40, "\U0001f600"]
BLOBS = [b"", b"ab", b"\xff\0", b"abc", b"x" * 40]
FLAT: dict[pa.DataType, list[Any]] = {
    pa.null(): [],
    pa.bool_(): [True, False],
    **{getattr(pa, f"int{bits}")(): ints(bits, signed=True) for bits in (8, 16, 32, 64)},
    **{getattr(pa, f"uint{bits}")(): ints(bits, signed=False) for bits in (8, 16, 32, 64)},
    **{getattr(pa, f"float{bits}")(): floats(bits) for bits in (16, 32, 64)},
    **{
        kind(precision, scale): decimals(precision, scale)
        for kind, precision, scale in (
            (pa.decimal32, 9, 2),
            (pa.decimal64, 18, 0),
            (pa.decimal128, 5, 2),
            (pa.decimal128, 3, 0),
            (pa.decimal128, 38, 0),
            (pa.decimal128, 38, 10),
            (pa.decimal128, 6, -2),
            (pa.decimal256, 76, 20),
        )
    },
    pa.date32(): [*EDGES_32, 106_751, 106_752, -106_752],
    pa.date64(): [86_400_000 * day for day in (-1, 0, 1, 2**31 - 1, 2**31, 106_751_991_167)],
    **{
        (pa.time32 if unit in ("s", "ms") else pa.time64)(unit): [0, 1, 1000, DAY_NS // ns - 1]
        for unit, ns in UNITS.items()
    },
    **{pa.timestamp(unit, zone): STAMPS[unit] for unit in UNITS for zone in ZONES},
    **{pa.duration(unit): STAMPS[unit] for unit in UNITS},
    pa.month_day_nano_interval(): [(1, 2, 3)],
    **{dtype: TEXTS for dtype in (pa.string(), pa.large_string(), pa.string_view())},
    **{dtype: BLOBS for dtype in (pa.binary(), pa.large_binary(), pa.binary_view())},
    pa.binary(2): [b"ab", b"\xff\0"],
    pa.binary(3): [b"abc"],
}
INNER = (
    pa.null(),
    pa.int8(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.string_view(),
    pa.decimal128(5, 2),
    pa.timestamp("us"),
    pa.bool_(),
)


def lists_of(dtype: pa.DataType) -> dict[pa.DataType, list[Any]]:
    values = [v for v in FLAT[dtype] if not isinstance(v, float) or v == v][:6]
    rows = [[], [*values], [None], [*values[:2]], [None, *values[:1]]]
    made = {
        pa.list_(dtype): rows,
        pa.large_list(dtype): rows,
        pa.list_view(dtype): rows,
        pa.list_(dtype, 2): [[None, None], *([[*values[:2]]] if len(values) > 1 else [])],
        pa.list_(dtype, 3): [[None] * 3],
    }
    if values:
        required = pa.field("item", dtype, nullable=False)
        made[pa.list_(required)] = [[], values]
        made[pa.list_(required, 2)] = [[values[0], values[-1]]]
    return made


A, B = pa.field("a", pa.int64()), pa.field("b", pa.string())
NESTED: dict[pa.DataType, list[Any]] = {
    **{dtype: rows for inner in INNER for dtype, rows in lists_of(inner).items()},
    pa.struct([A, B]): [{"a": 1, "b": "x"}, {"a": 2**40, "b": None}, {"a": None, "b": ""}],
    pa.struct([B, A]): [{"b": "x", "a": 300}],
    pa.struct([pa.field("a", pa.int8()), pa.field("b", pa.string_view())]): [{"a": 1, "b": "x"}],
    pa.struct([A.with_nullable(False), B]): [{"a": 1, "b": "x"}],
    pa.struct([A]): [{"a": 1}],
    pa.struct([pa.field("a", pa.string())]): [{"a": "1"}],
    pa.list_(pa.struct([A])): [[{"a": 1}, None, {"a": 2**40}], []],
    pa.large_list(pa.struct([pa.field("a", pa.int8())])): [[{"a": 1}], [None]],
    pa.list_(pa.list_(pa.int64(), 2)): [[[1, 2], None, [3, 2**40]], []],
    pa.list_(pa.list_(pa.int8())): [[[1, 2], [], None], [[1]]],
    pa.map_(pa.string(), pa.int64()): [[("k", 1), ("l", 2**40)], [], [("k", None)]],
    pa.map_(pa.large_string(), pa.int8()): [[("k", 1)], []],
    pa.map_(pa.int8(), pa.int8()): [[(1, 1)]],
    pa.map_(pa.string(), pa.list_(pa.int8())): [[("k", [1, None])]],
    pa.dictionary(pa.int8(), pa.string()): ["a", "", "a"],
    pa.dictionary(pa.uint32(), pa.string_view()): ["a", "é" * 40, "a"],
    pa.dictionary(pa.int8(), pa.string(), ordered=True): ["b", "a"],
    pa.dictionary(pa.int8(), pa.int64()): [1, 2**40, 1],
    pa.dictionary(pa.int32(), pa.float64()): [0.5, 0.1],
    pa.list_(pa.dictionary(pa.int8(), pa.string())): [["a", "b"], [], [None]],
    pa.uuid(): [b"0123456789abcdef"],
    pa.binary(16): [b"0123456789abcdef"],
    pa.json_(): ["{}"],
    pa.bool8(): [True],
    pa.run_end_encoded(pa.int32(), pa.int64()): [1, 1, 2],
}  # fmt: skip


def nested_column(dtype: pa.DataType, values: list[Any]) -> pa.Array:
    kinds = pa.types
    if isinstance(dtype, pa.BaseExtensionType):
        storage = [int(v) if isinstance(v, bool) else v for v in values]
        return pa.ExtensionArray.from_storage(dtype, pa.array(storage, dtype.storage_type))
    if kinds.is_dictionary(dtype):
        known = list(dict.fromkeys(v for v in values if v is not None))
        codes = [None if v is None else known.index(v) for v in values]
        return pa.DictionaryArray.from_arrays(
            pa.array(codes, dtype.index_type),
            pa.array(known, dtype.value_type),
            ordered=dtype.ordered,
        )
    if kinds.is_list(dtype) and kinds.is_dictionary(dtype.value_type):
        plain = pa.array(values, pa.list_(dtype.value_type.value_type))
        inner = nested_column(dtype.value_type, plain.values.to_pylist())
        return pa.ListArray.from_arrays(plain.offsets, inner)
    if kinds.is_run_end_encoded(dtype):
        return pa.compute.run_end_encode(pa.array(values, dtype.value_type))
    return pa.array(values, dtype)


# -- the reference ------------------------------------------------------------------------------


@functools.cache
def family(dtype: pa.DataType) -> str:
    kinds = pa.types
    for name in (
        "null",
        "boolean",
        "integer",
        "floating",
        "decimal",
        "date",
        "time",
        "duration",
        "struct",
        "map",
        "interval",
        "dictionary",
        "run_end_encoded",
    ):
        if getattr(kinds, f"is_{name}")(dtype):
            return name
    if kinds.is_timestamp(dtype):
        return f"timestamp {dtype.tz}"
    if isinstance(dtype, pa.BaseExtensionType):
        return "extension"
    for word in ("list", "string", "binary"):
        if word in str(dtype):
            return word
    raise AssertionError(dtype)


@functools.cache
def never(old: pa.DataType, new: pa.DataType) -> bool:
    """The documented rule."""
    if old == new:
        return False
    a, b = family(old), family(new)
    if a == "null":
        return b == "run_end_encoded"
    if b == "extension":
        return True
    if a == "extension":
        return old.extension_name == "arrow.bool8" or never(old.storage_type, new)
    if "dictionary" in (a, b):
        return never(
            old.value_type if a == "dictionary" else old,
            new.value_type if b == "dictionary" else new,
        )
    if (a, b) in {("integer", "floating"), ("integer", "decimal"), ("date", "timestamp None")}:
        return False
    if (a, b) == ("decimal", "integer"):
        return bool(old.scale > 0)
    if a != b or a in ("boolean", "interval", "run_end_encoded"):
        return True
    sizes = [
        int(str(t).partition("[")[2][:-1]) for t in (old, new) if pa.types.is_fixed_size_binary(t)
    ]
    sizes += [t.list_size for t in (old, new) if pa.types.is_fixed_size_list(t)]
    if len({*sizes}) > 1:
        return True
    if a == "list":
        return never(old.value_type, new.value_type)
    if a == "map":
        return never(old.key_type, new.key_type) or never(old.item_type, new.item_type)
    if a == "struct":
        names = {f.name for f in old} == {f.name for f in new}
        return not names or any(never(old.field(f.name).type, f.type) for f in new)
    return False


def unit_ns(dtype: pa.DataType) -> int:
    if pa.types.is_date32(dtype):
        return DAY_NS
    return 10**6 if pa.types.is_date64(dtype) else UNITS[dtype.unit]


def exact_float(value: int | float, bits: int) -> Any:
    kind = {16: "e", 32: "f", 64: "d"}[bits]
    number = float(value)
    if isinstance(value, int) and int(number) != value:
        return NEVER
    try:
        found = struct.unpack(kind, struct.pack(kind, number))[0]
    except OverflowError:
        return NEVER
    return found if found != found or found == value else NEVER


def becomes(value: Any, old: pa.DataType, new: pa.DataType) -> Any:
    """The meaning of a value of ``old`` in ``new``, or `NEVER`."""
    kinds = pa.types
    if old == new or value is None:
        return value
    if isinstance(old, pa.BaseExtensionType):
        return becomes(value, old.storage_type, new)
    if kinds.is_dictionary(old):
        return becomes(value, old.value_type, new)
    if kinds.is_dictionary(new):
        return becomes(value, old, new.value_type)
    if kinds.is_integer(new):
        bits, signed = new.bit_width, kinds.is_signed_integer(new)
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
        return int(value) if low <= value < high else NEVER
    if kinds.is_floating(new):
        return exact_float(value, new.bit_width)
    if kinds.is_decimal(new):
        with decimal.localcontext(prec=200):
            number = Decimal(value).scaleb(new.scale)
            whole = number == number.to_integral_value() and abs(number) < 10**new.precision
        return Decimal(value) if whole else NEVER
    if kinds.is_temporal(new):
        count, rest = divmod(value * unit_ns(old), unit_ns(new))
        most = 2 ** (new.bit_width - 1)
        return count if rest == 0 and -most <= count < most else NEVER
    if kinds.is_fixed_size_binary(new):
        return value if len(value) == new.byte_width else NEVER
    if family(new) == "list":
        if kinds.is_fixed_size_list(new) and len(value) != new.list_size:
            return NEVER
        return whole_or_never(list, [within(v, old.value_field, new.value_field) for v in value])
    if kinds.is_map(new):
        pairs = [
            (becomes(k, old.key_type, new.key_type), within(v, old.item_field, new.item_field))
            for k, v in value
        ]
        return NEVER if any(NEVER in (k, v) for k, v in pairs) else pairs
    if kinds.is_struct(new):
        found = {f.name: within(value[f.name], old.field(f.name), f) for f in new}
        return NEVER if any(v is NEVER for v in found.values()) else found
    return value


def whole_or_never(kind: Any, values: list[Any]) -> Any:
    return NEVER if any(value is NEVER for value in values) else kind(values)


def within(value: Any, old: pa.Field, new: pa.Field) -> Any:
    if value is None and not new.nullable:
        return NEVER
    return becomes(value, old.type, new.type)


def meanings(array: pa.Array) -> list[Any]:
    """The values of a column, each exactly; times as counts of their unit."""
    dtype, kinds = array.type, pa.types
    if isinstance(dtype, pa.BaseExtensionType):
        return meanings(array.storage)
    if kinds.is_run_end_encoded(dtype):
        return meanings(pa.compute.run_end_decode(array))
    if kinds.is_interval(dtype) or kinds.is_null(dtype) or kinds.is_boolean(dtype):
        return array.to_pylist()
    if kinds.is_temporal(dtype):
        return array.view(f"int{dtype.bit_width}").to_pylist()
    if kinds.is_map(dtype):
        return [None if row is None else row.as_py() for row in array]
    if family(dtype) == "list":
        return [meanings(row.values) if row.is_valid else None for row in array]
    if kinds.is_dictionary(dtype):
        known = meanings(array.dictionary)
        return [None if code is None else known[code] for code in array.indices.to_pylist()]
    if kinds.is_struct(dtype):
        columns = [meanings(values) for values in array.flatten()]
        names = [field.name for field in dtype]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        return [
            row if valid.as_py() else None
            for row, valid in zip(rows, array.is_valid(), strict=True)
        ]
    return array.to_pylist()


def exact(value: Any) -> Any:
    """Tells -0.0 from 0.0 and 1 from 1.0 and True, and is equal for NaN."""
    if isinstance(value, list):
        return [exact(each) for each in value]
    if isinstance(value, tuple):
        return tuple(exact(each) for each in value)
    if isinstance(value, dict):
        return {name: exact(each) for name, each in value.items()}
    if isinstance(value, np.float16):  # of older releases of pyarrow
        value = float(value)
    return (type(value).__name__, value if isinstance(value, Decimal) else repr(value))


def sliced(make: Any, dtype: pa.DataType, values: list[Any]) -> pa.Array:
    """The values and a null, with a value in front and one behind that a slice leaves out."""
    column = make(dtype, [*values[-1:], *values, None, *values[:1]])
    return column.slice(min(len(values), 1), len(values) + 1)


def check_pair(old: pa.DataType, new: pa.DataType, column: pa.Array) -> tuple[Verdict, bool]:
    """Checks one pair; returns the verdict, and whether each value of the edges fits."""
    verdict = can_become(old, new)
    assert (verdict is Verdict.NEVER) == never(old, new)
    if verdict is Verdict.NEVER:
        with pytest.raises(SchemaError, match=r"column 'x' comes as .*, which cannot become"):
            conform("x", column.slice(0, 0), new)
        return verdict, True
    rows = meanings(column)
    wanted = [becomes(value, old, new) for value in rows]
    misfits = [row for row, value in enumerate(wanted) if value is NEVER]
    kept = [row for row in range(len(wanted)) if row not in misfits]
    if misfits:
        with pytest.raises(SchemaError, match=rf"in row {misfits[0] + 70} cannot become"):
            conform("x", column, new, first_row=70)
    at = 0
    for row in [*misfits, len(rows)]:  # the runs between misfits, as slices
        part = conform("x", column.slice(at, row - at), new)
        part.validate(full=True)
        assert part.type == new
        assert exact(meanings(part)) == exact(wanted[at:row])
        at = row + 1
    assert len(kept) + len(misfits) == len(rows)
    return verdict, not misfits


@pytest.mark.parametrize("old", FLAT, ids=str)
def test_flat_values_survive_exactly_or_are_refused_by_their_row(old: pa.DataType) -> None:
    fixed = {"integer", "floating", "decimal", "date", "time", "duration"}
    rows = sliced(column, old, FLAT[old])
    for new in FLAT:
        verdict, fits = check_pair(old, new, rows)
        if verdict is Verdict.ALWAYS:
            assert fits, new
        elif verdict is Verdict.IF_EXACT and family(new) in fixed:
            assert not fits, (old, new)  # the verdict is no weaker than the edges say


@pytest.mark.parametrize("old", [*NESTED, pa.int64(), pa.string(), pa.null()], ids=str)
def test_nested_values_survive_exactly_or_are_refused_by_their_row(old: pa.DataType) -> None:
    values = NESTED.get(old, FLAT.get(old))
    assert values is not None
    rows = sliced(nested_column, old, values)
    for new in NESTED:
        verdict, fits = check_pair(old, new, rows)
        assert fits or verdict is not Verdict.ALWAYS, new


def test_values_behind_nulls_and_codes_without_rows_do_not_count() -> None:
    floats = pa.array([0.5, 1e300], mask=np.array([False, True]))
    assert conform("x", floats, pa.float32()).to_pylist() == [0.5, None]
    structs = pa.StructArray.from_arrays(
        [pa.array([1, 2**40])], ["a"], mask=pa.array([False, True])
    )
    small = pa.struct([pa.field("a", pa.int8(), nullable=False)])
    assert conform("x", structs, small).to_pylist() == [{"a": 1}, None]
    lists = pa.ListArray.from_arrays([0, 1, 2], pa.array([1, 2**40]), mask=pa.array([False, True]))
    for new in (pa.list_(pa.int8()), pa.list_(pa.int8(), 1), pa.list_view(pa.int8())):
        assert conform("x", lists, new).to_pylist() == [[1], None]
    encoded = pa.DictionaryArray.from_arrays([0, None, 0], [7, 2**40])
    assert conform("x", encoded, pa.int8()).to_pylist() == [7, None, 7]
    fixed = pa.FixedSizeListArray.from_arrays(
        pa.array([1, 2, 2**40, 4]), 2, mask=pa.array([False, True])
    )
    assert conform("x", fixed, pa.list_(pa.int8(), 2)).to_pylist() == [[1, 2], None]


def test_an_index_of_a_dictionary_that_is_too_small_is_refused_by_its_row() -> None:
    texts = pa.array([str(number) for number in range(300)])
    small = pa.dictionary(pa.int8(), pa.string())
    assert conform("x", texts.slice(0, 128), small).to_pylist() == texts[:128].to_pylist()
    with pytest.raises(SchemaError, match="'128' in row 128 cannot become"):
        conform("x", texts, small)


def test_errors_name_the_column_the_value_its_row_and_what_to_do() -> None:
    with pytest.raises(SchemaError) as raised:
        conform("age", pa.array([1, 300]), pa.int8(), first_row=40)
    assert str(raised.value) == (
        "column 'age': 300 in row 41 cannot become int8 without a loss; the column comes as int64: "
        "cast the column before you write it, or write all rows again without append"
    )
    with pytest.raises(SchemaError, match="write CAST"):
        conform("age", pa.array(["1"]), pa.int8(), advice="write CAST")
    with pytest.raises(SchemaError, match=r"'age': None in row 1 cannot become"):
        conform("age", pa.array([1, None]), pa.int64(), nullable=False)
    hidden = pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", None]))
    with pytest.raises(SchemaError, match=r"'age': None in row 1 cannot become"):
        conform("age", hidden, pa.string(), nullable=False)


def test_batches_have_exactly_the_columns_of_the_schema_in_any_order() -> None:
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False), ("b", pa.string())])
    batch = pa.record_batch({"b": ["x"], "a": pa.array([1], pa.int8())})
    assert conform_batch(batch, schema).equals(
        pa.record_batch({"a": [1], "b": ["x"]}, schema=schema)
    )
    assert conform_batch(batch, batch.schema) is batch
    for names, problem in (
        (["a"], "the rows must have a column 'b'"),
        (["a", "b", "c"], "the rows cannot have a column 'c'"),
        (["a", "b", "a"], "columns cannot share a name: 'a'"),
        (["a", "B"], "must have a column 'b'; the rows cannot have a column 'B'"),
    ):
        other = pa.RecordBatch.from_arrays([pa.array([1])] * len(names), names)
        with pytest.raises(SchemaError, match=problem):
            conform_batch(other, schema)
    problems = column_problems(pa.schema([("a", pa.bool_()), ("b", pa.string())]), schema)
    assert problems == ["column 'a' comes as bool, which cannot become int64"]


def test_every_pair_of_types_has_a_verdict() -> None:
    types = [*FLAT, *NESTED, pa.sparse_union([A]), pa.dense_union([A])]
    for old, new in itertools.product(types, types):
        assert (can_become(old, new) is Verdict.ALWAYS) or not old.equals(new)


def test_columns_of_the_same_type_are_not_copied() -> None:
    for array in (pa.array([1, None]), pa.array(["x"]), pa.array([[1], None])):
        assert conform("x", array, array.type) is array


# -- the page -----------------------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[4] / "docs/sources/lossless.md").read_text("utf-8")
EXAMPLES = [
    [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
    for line in PAGE.partition("## Examples")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| `")
]
VALUES = {"nan": math.nan, "inf": math.inf, "Decimal": Decimal}


@pytest.mark.parametrize(("old", "new", "accepted", "refused"), EXAMPLES)
def test_the_examples_of_the_page_hold(
    old: list[str], new: list[str], accepted: list[str], refused: list[str]
) -> None:
    names = {**vars(pa), **{unit: unit for unit in UNITS}}
    kinds = [eval(re.sub(r"\b([a-z]+\d+)\b(?!\()", r"\1()", name), names) for (name,) in (old, new)]
    for texts, fits in ((accepted, True), (refused, False)):
        assert texts
        for text in texts:
            array = column(kinds[0], [eval(text, VALUES)])
            if fits:
                assert len(conform("x", array, kinds[1])) == 1
            else:
                with pytest.raises(SchemaError, match="in row 0 cannot become"):
                    conform("x", array, kinds[1])


def test_types_whose_values_may_take_no_bytes_are_known() -> None:
    for dtype in (*FLAT, *NESTED):
        assert may_expand(dtype) == (
            "null" in str(dtype).replace("not null", "") or "list_view" in str(dtype)
        ), dtype
