"""How fast do Ray and Spark write a table into a cache, beside their own Parquet files in memory?

    python -m benchmarks.engines [--quick] [--rows N] [--repeats N]

32 random float32 columns and an int64 label, which the engine holds in memory. Two workers write
them to two nodes on this machine, or as Parquet files to tmpfs, in turn. Spark needs Java 17.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from benchmarks.clusters import drop_all
from benchmarks.common import (
    Timing,
    measure_in_turn,
    memory_directory,
    print_ratios,
    print_table,
    ratio,
    write_result,
)
from benchmarks.tables import FEATURES, ROW_BYTES
from cache_client import CacheClient
from cache_client.engines.ray_data import CacheDatasink
from cache_client.engines.spark_source import CacheDataSource
from cache_server import LocalCluster

PARTITIONS = 4
OURS, PARQUET = "to the cache", "Parquet to tmpfs"
TARGETS = {"Ray: cache over Parquet": 0.5, "Spark: cache over Parquet": 0.5}
Measured = dict[str, Timing]


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, in about a minute")
    parser.add_argument("--rows", type=int, help="default: 8 million, which are 1.1 GB")
    parser.add_argument("--repeats", type=int, help="default: 5")
    arguments = parser.parse_args()
    rows: int = arguments.rows or (1_000_000 if arguments.quick else 8_000_000)
    repeats: int = arguments.repeats or (3 if arguments.quick else 5)
    ratios, timings = {}, []
    for name, measure in {"Ray": measure_ray, "Spark": measure_spark}.items():
        with memory_directory("cache-bench-") as directory:
            measured = measure(rows, repeats, directory)
        print(f"\n{name}: {rows:,} rows, {rows * ROW_BYTES / 1e9:.2f} GB\n")
        print_table(measured)
        ratios[f"{name}: cache over Parquet"] = ratio(measured, OURS, PARQUET)
        timings += [{"engine": name, **timing.summary()} for timing in measured.values()]
    print()
    print_ratios(ratios, TARGETS)
    path = write_result(
        "engines-quick" if arguments.quick else "engines",
        {"rows": rows, "row_bytes": ROW_BYTES, "timings": timings, "ratios": ratios},
    )
    print(f"\nwritten to {path}")


def measure_ray(rows: int, repeats: int, directory: Path) -> Measured:
    """Two workers of Ray Data; the rows lie in the object store."""
    chance = np.random.default_rng(1)
    size = rows // PARTITIONS
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=max(rows * ROW_BYTES * 2, 256 << 20),
        log_to_driver=False,
    )
    try:
        dataset = ray.data.from_arrow(
            [
                pa.table(
                    {
                        **{name: chance.random(size, np.float32) for name in FEATURES},
                        "label": np.arange(part * size, (part + 1) * size),
                    }
                )
                for part in range(PARTITIONS)
            ]
        )
        return _measure(
            lambda name, endpoint: dataset.write_datasink(CacheDatasink(name, endpoint)),
            lambda path: dataset.write_parquet(path),
            size * PARTITIONS,
            repeats,
            directory,
        )
    finally:
        ray.shutdown()


def measure_spark(rows: int, repeats: int, directory: Path) -> Measured:
    """Two threads of Spark in this machine's Java; the rows are cached there."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", False)
        .config("spark.driver.memory", f"{max(2, rows * ROW_BYTES * 3 >> 30)}g")
        .config("spark.local.dir", str(directory / "local"))
        .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
        .getOrCreate()
    )
    try:
        spark.dataSource.register(CacheDataSource)
        columns = [sql.rand(seed).cast("float").alias(name) for seed, name in enumerate(FEATURES)]
        frame = spark.range(0, rows, 1, PARTITIONS).select(*columns, sql.col("id").alias("label"))
        frame = frame.cache()
        frame.count()

        def write(name: str, endpoint: str) -> None:
            writer = frame.write.format("trainer-data-cache").mode("overwrite")
            writer.options(name=name, endpoint=endpoint).save()

        return _measure(write, lambda path: frame.write.parquet(path), rows, repeats, directory)
    finally:
        spark.stop()


def _measure(
    write: Callable[[str, str], object],
    write_parquet: Callable[[str], object],
    rows: int,
    repeats: int,
    directory: Path,
) -> Measured:
    files = directory / "files"
    with LocalCluster(2, directory / "cache") as cluster:
        client = CacheClient(cluster.endpoint)

        def to_cache() -> int:
            write("rows", cluster.endpoint)
            return client.describe("rows").num_rows

        def to_parquet() -> int:
            write_parquet(str(files))
            return rows

        def settle() -> None:
            drop_all(client)
            shutil.rmtree(files, ignore_errors=True)

        return measure_in_turn(
            {PARQUET: to_parquet, OURS: to_cache},
            num_rows=rows,
            num_bytes=rows * ROW_BYTES,
            repeats=repeats,
            settle=settle,
        )


if __name__ == "__main__":
    main()
