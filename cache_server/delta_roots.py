"""Pure: which files of a listing are those of a Delta table, by the names of directories.

The log of such a table says which of its files hold rows now. Read as plain files, they would
bring back rows that were removed or replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from protos.errors import RequestError

LOG = "_delta_log"  # a directory in the root of each Delta table


def directories_of(path: str) -> Iterator[str]:
    """The directories above a relative path, from its own to ``""``."""
    while path:
        path = path.rpartition("/")[0]
        yield path


def first_root(paths: Iterable[str], roots: Collection[str]) -> str | None:
    """The root, of ``roots``, of the first file that lies in a table and is none of its log.

    Args:
        paths: of files, relative to the same directory as ``roots``.
    """
    if not roots:
        return None
    for path in paths:
        if LOG not in path.split("/"):
            for directory in directories_of(path):
                if directory in roots:
                    return directory
    return None


def refusal(source: str, root: str) -> RequestError:
    """The error for a source of plain files that reads those of the Delta table at ``root``."""
    root = root.rstrip("/")
    if source.rstrip("/") == root:
        return RequestError(f"source {source!r} is a Delta table: say format: delta")
    return RequestError(
        f"source {source!r} reads files of {root}, which is a Delta table: say format: delta with "
        "that as the source, or leave its files out by ignore"
    )
