"""What docs/operations.md says: sizes, commands, alerts and versions are those that hold."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from cache_client import CacheClient, Connection, DatasetSpec
from cache_client.flight.connections import NodeConnection
from cache_protocol.storage.memory_budget import shard_bytes
from cache_server import LocalCluster
from cache_server.local import LocalNode
from tests.conftest import numbered_table, write_numbered
from tests.http_pages import ask
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ALERTS = yaml.safe_load((ROOT / "docs" / "monitoring" / "alerts.yaml").read_text())
WAIT_S = 60.0
SCALE = 10_000  # the table of the test has so much fewer rows than that of the page


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.partition(f"## {title}\n")[2], maxsplit=1, flags=re.M)[0]


def commands(title: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", section(title), flags=re.DOTALL | re.MULTILINE)


def rows_of_table(title: str) -> dict[str, list[str]]:
    lines = re.findall(r"^\| (.+) \|$", section(title), flags=re.MULTILINE)
    cells = [line.split(" | ") for line in lines[1:]]
    return {first.strip("`"): others for first, *others in cells}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1, memory_limit_bytes=1 << 30, insecure=True) as running:
        yield running


def test_a_dataset_takes_what_the_page_computes(cluster: LocalCluster, tmp_path: Path) -> None:
    text = " ".join(section("Size a cache").split())
    found = re.search(
        r"example, ([\d,]+) rows of .* take (\d+) bytes each\. With `replicas: (\d)` that is (\d+) "
        r"GB\. A node with (\d+) GiB has room for (\d+) GiB, so you need (\d) nodes",
        text,
    )
    assert found
    rows, width, replicas, total_gb, node_gib, room_gib, nodes = (
        int(each.replace(",", "")) for each in found.groups()
    )
    few = rows // SCALE
    ones = np.ones(few)
    columns = {"id": "int64", "price": "float32", "area": "float32", "label": "int8"}
    table = pa.table({name: ones.astype(dtype) for name, dtype in columns.items()})
    assert all(f"`{name} {dtype}`" in text for name, dtype in columns.items())
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2_000)
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"name: sized\nsource: {tmp_path / 'a.parquet'}\nreplicas: {replicas}\n"
        "target_shard_bytes: 32KiB\n"
    )
    room = shard_bytes(node_gib << 30)
    plan = subprocess.run(
        [
            *(sys.executable, "-m", "cache_client", "plan", str(spec), "--json"),
            *("--endpoint", cluster.endpoint, "--memory-limit", str(room // SCALE)),
            *("--nodes", str(nodes)),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    forecast = json.loads(plan.stdout)
    assert forecast["num_bytes"] == few * width
    assert rows * width * replicas == total_gb * 10**9
    assert room == room_gib << 30
    assert forecast["fits"] and forecast["nodes_needed"] == nodes
    assert math.ceil(rows * width * replicas / room) == nodes


def test_texts_and_nulls_take_what_the_page_says(cluster: LocalCluster, tmp_path: Path) -> None:
    count = 40_000
    nulls = {f"n{i}": pa.array([None, 1] * (count // 2), pa.int8()) for i in range(9)}
    others = {"text": ["x" * 100] * count, "flag": [True] * count}
    lists = {"list": pa.array([[1, 2, 3]] * count, pa.list_(pa.int32()))}
    pq.write_table(pa.table({**others, **lists, **nulls}), tmp_path / "a.parquet")
    info = CacheClient(cluster.endpoint).load(DatasetSpec("texts", tmp_path / "a.parquet"))
    width = (4 + 100) + 1 + (4 + 3 * 4) + 9 * 1 + 2
    assert info.num_bytes == pytest.approx(count * width, rel=0.01)


def begin(directory: Path, *arguments: str) -> LocalNode:
    settings = ("--heartbeat-interval-s", "0.2", "--node-timeout-s", "3", "--allow-source", "")
    node = LocalNode(directory, [*settings, *arguments], "token")
    node.start()
    return node


def run(script: str, directory: Path, **variables: str) -> None:
    environment = {**os.environ, **variables}
    subprocess.run(["bash", "-euc", script], cwd=directory, env=environment, check=True, timeout=60)


def test_a_catalogue_that_was_lost_is_restored(tmp_path: Path) -> None:
    catalogue = tmp_path / "catalogue"
    source = write_numbered(tmp_path / "source", 400, files=4)
    rows = numbered_table(300)
    own = ("--catalogue-dir", str(catalogue))
    first = begin(tmp_path / "one", *own)
    second = begin(tmp_path / "two", "--coordinator", first.control_location)
    try:
        client = CacheClient(Connection(first.endpoint, token="token", local=False))
        wait_until(lambda: len(client.nodes()) == 2, WAIT_S, "both nodes")
        client.load(DatasetSpec("loaded", source, target_shard_bytes=1))
        client.write("written", rows)
        (save,) = [c for c in commands("Save the catalogue") if "CATALOGUE_DIR" in c]
        run(save, tmp_path, CATALOGUE_DIR=str(catalogue))
        client.write("later", rows)

        first.kill()
        shutil.rmtree(catalogue)
        shutil.rmtree(source)  # nothing may be read from it
        (restore,) = [c for c in commands("Restore the catalogue") if "CATALOGUE_DIR" in c]
        run(restore, tmp_path, CATALOGUE_DIR=str(catalogue))
        first.start()

        def states() -> dict[str, str]:
            return {info.name: info.state for info in client.datasets()}

        ready = {"loaded": "ready", "written": "ready"}
        wait_until(lambda: states() == ready, WAIT_S, "what was saved is there")
        assert client.read("written").read_all().sort_by("row").equals(rows)
        assert client.read("loaded", columns=["row"]).read_all()["row"].to_pylist() == list(
            range(400)
        )
        wait_until(
            lambda: "later" in {orphan.dataset for orphan in client.orphans()},
            WAIT_S,
            "what was written since is an orphan",
        )
        client.drop_orphans("later")
        client.write("later", rows)
        assert client.read("later").read_all().num_rows == 300
    finally:
        first.close()
        second.close()


def test_without_a_saved_catalogue_loads_attach_and_writes_are_repeated(tmp_path: Path) -> None:
    source = write_numbered(tmp_path / "source", 800, files=8)
    first = begin(tmp_path / "one")
    second = begin(tmp_path / "two", "--coordinator", first.control_location)
    try:
        client = CacheClient(Connection(first.endpoint, token="token", local=False))
        wait_until(lambda: len(client.nodes()) == 2, WAIT_S, "both nodes")
        spec = DatasetSpec("loaded", source, target_shard_bytes=1)
        client.load(spec)
        client.write("written", numbered_table(300), replicas=2)
        files = {path: path.stat().st_ino for path in second.cache_dir.glob("loaded/*/shard-*")}
        assert files
        first.kill()
        shutil.rmtree(first.cache_dir)
        first.start()
        wait_until(lambda: client.orphans(), WAIT_S, "the other node reports")
        assert client.datasets() == []
        client.load(spec)
        # The new disk is another node to the placement, to which some of them moved.
        kept = {path: path.stat().st_ino for path in files if path.exists()}
        assert kept and kept.items() <= files.items()
        assert client.read("loaded").read_all().num_rows == 800
        assert "written" in {orphan.dataset for orphan in client.orphans()}
        client.drop_orphans("written")
        client.write("written", numbered_table(300))
        assert client.read("written").read_all().num_rows == 300
    finally:
        first.close()
        second.close()


def test_after_the_loss_of_every_disk_loaded_tables_come_back_and_written_ones_wait(
    tmp_path: Path,
) -> None:
    catalogue = tmp_path / "catalogue"
    source = write_numbered(tmp_path / "source", 400, files=4)
    node = begin(tmp_path / "one", "--catalogue-dir", str(catalogue))
    try:
        client = CacheClient(Connection(node.endpoint, token="token", local=False))
        client.load(DatasetSpec("loaded", source, target_shard_bytes=1))
        client.write("written", numbered_table(300))
        node.kill()
        shutil.rmtree(node.cache_dir)
        node.start()

        def states() -> dict[str, str]:
            return {info.name: info.state for info in client.datasets()}

        expected = {"loaded": "ready", "written": "unavailable"}
        wait_until(lambda: states() == expected, WAIT_S, "it loads again")
        client.write("written", numbered_table(300))
        assert client.read("written").read_all().num_rows == 300
    finally:
        node.close()


def test_every_alert_is_explained_and_its_metrics_are_those_of_a_node(
    cluster: LocalCluster,
) -> None:
    rules = [rule for group in ALERTS["spec"]["groups"] for rule in group["rules"]]
    explained = rows_of_table("Alerts")
    assert {rule["alert"] for rule in rules} == explained.keys() - {":---", "---"}
    with NodeConnection(cluster.endpoint) as connection:
        page = connection.coordinator(WAIT_S).page
    _, _, body = ask(page, "/metrics")
    names = set(re.findall(r"^# TYPE (\w+)", body, flags=re.MULTILINE))
    for rule in rules:
        for name in re.findall(r"data_cache_\w+", rule["expr"]):
            assert name in names or name.removesuffix("_total") in names, name


def lowest(requirement: str, extra: str | None = None) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    given = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    (found,) = [re.split(r"[>=<,]+", each) for each in given if each.startswith(f"{requirement}>=")]
    return found[1]


def test_the_supported_versions_are_those_of_the_packages() -> None:
    table = rows_of_table("Supported versions")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (tested,) = re.findall(r"python-version: \[(.*)\]", workflow)
    assert table["Python"] == [project["requires-python"][2:], tested.replace('"', "")]
    assert table["torch"] == [lowest("torch", "client"), pins["torch"]]
    assert table["pyarrow, in the trainer"] == [lowest("pyarrow"), pins["pyarrow"]]
    assert table["pyarrow, on the nodes"] == [lowest("pyarrow", "server"), pins["pyarrow"]]
    assert table["NumPy, in the trainer"] == [lowest("numpy"), pins["numpy"]]
    assert table["DataFusion"] == [lowest("datafusion", "server"), pins["datafusion"]]
    trainer = lowest("kubeflow-trainer-api", "kubernetes")
    assert table["Kubeflow Trainer"][0] == trainer
    versions = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert f"Kubeflow Trainer {trainer} with its JobSet 0.12. Kubernetes 1.35" in versions
    assert table["Kubernetes"][0].startswith("1.35;") and "0.12" in table["Kubeflow Trainer"][1]
