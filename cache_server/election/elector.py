"""Holds the lease of a cache, or looks who does; in a thread."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from cache_protocol.wire.channels import pause_s
from cache_server.election.lease import (
    DURATION_S,
    LOOK_S,
    RENEW_S,
    VALID_S,
    Seen,
    Step,
    location_of,
    next_step,
)
from cache_server.election.objects import ConflictError, LeaseStore
from cache_server.shards.stoppable_thread import StoppableThread

logger = logging.getLogger(__name__)

_SHORTEST_S = 0.05
_CLOSE_S = 6.0  # a call may run


class Elector(StoppableThread):
    """Takes the lease when no process holds it, and renews it.

    Args:
        store: of the lease.
        me: identity of this process.
        is_heard: whether the coordinator answered a moment ago: its lease need not be looked at.
        on_holder: called with the location of the holder after each look at a lease of another
            process; "": it is free.
        on_win, on_loss: called in turn, when this process holds the lease, and no longer does.
            `on_win` gets for how long its holder was silent before; 0: it was given up.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: LeaseStore,
        me: str,
        *,
        is_heard: Callable[[], bool],
        on_holder: Callable[[str], None],
        on_win: Callable[[float], None],
        on_loss: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("elector", close_s=_CLOSE_S)
        self._store, self._me, self._clock = store, me, clock
        self._is_heard, self._on_holder = is_heard, on_holder
        self._on_win, self._on_loss = on_win, on_loss
        self._seen = Seen(None, clock())
        self._valid_until = -math.inf
        self._waits_until = -math.inf  # does not take the lease before
        self._has_won = False

    def leads(self) -> bool:
        """Whether this process holds the lease for certain."""
        return self._clock() < self._valid_until

    def resign(self) -> None:
        """Gives the lease up; another process may take it before this one does again."""
        self._valid_until = -math.inf
        self._waits_until = self._clock() + DURATION_S

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                wait_s = self.step()
            except Exception:  # such as no new thread: the next look may work
                logger.exception("look at the lease failed, will be tried again")
                wait_s = LOOK_S
            # Not all nodes at once.
            self._stop.wait(wait_s - pause_s(1, wait_s / 5, wait_s / 5))
        self._give_up()

    def step(self) -> float:
        """Looks at the lease once, unless the coordinator is heard; returns when to look again."""
        if self._has_won and not self.leads():
            self._give_up()
        if not self._has_won and self._is_heard():
            return LOOK_S
        try:
            return self._look()
        except ConflictError:
            return 0.0 if self._has_won else LOOK_S / 4
        except OSError as error:
            logger.warning("lease not reached reason=%s", error.strerror)
            return LOOK_S

    def _look(self) -> float:
        begun = self._clock()
        lease = self._store.read_lease()
        now = self._clock()
        self._seen = self._seen.then(lease, now)
        step = next_step(self._seen, self._me, now)
        if self._has_won and step is not Step.RENEW:
            # Another process took it; or an operator deleted it, and may have put back a catalogue.
            self._give_up()
            return _SHORTEST_S
        if step is Step.FOLLOW or now < self._waits_until:
            is_held = lease is not None and lease.holder not in ("", self._me)
            self._on_holder(location_of(lease.holder) if is_held and lease is not None else "")
            waits_s = max(self._seen.expires_at(), self._waits_until) - now
            return max(_SHORTEST_S, min(LOOK_S, waits_s))
        silent_s = now - self._seen.at if lease is not None and lease.holder else 0.0
        written = self._store.write_lease(lease, self._me, DURATION_S)
        self._seen = self._seen.then(written, now)
        self._valid_until = begun + VALID_S
        if not self._has_won:
            self._has_won = True
            logger.info("lease taken holder=%s transitions=%d", self._me, written.transitions)
            self._on_win(silent_s)
        return RENEW_S

    def _give_up(self) -> None:
        """Ends the lead, and lets others have the lease."""
        if not self._has_won:
            return
        self._has_won, self._valid_until = False, -math.inf
        logger.warning("lease given up holder=%s", self._me)
        self._on_loss()
        lease = self._seen.lease
        if lease is not None and lease.holder == self._me:
            try:
                self._seen = Seen(self._store.write_lease(lease, "", DURATION_S), self._clock())
            except OSError as error:  # it expires, or another process has it
                logger.info("lease not freed reason=%s", error.strerror)
