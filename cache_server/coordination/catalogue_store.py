"""Where a coordinator keeps its catalogue: named documents of bytes, each replaced as a whole."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Protocol

from cache_protocol.errors import ConfigError, NodeUnavailableError
from cache_server.shards.disk import NOT_THE_FILES_FAULT, remove_file, replace_file


class CatalogueLostError(NodeUnavailableError, OSError):
    """Another coordinator has the catalogue: what this one decides no longer counts."""

    strerror = "another node coordinates the cache by now"

    def __init__(self) -> None:
        super().__init__(self.strerror)


class CatalogueStore(Protocol):
    """Documents by name. Thread-safe.

    A name is that of a file, or ``folder/file``. Every change raises an `OSError` if it did not
    happen, and a `CatalogueLostError` for good once another coordinator has the store.
    """

    def exists(self) -> bool:
        """Whether a coordinator ever used it."""

    def age_s(self) -> float:
        """Seconds since a coordinator first used it; the first call counts as use."""

    def names(self, folder: str) -> list[str]:
        """The documents of a folder, the one that was written first first."""

    def read(self, name: str) -> bytes | None:
        """A document; None: there is none.

        Raises:
            OSError: it cannot be read.
            ConfigError: this process may not read it, or has no memory or handle left for it.
        """

    def write(self, name: str, content: str) -> None:
        """Makes or replaces a document."""

    def remove(self, *names: str) -> None:
        """Removes documents, if they are there."""

    def rename(self, name: str, new: str) -> None:
        """Gives a document another name in its folder; one that has it is replaced."""

    def shown(self, name: str) -> str:
        """Where a document is, for people."""


class FileStore:
    """A `CatalogueStore` of files in a directory, for the only coordinator that uses it.

    <directory>/.catalogue-made    empty; its time is the first start
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made = directory / ".catalogue-made"

    def exists(self) -> bool:
        """See `CatalogueStore`."""
        used = (".catalogue-made", ".catalogue", ".members.json")
        return any((self._directory / name).exists() for name in used)

    def age_s(self) -> float:
        """See `CatalogueStore`."""
        if not self._made.exists():
            if self.exists():
                return math.inf  # of a release that did not write it
            self._made.parent.mkdir(parents=True, exist_ok=True)
            self._made.touch()
        return max(0.0, time.time() - self._made.stat().st_mtime)

    def names(self, folder: str) -> list[str]:
        """See `CatalogueStore`."""
        paths = (self._directory / folder).glob("*")
        ordered = sorted(paths, key=lambda path: path.lstat().st_mtime_ns)
        return [f"{folder}/{path.name}" for path in ordered]

    def read(self, name: str) -> bytes | None:
        """See `CatalogueStore`."""
        path = self._directory / name
        if not path.exists():
            return None
        try:
            return path.read_bytes()
        except OSError as error:
            if error.errno in NOT_THE_FILES_FAULT:
                raise ConfigError(f"cannot read {path}: {error.strerror}") from None
            raise

    def write(self, name: str, content: str) -> None:
        """See `CatalogueStore`."""
        replace_file(self._directory / name, content)

    def remove(self, *names: str) -> None:
        """See `CatalogueStore`."""
        for name in names:
            remove_file(self._directory / name)

    def rename(self, name: str, new: str) -> None:
        """See `CatalogueStore`."""
        (self._directory / name).replace(self._directory / new)

    def shown(self, name: str) -> str:
        """See `CatalogueStore`."""
        return str(self._directory / name)
