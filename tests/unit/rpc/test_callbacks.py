from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cache_protocol.errors import NodeUnavailableError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.credentials import Credentials
from cache_server.rpc import callbacks
from tests.certificates import Authority

NODE = pb.Node(id="node-1", process="p", flight_location="grpc://there:1")


@pytest.fixture
def server() -> Iterator[grpc.Server]:
    started = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set(callbacks.member_service(NODE), health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, started)
    yield started
    started.stop(None)


def _node(port: int, scheme: str = "") -> pb.Node:
    node = pb.Node()
    node.CopyFrom(NODE)
    node.control_location = f"{scheme}node.example:{port}"
    return node


def _resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    asked = []

    def resolved(host: str, port: int) -> list[str]:
        asked.append(host)
        return list(addresses) if len(asked) == 1 else ["192.0.2.1"]

    monkeypatch.setattr(callbacks, "resolved", resolved)
    return asked


def test_a_place_is_that_of_the_address_that_answered(
    server: grpc.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    asked = _resolving(monkeypatch, "127.0.0.2", "127.0.0.1")
    assert callbacks.Callbacks().ask(_node(port), "ipv4:127.0.0.1:1") == "127.0.0.1"
    assert asked == ["node.example"]  # once: a name may change after it was asked


def test_the_certificate_is_that_of_the_name(
    server: grpc.Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("node.example")
    side = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    port = server.add_secure_port("127.0.0.5:0", side)  # an address that it does not have
    server.start()
    _resolving(monkeypatch, "127.0.0.5")
    asking = callbacks.Callbacks(Credentials(tls_ca=str(authority.ca)))
    assert asking.ask(_node(port, "grpc+tls://"), "ipv4:127.0.0.5:1") == "127.0.0.5"


@pytest.mark.parametrize("addresses", [(), ("127.0.0.1",)])
def test_a_node_that_nobody_reaches_does_not_join(
    addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _resolving(monkeypatch, *addresses)
    reason = "UNAVAILABLE" if addresses else "no address"
    with pytest.raises(NodeUnavailableError, match=f"cannot join: .*{reason}.* --advertise"):
        callbacks.Callbacks().ask(_node(1), "ipv4:127.0.0.1:1")


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::1:2:3:4%eth0", "2001:db8::/64"),
    ],
)
def test_a_place_is_an_ipv4_address_or_a_network(address: str, place: str) -> None:
    assert callbacks._network(address) == place
