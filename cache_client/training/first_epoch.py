"""The first epoch of a version that loads: waits for the shards that it needs next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from cache_client.epochs.passes import Pass
from cache_client.flight.routing import ShardMap
from cache_client.order.load_log import GroupLog
from cache_client.order.order import EpochOrder
from cache_client.reading.local_shards import LocalShards
from cache_client.reading.per_process import PerProcess
from cache_client.reading.shard_maps import wait_for_shard_map
from cache_client.reading.source import Source
from cache_client.views.view import LoggedView, Shuffle, epoch_order
from cache_protocol.errors import NodeUnavailableError, NotReadyError, StaleVersionError
from cache_protocol.wire.credentials import Credentials

_LOOK_S = 0.5  # at whether a pass is given up


class KnownSteps(NamedTuple):
    """Steps of a pass, by what is known of the load.

    Attributes:
        view: of the known groups.
        now: those whose rows are sealed.
        later: those after them.
        ended: the epoch has none after these.
    """

    view: LoggedView
    now: range
    later: range
    ended: bool


class LoadingSource(Source):
    """One version whose shards may still be loaded, and how this process reads its rows.

    Args:
        endpoint, shards, columns, credentials, deadline_s, local: see `Source`; the shard map has
            a log.
        shuffle: of the job.
        ready_deadline_s: how long to wait while the load does not come further.

    Thread-safety: all methods. A pickle has what is known.
    """

    def __init__(
        self,
        endpoint: str,
        shards: ShardMap,
        columns: tuple[str, ...],
        credentials: Credentials,
        *,
        deadline_s: float,
        local: bool,
        shuffle: Shuffle,
        ready_deadline_s: float,
    ) -> None:
        super().__init__(
            endpoint, shards, columns, credentials, deadline_s=deadline_s, local=local
        )  # fmt: skip
        self._shuffle = shuffle
        self._ready_deadline_s = ready_deadline_s
        self._process_turn: PerProcess[_Turn] = PerProcess()

    @property
    def log(self) -> GroupLog:
        """The log, as far as it is known here."""
        assert self.shards.log is not None
        return self.shards.log

    @property
    def view(self) -> LoggedView:
        """The slots of the epoch, as far as they are known."""
        return LoggedView(self.log)

    def order(self, epoch: int) -> EpochOrder:
        """The order of the rows of the known groups."""
        log = self.log
        return epoch_order(self._shuffle, log.num_rows, epoch, groups=log.rows_of_groups)

    def tell(self, pass_: Pass) -> None:
        """Gives a pass the end and the order of its epoch, as far as they are known."""
        num_slots = self.log.num_slots
        consumed = min(pass_.plan.rows_consumed, num_slots)
        pass_.plan = replace(pass_.plan, num_rows=num_slots, rows_consumed=consumed)
        pass_.order = self.order(pass_.epoch)

    def wait_for(self, pass_: Pass, steps: range, given_up: Callable[[], bool]) -> KnownSteps:
        """Waits until the rows of the first of these steps are sealed, or the epoch has none.

        Args:
            pass_: gets the plan and the order that are known then.
            steps: of the pass, ascending.
            given_up: whether nothing waits for them any more.

        Raises:
            LoadError: the load failed. StaleVersionError: it was begun again.
            NotReadyError, NodeUnavailableError: it did not come further until the deadline.
        """
        stop = pass_.plan.rows_consumed + (steps[0] + 1) * pass_.plan.rows_per_step
        turn = self._turn
        with turn.changed:
            while not self.log.closed and self.log.num_rows < min(stop, self.log.num_slots):
                if turn.is_asked:
                    turn.changed.wait(_LOOK_S)
                    if given_up():
                        raise NotReadyError("the pass was given up")
                else:
                    self._ask(turn, given_up)
            self.tell(pass_)
            plan, log = pass_.plan, self.log
        existing = len(range(steps.start, min(steps.stop, plan.num_steps), steps.step))
        sealed = log.num_rows - plan.rows_consumed
        is_all = log.num_rows == log.num_slots
        full = plan.num_steps if is_all else max(0, sealed) // plan.rows_per_step
        now = len(range(steps.start, min(steps.stop, full), steps.step))
        later = steps[now:existing]
        return KnownSteps(LoggedView(log), steps[:now], later, existing < len(steps))

    def look(self) -> None:
        """Asks once for more groups, without waiting for any."""
        turn = self._turn
        with turn.changed:
            for location in self.shards.locations(self.endpoint):
                if self.log.closed or turn.is_asked:
                    return
                # A pass that needs more groups will wait for them.
                with suppress(NotReadyError, NodeUnavailableError):
                    return self._ask(turn, lambda: True, first=location)

    def _ask(self, turn: _Turn, given_up: Callable[[], bool], *, first: str = "") -> None:
        """Waits for more groups; called inside the lock, which it leaves meanwhile.

        Args:
            first: the location to ask first; empty: the endpoint.

        Raises:
            StaleVersionError: the version was loaded again, in another order.
        """
        turn.is_asked = True
        turn.changed.release()
        found = None
        try:
            read = self._read(given_up, first or self.endpoint)
            log_id = None if read.log is None else read.log.log_id
            if log_id != self.log.log_id:
                raise StaleVersionError(
                    f"dataset {read.dataset!r} was loaded again while its first epoch was read: "
                    f"its log is {log_id}, the epoch follows {self.log.log_id}. Begin the epoch "
                    "again"
                )
            found = read
        finally:
            turn.changed.acquire()
            turn.is_asked = False
            if found is not None:
                self.shards = self._node_health().shards = found
            turn.changed.notify_all()

    def _read(self, given_up: Callable[[], bool], first: str) -> ShardMap:
        shards = self.shards
        return wait_for_shard_map(
            first,
            shards.dataset,
            self.columns,
            self._ready_deadline_s,
            self._credentials,
            fingerprint=shards.fingerprint,
            known_groups=len(self.log.groups),
            others=shards.locations(self.endpoint),
            given_up=given_up,
        )

    @property
    def _turn(self) -> _Turn:
        return self._process_turn.get(_Turn)

    def local_shards(self) -> LocalShards | None:
        """The mapped files, once all are known: their places among the shards do not change."""
        return super().local_shards() if self.log.closed else None


class _Turn:
    """Whose turn it is to ask: one thread asks for all that wait.

    Attributes:
        changed: notified when the thread has its answer.
        is_asked: whether a thread asks.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_asked = False
