"""Sets the weights of an epoch: each rank reports, and all ranks wait for the reports of all.

The reports lie in a dataset of the cache, to which the coordinator appends one after the other. So
ranks agree without talking to each other, and a later start of the job reads the same.
"""

from __future__ import annotations

import hashlib
import logging
import time
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
from tenacity import Retrying, retry_if_result

from cache_client.control.client import CacheClient
from cache_client.epochs.cursor import LAST_EPOCH
from cache_client.job.arguments import flag_problems, integer_problem, seconds_problems
from cache_client.job.connection import Access
from cache_client.job.ranks import find_process, is_of_one_process
from cache_client.order.states import SetUntil
from cache_client.training.opened import nodes_of, with_view
from cache_client.training.past import PastEpochs
from cache_client.view_options.weight_log import (
    ReportReader,
    first_weights,
    named,
    report_problem,
    rows_of,
    weighted,
    with_weights,
)
from cache_client.views.sampling import WeightedView
from cache_client.views.set_weights import Report, Sealed, SetWeights
from cache_protocol.errors import ConfigError, NotReadyError
from cache_protocol.wire.channels import backoff

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


def number_of(fingerprint: str) -> int:
    """A number for what is read, for the cells that DataLoader workers see; not 0."""
    return int(hashlib.sha256(fingerprint.encode()).hexdigest()[:15], 16)


def checked_report(
    epoch: int, start: str, rank: int, world_size: int, row_ids: Any, weights: Any, num_rows: int
) -> Report:
    """The report of a rank.

    Args:
        row_ids, weights: numbers of equal shape: arrays, tensors of the host, or lists.
        num_rows: of the version.

    Raises:
        ConfigError: quotes what is wrong.
    """
    try:
        ids, values = np.asarray(row_ids), np.asarray(weights)
        if ids.size and ids.dtype.kind not in "iu":
            raise TypeError(f"row_ids must be integers, got {ids.dtype}")
        ids, values = ids.astype(np.int64), values.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"set_weights takes row ids and a weight for each: {error}") from None
    if problem := report_problem(ids, values, num_rows):
        raise ConfigError(problem)
    return Report(epoch, start, rank, world_size, ids, values)


class Agreement:
    """The weights of an epoch, as one rank of a job reports them and waits for the others.

    Args:
        access: to the cache.
        log: with the reports of all ranks.
        replicas: nodes that hold it.
        found: the weights before any report.
        report: of this rank.
    """

    def __init__(
        self, access: Access, log: ReportReader, replicas: int, found: SetWeights, report: Report
    ) -> None:
        self._access, self._log, self._replicas = access, log, replicas
        self._found, self._report = found, report

    def reach(self, *, keep_sealed: bool, timeout_s: float) -> Sealed:
        """Reports, and waits until the reports of all ranks have sealed the weights of the epoch.

        Raises:
            ConfigError: the epoch has other weights already, or all would be 0.
            NotReadyError: ranks did not report in time; names them.
            CacheError: the log cannot be written or read.
        """
        report, found = self._report, self._found
        if not self._is_sealed():
            self._wait(timeout_s)
        sealed = found.last
        assert sealed is not None
        is_same = report.says_as(found.reports.get(report.rank))
        if sealed.epoch == report.epoch and (is_same or keep_sealed):
            if not is_same:
                logger.warning(
                    "the weights of epoch %d are those that were set before log=%s",
                    sealed.epoch, self._log.log,
                )  # fmt: skip
            return sealed
        raise ConfigError(
            f"epoch {report.epoch} cannot have these weights: those of epoch {sealed.epoch} of "
            f"this job were set before, to other values, and do not change: see dataset "
            f"{self._log.log!r}. A job that was started again goes on with them by "
            "keep_sealed=True; another run needs another name of the job"
        )

    def _is_sealed(self) -> bool:
        """Reads what is new; returns whether this epoch, or a later one, has its weights."""
        found, epoch = self._found, self._report.epoch
        for each in self._log.read():
            if found.take(each) is not None and each.epoch >= epoch:
                break
        return found.last is not None and found.last.epoch >= epoch

    def _wait(self, timeout_s: float) -> None:
        report, found = self._report, self._found
        refused = found.refused
        if not report.says_as(found.pending(report).get(report.rank)):
            CacheClient._of(self._access).write(
                self._log.log,
                rows_of(report),
                append=True,
                replicas=self._replicas,
                timeout_s=self._access.ready_deadline_s,
            )
        deadline = time.monotonic() + timeout_s
        is_over = Retrying(
            retry=retry_if_result(lambda is_over: not is_over),
            stop=lambda _: time.monotonic() > deadline,
            wait=backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S),
            retry_error_callback=lambda _: False,
        )(lambda: self._is_sealed() or found.refused > refused)
        if not is_over:
            raise NotReadyError(
                f"the weights of epoch {report.epoch} wait for rank {found.missing(report)} of "
                f"{report.world_size}, after {timeout_s:g} s: each rank calls set_weights("
                f"{report.epoch}, ...), also with no rows. Call it again to wait on, or start the "
                "ranks again that ended"
            )
        if found.refused > refused:
            raise ConfigError(
                f"the weights that the ranks set for epoch {report.epoch} leave 0 for each row, so "
                "they do not count: set others"
            )


class WeightedEpochs(PastEpochs):
    """A dataset whose weights training may set; see `PastEpochs`."""

    def set_weights(
        self,
        epoch: int,
        row_ids: Any,
        weights: Any,
        *,
        keep_sealed: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        """Sets the weights of rows from an epoch on, by what all ranks report of them.

        Call it on every rank between two epochs, with the rows that the rank has read, or with
        none. It returns when all ranks have reported. A row then has the mean of what was reported
        of it, and other rows keep their weight. A row of weight 0 is not read. The cache keeps the
        reports in a small dataset, from which a later start of the job reads the weights again.

        The view needs ``weights``, which count until then; without replacement, an epoch has at
        most as many samples as rows of a weight above 0. The job needs a name.

        Args:
            epoch: the next one, or a later one. It has not begun, and no later one has its weights.
            row_ids: of the version, such as those of ``Reading(row_ids=...)``; shape ``(k,)``. A
                row may come several times.
            weights: of these rows, from 0 to 1e200; shape ``(k,)``.
            keep_sealed: the weights that were set in an earlier start of the job count, if there
                are any, instead of these.
            timeout_s: how long to wait for the other ranks.

        Raises:
            ConfigError: quotes a bad argument; the epoch has begun, or has other weights already;
                all weights would be 0; the view has no weights, or is amended.
            NotReadyError: ranks did not report in time; names them.
            PermissionDeniedError: the job may not write datasets.
        """
        told = self._opened.set_until
        first = max(self._first_unread(), 0 if told is None else told.epoch)
        problems = integer_problem("epoch", epoch, first, LAST_EPOCH)
        problems += flag_problems("keep_sealed", keep_sealed)
        problems += seconds_problems("timeout_s", timeout_s)
        if problems:
            raise ConfigError("; ".join(problems))
        self._check_weights_can_be_set()
        base, access = self._base_view(), self._config.access
        shards, rank = self._opened.shards, self._config.rank
        report = checked_report(
            epoch,
            find_process(self._config.job).attempt,
            rank.rank,
            rank.world_size,
            row_ids,
            weights,
            shards.num_rows,
        )
        now = self._cursor.epoch
        found = first_weights(
            base, self.view, nodes_of(self._opened, self._config), range(now, LAST_EPOCH + 1)
        )
        log = ReportReader(access, self._opened.weight_log, shards.num_rows)
        replicas = min(map(len, shards.replicas), default=1)
        sealed = Agreement(access, log, max(1, replicas), found, report).reach(
            keep_sealed=keep_sealed, timeout_s=timeout_s
        )
        told = SetUntil(log.log, *sealed)
        self._take_weights(with_weights(base, self.view, found, now), told)

    @abstractmethod
    def _tell_version(self) -> None:
        """Tells running DataLoader workers what is read from now on."""

    def _take_weights(self, view: WeightedView, told: SetUntil) -> None:
        """Reads by weights that were set, from the next pass on."""
        self._opened = with_view(self._opened, self._config, view, told)
        for epoch, runs in self._skipped.items():
            stop = view.num_slots(epoch)
            cut = tuple((start, min(end, stop)) for start, end in runs if start < stop)
            self._skipped = {**self._skipped, epoch: cut}
        start = self._cursor.planned()
        if start.epoch == told.epoch:
            self._cursor.set(*start, num_steps=self._plan(start.offset, start.epoch).num_steps)
        self._tell_version()

    def _know_weights(self, epoch: int) -> None:
        """Reads the weights of an epoch again, if it is before those that are known."""
        told, view = self._opened.set_until, self._slots
        if told is not None and isinstance(view, WeightedView) and epoch < view.first_epoch:
            self._opened = self._by_weights(self._config, self._opened, told, epoch, LAST_EPOCH)

    def _follow_weights(self, epoch: int, wanted: int) -> None:
        """Reads the weights that the training process reads by, in a worker that is older.

        Args:
            wanted: `number_of` what the training process reads; 0: it did not tell.

        Raises:
            ConfigError: they are not in the log, or those of a loaded state.
        """
        if wanted in (0, number_of(self.fingerprint)):
            self._know_weights(epoch)
            return
        base, config, opened = self._base_view(), self._config, self._opened
        epochs = range(epoch, LAST_EPOCH + 1)
        found = first_weights(base, self.view, nodes_of(opened, config), epochs)
        log = ReportReader(config.access, opened.weight_log, opened.shards.num_rows)
        for report in log.read():
            sealed = found.take(report)
            if sealed is None:
                continue
            told = SetUntil(opened.weight_log, *sealed)
            if (
                number_of(with_view(opened, config, named(base, sealed), told).fingerprint)
                == wanted
            ):
                view = with_weights(base, self.view, found, epoch)
                self._opened = with_view(opened, config, view, told)
                return
        raise ConfigError(
            f"a running DataLoader worker cannot take the weights of epoch {epoch}, which a loaded "
            "state has: make the loader after load_state_dict"
        )

    def _first_unread(self) -> int:
        """The first epoch without a row that was read.

        Raises:
            ConfigError: a pass runs.
        """
        pass_, start = self._passes.current(), self._cursor.planned()
        if pass_ is not None and pass_.open:
            raise ConfigError(
                f"set_weights is called between two epochs, and a pass over epoch {pass_.epoch} "
                "runs: take its last batch, or delete its iterator and loader before"
            )
        has_begun = pass_ is not None or start.offset or self._cursor.read_by_workers
        return start.epoch + bool(has_begun)

    def _check_weights_can_be_set(self) -> None:
        config = self._config
        if is_of_one_process(config.job):
            raise ConfigError(
                "set_weights needs a job of one name, by which all ranks and later starts find the "
                "weights: pass job, or set CACHE_JOB"
            )
        others = {
            f"version={config.version!r}": config.version != "ready",
            "an amended job": self._history,
            "a replay": self._replayed,
        }
        for what, is_so in others.items():
            if is_so:
                raise ConfigError(
                    f"set_weights does not go with {what}: weights are of the row ids of one "
                    "version, for whole epochs"
                )

    def _base_view(self) -> WeightedView:
        """The view before any weights were set."""
        view = weighted(self._slots, self.view)
        return replace(view, later=(), first_epoch=0, epochs="same size")
