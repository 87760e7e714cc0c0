"""The log of the weights that training sets: a small dataset of the cache, and views by it.

Ranks append to it, see `cache_client.training.set_weights`. Each row is a part of a report, so that
no row is long.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from cache_client.job.connection import Access
from cache_client.order.permutation import Int64Array
from cache_client.order.states import SetUntil
from cache_client.reading.shard_maps import wait_for_shard_map
from cache_client.reading.table_reads import read_table
from cache_client.view_options.columns import VersionNodes, row_values
from cache_client.view_options.options import View
from cache_client.view_options.sampling import even_weight
from cache_client.view_options.selection import gone_error
from cache_client.views.sampling import SetTable, WeightedView, weight_table
from cache_client.views.set_weights import MOST_WEIGHT, Doubles, Report, Sealed, SetWeights
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import SlotView, as_sql
from cache_protocol.errors import ConfigError, DatasetNotFoundError, RequestError, StaleVersionError

SCHEMA: Final = pa.schema(
    {
        "epoch": pa.int64(),
        "start": pa.string(),
        "rank": pa.int64(),
        "world_size": pa.int64(),
        "parts_left": pa.int64(),
        "row_ids": pa.list_(pa.int64()),
        "weights": pa.list_(pa.float64()),
    }
)
_ROWS_OF_PART: Final = 65_536
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_MOST_OF_NAME: Final = 45  # of the dataset, and of the job


def log_name(dataset: str, job: str, fingerprint: str) -> str:
    """The name of the log of a job, in the namespace of the job.

    Args:
        fingerprint: of the version and of the view before any weights were set.
    """
    digest = hashlib.sha256(f"{dataset} {fingerprint} {job}".encode()).hexdigest()[:12]
    shown = (_NO_NAME.sub("-", each)[:_MOST_OF_NAME] for each in (dataset.split("/")[-1], job))
    return f"{'-weights-'.join(shown)}-{digest}"


def rows_of(report: Report) -> pa.Table:
    """A report as rows of the log."""
    starts = range(0, max(1, len(report.row_ids)), _ROWS_OF_PART)
    parts = [slice(at, at + _ROWS_OF_PART) for at in starts]
    one = {
        "epoch": report.epoch,
        "start": report.start,
        "rank": report.rank,
        "world_size": report.world_size,
    }
    rows = [
        {**one, "parts_left": left, "row_ids": report.row_ids[at], "weights": report.weights[at]}
        for left, at in zip(reversed(range(len(parts))), parts, strict=True)
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


class ReportReader:
    """Reads the reports of a log, in the order in which the cache took them.

    Args:
        log: its name; there may be none.
        num_rows: of the version that the reports are about.
    """

    def __init__(self, access: Access, log: str, num_rows: int) -> None:
        self._access, self.log, self._num_rows = access, log, num_rows
        self._known = 0  # rows of the log

    def read(self) -> Iterator[Report]:
        """The reports that were not read yet.

        Raises:
            RequestError: the log is another dataset, or of another version.
            CacheError: as `read_table`.
        """
        access = self._access
        wait_s, credentials = access.ready_deadline_s, access.credentials
        try:
            shards = wait_for_shard_map(access.endpoint, self.log, (), wait_s, credentials)
        except DatasetNotFoundError:
            return
        if shards.logical.names != SCHEMA.names or shards.num_rows < self._known:
            raise RequestError(f"dataset {self.log!r} is not, or not any more, a log of weights")
        if shards.num_rows == self._known:
            return
        found = read_table(
            access.endpoint, self.log, columns=(), rows=range(self._known, shards.num_rows),
            fingerprint=shards.fingerprint, deadline_s=wait_s, local=access.local,
            credentials=credentials,
        )  # fmt: skip
        for parts, report in _reports(found):
            if problem := report_problem(report.row_ids, report.weights, self._num_rows):
                raise RequestError(f"dataset {self.log!r} is no log of these weights: {problem}")
            self._known += parts
            yield report


def _reports(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Report]]:
    """The reports of rows of a log, each with the number of its rows."""
    ids, weights = list[Int64Array](), list[Doubles]()
    for batch in batches:
        lists = zip(batch["row_ids"], batch["weights"], strict=True)
        numbers = batch.drop_columns(["row_ids", "weights"]).to_pylist()
        for row, (own, of_rows) in zip(numbers, lists, strict=True):
            ids.append(own.values.to_numpy(zero_copy_only=False))
            weights.append(of_rows.values.to_numpy(zero_copy_only=False))
            if row.pop("parts_left"):
                continue
            whole = np.concatenate(ids), np.concatenate(weights)
            yield len(ids), Report(**row, row_ids=whole[0], weights=whole[1])
            ids, weights = [], []


def report_problem(row_ids: Int64Array, weights: Doubles, num_rows: int) -> str:
    """Why these are no weights of rows of a version; "" if they are."""
    if row_ids.shape != weights.shape or row_ids.ndim != 1:
        return f"there must be one weight for each row id, got {row_ids.shape} and {weights.shape}"
    bad = row_ids[(row_ids < 0) | (row_ids >= num_rows)]
    if len(bad):
        return f"row ids must be from 0 to {num_rows - 1}, got {bad[0]}"
    wrong = np.flatnonzero(~((weights >= 0) & (weights <= MOST_WEIGHT)))
    if len(wrong):
        at = wrong[0]
        return f"weights must be from 0 to {MOST_WEIGHT:g}, got {weights[at]} for row {row_ids[at]}"
    return ""


def weighted(view: SlotView, options: View) -> WeightedView:
    """The view whose weights can be set.

    Raises:
        ConfigError: it has none.
    """
    if not isinstance(view, WeightedView):
        raise ConfigError(
            "set_weights needs View(weights=...) whose samples are single rows, such as "
            f"View(weights='1', replacement=False) to begin with even ones, got {options}"
        )
    return view


def first_weights(
    view: WeightedView, options: View, version: VersionNodes, epochs: range
) -> SetWeights:
    """The weights of all rows before any were set.

    Args:
        epochs: that are asked for.

    Raises:
        ConfigError: rows were erased that the view has.
        CacheError: as `row_values`.
    """
    shards, name = version.shards, view.name
    even = even_weight(name, shards.layout.logical.names)
    if even is not None:
        return SetWeights(np.full(shards.num_rows, float(even)), _rows(view), epochs)
    if len(shards.erased.gone):
        raise gone_error(f"{options}")
    found = row_values(version, as_sql(name, shards.layout.logical.names))
    weights = np.array(found.cast(pa.float64(), safe=False).to_numpy(), np.float64)
    return SetWeights(weights, _rows(view), epochs)


def with_weights(view: WeightedView, options: View, found: SetWeights, epoch: int) -> WeightedView:
    """The view by weights that were set, for an epoch and those after it that were asked for."""
    tables = tuple(_table(view, options, *each) for each in found.kept)
    if found.last is not None and (not tables or tables[-1].digest != found.last.digest):
        tables += named(view, found.last).later
    return replace(view, later=tables, first_epoch=epoch, epochs="any size")


def named(view: WeightedView, sealed: Sealed) -> WeightedView:
    """The view with the name of weights only."""
    return replace(view, later=(SetTable(*sealed, SharedArray(np.empty(0, np.int64)), 0),))


def _rows(view: WeightedView) -> Int64Array:
    inner = view.inner
    return inner.samples(np.arange(inner.num_slots(0), dtype=np.int64), 0).row_ids


def _table(view: WeightedView, options: View, sealed: Sealed, weights: Doubles) -> SetTable:
    table, even, positive = weight_table(weights, replacement=view.replacement)
    count = options.epoch_rows or (len(weights) if view.replacement else even)
    if not view.replacement:
        count = min(count, positive)
    return SetTable(sealed.epoch, sealed.digest, SharedArray(table), count)


def view_of_told(
    access: Access,
    view: SlotView,
    options: View,
    version: VersionNodes,
    told: SetUntil,
    epochs: range,
) -> WeightedView:
    """The view of epochs, as a state tells which weights training set.

    Raises:
        ConfigError: the view has no weights.
        StaleVersionError: the log does not have them; names it.
        CacheError: as `ReportReader.read`.
    """
    base = weighted(view, options)
    found = first_weights(base, options, version, epochs)
    for report in ReportReader(access, told.log, version.shards.num_rows).read():
        if found.take(report) == told[1:]:
            return with_weights(base, options, found, epochs.start)
    raise StaleVersionError(
        f"the weights of epoch {told.epoch} that training set are not in {told.log!r}, with digest "
        f"{told.digest}: that dataset was dropped or lost since, so the order is not known. Begin "
        "anew, under another name of the job"
    )
