"""What both ends of the gRPC control plane agree on beside the messages; of Flight, `DIRECT`."""

from __future__ import annotations

from typing import Any

import grpc
from grpc.experimental import ChannelOptions

from cache_protocol.errors import CacheError, NodeUnavailableError, from_proto
from cache_protocol.v1 import cache_pb2 as pb

ERROR_TRAILER = "cache-error-bin"
MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # a heartbeat or a DatasetInfo of some 100,000 shards
# gRPC would ask the proxy of `https_proxy`, which is there for the sources and knows neither the
# names of pods nor this machine's loopback addresses.
DIRECT = ("grpc.enable_http_proxy", 0)
# A coordinator that hangs is noticed even while a load without a time limit is watched.
_KEEPALIVE_MS = 10_000


def open_channel(location: str, **options: int) -> grpc.Channel:
    """A channel to the coordinator at ``location``, which is connected when first used.

    Its streams are read in the thread that asks for them. gRPC otherwise starts a thread for them,
    and an interrupt (Ctrl-C) just before that start lets `close` wait for ever (grpc/grpc#20026).

    Args:
        location: ``host:port`` of its control port.
        options: more of gRPC's own, without their prefix ``grpc.``.
    """
    return grpc.insecure_channel(
        location,
        options=[
            DIRECT,
            (ChannelOptions.SingleThreadedUnaryStream, 1),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
            ("grpc.http2.ping_timeout_ms", _KEEPALIVE_MS),
            *((f"grpc.{name}", value) for name, value in options.items()),
        ],
    )


def from_rpc_error(error: grpc.RpcError, location: str) -> CacheError:
    """The error of the tree that a failed call to the coordinator at ``location`` stands for."""
    trailers: Any = error.trailing_metadata() or ()
    for key, value in trailers:
        if key == ERROR_TRAILER:
            return from_proto(pb.Error.FromString(value))
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return NodeUnavailableError(
            f"what answers at {location} is no coordinator: give the control port of its node, "
            "which is 50052 by default"
        )
    return NodeUnavailableError(
        f"the coordinator at {location} did not answer: {error.code().name}: {error.details()}"
    )
