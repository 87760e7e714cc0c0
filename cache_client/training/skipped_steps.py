"""The steps that a job leaves out, as runs of positions of each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from cache_client.order.order import EpochOrder, StepPlan, runs_of_steps
from cache_client.order.permutation import checked_integer
from cache_client.order.states import OrderState
from cache_protocol.errors import ConfigError

Runs = dict[int, tuple[tuple[int, int], ...]]
"""Epoch -> half-open runs of positions, ascending."""


def skipped_runs(
    skip_steps: Mapping[int, Iterable[int]] | None,
    whole_plan: Callable[[int], StepPlan],
    last_epoch: int,
) -> Runs:
    """The positions that ``skip_steps`` leaves out.

    Args:
        whole_plan: epoch -> its steps, as if none was left out.

    Raises:
        ConfigError: quotes ``skip_steps`` where it names no epochs and steps.
    """
    runs: Runs = {}
    try:
        for epoch, steps in (skip_steps or {}).items():
            number = checked_integer("epoch", epoch, 0, last_epoch)
            runs[number] = runs_of_steps(steps, whole_plan(number))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            "skip_steps must map epochs to steps of this dataset, such as {0: [1234]}, got "
            f"{skip_steps!r}: {error}"
        ) from None
    return {epoch: of_epoch for epoch, of_epoch in runs.items() if of_epoch}


def with_state(own: Runs, state: OrderState, num_slots: int) -> Runs:
    """The runs of a job, with those that a state leaves out.

    Args:
        own: of the job.
        num_slots: of the epoch of the state.

    Raises:
        ConfigError: `skip_steps` names rows that were given before the state.
    """
    kept: Runs = {}
    for epoch, start, stop in state.skipped:
        kept[epoch] = (*kept.get(epoch, ()), (start, stop))
    consumed = slots_consumed(state, num_slots)
    late = [
        run
        for run in own.get(state.epoch, ())
        if run not in kept.get(state.epoch, ()) and run[0] < consumed
    ]
    if late:
        raise ConfigError(
            f"skip_steps names positions {late[0][0]} to {late[0][1] - 1} of epoch "
            f"{state.epoch}, but the state says that {consumed} were given before it: name "
            "later steps, or load an earlier state"
        )
    return {
        epoch: tuple(sorted({*kept.get(epoch, ()), *own.get(epoch, ())})) for epoch in {*kept, *own}
    }


def slots_consumed(state: OrderState, num_slots: int) -> int:
    """The slots of its epoch up to the position of a state, with those that it leaves out."""
    skipped = tuple((start, stop) for epoch, start, stop in state.skipped if epoch == state.epoch)
    order = EpochOrder(num_slots, shuffle=False, skipped=skipped)
    consumed = state.rows_consumed
    return int(order.in_epoch(np.array([consumed - 1]))[0]) + 1 if consumed else 0
