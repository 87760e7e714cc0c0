"""Rows of nodes on the same machine, read from their files: which files, and which never."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cache_client import CacheClient, CacheIterableDataset, DatasetSpec
from cache_client.flight import connections, routing
from cache_client.order import order as ordering
from cache_client.reading import local_shards
from cache_protocol.storage.disk_reads import DiskReads
from cache_protocol.storage.mapped_table import MappedTable
from cache_protocol.storage.shard_files import MANIFEST, NODE_ID_FILE
from cache_protocol.wire.credentials import Credentials, find_token
from cache_server import LocalCluster
from tests.conftest import numbered_table, rows_of, write_numbered
from tests.job_arguments import grouped
from tests.waiting import suspend

ROWS, FILES = 2_000, 8  # each file becomes a shard


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "source", ROWS, files=FILES)


@pytest.fixture
def nodes(source: Path, tmp_path: Path) -> Iterator[LocalCluster]:
    """Two nodes with four shards each, which a test may break."""
    with LocalCluster(nodes=2, cache_dir=tmp_path / "cache") as running:
        CacheClient(running.endpoint).load(DatasetSpec("table", source, target_shard_bytes=1))
        yield running


def dataset(nodes: LocalCluster, **arguments: object) -> CacheIterableDataset:
    defaults = {"batch_size": 64, "shuffle": True, "seed": 3, "deadline_s": 5.0}
    return CacheIterableDataset(
        "table", **grouped(cache=nodes.endpoint, **{**defaults, **arguments})
    )  # type: ignore[arg-type]


def order(shuffle: bool = True) -> list[int]:
    ids = ordering.EpochOrder(ROWS, shuffle=shuffle, seed=3).row_ids(np.arange(ROWS))
    return [int(row) for row in ids]


def shard_files(nodes: LocalCluster, node: int) -> list[Path]:
    return sorted(nodes.nodes[node].cache_dir.glob("table/*/shard-*.arrow"))


def plan(nodes: LocalCluster) -> routing.ShardMap:
    credentials = Credentials(token=find_token(nodes.endpoint))
    with connections.NodeConnection(nodes.endpoint, credentials) as connection:
        return connection.read_shard_map("table", "", (), 10.0)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_column_is_read_without_a_server_whether_or_not_the_memory_is_enough(
    nodes: LocalCluster,
    streams: list[str],
    monkeypatch: pytest.MonkeyPatch,
    shuffle: bool,
    fits: bool,
) -> None:
    if not fits:
        monkeypatch.setattr(
            local_shards.DiskReads, "of_files", lambda path, size, rows: DiskReads(size, rows, 0)
        )
    batches = dataset(nodes, shuffle=shuffle, batch_format="arrow")
    for node in nodes.nodes:
        node.kill()

    rows = [row for batch in batches for row in batch.to_pylist()]

    table = numbered_table(ROWS).to_pylist()
    assert rows == [table[row] for row in order(shuffle)]
    assert streams == []


def test_it_can_be_turned_off(nodes: LocalCluster, streams: list[str]) -> None:
    assert rows_of(dataset(nodes, local=False)) == order()
    assert {*streams} == {node.endpoint for node in nodes.nodes}


def test_columns_are_selected_as_over_flight(nodes: LocalCluster, streams: list[str]) -> None:
    columns = ["text", "b", "row"]
    here, there = (
        [*dataset(nodes, columns=columns, batch_format="arrow", local=local)]
        for local in (True, False)
    )
    assert here == there
    assert here[0].schema.names == columns


def test_a_window_may_mix_files_of_this_machine_with_a_node_of_another(
    nodes: LocalCluster, streams: list[str]
) -> None:
    # A node whose directory is not to be seen here, as that of another machine.
    other = nodes.nodes[1]
    (other.cache_dir / NODE_ID_FILE).rename(other.cache_dir / "elsewhere")

    assert rows_of(dataset(nodes)) == order()
    assert {*streams} == {other.endpoint}


def test_a_file_that_goes_away_is_replaced_by_its_node(
    nodes: LocalCluster, streams: list[str]
) -> None:
    batches = dataset(nodes)
    gone = shard_files(nodes, 0)[1]
    gone.unlink()

    assert rows_of(batches) == order()
    assert {*streams} == {nodes.nodes[0].endpoint}


def test_many_files_that_go_away_at_once_are_found_out_at_once(tmp_path: Path) -> None:
    source = write_numbered(tmp_path / "many", ROWS, files=100)
    with LocalCluster(nodes=2, cache_dir=tmp_path / "elsewhere") as running:
        CacheClient(running.endpoint).load(DatasetSpec("table", source, target_shard_bytes=1))
        batches = dataset(running, deadline_s=2.0)
        for node in (0, 1):
            for file in shard_files(running, node):
                file.unlink()
        assert rows_of(batches) == order()


def test_files_that_go_away_in_the_middle_of_a_pass_cost_no_row(nodes: LocalCluster) -> None:
    rows: list[int] = []
    for step, batch in enumerate(dataset(nodes, prefetch_batches=1)):
        rows += batch["row"].tolist()
        if step == 2:
            for node in (0, 1):
                shutil.rmtree(shard_files(nodes, node)[0].parent)
    assert rows == order()


def test_batches_may_be_changed_in_place_and_the_cache_does_not_see_it(
    nodes: LocalCluster,
) -> None:
    batches = dataset(nodes, shuffle=False)
    for batch in batches:
        for column in ("row", "a", "label"):
            batch[column].zero_()
    assert rows_of(batches) == order(shuffle=False)


# -- files that are not what they seem -------------------------------------------------------------


def test_a_directory_of_another_node_is_not_read(nodes: LocalCluster) -> None:
    before = local_shards.LocalShards(plan(nodes)).shards
    (nodes.nodes[0].cache_dir / NODE_ID_FILE).write_text("somebody-else")

    left = local_shards.LocalShards(plan(nodes)).shards

    assert len(before) == FILES
    assert len(left) == FILES - len(shard_files(nodes, 0))


@pytest.mark.parametrize("change", [{"checksum": "0" * 32}, {"num_bytes": 1}, {"num_rows": 1}])
def test_a_file_that_its_manifest_knows_otherwise_is_not_read(
    nodes: LocalCluster, change: dict[str, object]
) -> None:
    manifest = shard_files(nodes, 0)[0].parent / MANIFEST
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    changed = [line if "digests" in line else {**line, **change} for line in lines]
    manifest.write_text("".join(json.dumps(line) + "\n" for line in changed))

    assert len(local_shards.LocalShards(plan(nodes)).shards) == FILES - len(lines) // 2


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    copy = file.with_name("copy")
    copy.write_bytes(data)
    os.utime(copy, ns=(0, 0))
    copy.replace(file)


def _remove_digests(file: Path) -> None:
    manifest = file.parent / MANIFEST
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(line for line in lines if "digests" not in line))


def test_a_file_that_is_not_as_its_node_sealed_it_is_read_over_flight(
    nodes: LocalCluster, streams: list[str]
) -> None:
    flipped, newer, foreign, kept = shard_files(nodes, 0)
    batches = dataset(nodes)
    before = plan(nodes)

    def gather(file: Path) -> None:
        shard = int(file.stem.removeprefix("shard-"))
        local_shards.LocalShards(before).gather(np.arange(1) + shard * ROWS // FILES)

    node = psutil.Process(nodes.nodes[0].pid)
    suspend(node)  # it would drop the files at its next look at them
    try:
        _flip(flipped)
        os.utime(newer, ns=(0, time.time_ns() + 10**9))
        changed = {flipped: "piece 0 has another checksum", newer: "written after it was sealed"}
        if not os.getuid():  # only root gives files away
            os.chown(foreign, 1, -1)
            changed[foreign] = "its owner changed"
        for file, reason in changed.items():
            with pytest.raises(local_shards.ShardFileLostError, match=reason):
                gather(file)
        gather(kept)
        _remove_digests(kept)
        with pytest.raises(local_shards.ShardFileLostError, match="other digests"):
            gather(kept)
    finally:
        node.resume()
    assert rows_of(batches) == order()
    assert streams


def test_rows_that_were_copied_while_another_thread_gave_their_file_up_do_not_count(
    nodes: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be the zeros of erased rows."""
    file = shard_files(nodes, 0)[0]
    rows = np.arange(4) + int(file.stem.removeprefix("shard-")) * ROWS // FILES
    read = local_shards.LocalShards(plan(nodes))
    read.gather(rows)
    gather = MappedTable.gather

    def slowly(table: MappedTable, *arguments: Any) -> Any:
        monkeypatch.undo()
        os.utime(file)
        with pytest.raises(local_shards.ShardFileLostError, match="changed while it was mapped"):
            read.gather(rows)  # another thread
        return gather(table, *arguments)

    monkeypatch.setattr(MappedTable, "gather", slowly)
    with pytest.raises(local_shards.ShardFileLostError, match="changed while it was mapped"):
        read.gather(rows)


def test_a_file_that_its_manifest_does_not_name_is_not_read(nodes: LocalCluster) -> None:
    file = shard_files(nodes, 0)[0]
    (file.parent / MANIFEST).unlink()
    assert len(local_shards.LocalShards(plan(nodes)).shards) == FILES - len(shard_files(nodes, 0))


@pytest.mark.parametrize("content", [b"", b"not Arrow at all", None])
def test_a_file_that_was_replaced_by_something_else_is_left_to_its_node(
    nodes: LocalCluster, streams: list[str], content: bytes | None
) -> None:
    batches = dataset(nodes)
    file, another = shard_files(nodes, 0)[:2]
    # Not written over: the node has the old file mapped.
    copy = file.with_name("copy")
    copy.write_bytes(another.read_bytes()[:-8] + b"padding." if content is None else content)
    copy.replace(file)

    assert rows_of(batches) == order()
    assert {*streams} == {nodes.nodes[0].endpoint}
