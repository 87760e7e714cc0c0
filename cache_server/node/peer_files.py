"""Copies shard files from other nodes over Flight, with a deadline and keepalive."""

from __future__ import annotations

from collections.abc import Generator

import pyarrow as pa
import pyarrow.flight as flight

from cache_protocol.errors import NodeUnavailableError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.channels import DIRECT
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials
from cache_server.shards.version_key import VersionKey

_TIMEOUT_S = 600.0  # of one file


def shard_file(
    location: str,
    key: VersionKey,
    index: int,
    *,
    credentials: Credentials = NO_CREDENTIALS,
    timeout_s: float = _TIMEOUT_S,
    keepalive_s: float = 10.0,
    keepalive_timeout_s: float = 10.0,
) -> Generator[pa.Buffer, None, None]:
    """The bytes of a sealed shard's file, in order.

    Args:
        credentials: of this node.
        timeout_s: of the whole file.
        keepalive_s: time without a byte before a keepalive ping.
        keepalive_timeout_s: time to answer a ping, and to connect. A peer with a slow disk answers
            pings; a stopped process does not.

    Raises:
        NodeUnavailableError: the copy failed; names node, dataset and shard.
    """
    ticket = pb.ReadTicket(dataset=key.dataset, fingerprint=key.fingerprint, shard_file=index)
    headers = [(name.encode(), value.encode()) for name, value in credentials.headers()]
    options = flight.FlightCallOptions(timeout=timeout_s, headers=headers)
    files = credentials.tls_files()
    try:
        with flight.FlightClient(
            location,
            tls_root_certs=files.ca,
            cert_chain=files.cert,
            private_key=files.key,
            generic_options=_keepalive_options(keepalive_s, keepalive_timeout_s),
        ) as client:
            reader = client.do_get(flight.Ticket(ticket.SerializeToString()), options)
            for chunk in reader:
                yield chunk.data.column(0)[0].as_buffer()
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise NodeUnavailableError(
            f"node {location} did not give shard {index} of {key.dataset!r}: {reason}"
        ) from None


def _keepalive_options(keepalive_s: float, keepalive_timeout_s: float) -> list[tuple[str, int]]:
    """Options of gRPC. Pings without data keep their default: servers reject more as an attack."""
    answer_ms = round(keepalive_timeout_s * 1000)
    return [
        DIRECT,
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),  # default: a minute
        ("grpc.min_reconnect_backoff_ms", answer_ms),  # the time to connect
    ]
