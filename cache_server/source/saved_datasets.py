"""Folders that Hugging Face's ``save_to_disk`` wrote. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_METADATA = frozenset({"state.json", "dataset_info.json"})
_DATA = re.compile(r"data-\d{5}-of-\d{5}\.arrow")


def without_metadata(relative: Sequence[str]) -> list[str]:
    """The files of a folder without the JSON files that describe a saved dataset.

    Args:
        relative: paths below the folder.
    """
    saved = {_folder(path) for path in relative if _DATA.fullmatch(_name(path))}
    return [path for path in relative if _name(path) not in _METADATA or _folder(path) not in saved]


def parts_of_dict(relative: Sequence[str]) -> list[str]:
    """The folders of a saved ``DatasetDict``; empty for other folders."""
    data = [path for path in relative if path.endswith(".arrow")]
    folders = sorted({_folder(path) for path in data})
    is_saved = all(_DATA.fullmatch(_name(path)) for path in data)
    return folders if is_saved and len(folders) > 1 else []


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _name(path: str) -> str:
    return path.rpartition("/")[2]
