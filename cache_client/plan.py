"""What every way of reading settles before the first row: the shard map, and the size of a row."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from numbers import Real

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from cache_client.connections import Connection
from cache_client.reader import REQUEST_TIMEOUT_S
from cache_client.routing import ShardMap
from protos.errors import NodeUnavailableError, NotReadyError
from protos.layout import Layout

# The last attempt begins so long before the deadline that it can still be answered; of a short
# deadline, a part of it.
_LAST_ATTEMPT_S, _LAST_ATTEMPT_PART = 0.5, 0.25


def argument_problems(
    dataset: object, columns: object, stack: object, deadline_s: object
) -> list[str]:
    """What is wrong with the arguments that every way of reading takes, each quoted."""
    problems: list[str] = []
    if not isinstance(dataset, str) or not dataset:
        problems.append(f"dataset must be a name, got {dataset!r}")
    if columns is not None and not _are_names(columns):
        problems.append(f"columns must be a list of names, got {columns!r}")
    if isinstance(stack, Mapping):
        problems += [
            f"stack {name!r} must be a list of columns, got {names!r}"
            for name, names in stack.items()
            if not _are_names(names)
        ]
    elif stack is not None:
        problems.append(f"stack must be a dict from name to columns, got {stack!r}")
    is_number = isinstance(deadline_s, Real) and not isinstance(deadline_s, bool)
    if not is_number or not deadline_s > 0:  # type: ignore[operator]
        problems.append(f"deadline_s must be a number, more than 0, got {deadline_s!r}")
    return problems


def _are_names(value: object) -> bool:
    """Whether it is several texts; one alone would be taken for its letters."""
    return (
        isinstance(value, Collection)
        and not isinstance(value, str)
        and all(isinstance(name, str) for name in value)
    )


def wait_for_plan(
    endpoint: str, dataset: str, columns: Sequence[str], deadline_s: float
) -> ShardMap:
    """Where the rows of the newest version of ``dataset`` are, as soon as it is ready.

    Args:
        columns: to read, in this order; empty for all.
        deadline_s: how long to wait for a cache that is loading, or that does not answer.

    Raises:
        DatasetNotFoundError, LoadError, RequestError: at once.
        NotReadyError, NodeUnavailableError: at the deadline.
    """
    deadline = time.monotonic() + deadline_s
    last_attempt_s = min(_LAST_ATTEMPT_S, deadline_s * _LAST_ATTEMPT_PART)
    backoff = wait_random_exponential(multiplier=0.02, max=1.0)

    def wait_s(state: RetryCallState) -> float:
        return max(0.0, min(backoff(state), deadline - last_attempt_s - time.monotonic()))

    attempts = Retrying(
        retry=retry_if_exception_type((NotReadyError, NodeUnavailableError)),
        stop=stop_after_delay(deadline_s - last_attempt_s),
        wait=wait_s,
        reraise=True,
    )
    for attempt in attempts:
        with attempt, Connection(endpoint) as connection:
            return _read_plan(connection, dataset, columns, deadline)
    raise AssertionError("the last attempt returns or raises")


def _read_plan(
    connection: Connection, dataset: str, columns: Sequence[str], deadline: float
) -> ShardMap:
    """The shard map, whose ``num_bytes`` is without the fixed-size columns that are left out."""

    def timeout_s() -> float:
        return max(0.0, min(REQUEST_TIMEOUT_S, deadline - time.monotonic()))

    shards = connection.read_plan(dataset, "", columns, timeout_s())
    if not columns or not has_plain(shards.layout):
        return shards
    whole = Layout(connection.read_schema(dataset, shards.fingerprint, timeout_s()))
    left_out = whole.fixed_row_bytes - shards.layout.fixed_row_bytes
    return replace(shards, num_bytes=shards.num_bytes - left_out * shards.num_rows)


def has_plain(layout: Layout) -> bool:
    """Whether the bytes of a row depend on its values: strings, binaries or lists are read."""
    return any(column.kind == "plain" for column in layout.columns)


def row_bytes(shards: ShardMap) -> int:
    """Bytes of a row on the wire, at least 1.

    Where strings, binaries or lists are read: their mean in the stored files, with that of those
    which are left out, since nothing says what each of them takes.
    """
    fixed = max(1, shards.layout.fixed_row_bytes)
    if not shards.num_rows or not has_plain(shards.layout):
        return fixed
    return max(fixed, -(-shards.num_bytes // shards.num_rows))
