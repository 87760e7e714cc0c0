"""Nodes keep to the memory limit of their control group: the kernel ends none of them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

LIMIT_BYTES = 700 << 20
_GROUPS = Path("/sys/fs/cgroup")
WAIT_S = 120.0

PROGRAM = textwrap.dedent(
    """
    import sys
    from cache_client import CacheClient, DatasetSpec
    from cache_client import LoadError
    from cache_server import LocalCluster

    small, large = sys.argv[1:]
    with LocalCluster(2) as cluster:
        client = CacheClient(cluster.endpoint)
        try:
            client.load(DatasetSpec("large", large))
        except LoadError as error:
            print("refused:", error)
        print("rows:", client.load(DatasetSpec("small", small)).num_rows)
    """
)


class Group:
    """A control group with a memory limit, made for a test."""

    def __init__(self, limit_bytes: int) -> None:
        is_old = (_GROUPS / "memory" / "memory.limit_in_bytes").exists()
        self.folder = _GROUPS / ("memory" if is_old else "") / f"data-cache-test-{os.getpid()}"
        self.folder.mkdir()
        name = "memory.limit_in_bytes" if is_old else "memory.max"
        (self.folder / name).write_text(str(limit_bytes))
        self._events = self.folder / ("memory.oom_control" if is_old else "memory.events")

    @property
    def kills(self) -> int:
        """Processes that the kernel has ended for want of memory."""
        lines = dict(line.split() for line in self._events.read_text().splitlines())
        return int(lines["oom_kill"])

    def join(self) -> None:
        (self.folder / "cgroup.procs").write_text("0")


@pytest.fixture
def group() -> Iterator[Group]:
    try:
        made = Group(LIMIT_BYTES)
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield made
    made.folder.rmdir()


def test_a_load_that_does_not_fit_in_the_group_is_refused_and_the_next_one_fits(
    tmp_path: Path, group: Group
) -> None:
    for name, num_rows in [("small", 100_000), ("large", 16_000_000)]:
        zeros = np.zeros(num_rows, np.float64)
        pq.write_table(pa.table({f"f{i}": zeros for i in range(8)}), tmp_path / f"{name}.parquet")

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "small.parquet", tmp_path / "large.parquet"],
        preexec_fn=group.join,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )

    assert done.returncode == 0, done.stderr
    assert group.kills == 0
    refused, rows = done.stdout.splitlines()
    assert "cannot fit" in refused and "memory limit" in refused
    assert rows == "rows: 100000"
