"""Refuses states and habits that would lose or repeat rows, before a pass hands out a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from cache_client.cursor import Cursor
from cache_client.order import OrderState, WorkerState, read_state
from cache_client.passes import Pass
from cache_protocol.errors import ConfigError, StaleVersionError


def checked_state(
    state_dict: Mapping[str, Any],
    *,
    expected: OrderState,
    num_rows: Callable[[int], int],
    rows_per_step: int,
    num_workers: int,
) -> OrderState:
    """Reads a state, and compares it with the dataset that loads it.

    Args:
        state_dict: what `state_dict` of a dataset returned.
        expected: a state of this dataset.
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
    if (state.dataset, state.fingerprint) != (expected.dataset, expected.fingerprint):
        raise StaleVersionError(
            f"the state is of dataset {state.dataset!r} with fingerprint {state.fingerprint}, "
            f"this is {expected.dataset!r} with fingerprint {expected.fingerprint}"
        )
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


def check_pass(this: Pass, cursor: Cursor, dataset: str, *, shuffle: bool) -> None:
    """Refuses a pass that reads other rows than the program means; warns of repeated ones.

    Called before the first batch, in the training process or in each worker. Only worker 0 warns.

    Raises:
        ConfigError: accelerate drops batches of an epoch that was not set, or Lightning begins
            another epoch.
    """
    skipped, consumed = cursor.skipped_batches(), this.plan.rows_consumed
    if skipped and (not cursor.told or consumed):
        raise ConfigError(
            f"accelerate drops the first {skipped} batches of this pass, which begins at row "
            f"{consumed} of epoch {this.epoch}: in transformers' Trainer set ignore_data_skip=True "
            "and load the dataset's own state; or load no state, and call set_epoch before each "
            "pass (in a TrainerCallback: on_epoch_begin)"
        )
    begun = cursor.lightning_epoch() if consumed else None
    if begun not in (None, this.epoch):
        raise ConfigError(
            f"Lightning begins epoch {begun}, and this pass reads the rest of epoch {this.epoch} "
            f"from row {consumed}: use dataset.loader(), whose set_epoch Lightning calls, or "
            "give it a loader whose attribute sampler is this dataset"
        )
    if this.worker:
        return
    if cursor.given_up_at:
        warnings.warn(
            f"a pass that resumed epoch {this.epoch} at row {cursor.given_up_at} was not read to "
            "its end, and this one begins at row 0: load the state again after a look at a batch, "
            "or call set_epoch before each pass",
            stacklevel=3,
        )
    if shuffle and cursor.repeats(this.epoch):
        warnings.warn(
            f"epoch {this.epoch} of {dataset!r} is read again in the same order: call "
            "set_epoch(epoch) before each pass",
            stacklevel=3,
        )
