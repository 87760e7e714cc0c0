"""What may be shown of a text that somebody else wrote: no secret, in none of its forms.

Libraries put addresses, headers and whole configurations into what they say, with secrets as they
are, as an address quotes them, or as Python shows them. Knows neither stores nor databases. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from urllib.parse import quote, quote_plus, unquote

_HIDDEN = "***"
_MIN_SECRET_CHARS = 4  # a shorter one would garble every message, and guards nothing
_PRIVATE = re.compile("KEY|SECRET|TOKEN|PASSWORD|SAS")  # names of variables
_ACCESS_KEY = re.compile(r"\b(?:AKIA|ASIA|GOOG)[A-Za-z0-9]{12,}")
_QUERY = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']*")
_PASSWORD = re.compile(r"(?<=://)([^\s/?#@:]*):([^\s/?#]+)@")  # of an address
_ESCAPE = re.compile(r"%[0-9A-F]{2}")


def secret_values(secrets: Mapping[str, str], environ: Mapping[str, str]) -> frozenset[str]:
    """The values that no message may hold: every secret, and those of the environment."""
    values = [*secrets.values(), *(environ[name] for name in environ if _PRIVATE.search(name))]
    return frozenset(value for value in values if len(value) >= _MIN_SECRET_CHARS)


def redacted(text: str, secrets: Collection[str]) -> str:
    """``text`` in one line, without secrets, access keys, passwords and queries of addresses."""
    text = _PASSWORD.sub(rf"\1:{_HIDDEN}@", _QUERY.sub(r"\1", hidden(text, secrets)))
    return " ".join(_ACCESS_KEY.sub(_HIDDEN, text).split())


def hidden(text: str, secrets: Collection[str]) -> str:
    """``text`` without the secrets, and without the passwords of those that are addresses."""
    passwords = {found[2] for value in secrets for found in _PASSWORD.finditer(value)}
    values = {*secrets, *passwords, *map(unquote, passwords)}
    long = (value for value in values if len(value) >= _MIN_SECRET_CHARS)
    forms = {form for value in long for form in _forms(value)}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, _HIDDEN)
    return text


def _forms(value: str) -> Iterable[str]:
    """How a secret may stand in a text."""
    quoted = {quote(value, safe=""), quote(value), quote_plus(value)}
    in_small_letters = {_ESCAPE.sub(lambda found: found[0].lower(), form) for form in quoted}
    # A key of several lines has its line breaks escaped where Python shows it.
    return {value, *quoted, *in_small_letters, repr(value)[1:-1]}
