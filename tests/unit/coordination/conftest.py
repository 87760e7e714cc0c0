"""What the tests of the coordinator share: a fake clock, fake nodes, no thread, no socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_server.coordination.coordinator import Coordinator
from tests.conftest import write_numbered
from tests.fake_nodes import FILES, ROWS_PER_FILE, Clock, make_coordinator


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def coordinator(tmp_path: Path, clock: Clock) -> Coordinator:
    return make_coordinator(tmp_path, clock)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "source", FILES * ROWS_PER_FILE, files=FILES)
