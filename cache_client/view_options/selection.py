"""Which rows of a version a job reads: a filter, splits, folds, or a list of rows.

The view of the other options takes its rows from this one.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from cache_client.order.erased import Rest
from cache_client.order.permutation import Int64Array
from cache_client.view_options.columns import VersionNodes, selected_rows
from cache_client.view_options.options import View
from cache_client.views.rows_view import RestView, RowsView, rows_in_order, rows_of_shards
from cache_client.views.shared_array import SharedArray
from cache_client.views.splits import (
    HashRange,
    fold_of,
    part_of,
)
from cache_client.views.view import PlainView, SlotView
from cache_protocol.errors import ConfigError
from cache_protocol.storage.row_sets import among

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1_048_576  # to hash
# Quoted text, and what else a comment or a quote may begin: there a space may have a meaning.
_QUOTED = re.compile(r"('(?:[^']|'')*'|\"(?:[^\"]|\"\")*\")")
_UNCLEAR = re.compile(r"--|/\*|[$`\\]")


def make_selection(options: View, version: VersionNodes) -> SlotView:
    """The view of the rows that the options choose, without those that were erased.

    Raises:
        ConfigError: ``subset`` has no row ids of this version; quotes one. Or a condition was about
            values that are gone, see `Erased`.
        RequestError: ``where`` or ``split_by`` is wrong, or needs other rows; says why.
        NodeUnavailableError, StaleVersionError: as for `selected_rows`.
    """
    where, subset, by = options.where, options.subset, options.split_by
    ranges = list(_ranges(options))
    parts = [f"where={normalised(where)}"] if where is not None else []
    parts += [f"{each.identity} by {list(by)}" if by else each.identity for each in ranges]
    conditions = [normalised(where)] if where is not None else []
    if by:
        conditions += [each.condition(by) for each in ranges]
        ranges = []
    row_ids = None if subset is None else _row_ids(subset, version.shards.num_rows)
    if row_ids is not None:
        parts.append(f"subset={hashlib.sha256(row_ids.tobytes()).hexdigest()[:16]}")
    left_out = version.shards.erased.left_out
    if len(left_out):
        parts.append(f"erased={version.shards.erased.until}")
    if not parts:
        return PlainView(version.shards.num_rows)
    identity = "; ".join(parts)
    if len(left_out) and parts[:-1] == []:
        rows = range(version.shards.num_rows)
        return RestView(Rest(rows, SharedArray(left_out), SharedArray), identity)
    if row_ids is None:
        view = _ascending(identity, version, conditions, ranges)
    else:
        for each in ranges:
            row_ids = row_ids[each.holds(row_ids)]
        row_ids = row_ids[~among(row_ids, left_out)]
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
    numbers: Iterable[npt.NDArray[np.uint32]] = (
        _chosen(version, conditions)
        if conditions
        else (np.arange(count, dtype=np.uint32) for count in counts)
    )
    left_out = shards.erased.left_out
    kept = [
        _in_ranges(_without(each, int(first), left_out), int(first), ranges)
        for each, first in zip(numbers, shards.starts, strict=True)
    ]
    return rows_of_shards(identity, kept, shards.starts, shards.num_rows)


def condition_of(options: View) -> str:
    """What the options ask of the values of a row; "" if they ask nothing."""
    parts = [normalised(options.where)] if options.where is not None else []
    by = options.split_by
    return " AND ".join((*parts, *(each.condition(by) for each in _ranges(options) if by)))


def _chosen(version: VersionNodes, conditions: Sequence[str]) -> Iterator[npt.NDArray[np.uint32]]:
    """The rows of each shard that fulfil conditions; of erased ones, those that did."""
    shards, gone = version.shards, version.shards.erased.gone
    ends = [*shards.starts.tolist(), shards.num_rows][1:]
    try:
        held = shards.erased.chosen(" AND ".join(conditions), shards.num_rows)
    except ValueError as error:
        raise gone_error(f"the condition {' AND '.join(conditions)!r}", error) from None
    for found, first, stop in zip(
        selected_rows(version, conditions), shards.starts.tolist(), ends, strict=True
    ):
        own = held[slice(*np.searchsorted(held, [first, stop]))] - first
        found = _without(found, first, gone)
        yield np.union1d(found, own.astype(np.uint32)) if len(own) else found


def gone_error(what: str, why: object = "") -> ConfigError:
    """For a view that reads values of rows that are erased by now."""
    reason = f", and {why}" if why else ""
    return ConfigError(
        f"rows were erased since, and {what} needs their values to find the order that the job "
        f"had{reason}: begin an epoch anew, by set_epoch or without a state"
    )


def _without(
    numbers: npt.NDArray[np.uint32], first: int, rows: Int64Array
) -> npt.NDArray[np.uint32]:
    """Rows of a shard, without some row ids."""
    if not len(rows) or not len(numbers):
        return numbers
    own = rows[slice(*np.searchsorted(rows, [first, first + int(numbers[-1]) + 1]))] - first
    return numbers[~among(numbers.astype(np.int64), own)] if len(own) else numbers


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


def _ranges(options: View) -> Iterator[HashRange]:
    if options.split is not None and options.part is not None:
        yield part_of(options.split, options.part)
    for fold, inside in ((options.fold, True), (options.except_fold, False)):
        if fold is not None:
            yield fold_of(operator.index(fold[0]), operator.index(fold[1]), inside=inside)


def _row_ids(subset: object, num_rows: int) -> Int64Array:
    """The row ids of a subset.

    Raises:
        ConfigError: it has others; quotes one.
    """
    found = np.asarray(subset)
    if found.shape == (0,):
        return np.empty(0, np.int64)
    outside = (found < 0) | (found >= num_rows)
    if outside.any():
        raise ConfigError(f"subset must have row ids in [0, {num_rows}), got {found[outside][0]}")
    return found.astype(np.int64)
