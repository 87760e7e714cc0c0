"""Nodes that end and start again: sealed shards are adopted, damaged ones noticed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    Connection,
    DatasetInfo,
    DatasetSpec,
    Reading,
)
from cache_protocol.errors import ConfigError
from cache_server import LocalCluster
from cache_server.config import NodeConfig
from cache_server.local import LocalNode
from cache_server.server import CacheServer
from tests.conftest import numbered_table, write_numbered
from tests.waiting import wait_until

WAIT_S = 30.0
NUM_ROWS, FILES = 80, 8  # each file becomes a shard


@pytest.fixture(scope="module")
def restartable() -> Iterator[LocalCluster]:
    """Two nodes that these tests may end; all are running between two tests."""
    with LocalCluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "source", NUM_ROWS, files=FILES)


@pytest.fixture
def loaded(restartable: LocalCluster, source: Path) -> Iterator[DatasetInfo]:
    client = CacheClient(restartable.endpoint)
    yield client.load(DatasetSpec("table", source, target_shard_bytes=1))
    client.drop("table")


def end_all(cluster: LocalCluster, end: Callable[[LocalNode], object] = LocalNode.kill) -> None:
    for node in cluster.nodes:
        end(node)


def start_all(cluster: LocalCluster) -> None:
    for node in cluster.nodes:
        node.start()
    cluster.wait_for_nodes()


def wait_for(cluster: LocalCluster, state: str) -> DatasetInfo:
    client = CacheClient(cluster.endpoint)
    wait_until(lambda: client.describe("table").state == state, WAIT_S, f"the table is {state}")
    return client.describe("table")


def rows(cluster: LocalCluster) -> pa.RecordBatch:
    return CacheClient(cluster.endpoint).head("table", NUM_ROWS)


def shard_files(cluster: LocalCluster) -> dict[Path, int]:
    """Every shard file with its inode: a file that was written again has another one."""
    return {
        path: path.stat().st_ino
        for node in cluster.nodes
        for path in sorted(node.cache_dir.glob("table/*/shard-*.arrow"))
    }


@pytest.mark.parametrize("end", [LocalNode.kill, LocalNode.stop], ids=["killed", "stopped"])
def test_restarted_nodes_serve_the_same_rows_and_read_no_source(
    restartable: LocalCluster,
    loaded: DatasetInfo,
    source: Path,
    end: Callable[[LocalNode], object],
) -> None:
    before, files = rows(restartable), shard_files(restartable)
    end_all(restartable, end)
    shutil.rmtree(source)

    start_all(restartable)
    info = wait_for(restartable, "ready")

    assert info == loaded
    assert rows(restartable).equals(before)
    assert before.to_pylist() == numbered_table(NUM_ROWS).to_pylist()
    assert shard_files(restartable) == files


def test_the_order_in_which_nodes_come_back_does_not_matter(
    restartable: LocalCluster, loaded: DatasetInfo, source: Path
) -> None:
    files = shard_files(restartable)
    end_all(restartable)
    shutil.rmtree(source)

    for node in reversed(restartable.nodes):
        node.start()
    restartable.wait_for_nodes()

    assert wait_for(restartable, "ready") == loaded
    assert shard_files(restartable) == files


def test_a_restart_of_the_coordinator_alone_changes_nothing(
    restartable: LocalCluster, loaded: DatasetInfo, source: Path
) -> None:
    files = shard_files(restartable)
    shutil.rmtree(source)

    restartable.nodes[0].kill()
    restartable.nodes[0].start()
    restartable.wait_for_nodes()

    assert wait_for(restartable, "ready") == loaded
    assert shard_files(restartable) == files
    assert rows(restartable).column("row").to_pylist() == [*range(NUM_ROWS)]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x01
    path.write_bytes(data)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip_a_byte, cut_in_half, Path.unlink])
def test_a_damaged_shard_file_is_noticed_and_loaded_again_from_the_source(
    restartable: LocalCluster, loaded: DatasetInfo, damage: Callable[[Path], object]
) -> None:
    files = shard_files(restartable)
    victim = sorted(files)[0]
    good = victim.read_bytes()
    end_all(restartable)
    damage(victim)
    before = {path: path.stat().st_ino for path in files if path != victim}

    start_all(restartable)
    info = wait_for(restartable, "ready")

    assert info == loaded
    assert rows(restartable).to_pylist() == numbered_table(NUM_ROWS).to_pylist()
    assert victim.read_bytes() == good
    assert before.items() <= shard_files(restartable).items()  # the others were adopted


def test_a_shard_that_is_damaged_while_it_is_served_is_made_anew_when_it_is_copied(
    restartable: LocalCluster, loaded: DatasetInfo, source: Path
) -> None:
    damaged = next(restartable.nodes[1].cache_dir.glob("table/*/shard-*.arrow"))
    intact = damaged.read_bytes()
    with damaged.open("r+b") as file:  # in place: it is mapped
        file.seek(len(intact) // 2)
        file.write(b"rotten")

    client = CacheClient(restartable.endpoint)
    client.load(DatasetSpec("table", source, target_shard_bytes=1, replicas=2))
    wait_until(
        lambda: all(len(nodes) == 2 for nodes in client.describe("table").placement.values()),
        WAIT_S,
        "both nodes hold every shard",
    )

    assert damaged.read_bytes() == intact
    assert "shard damaged" in restartable.nodes[1].log_tail(100_000)
    assert rows(restartable).to_pylist() == numbered_table(NUM_ROWS).to_pylist()


def test_a_damaged_shard_whose_source_is_gone_fails_the_dataset_with_the_path(
    restartable: LocalCluster, loaded: DatasetInfo, source: Path
) -> None:
    files = shard_files(restartable)
    victim = sorted(files)[0]
    shard = int(victim.stem.removeprefix("shard-"))
    end_all(restartable)
    flip_a_byte(victim)
    shutil.rmtree(source)

    start_all(restartable)
    info = wait_for(restartable, "failed")

    assert info.error is not None
    assert str(source / f"part-{shard:03d}.parquet") in info.error
    # What is whole is kept: put the file back, and the dataset can be asked for again.
    assert set(shard_files(restartable)) == set(files) - {victim}


def test_a_half_written_shard_is_removed_when_its_node_starts(
    restartable: LocalCluster, loaded: DatasetInfo
) -> None:
    folder = sorted(shard_files(restartable))[0].parent
    half = folder / ".shard-00099.arrow.0123.tmp"
    end_all(restartable)
    half.write_bytes(b"ARROW1 half a shard")

    start_all(restartable)
    wait_for(restartable, "ready")

    assert not half.exists()


def test_a_changed_source_is_another_version_that_replaces_the_old_one(
    restartable: LocalCluster, loaded: DatasetInfo, source: Path
) -> None:
    client = CacheClient(restartable.endpoint)
    write_numbered(source, NUM_ROWS + 8, files=FILES)

    info = client.load(DatasetSpec("table", source, target_shard_bytes=1))

    assert info.fingerprint != loaded.fingerprint
    assert info.num_rows == NUM_ROWS + 8
    assert client.head("table", 100).column("row").to_pylist() == [*range(NUM_ROWS + 8)]
    wait_until(
        lambda: {path.parent.name for path in shard_files(restartable)} == {info.fingerprint},
        WAIT_S,
        "the old version is gone",
    )


def test_a_load_that_was_under_way_when_everything_ended_goes_on(
    restartable: LocalCluster, tmp_path: Path
) -> None:
    client = CacheClient(restartable.endpoint)
    source = write_numbered(tmp_path / "large", 20_000, files=20)
    client.load(DatasetSpec("table", source, target_shard_bytes=1), wait=False)

    end_all(restartable)
    start_all(restartable)

    assert wait_for(restartable, "ready").num_rows == 20_000
    assert CacheClient(restartable.endpoint).head("table", 20_000).column("row").to_pylist() == [
        *range(20_000)
    ]
    client.drop("table")


def test_a_cluster_on_the_directory_of_an_earlier_one_adopts_its_datasets(
    tmp_path: Path, source: Path
) -> None:
    with LocalCluster(nodes=2, cache_dir=tmp_path / "cache") as first:
        client = CacheClient(first.endpoint)
        info = client.load(DatasetSpec("table", source, target_shard_bytes=1, replicas=2))
        wait_until(
            lambda: all(len(nodes) == 2 for nodes in client.describe("table").placement.values()),
            WAIT_S,
            "two replicas of each shard",
        )
    shutil.rmtree(source)

    with LocalCluster(nodes=2, cache_dir=tmp_path / "cache") as second:
        again = wait_for(second, "ready")

        assert again.fingerprint == info.fingerprint
        assert rows(second).to_pylist() == numbered_table(NUM_ROWS).to_pylist()
        describe = CacheClient(second.endpoint).describe
        wait_until(
            lambda: all(len(nodes) == 2 for nodes in describe("table").placement.values()),
            WAIT_S,
            "both replicas of each shard, adopted",
        )
    assert (tmp_path / "cache").exists()


def test_a_node_whose_coordinator_is_forgotten_keeps_its_shards(
    restartable: LocalCluster, loaded: DatasetInfo
) -> None:
    """Started without ``--coordinator`` it is its own, and knows of nothing that it holds."""
    node, files = restartable.nodes[1], shard_files(restartable)
    node.kill()
    config = NodeConfig(
        cache_dir=node.cache_dir, bind="127.0.0.1", flight_port=0, control_port=0, http_port=0
    )

    with pytest.raises(ConfigError, match=rf"{node.cache_dir} holds \d+ bytes.*coordinator"):
        CacheServer(config)

    assert shard_files(restartable) == files
    node.start()
    assert wait_for(restartable, "ready").num_rows == loaded.num_rows


def test_a_coordinator_that_lost_its_disk_costs_no_reader_a_row_and_no_node_its_shards(
    source: Path,
) -> None:
    spec = DatasetSpec("table", source, target_shard_bytes=1, replicas=2)
    with LocalCluster(nodes=2) as cluster:
        client = CacheClient(cluster.endpoint)
        loaded = client.load(spec)
        expected = rows(cluster).column("row").to_pylist()
        files = {
            path: inode for path, inode in shard_files(cluster).items() if "node-1" in str(path)
        }
        dataset = CacheIterableDataset(
            "table",
            cache=Connection(cluster.endpoint, local=False),
            batch_size=1,
            reading=Reading(prefetch_batches=1, message_bytes=1),
        )
        found: list[int] = []
        for batch in dataset:
            found += batch["row"].tolist()
            if len(found) == 3:  # its pod was replaced by one on another machine
                cluster.nodes[0].kill()
                shutil.rmtree(cluster.nodes[0].cache_dir)
                cluster.nodes[0].start()
        assert found == expected

        again = client.load(spec)

        assert (again.fingerprint, again.num_rows) == (loaded.fingerprint, loaded.num_rows)
        assert files.items() <= shard_files(cluster).items()
