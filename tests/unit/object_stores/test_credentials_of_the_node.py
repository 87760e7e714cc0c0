"""The credentials of a node go to no address that a caller names."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.datasets.source_options import STORES, Form
from cache_protocol.errors import CacheError, RequestError
from cache_server.object_stores.client import Location
from cache_server.object_stores.connections import client_for, pass_for, refuse_foreign
from cache_server.object_stores.hub import HubClient, hub_location
from cache_server.object_stores.options import store_settings
from cache_server.tables import delta, iceberg_catalogs
from cache_server.tables.postgres.session import Address
from tests.checked_network import checked_network

URIS = {"s3": "s3://b/k", "gs": "gs://b/k", "az": "az://c/k", "http": "http://h.example/k",
        "hf": "hf://datasets/o/n/k"}  # fmt: skip
FAST = {"max_retries": "0", "retry_timeout_s": "1"}
FOREIGN = "https://store.example"
# Each has a mark that the listener looks for: a secret, or the name that a signature carries.
OF_NODE: dict[str, list[dict[str, str]]] = {
    "s3": [{"AWS_ACCESS_KEY_ID": "NODE1", "AWS_SECRET_ACCESS_KEY": "NODE2",
            "AWS_SESSION_TOKEN": "NODE3", "AWS_REGION": "us-east-1"}],
    "gs": [{"GOOGLE_BEARER_TOKEN": "NODE4"}],
    "az": [{"AZURE_STORAGE_ACCOUNT_KEY": "Tk9ERQ==", "AZURE_STORAGE_ACCOUNT_NAME": "NODE5"},
           {"AZURE_STORAGE_TOKEN": "NODE6"},
           {"AZURE_STORAGE_SAS_KEY": "sig=NODE7"},
           {"AZURE_CLIENT_ID": "NODE8", "AZURE_CLIENT_SECRET": "NODE9", "AZURE_TENANT_ID": "t"},
           {"AZURE_CLIENT_ID": "NODE10", "AZURE_FEDERATED_TOKEN_FILE": "FILE",
            "AZURE_TENANT_ID": "t"}],
    "hf": [{"HF_TOKEN": "NODE12"}],
}  # fmt: skip


def key_of_google() -> str:
    private = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return json.dumps({"type": "service_account", "private_key": private.decode(),
                       "private_key_id": "x", "client_email": "own@example.com"})  # fmt: skip


OWN = {"account_key": "b3du", "sas_key": "sig=own", "tenant_id": "own"}


def own(group: tuple[str, ...]) -> dict[str, str]:
    """Credentials of a caller."""
    return {
        name: key_of_google() if name == "service_account_key" else OWN.get(name, "own")
        for name in group
    }


def addresses() -> Iterator[tuple[str, str]]:
    """Each name of each option that is an address, by its store."""
    for kind, store in STORES.items():
        for option in store.options:
            if option.form is Form.ADDRESS:
                for name in (option.name, *option.also):
                    yield kind, name


def check(kind: str, options: Mapping[str, str], environ: Mapping[str, str] | None = None) -> None:
    if kind == "hf":
        refuse_foreign(kind, store_settings(kind, options, {}), environ or {})
    else:
        pass_for(Location.of(URIS[kind]), options, {}, mixes=False)


@pytest.mark.parametrize(("kind", "name"), [*addresses()])
def test_an_address_needs_credentials_of_its_caller(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = STORES[kind]
    with checked_network():
        with pytest.raises(RequestError, match=rf"does not send.*give .*\({store.variable}\)"):
            check(kind, {name: FOREIGN})
        for group in store.credentials:
            if len(group) > 1:
                with pytest.raises(RequestError, match="does not send"):
                    check(kind, {name: FOREIGN, group[0]: "own"})
            check(kind, {name: FOREIGN, **own(tuple(group))})
        if store.find("skip_signature"):
            check(kind, {name: FOREIGN, "skip_signature": "true"})
            with pytest.raises(RequestError, match="does not send"):
                check(kind, {name: FOREIGN, "skip_signature": "false"})
        monkeypatch.setenv(store.variable, FOREIGN)
        check(kind, {name: FOREIGN}, {store.variable: FOREIGN})
        with pytest.raises(RequestError, match="does not send"):
            check(kind, {name: f"{FOREIGN}:8443"}, {store.variable: FOREIGN})
    check(kind, {name: FOREIGN}, {store.variable: FOREIGN})  # a cache that allows everything


def test_every_store_has_a_rule_for_its_addresses() -> None:
    assert set(STORES) == set(URIS)
    for kind, _ in addresses():
        assert STORES[kind].credentials
        assert STORES[kind].variable


def test_the_host_of_an_account_is_an_address_too() -> None:
    with checked_network():
        for host in ("x.dfs.core.windows.net", "x.dfs.fabric.microsoft.com", "x"):
            pass_for(Location.of(f"abfss://c@{host}/k"), {}, {}, mixes=False)
        with pytest.raises(RequestError, match=r"the source names https://x\.evil\.example"):
            pass_for(Location.of("abfss://c@x.evil.example/k"), {}, {}, mixes=False)


def test_the_password_of_the_node_goes_to_its_own_database_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGPASSWORD", "NODE")
    theirs, ours = "93.184.216.34", "93.184.216.35"
    monkeypatch.setenv("PGHOST", ours)
    with checked_network():
        Address({"host": ours}).uri({})
        assert "password=own" in Address({"host": theirs}).uri({"password": "own"})
        for hosts in (theirs, f"{ours},{theirs}"):
            with pytest.raises(RequestError, match=rf"names {theirs}, .* password of its nodes"):
                Address({"host": hosts}).uri({})


def test_a_catalogue_gets_no_signature_of_the_node() -> None:
    options = {"catalog.uri": FOREIGN, "catalog.rest.sigv4-enabled": "true"}
    with (
        checked_network(),
        pytest.raises(RequestError, match=r"sigv4-enabled' would sign with the credentials"),
    ):
        iceberg_catalogs.opened(iceberg_catalogs.settings_of(options, {}))


class Listener:
    """Keeps the first bytes of each connection, and answers that there is nothing."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(1)
                data = b""
                while b"\r\n\r\n" not in data and (piece := connection.recv(65536)):
                    data += piece
                self.seen.append(data)
                connection.sendall(
                    b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )

    def close(self) -> None:
        self._socket.close()


def read(kind: str, reader: str, options: dict[str, Any]) -> None:
    if reader == "delta":
        spec = DatasetSpec("t", URIS[kind], format="delta", storage_options=options)
        delta.pin(spec.tables[0])
    elif kind == "hf":
        HubClient(hub_location(URIS[kind], options), options, {}).head("k")
    else:
        client_for(Location.of(URIS[kind]), options, {}).head("k")


READS = [(kind, reader) for kind in ("s3", "gs", "az") for reader in ("obstore", "delta")]


@pytest.mark.parametrize(("kind", "reader"), [*READS, ("hf", "huggingface_hub")])
def test_a_server_of_a_caller_sees_no_credentials_of_the_node(
    kind: str, reader: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the node has, and whatever the caller gives."""
    names = [option.name for option in STORES[kind].options if option.form is Form.ADDRESS]
    groups: list[dict[str, str]] = [own(tuple(group)) for group in STORES[kind].credentials]
    groups += [{}, {"skip_signature": "true"}] if kind != "hf" else [{}]
    if (kind, reader) == ("s3", "obstore"):
        groups.append({**groups[0], "imdsv1_fallback": "true"})
        groups.append({**groups[0], "role_arn": "arn:aws:iam::1:role/x"})
    token = tmp_path / "token"
    token.write_text("NODE11")
    with closing(Listener()) as listener, checked_network(f"{listener.address}/"):
        arrived = 0
        for variables in OF_NODE[kind]:
            with monkeypatch.context() as environment:
                for name, value in variables.items():
                    environment.setenv(name, value.replace("FILE", str(token)))
                for name, group in product(names, groups):
                    listener.seen.clear()
                    options = {**FAST, name: listener.address, **group}
                    if kind == "az":
                        options |= {"account_name": "own", "allow_http": "true"}
                    with suppress(CacheError):
                        read(kind, reader, options)
                    text = b"".join(listener.seen)
                    arrived += bool(text)
                    assert b"NODE" not in text, (variables, name, group, text)
                    assert group or not text, (variables, name, text)
                    if "account_key" not in group:
                        assert b"SharedKey" not in text, (variables, name, group, text)
        assert arrived
