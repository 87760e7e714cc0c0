"""Where etcd is, and what it answers when it is not well."""

from __future__ import annotations

import base64
import json
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cache_protocol.errors import ConfigError
from cache_server.auth.etcd import Etcd
from cache_server.election import etcd as etcd_module
from cache_server.election.etcd import EtcdStore
from cache_server.election.lease import DURATION_S
from cache_server.election.objects import ConflictError, RefusedError, StoredMap
from tests.certificates import Authority
from tests.etcd_server import EtcdServer
from tests.free_ports import free_port
from tests.waiting import wait_until

USER, PASSWORD = "cache", secrets.token_urlsafe(8)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, Etcd()),
        (
            {"ETCDCTL_ENDPOINTS": "a:1, http://b:2", "ETCDCTL_USER": "me:a:b"},
            Etcd(("http://a:1", "http://b:2"), user="me", password="a:b"),
        ),
        (
            {"ETCDCTL_CACERT": "ca", "ETCDCTL_CERT": "c", "ETCDCTL_KEY": "k"},
            Etcd(("https://127.0.0.1:2379",), "ca", "c", "k"),
        ),
        (
            {"ETCDCTL_ENDPOINTS": "[::1]:2379", "ETCDCTL_USER": "me", "ETCDCTL_PASSWORD": "x"},
            Etcd(("http://[::1]:2379",), user="me", password="x"),
        ),
    ],
)
def test_etcd_is_found_as_etcdctl_finds_it(environment: dict[str, str], found: Etcd) -> None:
    assert Etcd.from_env(environment) == found
    assert found.password is None or found.password not in repr(found)


@pytest.mark.parametrize("bad", ["host", "ftp://host:1", "a:1,,b:2", "http://host:x", "host:0"])
def test_an_endpoint_that_is_no_address_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="ETCDCTL_ENDPOINTS must be addresses such as"):
        Etcd.from_env({"ETCDCTL_ENDPOINTS": bad})


def test_a_file_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ETCDCTL_CACERT"):
        EtcdStore(Etcd(ca_file=str(tmp_path / "missing")), "cache")


def test_the_keys_are_below_the_name_of_the_cache(etcd: EtcdServer) -> None:
    store = EtcdStore(Etcd((etcd.endpoint,)), "one")
    store.write_lease(None, "me", DURATION_S)
    store.write_map(StoredMap("one-catalogue", b"x"))
    assert etcd.all_keys() == {
        "/trainer-data-cache/one/lease",
        "/trainer-data-cache/one/maps/one-catalogue",
    }
    assert EtcdStore(Etcd((etcd.endpoint,)), "other").read_lease() is None


def test_more_documents_than_one_answer_takes_are_all_read(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "_PAGE", 3)
    store = EtcdStore(Etcd((etcd.endpoint,)), "cache")
    made = [store.write_map(StoredMap(f"cache-{n}", bytes([n]))) for n in range(7)]
    assert [*store.maps()] == made
    assert [*EtcdStore(Etcd((etcd.endpoint,)), "cach").maps()] == []


def test_an_old_revision_changes_nothing(etcd: EtcdServer) -> None:
    store = EtcdStore(Etcd((etcd.endpoint,)), "cache")
    first = store.write_lease(None, "a", DURATION_S)
    second = store.write_lease(first, "b", DURATION_S)
    for before in (None, first):
        with pytest.raises(ConflictError, match="another revision"):
            store.write_lease(before, "c", DURATION_S)
    assert store.read_lease() == second
    assert (second.holder, second.transitions) == ("b", 1)


def test_a_document_that_is_too_large_is_refused(etcd: EtcdServer) -> None:
    store = EtcdStore(Etcd((etcd.endpoint,)), "cache")
    with pytest.raises(RefusedError, match="too large"):
        store.write_map(StoredMap("cache-large", bytes(1_200_000)))
    assert [*store.maps()] == []


def test_the_next_endpoint_is_asked_once_one_does_not_answer(etcd: EtcdServer) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    store = EtcdStore(Etcd((nobody, etcd.endpoint)), "cache")
    with pytest.raises(OSError, match=f"etcd at {nobody} does not answer"):
        store.read_lease()
    for _ in range(3):
        assert store.read_lease() is None


def test_an_etcd_that_hangs_is_given_up_within_the_deadline(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "LEASE_TIMEOUT_S", (0.2, 0.2))
    store = EtcdStore(Etcd((etcd.endpoint,)), "cache")
    process = psutil.Process(etcd.process.pid)
    process.suspend()
    try:
        with pytest.raises(OSError, match="does not answer"):
            store.read_lease()
    finally:
        process.resume()
    assert store.read_lease() is None


def test_an_answer_has_its_own_time_after_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_module, "LEASE_TIMEOUT_S", (0.1, 0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = EtcdStore(Etcd((f"http://127.0.0.1:{silent.getsockname()[1]}",)), "cache")
        with pytest.raises(OSError, match=r"read timeout=0\.3"):
            store.read_lease()


def answers(store: EtcdStore) -> bool:
    try:
        return store.read_lease() is None
    except OSError:
        return False


@pytest.fixture
def with_users(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "etcd") as server:
        server.require_user(USER, PASSWORD)
        yield server


def test_a_user_logs_in_and_again_when_its_token_is_forgotten(with_users: EtcdServer) -> None:
    store = EtcdStore(Etcd((with_users.endpoint,), user=USER, password=PASSWORD), "cache")
    made = store.write_map(StoredMap("cache-one", b"x"))
    with_users.stop()  # tokens are in its memory
    with_users.start()
    assert store.read_map("cache-one") == made


@pytest.mark.parametrize("user", [None, USER])
def test_a_wrong_password_or_no_user_is_named(with_users: EtcdServer, user: str | None) -> None:
    store = EtcdStore(Etcd((with_users.endpoint,), user=user, password="wrong"), "cache")
    with pytest.raises(OSError, match=r"authentication failed|user name is empty") as raised:
        store.read_lease()
    assert "wrong" not in str(raised.value)


def test_etcd_with_tls_is_asked_with_a_certificate(tmp_path: Path) -> None:
    issuer = Authority(tmp_path)
    server, key = issuer.issue("server")
    mine, my_key = issuer.issue("client")
    authority = str(issuer.ca)
    tls = ("--cert-file", str(server), "--key-file", str(key), "--client-cert-auth")
    with EtcdServer(tmp_path / "etcd", "https", [*tls, "--trusted-ca-file", authority]) as etcd:
        store = EtcdStore(Etcd((etcd.endpoint,), authority, str(mine), str(my_key)), "cache")
        wait_until(lambda: answers(store), 30, "etcd answers")
        assert store.write_lease(None, "me", DURATION_S) == store.read_lease()
        without = EtcdStore(Etcd((etcd.endpoint,), authority), "cache")
        with pytest.raises(OSError, match="does not answer"):
            without.read_lease()


@pytest.mark.parametrize("value", ["not JSON", "[]", '{"holder": "me"}'])
def test_a_value_of_another_program_is_named(etcd: EtcdServer, value: str) -> None:
    store = EtcdStore(Etcd((etcd.endpoint,)), "cache")
    for key in ("lease", "maps/cache-one"):
        name = f"/trainer-data-cache/cache/{key}"
        encoded = {
            part: base64.b64encode(text.encode()).decode()
            for part, text in (("key", name), ("value", value))
        }
        etcd.call("kv/put", encoded)
        with pytest.raises(OSError, match=f"the value of {name} in etcd is not of this cache"):
            store.read_lease() if key == "lease" else store.read_map("cache-one")


def test_a_lease_of_a_later_release_is_read(etcd: EtcdServer) -> None:
    store = EtcdStore(Etcd((etcd.endpoint,)), "cache")
    made = store.write_lease(None, "me", DURATION_S)
    (entry,) = etcd.call(
        "kv/range", {"key": base64.b64encode(b"/trainer-data-cache/cache/lease").decode()}
    )["kvs"]
    later = {**json.loads(base64.b64decode(entry["value"])), "later": 1}
    etcd.call(
        "kv/put",
        {"key": entry["key"], "value": base64.b64encode(json.dumps(later).encode()).decode()},
    )
    found = store.read_lease()
    assert found is not None and found.holder == made.holder
