"""What a namespace is guaranteed of the cache, and the most that it may hold."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cache_protocol.datasets.dataset_names import NAMESPACE
from cache_protocol.datasets.dataset_spec import parse_bytes

_RULE = "must be NAMESPACE=GUARANTEED..LARGEST, such as team=100GiB..400GiB, or with one of both"


@dataclass(frozen=True)
class NamespaceShare:
    """The share of one namespace.

    Attributes:
        guaranteed: bytes that others leave it.
        largest: the most bytes that it may hold; None: no limit.
    """

    namespace: str
    guaranteed: int = 0
    largest: int | None = None


def parse_share(text: object) -> NamespaceShare:
    """The share of a text such as ``team=100GiB..400GiB``, ``team=..1TiB`` or ``team=1GiB..``.

    Raises:
        ValueError: says what is wrong, and quotes it.
    """
    if isinstance(text, NamespaceShare):
        return text
    found = re.fullmatch(r"([^=]*)=([^=]*?)\.\.([^=]*)", str(text))
    if found is None or not NAMESPACE.fullmatch(found[1]) or not (found[2] or found[3]):
        raise ValueError(f"{_RULE}, got {text!r}")
    try:
        guaranteed, largest = (parse_bytes(size) if size else None for size in found.groups()[1:])
    except ValueError as error:
        raise ValueError(f"{_RULE}: {error}") from None
    if largest is not None and (guaranteed or 0) > largest:
        raise ValueError(f"must not guarantee more than the largest size, got {text!r}")
    return NamespaceShare(found[1], guaranteed or 0, largest)
