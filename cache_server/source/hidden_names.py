"""Which names of a listing are no part of a table. Pure."""

from __future__ import annotations


def is_hidden(name: str) -> bool:
    """Whether a file or folder is left out of a table, as Spark leaves it out.

    ``.name`` and ``_name`` are, such as ``_SUCCESS``. ``_hour=5`` is a key of a partition.
    """
    return name.startswith(".") or (name.startswith("_") and "=" not in name)
