"""What every way of reading settles before the first row: the shard map."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
)

from cache_client.connections import REQUEST_TIMEOUT_S, Connection
from cache_client.grpc_guard.call_threads import CallThreads
from cache_client.routing import ShardMap
from cache_client.window_sizes import has_plain
from cache_protocol.errors import NodeUnavailableError, NotReadyError
from cache_protocol.storage.layout import Layout
from cache_protocol.wire.backoff import backoff

logger = logging.getLogger(__name__)

_SILENT_S = 1.0  # a trainer that starts at the same time as its cache has nothing to say
# The last attempt begins so long before the deadline that it can still be answered; of a short
# deadline, a part of it.
_LAST_ATTEMPT_S, _LAST_ATTEMPT_PART = 0.5, 0.25


def wait_for_plan(
    endpoint: str, dataset: str, columns: Sequence[str], deadline_s: float
) -> ShardMap:
    """Where the rows of the newest version of ``dataset`` are, as soon as it is ready.

    Logs a warning, once, when it has to wait: the wrong port would look like a hang.

    Args:
        columns: to read, in this order; empty for all.
        deadline_s: how long to wait for a cache that is loading, or that does not answer.

    Raises:
        DatasetNotFoundError, LoadError, RequestError: at once.
        NotReadyError, NodeUnavailableError: at the deadline.
    """
    deadline = time.monotonic() + deadline_s
    last_attempt_s = min(_LAST_ATTEMPT_S, deadline_s * _LAST_ATTEMPT_PART)
    pause_s = backoff(0.02, 1.0)

    def wait_s(state: RetryCallState) -> float:
        return max(0.0, min(pause_s(state), deadline - last_attempt_s - time.monotonic()))

    said = False

    def say(state: RetryCallState) -> None:
        nonlocal said
        if not said and state.outcome is not None and (state.seconds_since_start or 0) >= _SILENT_S:
            said = True
            logger.warning(
                "waiting up to %g s for dataset %r at %s: %s",
                deadline_s, dataset, endpoint, state.outcome.exception(),
            )  # fmt: skip

    attempts = Retrying(
        retry=retry_if_exception_type((NotReadyError, NodeUnavailableError)),
        stop=stop_after_delay(deadline_s - last_attempt_s),
        wait=wait_s,
        before_sleep=say,
        reraise=True,
    )
    with CallThreads() as aside:
        for attempt in attempts:
            with attempt:
                return aside.call(_read_plan, endpoint, dataset, columns, deadline)
    raise AssertionError("the last attempt returns or raises")


def _read_plan(endpoint: str, dataset: str, columns: Sequence[str], deadline: float) -> ShardMap:
    """The shard map, whose ``num_bytes`` is without the fixed-size columns that are left out."""

    def timeout_s() -> float:
        return max(0.0, min(REQUEST_TIMEOUT_S, deadline - time.monotonic()))

    with Connection(endpoint) as connection:
        shards = connection.read_plan(dataset, "", columns, timeout_s())
        if not columns or not has_plain(shards.layout):
            return shards
        whole = Layout(connection.read_schema(dataset, shards.fingerprint, timeout_s()))
    left_out = whole.fixed_row_bytes - shards.layout.fixed_row_bytes
    return replace(shards, num_bytes=shards.num_bytes - left_out * shards.num_rows)
