"""What a job read before: opens it as a state says, for resumes, replays and questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cache_client.epochs.cursor import LAST_EPOCH
from cache_client.order.erased import Notes
from cache_client.order.order import EpochOrder
from cache_client.order.permutation import Int64Array
from cache_client.order.states import AmendedPart, OrderState, SetUntil, parts_of, read_state
from cache_client.order.view_text import erased_text
from cache_client.training.amendments import open_parts, view_of_state, with_notes
from cache_client.training.base import RankBatches
from cache_client.training.job_config import JobConfig
from cache_client.training.opened import Opened, nodes_of, open_version, with_view
from cache_client.training.replays import (
    Forgotten,
    Steps,
    check_clean,
    filled,
    forgotten_rows,
    mode_of,
    replayed_state,
    steps_of,
)
from cache_client.view_options.options import View
from cache_client.view_options.weight_log import view_of_told
from cache_client.views.view import SlotView
from cache_protocol.errors import ConfigError


class PastEpochs(RankBatches):
    """A dataset of one version, which may have been amended, or lost rows; see `RankBatches`."""

    def __init__(self, config: JobConfig, opened: Opened) -> None:
        super().__init__(config, opened)
        self._first_view: View | None = None  # that the program gave, if the job was amended
        self._history: tuple[AmendedPart, ...] = ()  # what the job read, if it was amended
        self._notes: Notes = {}  # what conditions said of rows that were erased later
        self._replayed = ""  # how this replay leaves rows out

    @property
    def _amendments(self) -> object:
        return self._history

    def _known_notes(self, acts: Mapping[int, Int64Array] | None = None) -> Notes:
        """What the conditions of the job said of rows that were erased since."""
        acts = self._opened.left_out.erased.acts if acts is None else acts
        return with_notes(self._notes, self._opened, self.view.rows.text, acts) if acts else {}

    def _take_history(
        self, state_dict: Mapping[str, Any], *, as_was: bool = False
    ) -> Mapping[str, Any]:
        """Reads the epoch of a state as the job did that wrote it; returns the state."""
        try:
            state = read_state(state_dict)
        except ValueError:
            return state_dict  # is refused by name
        knows = (self._opened.shards.erased.until, len(self._opened.left_out.rows))
        is_other = state.amended or self._history or knows != (state.erased, 0)
        is_other = is_other or state.set_weights != self._opened.set_until
        if self._config.version == "first-rows":
            return state_dict
        if state.dataset != self._opened.name or not is_other:
            return state_dict
        at_begin = not (as_was or state.rows_consumed or state.amended or self._history)
        at_begin = at_begin and state.set_weights is None
        if at_begin and state.view == erased_text(self.view.text, state.erased):
            version = state.fingerprint.partition("-")[0]
            self._opened = open_version(self._config, self._opened, fingerprint=version)
            return {**state_dict, "fingerprint": self.fingerprint}
        self._first_view = self._first_view or self.view
        config, opened = self._opened_by(state)
        if opened.fingerprint != self.fingerprint and self._cursor.has_workers:
            raise ConfigError(
                "the state is of an amended job, or has other weights, which running DataLoader "
                "workers do not know: delete their iterator and loader before load_state_dict"
            )
        self._config, self._opened, self._history = config, opened, state.amended
        self._notes = state.notes
        return state_dict

    def _replay(self, replay: Mapping[str, Any], without: Any, *, fill: bool) -> None:
        """Reads on from a state as the job did, without forgotten rows."""
        state, forgotten = replayed_state(replay, fill=fill), Forgotten.of(without)
        self._take_history(replay, as_was=True)
        erased, version = self._opened.left_out.erased, self._opened.shards.fingerprint
        rows = forgotten_rows(erased, forgotten, version)
        if not state.replayed:
            check_clean(state, rows, self._orders_of(state))
        if fill:
            self._opened = filled(
                self._opened, self.view, self._config.shuffle, rows, forgotten.number
            )
            replay = {**replay, "fingerprint": self.fingerprint}
        super().load_state_dict(replay)
        self._replayed = mode_of(fill)

    def steps_of(
        self, row_ids: Sequence[int] | Int64Array, state: Mapping[str, Any] | None = None
    ) -> Steps:
        """When rows were given before a state: the epochs, steps and ranks, without a log.

        The order has an inverse. So a row costs one permutation for each epoch of a plain or
        amended read; other views take a pass over the samples of each epoch.

        Args:
            row_ids: of the version; in any order.
            state: of this job; default: that of now.

        Returns:
            One entry for each time, by epoch and step. Steps count from the begin of the epoch,
            with this batch size and world size. A row that a short last step gives to two ranks is
            there once.

        Raises:
            ConfigError: it is no state, or no row ids; quotes them.
            StaleVersionError, NodeUnavailableError: the version of a state cannot be opened.
        """
        try:
            rows = np.asarray(row_ids, np.int64).reshape(-1)
            told = read_state(self.state_dict() if state is None else state)
        except (OverflowError, TypeError, ValueError) as error:
            raise ConfigError(f"steps_of needs row ids and a state: {error}") from None
        return steps_of(told, rows, self._orders_of(told), self._config.steps)

    def _orders_of(self, state: OrderState) -> Callable[[int], tuple[SlotView, EpochOrder]]:
        """Epoch -> the view and the order that a state has in it."""
        shuffle, opened = self._config.shuffle, self._opened
        is_same = state.fingerprint == self._state(state.epoch, 0).fingerprint
        if not is_same or state.amended:
            config, opened = self._opened_by(state)

        def of(epoch: int) -> tuple[SlotView, EpochOrder]:
            view = opened.slots
            if state.amended and epoch != state.epoch:
                part = parts_of(state.amended, epoch)[-1]
                own = replace(config, view=view_of_state((part,)))
                latest = open_version(
                    own,
                    fingerprint=opened.shards.fingerprint,
                    until=part.erased,
                    notes=state.notes,
                    num_rows=part.num_rows,
                )
                view = open_parts(own, epoch, state.amended, latest, notes=state.notes).slots
            if state.set_weights and epoch != state.epoch:
                view = self._by_weights(self._config, opened, state.set_weights, epoch).slots
            skipped = tuple((start, stop) for at, start, stop in state.skipped if at == epoch)
            return view, shuffle.order(view, epoch, skipped)

        return of

    def _opened_by(self, state: OrderState) -> tuple[JobConfig, Opened]:
        """What the job of a state reads in its epoch."""
        view = view_of_state(state.amended) if state.amended else self._first_view or self.view
        config = replace(self._config, view=view.with_columns_of(self.view))
        opened = open_version(
            config,
            fingerprint=state.fingerprint.partition("-")[0],
            until=state.erased,
            notes=state.notes,
        )
        if state.amended:
            opened = open_parts(config, state.epoch, state.amended, opened, notes=state.notes)
        if state.set_weights:
            opened = self._by_weights(config, opened, state.set_weights, state.epoch, LAST_EPOCH)
        return config, opened

    def _by_weights(
        self,
        config: JobConfig,
        opened: Opened,
        told: SetUntil,
        epoch: int,
        last: int | None = None,
    ) -> Opened:
        """What a job reads in an epoch by weights that training set, and in those up to a last one.

        Raises:
            ConfigError: another job, or another view, set them.
        """
        if told.log != opened.weight_log:
            raise ConfigError(
                f"the state has weights that training set, of {told.log!r}, and those of this job, "
                f"view and version are in {opened.weight_log!r}: give them as they were"
            )
        epochs = range(epoch, epoch + 1 if last is None else last + 1)
        nodes = nodes_of(opened, config)
        view = view_of_told(config.access, opened.slots, config.view, nodes, told, epochs)
        return with_view(opened, config, view, told)
