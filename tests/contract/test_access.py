"""Who may call what: every verb of Flight, gRPC and HTTP, on a node with tokens and namespaces."""

from __future__ import annotations

import hashlib
import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import jwt
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from grpc_health.v1 import health_pb2

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    Connection,
    DatasetNotFoundError,
    DatasetSpec,
    PermissionDeniedError,
    StaleVersionError,
    UnauthenticatedError,
)
from cache_protocol.errors import CacheError, RequestError, from_proto
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_protocol.wire import protocol_version
from cache_protocol.wire.channels import ERROR_TRAILER
from cache_protocol.wire.credentials import Credentials
from cache_server.auth.principals import Principal, Role
from cache_server.auth.verbs import ROLES
from cache_server.config import NodeConfig
from cache_server.node.links.coordinator_link import RemoteCoordinator
from cache_server.server import CacheServer
from cache_server.web.service import PATHS
from tests.answering_control import answering_control
from tests.conftest import write_numbered
from tests.control_clients import open_channel
from tests.flight_clients import connect
from tests.job_arguments import grouped
from tests.json_web_tokens import KEY

TIMEOUT_S = 60.0
ROWS = 100
TOKENS: Mapping[str, tuple[str, list[str]]] = {  # name -> namespace, roles
    "alice": ("team-a", ["writer"]),
    "albert": ("team-a", ["writer"]),
    "ann": ("team-a", ["reader"]),
    "bob": ("team-b", ["writer"]),
    "carol": ("default", ["writer"]),
    "root": ("default", ["admin"]),
    "node-1": ("default", ["node"]),
    "node-2": ("default", ["node"]),
}


def token(name: str) -> str:
    return f"the-token-of-{name}"


def expired() -> str:
    claims = {"iss": "ci", "aud": "data-cache", "sub": "ci", "exp": time.time() - 60}
    return jwt.encode(claims, KEY, "RS256", headers={"kid": "one"})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    directory = tmp_path_factory.mktemp("access")
    principals = [
        {
            "name": name,
            "sha256": hashlib.sha256(token(name).encode()).hexdigest(),
            "namespace": namespace,
            "roles": roles,
        }
        for name, (namespace, roles) in TOKENS.items()
    ]
    (directory / "tokens.yaml").write_text(json.dumps({"principals": principals}))
    public: dict[str, Any] = jwt.algorithms.RSAAlgorithm.to_jwk(KEY.public_key(), as_dict=True)
    (directory / "jwks.json").write_text(json.dumps({"keys": [{**public, "kid": "one"}]}))
    rules = [{"subject": "ci", "roles": ["admin", "node"], "namespace": "ci"}]
    settings = {"issuer": "ci", "jwks": str(directory / "jwks.json"), "rules": rules}
    (directory / "jwt.yaml").write_text(json.dumps(settings))
    config = NodeConfig.build(
        cache_dir=directory / "cache",
        flight_port=0, control_port=0, http_port=0,
        auth_tokens=directory / "tokens.yaml", auth_jwt=directory / "jwt.yaml",
        heartbeat_interval_s=0.05,
    )  # fmt: skip
    with CacheServer(config) as running:
        yield running


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered(tmp_path_factory.mktemp("source"), ROWS, files=2)


def client(server: CacheServer, name: str) -> CacheClient:
    return CacheClient(Connection(server.endpoints.flight_location, token=token(name)))


# -- every verb --------------------------------------------------------------------------------

Outcome = CacheError | None  # how a call was refused; None: it was let in


def flight_outcome(call: Callable[[], object]) -> Outcome:
    try:
        call()
    except flight.FlightError as error:
        if error.extra_info:
            return from_proto(pb.Error.FromString(bytes(error.extra_info)))
    except (pa.ArrowException, OSError) as error:
        for kind, status in (
            (UnauthenticatedError, "Unauthenticated"),
            (PermissionDeniedError, "Unauthorized"),
        ):
            if status in str(error):  # GetSchema loses the code
                return kind(str(error))
    return None


def exchange(caller: flight.FlightClient) -> None:
    command = pb.GatherRequest(dataset="none", fingerprint="f").SerializeToString()
    writer, reader = caller.do_exchange(flight.FlightDescriptor.for_command(command))
    try:
        writer.begin(pa.schema([pa.field("row", pa.int64())]))
        writer.write_batch(pa.record_batch({"row": pa.array([0], pa.int64())}))
        reader.read_chunk()
    finally:
        writer.close()


def put(caller: flight.FlightClient) -> None:
    writer, _ = caller.do_put(flight.FlightDescriptor.for_path("t"), pa.schema([]))
    writer.close()


NOWHERE = flight.FlightDescriptor.for_path("none")
FLIGHT_CALLS: Mapping[str, Callable[[flight.FlightClient], object]] = {
    "LIST_FLIGHTS": lambda caller: list(caller.list_flights()),
    "GET_FLIGHT_INFO": lambda caller: caller.get_flight_info(NOWHERE),
    "GET_SCHEMA": lambda caller: caller.get_schema(NOWHERE),
    "DO_GET": lambda caller: caller.do_get(
        flight.Ticket(pb.ReadTicket(dataset="none").SerializeToString())
    ).read_all(),
    "DO_PUT": put,
    "DO_ACTION": lambda caller: list(caller.do_action(flight.Action("none", b""))),
    "LIST_ACTIONS": lambda caller: list(caller.list_actions()),
    "DO_EXCHANGE": exchange,
}
GRPC_METHODS = {
    f"grpc /{service.full_name}/{method.name}": method
    for file in (pb.DESCRIPTOR, health_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}
HTTP_STATUS: Mapping[int, type[CacheError]] = {
    401: UnauthenticatedError,
    403: PermissionDeniedError,
}


def outcome(server: CacheServer, verb: str, given: str | None) -> Outcome:
    """How a call of a verb is refused, with this token."""
    port, _, name = verb.partition(" ")
    if port == "flight":
        with connect(server.endpoints.flight_location, given) as caller:
            return flight_outcome(lambda: FLIGHT_CALLS[name](caller))
    if port == "grpc":
        with open_channel(server.endpoints.control_location, given) as channel:
            method = GRPC_METHODS[verb]
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            try:
                answer: Any = kind(name, lambda request: request)(b"", timeout=TIMEOUT_S)
                if method.server_streaming:
                    next(answer)
                    answer.cancel()
            except grpc.RpcError as error:
                for key, value in error.trailing_metadata() or ():
                    if key == ERROR_TRAILER:
                        return from_proto(pb.Error.FromString(value))
            return None
    connection = http.client.HTTPConnection(urlsplit(server.page).netloc, timeout=TIMEOUT_S)
    headers = {} if given is None else {"Authorization": f"Bearer {given}"}
    connection.request("GET", name, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    kind = HTTP_STATUS.get(answer.status)
    return None if kind is None else kind(body)


def test_the_table_has_exactly_the_verbs_that_a_node_serves() -> None:
    methods = {f"flight {method.name}" for method in flight.FlightMethod} - {"flight INVALID"}

    assert set(ROLES) == methods | set(GRPC_METHODS) | {f"http {path}" for path in PATHS}
    # pyarrow refuses a handshake before this project's code is asked: there is no handler for it.
    assert {f"flight {name}" for name in FLIGHT_CALLS} == methods - {"flight HANDSHAKE"}


@pytest.mark.parametrize("verb", sorted(set(ROLES) - {"flight HANDSHAKE"}))
def test_a_verb_is_refused_without_with_a_wrong_an_expired_and_a_too_weak_token(
    server: CacheServer, verb: str
) -> None:
    role = ROLES[verb]
    bad = {"none": None, "wrong": "wrong", "expired": expired()}
    found = {what: outcome(server, verb, given) for what, given in bad.items()}

    if role is None:
        assert not any(isinstance(error, UnauthenticatedError) for error in found.values())
        return
    assert {what: type(error) for what, error in found.items()} == dict.fromkeys(
        bad, UnauthenticatedError
    )
    for name in ("ann", "alice", "root", "node-1"):
        if role is Role.NODE and name == "node-1":
            continue  # it would join the cache
        error = outcome(server, verb, token(name))
        principal = Principal(name, roles=frozenset(map(Role, TOKENS[name][1])))
        weak = role not in principal._granted
        assert isinstance(error, PermissionDeniedError) is weak, (name, error)
        assert not isinstance(error, UnauthenticatedError)


def test_only_a_node_copies_a_shard_file(server: CacheServer, source: Path) -> None:
    info = client(server, "alice").load(DatasetSpec("copied", source))
    ticket = pb.ReadTicket(dataset="team-a/copied", fingerprint=info.fingerprint, shard_file=0)

    def copied(name: str) -> Outcome:
        with connect(server.endpoints.flight_location, token(name)) as caller:
            wanted = flight.Ticket(ticket.SerializeToString())
            return flight_outcome(lambda: caller.do_get(wanted).read_all())

    assert copied("node-1") is None
    assert {type(copied(name)) for name in ("ann", "alice", "bob", "root")} == {
        PermissionDeniedError
    }


# -- releases ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "words"), [(0, "is too old"), (9, "is too new")])
def test_a_caller_of_a_far_release_is_told_so_before_its_token_is_looked_at(
    server: CacheServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    words: str,
) -> None:
    monkeypatch.setattr(protocol_version, "header", lambda: ("cache-protocol", str(number)))
    cache = Connection(server.endpoints.flight_location, token="wrong")
    control = server.endpoints.control_location
    with RemoteCoordinator(control, Credentials("wrong")) as link:
        for who, call in {
            "client": CacheClient(cache).datasets,
            "the client": lambda: CacheIterableDataset("none", cache=cache, batch_size=1),
            "node": lambda: link.heartbeat(pb.HeartbeatRequest(node=pb.Node(id="far"))),
        }.items():
            with pytest.raises(RequestError, match=f"{who} {words} .* speaks protocol {number}"):
                call()


# -- namespaces --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shared:
    """Datasets of two teams: one of each is private, one of team-a is for team-b, one for all."""

    server: CacheServer

    def names(self, name: str) -> set[str]:
        return {info.name for info in client(self.server, name).datasets()}


@pytest.fixture(scope="module")
def shared(server: CacheServer, source: Path) -> Shared:
    alice, bob, carol = (client(server, name) for name in ("alice", "bob", "carol"))
    alice.load(DatasetSpec("private", source))
    alice.load(DatasetSpec("lent", source, readers=["team-b"]))
    alice.load(DatasetSpec("public", source, readers=["*"]))
    bob.load(DatasetSpec("private", source, columns=["row"]))
    carol.load(DatasetSpec("old", source))
    return Shared(server)


def rows_of(server: CacheServer, name: str, dataset: str, **settings: Any) -> list[int]:
    found = CacheIterableDataset(
        dataset,
        **grouped(
            cache=Connection(server.endpoints.flight_location, token=token(name)),
            batch_size=30,
            rank=0,
            world_size=1,
            columns=["row"],
            **settings,
        ),
    )
    return [int(row) for batch in found for row in batch["row"]]


def test_each_team_sees_its_own_datasets_and_those_that_others_share(shared: Shared) -> None:
    own = {"private", "lent", "public"}
    assert shared.names("ann") >= own and "default/old" not in shared.names("ann")
    assert shared.names("bob") == {"private", "team-a/lent", "team-a/public"}
    assert shared.names("carol") == {"old", "team-a/public"}
    everything = {"old", "team-b/private", *(f"team-a/{name}" for name in own)}
    assert shared.names("root") >= everything


@pytest.mark.parametrize("local", [True, False])
def test_rows_are_read_by_whoever_may_read_them(shared: Shared, local: bool) -> None:
    for name, dataset in (
        ("ann", "private"), ("ann", "team-a/lent"), ("bob", "private"), ("bob", "team-a/lent"),
        ("carol", "team-a/public"), ("carol", "old"), ("root", "team-b/private"),
        ("root", "default/old"),
    ):  # fmt: skip
        assert rows_of(shared.server, name, dataset, local=local) == [*range(ROWS)], dataset


def test_what_is_not_theirs_does_not_exist_for_a_caller(shared: Shared) -> None:
    for name, dataset in (
        ("bob", "team-a/private"), ("bob", "lent"), ("bob", "default/old"), ("bob", "nothing/at"),
        ("carol", "team-a/lent"), ("carol", "private"), ("ann", "team-b/private"),
    ):  # fmt: skip
        asked = client(shared.server, name)
        for call in (asked.describe, asked.head, partial(rows_of, shared.server, name)):
            with pytest.raises(DatasetNotFoundError) as caught:
                call(dataset)
            listed = str(caught.value).partition("datasets:")[2]
            assert {part.strip() for part in listed.split(",")} == shared.names(name)


def test_a_ticket_or_a_gather_of_another_team_brings_no_row(shared: Shared) -> None:
    info = client(shared.server, "ann").describe("private")
    with connect(shared.server.endpoints.flight_location, token("bob")) as bob:
        for dataset in ("team-a/private", "private"):
            ticket = pb.ReadTicket(
                dataset=dataset, fingerprint=info.fingerprint, rows=pb.RowRange(start=0, stop=1)
            )
            refused = flight_outcome(
                lambda t=ticket: bob.do_get(flight.Ticket(t.SerializeToString())).read_all()
            )
            assert isinstance(refused, DatasetNotFoundError | StaleVersionError)
            assert "lent" in str(refused) or dataset == "private"


def test_only_its_own_team_changes_a_dataset(shared: Shared, source: Path) -> None:
    for name, dataset in (("bob", "team-a/lent"), ("carol", "team-a/public"), ("bob", "x/new")):
        other = client(shared.server, name)
        with pytest.raises(PermissionDeniedError, match=dataset):
            other.load(DatasetSpec(dataset, source))
        with pytest.raises(PermissionDeniedError, match=dataset):
            other.drop(dataset)
        with pytest.raises(PermissionDeniedError, match=dataset):
            other.keep(dataset, pinned=True)
        with pytest.raises(PermissionDeniedError, match=dataset):
            other.begin_write(dataset, pa.schema([("row", pa.int64())]))

    root = client(shared.server, "root")
    root.load(DatasetSpec("team-b/of-root", source))
    assert "of-root" in shared.names("bob")
    assert client(shared.server, "bob").keep("of-root", priority=2).priority == 2
    assert [share.namespace for share in client(shared.server, "bob").shares()] == ["team-b"]
    client(shared.server, "bob").drop("of-root")
    assert "team-b/of-root" not in shared.names("root")


def test_only_its_own_team_puts_rows_to_a_write_commits_it_and_aborts_it(
    server: CacheServer,
) -> None:
    rows = pa.table({"row": [1, 2]})
    write = client(server, "alice").begin_write("written", rows.schema)
    stolen = replace(
        write,
        name="team-a/written",
        ends=client(server, "bob").begin_write("written", rows.schema).ends,
        credentials=Credentials(token("bob")),
    )

    for change in (lambda: stolen.put(0, 0, rows), lambda: stolen.commit({}), stolen.abort):
        with pytest.raises(PermissionDeniedError, match="team-a/written"):
            change()
    with pytest.raises(PermissionDeniedError, match="writer"):
        replace(write, credentials=Credentials(token("ann"))).put(0, 0, rows)

    ack = replace(write, credentials=Credentials(token("albert"))).put(0, 0, rows)
    assert write.commit({0: ack}).name == "written"
    assert rows_of(server, "ann", "written") == [1, 2]
    with pytest.raises(PermissionDeniedError, match="team-a/written"):
        stolen.commit({})


def test_readers_that_were_taken_away_read_no_more(shared: Shared, source: Path) -> None:
    alice = client(shared.server, "alice")
    alice.load(DatasetSpec("for-a-while", source, readers=["team-b"]))
    assert rows_of(shared.server, "bob", "team-a/for-a-while", local=False) == [*range(ROWS)]
    alice.load(DatasetSpec("for-a-while", source))

    assert "team-a/for-a-while" not in shared.names("bob")
    with pytest.raises(DatasetNotFoundError):
        rows_of(shared.server, "bob", "team-a/for-a-while")
    alice.drop("for-a-while")


def test_the_page_and_the_metrics_show_what_a_caller_may_see(shared: Shared) -> None:
    def text(name: str | None, path: str) -> str:
        connection = http.client.HTTPConnection(urlsplit(shared.server.page).netloc)
        headers = {} if name is None else {"Authorization": f"Bearer {token(name)}"}
        connection.request("GET", path, headers=headers)
        try:
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    rows_of(shared.server, "ann", "private", local=False)
    for path in ("/", "/metrics"):
        assert "lent" in text("bob", path) and "team-a/private" not in text("bob", path)
        assert "lent" not in text("carol", path)
        assert "team-a/private" in text("root", path)
    for name in (None, "root"):  # for a Prometheus without a token
        assert "data_cache_ready 1.0" in text(name, "/metrics/node")
        assert "dataset=" not in text(name, "/metrics/node")

    def series(name: str | None, path: str) -> set[str]:
        lines = (line for line in text(name, path).splitlines() if line.startswith("data_cache_"))
        return {line.rpartition(" ")[0] for line in lines if "dataset=" not in line}

    assert series("root", "/metrics") == series(None, "/metrics/node")


# -- secrets and node ids ----------------------------------------------------------------------


def heartbeat(server: CacheServer, given: str | None, node_id: str = "made-up") -> Any:
    node = pb.Node(id=node_id, flight_location="grpc://10.0.0.9:1")
    with (
        answering_control() as node.control_location,
        open_channel(server.endpoints.control_location, given) as channel,
    ):
        beat = pb.HeartbeatRequest(node=node)
        return cache_pb2_grpc.CoordinatorStub(channel).Heartbeat(beat, timeout=TIMEOUT_S)


def test_a_made_up_node_gets_no_secret(server: CacheServer) -> None:
    for given in (None, "wrong", token("alice"), token("root"), expired()):
        with pytest.raises(grpc.RpcError) as caught:
            heartbeat(server, given)
        assert caught.value.code() in (
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.PERMISSION_DENIED,
        )
    with open_channel(server.endpoints.control_location, token("root")) as channel:
        nodes = cache_pb2_grpc.CoordinatorStub(channel).ListNodes(pb.ListNodesRequest()).nodes
    assert [node.id for node in nodes] == [server.node_id]


def test_the_id_of_a_live_node_belongs_to_the_principal_that_reports_it(
    server: CacheServer,
) -> None:
    with pytest.raises(grpc.RpcError, match=f"'node-2' reported for node {server.node_id}"):
        heartbeat(server, token("node-2"), server.node_id)
