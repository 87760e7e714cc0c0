"""Calls a node back before it becomes a member: it must answer at the address that it advertises.

The question goes to the health service of its control port, which is open: no token is sent to an
address that anybody may have made up. See ADR 0042.
"""

from __future__ import annotations

import hashlib
import ipaddress
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cache_protocol.errors import NodeUnavailableError, NotReadyError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.channels import open_channel
from cache_protocol.wire.credentials import NO_CREDENTIALS, TLS_SCHEME, Credentials
from cache_server.egress.hosts import resolved
from cache_server.shards import checked_names

_TIMEOUT_S = 2.0
_AT_ONCE, _AT_ONCE_OF_PEER = 4, 2  # of 8 threads for heartbeats


def member_service(node: pb.Node) -> str:
    """The health service that only this process of this node has.

    A digest: everyone may list the services.
    """
    digest = hashlib.sha256(f"{node.id}\n{node.process}\n{node.flight_location}".encode())
    return f"member-{digest.hexdigest()}"


class Callbacks:
    """Asks nodes whether they are where they say. Thread-safe.

    Args:
        credentials: for TLS.
    """

    def __init__(self, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._credentials = credentials
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()  # by the machine that sent the heartbeat

    def ask(self, node: pb.Node, peer: str) -> str:
        """Asks a node; returns its host, by which places are counted.

        Args:
            peer: that sent the heartbeat, as gRPC names it.

        Raises:
            InvalidTicketError: the node advertises no address.
            NodeUnavailableError: it does not answer there, or another node does.
            NotReadyError: too many nodes are asked now; the node will try again.
        """
        location = node.control_location
        checked_names.address(location)
        name, _, port = location.removeprefix(TLS_SCHEME).rpartition(":")
        name, reason = name.strip("[]"), "no address"
        with self._slot(peer.rpartition(":")[0]):
            ends_at = time.monotonic() + _TIMEOUT_S
            addresses = _addresses(name)
            # One after the other, so that the one that answers is known: a name may change.
            for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
                timeout_s = max(0.0, ends_at - time.monotonic()) / left
                scheme = TLS_SCHEME if location.startswith(TLS_SCHEME) else ""
                place = f"[{address}]" if ":" in address else address
                reason = self._reason_against(
                    f"{scheme}{place}:{port}", name, member_service(node), timeout_s
                )
                if not reason:
                    return _network(address)
        raise NodeUnavailableError(
            f"node {node.id} cannot join: the coordinator asked for it at {location} and got: "
            f"{reason}. Give an --advertise that the coordinator reaches"
        )

    @contextmanager
    def _slot(self, machine: str) -> Iterator[None]:
        with self._lock:
            if self._running.total() >= _AT_ONCE or self._running[machine] >= _AT_ONCE_OF_PEER:
                raise NotReadyError("the coordinator asks other new nodes first: try again")
            self._running[machine] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[machine] -= 1
                if not self._running[machine]:
                    del self._running[machine]

    def _reason_against(self, location: str, name: str, service: str, timeout_s: float) -> str:
        """Why a node does not join; empty: it answers.

        Args:
            location: an IP address with its port.
            name: of the host, which its certificate must have.
        """
        request = health_pb2.HealthCheckRequest(service=service)
        with open_channel(location, self._credentials, ssl_target_name_override=name) as channel:
            try:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = stub.Check(request, timeout=timeout_s)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return "another node answers"
                return f"{error.code().name}: {error.details()}"
        is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return "" if is_serving else "it does not serve"


def _addresses(host: str) -> list[str]:
    """The IP addresses of a host; none if its name is not known."""
    try:
        return resolved(host, 0)
    except OSError:
        return []


def _network(text: str) -> str:
    """The machine of an address: its IPv4 address, or the /64 network of its IPv6 address."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if (mapped := address.ipv4_mapped) is not None:
            return str(mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
