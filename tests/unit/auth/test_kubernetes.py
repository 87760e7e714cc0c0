"""Pods of a cluster -> principals: by their tokens and the keys of its API server."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import jwt
import pytest

from cache_protocol.errors import ConfigError, NodeUnavailableError, UnauthenticatedError
from cache_protocol.wire.credentials import Credentials
from cache_server.auth import jwt_tokens
from cache_server.auth.authenticator import Authenticator
from cache_server.auth.kubernetes import Cluster
from cache_server.auth.principals import Role
from cache_server.config import NodeConfig
from tests.certificates import Authority
from tests.json_web_tokens import KEY, bearer, jwks
from tests.store_stubs import Served
from tests.waiting import wait_until

RULES = ("node,writer:job-dataset-initializer-0-*", "writer:job-node-0-*", "reader:*")


class ApiServer(BaseHTTPRequestHandler):
    """Shows its keys to callers with a token of its own audience, as Kubernetes does."""

    asked = 0
    answers = threading.Event()
    answers.set()

    def do_GET(self) -> None:
        type(self).asked += 1
        self.answers.wait(30)
        known = self.headers["Authorization"] == "Bearer of-the-api"
        found = known and self.path == "/openid/v1/jwks"
        self.send_response(200 if found else 401)
        self.end_headers()
        self.wfile.write(jwks(one=KEY).encode() if found else b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


def token(
    namespace: str = "team-a", pod: str | None = "job-node-0-1-x7k2p", **changed: object
) -> str:
    """A token as TokenRequest makes it; ``pod=None``: of a ServiceAccount alone."""
    in_cluster: dict[str, Any] = {"namespace": namespace, "serviceaccount": {"name": "default"}}
    if pod is not None:
        in_cluster["pod"] = {"name": pod, "uid": "1"}
    claims = {
        "iss": "https://oidc.example.com/id/7",
        "aud": ["data-cache"],
        "sub": f"system:serviceaccount:{namespace}:default",
        "exp": time.time() + 600,
        "kubernetes.io": in_cluster,
        **changed,
    }
    return jwt.encode(claims, KEY, "RS256", headers={"kid": "one"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the kubelet mounts into a pod."""
    folder = tmp_path_factory.mktemp("serviceaccount")
    (folder / "token").write_text("of-the-api")
    return folder


@pytest.fixture(scope="module")
def tls(folder: Path) -> ssl.SSLContext:
    authority = Authority(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.issue("kubernetes"))
    authority.ca.rename(folder / "ca.crt")
    return context


@pytest.fixture(scope="module")
def cluster(folder: Path, tls: ssl.SSLContext) -> Iterator[Cluster]:
    with Served(ApiServer, tls) as address:
        host, port = address.removeprefix("https://").split(":")
        environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        yield Cluster.from_env(environ, folder)


@pytest.fixture
def own(tmp_path: Path) -> Credentials:
    file = tmp_path / "token"
    file.write_text(token(pod="job-dataset-initializer-0-0-bcdfg"))
    return Credentials(token_file=str(file))


def test_pods_of_a_job_are_told_apart_and_those_of_other_namespaces_are_refused(
    cluster: Cluster, own: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # for sources, not for the API server
    found = Authenticator(own=own, pods=RULES, cluster=cluster)
    roles = {
        pod: found.authenticate(bearer(token(pod=pod)), "").roles
        for pod in (
            *("job-dataset-initializer-0-1-x7k2p", "job-node-0-0-x7k2p"),
            *("job-2-node-0-0-x7k2p", None),  # of another job; of no pod
        )
    }
    assert list(roles.values()) == [
        {Role.NODE, Role.WRITER},
        {Role.WRITER},
        {Role.READER},
        {Role.READER},
    ]
    assert found.authenticate(bearer(token()), "").namespace == "team-a"
    refused = {
        "another namespace": token("team-b"),
        "a namespace that begins alike": token("team-ab"),
        "the audience of the API server": token(aud="https://kubernetes.default.svc"),
        "another issuer": token(iss="https://oidc.example.com/id/8"),
        "expired": token(exp=time.time() - 60),
    }
    for what, each in refused.items():
        with pytest.raises(UnauthenticatedError):
            pytest.fail(f"{what}: {found.authenticate(bearer(each), '')}")
    assert ApiServer.asked == 1


def test_a_pod_that_replaces_another_one_is_the_same_process_to_a_cache(
    cluster: Cluster, own: Credentials
) -> None:
    found = Authenticator(own=own, pods=RULES, cluster=cluster)

    def process(pod: str) -> str:
        return found.authenticate(bearer(token(pod=pod)), "").process

    first = process("job-dataset-initializer-0-1-x7k2p")
    assert process("job-dataset-initializer-0-1-29vwz") == first  # of a Job
    assert process("job-dataset-initializer-0-0-x7k2p") != first
    assert process("job-cache-1") != process("job-cache-2")  # of a StatefulSet


def test_rules_of_a_file_count_from_when_it_changes(
    cluster: Cluster, own: Credentials, tmp_path: Path
) -> None:
    file = tmp_path / "auth.yaml"
    file.write_text('rules: [{subject: "system:serviceaccount:team-a:*", roles: [reader]}]')
    found = Authenticator(jwt=file, own=own, cluster=cluster)
    assert found.authenticate(bearer(token()), "").roles == {Role.READER}
    with pytest.raises(UnauthenticatedError, match="no rule"):
        found.authenticate(bearer(token("team-b")), "")
    file.write_text('rules: [{subject: "system:serviceaccount:*", roles: [writer]}]')
    assert found.authenticate(bearer(token("team-b")), "").namespace == "team-b"


def test_what_a_pod_lacks_is_named_at_the_start(
    cluster: Cluster, own: Credentials, tmp_path: Path
) -> None:
    lacks: list[tuple[dict[str, Any], str]] = [
        ({"own": Credentials("no-jwt"), "cluster": cluster}, "projected ServiceAccount token"),
        ({"own": None, "cluster": cluster}, "projected ServiceAccount token"),
        ({"own": Credentials(token(**{"kubernetes.io": 7}))}, "no Kubernetes namespace"),
        ({"own": own, "cluster": Cluster.from_env({}, tmp_path)}, "this is no pod"),
        ({"own": own, "cluster": Cluster("https://h:1", tmp_path / "no")}, "no/token"),
    ]
    for given, words in lacks:
        with pytest.raises(ConfigError, match=words):
            Authenticator(pods=RULES, **given)
    for bad in ("node", "root:job-*", "node:", ":job-*", "node,:job-*"):
        with pytest.raises(ConfigError, match=f"got '{bad}'".replace("*", r"\*")):
            Authenticator(pods=(bad,), own=own, cluster=cluster)
    with pytest.raises(ConfigError, match=r"cannot be combined with auth_jwt, got reader:\*"):
        NodeConfig.build(cache_dir="c", auth_jwt="a.yaml", auth_pods=("reader:*",))


def test_while_the_api_server_does_not_answer_callers_may_try_again(
    own: Credentials, cluster: Cluster
) -> None:
    nowhere = cluster._replace(address="https://127.0.0.1:9")
    found = Authenticator(own=own, pods=RULES, cluster=nowhere)
    with pytest.raises(NodeUnavailableError, match="not fetched yet"):
        found.authenticate(bearer(token()), "")


@pytest.mark.parametrize(
    ("head", "repeated", "reason"),
    [
        (b"HTTP/1.0 200 OK\r\nA: ", b"a", "timed out"),
        (b"HTTP/1.0 200 OK\r\n\r\n", b" ", "timed out"),
        (b"nonsense\r\n", b"", "nonsense"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000, b"", "not a set of JSON web keys"),
    ],
    ids=["slow head", "slow body", "no HTTP", "deep JSON"],
)
def test_a_bad_answer_with_keys_is_refused_in_time(
    head: bytes,
    repeated: bytes,
    reason: str,
    own: Credentials,
    cluster: Cluster,
    tls: ssl.SSLContext,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = threading.Event()

    class BadServer(ApiServer):
        def do_GET(self) -> None:
            with suppress(OSError):  # the caller goes
                self.wfile.write(head)
                while repeated and not ended.wait(0.02):
                    self.wfile.write(repeated)

    monkeypatch.setattr(jwt_tokens, "_FETCH_TIMEOUT_S", 0.3)
    with Served(BadServer, tls) as address:
        found = Authenticator(own=own, pods=RULES, cluster=cluster._replace(address=address))
        try:
            with pytest.raises(NodeUnavailableError, match="not fetched yet"):
                found.authenticate(bearer(token()), "")
        finally:
            ended.set()
    assert reason in caplog.text


def test_while_keys_are_fetched_again_callers_with_a_known_key_do_not_wait(
    own: Credentials, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Authenticator(own=own, pods=RULES, cluster=cluster)
    found.authenticate(bearer(token()), "")
    for name in ("_KEYS_LIVE_S", "_RETRY_S"):
        monkeypatch.setattr(jwt_tokens, name, 0.0)
    asked = ApiServer.asked
    ApiServer.answers.clear()
    fetching = threading.Thread(target=found.authenticate, args=(bearer(token()), ""))
    try:
        fetching.start()
        wait_until(lambda: ApiServer.asked > asked, 10, "the fetch")
        assert found.authenticate(bearer(token()), "").namespace == "team-a"
        assert fetching.is_alive()
    finally:
        ApiServer.answers.set()
        fetching.join()


def test_an_address_of_version_6_gets_brackets() -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    assert Cluster.from_env(environ, Path("d")) == Cluster("https://[fd00::1]:443", Path("d"))
