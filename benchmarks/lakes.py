"""What does a lake table cost, from its files to tensors?

    python -m benchmarks.lakes [--quick] [--repeats N]

Two Iceberg tables: 24 float32, 6 int64, 2 float64 and a string a row; and lists of 384 float32. Two
nodes load each, from Iceberg and from the same files as plain Parquet, beside DataFusion alone,
which decodes the files into Arrow batches that it keeps. Then one client reads over Flight, in
source order: tensors, Arrow batches, and messages that are thrown away.

Processor time is that of all processes that took part. It says more than time on a shared machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import torch
from datafusion import SessionContext
from pyiceberg.catalog.sql import SqlCatalog

from benchmarks.clusters import drop_all
from benchmarks.common import (
    DATA,
    Timing,
    measure_in_turn,
    memory_directory,
    print_ratios,
    print_table,
    write_result,
)
from benchmarks.tables import FILES
from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_server import LocalCluster

BATCH_SIZE = 1024
LIST_LENGTH = 384
ROW_BYTES = {"mixed": 24 * 4 + 6 * 8 + 2 * 8 + 4 + 3, "lists": LIST_LENGTH * 4 + 4}
TARGETS = {
    "load, processor time / DataFusion alone": 1.5,
    "load from Iceberg / from plain Parquet, processor time": 1.2,
}
ICEBERG, PARQUET = "cache, load from Iceberg, 2 nodes", "cache, load from plain Parquet, 2 nodes"
DATAFUSION = "DataFusion alone, into Arrow batches"


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, in less than a minute")
    parser.add_argument("--repeats", type=int, help="default: 5")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repeats: int = arguments.repeats or (2 if arguments.quick else 5)
    sizes = (
        {"mixed": 100_000, "lists": 10_000}
        if arguments.quick
        else {"mixed": 4_000_000, "lists": 200_000}
    )
    result: dict[str, Any] = {"batch_size": BATCH_SIZE, "targets": TARGETS, "tables": {}}
    with memory_directory("cache-bench-") as directory, LocalCluster(2, directory) as cluster:
        for name, num_rows in sizes.items():
            table = written_once(name, num_rows)
            measured = partial(
                measure_in_turn,
                num_rows=num_rows,
                num_bytes=num_rows * ROW_BYTES[name],
                repeats=repeats,
            )
            loads = measure_loads(cluster, table, measured)
            reads = measure_reads(cluster, table, measured)
            print(f"\n{name}: {num_rows:,} rows of {ROW_BYTES[name]} bytes\n")
            print_table({**loads, **reads})
            ratios: dict[str, float | None] = {
                "load, processor time / DataFusion alone": cpu_ratio(loads, ICEBERG, DATAFUSION),
                "load from Iceberg / from plain Parquet, processor time": cpu_ratio(
                    loads, ICEBERG, PARQUET
                ),
            }
            print_ratios(ratios, {})
            result["tables"][name] = {
                "rows": num_rows,
                "row_bytes": ROW_BYTES[name],
                "timings": [timing.summary() for timing in (*loads.values(), *reads.values())],
                "ratios": ratios,
            }
    result["load_average"] = os.getloadavg()
    path = write_result("lakes-quick" if arguments.quick else "lakes", result)
    print(f"\nwritten to {path}")


def cpu_ratio(timings: dict[str, Timing], ours: str, theirs: str) -> float:
    """Processor time of one contender over that of another."""
    return timings[ours].cpu_s_per_gigabyte / timings[theirs].cpu_s_per_gigabyte


def measure_loads(
    cluster: LocalCluster, table: Path, measured: Callable[..., dict[str, Timing]]
) -> dict[str, Timing]:
    """From the files to ready, by nodes that are up, in turn."""
    client = CacheClient(cluster.endpoint)
    location = (table / "location").read_text()

    def load(source: str) -> int:
        return client.load(DatasetSpec("table", source)).num_rows

    return measured(
        {
            DATAFUSION: lambda: decode(table / "plain"),
            PARQUET: lambda: load(str(table / "plain")),
            ICEBERG: lambda: load(location),
        },
        settle=partial(drop_all, client),
    )


def decode(folder: Path) -> int:
    """The rows that DataFusion decodes into batches in memory, on as many cores as it wants."""
    context = SessionContext()
    context.register_parquet("source", str(folder))
    streams = context.sql("SELECT * FROM source").execute_stream_partitioned()
    with ThreadPoolExecutor(len(streams)) as pool:
        parts = list(pool.map(lambda stream: [batch.to_pyarrow() for batch in stream], streams))
    return sum(batch.num_rows for part in parts for batch in part)


def measure_reads(
    cluster: LocalCluster, table: Path, measured: Callable[..., dict[str, Timing]]
) -> dict[str, Timing]:
    """The loaded table over Flight, in source order."""
    client = CacheClient(cluster.endpoint)
    client.load(DatasetSpec("table", str(table / "plain")))

    def read(**options: Any) -> int:
        batches = CacheIterableDataset(
            "table",
            cache=Connection(cluster.endpoint, local=False),
            batch_size=BATCH_SIZE,
            **options,
        )
        is_arrow = "batch_format" in options
        return sum(
            batch.num_rows if is_arrow else len(next(iter(batch.values()))) for batch in batches
        )

    try:
        return measured(
            {
                "cache, tensors in source order": read,
                "cache, tensors shuffled": lambda: read(shuffle=True),
                "cache, Arrow batches in source order": lambda: read(batch_format="arrow"),
                "DoGet of all shards, thrown away": lambda: drain(cluster),
            }
        )
    finally:
        drop_all(client)


def drain(cluster: LocalCluster) -> int:
    """The rows that a bare Flight client gets."""
    token = f"Bearer {cluster.nodes[0].token}".encode()
    options = flight.FlightCallOptions(headers=[(b"authorization", token)])
    num_rows = 0
    with flight.connect(cluster.endpoint) as client:
        found = client.get_flight_info(flight.FlightDescriptor.for_path("table"), options)
    for endpoint in found.endpoints:
        with flight.connect(endpoint.locations[0]) as client:
            num_rows += sum(
                chunk.data.num_rows for chunk in client.do_get(endpoint.ticket, options)
            )
    return num_rows


def written_once(name: str, num_rows: int) -> Path:
    """An Iceberg table of eight files, and a folder with links to its files; written once."""
    target = DATA / f"lake-{name}-{num_rows}"
    if (target / "location").exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    (target / "plain").mkdir(parents=True)
    rng = np.random.default_rng(0)
    uri, warehouse = f"sqlite:///{target}/catalog.db", f"file://{target}/warehouse"
    with closing(SqlCatalog("bench", uri=uri, warehouse=warehouse)) as catalog:
        catalog.create_namespace("ns")
        table = catalog.create_table("ns.table", rows_of(name, 1, rng).schema)
        for _ in range(FILES):
            table.append(rows_of(name, num_rows // FILES, rng))
    for index, path in enumerate(sorted((target / "warehouse").rglob("*.parquet"))):
        os.link(path, target / "plain" / f"{index}.parquet")
    (target / "location").write_text(table.metadata_location)
    return target


def rows_of(name: str, num_rows: int, rng: np.random.Generator) -> pa.Table:
    """Random rows of one of the tables."""
    if name == "lists":
        values = pa.array(rng.standard_normal(num_rows * LIST_LENGTH, dtype=np.float32))
        offsets = np.arange(num_rows + 1, dtype=np.int32) * LIST_LENGTH
        return pa.table({"embedding": pa.ListArray.from_arrays(offsets, values)})
    columns: dict[str, Any] = {
        f"f{i}": rng.standard_normal(num_rows, dtype=np.float32) for i in range(24)
    }
    columns |= {f"i{i}": rng.integers(0, 1_000_000, num_rows) for i in range(6)}
    columns |= {f"d{i}": rng.standard_normal(num_rows) for i in range(2)}
    columns["word"] = pa.array(rng.integers(100, 1000, num_rows).astype("U")).cast(pa.string())
    return pa.table(columns)


if __name__ == "__main__":
    main()
