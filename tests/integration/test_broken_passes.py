"""A pass over Flight while nodes hang, end and come back: no row lost or repeated, or a name."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    Connection,
    DatasetSpec,
    NodeUnavailableError,
)
from cache_client.order import order as ordering
from cache_client.reading import node_streams, shard_maps
from cache_client.reading import reader as reading_reader
from cache_server import LocalCluster
from cache_server.local import LocalNode
from tests import forked_python
from tests.conftest import load_everywhere, write_numbered
from tests.job_arguments import grouped
from tests.waiting import suspend, wait_until

ROWS, FILES = 2_000, 8  # each file becomes a shard
DEADLINE_S = 6.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "source", ROWS, files=FILES)


@pytest.fixture
def nodes() -> Iterator[LocalCluster]:
    """Two nodes that a test may break; the first is the coordinator."""
    with LocalCluster(nodes=2, insecure=True) as running:
        yield running


def load(nodes: LocalCluster, source: Path, replicas: int) -> None:
    spec = DatasetSpec("table", source, target_shard_bytes=1, replicas=replicas)
    load_everywhere(nodes, spec)


def dataset(nodes: LocalCluster, **arguments: object) -> CacheIterableDataset:
    # A window a batch, and little fetched ahead: what is broken is noticed in the middle.
    defaults = {
        **{"batch_size": 20, "shuffle": True, "local": False},
        **{"prefetch_batches": 1, "message_bytes": 1},
    }
    return CacheIterableDataset(
        "table",
        **grouped(
            cache=Connection(nodes.endpoint, deadline_s=DEADLINE_S),
            columns=["row"],
            **{**defaults, **arguments},
        ),
    )


def rows_with(batches: CacheIterableDataset, at_step: dict[int, Callable[[], object]]) -> list[int]:
    """The rows of a pass in which something happens after some steps."""
    rows: list[int] = []
    for step, batch in enumerate(batches):
        rows += batch["row"].tolist()
        at_step.get(step, lambda: None)()
    return rows


def order() -> list[int]:
    ids = ordering.EpochOrder(ROWS, shuffle=True).row_ids(np.arange(ROWS))
    return [int(row) for row in ids]


def hang(node: LocalNode) -> Callable[[], None]:
    return partial(suspend, psutil.Process(node.pid))


def go_on(node: LocalNode) -> Callable[[], None]:
    return psutil.Process(node.pid).resume


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_hangs_costs_no_row_where_there_is_another_replica(
    nodes: LocalCluster, source: Path, node: int
) -> None:
    load(nodes, source, replicas=2)
    try:
        assert rows_with(dataset(nodes), {3: hang(nodes.nodes[node])}) == order()
    finally:
        go_on(nodes.nodes[node])()


@pytest.mark.parametrize("position", [0, 1], ids=["asked first", "asked last"])
def test_a_node_that_hangs_has_no_other_one_passed_over(
    nodes: LocalCluster, source: Path, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    load(nodes, source, replicas=2)
    shards = shard_maps.wait_for_shard_map(nodes.endpoint, "table", ["row"], DEADLINE_S)
    hanging = shards.nodes[position]
    node = next(node for node in nodes.nodes if node.node_id == hanging.id)
    with reading_reader.Reader(
        nodes.endpoint, shards, columns=("row",), deadline_s=DEADLINE_S
    ) as reader:
        hang(node)()
        try:
            pieces = reader.fetch(np.arange(ROWS))
        finally:
            go_on(node)()

    assert sum(piece.num_rows for piece in pieces) == ROWS
    failed = [record.getMessage() for record in caplog.records if "node failed" in record.msg]
    assert len(failed) == 1 and hanging.id in failed[0]


def test_windows_that_were_asked_ahead_of_a_node_that_hangs_do_not_ask_it_again(
    nodes: LocalCluster, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(nodes, source, replicas=2)
    shards = shard_maps.wait_for_shard_map(nodes.endpoint, "table", ["row"], DEADLINE_S)
    node = next(node for node in nodes.nodes if node.node_id == shards.nodes[1].id)
    with reading_reader.Reader(
        nodes.endpoint, shards, columns=("row",), deadline_s=DEADLINE_S
    ) as reader:
        reader.request(np.arange(ROWS))()  # one stream to each node
        hang(node)()
        try:
            with caplog.at_level(logging.DEBUG, "cache_client.reading.reader"):
                ahead = [reader.request(np.arange(ROWS)) for _ in range(3)]
                counts = [sum(piece.num_rows for piece in answers()) for answers in ahead]
        finally:
            go_on(node)()

    assert counts == 3 * [ROWS]
    assert sum("node failed" in record.msg for record in caplog.records) == 1


def test_nodes_that_hang_at_once_are_waited_for_together(source: Path) -> None:
    with LocalCluster(nodes=4, insecure=True) as four:
        load(four, source, replicas=4)
        shards = shard_maps.wait_for_shard_map(four.endpoint, "table", ["row"], DEADLINE_S)
        hanging = four.nodes[1:]
        with reading_reader.Reader(
            four.endpoint, shards, columns=("row",), deadline_s=4 * DEADLINE_S
        ) as reader:
            try:
                for node in hanging:
                    hang(node)()
                begun = time.monotonic()
                pieces = reader.fetch(np.arange(ROWS))
                assert time.monotonic() - begun < 4 * DEADLINE_S * 2 / 3
            finally:
                for node in hanging:
                    go_on(node)()
    assert sum(piece.num_rows for piece in pieces) == ROWS


def test_a_node_that_was_not_asked_as_others_hang_is_not_passed_over(
    nodes: LocalCluster, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(nodes, source, replicas=2)
    monkeypatch.setattr(node_streams, "_MAX_OPENED_AT_ONCE", 1)
    shards = shard_maps.wait_for_shard_map(nodes.endpoint, "table", ["row"], DEADLINE_S)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hangs = replace(shards.nodes[0], location=f"grpc://127.0.0.1:{silent.getsockname()[1]}")
        shards = replace(shards, nodes=(hangs, *shards.nodes[1:]))
        with reading_reader.Reader(
            hangs.location, shards, columns=("row",), deadline_s=DEADLINE_S
        ) as reader:
            pieces = reader.fetch(np.arange(ROWS))
    assert sum(piece.num_rows for piece in pieces) == ROWS


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_killed_costs_no_row_where_there_is_another_replica(
    nodes: LocalCluster, source: Path, node: int
) -> None:
    load(nodes, source, replicas=2)
    assert rows_with(dataset(nodes), {3: nodes.nodes[node].kill}) == order()


def test_a_node_that_hangs_is_waited_for_by_one_pass_and_not_by_each(
    nodes: LocalCluster, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def times_waited() -> int:
        return sum("node failed" in record.msg for record in caplog.records)

    load(nodes, source, replicas=2)
    table = dataset(nodes)
    hang(nodes.nodes[1])()
    try:
        with caplog.at_level(logging.DEBUG, "cache_client.reading.reader"):
            assert rows_with(table, {}) == order()
            of_first = times_waited()
            for _ in range(3):
                table.set_epoch(0)  # the same order once more
                assert rows_with(table, {}) == order()
    finally:
        go_on(nodes.nodes[1])()
    assert times_waited() == of_first > 0


def test_a_node_that_comes_back_is_asked_again_by_who_went_on_without_it(
    nodes: LocalCluster, source: Path
) -> None:
    load(nodes, source, replicas=2)
    shards = shard_maps.wait_for_shard_map(nodes.endpoint, "table", ["row"], DEADLINE_S)
    with reading_reader.Reader(nodes.endpoint, shards, columns=("row",)) as reader:
        nodes.nodes[1].kill()
        reader.fetch(np.arange(ROWS))
        assert reader.num_nodes == 1
        nodes.nodes[1].start()

        def reads_from_both() -> bool:
            pieces = reader.fetch(np.arange(ROWS))
            assert sum(piece.num_rows for piece in pieces) == ROWS
            return reader.num_nodes == 2

        wait_until(reads_from_both, 30.0, "reads from both nodes")


def test_a_coordinator_that_comes_back_in_the_middle_costs_no_row(
    nodes: LocalCluster, source: Path
) -> None:
    load(nodes, source, replicas=1)
    assert rows_with(dataset(nodes), {3: nodes.nodes[0].restart}) == order()


def test_a_node_that_hangs_for_a_moment_is_waited_for(nodes: LocalCluster, source: Path) -> None:
    load(nodes, source, replicas=1)
    node = nodes.nodes[1]

    def hang_for_a_moment() -> None:
        hang(node)()
        threading.Timer(DEADLINE_S / 4, go_on(node)).start()

    assert rows_with(dataset(nodes), {2: hang_for_a_moment}) == order()


def test_a_node_that_hangs_for_good_is_named_soon_after_the_deadline(
    nodes: LocalCluster, source: Path
) -> None:
    load(nodes, source, replicas=1)
    node = nodes.nodes[1]
    begun: list[float] = []

    def begin() -> None:
        hang(node)()
        begun.append(time.monotonic())

    try:
        with pytest.raises(NodeUnavailableError, match=rf"step \d+: .*{node.node_id}.*'table'"):
            rows_with(dataset(nodes), {2: begin})
        assert time.monotonic() - begun[0] < 5 * DEADLINE_S
    finally:
        go_on(node)()


def test_a_pass_that_was_broken_off_goes_on_where_it_was(nodes: LocalCluster, source: Path) -> None:
    load(nodes, source, replicas=1)
    batches = dataset(nodes, prefetch_batches=1)
    rows: list[int] = []
    with pytest.raises(NodeUnavailableError):
        for step, batch in enumerate(batches):
            rows += batch["row"].tolist()
            if step == 5:
                nodes.nodes[1].kill()
    state = batches.state_dict()
    nodes.nodes[1].start()

    again = dataset(nodes, batch_size=33)
    again.load_state_dict(state)

    assert rows + rows_with(again, {}) == order()


def test_a_dataset_that_is_still_loading_is_waited_for(nodes: LocalCluster, source: Path) -> None:
    CacheClient(nodes.endpoint).load(DatasetSpec("table", source, target_shard_bytes=1), wait=False)
    assert rows_with(dataset(nodes), {}) == order()


DISTRIBUTED = """
import sys
import torch.distributed
from cache_client import CacheIterableDataset

rank, endpoint, file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{file}", rank=rank, world_size=2
)
dataset = CacheIterableDataset("table", cache=endpoint, batch_size=64, columns=["row"])
print(dataset.rank, dataset.world_size, sum(len(batch["row"]) for batch in dataset))
"""


def test_ranks_are_those_of_torch_distributed_where_it_is_initialised(
    nodes: LocalCluster, source: Path, tmp_path: Path
) -> None:
    load(nodes, source, replicas=1)
    ranks = [
        forked_python.Popen(
            [sys.executable, "-c", DISTRIBUTED, str(rank), nodes.endpoint, str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0].split() for process in ranks]
    assert outputs == [["0", "2", "1000"], ["1", "2", "1000"]]
