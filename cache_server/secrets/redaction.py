"""What may be shown of a text that somebody else wrote: no secret, in none of its forms.

Libraries and servers put addresses, headers and whole configurations into what they say, with
secrets as they are, in parts, broken into lines, in base64, or escaped as addresses, JSON, HTML and
Python do. Knows neither stores nor databases. Pure.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Iterator, Mapping
from urllib.parse import unquote

from cache_protocol.spec.secret_settings import SECRET_NAME

_HIDDEN = "***"
_MIN_SECRET_CHARS = 4  # a shorter one would garble every message, and guards nothing
_PRIVATE = re.compile("KEY|SECRET|TOKEN|PASSWORD|SAS")  # names of variables
_ACCESS_KEY = re.compile(r"\b(?:AKIA|ASIA|GOOG)[A-Za-z0-9]{12,}")
_QUERY = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']*")
_PASSWORD = re.compile(r"(?<=://)([^\s/?#@:]*):([^\s/?#]+)@")  # of an address
_AUTHORIZATION = re.compile(r"\b(Basic|Bearer)\s+(?=\S*\d)[\w.~+/=%-]{8,}", re.IGNORECASE)
_PAIR = re.compile(r"(?:^|[?&;\s])([\w.-]+)=([^&;\s]+)")  # of a query or a connection string
_SCHEME = re.compile(r"(?:Basic|Bearer) ", re.IGNORECASE)  # of a header
_MIN_ENCODED_CHARS = 6  # of a secret that is looked for in base64
_BREAK = r"(?:[ \t]*\r?\n[ \t]*)?"  # of a library that keeps its lines short
_MAX_BROKEN_CHARS = 512
_LETTERS = {"\n": "n", "\r": "r", "\t": "t"}  # behind a backslash
_NAMED = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}  # by HTML and XML


def secret_values(secrets: Mapping[str, str], environ: Mapping[str, str]) -> frozenset[str]:
    """The values that no message may hold: every secret, and those of the environment."""
    values = [*secrets.values(), *(environ[name] for name in environ if _PRIVATE.search(name))]
    return frozenset(value for value in values if len(value) >= _MIN_SECRET_CHARS)


def redacted(text: str, secrets: Collection[str]) -> str:
    """``text`` in one line, without secrets, access keys, passwords and queries of addresses."""
    text = _PASSWORD.sub(rf"\1:{_HIDDEN}@", _QUERY.sub(r"\1", hidden(text, secrets)))
    text = _AUTHORIZATION.sub(rf"\1 {_HIDDEN}", text)
    return " ".join(_ACCESS_KEY.sub(_HIDDEN, text).split())


def hidden(text: str, secrets: Collection[str]) -> str:
    """``text`` without the secrets, and without those that others of them are made of."""
    values = {*secrets, *(part for value in secrets for part in _parts(value))}
    long = [value for value in values if len(value) >= _MIN_SECRET_CHARS]
    for value in sorted(long, key=len, reverse=True):
        for pattern in _patterns(value):
            text = re.sub(pattern, _HIDDEN, text)
    return text


def _parts(value: str) -> Iterator[str]:
    """What of a secret is one by itself: libraries take it apart, and say the parts alone."""
    parts = [found[2] for found in _PASSWORD.finditer(value)]
    if value.lstrip().startswith("{"):
        parts += _private(value)
    else:
        parts += [part for name, part in _PAIR.findall(value) if SECRET_NAME.fullmatch(name)]
        if found := _SCHEME.match(value):
            parts.append(value[found.end() :])
        if "://" not in value:  # ID:SECRET, or USER:PASSWORD@HOST
            rest = value.partition(":")[2]
            parts += [rest, rest.rpartition("@")[0]]
    for part in parts:
        yield part
        yield unquote(part)


def _private(value: str) -> list[str]:
    """The secrets of a key file, such as Google's."""
    try:
        known = json.loads(value)
    except ValueError:
        return []
    return [
        text
        for name, text in known.items()
        if isinstance(text, str) and SECRET_NAME.fullmatch(name)
    ]


def _patterns(value: str) -> Iterator[str]:
    """Finds a secret as it is and as text, addresses, JSON, XML and headers have it."""
    between = _BREAK if len(value) <= _MAX_BROKEN_CHARS else ""
    yield between.join(map(_spelt, value))
    raw = value.encode()
    if len(raw) < _MIN_ENCODED_CHARS or len(value) > _MAX_BROKEN_CHARS:
        return
    # Behind 0, 1 or 2 bytes that are not known, such as those of a user's name.
    for before, unsure in enumerate((0, 2, 3)):
        whole = base64.b64encode(bytes(before) + raw).decode()
        sure = whole[unsure : (before + len(raw)) * 8 // 6]
        for form in {sure, sure.replace("+", "-").replace("/", "_")}:
            # From where the base64 begins: from everywhere in it, long ones would take minutes.
            yield rf"(?<![\w+/-])[\w+/-]*{''.join(map(_spelt, form))}[\w+/-]*={{0,2}}"


def _spelt(char: str) -> str:
    """Finds a character that may be escaped, once or several times."""
    if char.isascii() and (char.isalnum() or char in "-_."):
        return re.escape(char)
    percent = "".join(rf"%(?:25)*(?i:{byte:02x})" for byte in char.encode())
    python = "".join(rf"\\+x(?i:{byte:02x})" for byte in char.encode())
    ways = [rf"\\*{re.escape(char)}", percent, python, rf"\\+x(?i:{ord(char):02x})"]
    ways += [rf"\\+u(?i:{ord(char):04x})", rf"&#0*{ord(char)};", rf"&#x0*(?i:{ord(char):x});"]
    if char in _NAMED:
        ways.append(f"&{_NAMED[char]};")
    if char == " ":
        ways.append(r"\+")
    if char == "\\":
        ways.append(r"\\+")
    if char in _LETTERS:
        ways += [rf"\\+{_LETTERS[char]}", r"\s+"]
    return f"(?:{'|'.join(ways)})"
