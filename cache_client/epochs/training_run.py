"""The passes of one dataset object as a run of lineage: which versions a job read, and how.

Only rank 0 tells, where OpenLineage is set up. A pass costs nothing but its first event.
"""

from __future__ import annotations

import atexit
import os
import sys
import uuid
import weakref
from collections.abc import Iterable
from typing import Final

from cache_client.epochs.passes import Pass
from cache_client.epochs.reports import ReaderIdentity
from cache_client.flight.routing import ShardMap
from cache_client.reading.counts import SharedCounts
from cache_protocol.errors import CacheError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire import lineage

_KIND: Final = "TRAINING"
_MOST_OF_TEXT: Final = 1000  # of a view
_MOST_VERSIONS: Final = 100

_open: dict[str, weakref.finalize] = {}  # type: ignore[type-arg]  # by run


class TrainingRun:
    """One run of a job, from the first batch until its dataset or its process ends.

    A pickle of it, in a DataLoader worker, begins the run at most, and ends none.

    Args:
        job: its name.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._run_id = str(uuid.uuid4())
        self._process = os.getpid()
        self._tables: dict[tuple[str, str], lineage.Table] = {}
        self._facts: dict[str, object] = {}
        self._error: str | None = None

    def end_with(self, dataset: object, shared: SharedCounts) -> None:
        """Ends the run when a dataset is freed, or the process ends."""
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        ends = _open[self._run_id] = weakref.finalize(dataset, self._end, shared)
        ends.atexit = False  # `_end_all` waits for the events, too

    def begin_pass(
        self,
        reader: ReaderIdentity,
        pass_: Pass,
        versions: Iterable[ShardMap],
        shared: SharedCounts,
    ) -> None:
        """Tells of the first pass, and of each that reads another version."""
        self._error = None
        self._facts = {
            **_facts(reader, pass_),
            "first_epoch": self._facts.get("first_epoch", pass_.epoch),
            "last_epoch": pass_.epoch,
        }
        is_told = bool(self._tables) or shared.is_told
        tables = {
            (each.dataset, each.fingerprint): lineage.Table(
                lineage.NAMESPACE,
                each.full_name or each.dataset,
                each.fingerprint,
                num_rows=each.num_rows if each.log is None else None,
                num_bytes=each.num_bytes if each.log is None else None,
            )
            for each in versions
        }
        if not is_told or (self._tables and not tables.keys() <= self._tables.keys()):
            self._tables |= tables
            self._tell("RUNNING" if is_told else "START")
            shared.is_told = True

    def end_pass(self, end: pb.PassEnd.ValueType, error: BaseException | None) -> None:
        """Notes how a pass ended: the last one tells how the run did."""
        if end == pb.PASS_END_FAILED and error is not None:
            self._error = _text(error)

    def _end(self, shared: SharedCounts) -> None:
        _open.pop(self._run_id, None)
        if os.getpid() != self._process or not shared.is_told:
            return  # a fork; or nothing was read
        last = getattr(sys, "last_value", None)  # which ended the program
        if self._error is not None:
            self._tell("FAIL", self._error)
        elif isinstance(last, KeyboardInterrupt):
            self._tell("ABORT")
        elif last is not None and not hasattr(sys, "ps1"):
            self._tell("FAIL", _text(last))
        else:
            self._tell("COMPLETE")

    def _tell(self, state: lineage.State, error: str = "") -> None:
        if (sender := lineage.sender()) is None:
            return
        tables = tuple(self._tables.values())[-_MOST_VERSIONS:]
        run = lineage.Run(
            self._run_id, f"train.{self._job}", _KIND, inputs=tables, facts=dict(self._facts)
        )
        sender.send(state, lambda: run, error)


def training_run(dataset: object, job: str, rank: int, shared: SharedCounts) -> TrainingRun | None:
    """The run of a dataset, which ends with it; None: this process tells of none."""
    if rank != 0 or lineage.sender() is None:
        return None
    run = TrainingRun(job)
    run.end_with(dataset, shared)
    return run


def _end_all() -> None:
    for ends in list(_open.values()):
        ends()
    lineage.flush()


def _text(error: BaseException) -> str:
    """An error without secrets, which others than ours may hold."""
    return str(error) if isinstance(error, CacheError) else type(error).__name__


def _facts(reader: ReaderIdentity, pass_: Pass) -> dict[str, object]:
    """What the order of the rows follows from, beside the versions and the epoch."""
    shuffle, block_size = reader.shuffle
    return {
        "seed": pass_.order.seed,
        "shuffle": shuffle,
        "shuffle_block_size": block_size,
        "view": reader.view[:_MOST_OF_TEXT],
        "batch_size": pass_.plan.batch_size,
        "world_size": reader.world_size,
        "drop_last": pass_.plan.drop_last,
    }
