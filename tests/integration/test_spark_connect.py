"""A session of Spark Connect, as the Kubeflow SDK gives one, writes into a cache and reads it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cache_client import CacheClient

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(300),  # it starts a Java process
    pytest.mark.skipif(
        any(importlib.util.find_spec(each) is None for each in ("pyspark", "grpc_status")),
        reason="pyspark[connect] is not installed",
    ),
    pytest.mark.skipif(shutil.which("java") is None, reason="java is not installed"),
]

# The class travels to the server by its name, which imports it there: in the pods of the server and
# of its executors, not in the client's.
PROGRAM = """
import sys
from pyspark.sql import SparkSession
from cache_client.engines.spark_source import CacheDataSource

endpoint, name = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
assert "connect" in type(spark).__module__
spark.dataSource.register(CacheDataSource)
rows = spark.range(1000, numPartitions=4).selectExpr("id AS row", "id / 2 AS price")
options = {"endpoint": endpoint, "name": name}
rows.write.format("trainer-data-cache").options(**options).mode("overwrite").save()
read = spark.read.format("trainer-data-cache").options(**options).load()
print(read.count())
spark.stop()
"""


def test_a_frame_of_a_session_of_connect_becomes_a_dataset_of_the_cache(
    client: CacheClient, dataset_name: str
) -> None:
    root = Path(__file__).resolve().parents[2]
    path = f"{root}:{root}/protos"
    environment = {"PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["PYSPARK_PYTHON"] = sys.executable  # of the workers, which is that of an image
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, client.endpoint, dataset_name],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "1000"
    rows = client.read(dataset_name).read_all()
    assert rows.column("row").to_pylist() == list(range(1000))
