"""What training relies on, on real clusters: which rows come, in which order, come what may."""

from __future__ import annotations

import copy
import datetime as dt
import io
import itertools
import json
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from cache_client import (
    CacheClient,
    CacheDataset,
    CacheError,
    CacheIterableDataset,
    ConfigError,
    Connection,
    DatasetNotFoundError,
    DatasetSpec,
    NodeUnavailableError,
    Reading,
)
from cache_client.flight import connections, shared_handle, streams
from cache_client.job import arguments as job_arguments
from cache_client.order import order as ordering
from cache_protocol.storage.row_index import RowRuns
from cache_server import LocalCluster
from tests import forked_python
from tests.conftest import load_everywhere, write_numbered
from tests.http_pages import metric
from tests.waiting import wait_until
from tests.worker_errors import raises_in_workers

# torch advises against more workers than cores; the order must not depend on it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.usefixtures("forked_workers"),
]

ROWS = 2_003
SHARD_BYTES = 4_000  # many small shards, so that placement really varies


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("numbered")
    return write_numbered(directory, ROWS, files=3, row_group_size=97)


@pytest.fixture(scope="module")
def table(cluster: LocalCluster, source: Path) -> Iterator[str]:
    """The table on the two nodes of all tests, of which a test only reads."""
    spec = DatasetSpec("training-reads", source, target_shard_bytes=SHARD_BYTES)
    load_everywhere(cluster, spec)
    yield spec.name
    CacheClient(cluster.endpoint).drop(spec.name)


@pytest.fixture(scope="module", params=[(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)])
def nodes_and_replicas(request: pytest.FixtureRequest) -> tuple[int, int]:
    of_cluster: tuple[int, int] = request.param
    return of_cluster


@pytest.fixture(scope="module")
def endpoint(nodes_and_replicas: tuple[int, int], source: Path) -> Iterator[str]:
    """A cluster of so many nodes that holds so many replicas of the table."""
    nodes, replicas = nodes_and_replicas
    with LocalCluster(nodes=nodes) as cluster:
        spec = DatasetSpec("table", source, replicas=replicas, target_shard_bytes=SHARD_BYTES)
        placement = load_everywhere(cluster, spec)
        assert len(placement) > 8
        assert len({node for homes in placement.values() for node in homes}) == nodes
        yield cluster.endpoint


def rows_of(dataset: CacheIterableDataset, workers: int) -> list[list[int]]:
    """The row numbers of each batch."""
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    return [batch["row"].tolist() for batch in loader]


def by_step_and_rank(batches: list[list[list[int]]]) -> list[int]:
    """Batches of each rank -> all rows in the order (step, rank)."""
    assert len({len(of_rank) for of_rank in batches}) == 1, "ranks differ in their steps"
    return [row for step in zip(*batches, strict=True) for batch in step for row in batch]


# Ranks and workers know of nodes and replicas only by the reader, and each worker is a process:
# `test_order.py` has every number of them.
FEW = [(1, 0), (2, 2), (8, 0)]
OTHERS = [(1, 3), (2, 1), (3, 0), (3, 3)]


@pytest.mark.parametrize(("ranks", "workers"), FEW)
def test_rows_over_step_and_rank_do_not_depend_on_ranks_workers_nodes_or_replicas(
    endpoint: str, nodes_and_replicas: tuple[int, int], ranks: int, workers: int
) -> None:
    check_order(endpoint, "table", ranks, workers, ranks + workers + sum(nodes_and_replicas))


def test_rows_over_step_and_rank_do_not_depend_on_other_numbers_of_ranks_and_workers(
    cluster: LocalCluster, table: str
) -> None:
    for ranks, workers in OTHERS:
        check_order(cluster.endpoint, table, ranks, workers, ranks + workers)


def check_order(endpoint: str, name: str, ranks: int, workers: int, number: int) -> None:
    shuffle = number % 2 == 0
    batches = []
    for rank in range(ranks):
        dataset = CacheIterableDataset(
            name,
            cache=Connection(endpoint, local=(rank + workers) % 2 == 1),
            batch_size=31,
            columns=["row"],
            shuffle=shuffle,
            seed=5,
            rank=rank,
            world_size=ranks,
        )
        dataset.set_epoch(2)
        batches.append(rows_of(dataset, workers))
        assert len(batches[-1]) == len(dataset)
    order = ordering.EpochOrder(ROWS, shuffle=shuffle, seed=5, epoch=2)
    assert by_step_and_rank(batches) == order.row_ids(np.arange(ROWS)).tolist()


def test_twelve_thousand_images_over_six_ranks_are_two_thousand_each(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12_000, 784), np.uint8)
    pixels[:, :4] = np.arange(12_000, dtype=np.uint32).view(np.uint8).reshape(-1, 4)
    images = pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), 784)
    pq.write_table(pa.table({"image": images}), tmp_path / "images.parquet", row_group_size=1_800)
    seen = []
    with LocalCluster(nodes=2) as cluster:
        CacheClient(cluster.endpoint).load(DatasetSpec("images", tmp_path))
        for rank in range(6):
            dataset = CacheIterableDataset(
                "images",
                cache=Connection(cluster.endpoint, local=rank % 2 == 0),
                batch_size=200,
                shuffle=True,
                rank=rank,
                world_size=6,
            )
            mine = [batch["image"] for batch in dataset]
            assert {(tuple(batch.shape), batch.dtype) for batch in mine} == {
                ((200, 784), torch.uint8)
            }
            # Batches of one window lie side by side: views of it, no copy a batch or a row.
            assert mine[1].data_ptr() == mine[0].data_ptr() + mine[0].nbytes
            rows = torch.cat(mine).numpy()
            assert len(rows) == 2_000
            numbers = np.ascontiguousarray(rows[:, :4]).view(np.uint32)[:, 0]
            assert np.array_equal(rows, pixels[numbers])
            seen.append(numbers)
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(12_000))


RESUME = """
import json, sys
from torch.utils.data import DataLoader
from cache_client import CacheIterableDataset
state, endpoint, rank, world_size, workers = json.loads(sys.argv[1])
dataset = CacheIterableDataset("table", cache=endpoint, batch_size=23, columns=["row"],
    shuffle=True, seed=9, rank=rank, world_size=world_size)
dataset.load_state_dict(state)
batches = [b["row"].tolist() for b in DataLoader(dataset, batch_size=None, num_workers=workers)]
print(json.dumps([len(dataset), batches]))
"""


@pytest.mark.parametrize(("workers_before", "ranks_after", "workers_after"), [(0, 3, 2), (2, 1, 0)])
def test_new_processes_with_another_world_size_and_workers_go_on_at_the_next_row(
    source: Path, workers_before: int, ranks_after: int, workers_after: int
) -> None:
    taken: list[list[list[int]]] = []
    with LocalCluster(nodes=2) as cluster:
        spec = DatasetSpec("table", source, target_shard_bytes=SHARD_BYTES)
        CacheClient(cluster.endpoint).load(spec)
        for rank in range(2):
            dataset = CacheIterableDataset(
                "table",
                cache=Connection(cluster.endpoint, local=rank == 0),
                batch_size=50,
                columns=["row"],
                shuffle=True,
                seed=9,
                rank=rank,
                world_size=2,
            )
            dataset.set_epoch(4)
            loader = DataLoader(dataset, batch_size=None, num_workers=workers_before)
            taken.append([b["row"].tolist() for b in itertools.islice(loader, 7)])
            state = dataset.state_dict(steps=7 if workers_before else None)
        assert len(json.dumps(state)) < 300
        outputs = []
        for rank in range(ranks_after):
            arguments = [state, cluster.endpoint, rank, ranks_after, workers_after]
            done = forked_python.run(
                [sys.executable, "-c", RESUME, json.dumps(arguments)],
                capture_output=True, text=True, timeout=60, check=True,
            )  # fmt: skip
            outputs.append(json.loads(done.stdout))
    order = (
        ordering.EpochOrder(ROWS, shuffle=True, seed=9, epoch=4).row_ids(np.arange(ROWS)).tolist()
    )
    assert by_step_and_rank(taken) == order[: 2 * 50 * 7]
    assert by_step_and_rank([batches for _, batches in outputs]) == order[2 * 50 * 7 :]


def test_the_length_is_of_a_whole_epoch_also_in_the_middle_of_one(
    cluster: LocalCluster, table: str
) -> None:
    dataset = CacheIterableDataset(
        table, cache=cluster.endpoint, batch_size=64, columns=["row"], shuffle=True
    )
    whole = -(-ROWS // 64)
    assert (len(dataset), dataset.steps_left) == (whole, whole)
    dataset.load_state_dict(dataset.state_dict(steps=5))
    assert (len(dataset), dataset.steps_left) == (whole, whole - 5)
    # torch warns where an epoch is longer than its length was, and warnings are errors here.
    loader = DataLoader(dataset, batch_size=None)
    assert len(loader) == whole
    assert len(list(loader)) == whole - 5
    dataset.set_epoch(1)
    assert dataset.steps_left == len(list(loader)) == whole


def test_what_is_set_before_the_first_batch_of_an_iterator_counts(
    cluster: LocalCluster, table: str
) -> None:
    """As Lightning does it: it makes the iterator, then tells the epoch."""
    dataset = CacheIterableDataset(
        table, cache=cluster.endpoint, batch_size=64, columns=["row"], shuffle=True
    )
    order = ordering.EpochOrder(ROWS, shuffle=True, epoch=1).row_ids(np.arange(ROWS)).tolist()
    batches = iter(DataLoader(dataset, batch_size=None))
    dataset.set_epoch(1)
    assert next(batches)["row"].tolist() == order[:64]
    state = dataset.state_dict(steps=3)
    again = iter(dataset)
    dataset.load_state_dict(state)
    rows = [row for batch in again for row in batch["row"].tolist()]
    assert rows == order[3 * 64 :]
    assert dataset.state_dict()["epoch"] == 2


@pytest.mark.parametrize(("workers", "live_on"), [(0, False), (2, False), (2, True)])
def test_a_second_pass_over_a_resumed_epoch_tells_its_own_state(
    cluster: LocalCluster,
    table: str,
    workers: int,
    live_on: bool,
) -> None:
    dataset = CacheIterableDataset(table, cache=cluster.endpoint, batch_size=10, columns=["row"])
    dataset.load_state_dict(dataset.state_dict(steps=50))
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=live_on)
    for _ in loader:
        pass
    assert dataset.state_dict(steps=3)["rows_consumed"] == 530
    second = iter(loader)
    for _ in range(3):
        next(second)
    state = dataset.state_dict(steps=3)
    assert (state["epoch"], state["rows_consumed"]) == (0, 30)


@pytest.mark.parametrize("taken", [None, 1, 2], ids=["a whole pass", "a look", "broken off"])
def test_passes_that_torch_is_seeded_alike_for_are_told_apart(
    cluster: LocalCluster, table: str, taken: int | None
) -> None:
    """A resumed pass is one; a look at one batch leaves the state to the next pass."""
    dataset = CacheIterableDataset(table, cache=cluster.endpoint, batch_size=100, columns=["row"])
    state = dataset.state_dict(steps=15)
    loader = DataLoader(dataset, batch_size=None, num_workers=1)
    whole, rest = list(range(0, ROWS, 100))[:taken], list(range(1_500, ROWS, 100))[:taken]

    def first_rows(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return [batch["row"][0].item() for batch in itertools.islice(loader, taken)]

    with torch.random.fork_rng(devices=[]):
        assert first_rows(0) == first_rows(0) == whole
        for seed in (0, 1):
            dataset.load_state_dict(state)
            assert first_rows(0) == rest
            assert first_rows(seed) == (rest if taken == 1 else whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_without_a_step_leaves_nothing_of_its_epoch_whoever_reads(
    cluster: LocalCluster, table: str, workers: int
) -> None:
    """Where fewer rows are left than a step has, and a short one is left out."""
    dataset = CacheIterableDataset(
        table, cache=cluster.endpoint, batch_size=10, columns=["row"], drop_last=True
    )
    dataset.load_state_dict({**dataset.state_dict(), "epoch": 4, "rows_consumed": ROWS - 3})
    assert rows_of(dataset, workers) == []
    state = dataset.state_dict(steps=0)
    assert (state["epoch"], state["rows_consumed"]) == (4, ROWS)
    dataset.load_state_dict(state)
    assert (dataset.epoch, dataset.steps_left) == (5, 0)


def test_a_shallow_copy_of_a_dataset_goes_on_by_itself(cluster: LocalCluster, table: str) -> None:
    dataset = CacheIterableDataset(
        table, cache=cluster.endpoint, batch_size=100, columns=["row"], shuffle=True
    )
    dataset.set_epoch(3)
    dataset.load_state_dict(dataset.state_dict(steps=2))
    duplicate = copy.copy(dataset)
    duplicate.set_epoch(5)
    assert (dataset.epoch, dataset.steps_left) == (3, 19)
    for each, epoch, consumed in ((dataset, 3, 200), (duplicate, 5, 0)):
        order = (
            ordering.EpochOrder(ROWS, shuffle=True, epoch=epoch).row_ids(np.arange(ROWS)).tolist()
        )
        assert list(itertools.chain(*rows_of(each, workers=0))) == order[consumed:]


def test_reading_leaves_the_random_numbers_of_the_program_alone(
    cluster: LocalCluster, table: str
) -> None:
    before = random.getstate()
    dataset = CacheIterableDataset(table, cache=cluster.endpoint, batch_size=64, shuffle=True)
    for _ in dataset:
        pass
    assert random.getstate() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_resumes_in_the_middle_and_the_next_epoch_is_whole(
    cluster: LocalCluster, table: str, workers: int
) -> None:
    def make() -> tuple[CacheIterableDataset, StatefulDataLoader]:
        dataset = CacheIterableDataset(
            table, cache=cluster.endpoint, batch_size=64, columns=["row"], shuffle=True
        )
        return dataset, StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    dataset, loader = make()
    dataset.set_epoch(1)
    first = [b["row"].tolist() for b in itertools.islice(loader, 11)]
    state = loader.state_dict()
    dataset, loader = make()
    loader.load_state_dict(state)
    dataset.set_epoch(1)
    rest = [b["row"].tolist() for b in loader]
    order = ordering.EpochOrder(ROWS, shuffle=True, epoch=1).row_ids(np.arange(ROWS)).tolist()
    assert list(itertools.chain(*first, *rest)) == order
    dataset.set_epoch(2)
    order = ordering.EpochOrder(ROWS, shuffle=True, epoch=2).row_ids(np.arange(ROWS)).tolist()
    assert list(itertools.chain(*(b["row"].tolist() for b in loader))) == order


@pytest.mark.parametrize("before", ["an earlier epoch", "batches looked at", "a resumed pass"])
def test_a_checkpoint_after_one_batch_of_a_later_pass_loses_and_repeats_no_row(
    cluster: LocalCluster, table: str, before: str
) -> None:
    """A worker tells its first state before its first batch: it is that of the pass it begins."""

    def make() -> tuple[CacheIterableDataset, StatefulDataLoader]:
        dataset = CacheIterableDataset(
            table, cache=cluster.endpoint, batch_size=64, columns=["row"], shuffle=True
        )
        live_on = before == "an earlier epoch"
        return dataset, StatefulDataLoader(
            dataset, batch_size=None, num_workers=3, persistent_workers=live_on
        )

    dataset, loader = make()
    epoch = 0
    if before == "an earlier epoch":
        epoch = 1
        assert len(list(loader)) == 32
        dataset.set_epoch(epoch)
    elif before == "batches looked at":
        list(itertools.islice(dataset, 2))
    else:
        dataset.load_state_dict(dataset.state_dict(steps=5))
        assert len(list(loader)) == 27
        dataset.set_epoch(0)  # once more, and on purpose
    steps = iter(loader)
    rows = next(steps)["row"].tolist()
    state = loader.state_dict()
    del steps

    dataset, loader = make()
    dataset.set_epoch(epoch)
    loader.load_state_dict(state)
    rows += [row for batch in loader for row in batch["row"].tolist()]

    assert (
        rows
        == ordering.EpochOrder(ROWS, shuffle=True, epoch=epoch).row_ids(np.arange(ROWS)).tolist()
    )


@pytest.fixture
def begun_here(
    monkeypatch: pytest.MonkeyPatch,
) -> list[threading.Thread | connections.NodeConnection]:
    """The threads and connections that this thread begins; what others do, is theirs."""
    begun: list[threading.Thread | connections.NodeConnection] = []
    here, start, connect = (
        threading.current_thread(),
        threading.Thread.start,
        connections.NodeConnection.__init__,
    )

    def noting_start(thread: threading.Thread) -> None:
        if threading.current_thread() is here:
            begun.append(thread)
        start(thread)

    def noting_connect(
        connection: connections.NodeConnection, location: str, *credentials: Any
    ) -> None:
        if threading.current_thread() is here:
            begun.append(connection)
        connect(connection, location, *credentials)

    monkeypatch.setattr(threading.Thread, "start", noting_start)
    monkeypatch.setattr(connections.NodeConnection, "__init__", noting_connect)
    return begun


def test_a_pass_begins_with_its_iterator_which_opens_nothing_before_its_first_batch(
    cluster: LocalCluster,
    table: str,
    begun_here: list[threading.Thread | connections.NodeConnection],
) -> None:
    dataset = CacheIterableDataset(
        table, cache=Connection(cluster.endpoint, local=False), batch_size=64, columns=["row"]
    )
    assert len(list(dataset)) == 32 and begun_here
    begun_here.clear()

    steps = iter(dataset)

    assert (dataset.state_dict()["epoch"], dataset.state_dict()["rows_consumed"]) == (0, 0)
    assert not begun_here
    assert next(steps)["row"].tolist() == list(range(64)) and begun_here


def test_the_state_of_a_worker_is_refused_by_others_and_that_of_the_order_is_not(
    cluster: LocalCluster, table: str
) -> None:
    def make(batch_size: int) -> CacheIterableDataset:
        return CacheIterableDataset(
            table, cache=cluster.endpoint, batch_size=batch_size, columns=["row"]
        )

    dataset = make(31)
    loader = StatefulDataLoader(dataset, batch_size=None, num_workers=2)
    batches = iter(loader)
    rows = [row for batch in itertools.islice(batches, 3) for row in batch["row"].tolist()]
    (of_worker,) = {
        json.dumps(worker["dataset_state"])
        for worker in loader.state_dict()["_snapshot"]["_worker_snapshots"].values()
        if worker["worker_id"] == 0
    }
    for _ in batches:  # to the end, where the workers end too: loader and iterator are a cycle
        pass
    for workers, batch_size in ((2, 17), (3, 31), (0, 31)):
        resumed = make(batch_size)
        state_of = _StateOf(json.loads(of_worker), resumed)
        here = rf"here num_workers={workers} and .* = {batch_size}: .*state_dict\(steps="
        with raises_in_workers(ConfigError, match=f"num_workers=2 .* = 31; {here}"):
            for _ in DataLoader(state_of, batch_size=None, num_workers=workers):
                pass

        resumed.load_state_dict(dataset.state_dict(steps=3))
        assert rows + list(itertools.chain(*rows_of(resumed, workers))) == list(range(ROWS))


class _StateOf(IterableDataset[Any]):
    """A dataset that resumes a state where it is iterated, as in workers of StatefulDataLoader."""

    def __init__(self, state: dict[str, Any], dataset: CacheIterableDataset) -> None:
        self._state, self._dataset = state, dataset

    def __iter__(self) -> Iterator[Any]:
        self._dataset.load_state_dict(self._state)
        return iter(self._dataset)


class _GoesOn(IterableDataset[Any]):
    """Hands out the rest of an iterator that was begun before, in whichever process."""

    def __init__(self, begun: Iterator[Any]) -> None:
        self._begun = begun

    def __iter__(self) -> Iterator[Any]:
        return self._begun


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_an_iterator_that_goes_on_in_a_child_of_a_fork_is_refused_and_the_parent_goes_on(
    cluster: LocalCluster,
    table: str,
    device: str | None,
    local: bool,
) -> None:
    """The threads that fetch are in the parent alone: the child waited for them for ever."""
    dataset = CacheIterableDataset(
        table,
        cache=Connection(cluster.endpoint, local=local),
        batch_size=64,
        columns=["row"],
        device=device,
        reading=Reading(message_bytes=1, prefetch_batches=1),
    )
    steps = iter(dataset)
    rows = next(steps)["row"].tolist()
    child = DataLoader(
        _GoesOn(steps), batch_size=None, num_workers=1, timeout=60, multiprocessing_context="fork"
    )
    with raises_in_workers(CacheError, match=f"created in process {os.getpid()}"):
        next(iter(child))
    assert rows + [row for batch in steps for row in batch["row"].tolist()] == list(range(ROWS))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_duplicate_of_a_dataset_follows_set_epoch_in_workers_that_live_on(
    cluster: LocalCluster,
    table: str,
    duplicate: Callable[[CacheIterableDataset], CacheIterableDataset],
) -> None:
    dataset = duplicate(
        CacheIterableDataset(
            table, cache=cluster.endpoint, batch_size=100, columns=["row"], shuffle=True
        )
    )
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        rows = [row for batch in loader for row in batch["row"].tolist()]
        order = ordering.EpochOrder(ROWS, shuffle=True, epoch=epoch)
        assert rows == order.row_ids(np.arange(ROWS)).tolist()
        with pytest.raises(ConfigError, match="pass steps=<batches taken in this pass>"):
            dataset.state_dict()


def _train_alone(
    dataset: CacheIterableDataset, workers: int, start: int, barrier: Any, answers: Any
) -> None:
    """What a process reads: the rest of an epoch that the dataset came with, then another."""
    rows, loader = [], DataLoader(dataset, batch_size=None, num_workers=workers)
    for epoch in (None, start):
        if epoch is not None:
            dataset.set_epoch(epoch)
        barrier.wait(60)
        rows.append([row for batch in loader for row in batch["row"].tolist()])
        barrier.wait(60)
    answers.put((start, rows, dataset.state_dict(steps=1)["epoch"]))


# A spawned process imports torch, and so does its worker in each epoch: once is enough.
@pytest.mark.parametrize(("method", "workers"), [("fork", 0), ("fork", 1), ("spawn", 1)])
def test_processes_that_train_with_one_dataset_each_go_on_by_themselves(
    cluster: LocalCluster,
    table: str,
    method: str,
    workers: int,
) -> None:
    """They shared epoch and offset, as workers do: one read the epoch that the other had set."""
    dataset = CacheIterableDataset(
        table, cache=cluster.endpoint, batch_size=100, columns=["row"], shuffle=True
    )
    dataset.load_state_dict({**dataset.state_dict(), "rows_consumed": 1_500})
    context: Any = torch.multiprocessing.get_context(method)
    barrier, answers = context.Barrier(2), context.Queue()
    trainers = [
        context.Process(target=_train_alone, args=(dataset, workers, epoch, barrier, answers))
        for epoch in (5, 6)
    ]
    for trainer in trainers:
        trainer.start()
    found = sorted(answers.get(timeout=60) for _ in trainers)
    for trainer in trainers:
        trainer.join(60)

    def order(epoch: int) -> list[int]:
        rows: list[int] = (
            ordering.EpochOrder(ROWS, shuffle=True, epoch=epoch).row_ids(np.arange(ROWS)).tolist()
        )
        return rows

    assert found == [(epoch, [order(0)[1_500:], order(epoch)], epoch) for epoch in (5, 6)]
    assert (dataset.epoch, dataset.steps_left) == (0, 6)
    assert dataset.state_dict()["rows_consumed"] == 1_500


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_that_live_on_follow_set_epoch(
    cluster: LocalCluster, table: str, method: str
) -> None:
    dataset = CacheIterableDataset(
        table, cache=cluster.endpoint, batch_size=100, columns=["row"], shuffle=True
    )
    assert sum(len(batch["row"]) for batch in dataset) == ROWS  # the main process has read, too
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, persistent_workers=True,
        multiprocessing_context=method,
    )  # fmt: skip
    for epoch in (3, 0, 7):
        dataset.set_epoch(epoch)
        rows = [row for batch in loader for row in batch["row"].tolist()]
        order = ordering.EpochOrder(ROWS, shuffle=True, epoch=epoch)
        assert rows == order.row_ids(np.arange(ROWS)).tolist()


def test_a_killed_node_with_another_replica_costs_no_row(source: Path) -> None:
    with LocalCluster(nodes=2) as cluster:
        spec = DatasetSpec("table", source, replicas=2, target_shard_bytes=SHARD_BYTES)
        load_everywhere(cluster, spec)
        dataset = CacheIterableDataset(
            "table",
            cache=Connection(cluster.endpoint, local=False),
            batch_size=10,
            columns=["row"],
            shuffle=True,
            reading=Reading(prefetch_batches=1),
        )
        rows: list[int] = []
        for step, batch in enumerate(dataset):
            rows += batch["row"].tolist()
            if step == 3:
                cluster.nodes[1].kill()
    assert rows == ordering.EpochOrder(ROWS, shuffle=True).row_ids(np.arange(ROWS)).tolist()


@pytest.fixture(scope="module")
def wide_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More rows than a pass fetches ahead: 40 MB in many windows."""
    rows, folder = 20_000, tmp_path_factory.mktemp("wide")
    columns = {"row": np.arange(rows), **{f"c{i}": np.zeros(rows) for i in range(250)}}
    pq.write_table(pa.table(columns), folder / "wide.parquet", row_group_size=1_000)
    return folder


@pytest.mark.parametrize("workers", [0, 2])
def test_columns_that_a_loop_keeps_hold_their_own_values_alone(
    wide_source: Path, workers: int
) -> None:
    kept, saved = [], io.BytesIO()
    with LocalCluster() as cluster:
        CacheClient(cluster.endpoint).load(DatasetSpec("wide", wide_source))
        dataset = CacheIterableDataset(
            "wide", cache=cluster.endpoint, batch_size=500, stack={"pair": ["c7", "c8"]}
        )
        for batch in dataset.loader(num_workers=workers):
            kept += [batch["c249"], batch["row"], batch["pair"]]
    torch.save(kept[0], saved)
    assert len(batch) == 250 and torch.equal(kept[1], torch.arange(500))
    assert len(pickle.dumps(kept[0])) < 500 * 8 + 1_000 and len(saved.getvalue()) < 500 * 8 + 3_000
    storages = [column.untyped_storage() for column in kept]
    assert sum(storage.nbytes() for storage in storages) == 20_000 * 4 * 8
    assert not any(storage.is_shared() for storage in storages)


@pytest.mark.parametrize("make", ["loader", "DataLoader", "fetch"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_can_be_changed_in_place_after_a_first_one_under_inference_mode(
    cluster: LocalCluster, client: CacheClient, dataset_name: str, tmp_path: Path,
    make: str, workers: int,
) -> None:  # fmt: skip
    table = pa.table(
        {
            "row": np.arange(40),
            "day": pa.array([dt.date(2020, 1, 1)] * 40),
            "tokens": [[1, 2]] * 40,
            "pair": pa.array([[1.0, 2.0]] * 40, pa.list_(pa.float32(), 2)),
            "flag": [True, None] * 20,
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    client.load(DatasetSpec(dataset_name, tmp_path / "t.parquet"))
    options: dict[str, Any] = {"cache": cluster.endpoint, "nulls": "mask"}
    if make == "fetch":
        by_number = CacheDataset(dataset_name, **options)
        loader: Any = DataLoader(
            by_number,
            batch_size=None,
            sampler=[[*range(at, at + 4)] for at in range(0, 40, 4)],  # type: ignore[arg-type]
            num_workers=workers,
        )
    else:
        dataset = CacheIterableDataset(dataset_name, batch_size=4, pad_mask="padded", **options)
        loader = (
            dataset.loader(num_workers=workers)
            if make == "loader"
            else DataLoader(dataset, batch_size=None, num_workers=workers)
        )
    batches = iter(loader)
    with torch.inference_mode():
        first = next(batches)
    read = [first, *batches]
    client.drop(dataset_name)
    assert len(read) == 10
    for batch in read:
        for column in batch.values():
            for tensor in column if isinstance(column, list) else [column]:
                tensor.zero_()


def test_a_worker_sends_of_a_batch_of_arrays_no_more_memory_than_the_batch(
    wide_source: Path,
) -> None:
    with LocalCluster() as cluster:
        CacheClient(cluster.endpoint).load(DatasetSpec("wide", wide_source))
        dataset = CacheIterableDataset(
            "wide", cache=cluster.endpoint, batch_size=100, batch_format="numpy"
        )
        batch = next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
    sent = [column.untyped_storage().nbytes() for column in batch.values()]
    assert sent == 251 * [100 * 8]
    assert torch.equal(batch["row"], torch.arange(100)) and not batch["c249"].any()


@pytest.mark.parametrize("batch_format", ["torch", "numpy"])
def test_a_worker_sends_a_column_of_lists_as_one_tensor(
    cluster: LocalCluster, tmp_path: Path, batch_format: job_arguments.BatchFormat
) -> None:
    """A tensor a row is a file descriptor a row: a worker that had none left hung the loop."""
    lists = [None if row % 7 == 3 else [row] * (row % 5) for row in range(2_000)]
    source = tmp_path / "lists.parquet"
    pq.write_table(pa.table({"tokens": pa.array(lists, pa.list_(pa.int32()))}), source)
    CacheClient(cluster.endpoint).load(DatasetSpec("lists", source))
    dataset = CacheIterableDataset(
        "lists", cache=cluster.endpoint, batch_size=1_500, batch_format=batch_format
    )
    loader = DataLoader(dataset, batch_size=None, num_workers=1)
    batches = [batch["tokens"] for batch in loader]
    CacheClient(cluster.endpoint).drop("lists")
    rows = [row for batch in batches for row in batch]
    assert [None if row is None else row.tolist() for row in rows] == lists
    for batch in batches:
        tensors = [row for row in batch if row is not None]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_makes_tensors_of_arrays_unless_it_is_told_to_leave_batches_alone(
    cluster: LocalCluster, client: CacheClient, dataset_name: str, source: Path, workers: int
) -> None:
    client.load(DatasetSpec(dataset_name, source))
    dataset = CacheIterableDataset(
        dataset_name, cache=cluster.endpoint, batch_size=10, batch_format="numpy"
    )
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert type(next(iter(loader))["row"]) is torch.Tensor
    loader = DataLoader(
        dataset, batch_size=None, num_workers=workers, collate_fn=lambda batch: batch
    )
    assert type(next(iter(loader))["row"]) is np.ndarray


def test_an_error_of_a_transform_that_is_kept_keeps_no_thread(
    cluster: LocalCluster,
    client: CacheClient,
    dataset_name: str,
    source: Path,
    begun_here: list[threading.Thread | connections.NodeConnection],
) -> None:
    client.load(DatasetSpec(dataset_name, source))

    def fail(batch: Any) -> Any:
        raise ValueError("a bad batch")

    dataset = CacheIterableDataset(
        dataset_name, cache=cluster.endpoint, batch_size=10, transform=fail
    )
    begun_here.clear()
    with pytest.raises(ValueError, match="a bad batch") as kept:
        next(iter(dataset))
    threads = [begun for begun in begun_here if isinstance(begun, threading.Thread)]
    assert [thread for thread in threads if thread.name.startswith("cache-fetch")]
    wait_until(lambda: not any(t.is_alive() for t in threads), 30.0, "no thread is left")
    assert kept.value.__traceback__ is not None


def test_a_killed_node_that_comes_back_is_waited_for(wide_source: Path) -> None:
    with LocalCluster(nodes=2) as cluster:
        spec = DatasetSpec("wide", wide_source, target_shard_bytes="2MB")
        CacheClient(cluster.endpoint).load(spec)
        dataset = CacheIterableDataset(
            "wide",
            cache=Connection(cluster.endpoint, local=False),
            batch_size=500,
            shuffle=True,
            reading=Reading(prefetch_batches=1, message_bytes=100_000),
        )
        rows: list[int] = []
        for step, batch in enumerate(dataset):
            rows += batch["row"].tolist()
            if step == 2:
                cluster.nodes[1].kill()
                cluster.nodes[1].restart()
    assert rows == ordering.EpochOrder(20_000, shuffle=True).row_ids(np.arange(20_000)).tolist()


def test_a_killed_node_that_stays_away_is_named_at_the_deadline(wide_source: Path) -> None:
    with LocalCluster(nodes=2) as cluster:
        spec = DatasetSpec("wide", wide_source, target_shard_bytes="2MB")
        CacheClient(cluster.endpoint).load(spec)
        lost = cluster.nodes[1].node_id
        dataset = CacheIterableDataset(
            "wide",
            cache=Connection(cluster.endpoint, deadline_s=2.0, local=False),
            batch_size=500,
            shuffle=True,
            reading=Reading(prefetch_batches=1, message_bytes=100_000),
        )
        with pytest.raises(NodeUnavailableError, match=rf"step \d+: .*{lost}.*'wide'"):
            for step, _ in enumerate(dataset):
                if step == 2:
                    cluster.nodes[1].kill()


def test_rows_in_source_order_come_in_streams_that_another_replica_continues(
    wide_source: Path,
) -> None:
    with LocalCluster(nodes=2, insecure=True) as cluster:
        spec = DatasetSpec("wide", wide_source, replicas=2, target_shard_bytes=2**23)
        load_everywhere(cluster, spec)
        dataset = CacheIterableDataset(
            "wide",
            cache=Connection(cluster.endpoint, local=False),
            batch_size=60,
            columns=["row", "c1"],
            reading=Reading(message_bytes=2**12),
        )
        rows = [row for batch in dataset for row in batch["row"].tolist()]
        assert rows == [*range(20_000)]
        assert served_by_get(cluster, "wide") > 15_000  # a stream begins at the second window

        dataset.set_epoch(1)
        rows = []
        for step, batch in enumerate(dataset):
            rows += batch["row"].tolist()
            if step == 100:
                state = dataset.state_dict()
                cluster.nodes[1].kill()
        assert rows == [*range(20_000)]
        resumed = CacheIterableDataset(
            "wide", cache=Connection(cluster.endpoint, local=False), batch_size=50, columns=["row"],
            batch_format="arrow")  # fmt: skip
        resumed.load_state_dict(state)
        rest = [row for batch in resumed for row in batch.column("row").to_pylist()]
    assert rest == [*range(101 * 60, 20_000)]


def test_ranks_that_read_one_node_in_source_order_take_streams(wide_source: Path) -> None:
    with LocalCluster(nodes=1, insecure=True) as cluster:
        load_everywhere(cluster, DatasetSpec("wide", wide_source, target_shard_bytes=2**23))
        datasets = [
            CacheIterableDataset(
                "wide",
                cache=Connection(cluster.endpoint, local=False),
                batch_size=16,
                columns=["row"],
                rank=rank,
                world_size=3,
                reading=Reading(message_bytes=2**11),
                shuffle=False,
            )
            for rank in range(3)
        ]
        of_ranks = [[batch["row"].tolist() for batch in dataset] for dataset in datasets]
        assert by_step_and_rank(of_ranks) == [*range(20_000)]
        assert served_by_get(cluster, "wide") > 15_000

        client = CacheClient(cluster.endpoint)
        fingerprint = client.describe("wide").fingerprint
        with connections.NodeConnection(cluster.endpoint) as connection:

            def stream() -> streams.RowStream:
                return connection.open_rows(
                    "wide", fingerprint, (), 60.0, RowRuns(0), 20_000, rows_per_message=10
                )

            def is_gone() -> bool:
                try:
                    stream().close()
                except DatasetNotFoundError:
                    return True
                return False

            running = stream()
            running.receive(10)
            client.drop("wide")
            wait_until(is_gone, 20, "the node to drop it")  # and a new stream says why
            with pytest.raises(shared_handle.StreamEndedError):
                running.receive(20_000 - 10)


def served_by_get(cluster: LocalCluster, dataset: str) -> float:
    """Rows that all nodes sent in streams."""
    name = "data_cache_served_rows_total"
    return sum(metric(node.page, name, dataset=dataset, verb="get") for node in cluster.nodes)
