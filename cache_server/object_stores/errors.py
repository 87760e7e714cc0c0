"""Failures of a store as one line without secrets.

Libraries put whole bodies and addresses into their errors, and a body of S3 names the access key.
So only known parts are quoted, without any secret.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from http import HTTPStatus
from typing import NamedTuple

from cache_protocol.errors import LoadError
from cache_server.secrets.redaction import redacted
from cache_server.source.outages import load_error

_STATUS = re.compile(r"status code: (\d{3})")
_RETRIES = re.compile(r"after (\d+) retries")
_CODE = re.compile(r"<Code>([^<]{1,80})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_SYSTEM = re.compile(r'(?:message|error): "([^"]+)"')
_CERTIFICATE = re.compile(r"InvalidCertificate\( (?:Other\( OtherError\( )?(\w+)")
_ODD_KEY = re.compile(r'Error parsing Path "(.+)": Encountered illegal character', re.DOTALL)
_DETAIL = " Debug source: "  # obstore's, after `redacted`
_PROVIDER = "credential provider: "
NO_LENGTH = "Content-Length Header missing"  # in obstore's words
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class Place(NamedTuple):
    """A bucket or server, and its endpoint, for messages."""

    bucket: str
    endpoint: str
    noun: str = "bucket"

    def __str__(self) -> str:
        return f"{self.noun} {self.bucket!r} at {self.endpoint}" if self.bucket else self.endpoint


def store_error(
    error: Exception, uri: str, place: Place, secret: Collection[str], *, refused: bool = False
) -> LoadError:
    """The `LoadError` for a failure of a store.

    Args:
        uri: what was read.
        refused: the library blames the credentials.
    """
    text, _, detail = redacted(str(error), secret).partition(_DETAIL)
    status = _first(_STATUS, text)
    code = _first(_CODE, text)
    tries = f" after {n} retries" if (n := _first(_RETRIES, text)) else ""
    number = int(status) if status else 0
    key = _first(_ODD_KEY, str(error))
    if key and not key.isprintable():
        shown = redacted(repr(key), secret)
        reason = f"the key {shown} of {place} has a control character, which cannot be read"
    elif _PROVIDER in text:
        reason = f"no credentials for {place}: {text.partition(_PROVIDER)[2]}"
    elif "169.254." in text or "token request" in text:
        reason = f"no credentials for {place}: none were given, and the machine has none"
    elif refused or number in _REFUSED:
        # A message may name the access key; the code cannot.
        answer = " ".join(filter(None, [status or "unauthenticated", code]))
        reason = f"access to {place} was refused ({answer}): check the credentials"
    elif code == "NoSuchBucket":
        reason = f"{place} does not exist"
    elif status:
        said = ": ".join(filter(None, [code, _first(_MESSAGE, text)]))
        answer = f"{place} answered {status} {_phrase(number)}{tries}"
        reason = f"{answer} ({said})" if said else answer
    elif NO_LENGTH in text:
        reason = f"{place} does not say how large it is (no Content-Length), which must be known"
    elif "TooManyRedirects" in detail:
        reason = f"{place} redirects without an end"
    elif "error sending request" in text:
        reason = f"no answer from {place}{tries}: {_connection_failure(detail)}"
    elif "response body error" in text:
        system = "timed out" if "TimedOut" in detail else "it ended too soon"
        reason = f"{place} broke off its answer: {_first(_SYSTEM, detail) or system}"
    else:
        reason = f"{place}: {text}"
    shown_uri = "".join(c if c.isprintable() else repr(c)[1:-1] for c in uri)
    return load_error(f"cannot read {shown_uri}: {reason}", error)


def _connection_failure(detail: str) -> str:
    if kind := _first(_CERTIFICATE, detail):
        return f"its certificate is not accepted ({kind})"
    if "InvalidMessage(" in detail:
        return "it does not speak TLS"
    if "ProxyAuthRequired" in detail:
        return "the proxy wants another user or password"
    system = "timed out" if "TimedOut" in detail else "no connection"
    return _first(_SYSTEM, detail) or system


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
