"""Secrets of a spec: options that are not known to be public, and passwords in URIs. Pure.

Show a given value only by `shown`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from cache_protocol.datasets.source_options import is_public
from cache_protocol.datasets.values import is_text
from cache_protocol.errors import short

CATALOG_PREFIX = "catalog."  # of the options of a catalogue

URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_SECRET_NAME = re.compile(  # of a parameter of a URI
    r"(.*[-_])?sig|.*(signature|token|password|passwd|pwd|secret)"
    r"|.*(api|access|account|private)[-_]?key",
    re.IGNORECASE,
)
# A URI whose password has an unescaped character that ends the host too early. Digits are a port,
# and an ARN may name a bucket.
_UNESCAPED = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*://(?!arn:)[^\s/?#@:\[]*:(?!\d+[,/?#])[^@]*[/?#].*@", re.DOTALL
)
_BARE = re.compile(
    r"[^\s/?#@:]+:(?!//)[^\s:]+@[^\s:@]+(:\d+)?(/\S*)?"
)  # an address without a scheme


def split_options(
    options: object, what: str, problems: list[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Public and secret options, with their names in lower case. Values are never quoted."""
    public: dict[str, str] = {}
    secrets: dict[str, str] = {}
    if options is None:
        return public, secrets
    if not isinstance(options, Mapping):
        problems.append(f"{what} must be a mapping of names to values")
        return public, secrets
    for key, value in options.items():
        if not isinstance(key, str) or not key or not isinstance(value, str | int | bool | float):
            problems.append(f"{what} must map names to texts, got something else for {key!r}")
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        name = key.lower()
        if not is_text(name) or not is_text(text):
            problems.append(f"{what} must be text in UTF-8, got something else for {key!r}")
            continue
        is_shown = is_public(name.removeprefix(CATALOG_PREFIX)) and not _has_password(text)
        (public if is_shown else secrets)[name] = text
    return public, secrets


def _has_password(text: str) -> bool:
    if _BARE.fullmatch(text) or _UNESCAPED.match(text) or text.lstrip().startswith("{"):
        return True  # "{" begins a key file given in place of its path
    try:
        parts = urlsplit(text)
        return bool(URI.match(text)) and bool(parts.password is not None or _secret_keys(parts))
    except ValueError:  # it cannot be parsed, so it may have one
        return True


def _secret_keys(uri: SplitResult) -> list[str]:
    """The names of the secret parameters in a URI's query."""
    return [key for key, _ in parse_qsl(uri.query) if _SECRET_NAME.fullmatch(key)]


def shown(value: object) -> str:
    """A bad value for a message; only its type if it may hold a secret, such as options."""
    return f"a {type(value).__name__}" if _may_hold_secret(value) else short(repr(value))


def _may_hold_secret(value: object) -> bool:
    if isinstance(value, list | tuple | Set):
        return any(map(_may_hold_secret, value))
    if isinstance(value, str | bytes):
        return _has_password(value if isinstance(value, str) else value.decode("latin-1"))
    return isinstance(value, Mapping) and bool(value)


def without_password(uri: str, secrets: dict[str, str], problems: list[str]) -> str:
    """``uri`` without its password, which is added to ``secrets``."""
    if _UNESCAPED.match(uri):
        problems.append(
            f"a source of the scheme {uri.partition(':')[0]} has a password with a '/', '?' or '#' "
            "in it: write them as %2F, %3F and %23"
        )
        return uri
    try:
        parts = urlsplit(uri)
    except ValueError:  # the error may quote the password
        problems.append(f"a source of the scheme {uri.partition(':')[0]} has an invalid host")
        return uri
    if signed := _secret_keys(parts):
        place = f"at {parts.hostname!r}" if parts.hostname else f"of {parts.scheme}://"
        problems.append(
            f"a source {place} is signed by {', '.join(signed)}, which would be "
            "kept and shown with it: give credentials in storage_options instead"
        )
    if parts.password is None:
        return uri
    password = unquote(parts.password)
    if secrets.setdefault("password", password) != password:
        problems.append(f"the sources of one table have several passwords, one at {parts.hostname}")
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}@{host}"))
