"""gRPC channels to the coordinator: options, limits, errors in trailers, pauses between attempts.

Pauses are random, so that many waiting clients do not retry at once. They do not use the state of
`random`: training scripts seed it and rely on its next values.
"""

from __future__ import annotations

from collections.abc import Callable
from random import SystemRandom
from typing import Any

import grpc
from grpc.experimental import ChannelOptions
from tenacity import RetryCallState

from cache_protocol.errors import CacheError, NodeUnavailableError, from_proto
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.credentials import NO_CREDENTIALS, TLS_SCHEME, Credentials

ERROR_TRAILER = "cache-error-bin"
MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # a heartbeat or DatasetInfo of about 100,000 shards
# Flight and gRPC must not use the proxy of `https_proxy`: it is for the sources, and knows neither
# the names of pods nor loopback addresses.
DIRECT = ("grpc.enable_http_proxy", 0)
# Detects a coordinator that hangs while a load without a time limit is watched.
_KEEPALIVE_MS = 10_000
_REST_TIMES, _UNNOTICED_S, _LONGEST_REST_S = 4, 0.003, 1.0
_RANDOM = SystemRandom()  # stateless: forked workers would share a state


def open_channel(
    location: str, credentials: Credentials = NO_CREDENTIALS, **options: int | str
) -> grpc.Channel:
    """A channel to the coordinator at ``location``; it connects at the first call.

    The calling thread reads streams. By default gRPC starts a thread for them, and an interrupt
    (Ctrl-C) just before that makes `close` wait for ever (grpc/grpc#20026).

    Args:
        location: ``host:port`` of its control port; ``grpc+tls://host:port`` for TLS.
        credentials: for TLS. Its headers belong to each call.
        options: more options of gRPC, without their prefix ``grpc.``.
    """
    arguments = [
        DIRECT,
        (ChannelOptions.SingleThreadedUnaryStream, 1),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_MS),
        *((f"grpc.{name}", value) for name, value in options.items()),
    ]
    if not location.startswith(TLS_SCHEME):
        return grpc.insecure_channel(location, options=arguments)
    tls = grpc.ssl_channel_credentials(*credentials.tls_files())
    return grpc.secure_channel(location.removeprefix(TLS_SCHEME), tls, options=arguments)


def from_rpc_error(error: grpc.RpcError, location: str) -> CacheError:
    """Translates the error of a call to the coordinator at ``location``."""
    trailers: Any = error.trailing_metadata() or ()
    for key, value in trailers:
        if key == ERROR_TRAILER:
            return from_proto(pb.Error.FromString(value))
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return NodeUnavailableError(
            f"the server at {location} is no coordinator: give the control port of its node, by "
            "default 50052. If it is one, its release lacks this call: update the coordinator"
        )
    return NodeUnavailableError(
        f"the coordinator at {location} did not answer: {error.code().name}: {error.details()}"
    )


def backoff(first_s: float, longest_s: float) -> Callable[[RetryCallState], float]:
    """A ``wait`` for tenacity: full jitter, with a limit that doubles from ``first_s``.

    Args:
        first_s: the longest first pause.
        longest_s: the longest pause.
    """
    return lambda state: pause_s(state.attempt_number, first_s, longest_s)


def pause_s(attempt: int, first_s: float, longest_s: float) -> float:
    """The pause of `backoff` after an attempt; the first attempt is 1."""
    doublings = min(attempt - 1, 64)  # more would overflow a float
    return _RANDOM.uniform(0.0, min(first_s * 2.0**doublings, longest_s))


def rest_s(took_s: float) -> float:
    """How long to wait after work that is repeated at every change.

    The work then takes at most a fifth of the time, so that what it reports is not slowed down. At
    most a second; nothing after work of a few milliseconds.
    """
    return min(_REST_TIMES * took_s, _LONGEST_REST_S) if took_s > _UNNOTICED_S else 0.0
