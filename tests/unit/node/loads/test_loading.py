import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError
from cache_protocol.storage.memory_budget import load_bytes
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.desired import DesiredShard
from cache_server.node.links.heartbeat_messages import decode_plan
from cache_server.node.loads.loading import (
    CancelledError,
    Job,
    SpooledTables,
    load_shard,
    memory_bytes,
)
from cache_server.plan.pinned_version import PinnedVersion, plan_version
from cache_server.shards.store import ShardStore
from tests.waiting import files_below

SQL = 'SELECT * FROM "table" JOIN b USING (id) ORDER BY id'


@pytest.fixture
def plan(tmp_path: Path) -> PinnedVersion:
    """Of a whole query over two tables of two files each."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for part in range(2):
            ids = range(part * 10_000, part * 10_000 + 10_000)
            table = pa.table({"id": ids, f"of {name}": ids})
            pq.write_table(table, tmp_path / name / f"{part}.parquet")
    sources = {"table": str(tmp_path / "a"), "b": str(tmp_path / "b")}
    return plan_version(DatasetSpec("t", sources=sources, sql=SQL)).version


@pytest.fixture
def job(plan: PinnedVersion) -> Job:
    return Job(decode_plan(plan.to_load_plan(1), pb.Secrets()))


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[SpooledTables]:
    tables = SpooledTables(tmp_path / "scratch")
    yield tables
    tables.close()


def test_each_table_is_one_arrow_file_until_they_are_closed(
    job: Job, plan: PinnedVersion, whole: SpooledTables, tmp_path: Path
) -> None:
    paths = whole.paths(job, list(plan.tables))

    assert {name: pa.ipc.open_stream(path).read_all().num_rows for name, path in paths.items()} == {
        "table": 20_000,
        "b": 20_000,
    }
    whole.close()
    assert not (tmp_path / "scratch").exists()
    assert whole.paths(job, list(plan.tables)) == paths
    assert all(path.exists() for path in paths.values())


def test_closing_what_wrote_nothing_touches_nothing(whole: SpooledTables, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "of another").touch()

    whole.close()

    assert (tmp_path / "scratch" / "of another").exists()


def test_a_table_of_which_a_file_cannot_be_read_leaves_no_part_of_itself(
    job: Job, plan: PinnedVersion, whole: SpooledTables, tmp_path: Path
) -> None:
    with (tmp_path / "b" / "1.parquet").open("ab") as changed:
        changed.write(b" ")

    with pytest.raises(LoadError, match=r"1\.parquet changed since"):
        whole.paths(job, list(plan.tables))

    assert [path.name for path in files_below(tmp_path / "scratch")] == ["table.arrow"]


class SetAtTheSecondLook(threading.Event):
    """Cancels the load after one batch."""

    def is_set(self) -> bool:
        was_set = super().is_set()
        self.set()
        return was_set


def test_a_load_that_is_not_wanted_any_more_leaves_no_part_of_a_file(
    job: Job, plan: PinnedVersion, whole: SpooledTables, tmp_path: Path
) -> None:
    job.cancelled = SetAtTheSecondLook()

    with pytest.raises(CancelledError):
        whole.paths(job, [table for table in plan.tables if table.name == "b"])

    assert not files_below(tmp_path / "scratch")
    whole.close()
    assert not (tmp_path / "scratch").exists()


# -- memory ----------------------------------------------------------------------------------------


def needed(*source: Path | str, **options: Any) -> int:
    pinned = plan_version(DatasetSpec("t", source, **options)).version
    plan = decode_plan(pinned.to_load_plan(1), pb.Secrets())
    assert pinned.shards is not None
    return memory_bytes(Job(plan, DesiredShard(0, splits=pinned.shards[0].splits)))


def test_a_load_holds_the_rows_that_it_cannot_write_to_their_place_at_once(tmp_path: Path) -> None:
    numbers = pa.table({"n": range(100_000)})
    pq.write_table(numbers, tmp_path / "numbers.parquet")
    texts = pa.table({"text": pa.array(map(str, range(100_000)))})
    pq.write_table(texts, tmp_path / "texts.parquet")

    plain = needed(tmp_path / "numbers.parquet")

    assert needed(tmp_path / "numbers.parquet", filter="n > 3") == plain + numbers.nbytes
    held = needed(tmp_path / "texts.parquet") - load_bytes(
        (tmp_path / "texts.parquet").stat().st_size
    )
    assert held == pytest.approx(texts.nbytes, rel=0.2)


def test_a_whole_query_needs_what_the_largest_row_group_of_its_tables_does(
    job: Job, plan: PinnedVersion
) -> None:
    largest = max(split.group_bytes for table in plan.tables for split in table.splits)

    assert largest > 0
    assert memory_bytes(job) == load_bytes(largest)


def test_rows_of_another_type_than_planned_fail_the_load(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [0.1]}), tmp_path / "a.parquet")
    version = plan_version(
        DatasetSpec("t", str(tmp_path), sql="SELECT x + 1 AS x FROM source")
    ).version
    plan = replace(version, logical=pa.schema({"x": pa.float32()})).to_load_plan(1)
    assert version.shards is not None
    shard = DesiredShard(0, splits=version.shards[0].splits)

    with (
        ShardStore(tmp_path / "cache") as store,
        closing(SpooledTables(tmp_path / "scratch")) as spooled,
        pytest.raises(LoadError, match=r"a\.parquet: column 'x' comes as double, .* float: cast"),
    ):
        load_shard(store, Job(decode_plan(plan, pb.Secrets()), shard), spooled)
