"""Options of a job that take rows more or less often than once: checked, and made to views."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypedDict

import numpy as np
import pyarrow as pa

from cache_client.job.arguments import flag_problems, integer_or_problem
from cache_client.order.permutation import Int64Array
from cache_client.views.sampling import (
    BalancedView,
    EpochRowsView,
    WeightedView,
    class_table,
    weight_table,
)
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import Shuffle, View, as_sql, codes_of, of_slots
from cache_protocol.errors import ConfigError

_MAX_EPOCH_ROWS: Final = 2**31


class SamplingOptions(TypedDict, total=False):
    """Rows that come more or less often than once an epoch.

    - weights: a column of numbers, or SQL such as ``1 / (1 + clicks)``: how often a row comes, in
      proportion. A row of weight 0 never comes. The client keeps 8 bytes a row.
    - replacement: True (the default): each sample draws a row anew. False: an epoch has a row at
      most once; how often epochs have it is in proportion to its weight.
    - per_class: a column, or SQL, of a class: all classes come equally often, in every run of as
      many samples as there are classes. A class gives all its rows before it repeats one, over
      epochs too. The client keeps 4 bytes a row.
    - epoch_rows: samples of an epoch. Default: the number of rows; with ``replacement=False`` as
      many as the largest weight allows. With ``per_class`` the next lower multiple of the number of
      classes. Without weights and classes, epochs go on where the one before ended.
    """

    weights: str
    replacement: bool
    per_class: str
    epoch_rows: int


def sampling_problems(options: Mapping[str, Any]) -> list[str]:
    """The problems of the options that need no node; each is quoted."""
    problems = [
        f"{name} must be the name of a column or SQL, got {options[name]!r}"
        for name in ("weights", "per_class")
        if name in options and not (isinstance(options[name], str) and options[name].strip())
    ]
    if "weights" in options and "per_class" in options:
        problems.append("weights and per_class exclude each other: give one of them")
    if "replacement" in options:
        problems += flag_problems("replacement", options["replacement"])
        if "weights" not in options:
            problems.append(f"replacement needs weights, got {options['replacement']!r}")
    integer_or_problem(problems, "epoch_rows", options.get("epoch_rows", 1), 1, _MAX_EPOCH_ROWS)
    return problems


def make_sampling(
    options: Mapping[str, Any],
    inner: View,
    *,
    shuffle: Shuffle,
    columns: Collection[str],
    values: Callable[[str], pa.ChunkedArray],
) -> View:
    """The view that the options ask for; without any, the inner view.

    Args:
        options: without problems.
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
    epoch_rows = options.get("epoch_rows")
    if shuffle.shuffle_block_size is not None and {"weights", "per_class"} & options.keys():
        raise ConfigError(
            "weights and per_class read rows from everywhere: leave out shuffle_block_size, got "
            f"{shuffle.shuffle_block_size}"
        )
    if "weights" in options:
        name = options["weights"]
        weights = _weights(name, of_slots(values(as_sql(name, columns)), inner))
        replacement = options.get("replacement", True)
        ends, most = weight_table(weights, replacement=replacement, seed=shuffle.seed)
        if not replacement and (epoch_rows or 0) > most and size:
            raise ConfigError(
                f"epoch_rows={epoch_rows} would take the row of the largest weight more than once: "
                f"give at most {most}, or replacement=True"
            )
        chosen = epoch_rows or (size if replacement else most)
        return WeightedView(inner, SharedArray(ends), name, replacement, chosen, shuffle.seed)
    if "per_class" in options:
        name = options["per_class"]
        labels = _labels(
            name, of_slots(codes_of(f"per_class={name!r}", values(as_sql(name, columns))), inner)
        )
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


def _weights(name: str, found: pa.Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    option = f"weights={name!r}"
    if not len(found):
        return np.empty(0)
    kind = found.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise ConfigError(f"{option} must give numbers, got {kind}")
    filled = found.cast(pa.float64()).fill_null(np.nan)
    weights: np.ndarray[Any, np.dtype[np.float64]] = filled.to_numpy(zero_copy_only=False).copy()
    bad = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
    if len(bad):
        raise ConfigError(
            f"{option} must give finite numbers of at least 0, got {found[int(bad[0])].as_py()!r} "
            f"in {len(bad)} of {len(weights)} rows"
        )
    if not weights.any():
        raise ConfigError(f"{option} gives 0 for each of {len(weights)} rows")
    return weights


def _labels(name: str, found: pa.Array) -> Int64Array:
    """The class of each slot, numbered by first appearance."""
    if found.null_count:
        raise ConfigError(
            f"per_class={name!r} is null in {found.null_count} of {len(found)} rows: leave them "
            f"out by where, or give them a class by coalesce"
        )
    if not len(found):
        return np.empty(0, np.int64)
    _, labels = np.unique(found.to_numpy(zero_copy_only=False), return_inverse=True)
    return labels.astype(np.int64, copy=False)
