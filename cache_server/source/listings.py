"""Which files of a listing hold rows, by their names. Pure.

The log of a Delta table and the metadata of an Iceberg table say which files hold rows now. Read as
plain files, the others would bring back removed or replaced rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cache_protocol.errors import RequestError

DELTA_LOG = "_delta_log"
ICEBERG_METADATA = "metadata"
# In the root of a table: the directory of its log or metadata.
OWN_DIRECTORIES = {"delta": DELTA_LOG, "iceberg": ICEBERG_METADATA}
_DATA = "data"  # the default directory of an Iceberg table's files
_METADATA_FILE = re.compile(r"(v\d+|\d+-[^/]+)(\.gz)?\.metadata\.json(\.gz)?")
# Of a folder that Hugging Face's ``save_to_disk`` wrote.
_OF_SAVED = frozenset({"state.json", "dataset_info.json"})
_SAVED_DATA = re.compile(r"data-\d{5}-of-\d{5}\.arrow")
_REMEDIES = {
    "delta": ("a Delta table: say format: delta", " with that as the source"),
    "iceberg": (
        "an Iceberg table: say format: iceberg",
        " with its metadata file, or its name in a catalogue, as the source",
    ),
}


def is_hidden(name: str) -> bool:
    """Whether a file or folder is left out of a table, as Spark leaves it out.

    ``.name`` and ``_name`` are, such as ``_SUCCESS``. ``_hour=5`` is a key of a partition.
    """
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def directories_of(path: str) -> Iterator[str]:
    """The directories above a path, from the nearest one to ``""``."""
    while path:
        path = path.rpartition("/")[0]
        yield path


def is_metadata_file(name: str) -> bool:
    """Whether a file with this name, in a directory ``metadata``, belongs to an Iceberg table."""
    return _METADATA_FILE.fullmatch(name) is not None


def root_told_by(path: str) -> tuple[str, str] | None:
    """The root and the format of the table whose log or metadata a file is."""
    root, found, _ = f"/{path}".partition(f"/{DELTA_LOG}/")
    if found:
        return root[1:], "delta"
    root, found, name = f"/{path}".rpartition(f"/{ICEBERG_METADATA}/")
    return (root[1:], "iceberg") if found and is_metadata_file(name) else None


def first_root(paths: Iterable[str], roots: Mapping[str, str]) -> str | None:
    """The root of the table of the first data file that belongs to one.

    Args:
        paths: of files, in the same form as the roots.
        roots: of the known tables, and their formats.
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
    """The directories above one that may be roots of tables, by the usual layouts.

    A guess, because each look costs a request: those above ``key=value`` directories and above a
    directory ``data``.

    Args:
        directory: relative, with a slash at its end, or empty; the results have the same form.
    """
    parts = directory.split("/")[:-1]
    roots = [
        parts[:index]
        for index, part in enumerate(parts)
        if part == _DATA or ("=" in part and (index == 0 or "=" not in parts[index - 1]))
    ]
    return ["".join(f"{part}/" for part in root) for root in roots]


def refusal(source: str, below: str, root: str, format: str) -> RequestError:
    """The error for a source of plain files that would read files of a table.

    Args:
        below: the directory that the source looks below.
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


def without_metadata(relative: Sequence[str]) -> list[str]:
    """The files of a folder without the JSON files that describe a saved dataset.

    Args:
        relative: paths below the folder.
    """
    saved = {_folder(path) for path in relative if _SAVED_DATA.fullmatch(_name(path))}
    return [path for path in relative if _name(path) not in _OF_SAVED or _folder(path) not in saved]


def parts_of_dict(relative: Sequence[str]) -> list[str]:
    """The folders of a saved ``DatasetDict``; empty for other folders."""
    data = [path for path in relative if path.endswith(".arrow")]
    folders = sorted({_folder(path) for path in data})
    is_saved = all(_SAVED_DATA.fullmatch(_name(path)) for path in data)
    return folders if is_saved and len(folders) > 1 else []


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _name(path: str) -> str:
    return path.rpartition("/")[2]
