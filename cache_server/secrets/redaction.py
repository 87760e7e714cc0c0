"""Removes secrets from text that libraries and servers wrote. Pure.

A secret is found as it is, URL-encoded, in base64, and as Python's ``repr`` has it: `http.client`
quotes a header that has a line end, with the token in it. Two parts of a secret count as secrets:
the password of a URI, and the second part of ``ID:SECRET``, which pyiceberg sends alone.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterator, Mapping
from urllib.parse import unquote

_HIDDEN = "***"
_MIN_SECRET_CHARS = 4  # a shorter one would garble every message, and guards nothing
_MIN_ENCODED_CHARS = 6  # of a secret that is looked for in base64
_MAX_ENCODED_CHARS = 512
_PRIVATE = re.compile("KEY|SECRET|TOKEN|PASSWORD|SAS")  # names of variables
_ACCESS_KEY = re.compile(r"\b(?:AKIA|ASIA|GOOG)[A-Za-z0-9]{12,}")
_QUERY = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']*")
_PASSWORD = re.compile(r"(?<=://)([^\s/?#@:]*):([^\s/?#]+)@")  # of a URI
_AUTHORIZATION = re.compile(r"\b(Basic|Bearer)\s+(?=\S*\d)[\w.~+/=%-]{8,}", re.IGNORECASE)


def secret_values(secrets: Mapping[str, str], environ: Mapping[str, str]) -> frozenset[str]:
    """The values that no message may hold: all secrets, and those of the environment."""
    values = [*secrets.values(), *(environ[name] for name in environ if _PRIVATE.search(name))]
    return frozenset(value for value in values if len(value) >= _MIN_SECRET_CHARS)


def redacted(text: str, secrets: Collection[str]) -> str:
    """``text`` in one line, without secrets, access keys, and passwords and queries of URIs."""
    text = _PASSWORD.sub(rf"\1:{_HIDDEN}@", _QUERY.sub(r"\1", hidden(text, secrets)))
    text = _AUTHORIZATION.sub(rf"\1 {_HIDDEN}", text)
    return " ".join(_ACCESS_KEY.sub(_HIDDEN, text).split())


def hidden(text: str, secrets: Collection[str]) -> str:
    """``text`` without the secrets, and without the passwords in them."""
    passwords = [found[2] for value in secrets for found in _PASSWORD.finditer(value)]
    passwords += [value.partition(":")[2] for value in secrets if "://" not in value]
    values = {*secrets, *passwords, *map(unquote, passwords)}
    long = [value for value in values if len(value) >= _MIN_SECRET_CHARS]
    for value in sorted(long, key=len, reverse=True):
        for pattern in _patterns(value):
            text = re.sub(pattern, _HIDDEN, text)
    return text


def _patterns(value: str) -> Iterator[str]:
    """Finds a secret in each of its forms."""
    yield "".join(map(_spelt, value))
    for escaped in (repr(f'"{value}')[2:-1], repr(f'"{value}'.encode())[3:-1]):
        yield re.escape(escaped)
        yield re.escape(escaped.replace(r"\'", "'"))  # inside double quotes
    raw = value.encode()
    if len(raw) < _MIN_ENCODED_CHARS or len(value) > _MAX_ENCODED_CHARS:
        return
    # After 0, 1 or 2 unknown bytes, such as those of a user's name.
    for before, unsure in enumerate((0, 2, 3)):
        whole = base64.b64encode(bytes(before) + raw).decode()
        sure = whole[unsure : (before + len(raw)) * 8 // 6]
        for form in {sure, sure.replace("+", "-").replace("/", "_")}:
            # From where the base64 begins: from everywhere in it, long ones would take minutes.
            yield rf"(?<![\w+/-])[\w+/-]*{re.escape(form)}[\w+/-]*={{0,2}}"


def _spelt(char: str) -> str:
    """Finds a character as it is or URL-encoded."""
    percent = "".join(f"%(?i:{byte:02x})" for byte in char.encode())
    space = r"|\+" if char == " " else ""
    return f"(?:{re.escape(char)}|{percent}{space})"
