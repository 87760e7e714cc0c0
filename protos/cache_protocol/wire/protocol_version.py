"""The version of the protocol: clients, nodes and coordinators tell it, and refuse what is too far.

A caller tells its version in a header of every call. The other side tells its own in the first
message that it answers: `CoordinatorEndpoints`, which an answer to a heartbeat has too, or
`ReadPlan`. Neighbours work together; see docs/upgrades.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from cache_protocol.errors import RequestError

# Raise it once a release when the meaning of a message changes, or a new one is needed.
PROTOCOL = 2
_OF_THE_SILENT = 1  # the releases before 2 told no version
_HEADER = "cache-protocol"
ERASES_ROWS = 2  # from this version on, nodes erase rows that were forgotten
ASKS_FOR_HELD_SHARDS = 2  # from this version on, nodes know the action "held-shards"


def header() -> tuple[str, str]:
    """The header of every call."""
    return _HEADER, str(PROTOCOL)


def told(number: int) -> int:
    """The version that a message tells; those of older releases have no such field."""
    return number or _OF_THE_SILENT


def check_caller(headers: Mapping[str, str], who: str, *, is_ours: bool) -> None:
    """Refuses a caller whose version is too far from this one.

    Args:
        headers: of the call, by lower-case name.
        who: calls: ``client`` or ``node``.
        is_ours: only programs of this project make such calls. Other ones tell no version, as any
            Flight client: they are served.

    Raises:
        RequestError: names both versions, and what to do.
    """
    text = headers.get(_HEADER)
    if text is None and not is_ours:
        return
    if text is not None and not (text.isascii() and text.isdigit() and len(text) < 9):
        raise RequestError(f"the header {_HEADER} must be a number, got {text[:64]!r}")
    number = _OF_THE_SILENT if text is None else int(text)
    _check(number, f"the {who}", "this cache", f"the image or environment of the {who}")


def check_server(number: int, what: str, who: str) -> None:
    """Refuses a server whose version is too far from that of this process.

    Args:
        number: that a message of the server tells.
        what: the server, for the message.
        who: this process is: ``client`` or ``node``.

    Raises:
        RequestError: names both versions, and what to do.
    """
    _check(told(number), what, f"this {who}", "its nodes, the coordinator first")


def _check(number: int, one: str, other: str, where: str) -> None:
    if abs(number - PROTOCOL) <= 1:
        return
    release = version("trainer-data-cache")
    is_old = number < PROTOCOL
    advice = (
        f"install trainer-data-cache {release} in {where}"
        if is_old
        else f"update {other} first, or install trainer-data-cache {release} in {where}"
    )
    raise RequestError(
        f"{one} is too {'old' if is_old else 'new'} for {other}: it speaks protocol {number}, and "
        f"{other} protocol {PROTOCOL}, which works with {PROTOCOL - 1} and {PROTOCOL + 1}: {advice}"
    )
