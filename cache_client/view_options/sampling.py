"""Rows that come more or less often than once an epoch -> a view."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cache_client.order.permutation import Int64Array
from cache_client.view_options.options import View
from cache_client.views.sampling import (
    BalancedView,
    EpochRowsView,
    WeightedView,
    Weights,
    class_table,
    weight_table,
)
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import (
    Shuffle,
    SlotView,
    as_keys,
    as_sql,
    codes_of,
    of_slots,
    without_nan,
)
from cache_protocol.errors import ConfigError


def make_sampling(
    options: View,
    inner: SlotView,
    *,
    shuffle: Shuffle,
    columns: Collection[str],
    values: Callable[[str], pa.ChunkedArray],
) -> SlotView:
    """The view that the options ask for; without any, the inner view.

    Args:
        inner: chooses rows; each slot has one.
        shuffle: of the job.
        columns: that are read, of any names.
        values: SQL of one value a row -> the values of all rows of the version.

    Raises:
        ConfigError: values are no weights or no classes, or ``epoch_rows`` does not go with them;
            quotes it.
        RequestError: as `row_values`.
    """
    size = inner.num_slots(0)
    epoch_rows = options.epoch_rows
    if shuffle.shuffle_block_size is not None and (options.weights or options.per_class):
        raise ConfigError(
            "weights and per_class read rows from everywhere: leave out shuffle_block_size, got "
            f"{shuffle.shuffle_block_size}"
        )
    if options.weights is not None:
        name = options.weights
        if (every := even_weight(name, columns)) is not None:
            weights: Weights = np.full(size, every)
        else:
            weights = _weights(name, of_slots(values(as_sql(name, columns)), inner))
        replacement = options.replacement
        table, even, positive = weight_table(weights, replacement=replacement)
        if not replacement and (epoch_rows or 0) > positive and size:
            raise ConfigError(
                f"epoch_rows={epoch_rows} without replacement needs as many rows of a weight above "
                f"0, and there are {positive}: give at most {positive}, or replacement=True"
            )
        chosen = epoch_rows or (size if replacement else even)
        return WeightedView(inner, SharedArray(table), name, replacement, chosen, shuffle.seed)
    if options.per_class is not None:
        name = options.per_class
        found = as_keys(values(as_sql(name, columns)))
        missing = "null or NaN" if pa.types.is_floating(found.type) else "null"
        codes = codes_of(f"per_class={name!r}", without_nan(found))
        labels = _labels(name, of_slots(codes, inner), missing)
        slots, starts = class_table(labels)
        chosen = epoch_rows or size
        view = BalancedView(inner, SharedArray(slots), SharedArray(starts), name, chosen, shuffle)
        if size and not view.num_slots(0):
            raise ConfigError(
                f"epoch_rows={epoch_rows} is less than the {view.num_classes} classes of "
                f"per_class={name!r}"
            )
        return view
    if epoch_rows is not None:
        return EpochRowsView(inner, epoch_rows, shuffle)
    return inner


def even_weight(name: str, columns: Collection[str]) -> int | None:
    """The weight of all rows, if it is a whole number: then no values of rows are needed."""
    is_number = name.isascii() and name.isdigit() and name not in columns
    return int(name) if is_number and 0 < int(name) < 2**31 else None


def _weights(name: str, found: pa.Array) -> Weights:
    """Weights as they are: integers of 64 bits have no place in a double."""
    option = f"weights={name!r}"
    if not len(found):
        return np.empty(0)
    kind = found.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise ConfigError(f"{option} must give numbers, got {kind}")
    values = found if pa.types.is_integer(kind) else found.cast(pa.float64())
    weights: Weights = values.fill_null(0).to_numpy(zero_copy_only=False)
    bad = np.flatnonzero(~((weights >= 0) & (weights < np.inf)) | _are_null(found))
    if len(bad):
        raise ConfigError(
            f"{option} must give finite numbers of at least 0, got {found[int(bad[0])].as_py()!r} "
            f"in {len(bad)} of {len(weights)} rows"
        )
    if not weights.any():
        raise ConfigError(f"{option} gives 0 for each of {len(weights)} rows")
    return weights


def _labels(name: str, found: pa.Array, missing: str) -> Int64Array:
    """The class of each slot, numbered by first appearance."""
    if found.null_count:
        raise ConfigError(
            f"per_class={name!r} is {missing} in {found.null_count} of {len(found)} rows: leave "
            f"them out by where, or give them a class by coalesce or nanvl"
        )
    if not len(found):
        return np.empty(0, np.int64)
    _, labels = np.unique(found.to_numpy(zero_copy_only=False), return_inverse=True)
    return labels.astype(np.int64, copy=False)


def _are_null(found: pa.Array) -> npt.NDArray[np.bool_]:
    nulls: npt.NDArray[np.bool_] = pc.is_null(found).to_numpy(zero_copy_only=False)
    return nulls
