"""Which versions of the protocol work together, and what the others are told."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from cache_protocol.errors import RequestError
from cache_protocol.wire import protocol_version
from cache_protocol.wire.credentials import Credentials
from cache_protocol.wire.protocol_version import PROTOCOL, check_caller, check_server


def of(number: int) -> Mapping[str, str]:
    return {"cache-protocol": str(number)}


@pytest.mark.parametrize("number", [PROTOCOL - 1, PROTOCOL, PROTOCOL + 1])
def test_neighbours_work_together(number: int) -> None:
    check_caller(of(number), "client", is_ours=True)
    check_server(number, "the cache", "client")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (PROTOCOL - 2, "the client is too old for this cache: it speaks protocol 0, and this "),
        (PROTOCOL + 2, "the client is too new for this cache: it speaks protocol 4, and this "),
        (PROTOCOL + 2, "update this cache first, or install trainer-data-cache "),
        (PROTOCOL - 2, " in the image or environment of the client"),
    ],
)
def test_a_caller_that_is_too_far_is_refused_with_both_versions(number: int, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as raised:
        check_caller(of(number), "client", is_ours=True)
    assert f"protocol {PROTOCOL}" in str(raised.value)


def test_a_server_that_is_too_far_is_refused_with_both_versions() -> None:
    words = "the coordinator a:1 is too new for this node: it speaks protocol 4, and this node "
    with pytest.raises(RequestError, match=re.escape(words)):
        check_server(PROTOCOL + 2, "the coordinator a:1", "node")


def test_what_tells_no_version_is_of_the_first_release_or_of_another_project(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_caller({}, "client", is_ours=True)
    check_server(0, "the cache", "client")
    monkeypatch.setattr(protocol_version, "PROTOCOL", 3)
    check_caller({}, "client", is_ours=False)  # any Flight client
    with pytest.raises(RequestError, match=r"the client is too old .* it speaks protocol 1"):
        check_caller({}, "client", is_ours=True)
    with pytest.raises(RequestError, match=r"the cache is too old .* it speaks protocol 1"):
        check_server(0, "the cache", "client")


@pytest.mark.parametrize("text", ["", "two", "-1", "2.0", "²", "9" * 30])
def test_a_version_that_is_no_number_is_quoted(text: str) -> None:
    with pytest.raises(RequestError, match="cache-protocol must be a number") as raised:
        check_caller({"cache-protocol": text}, "client", is_ours=True)
    assert repr(text) in str(raised.value)


def test_every_call_tells_the_version_and_an_issuer_of_tokens_is_not_told() -> None:
    credentials = Credentials(token="secret")
    assert dict(credentials.headers()) == {**of(PROTOCOL), "authorization": "Bearer secret"}
    assert dict(credentials.authorization()) == {"authorization": "Bearer secret"}
