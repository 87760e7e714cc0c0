"""A node's way to the shard files of other nodes: Flight, with a deadline."""

from __future__ import annotations

from collections.abc import Generator

import pyarrow as pa
import pyarrow.flight as flight

from cache_server.planning import VersionKey
from protos.cache.v1 import cache_pb2 as pb
from protos.errors import NodeUnavailableError

_TIMEOUT_S = 600.0  # of one file


def shard_file(location: str, key: VersionKey, index: int) -> Generator[pa.Buffer, None, None]:
    """The bytes of a sealed shard's file, in order.

    Raises:
        NodeUnavailableError: the node does not give it; names node, dataset and shard.
    """
    ticket = pb.ReadTicket(dataset=key.dataset, fingerprint=key.fingerprint, shard_file=index)
    options = flight.FlightCallOptions(timeout=_TIMEOUT_S)
    try:
        with flight.FlightClient(location) as client:
            reader = client.do_get(flight.Ticket(ticket.SerializeToString()), options)
            for chunk in reader:
                yield chunk.data.column(0)[0].as_buffer()
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise NodeUnavailableError(
            f"node {location} did not give shard {index} of {key.dataset!r}: {reason}"
        ) from None
