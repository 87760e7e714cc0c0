"""Jobs whose orders are announced to nodes: the same rows, from buckets."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cache_client import CacheClient, Reading, View
from cache_client.flight.connections import NodeConnection
from cache_client.reading import announcements
from cache_protocol.errors import RequestError
from cache_server.scratch import read_ahead
from cache_server.scratch.bucket_files import Bucket, BucketFiles
from cache_server.scratch.order import Order
from cache_server.scratch.scratch import Counts
from cache_server.server import CacheServer
from tests.announced import (
    NAME,
    ROWS,
    NodeProcess,
    load,
    preparing_node,
    reader,
    rows,
    scratch_files,
)
from tests.waiting import wait_until

WAIT_S = 30.0
VIEWS = {"plain": None, "where": View(where="label <> 3")}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    """A node without a scratch disk."""
    with preparing_node(tmp_path_factory.mktemp("plain"), scratch_limit_bytes=None) as node:
        yield node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[CacheServer]:
    with preparing_node(tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
def expected(plain: CacheServer) -> list[list[tuple[int, str]]]:
    """The rows of three epochs."""
    dataset, found = reader(plain), []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        found.append(rows(dataset))
    return found


def counts(server: CacheServer) -> Counts:
    return server._node.scratch.counts


@pytest.mark.parametrize("name", [*VIEWS])
@pytest.mark.parametrize("world_size", [1, 3])
def test_announced_epochs_are_the_same_and_come_from_buckets(
    plain: CacheServer, node: CacheServer, name: str, world_size: int
) -> None:
    view, served = VIEWS[name], 0
    jobs = [
        [
            reader(server, view=view, rank=rank, world_size=world_size, job="one")
            for rank in range(world_size)
        ]
        for server in (plain, node)
    ]
    for epoch in range(3):
        given = []
        for ranks in jobs:
            for dataset in ranks:
                dataset.set_epoch(epoch)
            given.append([rows(dataset) for dataset in ranks])
        assert given[0] == given[1]
        served += sum(map(len, given[0]))
    found = counts(node)
    assert found.num_rows >= served * 0.99, found
    assert found.num_failed == 0
    assert counts(plain).num_rows == 0


@pytest.mark.parametrize(
    "view",
    [
        View(weights="1 + label", replacement=True, epoch_rows=5_000),
        View(length_buckets="label + 1", bucket_rows=512),
        View(subset=[*range(19_000, 0, -3), 4]),
    ],
    ids=["weights", "length_buckets", "subset"],
)
def test_other_views_are_the_same(plain: CacheServer, node: CacheServer, view: View) -> None:
    assert rows(reader(plain, view=view)) == rows(reader(node, view=view))
    assert counts(node).num_prepared >= 1
    assert counts(node).num_rows > 1_000


def test_a_job_goes_on_with_more_ranks_from_the_buckets_that_are_left(
    node: CacheServer, expected: list[list[tuple[int, str]]]
) -> None:
    few_ahead = Reading(message_bytes=8_192, prefetch_batches=4)
    first = reader(node, reading=few_ahead)
    given = rows(itertools.islice(batches := iter(first), 60))
    state = first.state_dict()
    batches.close()  # type: ignore[attr-defined]
    ranks = [
        reader(node, rank=rank, world_size=2, batch_size=64, reading=few_ahead) for rank in range(2)
    ]
    for dataset in ranks:
        dataset.load_state_dict(state)
    parts = [[rows([batch]) for batch in dataset] for dataset in ranks]

    given += [row for step in zip(*parts, strict=True) for part in step for row in part]
    assert given == expected[0]
    assert counts(node).num_rows >= ROWS * 0.99
    assert counts(node).num_prepared <= 2, "the order was prepared again"


def test_source_order_is_not_announced(node: CacheServer) -> None:
    assert [row for row, _ in rows(reader(node, shuffle=False))] == [*range(ROWS)]
    assert counts(node) == Counts()


def flip(order: Order) -> None:
    """Changes a byte in the middle of a bucket."""
    path = order._folder / "3"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def remove(order: Order) -> None:
    (order._folder / "5").unlink()


@pytest.mark.parametrize("damage", [flip, remove])
def test_rows_of_a_damaged_bucket_come_from_their_shards(
    node: CacheServer,
    expected: list[list[tuple[int, str]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Order], None],
) -> None:
    prepare = Order.prepare

    def damaged(order: Order, turn: Any) -> None:
        prepare(order, turn)
        damage(order)

    monkeypatch.setattr(Order, "prepare", damaged)
    assert rows(reader(node)) == expected[0]
    assert caplog.text.count("bucket lost") == 1
    assert ROWS * 0.8 < counts(node).num_rows < ROWS


@pytest.mark.parametrize("call", ["flush", "open"])
def test_a_full_scratch_disk_leaves_the_rows_to_the_shards(
    node: CacheServer,
    tmp_path: Path,
    expected: list[list[tuple[int, str]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(announcements, "_said", set())
    monkeypatch.setattr(
        *((BucketFiles, "flush", full) if call == "flush" else (Path, "open", full))
    )
    assert rows(reader(node)) == expected[0]
    assert caplog.text.count("does not prepare the order") == 1
    assert "No space left on device" in caplog.text
    assert counts(node).num_rows == 0
    assert scratch_files(tmp_path) == []


def test_a_slow_disk_leaves_the_rows_to_the_shards(
    node: CacheServer, expected: list[list[tuple[int, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, number = BucketFiles.read, itertools.count()

    def late(*arguments: Any) -> Bucket:
        if next(number) % 3 == 0:
            monkeypatch.setattr(read_ahead, "_WAIT_S", 0.0)
        else:
            monkeypatch.setattr(read_ahead, "_WAIT_S", 8.0)
        return read(*arguments)

    monkeypatch.setattr(BucketFiles, "read", late)
    monkeypatch.setattr(read_ahead, "_WAIT_S", 0.0)
    assert rows(reader(node)) == expected[0]


def test_an_order_beyond_the_limit_is_refused_once_and_the_job_goes_on(
    tmp_path: Path,
    expected: list[list[tuple[int, str]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(announcements, "_said", set())
    with preparing_node(tmp_path, scratch_limit_bytes=1_000) as node:
        dataset = reader(node)
        for epoch in range(2):
            dataset.set_epoch(epoch)
            assert rows(dataset) == expected[epoch]
        assert counts(node) == Counts()
    assert caplog.text.count("of --scratch-limit") == 1


def test_a_second_job_waits_for_no_other_and_has_its_own_order(
    node: CacheServer, plain: CacheServer, expected: list[list[tuple[int, str]]]
) -> None:
    one, other = reader(node), reader(node, seed=8)
    given: list[list[tuple[int, str]]] = [[], []]
    for batches in zip(one, other, strict=True):
        for found, batch in zip(given, batches, strict=True):
            found += rows([batch])
    assert given == [expected[0], rows(reader(plain, seed=8))]
    assert counts(node).num_prepared >= 2
    assert counts(node).num_rows >= 2 * ROWS * 0.99


def test_a_node_of_an_older_release_is_read_as_before(
    node: CacheServer, expected: list[list[tuple[int, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise RequestError("no action 'announce'")

    monkeypatch.setattr(NodeConnection, "announce", unknown)
    assert rows(reader(node)) == expected[0]
    assert counts(node) == Counts()


def test_nothing_of_rows_that_are_forgotten_stays_in_buckets(
    node: CacheServer, tmp_path: Path, expected: list[list[tuple[int, str]]]
) -> None:
    endpoint, dataset = node.endpoints.flight_location, reader(node)
    gone, batches = 1234, iter(dataset)
    given = rows(itertools.islice(batches, 5))
    assert scratch_files(tmp_path)
    act = CacheClient(endpoint).forget(NAME, f"row = {gone}", reason="request 12")

    assert act.done
    canary = f"row {gone}".encode()
    for path in scratch_files(tmp_path):
        assert canary not in path.read_bytes()
    given += rows(batches)
    assert [row for row in given if row[0] != gone] == [r for r in expected[0] if r[0] != gone]
    left = reader(node)
    assert gone not in {row for row, _ in rows(left)}


def test_nothing_stays_of_a_dropped_version(node: CacheServer, tmp_path: Path) -> None:
    next(iter(reader(node)))
    assert scratch_files(tmp_path)
    CacheClient(node.endpoints.flight_location).drop(NAME)
    wait_until(lambda: not scratch_files(tmp_path), WAIT_S, "no scratch files")


def test_nothing_stays_of_a_job_that_ended(tmp_path: Path) -> None:
    with preparing_node(tmp_path, lease_s=1.0) as node:
        next(iter(reader(node)))
        assert scratch_files(tmp_path)
        wait_until(lambda: not scratch_files(tmp_path), WAIT_S, "no scratch files")
        assert counts(node).num_prepared >= 1


def test_a_scratch_disk_of_its_own_is_used_and_emptied_at_the_start(tmp_path: Path) -> None:
    own = tmp_path / "own"
    with preparing_node(tmp_path, scratch_dir=own) as node:
        next(iter(reader(node)))
        (folder,) = own.iterdir()
        assert any(folder.rglob("numbers"))
    folder.mkdir()
    (folder / "left").touch()
    with preparing_node(tmp_path, scratch_dir=own):
        assert not any(own.rglob("left"))


def test_a_node_that_is_killed_changes_no_row_and_leaves_nothing(
    tmp_path: Path, expected: list[list[tuple[int, str]]]
) -> None:
    """In scatter, then while it serves; each next process removes what the one before left."""
    few_ahead = Reading(message_bytes=8_192, prefetch_batches=4)
    with NodeProcess(tmp_path, pause_s=0.05) as node, ThreadPoolExecutor(1) as thread:
        load(tmp_path, node.endpoint)
        batches = iter(reader(node.endpoint, reading=few_ahead))
        first = thread.submit(lambda: rows([next(batches)]))
        wait_until(lambda: len(scratch_files(tmp_path)) > 4, WAIT_S, "bucket files")
        node.kill()
        assert scratch_files(tmp_path)
        node.start()
        given = first.result()
        assert scratch_files(tmp_path), "the order was announced again"
        node.kill()
        node.start()

        assert given + rows(batches) == expected[0]
        wait_until(lambda: not scratch_files(tmp_path), WAIT_S, "no scratch files")
