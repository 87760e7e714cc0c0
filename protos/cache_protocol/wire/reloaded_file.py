"""A small file that is read again when it changes, such as a rotated token."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from cache_protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class ReloadedFile(Generic[_T]):
    """The parsed content of a file. Thread-safe without a lock, which a fork could leave taken.

    A change that cannot be read or parsed is logged once; the last good content stays.

    Args:
        path: looked at with every call of `value`.
        parse: raises ValueError for bad content; its message must quote no secret.

    Raises:
        ConfigError: the file cannot be read or parsed now; names it.
    """

    def __init__(self, path: str | os.PathLike[str], parse: Callable[[str], _T]) -> None:
        self._path = Path(path)
        self._parse = parse
        try:
            self._seen = self._look()
            self._value = self._read()
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{self._path}: {error}") from None

    def value(self) -> _T:
        """The newest content that could be parsed."""
        try:
            seen: object = self._look()
        except OSError as error:
            seen = error.errno
        if seen != self._seen:
            self._seen = seen
            try:
                self._value = self._read()
                logger.info("file read again path=%s", self._path)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                logger.error("file not read again path=%s reason=%s", self._path, reason)
        return self._value

    def _look(self) -> object:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> _T:
        return self._parse(self._path.read_text(encoding="utf-8"))
