"""One column of arrays, tensors or Python values -> an Arrow column, each value as it is.

Imports none of the libraries: it recognises their objects. What Arrow has no type for, or only one
that changes values, fails as a `SchemaError` that says what to do in that library.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_protocol.errors import SchemaError

NOT_CONVERTED = (
    pa.ArrowException,
    AttributeError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
_KINDS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("bool", (bool, np.bool_)),
    ("int", (int, np.integer)),
    ("float", (float, np.floating)),
    ("Decimal", (Decimal,)),
    ("str", (str,)),
    ("bytes", (bytes, bytearray, memoryview)),
    ("datetime", (datetime.datetime,)),
    ("date", (datetime.date,)),
    ("list", (list, tuple, np.ndarray)),
    ("dict", (dict,)),
)
_TOGETHER = ({"int", "float"}, {"int", "Decimal"})  # Arrow refuses those that it would round
_NULLS = ("NoneType", "NAType", "NaTType")


def arrow_column(name: str, values: Any) -> pa.Array | pa.ChunkedArray:
    """The values of an array or tensor ``[rows, ...]``, a series or a sequence as a column.

    Contiguous numbers are not copied. Dimensions after the first become lists of fixed size, masked
    values nulls.

    Raises:
        SchemaError: names the column, its type and what to do.
    """
    try:
        return _column(values)
    except NOT_CONVERTED as error:
        raise not_a_column(name, values, error) from None


def not_a_column(name: object, values: Any, error: Exception) -> SchemaError:
    """Says that values are no column, and what to do in their library."""
    dtype = getattr(values, "dtype", None)
    kind = f"{_an(type(values))}{'' if dtype is None else f' of {dtype}'}"
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    return SchemaError(
        f"column {name!r}, {kind}, cannot be an Arrow column: {reason}. {_advice(values)}"
    )


def require_one_kind(values: Iterable[Any]) -> None:
    """Refuses Python values of several kinds, which Arrow may convert to the first one.

    Raises:
        TypeError: names the kinds.
    """
    values = values if isinstance(values, Sequence) else list(values)
    kinds = {kind: True for kind in map(_kind, {*map(type, values)}) if kind not in _NULLS}
    if len(kinds) > 1 and not any(kinds.keys() <= allowed for allowed in _TOGETHER):
        row, value = _first_other(values)
        raise TypeError(f"{value!r} in row {row} is {_an(type(value))} among others")
    if "datetime" in kinds:
        zones = {v.tzinfo is None for v in values if isinstance(v, datetime.datetime) and v == v}
        if len(zones) > 1:
            raise TypeError("it has times with and without a zone")
    if "list" in kinds:
        inner = (value for value in values if isinstance(value, list | tuple))
        require_one_kind(itertools.chain.from_iterable(inner))
    if "dict" in kinds:
        rows = [value for value in values if isinstance(value, dict)]
        for key in dict.fromkeys(itertools.chain.from_iterable(rows)):
            require_one_kind([row[key] for row in rows if key in row])


def _kind(cls: type) -> str:
    return next((kind for kind, known in _KINDS if issubclass(cls, known)), cls.__name__)


def _an(cls: type) -> str:
    return f"an {cls.__name__}" if cls.__name__[0] in "aeiouAEIOU" else f"a {cls.__name__}"


def _first_other(values: Sequence[Any]) -> tuple[int, Any]:
    """The first value of another kind than those before, and its row."""
    seen: str | None = None
    for row, value in enumerate(values):
        kind = _kind(type(value))
        if kind in _NULLS:
            continue
        if seen not in (None, kind) and not any({seen, kind} <= allowed for allowed in _TOGETHER):
            return row, value
        seen = kind
    return 0, values[0]


def _column(values: Any) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    library = type(values).__module__.partition(".")[0]
    if library == "pandas":
        return _of_pandas(values)
    if library == "polars" and hasattr(values, "__arrow_c_stream__"):
        if problem := polars_problem(values.dtype):
            raise TypeError(problem)
        return pa.chunked_array(values)
    if hasattr(values, "detach"):  # a tensor of torch
        return _of_numpy(values.detach().cpu().resolve_conj().resolve_neg().numpy())
    if hasattr(values, "__arrow_c_stream__"):
        return pa.chunked_array(values)
    if hasattr(values, "__arrow_c_array__") or hasattr(values, "__arrow_array__"):
        return pa.array(values)
    if isinstance(values, np.ndarray) or hasattr(values, "__array__"):
        return _of_numpy(values if isinstance(values, np.ndarray) else np.asarray(values))
    if isinstance(values, str | bytes | bytearray | Mapping | Set) or np.isscalar(values):
        raise TypeError("it is one value, and no column of rows")
    rows = list(values)
    require_one_kind(rows)
    try:
        return pa.array(rows)
    except OverflowError:
        return pa.array(rows, pa.uint64())


def _of_pandas(series: Any) -> pa.Array | pa.ChunkedArray:
    """NaN of floats and of objects is a null, as pandas means it."""
    if series.dtype == object:
        require_one_kind(series[series.notna()].tolist())
    return pa.array(series, from_pandas=True)


def _of_numpy(array: npt.NDArray[Any]) -> pa.Array:
    mask = np.ma.getmaskarray(array) if isinstance(array, np.ma.MaskedArray) else None
    values = np.asarray(np.ma.getdata(array))
    if values.ndim == 0:
        raise TypeError("it is one value, and no column of rows")
    shape, rows = values.shape[1:], values.shape[0]
    flat = values if not shape else np.ascontiguousarray(values).reshape(-1)
    if mask is not None:
        mask = np.ascontiguousarray(mask).reshape(-1)
    if not flat.dtype.isnative:
        flat = flat.astype(flat.dtype.newbyteorder("="))
    if flat.dtype == object:
        require_one_kind((flat if mask is None else flat[~mask]).tolist())
    column = pa.array(flat.tolist() if _has_inner_zeros(flat) else flat, mask=mask)
    for place in reversed(range(len(shape))):
        count = rows * int(np.prod(shape[:place], dtype=np.int64))
        column = pa.Array.from_buffers(
            pa.list_(column.type, shape[place]), count, [None], children=[column]
        )
    return column


def _has_inner_zeros(texts: npt.NDArray[Any]) -> bool:
    """Whether fixed-size texts have a NUL that more follows; pyarrow would end them there."""
    if texts.dtype.kind not in "SU" or not texts.size or not texts.dtype.itemsize:
        return False
    unit = np.uint8 if texts.dtype.kind == "S" else np.uint32
    units = np.ascontiguousarray(texts).view(unit).reshape(len(texts), -1)
    return bool(((units != 0).sum(1) != np.char.str_len(texts)).any())


def polars_problem(dtype: Any) -> str | None:
    """Why Polars cannot give a type to Arrow as it is; None: it can."""
    name = type(dtype).__name__ if not isinstance(dtype, type) else dtype.__name__
    if name in ("Int128", "UInt128"):
        return f"Arrow has no {name}: cast it to pl.Int64, or to pl.Decimal(38, 0)"
    if name == "Object":
        return "its values are Python objects: give it a type of Polars, as by map_elements"
    inner = [dtype.inner] if getattr(dtype, "inner", None) is not None else []
    inner += [field.dtype for field in getattr(dtype, "fields", [])]
    return next(filter(None, map(polars_problem, inner)), None)


def _advice(values: Any) -> str:
    """What to do in the library of the values."""
    dtype, library = str(getattr(values, "dtype", "")), type(values).__module__.partition(".")[0]
    if library == "torch":
        if "complex" in dtype:
            return "Give torch.view_as_real(tensor)"
        if str(getattr(values, "layout", "")) != "torch.strided":
            return "Give tensor.to_dense()"
        return "Give tensor.dequantize()" if "q" in dtype else "Give tensor.float()"
    if library == "pandas":
        return "Convert it with Series.astype, for example to 'string' or 'float64'"
    if library == "polars":
        return "Convert it with Series.cast"
    if hasattr(values, "astype"):
        if "complex" in dtype:
            return "Give array.view(float).reshape(*array.shape, 2), or its parts as columns"
        if "datetime64" in dtype or "timedelta64" in dtype:
            return f"Give array.astype('{dtype.partition('[')[0]}[s]')"
        if getattr(getattr(values, "dtype", None), "names", None):
            return "Give each of its fields as a column"
        return "Convert it with array.astype, for example to 'float32'"
    if isinstance(values, list | tuple) and values and hasattr(values[0], "detach"):
        return "Give torch.stack(values)"
    return (
        "Give one array, or a list of values of one type, for example pyarrow.array(values, TYPE)"
    )
