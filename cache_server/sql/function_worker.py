"""Runs installed functions in a process that may end: what `function_runs` asks `sql_worker` for.

The code of a package runs nowhere else. It gets arrays and texts, and its result is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_protocol.errors import CacheError, LoadError
from cache_server.functions.declared import Compute, Function
from cache_server.functions.installed import function_named
from cache_server.sql.bound_functions import BoundFunction, bound_function

_MADE: dict[str, tuple[Function, BoundFunction, Compute]] = {}
MOST_MADE = 8
VALUE = "value"


def result_type(
    name: str, types: Mapping[str, pa.DataType], options: Mapping[str, Any]
) -> pa.DataType:
    """The type of a function's values for some types and options; it is made once, as a check.

    Raises:
        LoadError: the function refuses them; has its words.
    """
    _let_import()
    function = function_named(name)
    try:
        dtype = function.result_type(types, options)
        function.make(options)
    except (CacheError, MemoryError):
        raise
    except Exception as error:  # of any package
        raise LoadError(f"{error}") from None
    if not isinstance(dtype, pa.DataType):
        raise LoadError(f"gives {type(dtype).__name__} as the type of its values")
    return dtype


def compute(
    name: str, texts: Mapping[str, str] | None, *, clear: bool, lots: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The values of one batch of arguments.

    Args:
        name: of a bound function.
        texts: of its files; None if this process had them before.
        clear: forget other functions.

    Raises:
        LoadError: the function failed; a verb and its object.
    """
    _let_import()
    if clear:
        _MADE.clear()
    try:
        if name not in _MADE:
            _MADE[name] = _made(name, texts or {})
        function, bound, run = _MADE[name]
        for batch in lots:
            yield pa.record_batch([_values(function, bound, run, batch)], [VALUE])
    except (CacheError, MemoryError):
        raise
    except Exception as error:  # of any package
        raise LoadError(f"raised {type(error).__name__}: {error}") from None


def _made(name: str, texts: Mapping[str, str]) -> tuple[Function, BoundFunction, Compute]:
    bound = bound_function(name)
    function = function_named(bound.function)
    defaults = {key: option.default for key, option in function.options.items()}
    return function, bound, function.make({**defaults, **bound.options, **texts})


def _values(
    function: Function, bound: BoundFunction, run: Compute, batch: pa.RecordBatch
) -> pa.Array:
    columns = dict(zip(bound.columns, batch.columns, strict=True))
    places = None if function.sees_nulls else _places(function, columns, batch.num_rows)
    if places is not None:
        kept = places.drop_null()
        columns = {name: column.take(kept) for name, column in columns.items()}
    num_rows = batch.num_rows if places is None else len(kept)
    if not num_rows:  # no function gets an empty batch
        return pa.nulls(batch.num_rows, bound.result)
    found = run(**columns)
    if isinstance(found, pa.ChunkedArray):
        found = found.combine_chunks()
    if not isinstance(found, pa.Array):
        raise LoadError(f"gave {type(found).__name__} instead of an Arrow array")
    if not found.type.equals(bound.result):
        raise LoadError(f"gave values of {found.type} instead of {bound.result}")
    if len(found) != num_rows:
        raise LoadError(f"gave {len(found)} values for {num_rows} rows")
    found.validate(full=True)
    if places is None:
        return found
    # The n-th row without a null has the n-th value.
    ranks = np.cumsum(places.is_valid().to_numpy(zero_copy_only=False)) - 1
    return found.take(pa.array(ranks, mask=places.is_null().to_numpy(zero_copy_only=False)))


def _places(function: Function, columns: Mapping[str, pa.Array], num_rows: int) -> pa.Array | None:
    """The row numbers, and a null for each row with a null; None if there is none."""
    needed = [
        column
        for name, column in columns.items()
        if column.null_count and not function.columns[name].is_optional
    ]
    if not needed:
        return None
    has_null = needed[0].is_null()
    for column in needed[1:]:
        has_null = pc.or_(has_null, column.is_null())
    rows = np.arange(num_rows, dtype=np.int64)
    return pa.array(rows, mask=has_null.to_numpy(zero_copy_only=False))


def _let_import() -> None:
    """Lets functions import what `sql_program` hides for its own start."""
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "_WithoutPandas"]
