"""Nodes in zones: where replicas lie, which of them readers ask, and what is counted."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_client.__main__ import app
from cache_server.local import LocalNode
from tests.conftest import numbered_table, write_numbered
from tests.waiting import wait_until

WAIT_S = 60.0
NUM_ROWS, FILES = 3_000, 12  # each file becomes a shard
TIMINGS = ["--heartbeat-interval-s", "0.1", "--node-timeout-s", "2", "--allow-source", ""]
_WAY = re.compile(r'data_cache_zone_bytes_total\{from_zone="(.+)",to_zone="(.+)"\} (\S+)')


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[LocalNode]]:
    """Two nodes in each of two zones; the first coordinates."""
    with ExitStack() as stack:
        started: list[LocalNode] = []
        for zone in ("a", "a", "b", "b"):
            arguments = ["--zone", zone, "--insecure", *TIMINGS]
            if started:
                arguments += ["--coordinator", started[0].control_location]
            node = LocalNode(tmp_path / f"{zone}{len(started)}", arguments, None)
            stack.callback(node.close)
            node.start()
            started.append(node)
        client = CacheClient(started[0].endpoint)
        wait_until(lambda: len(client.nodes()) == 4, WAIT_S, "all nodes join")
        yield started


def sent(nodes: list[LocalNode]) -> Counter[tuple[str, str]]:
    """Bytes from zone to zone, of all nodes that run."""
    found: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        with suppress(OSError), urllib.request.urlopen(f"{node.page}metrics") as answer:
            for from_zone, to_zone, num_bytes in _WAY.findall(answer.read().decode()):
                found[from_zone, to_zone] += int(float(num_bytes))
    return found


def cachectl(nodes: list[LocalNode], *arguments: str) -> str:
    return CliRunner().invoke(app, [*arguments, "--endpoint", nodes[0].endpoint]).output


def zones_of_shards(client: CacheClient, name: str) -> set[tuple[str, ...]]:
    info = client.describe(name)
    return {tuple(sorted(info.zones[n] for n in held)) for held in info.placement.values()}


def test_readers_stay_in_their_zone_leave_it_when_it_fails_and_come_back(
    nodes: list[LocalNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = CacheClient(nodes[0].endpoint)
    source = write_numbered(tmp_path / "source", NUM_ROWS, files=FILES)
    client.load(DatasetSpec("table", source, target_shard_bytes=1, replicas=2))
    assert zones_of_shards(client, "table") == {("a", "b")}
    # A node copies the file of the first one in another zone.
    assert sent(nodes)["a", "b"] + sent(nodes)["b", "a"] > 0
    monkeypatch.setenv("CACHE_ZONE", "b")
    dataset = CacheIterableDataset(
        "table", batch_size=100, cache=Connection(nodes[0].endpoint, local=False)
    )

    def epoch() -> Counter[tuple[str, str]]:
        """What an epoch added."""
        before = sent(nodes)
        rows = [int(row) for batch in dataset for row in batch["row"]]
        assert sorted(rows) == list(range(NUM_ROWS))
        return sent(nodes) - before

    def stays() -> bool:
        added = epoch()
        return added["a", "b"] == 0 < added["b", "b"]

    assert stays()
    shown = {name: cachectl(nodes, *name.split()) for name in ("nodes", "describe table", "doctor")}
    assert re.search(r"zone .*\b[ab] ", shown["nodes"], re.DOTALL)
    assert f"{FILES} in a, {FILES} in b\n" in shown["describe table"]
    assert "nodes in a, b; this process in b" in shown["doctor"]
    for node in nodes[2:]:
        node.kill()
    assert epoch()["a", "b"] > 0
    for node in nodes[2:]:
        node.start()
    wait_until(lambda: client.describe("table").state == "ready", WAIT_S, "the dataset is ready")
    wait_until(stays, WAIT_S, "reads stay in the zone again")


def test_drains_and_written_rows_keep_replicas_in_different_zones(nodes: list[LocalNode]) -> None:
    client = CacheClient(nodes[0].endpoint)
    client.write("written", numbered_table(NUM_ROWS), target_shard_bytes=4096, replicas=2)
    assert zones_of_shards(client, "written") == {("a", "b")}

    drained = client.drain(nodes[3].node_id, deadline_s=WAIT_S)

    assert drained.drain is not None and drained.drain.done and drained.zone == "b"
    wait_until(
        lambda: (
            zones_of_shards(client, "written") == {("a", "b")}
            and not any(
                nodes[3].node_id in held for held in client.describe("written").placement.values()
            )
        ),
        WAIT_S,
        "the shards moved within the zone",
    )
    assert client.read("written").read_all().num_rows == NUM_ROWS


def test_a_coordinator_that_starts_again_knows_the_zones_of_nodes_that_are_away(
    nodes: list[LocalNode], tmp_path: Path
) -> None:
    client = CacheClient(nodes[0].endpoint)
    source = write_numbered(tmp_path / "source", NUM_ROWS, files=FILES)
    client.load(DatasetSpec("table", source, target_shard_bytes=1, replicas=2))
    nodes[3].kill()
    nodes[0].kill()

    nodes[0].start()

    wait_until(
        lambda: {n.id: n.zone for n in client.nodes()}.get(nodes[3].node_id) == "b",
        WAIT_S,
        "the coordinator lists the node that is away",
    )
