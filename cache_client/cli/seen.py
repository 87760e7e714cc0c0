"""When rows were given to a job, from its states or its records, without a log: ``cachectl seen``.

The order is a function with an inverse, so a position says which rows came before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cache_client.cli.step_rows import (
    Question,
    ReadVersion,
    amended_rows,
    question_of,
    read_view,
)
from cache_client.flight.routing import ShardMap
from cache_client.job.connection import Access
from cache_client.order.audit_record import AuditRecord
from cache_client.order.erased import NO_ROWS
from cache_client.order.order import EpochOrder, StepPlan
from cache_client.order.permutation import Int64Array
from cache_client.order.states import OrderState, parts_of
from cache_client.views.given import positions_of
from cache_client.views.view import Shuffle, SlotView
from cache_protocol.errors import ConfigError, missing_package

_WHOLE = 2**62  # above every position


@dataclass(frozen=True)
class Sighting:
    """Where rows were given in an epoch.

    Attributes:
        rows, positions: of each time that a row was given; int64, shape ``(k,)``, by position.
        steps, ranks: likewise, counted from the begin of the epoch or of the pass; None: the sizes
            of the job are not known.
    """

    epoch: int
    rows: Int64Array
    positions: Int64Array
    steps: Int64Array | None
    ranks: Int64Array | None

    def place(self, index: int) -> str:
        """One of the times, for people; "" where there is none."""
        if not len(self.rows):
            return ""
        if self.steps is None or self.ranks is None:
            return f"position {self.positions[index]:,}"
        return f"step {self.steps[index]:,}, rank {self.ranks[index]}"


class Wanted:
    """Some rows of a dataset, found once in each version.

    Args:
        dataset: its name.
        where: SQL of a condition that they fulfil; None: they were forgotten.
        act: the number of the act that forgot them; used if there is no condition.
    """

    def __init__(self, access: Access, dataset: str, where: str | None, act: int = 0) -> None:
        self._access, self._dataset, self._where, self._act = access, dataset, where, act
        self._found: dict[str, Int64Array] = {}

    @property
    def count(self) -> int:
        """Different rows of the last version."""
        return len(next(reversed(self._found.values()), ()))

    def of(self, versions: Sequence[ReadVersion]) -> tuple[Int64Array, Int64Array]:
        """Their numbers among the rows of all versions, ascending, and their row ids."""
        joined, row_ids, first = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
        for _, shards in versions:
            if shards.dataset == self._dataset:
                own = self._found.get(shards.fingerprint)
                if own is None:
                    own = self._found[shards.fingerprint] = self._select(shards)
                joined.append(own + first)
                row_ids.append(own)
            first += shards.num_rows
        return np.concatenate(joined), np.concatenate(row_ids)

    def _select(self, shards: ShardMap) -> Int64Array:
        if self._where is None:
            return shards.erased.acts.get(self._act, NO_ROWS)
        try:
            from cache_client.view_options.columns import VersionNodes, selected_rows
        except ImportError as error:
            raise ConfigError(missing_package(error, "rows by a condition", "client")) from None
        access = self._access
        nodes = VersionNodes(access.endpoint, shards, access.credentials, access.deadline_s)
        of_shards = zip(shards.starts.tolist(), selected_rows(nodes, self._where), strict=True)
        found = [
            np.empty(0, np.int64),
            *(start + rows.astype(np.int64) for start, rows in of_shards),
        ]
        return np.concatenate(found)


def seen_by_state(
    access: Access, state: OrderState, wanted: Wanted, *, batch_size: int, world_size: int
) -> Iterator[Sighting]:
    """Where rows were given before a state, in each epoch up to it.

    Epochs before the first amendment are read as the state says, so they are right for a job whose
    version did not change.

    Args:
        batch_size, world_size: of the job, to tell steps and ranks; 0: not known.

    Raises:
        NotShownError, CacheError: as `read_view`.
    """
    for epoch in range(state.epoch + 1):
        consumed = state.rows_consumed if epoch == state.epoch else _WHOLE
        question = _question(state, epoch, max(batch_size, 1), max(world_size, 1))
        versions, view, order = _read(access, state, question)
        numbers, row_ids = wanted.of(versions)
        which, positions = positions_of(view, order, numbers)
        given = positions < consumed
        positions, steps, ranks = positions[given], None, None
        if batch_size and world_size:
            steps, ranks = StepPlan(order.num_left, world_size, batch_size).places(positions)
        yield Sighting(epoch, row_ids[which[given]], positions, steps, ranks)


def seen_by_record(access: Access, record: AuditRecord, wanted: Wanted) -> Sighting:
    """Where rows were given to one rank in one pass.

    Raises:
        NotShownError, CacheError: as `read_view`.
    """
    question = question_of(record, step=0, rank=record.rank)
    versions, view, order_of = read_view(access, question)
    numbers, row_ids = wanted.of(versions)
    which, positions = positions_of(view, order_of(record.skipped), numbers)
    ahead = positions >= record.rows_consumed
    which, positions = which[ahead], positions[ahead]
    steps, ranks = record.plan.places(positions)
    own = (ranks == record.rank) & (steps < record.steps) & (steps >= 0)
    return Sighting(record.epoch, row_ids[which[own]], positions[own], steps[own], ranks[own])


def last_clean(states: Sequence[tuple[str, OrderState, Sequence[Sighting]]]) -> str | None:
    """The name of the latest state before which none of the rows was given; None: there is none.

    Args:
        states: name, state and what was given before it.
    """
    dirty = {name for name, _, every in states if any(len(each.rows) for each in every)}
    clean = [(state.epoch, state.rows_consumed, name) for name, state, _ in states]
    return max((each for each in clean if each[2] not in dirty), default=(0, 0, None))[2]


def sighting_json(found: Sighting) -> dict[str, Any]:
    """A sighting as JSON types."""
    names: Mapping[str, Int64Array | None] = {
        "row": found.rows,
        "position": found.positions,
        "step": found.steps,
        "rank": found.ranks,
    }
    known = {name: values.tolist() for name, values in names.items() if values is not None}
    given = [dict(zip(known, each, strict=True)) for each in zip(*known.values(), strict=True)]
    return {"epoch": found.epoch, "given": given}


def _question(state: OrderState, epoch: int, batch_size: int, world_size: int) -> Question:
    return Question(
        dataset=state.dataset,
        fingerprint=state.fingerprint,
        view=state.view,
        shuffle=Shuffle(state.shuffle, state.shuffle_block_size, state.seed),
        epoch=epoch,
        step=0,
        ranks=(),
        world_size=world_size,
        batch_size=batch_size,
        drop_last=False,
        pad=False,
        rows_consumed=0,
        skipped=tuple((start, stop) for at, start, stop in state.skipped if at == epoch),
        notes=state.notes,
    )


def _read(
    access: Access, state: OrderState, question: Question
) -> tuple[list[ReadVersion], SlotView, EpochOrder]:
    if not state.amended:
        versions, view, order_of = read_view(access, question)
        return versions, view, order_of(question.skipped)
    version = replace(question, view="", fingerprint=state.fingerprint.partition("-")[0])
    versions, _, _ = read_view(access, version)
    parts = parts_of(state.amended, question.epoch)
    view = amended_rows(access, versions[0].shards, parts, question.shuffle, state.notes)
    return versions, view, question.shuffle.order(view, question.epoch, question.skipped)
