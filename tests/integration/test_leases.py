"""Versions that were replaced: kept while somebody reads them, dropped when nobody does."""

from __future__ import annotations

import copy
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow.flight as flight
import pytest

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec, Reading
from cache_client.flight import connections
from cache_client.reading import local_shards, shard_maps
from cache_client.reading import reader as reading_reader
from cache_server import LocalCluster
from tests.conftest import write_numbered
from tests.waiting import files_below, suspend, wait_until

WAIT_S = 30.0
LEASE_S = 4.0
SHORT_LEASE_S = 1.0
NUM_ROWS = 400


@pytest.fixture(scope="module")
def leasing() -> Iterator[LocalCluster]:
    with LocalCluster(2, lease_s=LEASE_S, insecure=True) as running:
        yield running


def load(cluster: LocalCluster, name: str, source: Path, **options: object) -> str:
    spec = DatasetSpec(name, source, target_shard_bytes=1, **options)  # type: ignore[arg-type]
    return CacheClient(cluster.endpoint).load(spec).fingerprint


@pytest.mark.parametrize("asked", [("parts",), ("0", "1"), ("parts", "0", "1")])
def test_whoever_was_told_where_the_rows_are_may_read_them_after_they_were_replaced(
    asked: tuple[str, ...], tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 10)
    descriptor = flight.FlightDescriptor.for_path(*asked)
    with LocalCluster(1, insecure=True) as cluster, flight.connect(cluster.endpoint) as client:
        load(cluster, "parts", source)
        info = client.get_flight_info(descriptor)
        load(cluster, "parts", write_numbered(tmp_path / "source", 20))

        rows = [client.do_get(endpoint.ticket).read_all() for endpoint in info.endpoints]

    assert sum(map(len, rows)) == 10


def versions_on_disk(cluster: LocalCluster, name: str) -> set[str]:
    files = files_below(*(node.cache_dir / name for node in cluster.nodes))
    return {path.parent.name for path in files if path.name.startswith("shard-")}


@pytest.mark.parametrize("local", [True, False], ids=["files of this machine", "Flight"])
def test_a_reader_of_a_replaced_version_goes_on_to_its_end_and_then_it_is_dropped(
    leasing: LocalCluster, tmp_path: Path, local: bool
) -> None:
    name = f"kept-{local}"
    source = write_numbered(tmp_path / "source", NUM_ROWS, files=8)
    old = load(leasing, name, source)
    dataset = CacheIterableDataset(
        name,
        cache=Connection(leasing.endpoint, local=local),
        batch_size=10,
        reading=Reading(prefetch_batches=1, message_bytes=100),
    )
    steps = iter(dataset)
    rows = next(steps)["row"].tolist()

    write_numbered(source, NUM_ROWS // 2, files=4)
    new = load(leasing, name, source)
    assert new != old and versions_on_disk(leasing, name) == {old, new}
    rows += [row for step in steps for row in step["row"].tolist()]

    assert sorted(rows) == [*range(NUM_ROWS)]
    wait_until(lambda: versions_on_disk(leasing, name) == {new}, WAIT_S, "only the new version")


@pytest.mark.parametrize("local", [True, False], ids=["files of this machine", "Flight"])
def test_steps_keep_a_version_also_while_a_window_lasts_longer_than_a_lease(
    tmp_path: Path, local: bool
) -> None:
    source = write_numbered(tmp_path / "source", NUM_ROWS, files=8)
    with LocalCluster(1, lease_s=LEASE_S, insecure=True) as cluster:
        old = load(cluster, "slow", source)
        # Windows of 80 rows, of which three are fetched ahead.
        dataset = CacheIterableDataset(
            "slow",
            cache=Connection(cluster.endpoint, local=local),
            batch_size=1,
            columns=["row"],
            reading=Reading(prefetch_batches=1, message_bytes=160 if not local else 2**21),
        )
        steps = iter(dataset)
        rows = next(steps)["row"].tolist()
        load(cluster, "slow", write_numbered(source, 10))

        over = time.monotonic() + 2 * LEASE_S
        while time.monotonic() < over:
            rows += next(steps)["row"].tolist()
            threading.Event().wait(LEASE_S / 15)
        assert len(rows) < 80
        assert old in versions_on_disk(cluster, "slow")
        rows += [row for step in steps for row in step["row"].tolist()]

    assert sorted(rows) == [*range(NUM_ROWS)]


def test_passes_of_new_processes_that_are_shorter_than_a_lease_keep_it(tmp_path: Path) -> None:
    source = write_numbered(tmp_path / "source", NUM_ROWS, files=8)
    with LocalCluster(1, lease_s=LEASE_S, insecure=True) as cluster:
        old = load(cluster, "short", source)
        dataset = CacheIterableDataset("short", cache=cluster.endpoint, batch_size=10)
        load(cluster, "short", write_numbered(source, 10))

        over = time.monotonic() + 2 * LEASE_S
        while time.monotonic() < over:
            rows = []
            for batch in copy.copy(dataset):  # maps its files anew, as a new worker does
                rows += batch["row"].tolist()
                threading.Event().wait(0.01)
            assert sorted(rows) == [*range(NUM_ROWS)]
        assert old in versions_on_disk(cluster, "short")


def test_a_version_that_nobody_read_goes_as_soon_as_the_next_is_ready(
    leasing: LocalCluster, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", NUM_ROWS, files=2)
    load(leasing, "unread", source)

    new = load(leasing, "unread", source, filter="row < 10")

    wait_until(lambda: versions_on_disk(leasing, "unread") == {new}, WAIT_S, "the new version")


def test_a_lease_is_renewed_by_another_node_when_the_endpoint_is_gone(tmp_path: Path) -> None:
    source = write_numbered(tmp_path / "source", NUM_ROWS, files=2)
    with (
        LocalCluster(1, lease_s=SHORT_LEASE_S, insecure=True) as cluster,
        socket.socket() as closed,
    ):
        closed.bind(("127.0.0.1", 0))  # nobody listens
        old = load(cluster, "table", source)
        # As if it were time to renew the lease before every fetch.
        shards = replace(
            shard_maps.wait_for_shard_map(cluster.endpoint, "table", (), WAIT_S), lease_s=0.0
        )
        endpoint = f"grpc://127.0.0.1:{closed.getsockname()[1]}"
        with reading_reader.Reader(
            endpoint, shards, local=local_shards.LocalShards(shards, ())
        ) as reader:
            new = load(cluster, "table", source, filter="row < 10")
            over = time.monotonic() + 3 * SHORT_LEASE_S

            def read_until_it_would_be_over() -> bool:
                assert [piece.num_rows for piece in reader.fetch(np.arange(3))] == [3]
                return time.monotonic() > over

            wait_until(read_until_it_would_be_over, WAIT_S, "three leases of reading")
            assert versions_on_disk(cluster, "table") == {old, new}
        wait_until(lambda: versions_on_disk(cluster, "table") == {new}, WAIT_S, "the new version")


def test_rows_of_files_do_not_wait_for_a_node_that_hangs_when_a_lease_is_renewed(
    tmp_path: Path,
) -> None:
    source = write_numbered(tmp_path / "source", NUM_ROWS)
    with LocalCluster(1, insecure=True) as cluster:
        load(cluster, "table", source)
        # As if it were time to renew the lease before every fetch.
        shards = replace(
            shard_maps.wait_for_shard_map(cluster.endpoint, "table", (), WAIT_S), lease_s=0.0
        )
        with reading_reader.Reader(
            cluster.endpoint, shards, local=local_shards.LocalShards(shards, ())
        ) as reader:
            node = psutil.Process(cluster.nodes[0].pid)
            suspend(node)
            try:
                begun = time.monotonic()
                for _ in range(3):
                    assert [piece.num_rows for piece in reader.fetch(np.arange(3))] == [3]
                assert (
                    time.monotonic() - begun < 2 * connections.REQUEST_TIMEOUT_S
                )  # each would wait
            finally:
                node.resume()


def test_a_lease_is_renewed_after_a_moment_in_which_no_thread_began(
    leasing: LocalCluster, tmp_path: Path
) -> None:
    load(leasing, "crowded", write_numbered(tmp_path / "source", NUM_ROWS))
    # As if it were time to renew the lease before every fetch.
    shards = replace(
        shard_maps.wait_for_shard_map(leasing.endpoint, "crowded", (), WAIT_S), lease_s=0.0
    )
    local = local_shards.LocalShards(shards)
    with reading_reader.Reader(leasing.endpoint, shards, local=local) as reader:
        begun = local.leased_at
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", _no_more_threads)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                reader.keep_lease()

        def is_renewed() -> bool:
            reader.keep_lease()
            return local.leased_at > begun

        wait_until(is_renewed, WAIT_S, "a renewed lease")


def _no_more_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")  # as where a container has too many
