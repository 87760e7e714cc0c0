"""Checks the options of a source by their tables: names and values -> what a library gets. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote

from cache_protocol.datasets.source_options import GOOGLE_KEY, STORES, Form, Option, Options
from cache_protocol.errors import RequestError, some_of
from cache_server.egress.addresses import check_name, parse_address, parse_host

_MAX_NUMBER = 1_000_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PORTS = re.compile(r"[0-9]*(,[0-9]*)*")
_PASSWORD = re.compile(r"([A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*")
# Dialects of SQLAlchemy: its registry can import any other code for another name.
_DATABASES = ("postgresql", "postgresql+psycopg2", "postgresql+psycopg", "mysql+pymysql")
SQLITE = "sqlite:///"


def store_settings(kind: str, options: Mapping[str, str], secrets: Mapping[str, str],
                   *, shared: bool = False) -> dict[str, str]:  # fmt: skip
    """The settings of a store, by the names of its library.

    Args:
        kind: of the store, such as ``s3``. Empty: files of the nodes, which use none.
        shared: the options serve several stores; those of another one are left out.

    Raises:
        RequestError: names each option that the store, or any store, lacks, or whose value is not
            of its form.
    """
    stores = [STORES[kind]] if kind and not shared else list(STORES.values())
    settings: dict[str, str] = {}
    problems: list[str] = []
    for key, value in {**options, **secrets}.items():
        own = STORES[kind].find(key) if kind else None
        others = [option for store in stores if (option := store.find(key)) is not None]
        others.sort(key=lambda option: option.form is Form.NEVER)
        try:
            option = known(stores, key, own or next(iter(others), None))
            text = checked(f"the option {key!r}", option, value)
        except RequestError as error:
            problems.append(str(error))
            continue
        if option is own and option.form is not Form.UNUSED:
            settings[option.name] = text
    if problems:
        raise RequestError(some_of(problems, "; "))
    return settings


def known(tables: Sequence[Options], key: str, found: Option | None) -> Option:
    """The option that was found for a name in some tables, if it may be given.

    Raises:
        RequestError: names the option, and a known one or the way round.
    """
    if found is not None and found.form is not Form.NEVER:
        return found
    if found is not None:
        raise RequestError(f"the option {key!r} cannot be given: {found.instead}")
    if len(tables) > 1:
        reason = f"no store has an option {key!r}"
    else:
        reason = f"{tables[0].what} has no option {key!r}"
    if near := next((name for table in tables if (name := table.nearest(key))), ""):
        raise RequestError(f"{reason}; did you mean {near!r}?")
    if len(tables) == 1:
        reason += f"; it has {some_of(tables[0].known, like=key)}: the docs list all"
    raise RequestError(reason)


def option_value(options: Mapping[str, str], name: str) -> str:
    """The value that some store's option has; empty if it is not given."""
    for key, value in options.items():
        for store in STORES.values():
            if (option := store.find(key)) is not None and option.name == name:
                return value
    return ""


def checked(what: str, option: Option, value: str) -> str:
    """The value of an option, as a library gets it.

    Raises:
        RequestError: names ``what``; quotes the value of a public option.
    """
    if option.form is not Form.LINES and option.form is not Form.GOOGLE_KEY:
        check_text(what, value)
    text = _by_form(what, option, value)
    if option.choices and text.lower() not in option.choices:
        raise _wrong(what, option, value, f"must be {' or '.join(option.choices)}")
    return text


def _by_form(what: str, option: Option, value: str) -> str:
    form = option.form
    if form is Form.FLAG:
        if value.lower() not in ("true", "false"):
            raise _wrong(what, option, value, "must be true or false")
        return value.lower()
    if form in (Form.COUNT, Form.SECONDS):
        return _number(what, option, value)
    if form is Form.NAME:
        check_name(what, value)
    elif form is Form.ADDRESS:
        return str(parse_address(what, value))
    elif form is Form.THRIFT:
        return ",".join(str(parse_address(what, uri, ("thrift",))) for uri in value.split(","))
    elif form is Form.HOSTS:
        return ",".join(_host(what, host) for host in value.split(","))
    elif form is Form.PORTS and not _PORTS.fullmatch(value):
        raise _wrong(what, option, value, "must be numbers of ports")
    elif form is Form.DATABASE:
        return _database(what, value)
    elif form is Form.GOOGLE_KEY:
        return _google_key(what, value)
    return value


def check_text(what: str, value: str) -> None:
    """Refuses a value on which object_store panics, such as a line break in a key.

    Raises:
        RequestError: naming ``what``, without its value.
    """
    if value != value.strip() or _CONTROL.search(value):
        raise RequestError(
            f"{what} must have no space before or after its value, and no line break or other "
            "control character"
        )


def _number(what: str, option: Option, value: str) -> str:
    """A number without a unit; ``5s`` is 5."""
    is_count = option.form is Form.COUNT
    try:
        number = float(value if is_count else value.removesuffix("s"))
    except ValueError:
        number = -1.0
    if not 0 <= number <= _MAX_NUMBER or (is_count and not value.isdecimal()):
        kind = "whole number" if is_count else "number of seconds"
        raise _wrong(what, option, value, f"must be a {kind} from 0 to {_MAX_NUMBER}")
    return value if is_count else f"{number:g}"


def _host(what: str, host: str) -> str:
    """A host of PostgreSQL; a path or ``@`` is a socket, which `AllowedSources` decides about."""
    if host.startswith(("/", "@")) or not host:
        return host
    bare = ":" in host and not host.startswith("[")
    return parse_host(what, f"[{host}]" if bare else host)


def _database(what: str, uri: str) -> str:
    """An address for SQLAlchemy without parameters: some name code, files or another host.

    Raises:
        RequestError: never quotes the address, which may hold a password.
    """
    if uri.startswith(SQLITE) and not re.search(r"[?#%]", uri) and uri != SQLITE:
        return uri
    scheme, found, rest = uri.partition("://")
    user, at, place = rest.rpartition("@")
    name, colon, password = user.partition(":")
    if not found or scheme not in _DATABASES or not _PASSWORD.fullmatch(password) or "?" in place:
        schemes = ", ".join(f"{each}://" for each in _DATABASES)
        raise RequestError(
            f"{what} must be {SQLITE}PATH or an address of {schemes} with a host and a database, "
            "without parameters behind a '?'; write special characters of a password as %XX"
        )
    shown = f"{scheme}://{name}{at}{place}"
    address = parse_address(what, shown, (scheme,), may_have_user=True)
    if "/" in unquote(address.path).removeprefix("/"):
        raise RequestError(f"{what} must name a database behind its host")
    login = f"{address.user}{colon}{password}{at}"
    return f"{scheme}://{login}{address.authority}{address.path}"


def _google_key(what: str, text: str) -> str:
    """The key of a service account with the keys of `GOOGLE_KEY` only."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise RequestError(f"{what} must be the text of the JSON file of a key, not its path")
    kept = {}
    for key, value in given.items():
        option = known([GOOGLE_KEY], key, GOOGLE_KEY.find(key))
        if not isinstance(value, str):
            raise RequestError(f"{what} must have text for {key!r}")
        if option.form is not Form.UNUSED:
            kept[option.name] = checked(f"{what}, {key!r}", option, value)
    return json.dumps(kept)


def _wrong(what: str, option: Option, value: str, must: str) -> RequestError:
    return RequestError(f"{what} {must}{f', got {value!r}' if option.public else ''}")


def lent_settings(answer: Mapping[str, object], table: Options) -> Iterator[tuple[str, str]]:
    """Those of the properties in a catalogue's answer that it may set, by the library's names.

    No other property reaches a library.

    Raises:
        RequestError: for an address or another value that is not of the form of its option.
    """
    for key, value in answer.items():
        option = table.find(key)
        if option is not None and option.lent and isinstance(value, str):
            yield option.name, checked(f"the catalogue's answer {key!r}", option, value)


def number_setting(settings: Mapping[str, str], name: str, default: float) -> float:
    """A number of `store_settings`, such as a time in seconds."""
    return float(settings.get(name, default))
