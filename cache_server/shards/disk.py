"""Durable writes and removals of files and directories."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

NOT_THE_FILES_FAULT = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM}


def fsync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on disk.

    Raises:
        OSError: they cannot be written.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_of(path: Path) -> Path:
    """The file that `replace_file` writes first; a killed process leaves it behind."""
    return path.with_name(f".{path.name}.tmp")


def replace_file(path: Path, text: str) -> None:
    """Replaces a file atomically; makes its directory.

    Raises:
        OSError: it cannot be written; the old file stays.
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
    """Removes a file, if there is one."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()


def remove(path: Path) -> None:
    """Removes a file, or as much of a directory as possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        remove_file(path)


def remove_empty(directory: Path) -> None:
    """Removes the directories of a version and of its dataset, if they are empty."""
    for path in (directory, directory.parent):
        with contextlib.suppress(OSError):  # it is not empty, or another thread removed it
            path.rmdir()
