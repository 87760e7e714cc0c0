"""Tokens, certificates and JSON web tokens -> principals."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from cache_protocol.errors import (
    ConfigError,
    NodeUnavailableError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from cache_protocol.wire.credentials import Credentials
from cache_server.auth import authenticator as module
from cache_server.auth.authenticator import Authenticator, Caller
from cache_server.auth.principals import ANYONE, Principal, Role
from tests.json_web_tokens import KEY, bearer, jwks

ISSUER = "https://kubernetes.default.svc"
PODS = "system:serviceaccount:team-a:trainer"


def entry(name: str, **fields: object) -> dict[str, object]:
    return {"name": name, "roles": ["reader"], **fields}


def of_token(name: str, token: str, **fields: object) -> dict[str, object]:
    return entry(name, sha256=hashlib.sha256(token.encode()).hexdigest(), **fields)


def write(path: Path, *entries: dict[str, object]) -> Path:
    """Replaces a file of principals, as a Secret is replaced; JSON is YAML."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"principals": entries}))
    new.replace(path)
    return path


def test_a_cache_without_a_source_of_identity_lets_everyone_do_everything() -> None:
    assert Authenticator().authenticate({}, "") is ANYONE
    assert Authenticator(own=Credentials()).is_open


def test_a_token_of_the_node_alone_is_shared_by_the_whole_cache(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    shared = Authenticator(own=Credentials(token_file=str(file)))

    found = shared.authenticate(bearer("first"), "")
    assert found.roles == {Role.ADMIN, Role.NODE}
    file.write_text("second token\n".replace(" ", "-"))
    assert shared.authenticate(bearer("second-token"), "").name == found.name
    for wrong in ({}, bearer("first"), bearer(""), {"authorization": "Basic second-token"}):
        with pytest.raises(UnauthenticatedError) as caught:
            shared.authenticate(wrong, "any.certificate")
        assert "second" not in str(caught.value)


def test_a_file_of_principals_names_the_holders_of_tokens_and_certificates(tmp_path: Path) -> None:
    file = write(
        tmp_path / "tokens.yaml",
        of_token("alice", "a-token", namespace="team-a", roles=["writer"]),
        entry("node-0", san="node-0.cache", roles=["node"]),
    )
    found = Authenticator(file, own=Credentials("a-node's-own"))

    assert found.authenticate(bearer("a-token"), "") == Principal(
        "alice", "team-a", frozenset({Role.WRITER})
    )
    assert found.authenticate({}, "node-0.cache").roles == {Role.NODE}
    # A wrong token is not saved by a certificate, and the token of the node is one of the file.
    for headers, peer in (
        (bearer("b-token"), "node-0.cache"),
        (bearer("a-node's-own"), ""),
        ({}, "node-1.cache"),
        ({}, ""),
    ):
        with pytest.raises(UnauthenticatedError):
            found.authenticate(headers, peer)


def test_a_changed_file_counts_at_once_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "tokens.yaml", of_token("alice", "old-token"))
    found = Authenticator(file)
    assert found.authenticate(bearer("old-token"), "").name == "alice"

    write(file, of_token("alice", "new-token-1"), of_token("bob", "b"))
    with pytest.raises(UnauthenticatedError):
        found.authenticate(bearer("old-token"), "")
    for broken in ("principals: [", "principals: 1", None):
        file.unlink() if broken is None else file.write_text(broken)
        assert found.authenticate(bearer("new-token-1"), "").name == "alice"
        assert found.authenticate(bearer("b"), "").name == "bob"
    assert caplog.text.count("file not read again") == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["the file"]),
        ("principals: [{name: a, roles: [reader]}]", ["sha256 or san"]),
        ("principals: [{name: a, sha256: s3cret, roles: [reader]}]", ["principals.0.sha256"]),
        ("principals: [{name: a, san: x, roles: [root]}]", ["principals.0.roles", "admin"]),
        ("principals: [{name: a, san: x, roles: []}]", ["principals.0.roles"]),
        ("principals: [{name: a, san: x, roles: [node], namespace: a/b}]", ["namespace"]),
        ("principals: [{name: a, san: x, roles: [node], tokn: s3cret}]", ["tokn"]),
        ("a: 1\na: 2", ["not YAML", "repeated"]),
    ],
)
def test_a_bad_file_of_principals_is_refused_without_its_values(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Authenticator(file)
    assert all(word in str(caught.value) for word in (*words, str(file)))
    assert "s3cret" not in str(caught.value)


def test_a_long_stream_loses_its_caller_when_the_token_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "tokens.yaml", of_token("alice", "token"))
    caller = Caller(Authenticator(file), "flight DO_EXCHANGE", bearer("token"), "")
    write(file, of_token("alice", "another-token"))

    assert caller.still_allowed().name == "alice"  # checked a moment ago
    monkeypatch.setattr(module, "RECHECK_S", -1.0)
    with pytest.raises(UnauthenticatedError):
        Caller(Authenticator(file), "flight DO_EXCHANGE", bearer("token"), "")
    renewed = Caller(Authenticator(file), "flight DO_EXCHANGE", bearer("another-token"), "")
    write(file, of_token("bob", "token"))
    with pytest.raises(UnauthenticatedError):
        renewed.still_allowed()


def test_a_verb_without_a_rule_is_refused_even_without_authentication() -> None:
    with pytest.raises(PermissionDeniedError, match="grpc /new/Verb has no rule"):
        Caller(Authenticator(), "grpc /new/Verb", {}, "")


# -- JSON web tokens ---------------------------------------------------------------------------

OTHER_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def claims(**changed: object) -> dict[str, object]:
    """Those of a projected token of a pod."""
    return {
        "iss": ISSUER,
        "aud": ["data-cache"],
        "sub": PODS,
        "exp": time.time() + 600,
        "kubernetes.io": {"namespace": "team-a", "pod": {"name": "job-node-0-1-x7k2p"}},
        **changed,
    }


def signed(
    key: Any = KEY, kid: str | None = "one", algorithm: str = "RS256", **changed: Any
) -> str:
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode(claims(**changed), key, algorithm, headers=headers)


@pytest.fixture
def verifier(tmp_path: Path) -> Callable[..., Authenticator]:
    def make(**settings: object) -> Authenticator:
        keys = tmp_path / "jwks.json"
        keys.write_text(jwks(one=KEY))
        values = {
            "issuer": ISSUER,
            "jwks": str(keys),
            "rules": [
                {"subject": "system:serviceaccount:team-?:trainer", "roles": ["writer"]},
                {"subject": "system:serviceaccount:*:cache-node", "roles": ["node"]},
                {"subject": "ci", "roles": ["reader"], "namespace": "ci"},
                {"subject": "lost", "roles": ["reader"]},
            ],
            **settings,
        }
        path = tmp_path / "jwt.yaml"
        path.write_text(json.dumps(values))
        return Authenticator(jwt=path)

    return make


def test_a_projected_token_gives_namespace_pod_and_the_roles_of_its_account(
    verifier: Callable[..., Authenticator],
) -> None:
    found = verifier().authenticate(bearer(signed()), "")

    assert (found.name, found.namespace, found.roles) == (PODS, "team-a", {Role.WRITER})
    assert found.instance == "job-node-0-1"  # what a pod that replaces it has, too
    assert found.expires_at == pytest.approx(time.time() + 600, abs=60)
    assert verifier().authenticate(bearer(signed(sub="ci")), "").namespace == "ci"


def test_what_is_no_token_of_this_issuer_audience_key_and_time_is_refused(
    verifier: Callable[..., Authenticator],
) -> None:
    lacking = claims()
    del lacking["exp"]
    bad = {
        "no token at all": "x",
        "three parts of nothing": "a.b.c",
        "expired": signed(exp=time.time() - 60),
        "another audience": signed(aud="https://kubernetes.default.svc"),
        "another issuer": signed(iss="https://elsewhere"),
        "another key": signed(OTHER_KEY),
        "an unknown key": signed(kid="two"),
        "no end": jwt.encode(lacking, KEY, "RS256", headers={"kid": "one"}),
        "no signature": jwt.encode(claims(), None, "none", headers={"kid": "one"}),
        "a shared secret": signed("s" * 64, algorithm="HS256"),
        "another kind of key": signed(ec.generate_private_key(ec.SECP256R1()), algorithm="ES256"),
        "no rule": signed(sub="system:serviceaccount:kube-system:default"),
        "no namespace": signed(**{"sub": "lost", "kubernetes.io": None}),
        "a namespace that is no text": signed(**{"kubernetes.io": {"namespace": 7}}),
    }
    found = verifier()
    accepted = []
    for what, token in bad.items():
        try:
            found.authenticate(bearer(token), "")
            accepted.append(what)
        except UnauthenticatedError as error:
            assert token not in str(error) or token == "x"
    assert accepted == []


def test_keys_of_a_file_are_read_again(
    verifier: Callable[..., Authenticator], tmp_path: Path
) -> None:
    found = verifier()
    new = tmp_path / "new.json"
    new.write_text(jwks(one=KEY, two=OTHER_KEY))
    os.replace(new, tmp_path / "jwks.json")

    assert found.authenticate(bearer(signed(OTHER_KEY, kid="two")), "").name == PODS


def test_keys_of_an_address_are_fetched_once_and_for_unknown_keys_at_most_twice_a_minute(
    verifier: Callable[..., Authenticator], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cache_server.auth import jwt_tokens

    answers: list[str | OSError] = [OSError("refused"), jwks(one=KEY)]
    now = [0.0]

    def fetch(_: object) -> str:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(jwt_tokens._FetchedKeys, "_fetch", fetch)
    monkeypatch.setattr(jwt_tokens.time, "monotonic", lambda: now[0])
    found = verifier(jwks="https://kubernetes.default.svc/openid/v1/jwks")
    with pytest.raises(NodeUnavailableError, match="not fetched yet"):
        found.authenticate(bearer(signed()), "")
    now[0] += 31
    for _ in range(3):
        assert found.authenticate(bearer(signed()), "").name == PODS
        with pytest.raises(UnauthenticatedError, match="not one of the issuer's"):
            found.authenticate(bearer(signed(kid="made-up")), "")
    assert answers == []
    with pytest.raises(ConfigError, match="jwks must be a file or https://"):
        verifier(jwks="http://kubernetes.default.svc/openid/v1/jwks")
