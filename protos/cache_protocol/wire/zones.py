"""Zones: failure domains in which nodes and readers are, such as those of a cloud. Pure.

A process tells its zone in a header of its calls. Who tells none, or no valid one, has no zone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

VARIABLE = "CACHE_ZONE"
RULE = "a name of at most 63 letters, digits, '.', '_' and '-'"  # as a value of a Kubernetes label
_HEADER = "cache-zone"
_ZONE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def is_zone(text: str) -> bool:
    """Whether a text may name a zone."""
    return _ZONE.fullmatch(text) is not None


def header(zone: str | None) -> tuple[tuple[str, str], ...]:
    """The header that tells a zone; none without one."""
    return ((_HEADER, zone),) if zone else ()


def told(headers: Mapping[str, str]) -> str:
    """The zone of a caller; empty: it has none.

    Args:
        headers: of the call, by lower-case name.
    """
    text = headers.get(_HEADER, "")
    return text if is_zone(text) else ""
