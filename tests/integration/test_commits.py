"""When a written row is safe: nodes that are killed keep it, and the cache waits for them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from typing import Any

import pytest

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    Connection,
    LostPartitionsError,
    NodeUnavailableError,
    NotReadyError,
)
from cache_client.writing import writes
from cache_server import LocalCluster
from cache_server.local import LocalNode
from tests.conftest import numbered_table
from tests.waiting import wait_until

ROWS, SHARD_BYTES, WAIT_S = 2000, 8000, 30.0


def node_of(cluster: LocalCluster, node_id: str) -> LocalNode:
    """The process of a node."""
    (found,) = (n for n in cluster.nodes if (n.cache_dir / ".node-id").read_text() == node_id)
    return found


def put_on_two_nodes(
    client: CacheClient, cluster: LocalCluster, name: str, **options: Any
) -> tuple[writes.Write, dict[int, writes.PartitionAck], LocalNode]:
    """A write, a partition on each node, and a node that is not the coordinator's."""
    schema = numbered_table(1).schema
    begun = client.begin_write(name, schema, target_shard_bytes=SHARD_BYTES, **options)
    acks = {
        part: begun.put(part, 0, numbered_table(ROWS // 2, part * ROWS // 2)) for part in range(2)
    }
    victim = next(
        node
        for node in (node_of(cluster, ack.node_id) for ack in acks.values())
        if node is not cluster.nodes[0]
    )
    return begun, acks, victim


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_commit_is_not_taken_while_a_node_with_its_rows_is_down_and_can_be_repeated(
    replicas: int,
) -> None:
    with LocalCluster(nodes=2, node_timeout_s=2.0) as cluster:
        client = CacheClient(Connection(cluster.endpoint, deadline_s=20.0))
        begun, acks, victim = put_on_two_nodes(client, cluster, "t", replicas=replicas)

        victim.kill()

        with pytest.raises((NotReadyError, LostPartitionsError)) as refused:
            begun.commit(acks, timeout_s=0.1)
        assert "is not committed yet: node" in str(refused.value)
        with pytest.raises(LostPartitionsError):
            begun.commit(acks)  # once the node counts as lost
        victim.start()
        cluster.wait_for_nodes()

        assert wait_until(lambda: committed(begun, acks), WAIT_S, "the commit is taken")
        rows = client.read("t").read_all()["row"].to_pylist()
        assert rows == list(range(ROWS))
        assert {len(nodes) for nodes in client.describe("t").placement.values()} == {replicas}


def committed(begun: writes.Write, acks: dict[int, writes.PartitionAck]) -> bool:
    """Whether a commit is answered; rows of a node that came back may not be reported yet."""
    try:
        return bool(begun.commit(acks, timeout_s=WAIT_S).state == "ready")
    except LostPartitionsError:
        return False


def test_rows_whose_nodes_are_away_are_unavailable_never_failed_and_come_back() -> None:
    with LocalCluster(nodes=3, node_timeout_s=1.0) as cluster:
        client = CacheClient(Connection(cluster.endpoint, deadline_s=20.0))
        client.write("t", numbered_table(ROWS), target_shard_bytes=SHARD_BYTES)
        away = sorted(node.id for node in client.nodes())
        away.remove((cluster.nodes[0].cache_dir / ".node-id").read_text())
        for node in cluster.nodes:
            node.kill()

        cluster.nodes[0].start()

        states = set()

        def is_away() -> bool:
            states.add(client.describe("t").state)
            return "unavailable" in states

        wait_until(is_away, WAIT_S, "the rows are known to be away")
        assert states <= {"loading", "unavailable"}
        info = client.describe("t")
        assert list(info.awaited) == away
        assert f"node {away[0]}, node {away[1]}" in str(info.error)
        for read in (
            lambda: client.head("t"),
            lambda: client.write("t", numbered_table(5), append=True),
            lambda: CacheIterableDataset(
                "t", batch_size=10, cache=Connection(cluster.endpoint, deadline_s=0.5)
            ),
        ):
            with pytest.raises(NodeUnavailableError, match=away[0]):
                read()
        opened: list[int] = []
        reader = threading.Thread(
            target=lambda: opened.append(
                CacheIterableDataset(
                    "t", batch_size=10, cache=Connection(cluster.endpoint, deadline_s=60.0)
                ).num_rows
            )
        )
        reader.start()

        for node in cluster.nodes[1:]:
            node.start()

        wait_until(lambda: client.describe("t").state == "ready", WAIT_S, "the rows are back")
        assert client.read("t").read_all()["row"].to_pylist() == list(range(ROWS))
        reader.join()
        assert opened == [ROWS]


def test_files_that_a_coordinator_without_its_disk_does_not_know_stay_until_they_are_dropped() -> (
    None
):
    with LocalCluster(nodes=2, node_timeout_s=1.0) as cluster:
        client = CacheClient(Connection(cluster.endpoint, deadline_s=20.0))
        client.write("t", numbered_table(ROWS), target_shard_bytes=SHARD_BYTES, replicas=2)
        fingerprint = client.describe("t").fingerprint
        first, second = cluster.nodes
        wait_until(lambda: not [*second.cache_dir.glob("t/put-*")], WAIT_S, "the puts are gone")
        first.kill()
        shutil.rmtree(first.cache_dir)
        first.start()
        cluster.wait_for_nodes()

        found = wait_until(client.orphans, WAIT_S, "the coordinator knows of the files")
        assert len(found) == 1, found
        (orphan,) = found
        assert (orphan.dataset, orphan.fingerprint) == ("t", fingerprint)
        assert orphan.num_shards == len([*second.cache_dir.glob("t/*/shard-*.arrow")])
        with pytest.raises(NotReadyError, match="cachectl ls --orphans"):
            client.describe("t")
        assert client.drop_orphans("other") == []
        command = [sys.executable, "-m", "cache_client", "drop-orphans", "--json"]
        command += ["--endpoint", cluster.endpoint]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert [each["fingerprint"] for each in json.loads(shown)] == [fingerprint]
        wait_until(
            lambda: not [*second.cache_dir.glob("t/*/shard-*.arrow")], WAIT_S, "the files are gone"
        )
        assert client.orphans() == []
