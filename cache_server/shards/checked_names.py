"""Checks the names that another node tells this one. Pure.

Names become paths and addresses, so a node believes none before it has checked it.
"""

from __future__ import annotations

import re
from functools import lru_cache

from cache_protocol.datasets.dataset_names import is_dataset_name
from cache_protocol.errors import InvalidTicketError
from cache_protocol.wire.zones import is_zone
from cache_server.shards.version_key import VersionKey

MAX_SHARDS = 1_000_000  # of one version
_MOST_KNOWN = 4096  # keys: each heartbeat names the same few hundred again
_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ADDRESS = r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}"
_LOCATION = re.compile(rf"grpc(\+tcp|\+tls)?://{_ADDRESS}")
_CONTROL_LOCATION = re.compile(rf"(grpc\+tls://)?{_ADDRESS}")


@lru_cache(_MOST_KNOWN)
def version_key(dataset: str, fingerprint: str) -> VersionKey:
    """The version of this name.

    Raises:
        InvalidTicketError: the dataset or the fingerprint is not a valid name; quotes it.
    """
    if not is_dataset_name(dataset):
        raise InvalidTicketError(f"not a name of a dataset: {dataset[:200]!r}")
    return VersionKey(dataset, token(fingerprint, "fingerprint"))


def token(text: str, what: str) -> str:
    """A fingerprint, a checksum or the id of a node: letters, digits, ``.``, ``_`` and ``-``.

    Args:
        what: it is, for the error.

    Raises:
        InvalidTicketError: it has other characters, or none, or more than 128.
    """
    return _matching(_TOKEN, text, what)


def zone(text: str) -> str:
    """The zone of a node; empty: it has none.

    Raises:
        InvalidTicketError: it is no name of a zone.
    """
    if text and not is_zone(text):
        raise InvalidTicketError(f"not a zone: {text[:200]!r}")
    return text


def location(text: str) -> str:
    """A Flight location, such as ``grpc://host:50051``.

    Raises:
        InvalidTicketError: it is something else.
    """
    return _matching(_LOCATION, text, "Flight location")


def address(text: str) -> str:
    """A control location, such as ``host:50052``.

    Raises:
        InvalidTicketError: it is something else.
    """
    return _matching(_CONTROL_LOCATION, text, "control location")


def _matching(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise InvalidTicketError(f"not a {what}: {text[:200]!r}")
    return text


def shard_index(index: int) -> int:
    """The index of a shard, or a number of shards.

    Raises:
        InvalidTicketError: it is above the limit.
    """
    if index > MAX_SHARDS:
        raise InvalidTicketError(f"a version has at most {MAX_SHARDS} shards, got {index}")
    return index
