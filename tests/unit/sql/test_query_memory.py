"""Queries over whole tables in a limited memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cache_protocol.errors import LoadError
from cache_server.node.loads import staging
from cache_server.sql import loader

MEMORY_BYTES = 20 << 20


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Path]:
    keys = np.random.default_rng(1).permutation(1_000_000)
    table = pa.table({"k": keys, "x": keys * 0.5})
    staging.write_arrow(tmp_path / "t.arrow", table.schema, iter(table.to_batches(65536)))
    return {"t": tmp_path / "t.arrow"}


def test_a_sort_that_does_not_fit_spills_and_gives_the_same_rows(tables: dict[str, Path]) -> None:
    sql = "SELECT k, x FROM t ORDER BY k"
    found = pa.Table.from_batches(loader.run_whole(sql, tables, MEMORY_BYTES))
    assert found.column("k").to_numpy().tolist() == list(range(1_000_000))
    assert sorted(path.name for path in tables["t"].parent.iterdir()) == ["t.arrow"]


def test_a_join_that_does_not_fit_fails_by_name(tables: dict[str, Path]) -> None:
    sql = "SELECT a.k AS k FROM t a CROSS JOIN t b ORDER BY a.k"
    with pytest.raises(LoadError, match=r"cannot run .*: a query gets 20.* MiB.*more memory"):
        list(loader.run_whole(sql, tables, MEMORY_BYTES))
