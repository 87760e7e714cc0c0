"""Calls to a coordinator, made in other threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cache_client.flight.call_threads import CallThreads
from cache_protocol.v1 import cache_pb2_grpc
from cache_protocol.wire.credentials import Credentials

_MAX_TIMEOUT_S = 1e9  # of a call: gRPC takes a longer one as no limit


@dataclass(frozen=True)
class Calls:
    """Calls to a coordinator, made in other threads."""

    threads: CallThreads
    stub: cache_pb2_grpc.CoordinatorStub
    credentials: Credentials

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


def remaining_time_s(deadline: float | None) -> float | None:
    """Seconds until a deadline; None: there is none."""
    return None if deadline is None else min(max(0.0, deadline - time.monotonic()), _MAX_TIMEOUT_S)
