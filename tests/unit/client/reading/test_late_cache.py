"""What a trainer says while it waits for a cache that is not there."""

from __future__ import annotations

import logging

import pytest

from cache_client import CacheIterableDataset, Connection, NodeUnavailableError
from cache_client.reading import shard_maps as plan

NOBODY = "grpc://127.0.0.1:1"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == plan.__name__]


def test_it_says_once_for_what_it_waits_where_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plan, "_WARN_AFTER_S", 0.0)

    with caplog.at_level(logging.WARNING), pytest.raises(NodeUnavailableError):
        CacheIterableDataset("trips", cache=Connection(NOBODY, deadline_s=0.5), batch_size=1)

    (warning,) = warnings(caplog)
    assert warning.startswith(f"waiting up to 0.5 s for dataset 'trips' at {NOBODY}: ")
    assert "refused" in warning


def test_it_says_nothing_at_first(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(NodeUnavailableError):
        CacheIterableDataset("trips", cache=Connection(NOBODY, deadline_s=0.1), batch_size=1)

    assert warnings(caplog) == []
