"""Pure: which files of a listing are those of a lake table, by the names beside and above them.

The log of a Delta table and the metadata of an Iceberg table say which of its files hold rows now.
Read as plain files, they would bring back rows that were removed or replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from cache_protocol.errors import RequestError

DELTA_LOG = "_delta_log"
ICEBERG_METADATA = "metadata"
# In the root of each table of a format: where it keeps what says which rows it has.
OWN_DIRECTORIES = {"delta": DELTA_LOG, "iceberg": ICEBERG_METADATA}
_DATA = "data"  # where an Iceberg table has its files, unless it is told otherwise
_METADATA_FILE = re.compile(r"(v\d+|\d+-[^/]+)(\.gz)?\.metadata\.json(\.gz)?")
_REMEDIES = {
    "delta": ("a Delta table: say format: delta", " with that as the source"),
    "iceberg": (
        "an Iceberg table: say format: iceberg",
        " with its metadata file, or its name in a catalogue, as the source",
    ),
}


def directories_of(path: str) -> Iterator[str]:
    """The directories above a path, from its own to ``""``."""
    while path:
        path = path.rpartition("/")[0]
        yield path


def is_metadata_file(name: str) -> bool:
    """Whether a file of that name in a directory ``metadata`` makes an Iceberg table."""
    return _METADATA_FILE.fullmatch(name) is not None


def root_told_by(path: str) -> tuple[str, str] | None:
    """The root and the format of the table of which a file is the log or the metadata."""
    root, found, _ = f"/{path}".partition(f"/{DELTA_LOG}/")
    if found:
        return root[1:], "delta"
    root, found, name = f"/{path}".rpartition(f"/{ICEBERG_METADATA}/")
    return (root[1:], "iceberg") if found and is_metadata_file(name) else None


def first_root(paths: Iterable[str], roots: Mapping[str, str]) -> str | None:
    """The root of the first file that belongs to a table and is none of its log or metadata.

    Args:
        paths: of files, in the same form as the roots.
        roots: of the tables there are, and their formats.
    """
    if not roots:
        return None
    for path in paths:
        for directory in directories_of(path):
            if directory in roots:
                own = OWN_DIRECTORIES[roots[directory]]
                if not path.startswith(f"{directory}/{own}/"):
                    return directory
                break
    return None


def likely_roots_above(directory: str) -> list[str]:
    """The directories above one in which tables have their roots, by their usual layouts.

    A guess, where each look costs a request: what is above ``key=value`` directories, and above one
    that is called ``data``.

    Args:
        directory: relative, with a slash at its end, or empty; so are those that are returned.
    """
    parts = directory.split("/")[:-1]
    roots = [
        parts[:index]
        for index, part in enumerate(parts)
        if part == _DATA or ("=" in part and (index == 0 or "=" not in parts[index - 1]))
    ]
    return ["".join(f"{part}/" for part in root) for root in roots]


def refusal(source: str, below: str, root: str, format: str) -> RequestError:
    """The error for a source of plain files that reads those of a table.

    Args:
        below: the directory below which the source has its files.
        root: of the table.
        format: of the table.
    """
    root = root.rstrip("/")
    what, how = _REMEDIES[format]
    if source.rstrip("/") == root:
        how = how if format == "iceberg" else ""
        return RequestError(f"source {source!r} is {what}{how}")
    is_inside = f"{below.rstrip('/')}/".startswith(f"{root}/")
    way_out = "" if is_inside else ", or leave its files out by ignore"
    return RequestError(f"source {source!r} reads files of {root}, which is {what}{how}{way_out}")
