"""Spark on two executors: what it writes into a cache, and what it reads."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cache_client import CacheClient
from cache_server import LocalCluster
from tests.waiting import wait_until

ROWS = 1000

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(500),  # it starts three Java processes and two dozen of Python
    pytest.mark.skipif(
        importlib.util.find_spec("pyspark") is None, reason="pyspark is not installed"
    ),
    pytest.mark.skipif(shutil.which("java") is None, reason="java is not installed"),
]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engines.md"
EXAMPLE = ROOT / "examples" / "spark"

PROGRAM = """
import json, os, sys, time
from pathlib import Path
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from cache_client.engines.spark_source import CacheDataSource, CacheWriter

endpoint, folder, rows = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

def attempts(case):
    path = folder / case
    return path.read_text().split() if path.exists() else []

class Watched(CacheWriter):
    '''Notes the attempts at partition 1, after their puts.'''

    case = ""

    def write(self, iterator):
        put = super().write(iterator)
        if put.ack is not None and put.ack.partition == 1:
            with (folder / self.case).open("a") as file:
                file.write(f"{put.ack.attempt} ")
            self.after(len(attempts(self.case)))
        return put

    def after(self, number):
        pass

class FailsOnce(Watched):
    case = "fails-once"

    def after(self, number):
        if number == 1:
            os._exit(1)  # acknowledged by the cache, not yet by Spark

class WaitsForADuplicate(Watched):
    case = "duplicate"

    def after(self, number):
        deadline = time.monotonic() + 60
        while len(attempts(self.case)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)

class FailsAlways(Watched):
    case = "fails-always"

    def after(self, number):
        raise ValueError("a task that never ends well")

class NeverCommits(Watched):
    case = "never-commits"

    def commit(self, messages):
        (folder / "committing").touch()
        while True:
            time.sleep(60)

KINDS = {kind.case: kind for kind in (FailsOnce, WaitsForADuplicate, FailsAlways, NeverCommits)}

class Source(CacheDataSource):
    def writer(self, schema, overwrite):
        writer = super().writer(schema, overwrite)
        kind = KINDS.get((folder / "case").read_text())
        return writer if kind is None else kind(writer._write)

def error_of(action):
    try:
        action()
    except Exception as error:
        return str(error)

def start_cluster():
    '''A master and two workers, in the process of the driver; executors are processes.

    As `local-cluster`, but with two hosts: a duplicate never runs on the host of its task.
    '''
    SparkContext._ensure_initialized()
    jvm = SparkContext._jvm
    conf = jvm.org.apache.spark.SparkConf(False).set("spark.master.rest.enabled", "false")
    deploy = jvm.org.apache.spark.deploy
    master = deploy.master.Master.startRpcEnvAndEndpoint("127.0.0.1", 0, 0, conf)
    url = f"spark://127.0.0.1:{master._1().address().port()}"
    urls = SparkContext._gateway.new_array(jvm.java.lang.String, 1)
    urls[0] = url
    nothing = jvm.scala.Option.empty()
    for number in (2, 3):
        deploy.worker.Worker.startRpcEnvAndEndpoint(
            f"127.0.0.{number}", 0, 0, 1, 512, urls, str(folder / "work"),
            jvm.scala.Option.apply(number), conf, nothing,
        )
    return url

def main():
    spark = (
        SparkSession.builder.master(start_cluster())
        .config("spark.executor.memory", "512m")
        .config("spark.ui.enabled", False)
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.speculation", True)
        .config("spark.speculation.interval", "50ms")
        .config("spark.speculation.multiplier", 1.1)
        .config("spark.speculation.quantile", 0.5)
        .config("spark.speculation.minTaskRuntime", "1s")
        .getOrCreate()
    )
    spark.dataSource.register(Source)
    found = {}

    def write(frame, name, mode="overwrite", case="", **options):
        (folder / "case").write_text(case)
        writer = frame.write.format("trainer-data-cache").mode(mode).option("endpoint", endpoint)
        return error_of(writer.options(name=name, **options).save)

    frame = spark.range(0, rows, 1, 4).select(
        F.col("id").alias("row"),
        (F.col("id") % 2 == 0).alias("even"),
        F.array(F.col("id").cast("float"), F.lit(1.0).cast("float")).alias("pair"),
        F.concat(F.lit("row "), F.col("id")).alias("text"),
    )
    found["once"] = write(frame, "once", "append", "fails-once", replicas=2)
    found["again"] = write(frame.filter("row < 10"), "once", "append")
    found["kept"] = write(frame, "kept", case="duplicate")
    found["failed"] = write(frame.filter("row < 999"), "kept", case="fails-always")
    found["some"] = write(frame.filter("row < 10 or row >= 990"), "some")  # two empty tasks
    found["none"] = write(frame.filter("row < 0"), "none")
    found["map"] = write(frame.select(F.create_map("row", "text").alias("m")), "map")
    found["option"] = write(frame, "option", replica=2)

    kept = spark.read.format("trainer-data-cache").options(
        endpoint=endpoint, name="kept", num_partitions=3
    )
    loaded = kept.load()
    collected = loaded.collect()
    found["read"] = [row.row for row in collected]
    found["fifth"] = collected[5].asDict()
    found["types"] = loaded.schema.simpleString()
    found["parts"] = loaded.rdd.getNumPartitions()
    found["given"] = kept.schema("even boolean").load().filter("even").count()
    found["attempts"] = {case: attempts(case) for case in ("fails-once", "duplicate")}

    sys.path.append(sys.argv[4])
    from write_lineitem import write_lineitem

    spark.range(rows).selectExpr(
        "id AS l_orderkey", "1 AS l_linenumber",
        "CAST(id AS DECIMAL(15, 2)) AS l_quantity",
        "CAST(0.1 AS DECIMAL(15, 2)) AS l_discount",
        "CAST(id AS DECIMAL(15, 2)) AS l_extendedprice",
    ).write.parquet(str(folder / "lineitem"))
    found["example"] = error_of(lambda: write_lineitem(spark, str(folder / "lineitem")))
    names = {"spark": spark}
    exec((folder / "page.py").read_text(), names)
    found["page"] = names["dear"].count()
    (folder / "found.json").write_text(json.dumps(found))
    spark.dataSource.register(Source)
    write(frame.filter("row < 998"), "kept", case="never-commits", ttl_s=3)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2) as running:
        yield running


@pytest.fixture(scope="module")
def found(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program found; it was killed before its last commit."""
    folder: Path = tmp_path_factory.mktemp("spark")
    script = folder / "writes.py"
    script.write_text(PROGRAM)
    page = PAGE.read_text(encoding="utf-8").partition("\n## Spark\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    code = "\n".join(blocks).replace("/shared/written", str(folder / "through"))
    (folder / "page.py").write_text(code)
    environment = {
        **os.environ,
        "CACHE_ENDPOINT": cluster.endpoint,
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # they end soon
        "SPARK_LOCAL_DIRS": str(folder / "local"),
    }
    log = folder / "log"
    with log.open("wb") as output:
        driver = psutil.Popen(
            [sys.executable, str(script), cluster.endpoint, str(folder), str(ROWS), str(EXAMPLE)],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until(
                lambda: (folder / "committing").exists() or driver.poll() is not None,
                400,
                "the last commit is near",
            )
        finally:
            everything = [*driver.children(recursive=True), driver] if driver.poll() is None else []
            for process in everything:
                process.kill()
            driver.wait()
    assert (folder / "committing").exists(), log.read_text()[-20_000:]
    answers: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answers


def rows_of(client: CacheClient, name: str) -> list[int]:
    rows: list[int] = client.read(name).read_all()["row"].to_pylist()
    return rows


@pytest.mark.parametrize(("case", "name"), [("fails-once", "once"), ("duplicate", "kept")])
def test_two_attempts_of_a_task_put_its_rows_and_one_counts(
    found: dict[str, Any], cluster: LocalCluster, case: str, name: str
) -> None:
    assert found[name] is None
    assert len(set(found["attempts"][case])) == 2
    assert rows_of(CacheClient(cluster.endpoint), name)[:ROWS] == list(range(ROWS))


def test_the_mode_append_adds_rows_to_a_dataset(
    found: dict[str, Any], cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    assert found["again"] is None
    assert rows_of(client, "once")[ROWS:] == list(range(10))
    assert client.describe("once").replicas == 2


def test_a_failed_job_and_a_killed_driver_leave_the_version_before_them_and_no_bytes(
    found: dict[str, Any], cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    assert "a task that never ends well" in found["failed"]
    assert rows_of(client, "kept") == list(range(ROWS))
    infos = client.datasets()
    names = {"once", "kept", "some", "none", "houses", "houses-kept", "lineitem"}
    assert {info.name for info in infos} == names
    expected = sum(info.num_bytes * info.replicas for info in infos)
    wait_until(
        lambda: sum(node.stored_bytes for node in client.nodes()) == expected,
        20,
        "the nodes hold only what was committed",
    )


def test_tasks_without_rows_are_no_partitions(found: dict[str, Any], cluster: LocalCluster) -> None:
    client = CacheClient(cluster.endpoint)
    assert (found["some"], found["none"]) == (None, None)
    assert rows_of(client, "some") == [*range(10), *range(990, ROWS)]
    assert client.describe("none").num_rows == 0


def test_wrong_columns_and_options_are_quoted(found: dict[str, Any]) -> None:
    assert "column 'm' is map<bigint,string>, which cannot be stored" in found["map"]
    assert "unknown option 'replica'" in found["option"]


def test_spark_reads_each_row_once_in_order_and_in_parts(found: dict[str, Any]) -> None:
    assert found["read"] == list(range(ROWS))
    assert found["parts"] == 3
    assert found["types"] == "struct<row:bigint,even:boolean,pair:array<float>,text:string>"
    assert found["fifth"] == {"row": 5, "even": False, "pair": [5.0, 1.0], "text": "row 5"}
    assert found["given"] == ROWS // 2


def test_the_page_about_engines_holds(found: dict[str, Any], cluster: LocalCluster) -> None:
    assert found["page"] == 200
    assert rows_of(CacheClient(cluster.endpoint), "houses-kept") == list(range(1000))


def test_the_example_writes_its_table(found: dict[str, Any], cluster: LocalCluster) -> None:
    assert found["example"] is None
    table = CacheClient(cluster.endpoint).read("lineitem").read_all()
    assert table.column_names == ["row_key", "quantity", "discount", "price"]
    # Spark reads larger files first.
    assert sorted(table["row_key"].to_pylist()) == [row * 8 + 1 for row in range(ROWS)]
