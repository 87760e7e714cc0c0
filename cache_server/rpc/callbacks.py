"""Calls a node back before it becomes a member: it must answer at the address that it advertises.

The question goes to the health service of its control port, which is open: no token is sent to an
address that anybody may have made up. See ADR 0042.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import threading
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
        with self._slot(peer.rpartition(":")[0]):
            reason = self._reason_against(location, member_service(node))
            host = "" if reason else _network(location)
        if not host:
            raise NodeUnavailableError(
                f"node {node.id} cannot join: the coordinator asked for it at {location} and got: "
                f"{reason or 'no address'}. Give an --advertise that the coordinator reaches"
            )
        return host

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

    def _reason_against(self, location: str, service: str) -> str:
        """Why a node does not join; empty: it answers."""
        request = health_pb2.HealthCheckRequest(service=service)
        with open_channel(location, self._credentials) as channel:
            try:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = stub.Check(request, timeout=_TIMEOUT_S)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return "another node answers"
                return f"{error.code().name}: {error.details()}"
        is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return "" if is_serving else "it does not serve"


def _network(location: str) -> str:
    """The machine of a location: its IPv4 address, or the /64 network of its IPv6 address."""
    host = location.removeprefix(TLS_SCHEME).rpartition(":")[0].strip("[]")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    address = ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if (mapped := address.ipv4_mapped) is not None:
            return str(mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
