"""What stands in a batch where a number is null: the reader decides.

Tensors have no nulls. So the nulls of each column of numbers have one of these:

- NaN: floats, and decimals, which become floats. This is the default.
- A fill value: ``nulls={"rating": -1}``.
- A mask: ``nulls="mask"`` adds ``rating.valid``, which is False for nulls.
- Other columns of numbers with nulls are refused.

A null struct makes the numbers in it null. Columns of Python values, such as strings, have None.
Only nulls that the version has count. Knows neither nodes nor tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_client.reading.rows import Rows
from cache_protocol.errors import ConfigError, some_of
from cache_protocol.storage.flat_columns import (
    Bits,
    FlatColumn,
    FlatStruct,
    FlatTree,
    nodes,
    numpy_dtype,
)
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.nested_values import plain_type

Nulls: TypeAlias = Mapping[str, object] | Literal["mask"]
"""What stands for nulls: column -> value, or ``mask``."""

_VALID: Final = ".valid"
_TIMES: Final = (np.datetime64, np.timedelta64, date, datetime, time, timedelta)


def nulls_problems(nulls: object) -> list[str]:
    """The problem of the argument ``nulls``, quoted; empty if there is none."""
    if nulls is None or (isinstance(nulls, str) and nulls == "mask"):
        return []
    if isinstance(nulls, Mapping) and all(isinstance(name, str) for name in nulls):
        return []
    return [f"nulls must be 'mask' or a dict from column to value, got {nulls!r}"]


def is_number_column(column: FlatColumn) -> bool:
    """Whether a batch has numbers for a column, rather than Python values."""
    types, dtype = pa.types, value_type(column)
    has_bytes = types.is_fixed_size_binary(dtype) and not types.is_decimal(dtype)
    return column.kind != "arrow" and not has_bytes and not types.is_interval(dtype)


def value_type(column: FlatColumn) -> pa.DataType:
    """The type of one value of a column of numbers."""
    dtype = plain_type(column.dtype)
    while pa.types.is_fixed_size_list(dtype):
        dtype = dtype.value_type
    return dtype


class NullRules:
    """The nulls of the columns of a version, and what stands for them. Immutable, any thread.

    Args:
        layout: of the rows.
        nulls: what stands for nulls; default: NaN in floats.

    Attributes:
        valid: column -> the name of its mask in a batch, for columns and structs with nulls.
        prepares: whether `prepare` does anything.

    Raises:
        ConfigError: a fill value is of no column of numbers, or does not fit; quotes it.
    """

    def __init__(self, layout: Layout, nulls: Nulls | None = None) -> None:
        self._layout = layout
        self._units = dict(_units(layout, layout.tree))
        rows = {node.name for node in nodes(layout.tree)}
        self._of_values = {
            name for name, units in self._units.items() if not rows.issuperset(units)
        }
        fills = nulls if isinstance(nulls, Mapping) else {}
        _check_names(layout, fills)
        self.fills = {name: fill_value(layout.flat[name], value) for name, value in fills.items()}
        has_numbers = [
            name
            for name in self._units
            if name not in layout.flat or is_number_column(layout.flat[name])
        ]
        masked = nulls == "mask"
        self.valid = {name: name + _VALID for name in has_numbers if masked}
        self._refused = [
            layout.flat[name]
            for name in has_numbers
            if not masked and name in layout.flat and not self._has_value(name)
        ]
        self._written = [name for name in has_numbers if self._is_written(name)]
        self.prepares = bool(self._refused or self._written)

    def has_nulls(self, name: str) -> bool:
        """Whether a column, or a struct that it is in, has null bits in this version."""
        return name in self._units

    def nulls_of(self, name: str, rows: Rows) -> Bits | None:
        """Which values of a column or struct are null.

        Returns:
            ``[rows]``, or ``[rows, n]`` if values in the n of a row may be null; None if the column
            has no nulls in this version.
        """
        units = self._units.get(name)
        index = self._layout.null_index
        if units is None or index is None:
            return None
        of_values = name in self._of_values
        if len(units) == 1 and not of_values:  # nearly always
            return self._layout.nulls.unpack(units[0], rows.matrices[index])[:, 0]
        width = math.prod(self._layout.flat[name].shape) if of_values else 1
        found = np.zeros((rows.num_rows, width), np.bool_)
        for unit in units:
            bits = self._layout.nulls.unpack(unit, rows.matrices[index])
            found |= bits if bits.shape[1] in (1, width) else bits.repeat(width // bits.shape[1], 1)
        return found if of_values else found[:, 0]

    def prepare(self, rows: Rows) -> None:
        """Writes what stands for nulls into the rows, in place.

        Raises:
            ConfigError: a column of numbers has nulls, and nothing stands for them.
        """
        if self._refused:
            raise ConfigError(_refusal(self._refused))
        for name in self._written:
            nulls = self.nulls_of(name, rows)
            assert nulls is not None
            index, position = self._layout.place(name)
            matrix, column = rows.matrices[index], self._layout.flat[name]
            values = matrix[:, position] if column.kind == "number" else matrix
            where = nulls[:, None] if nulls.ndim < values.ndim else nulls
            np.copyto(values, values.dtype.type(self._fill(column)), where=where)

    def masks(self, rows: Rows) -> dict[str, npt.NDArray[np.bool_]]:
        """The masks that a batch has: ``[rows]``, or the shape of the column, see `nulls_of`."""
        found = {}
        for name, valid in self.valid.items():
            nulls = self.nulls_of(name, rows)
            assert nulls is not None
            shape = self._layout.flat[name].shape if nulls.ndim > 1 else ()
            found[valid] = ~nulls.reshape(len(nulls), *shape)
        return found

    def _fill(self, column: FlatColumn) -> float | int:
        default = math.nan if pa.types.is_floating(column.stored) else 0
        return self.fills.get(column.name, default)

    def _has_value(self, name: str) -> bool:
        dtype = value_type(self._layout.flat[name])
        is_float = pa.types.is_floating(dtype) or pa.types.is_decimal(dtype)
        return is_float or name in self.fills

    def _is_written(self, name: str) -> bool:
        """Whether values that are stored below nulls must be replaced; not those of decimals."""
        if name not in self._layout.flat:
            return False
        if pa.types.is_decimal(value_type(self._layout.flat[name])):
            return False
        in_struct = any(not unit.startswith(name) for unit in self._units[name])
        return name in self.fills or in_struct


def _units(layout: Layout, tree: FlatTree, above: tuple[str, ...] = ()) -> list[Any]:
    """Pairs of a column or struct with nulls, and the units that say which values are null."""
    found = []
    for node in tree:
        own = tuple(unit for unit in node.null_units if unit in layout.nulls.units)
        if above or own:
            found.append((node.name, above + own))
        if isinstance(node, FlatStruct):
            found += _units(layout, node.children, above + own)
    return found


def _check_names(layout: Layout, names: Collection[str]) -> None:
    numbers = [name for name, column in layout.flat.items() if is_number_column(column)]
    for name in names:
        if name in numbers:
            continue
        if name in layout.flat:
            raise ConfigError(
                f"nulls: column {name!r} is {layout.flat[name].dtype}, whose nulls are None: only "
                "nulls of numbers can be filled"
            )
        raise ConfigError(
            f"nulls: no column {name!r} of numbers; they are: {some_of(numbers, like=name)}"
        )


def _refusal(columns: Sequence[FlatColumn]) -> str:
    first = columns[0]
    named = some_of(f"{column.name!r} ({value_type(column)})" for column in columns)
    fill = False if pa.types.is_boolean(value_type(first)) else -1
    return (
        f"nulls in {'column' if len(columns) == 1 else 'columns'} {named}, and tensors have none: "
        f"fill them, as by nulls={{{first.name!r}: {fill}}}; or get a mask {first.name + _VALID!r} "
        f"by nulls='mask'; or replace them in the sql, as by COALESCE({first.name}, {fill})"
    )


def fill_value(column: FlatColumn, value: object) -> float | int:
    """The stored number of a value; of a decimal, the float64 that a batch has.

    Floats are rounded to the column's. Others must fit exactly. Dates and times can be given as
    such, or as the integer that is stored.

    Raises:
        ConfigError: it does not fit; quotes it.
    """
    dtype = value_type(column)
    found = _fitting(column, dtype, value)
    if found is None:
        raise ConfigError(f"nulls: column {column.name!r} is {dtype}, which cannot hold {value!r}")
    return found


def _fitting(column: FlatColumn, dtype: pa.DataType, value: object) -> float | int | None:
    types = pa.types
    is_bool = isinstance(value, bool | np.bool_)
    if types.is_boolean(dtype):
        return int(bool(value)) if is_bool else None
    if is_bool:
        return None
    if types.is_floating(dtype) or types.is_decimal(dtype):
        if not isinstance(value, int | float | Decimal | np.number):
            return None
        number = numpy_dtype(dtype) if types.is_floating(dtype) else np.dtype(np.float64)
        return _finite(float(value), number)
    if isinstance(value, _TIMES):
        return _instant(column, dtype, value)
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    if not isinstance(value, int | np.integer):
        return None
    ends = np.iinfo(numpy_dtype(column.stored))  # type: ignore[type-var]
    return int(value) if ends.min <= value <= ends.max else None


def _finite(value: float, number: np.dtype[Any]) -> float | None:
    """The value, unless its nearest float is infinite."""
    too_large = math.isfinite(value) and abs(value) > float(np.finfo(number).max)
    return None if too_large else value


def _instant(column: FlatColumn, dtype: pa.DataType, value: Any) -> int | None:
    if isinstance(value, np.datetime64 | np.timedelta64) and np.isnat(value):
        return int(np.iinfo(np.int64).min) if column.stored == pa.int64() else None
    try:
        if isinstance(value, np.datetime64 | np.timedelta64):
            kind, days = "m" if pa.types.is_duration(dtype) else "M", pa.types.is_date32(dtype)
            unit = "D" if days else "ms" if pa.types.is_date64(dtype) else dtype.unit
            found = value.astype(f"{kind}8[{unit}]")
            return int(found.astype(np.int64)) if found == value else None
        array = pa.array([value], dtype)
        is_exact = array[0].as_py() == value
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None
    return int(array.view(column.stored)[0].as_py()) if is_exact else None
