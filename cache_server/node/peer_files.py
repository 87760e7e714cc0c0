"""Copies shard files from other nodes over Flight, and asks which ones they have."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.flight as flight
from google.protobuf.message import DecodeError

from cache_protocol.errors import CacheError, NodeUnavailableError, RequestError, from_proto
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.channels import DIRECT
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials
from cache_server.shards.version_key import VersionKey

HELD_SHARDS_ACTION, FIND_ROWS_ACTION = "held-shards", "find-rows"
_FIND_TIMEOUT_S = 120.0
_TIMEOUT_S = 600.0  # of one file
_ASK_TIMEOUT_S = 2.0


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
    pings = _keepalive_options(keepalive_s, keepalive_timeout_s)
    with _client(location, credentials, pings, f"shard {index} of {key.dataset!r}") as client:
        options = _call_options(credentials, timeout_s)
        reader = client.do_get(flight.Ticket(ticket.SerializeToString()), options)
        for chunk in reader:
            yield chunk.data.column(0)[0].as_buffer()


def held_shards(
    location: str,
    dataset: str,
    keys: Collection[VersionKey],
    *,
    credentials: Credentials = NO_CREDENTIALS,
    timeout_s: float = _ASK_TIMEOUT_S,
) -> Mapping[VersionKey, Mapping[int, str]]:
    """Asks a node which shards of versions and puts of a dataset it has now: index -> checksum.

    Raises:
        NodeUnavailableError: it does not answer.
    """
    request = pb.HeldShardsRequest(dataset=dataset, fingerprints=[key.fingerprint for key in keys])
    action = flight.Action(HELD_SHARDS_ACTION, request.SerializeToString())
    pings = _keepalive_options(timeout_s, timeout_s)
    with _client(location, credentials, pings, "the list of its shards") as client:
        (result,) = client.do_action(action, _call_options(credentials, timeout_s))
        answer = pb.HeldShardsResponse.FromString(result.body.to_pybytes())
    return {
        VersionKey(actual.dataset, actual.fingerprint): {
            shard.index: shard.checksum for shard in actual.shards
        }
        for actual in answer.datasets
    }


def find_rows(
    location: str, request: pb.FindRowsRequest, *, credentials: Credentials = NO_CREDENTIALS
) -> pb.FindRowsResponse:
    """Asks a node for the rows of a shard that fulfil conditions, with their tombstones.

    Raises:
        CacheError: of the node, or because it does not answer.
    """
    action = flight.Action(FIND_ROWS_ACTION, request.SerializeToString())
    pings = _keepalive_options(10.0, 10.0)
    with _client(location, credentials, pings, "rows to forget") as client:
        try:
            (result,) = client.do_action(action, _call_options(credentials, _FIND_TIMEOUT_S))
        except flight.FlightError as error:
            if isinstance(found := error_of(error), RequestError):
                raise found from None
            raise
        return pb.FindRowsResponse.FromString(result.body.to_pybytes())


def error_of(error: flight.FlightError) -> CacheError | None:
    """The error of a node that a Flight error carries."""
    try:
        return from_proto(pb.Error.FromString(error.extra_info or b""))
    except DecodeError:
        return None


@contextmanager
def _client(
    location: str, credentials: Credentials, pings: list[tuple[str, int]], what: str
) -> Iterator[flight.FlightClient]:
    """A client of a node; its errors become a `NodeUnavailableError` that names what was asked."""
    files = credentials.tls_files()
    try:
        with flight.FlightClient(
            location,
            tls_root_certs=files.ca,
            cert_chain=files.cert,
            private_key=files.key,
            generic_options=pings,
        ) as client:
            yield client
    except (flight.FlightError, pa.ArrowException, OSError, ValueError, DecodeError) as error:
        reason = str(error).partition("\n")[0]
        raise NodeUnavailableError(f"node {location} did not give {what}: {reason}") from None


def _call_options(credentials: Credentials, timeout_s: float) -> flight.FlightCallOptions:
    headers = [(name.encode(), value.encode()) for name, value in credentials.headers()]
    return flight.FlightCallOptions(timeout=timeout_s, headers=headers)


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
