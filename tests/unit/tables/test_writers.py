"""Files of many writers, with DuckDB's answers as the truth: see `benchmarks.trials.writers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trials.writers import WRITERS, differences

TABLES, FILTERS = 40, 4


@pytest.mark.parametrize("writer", WRITERS)
def test_filters_keep_the_rows_that_duckdb_keeps(writer: str, tmp_path: Path) -> None:
    own = range(list(WRITERS).index(writer), TABLES, len(WRITERS))
    found = [text for table in own for text in differences(table, 0, writer, FILTERS, tmp_path)]
    assert not found, "\n".join(found)
