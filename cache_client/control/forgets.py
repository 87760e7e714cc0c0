"""Rows that are forgotten: asks for it, waits for it, and reads which rows they were."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache_client.control.coordinator import Coordinator
from cache_client.control.erasures import erased_acts
from cache_client.control.row_reads import checked_name
from cache_client.job.arguments import seconds_problems
from cache_protocol.datasets.values import is_text
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    NodeUnavailableError,
    NotReadyError,
    some_of,
)
from cache_protocol.storage.row_sets import decode_rows
from cache_protocol.v1 import cache_pb2 as pb

_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class ForgetInfo:
    """An act that forgets rows.

    Attributes:
        number: of the cache, from 1; 0: nothing was forgotten.
        by: the principal that asked.
        reason: as given.
        begun_s: clock of the coordinator, in seconds since 1970.
        done: no node that answers has the rows.
        waits: what it still waits for.
        versions: fingerprint -> rows of it that the act erased.
        attestation: signed JSON, once it is done: see `cachectl verify-attestation`.
    """

    number: int
    dataset: str
    by: str
    reason: str
    begun_s: float
    done: bool
    waits: tuple[str, ...]
    versions: dict[str, int]
    attestation: str

    @property
    def num_rows(self) -> int:
        """Rows of all versions."""
        return sum(self.versions.values())


def erased_rows(
    coordinator: Coordinator, name: str, fingerprint: str = "", start: int = 0
) -> list[npt.NDArray[np.int64]]:
    """The row ids of a version that were forgotten: an ascending array for each act, in order.

    Args:
        fingerprint: of the version; empty: the newest.
        start: leave out so many acts, the first ones.

    Raises:
        DatasetNotFoundError, StaleVersionError: there is no such version.
        NodeUnavailableError: the coordinator does not answer in time.
    """
    acts = erased_acts(coordinator, name, fingerprint, start)
    return [decode_rows(act.rows) for act in acts]


def known_erased(
    coordinator: Coordinator, name: str, fingerprint: str
) -> list[npt.NDArray[np.int64]]:
    """As `erased_rows`; none where the coordinator does not answer, or knows no such call."""
    try:
        return erased_rows(coordinator, name, fingerprint)
    except CacheError:  # a node names the rows that it cannot give
        return []


class Forgets:
    """Forgets rows: a part of `CacheClient`."""

    _coordinator: Coordinator

    def forget(
        self,
        name: str,
        where: str | Sequence[str],
        *,
        reason: str,
        dry_run: bool = False,
        keep_condition: bool = False,
        timeout_s: float = 600.0,
        on_wait: Callable[[str], None] | None = None,
    ) -> ForgetInfo:
        """Erases the rows of a dataset that fulfil conditions: in all versions, on all nodes.

        Later loads leave out rows with the same values. See docs/forget.md for what that means.
        After an error you may call it again: the same conditions and reason are the same act.

        Args:
            where: SQL conditions over the columns; a row must fulfil all.
            reason: for the attestation; names no person.
            dry_run: only count the rows.
            keep_condition: write the conditions into the attestation: they may name a person.
            timeout_s: to wait until no node has the rows. The cache continues the act afterwards.
            on_wait: called with what it waits for, again and again.

        Returns:
            The act, with its attestation. Without a number, if there was no such row.

        Raises:
            ConfigError: quotes a bad argument.
            RequestError: a condition is wrong, or a version has no such column.
            PermissionDeniedError: only an admin may forget.
            NotReadyError: something is in the way, such as a load that runs, or the act is not done
                in time; says what it waits for.
        """
        name = checked_name(name)
        conditions = [where] if isinstance(where, str) else list(where)
        problems = seconds_problems("timeout_s", timeout_s)
        if not conditions or not all(is_text(each) and each.strip() for each in conditions):
            problems.append(f"where must be conditions of SQL, got {where!r}")
        if not is_text(reason) or not reason.strip():
            problems.append(f"reason must be a text, got {reason!r}")
        if problems:
            raise ConfigError("; ".join(problems))
        deadline = time.monotonic() + float(timeout_s)
        request = pb.ForgetRowsRequest(
            name=name,
            where=conditions,
            reason=reason,
            dry_run=dry_run,
            keep_condition=keep_condition,
        )
        act = self._begin_forget(request, deadline, on_wait)
        while not act.done and act.number:
            if on_wait is not None:
                on_wait(some_of(act.waits))
            if time.monotonic() > deadline:
                raise NotReadyError(
                    f"act {act.number} on dataset {name!r} is not done within {timeout_s:g} s, and "
                    f"goes on: {some_of(act.waits)}. See cachectl forgotten"
                )
            time.sleep(_LOOK_EVERY_S)
            with suppress(NodeUnavailableError):  # a new coordinator continues the act
                (act,) = self.forgotten(name, number=act.number)
        return act

    def _begin_forget(
        self, request: pb.ForgetRowsRequest, deadline: float, on_wait: Callable[[str], None] | None
    ) -> ForgetInfo:
        """Begins an act, as soon as nothing is in its way."""
        while True:
            try:
                return _act(self._coordinator.ask("ForgetRows", request, deadline).act)
            except NotReadyError as error:
                if time.monotonic() + _LOOK_EVERY_S > deadline:
                    raise
                if on_wait is not None:
                    on_wait(str(error))
                time.sleep(_LOOK_EVERY_S)

    def forgotten(self, name: str = "", *, number: int = 0) -> list[ForgetInfo]:
        """The acts that forgot rows, the latest first.

        Args:
            name: of a dataset; empty: all that may be seen.
            number: only this act.
        """
        request = pb.ListForgottenRequest(name=checked_name(name) if name else "", number=number)
        return [_act(act) for act in self._coordinator.ask("ListForgotten", request).acts]

    def attestation_key(self) -> bytes:
        """The public key of the attestations of this cache, Ed25519; empty before the first act."""
        answer: pb.ListForgottenResponse = self._coordinator.ask(
            "ListForgotten", pb.ListForgottenRequest()
        )
        return answer.public_key

    def erased_rows(
        self, name: str, *, fingerprint: str = "", start: int = 0
    ) -> list[npt.NDArray[np.int64]]:
        """The row ids of a version that were forgotten, by act; see `erased_rows`."""
        return erased_rows(self._coordinator, checked_name(name), fingerprint, start)


def _act(message: pb.ForgetAct) -> ForgetInfo:
    return ForgetInfo(
        message.number,
        message.dataset,
        message.by,
        message.reason,
        message.begun_s,
        message.done,
        tuple(message.waits),
        {each.fingerprint: each.erased_rows for each in message.versions},
        message.attestation,
    )
