"""The name of a version: its dataset and its fingerprint. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class VersionKey:
    """The name of a version: its dataset and its fingerprint."""

    dataset: str
    fingerprint: str

    @property
    def folder(self) -> str:
        """The folder of the dataset in a cache directory; a name has no ``@``."""
        return self.dataset.replace("/", "@")

    @classmethod
    def of_folder(cls, folder: str, fingerprint: str) -> VersionKey:
        """The version in a folder."""
        return cls(folder.replace("@", "/"), fingerprint)


Moves = Mapping[VersionKey, Mapping[int, tuple[str, ...]]]  # -> shard -> the nodes it moves to
