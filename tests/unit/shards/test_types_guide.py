"""The table of types in docs/sources/types.md, row by row, against what the code does."""

from __future__ import annotations

import datetime as dt
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from cache_client.batches import convert
from cache_client.job import arguments
from cache_client.reading import rows as reading_rows
from cache_protocol.errors import LoadError
from cache_protocol.storage.layout import numpy_dtype
from cache_server.shards.packing import ShardBuilder, storage_schema, storage_type

PAGE = (Path(__file__).resolve().parents[3] / "docs/sources/types.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| `")
]
DAY, NOON = dt.date(1970, 1, 2), dt.time(12)

# Each name of the table: a type of it, and a value.
EXAMPLES: dict[str, tuple[pa.DataType, Any]] = {
    **{
        f"{s}int{n}": (pa.type_for_alias(f"{s}int{n}"), 3)
        for s in ("", "u")
        for n in (8, 16, 32, 64)
    },
    **{f"float{n}": (pa.type_for_alias(f"float{n}"), 0.5) for n in (16, 32, 64)},
    "decimal32": (pa.decimal32(5, 2), Decimal("0.57")),
    "decimal64": (pa.decimal64(5, 2), Decimal("0.57")),
    "decimal128": (pa.decimal128(5, 2), Decimal("0.57")),
    "decimal256": (pa.decimal256(5, 2), Decimal("0.57")),
    "bool": (pa.bool_(), True),
    "date32": (pa.date32(), DAY),
    "date64": (pa.date64(), DAY),
    "time32": (pa.time32("s"), NOON),
    "time64": (pa.time64("us"), NOON),
    "timestamp": (pa.timestamp("us", "UTC"), dt.datetime(1970, 1, 2, tzinfo=dt.UTC)),
    "duration": (pa.duration("ms"), dt.timedelta(seconds=1)),
    "string": (pa.string(), "x"),
    "large_string": (pa.large_string(), "x"),
    "string_view": (pa.string_view(), "x"),
    "binary": (pa.binary(), b"x"),
    "large_binary": (pa.large_binary(), b"x"),
    "binary_view": (pa.binary_view(), b"x"),
    "fixed_size_binary": (pa.binary(1), b"x"),
    "fixed_size_list<float32>": (pa.list_(pa.field("item", pa.float32(), False), 2), [0.5, 1.5]),
    "fixed_size_list<string>": (pa.list_(pa.string(), 2), ["x", "y"]),
    "list<float32>": (pa.list_(pa.float32()), [0.5]),
    "large_list<float32>": (pa.large_list(pa.float32()), [0.5]),
    "list<string>": (pa.list_(pa.string()), ["x"]),
    "large_list<string>": (pa.large_list(pa.string()), ["x"]),
    "dictionary<string>": (pa.dictionary(pa.int32(), pa.string()), "x"),
}
STORED = {
    "days since 1970": 1,
    "milliseconds since 1970": 86_400_000,
    "0 or 1": 1,
    "the nearest": 0.57,
}


def names_of(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


CASES = [(name, row) for row in ROWS for name in names_of(row[0])]


def batch_of(dtype: pa.DataType, values: list[Any], batch_format: arguments.BatchFormat) -> Any:
    """The column of a batch that a training loop gets, of a shard of these values."""
    array = pa.array(values, dtype)
    builder = ShardBuilder(storage_schema(pa.schema([("x", dtype)])))
    builder.append(pa.RecordBatch.from_arrays([array], names=["x"]))
    rows = reading_rows.Rows.of_batch(builder.layout, builder.finish())
    batch = convert.Converter(builder.layout, None, batch_format)(rows)
    return batch["x"]


def kind_of(column: Any) -> str:
    """A column of a batch in the words of the table."""
    if isinstance(column, torch.Tensor | np.ndarray):
        return {1: "`[B]`", 2: "`[B, n]`"}[column.ndim]
    assert isinstance(column, list)
    if isinstance(column[0], torch.Tensor | np.ndarray):
        assert column[0].ndim == 1
        return "list of 1-d tensors"
    if isinstance(column[0], list):
        return "list of lists"
    return f"list of `{type(column[0]).__name__}`"


def nulls_of(dtype: pa.DataType, value: Any, null: Any) -> str:
    """What becomes of a null, in the words of the table."""
    try:
        found = batch_of(dtype, [value, null], "torch")[1]
    except LoadError as error:
        assert "holds 1 null" in str(error)
        return "refused"
    if found is None:
        return "`None`"
    return "NaN" if torch.isnan(found).any() else str(found)


def test_the_table_has_every_type_once() -> None:
    assert [name for name, _ in CASES] == list(EXAMPLES)


@pytest.mark.parametrize(("name", "row"), CASES, ids=[name for name, _ in CASES])
def test_a_type_is_stored_and_read_as_the_table_says(name: str, row: list[str]) -> None:
    _, stored, in_batch, null = row
    dtype, value = EXAMPLES[name]
    values = dtype
    if pa.types.is_dictionary(dtype):
        values = dtype.value_type
        (same,) = (row for other, row in CASES if other == str(values))
        assert (in_batch, null) == ("as its values", "as its values")
        in_batch, null = same[2:]

    if stored == "the same":
        assert storage_type(dtype) == dtype
    else:
        (stored_name,) = names_of(stored)
        assert storage_type(dtype) == EXAMPLES[stored_name][0]
    in_arrow = batch_of(dtype, [value, value], "arrow")
    assert in_arrow.type == storage_type(dtype)
    if (meaning := stored.partition(", ")[2]) in STORED:
        assert in_arrow[0].as_py() == STORED[meaning]

    for batch_format in ("torch", "numpy"):
        column = batch_of(dtype, [value, value], batch_format)
        assert kind_of(column) == in_batch
        if in_batch.startswith("`[B"):
            scalar = in_arrow.type.value_type if in_batch == "`[B, n]`" else in_arrow.type
            expected = "bool" if pa.types.is_boolean(dtype) else str(numpy_dtype(scalar))
            assert str(column.dtype).removeprefix("torch.") == expected

    if null == "as one in its numbers; refused in place of a list":
        nullable = pa.list_(pa.float32(), 2)
        assert nulls_of(nullable, value, [0.5, None]) == "NaN"
        assert nulls_of(pa.list_(pa.int32(), 2), [1, 2], [1, None]) == "refused"
        assert nulls_of(nullable, value, None) == "refused"
    elif null.startswith("`None`; "):
        assert nulls_of(dtype, value, None) == "`None`"
        assert batch_of(dtype, [[0.5, None]], "torch") == [[0.5, None]]
    else:
        assert nulls_of(dtype, value, None) == null


def test_the_types_that_the_page_refuses_are_refused_and_nested_lists_have_their_shape() -> None:
    refused = {
        "struct": pa.struct([("x", pa.int64())]),
        "map": pa.map_(pa.string(), pa.int64()),
        "interval": pa.month_day_nano_interval(),
        "null": pa.null(),
    }
    sentence = re.search(r"Other types,\s+such as (.*?) are\s+refused", PAGE, re.DOTALL)
    assert sentence is not None and names_of(sentence[1]) == list(refused)
    assert all(storage_type(dtype) is None for dtype in refused.values())
    nested = batch_of(pa.list_(pa.list_(pa.float32(), 3), 2), [[[1, 2, 3], [4, 5, 6]]], "torch")
    assert nested.shape == (1, 2, 3)
