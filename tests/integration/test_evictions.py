"""A full cache: what nobody reads makes room, and comes back exactly when it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    ConfigError,
    Connection,
    DatasetSpec,
    LoadError,
    NodeUnavailableError,
    NotReadyError,
)
from cache_client.__main__ import app
from cache_server import LocalCluster
from tests.conftest import numbered_table, rows_of, write_numbered
from tests.reading_jobs import ReadingJob
from tests.waiting import files_below, wait_until

WAIT_S = 60.0
LEASE_S = 1.0
NUM_ROWS, FILES = 4_000, 8
LIMIT_BYTES = 250_000  # of each of two nodes: three datasets fit, and not four


@pytest.fixture
def full(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cache with three datasets and no room for a fourth; nobody has read them lately."""
    with LocalCluster(2, memory_limit_bytes=LIMIT_BYTES, lease_s=LEASE_S) as cluster:
        client = CacheClient(cluster.endpoint)
        source = write_numbered(tmp_path / "source", NUM_ROWS, files=FILES)
        for name in ("first", "second", "third"):
            client.load(DatasetSpec(name, source, target_shard_bytes=1))
        yield cluster


def states(cluster: LocalCluster) -> dict[str, str]:
    return {info.name: info.state for info in CacheClient(cluster.endpoint).datasets()}


def files_of(cluster: LocalCluster, name: str) -> list[Path]:
    found = files_below(*(node.cache_dir / name for node in cluster.nodes))
    return [path for path in found if path.suffix == ".arrow"]


def rows_in(cluster: LocalCluster, name: str) -> list[int]:
    """The rows of one shuffled epoch, sorted."""
    cache = Connection(cluster.endpoint, deadline_s=WAIT_S)
    dataset = CacheIterableDataset(name, cache=cache, batch_size=100, shuffle=True)
    return sorted(rows_of(list(dataset)))


def load(cluster: LocalCluster, name: str, tmp_path: Path, **query: object) -> None:
    """Loads a fourth dataset, as soon as the leases of the loads before are over."""
    client, source = CacheClient(cluster.endpoint), tmp_path / "source"
    spec = DatasetSpec(name, source, target_shard_bytes=1, **query)  # type: ignore[arg-type]

    def loaded() -> bool:
        try:
            return client.load(spec).state == "ready"
        except LoadError as error:
            assert "was read or loaded in the last" in str(error), error
            return False

    wait_until(loaded, WAIT_S, f"{name} is loaded")


@pytest.mark.parametrize("query", [{}, {"filter": "row >= 0"}], ids=["known size", "filter"])
def test_what_was_evicted_is_read_again_exactly_while_a_job_reads_another(
    full: LocalCluster, tmp_path: Path, query: dict[str, object]
) -> None:
    cache = Connection(full.endpoint, deadline_s=WAIT_S)
    with ReadingJob(cache, "second") as job:
        load(full, "fourth", tmp_path, **query)
        found = states(full)
        evicted = [name for name, state in found.items() if state == "evicted"]
        assert evicted in (["first"], ["third"]) and found["second"] == "ready"
        wait_until(lambda: not files_of(full, evicted[0]), WAIT_S, "its files go")

        assert rows_in(full, evicted[0]) == [*range(NUM_ROWS)]  # it waits, and others made room
        assert states(full)[evicted[0]] == "ready"
    job.assert_exact(NUM_ROWS)


def test_a_whole_query_runs_again_when_its_result_is_read(
    full: LocalCluster, tmp_path: Path
) -> None:
    client, source = CacheClient(full.endpoint), tmp_path / "source"
    for name in ("first", "second", "third"):
        client.drop(name)
    sql = "SELECT * FROM source ORDER BY row DESC"
    before = client.load(DatasetSpec("sorted", source, sql=sql, target_shard_bytes=40_000))
    assert before.num_shards > 1
    rows = client.read("sorted").read_all()
    client.keep("sorted", priority=-1)

    for name in ("one", "two", "three"):  # the last one has no room beside the others
        load(full, name, tmp_path)
    assert states(full)["sorted"] == "evicted"

    assert rows_in(full, "sorted") == [*range(NUM_ROWS)]
    assert client.read("sorted").read_all().equals(rows)
    assert client.describe("sorted").fingerprint == before.fingerprint


def test_an_evicted_dataset_is_known_after_a_restart_of_the_coordinator(
    full: LocalCluster, tmp_path: Path
) -> None:
    load(full, "fourth", tmp_path)
    before = states(full)
    (evicted,) = (name for name, state in before.items() if state == "evicted")

    full.nodes[0].kill()
    full.nodes[0].start()
    full.wait_for_nodes()

    wait_until(lambda: states(full) == before, WAIT_S, "the states are as before")
    assert not files_of(full, evicted)
    assert rows_in(full, evicted) == [*range(NUM_ROWS)]


def test_the_commands_show_what_is_kept_what_would_go_and_what_went(
    full: LocalCluster, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    source = str(tmp_path / "source")
    spec.write_text(json.dumps({"name": "fourth", "source": source, "target_shard_bytes": 1}))

    def run(*arguments: str) -> str:
        return CliRunner().invoke(app, [*arguments, "--endpoint", full.endpoint]).output

    assert "pinned, priority 0" in run("keep", "first", "--pinned")
    assert "priority -2" in run("keep", "third", "--priority", "-2")
    evicts = re.compile(r"evicts +third; [\d.]+ KiB in all")
    wait_until(lambda: evicts.search(run("plan", str(spec))), WAIT_S, "the leases end")

    load(full, "fourth", tmp_path)
    listed = {line.split()[0]: line for line in run("ls").splitlines() if line.strip()}
    assert "evicted" in listed["third"] and "pinned" in listed["first"]
    assert "ready" in listed["second"]
    with pytest.raises(ConfigError, match="--priority"):
        raise CliRunner().invoke(app, ["keep", "first"]).exception or AssertionError
    info = CacheClient(full.endpoint).describe("third")
    assert info.priority == -2 and info.load_s > 0 and info.last_read_s is None


def test_written_rows_and_pinned_datasets_stay_and_the_error_says_so(
    full: LocalCluster, tmp_path: Path
) -> None:
    client = CacheClient(full.endpoint)
    load(full, "fourth", tmp_path)  # leaves the room of one
    for info in client.datasets():
        if info.state == "evicted":
            client.drop(info.name)
        else:
            assert client.keep(info.name, pinned=True).pinned

    with pytest.raises(LoadError, match="is pinned") as caught:
        client.load(DatasetSpec("fifth", tmp_path / "source", target_shard_bytes=1))
    assert len(str(caught.value)) <= 700

    first, *_ = (info.name for info in client.datasets())
    client.keep(first, pinned=False)
    rows = numbered_table(NUM_ROWS // 2)
    client.write("written", rows, target_shard_bytes=4096)
    assert states(full)[first] == "evicted" and states(full)["written"] == "ready"
    for info in client.datasets():
        client.keep(info.name, pinned=info.name != "written")
    patient = Connection(full.endpoint, deadline_s=3.0)
    with pytest.raises((NotReadyError, NodeUnavailableError), match=r"waits for room.*written"):
        list(CacheIterableDataset(first, cache=patient, batch_size=100))
    assert client.read("written").read_all().sort_by("row").equals(rows)
