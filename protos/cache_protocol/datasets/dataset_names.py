"""Names of datasets: ``NAME``, or ``NAMESPACE/NAME``. Pure.

Inside a cache, names of the namespace ``default`` are bare, and all others are qualified.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

DEFAULT_NAMESPACE = "default"
_BETWEEN = "+"  # no part of a name
EVERY_NAMESPACE = "*"  # as a reader of a dataset
NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def is_dataset_name(name: object) -> bool:
    """Whether it is a name, bare or qualified."""
    if not isinstance(name, str):
        return False
    namespace, slash, bare = name.rpartition("/")
    return bool(_NAME.fullmatch(bare)) and (not slash or bool(NAMESPACE.fullmatch(namespace)))


def full_name(name: str, namespace: str) -> str:
    """The name inside the cache of a dataset that a caller of ``namespace`` names."""
    given, slash, bare = name.rpartition("/")
    found = given if slash else namespace
    return bare if found == DEFAULT_NAMESPACE else f"{found}/{bare}"


def namespace_of(full: str) -> str:
    """The namespace of a name inside the cache."""
    return full.rpartition("/")[0] or DEFAULT_NAMESPACE


def joined(names: Iterable[str]) -> str:
    """The name of a mixture, by those of its sources."""
    return _BETWEEN.join(names)


def names_in(name: str) -> list[str]:
    """The names of the sources of a mixture, which no name of a dataset has a sign for.

    The last one may be a number: of further sources, that have no room.
    """
    return name.split(_BETWEEN)
