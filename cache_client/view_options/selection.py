"""Which rows of a version a job reads: a filter, splits, folds, or a list of rows.

The view of the other options takes its rows from this one.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from cache_client.job.arguments import are_names
from cache_client.order.permutation import Int64Array
from cache_client.view_options.columns import VersionNodes, selected_rows
from cache_client.views.rows_view import RowsView, rows_in_order, rows_of_shards
from cache_client.views.splits import (
    TUPLE_PARTS,
    HashRange,
    as_fraction,
    fold_of,
    is_whole,
    part_of,
    tuple_part,
)
from cache_client.views.view import PlainView, View
from cache_protocol.datasets.values import as_integer, as_number
from cache_protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1_048_576  # to hash
_MOST_FOLDS = 1_000_000
# Quoted text, and what else a comment or a quote may begin: there a space may have a meaning.
_QUOTED = re.compile(r"('(?:[^']|'')*'|\"(?:[^\"]|\"\")*\")")
_UNCLEAR = re.compile(r"--|/\*|[$`\\]")


class SelectionOptions(TypedDict, total=False):
    """Which rows a job reads; all may be combined.

    Attributes:
        where: SQL of a condition on each row, such as ``"price > 100 AND city = 'Oslo'"``. The
            nodes evaluate it.
        split: ``{"train": 0.8, "val": 0.1, "test": 0.1}`` and ``part="train"``; or, in short,
            ``("train", 0.8)``: at most 0.8 for ``train``, and 0.1 for ``val`` and ``test``. Each
            row is in a part by a hash of its row id, or of ``split_by``.
        part: the name of a part of ``split``.
        split_by: key columns: all rows of a key are in the same part and in the same fold.
        fold: ``(i, k)``: fold i of k, for validation.
        except_fold: ``(i, k)``: all rows but those of fold i, for training.
        subset: row ids, in the order in which the rows are read; they may repeat.
    """

    where: str
    split: tuple[str, float] | Mapping[str, float]
    part: str
    split_by: Sequence[str]
    fold: tuple[int, int]
    except_fold: tuple[int, int]
    subset: Sequence[int] | npt.NDArray[np.integer[Any]]


def selection_problems(options: Mapping[str, Any]) -> list[str]:
    """The problems of the options that need no node; each is quoted."""
    problems: list[str] = []
    where, split, part = (options.get(name) for name in ("where", "split", "part"))
    if where is not None and (not isinstance(where, str) or not where.strip()):
        problems.append(f"where must be SQL of a condition on each row, got {where!r}")
    problems += _split_problems(split, part)
    by = options.get("split_by")
    if by is not None:
        if not are_names(by) or not by:
            problems.append(f"split_by must be a list of columns, got {by!r}")
        if all(options.get(name) is None for name in ("split", "fold", "except_fold")):
            problems.append(f"split_by needs split, fold or except_fold, got split_by={by!r} alone")
    for name in ("fold", "except_fold"):
        if (fold := options.get(name)) is not None and _fold(fold) is None:
            problems.append(
                f"{name} must be (i, k) with 0 <= i < k and k >= 2, such as (0, 5), got {fold!r}"
            )
    if options.get("fold") is not None and options.get("except_fold") is not None:
        problems.append("fold and except_fold exclude each other: give one of them")
    return problems


def make_selection(options: Mapping[str, Any], version: VersionNodes) -> View:
    """The view of the rows that the options choose.

    Args:
        options: without problems.

    Raises:
        ConfigError: ``subset`` has no row ids of this version; quotes one.
        RequestError: ``where`` or ``split_by`` is wrong, or needs other rows; says why.
        NodeUnavailableError, StaleVersionError: as for `selected_rows`.
    """
    where, subset, by = (options.get(name) for name in ("where", "subset", "split_by"))
    ranges = [each for each in (_split(options), *_folds(options)) if each is not None]
    parts = [f"where={normalised(where)}"] if where is not None else []
    parts += [f"{each.identity} by {list(by)}" if by else each.identity for each in ranges]
    conditions = [normalised(where)] if where is not None else []
    if by:
        conditions += [each.condition(by) for each in ranges]
        ranges = []
    row_ids = None if subset is None else _row_ids(subset, version.shards.num_rows)
    if row_ids is not None:
        parts.append(f"subset={hashlib.sha256(row_ids.tobytes()).hexdigest()[:16]}")
    if not parts:
        return PlainView(version.shards.num_rows)
    identity = "; ".join(parts)
    if row_ids is None:
        view = _ascending(identity, version, conditions, ranges)
    else:
        for each in ranges:
            row_ids = row_ids[each.holds(row_ids)]
        if conditions:
            row_ids = row_ids[_ascending("", version, conditions, []).contains(row_ids)]
        view = rows_in_order(identity, row_ids, version.shards.num_rows)
    logger.info(
        "view dataset=%s rows=%d of %d bytes=%d %s",
        version.shards.dataset, view.num_slots(0), version.shards.num_rows, view.num_bytes,
        identity,
    )  # fmt: skip
    return view


def normalised(where: str) -> str:
    """A condition with one space for each run of spaces, where that cannot change it."""
    if _UNCLEAR.search(where):
        return where.strip()
    parts = _QUOTED.split(where)  # every second one is quoted
    parts[::2] = [re.sub(r"\s+", " ", part) for part in parts[::2]]
    return "".join(parts).strip()


def _ascending(
    identity: str, version: VersionNodes, conditions: Sequence[str], ranges: Sequence[HashRange]
) -> RowsView:
    """The rows that fulfil all conditions and are in all ranges, by row id."""
    shards = version.shards
    counts = np.diff([*shards.starts.tolist(), shards.num_rows])
    numbers = (
        selected_rows(version, conditions)
        if conditions
        else (np.arange(count, dtype=np.uint32) for count in counts)
    )
    kept = [
        _in_ranges(each, int(first), ranges)
        for each, first in zip(numbers, shards.starts, strict=True)
    ]
    return rows_of_shards(identity, kept, shards.starts, shards.num_rows)


def _in_ranges(
    numbers: npt.NDArray[np.uint32], first: int, ranges: Sequence[HashRange]
) -> npt.NDArray[np.uint32]:
    """Those rows of a shard that are in all ranges, by the hashes of their row ids."""
    if not ranges:
        return numbers
    kept = []
    for at in range(0, len(numbers), _ROWS_AT_ONCE):
        part = numbers[at : at + _ROWS_AT_ONCE]
        for each in ranges:
            part = part[each.holds(part.astype(np.int64) + first)]
        kept.append(part)
    return np.concatenate([np.empty(0, np.uint32), *kept])


def _split_problems(split: object, part: object) -> list[str]:
    if split is None:
        return [] if part is None else [f"part needs split, got part={part!r} alone"]
    if isinstance(split, Mapping):
        if not split or not all(isinstance(n, str) and _is_share(f) for n, f in split.items()):
            return [f"split must map names to fractions between 0 and 1, got {split!r}"]
        if sum(map(as_fraction, split.values())) > 1 and not is_whole(split):
            return [f"the fractions of split must be at most 1 together, got {split!r}"]
        if not isinstance(part, str) or part not in split:
            return [f"part must be one of {', '.join(split)}, got {part!r}"]
        return []
    problems = [] if part is None else [f"part needs a split with all parts, got split={split!r}"]
    if not (isinstance(split, (tuple, list)) and len(split) == 2 and _is_share(split[1])):
        return [
            *problems,
            "split must be a mapping of names to fractions, or (name, fraction), such as "
            f"('train', 0.8), got {split!r}",
        ]
    name, fraction = split
    known = ", ".join(f"{each} ({float(b - a):g})" for each, (a, b) in TUPLE_PARTS.items())
    ends = TUPLE_PARTS.get(name) if isinstance(name, str) else None
    if ends is None or as_fraction(fraction) > ends[1] - ends[0]:
        problems.append(
            f"split=(name, fraction) knows these names, each with a largest fraction, so that no "
            f"two parts overlap: {known}; got {split!r}. For others, give all parts: "
            "split={'train': 0.9, 'val': 0.1}, part='train'"
        )
    return problems


def _is_share(value: object) -> bool:
    number = as_number(value)
    return number is not None and not math.isnan(number) and 0 < number <= 1


def _split(options: Mapping[str, Any]) -> HashRange | None:
    split = options.get("split")
    if split is None:
        return None
    return part_of(split, options["part"]) if isinstance(split, Mapping) else tuple_part(*split)


def _folds(options: Mapping[str, Any]) -> Iterator[HashRange]:
    for name in ("fold", "except_fold"):
        if (fold := _fold(options.get(name))) is not None:
            yield fold_of(*fold, inside=name == "fold")


def _fold(value: object) -> tuple[int, int] | None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return None
    index, count = map(as_integer, value)
    if index is None or count is None or not 0 <= index < count or not 2 <= count <= _MOST_FOLDS:
        return None
    return index, count


def _row_ids(subset: object, num_rows: int) -> Int64Array:
    """The row ids of a subset.

    Raises:
        ConfigError: it has others; quotes one.
    """
    try:
        found = np.asarray(subset)
    except (TypeError, ValueError):  # such as lists of several lengths
        found = np.empty((), object)
    if found.shape == (0,):
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ConfigError(f"subset must be a list of row ids, got {reprlib.repr(subset)}")
    outside = (found < 0) | (found >= num_rows)
    if outside.any():
        raise ConfigError(f"subset must have row ids in [0, {num_rows}), got {found[outside][0]}")
    return found.astype(np.int64)
