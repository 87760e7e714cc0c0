"""Files and directories on disk: written for good, removed for good."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def fsync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on disk.

    Raises:
        OSError: they are not.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_of(path: Path) -> Path:
    """What `replace_file` writes first; left behind by a process that was killed meanwhile."""
    return path.with_name(f".{path.name}.tmp")


def replace_file(path: Path, text: str) -> None:
    """Writes a file as a whole, and makes its directory.

    Raises:
        OSError: it cannot be written; what was there still is, and nothing else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_of(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        fsync(temporary)
        os.replace(temporary, path)
    except OSError:
        remove_file(temporary)
        raise


def remove_file(path: Path) -> None:
    """Removes a file; none there, and none that could be there, is as good."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()


def remove(path: Path) -> None:
    """Removes a file, or a directory as far as it can be."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        remove_file(path)


def remove_empty(directory: Path) -> None:
    """Removes the directory of a version and that of its dataset where nothing is left in them."""
    for path in (directory, directory.parent):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
