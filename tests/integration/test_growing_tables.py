"""Tables that grow: only new files are read, and old rows keep their files and numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.manifest import DataFileContent

from cache_client import CacheClient, CacheIterableDataset, DatasetSpec
from cache_server import LocalCluster
from cache_server.plan.pinned_version import PinnedVersion, plan_version
from cache_server.plan.shard_plan import ShardPlan, cut_shards, same_shards
from cache_server.source.pinned import SourceFile, Split
from tests.iceberg_tables import append_files, described_file, opened_catalog, with_deletes
from tests.iceberg_tables import written_file as iceberg_file
from tests.job_arguments import grouped
from tests.waiting import wait_until

ROWS = 50  # of a file
TOGETHER = 3  # files in a shard


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, cache_dir=tmp_path / "cache") as running:
        yield running


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def numbers(start: int) -> pa.Table:
    rows = np.arange(start, start + ROWS, dtype=np.int64)
    return pa.table({"row": rows, "half": rows / 2})


def spec(source: Path | str, **changes: object) -> DatasetSpec:
    file_bytes = ROWS * 16
    return DatasetSpec("table", source, target_shard_bytes=TOGETHER * file_bytes, **changes)  # type: ignore[arg-type]


def rows_of(nodes: LocalCluster, **arguments: object) -> list[int]:
    dataset = CacheIterableDataset(
        "table", **grouped(cache=nodes.endpoint, batch_size=128, shuffle=False, **arguments)
    )
    return [row for batch in dataset for row in batch["row"].tolist()]


class Folder:
    """A folder that changes at random, and a model of the shards that are made of it."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._random = random.Random(seed)
        self._written = 0
        self._shards: tuple[ShardPlan, ...] = ()
        self.files: dict[str, tuple[int, int]] = {}  # name -> first row, and which writing
        for number in range(8):
            self._write(f"f{number * 10:04d}")

    def _write(self, name: str) -> None:
        self._written += 1
        start = self._written * 1000
        path = self._path / f"{name}.parquet"
        path.unlink(missing_ok=True)
        pq.write_table(numbers(start), path)
        self.files[name] = start, self._written

    def change(self) -> None:
        kinds = self._random.choices(["append", "insert", "replace", "delete"], k=2)
        for kind in kinds:
            name = self._random.choice(sorted(self.files))
            if kind == "append":
                self._write(f"f{int(max(self.files)[1:]) + 10:04d}")
            elif kind == "insert":
                self._write(f"f{int(name[1:]) + self._random.randrange(1, 10):04d}")
            elif kind == "replace":
                self._write(name)
            elif len(self.files) > 1:
                del self.files[name]
                (self._path / f"{name}.parquet").unlink()

    def rows(self) -> list[int]:
        starts = (self.files[name][0] for name in sorted(self.files))
        return [row for start in starts for row in range(start, start + ROWS)]

    def load(self) -> int:
        """The number of files that a load must read."""
        splits = [
            Split(SourceFile(name, self.files[name][1], 0), 0, 1, ROWS, 1)
            for name in sorted(self.files)
        ]
        before = {shard.splits for shard in self._shards}
        self._shards = cut_shards(splits, TOGETHER, self._shards)
        return sum(len(shard.splits) for shard in self._shards if shard.splits not in before)


def test_any_change_of_a_folder_gives_its_rows_and_reads_no_shard_that_stayed(
    nodes: LocalCluster, source: Path
) -> None:
    client = CacheClient(nodes.endpoint)
    folder, fingerprint = Folder(source, seed=0), ""
    for step in range(6):
        info, to_read = client.load(spec(source, replicas=2)), folder.load()
        if info.fingerprint != fingerprint:  # else nothing changed
            assert info.files_read == to_read, step
        fingerprint = info.fingerprint
        assert rows_of(nodes, local=bool(step % 2)) == folder.rows(), step
        assert client.load(spec(source, replicas=2)).fingerprint == fingerprint
        folder.change()


def test_new_files_take_no_second_copy_of_the_old_rows(nodes: LocalCluster, source: Path) -> None:
    client = CacheClient(nodes.endpoint)
    for number in range(5):
        pq.write_table(numbers(number * ROWS), source / f"{number}.parquet")
    first = client.load(spec(source, replicas=2))
    reader = CacheIterableDataset("table", cache=nodes.endpoint, batch_size=1, shuffle=False)
    batches = iter(reader)
    next(batches)  # leases the first version
    stored = [node.stored_bytes for node in client.nodes()]
    pq.write_table(numbers(5 * ROWS), source / "5.parquet")

    second = client.load(spec(source, replicas=2))

    assert (second.shards_reused, second.files_read, second.num_shards) == (2, 1, 3)
    added = second.num_bytes - first.num_bytes
    grown = [node.stored_bytes for node in client.nodes()]
    assert grown == [before + added for before in stored]
    names = [path.stat() for path in (nodes.cache_dir).glob("*/table/*/shard-*.arrow")]
    assert len(names) == 2 * (2 + 3)  # both versions, on both nodes
    assert len({stat.st_ino for stat in names}) == 2 * 3
    assert sum(int(batch["row"]) for batch in batches) == sum(range(5 * ROWS))
    assert rows_of(nodes) == [*range(6 * ROWS)]
    forecast = client.plan(spec(source, replicas=2))
    assert (forecast.shards_reused, forecast.fingerprint) == (3, second.fingerprint)


def test_a_node_that_restarts_during_a_refresh_shares_the_files_that_it_has(
    nodes: LocalCluster, source: Path
) -> None:
    client = CacheClient(nodes.endpoint)
    for number in range(12):
        pq.write_table(numbers(number * ROWS), source / f"{number:02d}.parquet")
    client.load(spec(source))
    nodes.nodes[1].kill()
    pq.write_table(numbers(12 * ROWS), source / "12.parquet")
    client.load(spec(source), wait=False)

    nodes.nodes[1].start()
    wait_until(lambda: client.describe("table").state == "ready", 30.0, "the refresh")

    assert client.describe("table").num_rows == 13 * ROWS
    assert client.describe("table").files_read == 1
    assert rows_of(nodes) == [*range(13 * ROWS)]
    nodes.nodes[1].restart()
    wait_until(lambda: rows_of(nodes) == [*range(13 * ROWS)], 30.0, "the node")


def test_when_the_files_of_the_version_before_are_gone_the_source_is_read(
    nodes: LocalCluster, source: Path
) -> None:
    client = CacheClient(nodes.endpoint)
    for number in range(6):
        pq.write_table(numbers(number * ROWS), source / f"{number}.parquet")
    first = client.load(spec(source))
    for path in nodes.cache_dir.glob(f"*/table/{first.fingerprint}/shard-*.arrow"):
        path.unlink()  # no node knows yet
    pq.write_table(numbers(6 * ROWS), source / "6.parquet")

    second = client.load(spec(source))

    assert (second.shards_reused, second.files_read) == (2, 7)
    assert rows_of(nodes) == [*range(7 * ROWS)]


def test_what_is_added_to_a_delta_table_comes_last_and_is_all_that_is_read(
    nodes: LocalCluster, source: Path
) -> None:
    client, uri = CacheClient(nodes.endpoint), str(source)
    for number in range(5):
        write_deltalake(uri, numbers(number * ROWS), mode="append")
    client.load(spec(uri, format="delta"))
    write_deltalake(uri, numbers(5 * ROWS), mode="append")

    grown = client.load(spec(uri, format="delta"))

    assert (grown.files_read, grown.shards_reused) == (1, 2)
    assert rows_of(nodes) == [*range(6 * ROWS)]
    DeltaTable(uri).delete(f"row = {3 * ROWS}")  # rewrites one file
    fewer = client.load(spec(uri, format="delta"))
    assert fewer.shards_reused == 2
    assert sorted(rows_of(nodes)) == [row for row in range(6 * ROWS) if row != 3 * ROWS]


def shards_of(version: PinnedVersion) -> tuple[ShardPlan, ...]:
    assert version.shards is not None
    return version.shards


def test_deletes_of_one_file_of_an_iceberg_table_change_its_shard_only(tmp_path: Path) -> None:
    with opened_catalog(tmp_path) as catalog:
        table = catalog.create_table("ns.t", numbers(0).schema)
        versions: list[PinnedVersion] = []

        def plan() -> PinnedVersion:
            wanted = spec(table.refresh().metadata_location)
            with_pins = plan_version(wanted, versions[::-1])
            with_pins.close()
            versions.append(with_pins.version)
            return with_pins.version

        # Later files have earlier names.
        for number in range(7):
            append_files(table, iceberg_file(table, f"{9 - number}.parquet", numbers(number)))
        before = shards_of(plan())
        append_files(table, iceberg_file(table, "1.parquet", numbers(7)))
        grown = shards_of(plan())
        assert same_shards(grown, before) == {0: 0, 1: 1, 2: 2}
        assert [Path(s.file.path).stem for shard in grown for s in shard.splits] == [*"98765431"]

        deleted = pa.table(
            {"file_path": [grown[1].splits[0].file.path], "pos": pa.array([3], pa.int64())}
        )
        path = tmp_path / "deletes.parquet"
        pq.write_table(deleted, path)
        with_deletes(table, [described_file(path, 1, DataFileContent.POSITION_DELETES)])
        fewer = shards_of(plan())

        assert same_shards(fewer, grown).keys() < {0, 1, 2, 3}
        assert 1 not in same_shards(fewer, grown)
