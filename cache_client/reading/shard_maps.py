"""Reads the shard map of a dataset from any node, and waits for the first one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
)

from cache_client.flight.call_threads import CallThreads
from cache_client.flight.connections import REQUEST_TIMEOUT_S, NodeConnection
from cache_client.flight.routing import ShardMap
from cache_client.reading.window_sizes import has_plain
from cache_protocol.errors import NodeUnavailableError, NotReadyError
from cache_protocol.storage.layout import Layout
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.channels import backoff
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_WARN_AFTER_S = 1.0  # no warning if a trainer and its cache start at the same time
# The last attempt starts so long before the deadline that it can still be answered. For a short
# deadline, it is this part of it.
_LAST_ATTEMPT_S, _LAST_ATTEMPT_PART = 0.5, 0.25


def ask_in_turn(
    ask: Callable[[str, float], _T],
    locations: Iterable[str],
    *,
    timeout_s: float,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> _T:
    """The answer of the first node that gives one.

    Args:
        ask: called with a location, and for how long it may wait.
        timeout_s: of one call.
        deadline: of all calls, on the clock.

    Raises:
        NodeUnavailableError: no node answered; that of the first one. Any other error at once.
    """
    failure: NodeUnavailableError | None = None
    for location in locations:
        left_s = min(timeout_s, deadline - clock())
        if left_s <= 0:
            break
        try:
            return ask(location, left_s)
        except NodeUnavailableError as error:
            failure = failure or error
    raise failure or NodeUnavailableError("no node was asked before the deadline")


def newer_shard_map(
    shards: ShardMap,
    endpoint: str,
    columns: Sequence[str],
    connection_to: Callable[[str], NodeConnection],
    *,
    timeout_s: float,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> ShardMap:
    """The shard map as it is now, from any node; ``shards`` if no node tells another one.

    Args:
        endpoint: of the node to ask first.
        columns: of the map.
        timeout_s, deadline, clock: as for `ask_in_turn`.

    Raises:
        StaleVersionError, DatasetNotFoundError: the version is gone.
    """

    def read(location: str, timeout_s: float) -> ShardMap:
        return connection_to(location).read_shard_map(
            shards.dataset,
            shards.fingerprint,
            columns,
            timeout_s,
            known_groups=None if shards.log is None else 0,
        )

    try:
        return ask_in_turn(
            read,
            shards.locations(endpoint),
            timeout_s=timeout_s,
            deadline=deadline,
            clock=clock,
        )
    except (NodeUnavailableError, NotReadyError):  # no node has some shard at the moment
        return shards


def wait_for_shard_map(
    endpoint: str,
    dataset: str,
    columns: Sequence[str],
    deadline_s: float,
    credentials: Credentials = NO_CREDENTIALS,
    *,
    fingerprint: str = "",
    follow: pb.EpochOfJob | None = None,
    known_groups: int | None = None,
    others: Sequence[str] = (),
    given_up: Callable[[], bool] = lambda: False,
) -> ShardMap:
    """Reads the shard map of a version of ``dataset`` as soon as it is ready.

    Logs one warning if it has to wait, because a wrong port would look like a hang.

    Args:
        columns: to read, in this order; empty for all.
        deadline_s: how long to wait for a cache that loads or does not answer. With
            ``known_groups``, it begins anew whenever the load has come further.
        credentials: of this process.
        fingerprint: of the version; empty for the newest.
        follow: the version that a job reads in an epoch, instead of a fingerprint.
        known_groups: see `NodeConnection.read_shard_map`.
        others: nodes to ask in turn with ``endpoint``.
        given_up: whether nothing waits any more; looked at between attempts.

    Raises:
        DatasetNotFoundError, StaleVersionError, LoadError, RequestError: at once.
        NotReadyError, NodeUnavailableError: at the deadline, or given up.
    """
    # Nodes that are asked in turn may differ, and say the same again and again.
    deadline, progress = time.monotonic() + deadline_s, set[str]()
    last_attempt_s = min(_LAST_ATTEMPT_S, deadline_s * _LAST_ATTEMPT_PART)
    pause_s = backoff(0.02, 1.0)

    def wait_s(state: RetryCallState) -> float:
        return max(0.0, min(pause_s(state), deadline - last_attempt_s - time.monotonic()))

    def is_over(state: RetryCallState) -> bool:
        nonlocal deadline
        error = None if state.outcome is None else state.outcome.exception()
        is_loading = known_groups is not None and isinstance(error, NotReadyError)
        if is_loading and str(error) not in progress:
            progress.add(str(error))
            deadline = time.monotonic() + deadline_s
        return given_up() or time.monotonic() >= deadline - last_attempt_s

    has_warned = False

    def warn_once(state: RetryCallState) -> None:
        nonlocal has_warned
        if (
            not has_warned
            and state.outcome is not None
            and (state.seconds_since_start or 0) >= _WARN_AFTER_S
        ):
            has_warned = True
            logger.warning(
                "waiting up to %g s for dataset %r at %s: %s",
                deadline_s, dataset, endpoint, state.outcome.exception(),
            )  # fmt: skip

    attempts = Retrying(
        retry=retry_if_exception_type((NotReadyError, NodeUnavailableError)),
        stop=is_over,
        wait=wait_s,
        before_sleep=warn_once,
        reraise=True,
    )
    locations = cycle(dict.fromkeys((endpoint, *others)))
    with CallThreads() as threads:
        for attempt in attempts:
            with attempt:
                return threads.call(
                    _read_shard_map,
                    next(locations),
                    dataset,
                    fingerprint,
                    columns,
                    deadline,
                    credentials,
                    follow,
                    known_groups,
                )
    raise AssertionError("the last attempt returns or raises")


def _read_shard_map(
    endpoint: str,
    dataset: str,
    fingerprint: str,
    columns: Sequence[str],
    deadline: float,
    credentials: Credentials,
    follow: pb.EpochOfJob | None,
    known_groups: int | None,
) -> ShardMap:
    """Reads the shard map; subtracts the fixed-size columns not read from ``num_bytes``."""

    def timeout_s() -> float:
        return max(0.0, min(REQUEST_TIMEOUT_S, deadline - time.monotonic()))

    with NodeConnection(endpoint, credentials) as connection:
        shards = connection.read_shard_map(
            dataset, fingerprint, columns, timeout_s(), follow=follow, known_groups=known_groups
        )
        if not columns or not has_plain(shards.layout):
            return shards
        whole = Layout(connection.read_schema(dataset, shards.fingerprint, timeout_s()))
    left_out = whole.fixed_row_bytes - shards.layout.fixed_row_bytes
    return replace(shards, num_bytes=shards.num_bytes - left_out * shards.num_rows)
