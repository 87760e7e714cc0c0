"""What both ends of the gRPC control plane agree on beside the messages; of Flight, `DIRECT`."""

from __future__ import annotations

from typing import Any

import grpc

from protos.cache.v1 import cache_pb2 as pb
from protos.errors import CacheError, NodeUnavailableError, from_proto

ERROR_TRAILER = "cache-error-bin"
MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # a heartbeat or a DatasetInfo of some 100,000 shards
# gRPC would ask the proxy of `https_proxy`, which is there for the sources and knows neither the
# names of pods nor this machine's loopback addresses.
DIRECT = ("grpc.enable_http_proxy", 0)


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
