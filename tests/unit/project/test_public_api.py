"""The public names and signatures are those of the snapshot."""

from __future__ import annotations

import pytest

from tests.public_api import SNAPSHOT, describe


@pytest.fixture(autouse=True)
def errors_are_short() -> None:
    """Errors are as users have them: the fixture of the suite gives them another constructor."""


def test_the_public_names_and_signatures_are_those_of_the_snapshot() -> None:
    """Where you mean the change: `python -m tests.public_api`, and a line in CHANGELOG.md."""
    assert describe().splitlines() == SNAPSHOT.read_text(encoding="utf-8").splitlines()
