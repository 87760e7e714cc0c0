"""Unit tests of some rooms are watched for errors that are too long to be read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cache_protocol.errors import CacheError, ConfigError

_LONGEST_ERROR = 600  # characters
# Those of SQL and of stores list every function and option.
_ROOMS = {"client", "protocol", "jobs", "node", "coordination"}


@pytest.fixture(autouse=True)
def errors_are_short(request: pytest.FixtureRequest) -> Iterator[None]:
    """No error that is made in this process during a test is too long to be read.

    None lists all files, columns or nodes: see `cache_protocol.errors.some_of`.
    """
    if not _ROOMS & set(request.path.parts):
        yield
        return
    long: list[str] = []

    def note(error: CacheError, *args: object) -> None:
        Exception.__init__(error, *args)
        # Bad settings are quoted all at once.
        problems = str(error).split("; ") if isinstance(error, ConfigError) else [str(error)]
        if max(map(len, problems)) > _LONGEST_ERROR:
            long.append(f"{type(error).__name__}: {error}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheError, "__init__", note)
        yield
    assert not long
