"""The coordinator of a cache: found at each call, called in other threads.

Each call opens a channel to the coordinator and closes it again, so that a later fork finds nothing
open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc

from cache_client.flight.call_threads import CallThreads
from cache_client.flight.connections import NodeConnection
from cache_client.flight.forks import fork_gate
from cache_client.job.connection import Access
from cache_protocol.errors import NodeUnavailableError, NotReadyError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_protocol.wire.channels import from_rpc_error, open_channel, pause_s
from cache_protocol.wire.credentials import Credentials

MIN_LOOKUP_S = 1.0  # to find the coordinator, even if the limit of the call is shorter
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0  # while the nodes elect a coordinator
_T = TypeVar("_T")
_MAX_TIMEOUT_S = 1e9  # of a call: gRPC takes a longer one as no limit


@dataclass(frozen=True)
class Calls:
    """Calls to a coordinator, made in other threads.

    Attributes:
        is_elected: another node may become the coordinator.
    """

    threads: CallThreads
    stub: cache_pb2_grpc.CoordinatorStub
    credentials: Credentials
    is_elected: bool = False

    def call(self, method: Callable[..., Any], request: object, deadline: float | None) -> Any:
        """The answer to a request, before the deadline."""
        headers, timeout_s = self.credentials.headers(), remaining_time_s(deadline)
        return self.threads.call(partial(method, request, timeout=timeout_s, metadata=headers))

    def stream(self, method: Callable[..., Any], request: object, timeout_s: float | None) -> Any:
        """The answers to a request, one after the other."""
        headers = self.credentials.headers()
        responses = self.threads.call(partial(method, request, timeout=timeout_s, metadata=headers))
        while (response := self.threads.call(next, responses, None)) is not None:
            yield response


@dataclass(frozen=True)
class Coordinator:
    """The coordinator of a cache. Thread-safe; a pickle has the token.

    Args:
        access: to the cache; ``deadline_s`` is that of each call.
    """

    access: Access

    def deadline(self) -> float:
        """The end of a call that begins now."""
        return time.monotonic() + self.access.deadline_s

    def ask(self, method: str, request: object, deadline: float | None = None) -> Any:
        """The answer to one request.

        Args:
            method: of the service.
            deadline: by `time.monotonic`; None: that of a call that begins now.

        Raises:
            CacheError: of the coordinator, or because it does not answer.
        """
        deadline = self.deadline() if deadline is None else deadline
        return self.run(
            lambda calls: calls.call(getattr(calls.stub, method), request, deadline), deadline
        )

    def run(self, action: Callable[[Calls], _T], deadline: float | None) -> _T:
        """What ``action`` returns.

        Where the nodes elect their coordinator, it is called again while they elect another one,
        for ``deadline_s`` at most.

        Raises:
            CacheError: of the coordinator, or because it does not answer.
        """
        until, attempt = None, 0
        while True:
            calls: Calls | None = None
            begun = time.monotonic()
            try:
                with self._calls(deadline) as calls:
                    return action(calls)
            except NotReadyError:  # of a node that knows no coordinator, or an answer
                if calls is not None:
                    raise
                failed = time.monotonic()
                if until is not None and failed >= until:
                    raise
            except NodeUnavailableError:
                failed = time.monotonic()
                if calls is None or not calls.is_elected or (until is not None and failed >= until):
                    raise
            if until is None or failed - begun > self.access.deadline_s:
                until = failed + self.access.deadline_s
            if deadline is not None:
                until = min(until, deadline)
            attempt += 1
            time.sleep(pause_s(attempt, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))

    @contextmanager
    def _calls(self, deadline: float | None) -> Iterator[Calls]:
        """Finds the coordinator, and opens a channel to it.

        Raises:
            CacheError: that of a call inside.
        """
        credentials, lookup_s = self.access.credentials, self.access.deadline_s
        remaining_s = remaining_time_s(deadline)
        if remaining_s is not None:
            lookup_s = min(lookup_s, max(remaining_s, MIN_LOOKUP_S))
        with CallThreads() as threads:
            found = threads.call(self._find, lookup_s)
            location = found.control_location
            fork_gate.use()
            channel = threads.call(open_channel, location, credentials)
            try:
                stub = cache_pb2_grpc.CoordinatorStub(channel)
                yield Calls(threads, stub, credentials, is_elected=found.term > 0)
            except grpc.RpcError as error:
                raise from_rpc_error(error, location) from None
            finally:
                threads.call(channel.close)  # also ends a call that an interrupt left

    def _find(self, timeout_s: float) -> pb.CoordinatorEndpoints:
        with NodeConnection(self.access.endpoint, self.access.credentials) as connection:
            return connection.coordinator(timeout_s)


def remaining_time_s(deadline: float | None) -> float | None:
    """Seconds until a deadline; None: there is none."""
    return None if deadline is None else min(max(0.0, deadline - time.monotonic()), _MAX_TIMEOUT_S)
