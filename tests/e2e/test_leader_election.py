"""Nodes that elect their coordinator by a real Lease: it is lost with its disk, or paused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cache_client import DatasetSpec, NodeUnavailableError
from tests.conftest import numbered_table, write_numbered
from tests.e2e.clusters import Cluster
from tests.elected_nodes import WAIT_S, ElectedNodes, read_rows
from tests.reading_jobs import ReadingJob
from tests.waiting import wait_until

NUM_ROWS = 3_000
LONGEST_WAIT_S = 20.0  # of a new reader, after the loss of the coordinator


def test_the_coordinator_moves_when_it_is_lost_with_its_disk_and_when_it_is_paused(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", NUM_ROWS, files=6)
    rows = numbered_table(NUM_ROWS)
    with ElectedNodes(cluster.kubeconfig, namespace, tmp_path / "nodes") as cache:
        first = cache.leader()
        one, two = (node for node in cache.nodes if node is not first)
        cache.client(one).load(DatasetSpec("loaded", source, target_shard_bytes=1, replicas=2))
        cache.client(one).write("written", rows, target_shard_bytes=4096, replicas=2)
        with ReadingJob(cache.connection(one), "written") as job:
            cache.lose(first)
            with ThreadPoolExecutor(3) as threads:
                read = threads.submit(read_rows, cache.connection(two), "loaded")
                written = threads.submit(cache.client(one).write, "later", rows, replicas=2)
                loaded = threads.submit(cache.client(two).load, DatasetSpec("again", source))
            found, waited_s = read.result()
            assert written.result().state == loaded.result().state == "ready"
            assert found == list(range(NUM_ROWS))
            assert waited_s < LONGEST_WAIT_S
            second = cache.leader(first)
            assert cache.datasets_at(second) == ["again", "later", "loaded", "written"]

            (other,) = {one, two} - {second}
            paused = cache.pause(second)
            try:
                wait_until(lambda: cache.coordinator_of(other) is None, WAIT_S, "its silence")
                cache.client(other).drop("again")
                cache.client(other).write("last", rows)
                assert cache.leader(first, second) is other
            finally:
                paused.resume()
            with pytest.raises(NodeUnavailableError, match="does not coordinate the cache now"):
                cache.datasets_at(second)
            assert cache.leader(first) is other
            assert cache.datasets_at(other) == ["last", "later", "loaded", "written"]
        job.assert_exact(NUM_ROWS)
        for name in ("last", "later", "written"):
            assert cache.client(other).read(name).read_all().sort_by("row").equals(rows)
