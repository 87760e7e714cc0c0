"""Every Arrow type in batches of torch and numpy: the values that Arrow has."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings

from cache_client.batches.convert import Converter
from cache_client.batches.null_rules import NullRules
from cache_client.job.arguments import BatchFormat
from cache_protocol.errors import ConfigError
from cache_protocol.storage.flat_columns import FlatStruct, FlatTree
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.nested_values import plain_type, retyped
from tests.arrow_values import random_batch, rows_of, seeds

quick = settings(max_examples=120)
NAN = math.nan


def expected(array: pa.Array) -> list[Any]:
    """The values of an Arrow column, with times and decimals as numbers."""
    dtype, types = array.type, pa.types
    if types.is_struct(dtype) and dtype.num_fields:
        children = array.flatten()  # null where the struct is
        parts = {field.name: expected(child) for field, child in zip(dtype, children, strict=True)}
        return [{name: part[row] for name, part in parts.items()} for row in range(len(array))]
    if types.is_decimal(dtype):
        return [NAN if value is None else float(value) for value in array.to_pylist()]
    if types.is_temporal(dtype) and not types.is_interval(dtype):
        number = pa.int32() if dtype.bit_width == 32 else pa.int64()
        return list(array.view(number).to_pylist())
    is_list = types.is_list(dtype) or types.is_large_list(dtype)
    if is_list or types.is_fixed_size_list(dtype):
        inner = dtype.value_type
        is_time = types.is_temporal(inner) and not types.is_interval(inner)
        is_matrix = not is_list and types.is_fixed_size_list(inner)
        if is_time or types.is_decimal(inner) or is_matrix:
            none = _none_of(dtype)
            return [none if not row.is_valid else expected(row.values) for row in array]
    return list(array.to_pylist())


def _none_of(dtype: pa.DataType) -> Any:
    if pa.types.is_fixed_size_list(dtype) and pa.types.is_decimal(dtype.value_type):
        return [NAN] * dtype.list_size
    return None


def in_python(value: Any) -> Any:
    """A column of a batch as Python values, with times as numbers."""
    if isinstance(value, Mapping):  # of a struct
        columns = {name: in_python(each) for name, each in value.items()}
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]
    if isinstance(value, list):
        return [each if isinstance(each, list | dict) else in_python(each) for each in value]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "Mm":
        value = value.view(np.int64)
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    return value


def same(found: Any, wanted: Any) -> bool:
    """Whether they are equal where ``wanted`` is no null; NaN equals NaN and stands for None."""
    if wanted is None or (isinstance(wanted, float) and math.isnan(wanted)):
        return found is None or _is_filler(found)
    if isinstance(wanted, list):
        if len(found) == 2 and len(wanted) == 4:  # a tensor of shape [2, 2]
            found = [*found[0], *found[1]]
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[k], wanted[k]) for k in wanted)
    found = found.view(np.int64).item() if isinstance(found, np.generic) else found
    return type(found) is type(wanted) and bool(found == wanted)


def _is_filler(value: Any) -> bool:
    """What lies below a null where the reader asks for a mask: NaN in floats, 0 in others."""
    if isinstance(value, list):
        return all(map(_is_filler, value))
    return bool(isinstance(value, int | float) and (math.isnan(value) or value == 0))


def valid_of(tree: FlatTree, columns: list[pa.Array], above: Any = True) -> dict[str, list[bool]]:
    """Flat column or struct -> which rows are no null, nor in a null struct."""
    found = {}
    for node, array in zip(tree, columns, strict=True):
        valid = np.array(array.is_valid()) & above
        found[node.name] = valid.tolist()
        if isinstance(node, FlatStruct):
            children = [array.field(at) for at in range(array.type.num_fields)]
            found |= valid_of(node.children, children, valid)
    return found


@quick
@given(seeds)
@pytest.mark.parametrize("batch_format", ["torch", "numpy"])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.unversioned  # without pandas, an earlier pyarrow has no objects for nanoseconds
def test_batches_have_the_values_of_arrow(depth: int, batch_format: BatchFormat, seed: int) -> None:
    batch = random_batch(seed, depth)
    rows = rows_of(batch)
    converted = Converter(rows.layout, None, batch_format, nulls="mask")(rows)
    plain = [retyped(column, plain_type(column.type)) for column in batch.columns]
    for name, array in zip(batch.schema.names, plain, strict=True):
        found, wanted = in_python(converted.pop(name)), expected(array)
        assert same(found, wanted), (batch.schema.field(name), found, wanted)
    valid = valid_of(rows.layout.tree, plain)
    masks = NullRules(rows.layout, "mask").valid
    assert set(converted) == set(masks.values())
    for name, mask in masks.items():
        of_rows = in_python(converted[mask])
        if of_rows and isinstance(of_rows[0], list):
            of_rows = [bool(np.any(row)) for row in of_rows]
            assert all(one <= other for one, other in zip(of_rows, valid[name], strict=True))
        else:
            assert of_rows == valid[name]


def test_a_record_batch_is_what_was_stored() -> None:
    assert Converter(rows_of(TABLE).layout, None, "arrow")(rows_of(TABLE)).equals(TABLE)


TABLE = pa.RecordBatch.from_pydict(
    {
        "rating": pa.array([5, None, 3], pa.int8()),
        "price": pa.array([Decimal("0.57"), None, Decimal("-3.10")], pa.decimal128(10, 2)),
        "weight": pa.array([1.5, None, 2.5], pa.float32()),
        "flag": pa.array([True, False, None]),
        "address": pa.array(
            [{"zip": 8001, "lat": 1.5}, None, {"zip": None, "lat": None}],
            pa.struct([("zip", pa.int32()), ("lat", pa.float64())]),
        ),
        "img": pa.array([[1, 2], None, [3, None]], pa.list_(pa.uint8(), 2)),
        "when": pa.array([0, 86_400, None], pa.timestamp("s", "UTC")),
        "text": ["a", None, "c"],
    }
)


def convert(columns: list[str], batch_format: BatchFormat = "torch", **options: Any) -> Any:
    whole = rows_of(TABLE)
    rows = rows_of(Converter(whole.layout, None, "arrow")(whole).select(columns))
    return Converter(rows.layout, options.pop("stack", None), batch_format, **options)(rows)


def test_nulls_of_integers_are_refused_by_name_with_the_three_ways() -> None:
    with pytest.raises(ConfigError) as caught:
        convert(["weight", "rating", "address", "flag"])
    message = str(caught.value)
    assert "'rating' (int8), 'address.zip' (int32), 'flag' (bool)" in message
    for way in ("nulls={'rating': -1}", "nulls='mask'", "COALESCE(rating, -1)"):
        assert way in message
    assert "weight" not in message


def test_floats_and_decimals_have_nan() -> None:
    batch = convert(["weight", "price"])
    assert batch["weight"].isnan().tolist() == [False, True, False]
    assert batch["price"].dtype == torch.float64
    assert same(batch["price"].tolist(), [0.57, NAN, -3.1])


def test_nulls_are_filled() -> None:
    fills = {"rating": -1, "flag": True, "address.zip": 7, "img": 9, "when": 5, "weight": 0.1}
    batch = convert([*TABLE.schema.names], nulls={**fills, "address.lat": 2, "price": 0})
    assert batch["rating"].tolist() == [5, -1, 3] and batch["rating"].dtype == torch.int8
    assert batch["flag"].tolist() == [True, False, True]
    assert batch["address"]["zip"].tolist() == [8001, 7, 7]
    assert batch["address"]["lat"].tolist() == [1.5, 2, 2]
    assert batch["img"].tolist() == [[1, 2], [9, 9], [3, 9]]
    assert batch["when"].tolist() == [0, 86_400, 5]
    assert batch["weight"].tolist() == [1.5, np.float32(0.1), 2.5]
    assert batch["price"].tolist() == [0.57, 0.0, -3.1]
    assert batch["text"] == ["a", None, "c"]


def test_masks_say_what_is_null() -> None:
    batch = convert(["rating", "address", "img", "text"], nulls="mask")
    assert batch["rating.valid"].tolist() == [True, False, True]
    assert batch["rating.valid"].dtype == torch.bool
    assert batch["address.valid"].tolist() == [True, False, True]
    assert batch["address.zip.valid"].tolist() == [True, False, False]
    assert batch["img.valid"].tolist() == [[True, True], [False, False], [True, False]]
    assert "text.valid" not in batch
    assert batch["rating"].tolist() == [5, 0, 3]


def test_only_columns_with_nulls_in_the_version_have_masks() -> None:
    whole = rows_of(TABLE.slice(0, 1))
    assert list(Converter(whole.layout, nulls="mask")(whole)) == TABLE.schema.names


@pytest.mark.parametrize(
    ("fills", "words"),
    [
        ({"rating": 128}, "'rating' is int8, which cannot hold 128"),
        ({"rating": 0.5}, "cannot hold 0.5"),
        ({"rating": True}, "cannot hold True"),
        ({"rating": None}, "cannot hold None"),
        ({"flag": 1}, "'flag' is bool, which cannot hold 1"),
        ({"weight": 1e300}, "'weight' is float, which cannot hold 1e+300"),
        ({"weight": "1"}, "cannot hold '1'"),
        ({"price": "x"}, "cannot hold 'x'"),
        ({"when": np.datetime64("2020-01-01T00:00:00.5")}, "cannot hold"),
        ({"text": ""}, "'text' is string, whose nulls are None"),
        ({"rathing": 1}, "no column 'rathing' of numbers; they are: rating, price"),
        ({"address": 1}, "no column 'address' of numbers"),
    ],
)
def test_a_fill_value_that_does_not_fit_is_refused(fills: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Converter(rows_of(TABLE).layout, nulls=fills)
    assert words in str(caught.value)


def test_times_are_filled_with_times() -> None:
    fills = {"when": np.datetime64("1970-01-02", "s")}
    assert convert(["when"], nulls=fills)["when"].tolist() == [0, 86_400, 86_400]
    nat = convert(["when"], "numpy", nulls={"when": np.datetime64("NaT")})["when"]
    assert nat.dtype == np.dtype("M8[s]") and np.isnat(nat).tolist() == [False, False, True]


def test_fields_and_decimals_are_stacked() -> None:
    batch = convert(["price", "address"], stack={"x": ["price", "address.lat"]}, nulls="mask")
    assert list(batch) == ["x", "address", *[n for n in batch if n.endswith(".valid")]]
    assert same(batch["x"].tolist(), [[0.57, 1.5], [NAN, NAN], [-3.1, NAN]])
    assert list(batch["address"]) == ["zip"]


def test_a_column_with_the_name_of_a_mask_is_refused() -> None:
    table = TABLE.select(["rating"]).append_column("rating.valid", pa.array([1, 2, 3]))
    with pytest.raises(ConfigError, match=r"adds a column 'rating\.valid'"):
        Converter(rows_of(table).layout, nulls="mask")


def test_chat_messages_are_lists_of_dicts() -> None:
    messages = [[{"role": "user", "content": "hi"}], [], None]
    dtype = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    rows = rows_of(pa.RecordBatch.from_pydict({"messages": pa.array(messages, dtype)}))
    assert Converter(rows.layout)(rows) == {"messages": messages}


def test_layouts_travel_to_workers() -> None:
    layout = rows_of(TABLE).layout
    assert pickle.loads(pickle.dumps(layout)).nulls.units == layout.nulls.units
    assert Layout.of_stored(layout.schema).nulls.units == layout.nulls.units
