"""The name of a version: its dataset and its fingerprint. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VersionKey:
    """The name of a version: its dataset and its fingerprint."""

    dataset: str
    fingerprint: str
