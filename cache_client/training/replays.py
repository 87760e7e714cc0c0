"""Reads again what a job read, without rows that were forgotten since; and when rows were given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cache_client.order.erased import Erased, joined_rows
from cache_client.order.order import EpochOrder, StepPlan
from cache_client.order.permutation import Int64Array
from cache_client.order.states import OrderState, read_state
from cache_client.training.opened import Opened
from cache_client.view_options.options import View
from cache_client.views.filled import FilledView
from cache_client.views.given import positions_of
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import Shuffle, SlotView, view_fingerprint
from cache_protocol.errors import ConfigError

_WHOLE = 2**62  # above every position
_MANY_ROWS = ("pack", "group_by")


class Steps(NamedTuple):
    """When rows were given: one entry for each time, by epoch and position.

    Attributes:
        epochs, steps, ranks: of each time; int64, shape ``(k,)``. Steps count from the begin of the
            epoch. -1 for both where ``drop_last`` leaves the row out.
        rows: row ids.
    """

    epochs: Int64Array
    steps: Int64Array
    ranks: Int64Array
    rows: Int64Array


@dataclass(frozen=True)
class Forgotten:
    """What an attestation of `cachectl forget` says.

    Attributes:
        number: of the act.
        fingerprints: of the versions whose rows it erased.
    """

    number: int
    fingerprints: frozenset[str]

    @classmethod
    def of(cls, attestation: Any) -> Forgotten:
        """Reads an attestation, as JSON or parsed.

        Raises:
            ConfigError: it is something else; quotes its begin.
        """
        try:
            found = json.loads(attestation) if isinstance(attestation, str) else attestation
            found = found.get("attestation", found)
            return cls(int(found["number"]), frozenset(found["versions"]))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ConfigError(
                "without must be the attestation of cachectl forget, JSON with a number and "
                f"versions, got {str(attestation)[:80]!r}"
            ) from None


def replayed_state(replay: Mapping[str, Any], *, fill: bool) -> OrderState:
    """The state from which a job is replayed.

    Raises:
        ConfigError: it is no state, or one of a replay of the other kind.
    """
    try:
        state = read_state(replay)
    except ValueError as error:
        raise ConfigError(f"bad state for replay: {error}") from None
    if state.replayed not in ("", mode_of(fill)):
        raise ConfigError(f"the state is of a replay that is {state.replayed}, got fill={fill}")
    if fill and state.skipped:
        raise ConfigError("fill=True cannot leave out steps, which the state does: use fill=False")
    return state


def mode_of(fill: bool) -> str:
    """How a replay leaves rows out."""
    return "filled" if fill else "shorter"


def forgotten_rows(erased: Erased, forgotten: Forgotten, fingerprint: str) -> Int64Array:
    """The rows that a replay leaves out, ascending.

    Args:
        erased: of the version of the state; its views leave out the acts that the state knows.
        fingerprint: of that version.

    Raises:
        ConfigError: the attestation is of other versions, or the state knows its act.
    """
    if fingerprint not in forgotten.fingerprints or forgotten.number not in erased.acts:
        raise ConfigError(
            f"the attestation is of act {forgotten.number}, which erased no rows of version "
            f"{fingerprint}, which the state reads"
        )
    if forgotten.number <= erased.until:
        raise ConfigError(
            f"the state knows act {forgotten.number} already, so its job left these rows out: load "
            "it by load_state_dict"
        )
    acts = erased.acts.items()
    return joined_rows([ids for n, ids in acts if erased.until < n <= forgotten.number])


def check_clean(
    state: OrderState, rows: Int64Array, of: Callable[[int], tuple[SlotView, EpochOrder]]
) -> None:
    """Raises ConfigError where rows were given before a state; names how many, and where.

    Args:
        rows: ascending.
        of: epoch -> its view and order.
    """
    for epoch, _, which, positions in given_before(state, rows, of):
        if len(positions):
            raise ConfigError(
                f"the state is not clean: {len(np.unique(which))} of {len(rows)} forgotten rows "
                f"were given before it, the first at position {positions[0]} of epoch {epoch}. "
                "cachectl seen names the last clean one"
            )


def given_before(
    state: OrderState, rows: Int64Array, of: Callable[[int], tuple[SlotView, EpochOrder]]
) -> Iterator[tuple[int, EpochOrder, Int64Array, Int64Array]]:
    """For each epoch up to a state: its order, which of the rows came, and where.

    Args:
        rows: ascending, none twice.
        of: epoch -> its view and order.
    """
    for epoch in range(state.epoch + 1):
        view, order = of(epoch)
        which, positions = positions_of(view, order, rows)
        given = positions < (state.rows_consumed if epoch == state.epoch else _WHOLE)
        yield epoch, order, which[given], positions[given]


def steps_of(
    state: OrderState,
    rows: Int64Array,
    of: Callable[[int], tuple[SlotView, EpochOrder]],
    steps: Callable[[int], StepPlan],
) -> Steps:
    """The steps and ranks that gave rows before a state.

    Args:
        rows: in any order.
        of: epoch -> its view and order.
        steps: samples of an epoch -> its steps.
    """
    rows = np.unique(rows)
    found = []
    for epoch, order, which, positions in given_before(state, rows, of):
        at, ranks = steps(order.num_left).places(positions)
        found.append((np.full(len(which), epoch), at, ranks, rows[which]))
    return Steps(*(np.concatenate(each).astype(np.int64) for each in zip(*found, strict=True)))


def filled(opened: Opened, view: View, shuffle: Shuffle, rows: Int64Array, until: int) -> Opened:
    """What a job reads, where later rows take the places of those that are left out.

    Raises:
        ConfigError: samples of the view are several rows.
    """
    many = [name for name in _MANY_ROWS if name in view.given()]
    if many:
        raise ConfigError(
            f"fill=True needs samples of one row, and {many[0]} makes others: use fill=False"
        )
    made = FilledView(opened.slots, shuffle, SharedArray(rows), until)
    job_view = replace(opened.job_view, view=made)
    fingerprint = view_fingerprint(opened.shards.fingerprint, job_view.identity)
    return replace(opened, job_view=job_view, fingerprint=fingerprint)
