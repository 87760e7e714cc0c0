"""The passes over a dataset in one process, and which of them its state tells of.

Several iterators of one dataset may be open at once: the training loop's, one that a program made
to look at a batch, one of a validation. The state belongs to the one that training consumes. This
module decides which that is, and refuses states and habits that would lose or repeat rows. It does
no I/O and knows neither torch nor other processes.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cache_client.epochs.cursor import Cursor
from cache_client.order.audit_record import AuditRecord
from cache_client.order.digests import StepDigests
from cache_client.order.due import Due
from cache_client.order.order import EpochOrder, StepPlan, worker_steps
from cache_client.order.states import OrderState, WorkerState, read_state
from cache_client.order.view_text import view_differences
from cache_protocol.errors import ConfigError, StaleVersionError


@dataclass(eq=False)
class Pass:
    """One pass of one process over (the rest of) an epoch.

    Attributes:
        handed_out: batches so far.
        ahead: batches that a wrapper holds and the training loop has not seen yet.
        ended: the iterator was asked for more batches than there are.
        most_steps: that it makes; None: all.
        amend_after: steps after which ``amend`` is called; None: never.
        on_step: called after each batch that is handed out.
        superseded: its epoch was amended, and another pass reads the rest.
        due_of: what its epoch owes; the first call takes a pass over the rows of some views.
        of_loader: workers make its batches, and a `CacheLoader` counts those it hands out.
        digests: of the steps that this process made.
        record: of the steps handed out, when it was last made.
        traceparent: of the batch that the training loop waits for; empty: nothing is traced.
    """

    epoch: int = field(init=False)
    plan: StepPlan = field(init=False)
    order: EpochOrder = field(init=False)
    worker: int = 0
    num_workers: int = 1
    in_worker: bool = False
    of_loader: bool = False
    handed_out: int = 0
    ahead: int = 0
    ended: bool = False
    iterator: weakref.ref[Iterator[Any]] | None = None
    digests: StepDigests = field(default_factory=StepDigests)
    record: AuditRecord | None = None
    due_of: Callable[[], Due] = Due
    most_steps: int | None = None
    amend_after: int | None = None
    amend: Callable[[], None] | None = None
    on_step: Callable[[], None] | None = None
    superseded: bool = False
    traceparent: str = ""

    @property
    def steps(self) -> range:
        """The steps whose batches this process makes."""
        steps = worker_steps(self.plan.num_steps, self.worker, self.num_workers)
        return steps if self.most_steps is None else steps[: self.most_steps]

    @property
    def open(self) -> bool:
        """Whether more can come: the iterator exists, and has not handed out its last batch."""
        exists = self.iterator is not None and self.iterator() is not None
        return exists and not self.ended and self.handed_out < max(1, len(self.steps))

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and rows consumed, as a state tells them.

        After the last batch all rows of the epoch are consumed. Once the iterator has ended, it is
        the start of the next epoch. In a worker process it is where the worker's own strided
        sequence of steps continues; the states of n workers differ by up to n - 1 steps.
        """
        if not self.in_worker:
            if self.ended and not self.ahead:
                return self.epoch + 1, 0
            seen = self.handed_out if self.ended else max(0, self.handed_out - self.ahead)
            return self.epoch, self.plan.rows_consumed_after(seen)
        consumed = self.plan.rows_consumed
        consumed += self.handed_out * self.num_workers * self.plan.rows_per_step
        if self.handed_out == len(self.steps):
            consumed = self.plan.num_rows
        return self.epoch, min(consumed, self.plan.num_rows)


class Passes:
    """Finds the pass that training consumes.

    That is the pass begun first, as long as its iterator exists and has batches left. A pass begun
    meanwhile takes over only once it is read further, and gives way again when it is over. After
    `give_way`, the next pass that begins or hands out a batch takes over at once.

    Thread-safety: none.
    """

    def __init__(self) -> None:
        self._main: Pass | None = None
        self._overtaken: Pass | None = None  # by the main one, which is read further
        self._fresh: Pass | None = None  # the latest begun since the main one was last read
        self._gives_way = False

    def begin(self, pass_: Pass) -> None:
        """Adds a pass whose iterator was made."""
        if self._main is None or self._gives_way or not self._main.open:
            self._take_over(pass_)
        else:
            self._fresh = pass_

    def hand_out(self, pass_: Pass) -> None:
        """Counts a batch of a pass, before its iterator hands it out."""
        main = self._main
        pass_.handed_out += 1
        if main is pass_:
            self._fresh, self._gives_way = None, False
        elif main is None or self._gives_way or not main.open:
            self._take_over(pass_)
        elif pass_.handed_out > main.handed_out:
            self._take_over(pass_, overtaken=main)
        if pass_.amend is not None and pass_.handed_out == pass_.amend_after:
            pass_.amend()
        elif pass_.on_step is not None and main is pass_:
            pass_.on_step()

    def current(self) -> Pass | None:
        """The pass that a state tells of; None where none has begun since `forget`.

        Raises:
            ConfigError: two passes may be meant.
        """
        main, fresh, before = self._main, self._fresh, self._overtaken
        if main is None or main.open:
            return main
        if fresh is not None and fresh.open and not fresh.handed_out:
            self._take_over(fresh)
        elif before is not None and before.open and before.handed_out:
            if before.handed_out == 1:
                raise ConfigError(
                    "two iterators of this dataset were read: one handed out 1 batch and still "
                    f"exists, another handed out {main.handed_out} and is over; delete the one "
                    "that training does not consume, or call set_epoch before each pass"
                )
            self._take_over(before)
        return self._main

    def give_way(self) -> None:
        """Lets the next pass take over; until then the state stays as it was."""
        if self._main is not None and self._main.ended:
            self.forget()
        self._gives_way = True

    def forget(self) -> None:
        """Begins anew: another epoch or a state was set."""
        self._main = self._overtaken = self._fresh = None

    def _take_over(self, pass_: Pass, overtaken: Pass | None = None) -> None:
        self._main, self._overtaken = pass_, overtaken
        self._fresh, self._gives_way = None, False


def _what_differs(state: OrderState, expected: OrderState) -> str:
    """Why a state of another dataset, version or view is refused; the cause first."""
    both = (
        f"the state is of dataset {state.dataset!r} with fingerprint {state.fingerprint}, this is "
        f"{expected.dataset!r} with fingerprint {expected.fingerprint}"
    )
    versions = (each.fingerprint.partition("-")[0] for each in (state, expected))
    if state.dataset != expected.dataset:
        return f"the state is of another dataset: {both}"
    differences = view_differences(state.view, expected.view, ignored=("changes",))
    if differences:
        return f"the state reads other rows: {differences}: {both}"
    if len({*versions}) > 1:
        return f"the state is of another version, the dataset was loaded again since: {both}"
    texts = "".join(f", {each.view}" for each in (state, expected) if each.view)
    return f"the state reads other rows: {both}{texts}"


def checked_state(
    state_dict: Mapping[str, Any],
    *,
    expected_of: Callable[[int], OrderState],
    num_rows: Callable[[int], int],
    rows_per_step: int,
    num_workers: int,
) -> OrderState:
    """Reads a state, and compares it with the dataset that loads it.

    Args:
        state_dict: what `state_dict` of a dataset returned.
        expected_of: epoch -> a state of this dataset.
        num_rows: of an epoch.
        rows_per_step: of all ranks together.
        num_workers: of the DataLoader, in a worker; else 0.

    Raises:
        ConfigError: it is no state, one of another order, or of other workers.
        StaleVersionError: it is of another dataset or fingerprint; names both.
    """
    try:
        state = read_state(state_dict)
    except ValueError as error:
        raise ConfigError(f"bad state: {error}") from None
    expected = expected_of(state.epoch)
    if (state.dataset, state.fingerprint) != (expected.dataset, expected.fingerprint):
        raise StaleVersionError(_what_differs(state, expected))
    for name in ("seed", "shuffle", "shuffle_block_size"):
        if getattr(state, name) != getattr(expected, name):
            raise ConfigError(
                f"the state has {name}={getattr(state, name)!r}, the dataset "
                f"{name}={getattr(expected, name)!r}: the order would be another"
            )
    if state.rows_consumed > (rows := num_rows(state.epoch)):
        raise ConfigError(f"bad state: rows_consumed={state.rows_consumed} of {rows} rows")
    if isinstance(state, WorkerState) and (
        (state.num_workers, state.rows_per_step) != (num_workers, rows_per_step)
    ):
        raise ConfigError(
            f"the state is of one of num_workers={state.num_workers} DataLoader workers, with "
            f"world_size * batch_size = {state.rows_per_step}; here num_workers={num_workers} and "
            f"world_size * batch_size = {rows_per_step}: rows would be lost and repeated; to go on "
            "with others, save dataset.state_dict(steps=<batches taken in this epoch>) of the "
            "training process"
        )
    return state


def check_pass(pass_: Pass, cursor: Cursor, dataset: str, *, shuffle: bool) -> None:
    """Refuses a pass that reads other rows than the program means; warns of repeated ones.

    Called before the first batch, in the training process or in each worker. Only worker 0 warns.

    Raises:
        ConfigError: accelerate drops batches of an epoch that was not set, or Lightning begins
            another epoch.
    """
    skipped, consumed = cursor.skipped_batches(), pass_.plan.rows_consumed
    if skipped and (not cursor.announced or consumed):
        raise ConfigError(
            f"accelerate drops the first {skipped} batches of this pass, which begins at row "
            f"{consumed} of epoch {pass_.epoch}: in transformers' Trainer set "
            "ignore_data_skip=True and load the dataset's own state; or load no state, and call "
            "set_epoch before each pass (in a TrainerCallback: on_epoch_begin)"
        )
    begun = cursor.lightning_epoch() if consumed else None
    if begun not in (None, pass_.epoch):
        raise ConfigError(
            f"Lightning begins epoch {begun}, and this pass reads the rest of epoch {pass_.epoch} "
            f"from row {consumed}: use dataset.loader(), whose set_epoch Lightning calls, or "
            "give it a loader whose attribute sampler is this dataset"
        )
    if pass_.worker:
        return
    if cursor.given_up_at:
        warnings.warn(
            f"a pass that resumed epoch {pass_.epoch} at row {cursor.given_up_at} was not read to "
            "its end, and this one begins at row 0: load the state again after a look at a batch, "
            "or call set_epoch before each pass",
            stacklevel=3,
        )
    if shuffle and cursor.repeats(pass_.epoch):
        warnings.warn(
            f"epoch {pass_.epoch} of {dataset!r} is read again in the same order: call "
            "set_epoch(epoch) before each pass",
            stacklevel=3,
        )
