"""What the suite shares: real clusters on free ports, and tables whose rows know their number."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_client import CacheClient
from cache_client.reader import Reader
from cache_server import LocalCluster


def pytest_configure() -> None:
    """Where the tests run in the background of a script, SIGINT is ignored, and by children too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Two cache nodes that a test must leave as it found them; use `dataset_name` for names."""
    with LocalCluster(num_nodes=2) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> CacheClient:
    return CacheClient(cluster.endpoint)


@pytest.fixture
def dataset_name(request: pytest.FixtureRequest, client: CacheClient) -> Iterator[str]:
    """A name no other test uses; its dataset is dropped afterwards."""
    allowed = "".join(c if c.isalnum() else "-" for c in request.node.name)
    name = f"t-{allowed}"[:120]
    yield name
    if name in {info.name for info in client.datasets()}:
        client.drop(name)


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each fetch of a reader brought."""
    sizes: list[int] = []
    fetch = Reader.fetch

    def noting(self: Reader, row_ids: Any) -> Any:
        sizes.append(len(row_ids))
        return fetch(self, row_ids)

    monkeypatch.setattr(Reader, "fetch", noting)
    return sizes


def numbered_table(num_rows: int, start: int = 0) -> pa.Table:
    """Columns of each kind; ``row`` is the row's number in source order."""
    row = np.arange(start, start + num_rows, dtype=np.int64)
    return pa.table(
        {
            "row": row,
            "a": (row * 0.5).astype(np.float32),
            "b": (row * 2.0).astype(np.float32),
            "label": (row % 7).astype(np.int32),
            "text": pa.array([f"row {number}" for number in row], pa.string()),
        }
    )


def write_numbered(
    directory: Path, num_rows: int, *, files: int = 1, row_group_size: int | None = None
) -> Path:
    """A folder of Parquet files that hold `numbered_table` in order of their names."""
    directory.mkdir(parents=True, exist_ok=True)
    bounds = [num_rows * i // files for i in range(files + 1)]
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        pq.write_table(
            numbered_table(stop - start, start),
            directory / f"part-{index:03d}.parquet",
            row_group_size=row_group_size or max(1, stop - start),
        )
    return directory
