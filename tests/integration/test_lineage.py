"""Events of OpenLineage of loads and of training, as a collector gets them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from cache_client import CacheClient, DatasetSpec, LoadError
from cache_server import LocalCluster
from tests.conftest import write_numbered
from tests.store_stubs import Served
from tests.waiting import wait_until

pytest.importorskip("openlineage.client")

WAIT_S = 30.0
PARENT = "airflow/daily.train/01890a5d-ac96-774b-bcce-b302099a8057"
TRAIN = """
import sys
from torch.utils.data import DataLoader
from cache_client import CacheIterableDataset, Connection

endpoint, how = sys.argv[1:]
dataset = CacheIterableDataset(
    "numbers", cache=Connection(endpoint), batch_size=50, shuffle=True, seed=7, job="job-7"
)
for epoch in (0, 1):
    dataset.set_epoch(epoch)
    workers = how == "with workers"
    for batch in DataLoader(dataset, None, num_workers=1) if workers else dataset:
        if how == "and fail":
            raise ValueError("a secret")
        if how == "until Ctrl-C":
            raise KeyboardInterrupt
"""


class Collector(BaseHTTPRequestHandler):
    """Takes what the client of OpenLineage posts; a subclass has its own events."""

    events: list[dict[str, Any]]

    def do_POST(self) -> None:
        assert self.path == "/api/v1/lineage"
        self.events.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(201)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Events(list[dict[str, Any]]):
    """What the collector got."""

    def of(self, job: str, *, until: str) -> list[dict[str, Any]]:
        """The events of the last run of a job, once it ended so."""

        def found() -> list[dict[str, Any]]:
            last = [e for e in list(self) if e["job"]["name"] == job and e["eventType"] == until]
            return [e for e in list(self) if last and e["run"]["runId"] == last[-1]["run"]["runId"]]

        return wait_until(found, WAIT_S, f"{until} of {job}")


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[str, Events]]:
    events = Events()
    with Served(type("Own", (Collector,), {"events": events})) as url:
        yield url, events


@pytest.fixture(scope="module")
def events(collector: tuple[str, Events]) -> Events:
    return collector[1]


@pytest.fixture(scope="module")
def cluster(collector: tuple[str, Events]) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENLINEAGE_URL", collector[0])
        patch.setenv("OPENLINEAGE_NAMESPACE", "cache")
        with LocalCluster(nodes=1) as running:
            yield running


@pytest.fixture(scope="module")
def source(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the dataset ``numbers``, which is loaded."""
    folder = write_numbered(tmp_path_factory.mktemp("source"), 400, files=3)
    sql = "SELECT row FROM source WHERE row >= 100"
    CacheClient(cluster.endpoint).load(DatasetSpec("numbers", folder, sql=sql))
    return folder


def test_a_load_tells_its_sources_its_query_and_its_version(
    cluster: LocalCluster, source: Path, events: Events
) -> None:
    start, complete = events.of("load.numbers", until="COMPLETE")
    assert (start["eventType"], start["job"]["namespace"]) == ("START", "cache")
    assert "WHERE row >= 100" in start["job"]["facets"]["sql"]["query"]
    (table,) = start["inputs"]
    assert (table["namespace"], table["name"]) == ("file", str(source))
    files = table["inputFacets"]["subset"]["inputCondition"]["locations"]
    assert files == sorted(map(str, source.iterdir()))
    (made,) = complete["outputs"]
    assert (made["namespace"], made["name"]) == ("trainer-data-cache", "numbers")
    fingerprint = CacheClient(cluster.endpoint).describe("numbers").fingerprint
    assert made["facets"]["version"]["datasetVersion"] == fingerprint
    assert [f["name"] for f in made["facets"]["schema"]["fields"]] == ["row"]
    assert made["outputFacets"]["outputStatistics"]["rowCount"] == 300


def test_a_load_that_fails_tells_why_without_secrets(
    cluster: LocalCluster, tmp_path: Path, events: Events
) -> None:
    bad = tmp_path / "a.csv"
    bad.write_text("a\n" + "1\n" * 2_000 + "x\n")
    options = {"AWS_SECRET_ACCESS_KEY": "not-to-be-seen"}
    with pytest.raises(LoadError) as raised:
        CacheClient(cluster.endpoint).load(
            DatasetSpec("broken", bad, filter="a > 0", storage_options=options)
        )
    fail = events.of("load.broken", until="FAIL")[-1]
    assert fail["run"]["facets"]["errorMessage"]["message"] == str(raised.value)
    with pytest.raises(LoadError):
        CacheClient(cluster.endpoint).load(DatasetSpec("absent", tmp_path / "none.parquet"))
    start, fail = events.of("load.absent", until="FAIL")
    assert start["inputs"][0]["name"] == str(tmp_path / "none.parquet")
    assert "none.parquet" in fail["run"]["facets"]["errorMessage"]["message"]
    assert "not-to-be-seen" not in json.dumps(events)


def train(cluster: LocalCluster, url: str, how: str = "") -> subprocess.CompletedProcess[str]:
    settings = {"OPENLINEAGE_URL": url, "OPENLINEAGE_PARENT_ID": PARENT}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        command = [sys.executable, "-c", TRAIN, cluster.endpoint, how]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("how", ["", "with workers"])
def test_training_tells_what_its_order_follows_from(
    cluster: LocalCluster, collector: tuple[str, Events], how: str
) -> None:
    url, events = collector
    assert train(cluster, url, how).returncode == 0
    start, complete = events.of("train.job-7", until="COMPLETE")
    assert start["eventType"] == "START"
    (read,) = start["inputs"]
    assert (read["namespace"], read["name"]) == ("trainer-data-cache", "numbers")
    fingerprint = CacheClient(cluster.endpoint).describe("numbers").fingerprint
    assert read["facets"]["version"]["datasetVersion"] == fingerprint
    facts = start["run"]["facets"]["trainerDataCache"]
    assert (facts["seed"], facts["shuffle"], facts["batch_size"]) == (7, True, 50)
    assert (facts["first_epoch"], facts["world_size"], facts["view"]) == (0, 1, "")
    if not how:
        assert complete["run"]["facets"]["trainerDataCache"]["last_epoch"] == 1
    parent = complete["run"]["facets"]["parent"]
    named = parent["job"]["namespace"], parent["job"]["name"], parent["run"]["runId"]
    assert "/".join(named) == PARENT
    events.clear()


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(("how", "end"), [("and fail", "FAIL"), ("until Ctrl-C", "ABORT")])
def test_training_that_ends_early_tells_how(
    cluster: LocalCluster, collector: tuple[str, Events], how: str, end: str
) -> None:
    url, events = collector
    assert train(cluster, url, how).returncode != 0
    last = events.of("train.job-7", until=end)[-1]
    message = last["run"]["facets"].get("errorMessage", {}).get("message", "")
    assert message == ("ValueError" if end == "FAIL" else "")
    events.clear()


@pytest.mark.usefixtures("source")
def test_a_collector_that_is_away_is_named_once_and_delays_nothing(cluster: LocalCluster) -> None:
    done = train(cluster, "http://127.0.0.1:9")
    assert done.returncode == 0
    assert done.stderr.count("lineage events are dropped") == 1
