"""Training on caches that know their callers: tokens, TLS and client certificates."""

from __future__ import annotations

import gc
import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pyarrow.flight as flight
import pytest
import yaml

from cache_client import (
    CacheClient,
    CacheDataset,
    CacheIterableDataset,
    ConfigError,
    Connection,
    NodeUnavailableError,
    UnauthenticatedError,
)
from cache_client.job import ranks
from cache_protocol.wire import credentials
from cache_protocol.wire.credentials import find_token
from cache_server import LocalCluster
from tests.certificates import Authority
from tests.conftest import write_numbered
from tests.env_cache import EnvNode, env_nodes
from tests.waiting import wait_until

ROWS = 1000
WAIT_S = 60.0


@dataclass(frozen=True)
class SecureCache:
    """Two nodes with tokens, TLS and client certificates.

    Attributes:
        tokens: the file of a team's token; a test may change it.
        ca, cert, key: what the team needs for TLS.
    """

    nodes: list[EnvNode]
    tokens: Path
    ca: Path
    cert: Path
    key: Path

    @property
    def endpoint(self) -> str:
        return self.nodes[0].endpoint


def entry(name: str, token: str, namespace: str, *roles: str) -> dict[str, object]:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return {"name": name, "sha256": digest, "namespace": namespace, "roles": list(roles)}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCache]:
    gc.collect()  # a node that ran in this process is part of a cycle, and its gRPC lives as long
    directory = tmp_path_factory.mktemp("secure")
    source = write_numbered(directory / "source", ROWS, files=4)
    authority = Authority(directory)
    principals = [
        entry("trainer", "first-token", "team-a", "reader"),
        entry("trainer", "second-token", "team-a", "reader"),
        entry("stranger", "strange-token", "team-b", "writer"),
    ]
    nodes_of = [entry(f"node-{n}", f"token-of-node-{n}", "team-a", "node") for n in range(2)]
    (directory / "tokens.yaml").write_text(yaml.safe_dump({"principals": principals + nodes_of}))
    arguments = [
        "--auth-tokens", str(directory / "tokens.yaml"),
        "--tls-ca", str(authority.ca), "--require-client-cert",
    ]  # fmt: skip
    settings = {"STORAGE_URI": str(source), "CACHE_DATASET": "table", "CACHE_REPLICAS": "2",
                "CACHE_TARGET_SHARD_BYTES": "1"}  # fmt: skip
    token = directory / "token"
    token.write_text("first-token")
    cert, key = authority.issue("trainer")
    with env_nodes(directory, 2, *arguments, **settings) as nodes:
        for number, node in enumerate(nodes):
            own = authority.issue(f"node-{number}.cache")
            node.arguments += ["--tls-cert", str(own[0]), "--tls-key", str(own[1])]
            node.environ["CACHE_TOKEN"] = f"token-of-node-{number}"
            node.start(listening=False)
        for node in nodes:
            node.wait_until_listening()
        yield SecureCache(nodes, token, authority.ca, cert, key)


@pytest.fixture
def trainer(secure: SecureCache, monkeypatch: pytest.MonkeyPatch) -> SecureCache:
    """The environment of a trainer of team-a."""
    monkeypatch.setenv("CACHE_TOKEN_FILE", str(secure.tokens))
    monkeypatch.setenv("CACHE_TLS_CA", str(secure.ca))
    monkeypatch.setenv("CACHE_TLS_CERT", str(secure.cert))
    monkeypatch.setenv("CACHE_TLS_KEY", str(secure.key))

    def is_ready() -> bool:
        infos = CacheClient(secure.endpoint).datasets()
        return [(info.name, info.state) for info in infos] == [("table", "ready")]

    wait_until(is_ready, WAIT_S, "the dataset of the environment is of the nodes' namespace")
    return secure


@pytest.mark.parametrize(("method", "workers"), [("fork", 0), ("fork", 2), ("spawn", 1)])
def test_an_epoch_over_tls_with_replicas_and_workers_has_every_row_once(
    trainer: SecureCache, forked_workers: None, method: str, workers: int
) -> None:
    dataset = CacheIterableDataset(
        "table",
        cache=Connection(trainer.endpoint, local=False),
        batch_size=16,
        shuffle=True,
        columns=["row"],
        rank=0,
        world_size=1,
    )
    context = method if workers else None
    loader = dataset.loader(num_workers=workers, multiprocessing_context=context)

    rows = [int(row) for batch in loader for row in batch["row"]]

    assert sorted(rows) == [*range(ROWS)]
    assert rows != sorted(rows)
    shown = f"{dataset!r} {dataset.state_dict()} {vars(dataset)}"
    assert "first-token" not in shown and "second-token" not in shown


def test_a_token_that_is_rotated_during_an_epoch_is_used_for_its_next_calls(
    trainer: SecureCache,
) -> None:
    with CacheDataset("table", cache=Connection(trainer.endpoint, local=False)) as dataset:
        assert int(dataset[7]["row"]) == 7
        trainer.tokens.write_text("wrong-token")
        with pytest.raises(UnauthenticatedError, match="not known"):
            CacheClient(trainer.endpoint).datasets()
        trainer.tokens.write_text("second-token")
        assert int(dataset[8]["row"]) == 8
        again = pickle.loads(pickle.dumps(dataset))
        assert b"second-token" not in pickle.dumps(dataset)
    with again:
        assert int(again[9]["row"]) == 9
    trainer.tokens.write_text("first-token")


def test_a_caller_without_a_certificate_or_of_another_authority_gets_no_connection(
    trainer: SecureCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    foreign = Authority(tmp_path)
    cert, key = foreign.issue("trainer")
    mine = str(trainer.cert), str(trainer.key)
    for ca, own in (
        (trainer.ca, ("", "")),
        (trainer.ca, (str(cert), str(key))),
        (foreign.ca, mine),
    ):
        monkeypatch.setenv("CACHE_TLS_CA", str(ca))
        monkeypatch.setenv("CACHE_TLS_CERT", own[0])
        monkeypatch.setenv("CACHE_TLS_KEY", own[1])
        with pytest.raises(NodeUnavailableError):
            CacheClient(Connection(trainer.endpoint, deadline_s=5)).datasets()
    with (
        pytest.raises(grpc.RpcError),
        grpc.insecure_channel(
            trainer.nodes[0].control_location.removeprefix("grpc+tls://")
        ) as channel,
    ):
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
    with (
        pytest.raises(flight.FlightError),
        flight.connect(trainer.endpoint.replace("grpc+tls", "grpc")) as plain,
    ):
        list(plain.list_flights(options=flight.FlightCallOptions(timeout=5)))


def test_a_certificate_alone_says_who_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    source = write_numbered(tmp_path / "source", 50)
    principals = [
        {"name": f"node-{number}", "san": f"node-{number}.cache", "roles": ["node"]}
        for number in range(2)
    ]
    principals.append({"name": "ann", "san": "ann.team-a", "roles": ["writer"]})
    (tmp_path / "tokens.yaml").write_text(yaml.safe_dump({"principals": principals}))
    arguments = ["--auth-tokens", str(tmp_path / "tokens.yaml"), "--tls-ca", str(authority.ca)]
    settings = {"STORAGE_URI": str(source), "CACHE_DATASET": "table", "CACHE_REPLICAS": "2"}
    with env_nodes(tmp_path, 2, *arguments, "--require-client-cert", **settings) as nodes:
        for number, node in enumerate(nodes):
            own = authority.issue(f"node-{number}.cache")
            node.arguments += ["--tls-cert", str(own[0]), "--tls-key", str(own[1])]
            node.start(listening=False)
        for node in nodes:
            node.wait_until_listening()
        monkeypatch.setenv("CACHE_TLS_CA", str(authority.ca))
        for name, is_known in (("ann.team-a", True), ("eve.team-a", False)):
            cert, key = authority.issue(name)
            monkeypatch.setenv("CACHE_TLS_CERT", str(cert))
            monkeypatch.setenv("CACHE_TLS_KEY", str(key))
            client = CacheClient(nodes[0].endpoint)
            if is_known:
                wait_until(
                    lambda found=client: [i.state for i in found.datasets()] == ["ready"],
                    WAIT_S, "ready",
                )  # fmt: skip
                # Both nodes have joined: there are two replicas.
                client = CacheClient(nodes[1].endpoint)
                assert client.head("table", 3)["row"].to_pylist() == [0, 1, 2]
            else:
                with pytest.raises(UnauthenticatedError, match=name):
                    client.datasets()


def test_a_local_cluster_has_a_token_that_only_its_user_finds() -> None:
    with LocalCluster(1) as cluster:
        assert cluster.token is not None and cluster.token not in repr(cluster)
        assert find_token(cluster.endpoint) == cluster.token
        assert ranks.find_credentials(cluster.endpoint).token == cluster.token
        assert cluster.token not in repr(ranks.find_credentials(cluster.endpoint))
        directory = credentials._directory()
        mode = (
            directory.stat().st_mode
            | (directory / cluster.endpoint.rpartition(":")[2]).stat().st_mode
        )
        assert not mode & 0o077
        assert cluster.token not in cluster.nodes[0].log_tail()
        with pytest.raises(UnauthenticatedError):
            CacheClient(Connection(cluster.endpoint, token="guessed")).datasets()
        assert CacheClient(cluster.endpoint).datasets() == []
        endpoint = cluster.endpoint
    assert find_token(endpoint) is None


def test_bad_credentials_are_named_and_never_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spaced = tmp_path / "token"
    spaced.write_text("s3cret with spaces")
    here = "grpc://127.0.0.1:1"
    for settings, words in (
        ({"token": "a", "token_file": "b"}, "exclude each other"),
        ({"token": "s3 cret"}, "printable ASCII"),
        ({"token": ""}, "not empty"),
        ({"token_file": "/nowhere"}, "cannot read /nowhere"),
        ({"token_file": spaced}, "printable ASCII"),
        ({"tls_ca": "/nowhere"}, "cannot read /nowhere"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            CacheClient(Connection(here, **settings))  # type: ignore[arg-type]
        assert "s3" not in str(caught.value)
    monkeypatch.setenv("CACHE_TLS_CERT", str(spaced))
    with pytest.raises(ConfigError, match="tls_cert and tls_key"):
        CacheClient(here)
