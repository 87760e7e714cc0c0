"""The public names and signatures are those of the snapshot."""

from __future__ import annotations

import pytest

from cache_protocol.errors import CacheError
from tests.public_api import SNAPSHOT, describe


@pytest.fixture(autouse=True)
def errors_as_users_have_them(bad_errors: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite gives them another constructor, to read each."""
    monkeypatch.delattr(CacheError, "__init__")


def test_the_public_names_and_signatures_are_those_of_the_snapshot() -> None:
    """Where you mean the change: `python -m tests.public_api`, and a line in CHANGELOG.md."""
    assert describe().splitlines() == SNAPSHOT.read_text(encoding="utf-8").splitlines()
