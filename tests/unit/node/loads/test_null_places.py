"""A refused null is told by its file, row group, row and column, however many files there are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.desired import DesiredShard
from cache_server.node.links.heartbeat_messages import decode_plan
from cache_server.node.loads.loading import Job, SpooledTables, load_shard, run_whole
from cache_server.plan.pinned_version import plan_version
from cache_server.shards.store import ShardStore

GROUP_ROWS = 20
FILTER = "SELECT x, y FROM source WHERE y % 3 <> 1"
COMPUTED = "SELECT x + 1 AS x, y FROM source"


def write(folder: Path, nulls: Sequence[tuple[int, int]], rows: int, suffix: str) -> None:
    """Files of so many rows, whose column x has nulls at (file, row)."""
    folder.mkdir()
    for number in range(max(file for file, _ in nulls) + 2):
        x = [None if (number, row) in nulls else row for row in range(rows)]
        table = pa.table({"x": pa.array(x, pa.int64()), "y": range(rows)})
        path = folder / f"{number:04d}.{suffix}"
        if suffix == "csv":
            pc.write_csv(table, path)
        else:
            pq.write_table(table, path, row_group_size=GROUP_ROWS, compression="none")


def reason(tmp_path: Path, folder: Path, sql: str | None, **options: int) -> str:
    """Why a load of the first shard that has refused nulls fails."""
    plan = plan_version(DatasetSpec("t", folder, sql=sql, **options)).version  # type: ignore[arg-type]
    message = plan.to_load_plan(1)
    message.refuse_nulls = True
    decoded = decode_plan(message, pb.Secrets())
    with (
        ShardStore(tmp_path / "cache") as store,
        closing(SpooledTables(tmp_path / "scratch")) as spooled,
        pytest.raises(LoadError) as caught,
    ):
        if plan.shards is None:
            run_whole(store, Job(decoded))
        for shard in plan.shards or ():
            load_shard(store, Job(decoded, DesiredShard(shard.index, splits=shard.splits)), spooled)
    return str(caught.value)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sql", [None, COMPUTED, FILTER])
def test_the_first_null_and_the_files_of_the_others_are_named(
    tmp_path: Path, sql: str | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 4)) * GROUP_ROWS - int(rng.integers(5))
    kept = [row for row in range(rows) if row % 3 != 1]
    files = sorted(map(int, rng.choice(40, int(rng.integers(1, 9)), replace=False)))
    nulls = [(file, int(rng.choice(kept))) for file in files]
    folder = tmp_path / "files"
    write(folder, nulls, rows, "parquet")

    text = reason(tmp_path, folder, sql)

    (file, row), *further = nulls
    holds = "holds 1 null" if len(nulls) == 1 else f"holds {len(nulls)} nulls"
    assert text.startswith(f"column 'x' {holds}, and the spec has nulls: refuse, in {folder}/")
    place = "" if sql == FILTER else f", row {row} (row group {row // GROUP_ROWS})"
    assert f"in {folder}/{file:04d}.parquet{place}" in text
    names = [f"{each:04d}.parquet" for each, _ in further]
    more = f" and {len(names) - 3} more files" if len(names) > 3 else ""
    then = f", then in {', '.join(names[:3])}{more}: write" if names else ": write"
    assert then in text
    assert len(re.findall(r"\.parquet", text)) <= 4 and len(text) <= 600


@pytest.mark.parametrize("row", [0, 19, 20, 777, 1999])
def test_a_row_of_a_file_in_several_splits_is_numbered_in_its_file(
    tmp_path: Path, row: int
) -> None:
    folder = tmp_path / "files"
    write(folder, [(0, row)], 2000, "parquet")
    (folder / "0001.parquet").unlink()

    text = reason(tmp_path, folder, None, target_shard_bytes=4096)

    assert f"0000.parquet, row {row} (row group {row // GROUP_ROWS}): write" in text


def test_a_file_of_text_is_named_with_the_row(tmp_path: Path) -> None:
    write(tmp_path / "files", [(3, 7)], 30, "csv")

    assert "0003.csv, row 7: write" in reason(tmp_path, tmp_path / "files", None)


def test_a_null_of_a_whole_query_is_named_by_its_row(tmp_path: Path) -> None:
    write(tmp_path / "files", [(1, 4)], 10, "parquet")

    text = reason(tmp_path, tmp_path / "files", "SELECT x, y FROM source ORDER BY y, x")

    assert "in row 14 of the result of the query: write" in text


def test_further_columns_with_nulls_are_counted(tmp_path: Path) -> None:
    columns = {f"c{number}": pa.array([1, None]) for number in range(130)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")

    text = reason(tmp_path, tmp_path / "a.parquet", None)

    assert "; 'c1', 'c2', 'c3', 'c4' and 125 more too: write" in text and len(text) <= 600


# -- at the plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_refuses_what_a_load_would_with_the_same_text(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 4)) * GROUP_ROWS
    files = sorted(map(int, rng.choice(30, int(rng.integers(1, 7)), replace=False)))
    nulls = [(file, int(rng.integers(rows))) for file in files]
    folder = tmp_path / "files"
    write(folder, nulls, rows, "parquet")

    with pytest.raises(LoadError) as caught:
        plan_version(DatasetSpec("t", folder, nulls="refuse"))

    assert str(caught.value) == reason(tmp_path, folder, None)


@pytest.mark.parametrize("sql", [FILTER, COMPUTED, "SELECT y FROM source"])
def test_a_plan_is_not_refused_where_metadata_do_not_tell(tmp_path: Path, sql: str) -> None:
    write(tmp_path / "files", [(0, 1)], 10, "parquet")

    plan_version(DatasetSpec("t", tmp_path / "files", sql=sql, nulls="refuse"))


def test_a_plan_knows_the_nulls_of_files_that_lack_a_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2], "y": [1, 2]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"y": [1, 2, 3]}), tmp_path / "1.parquet")

    with pytest.raises(LoadError, match=r"'x' holds 3 nulls.* in .*/1\.parquet, row 0: write"):
        plan_version(DatasetSpec("t", tmp_path, nulls="refuse", missing_columns="null"))


def test_columns_of_paths_and_nested_ones_are_not_taken_for_nulls(tmp_path: Path) -> None:
    (tmp_path / "year=2020").mkdir()
    nested = pa.table({"x": [[1], [2]], "s": [{"a": 1}, {"a": 2}]})
    pq.write_table(nested, tmp_path / "year=2020" / "0.parquet")

    planned = plan_version(DatasetSpec("t", tmp_path, nulls="refuse"))

    assert planned.version.logical.names == ["x", "s", "year"]
