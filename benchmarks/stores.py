"""How long from an object store to ready, against DataFusion alone from the same server?

    python -m benchmarks.stores [--quick] [--rows N] [--repeats N]

The table is the 32 float32 columns and a label of `benchmarks.throughput`, as eight objects, as one
and as 2,000. Two nodes of this cache load it until it is ready. Beside them DataFusion, with its
own S3 reader, lists the same prefix and streams every column to nowhere, in two partitions; and
`benchmarks.bare_load`, which is that with its batches packed and sealed: the least that a load by
DataFusion can be. The server and the contenders share this machine's cores, so what the server
takes is taken from all.

The server is `benchmarks.object_server`, in a separate process, not moto's: moto builds each body
in Python from a copy of the object, one request at a time, and would be most of what is measured.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datafusion import RecordBatchStream, SessionConfig

from benchmarks.bare_load import BareLoad, bare_load, with_store
from benchmarks.clusters import drop_all
from benchmarks.common import (
    DATA,
    Timing,
    measure_in_turn,
    memory_directory,
    print_ratios,
    print_table,
    ratio,
    write_timings,
)
from benchmarks.object_server import object_server
from benchmarks.tables import ROW_BYTES, floats, write_once
from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster

BUCKET = "bench"
SMALL_OBJECTS = 2000
FORMS = ("8 objects", "1 object", f"{SMALL_OBJECTS:,} objects")
CACHE, DATAFUSION = "cache, load, 2 nodes, {}", "DataFusion alone, {}"
BARE = "DataFusion, packed and sealed by 2 processes, {}"
OVER_DATAFUSION = "load over DataFusion alone, {}"
BARE_OVER_DATAFUSION = "the same, packed and sealed, over DataFusion alone, {}"
SMALL_OVER_ONE = f"load of {SMALL_OBJECTS:,} objects over 1 object"
TARGETS = {
    **{OVER_DATAFUSION.format(form): 0.7 for form in FORMS},
    SMALL_OVER_ONE: 0.667,  # 1.5 times as long
}
PARTITIONS = 2
_KEYS = {"access_key_id": "benchmark", "secret_access_key": "benchmark"}


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, in less than a minute")
    parser.add_argument("--rows", type=int, help="default: 4 million, which are 0.5 GB")
    parser.add_argument("--repeats", type=int, help="default: 5")
    arguments = parser.parse_args()
    rows: int = arguments.rows or (400_000 if arguments.quick else 4_000_000)
    repeats: int = arguments.repeats or (1 if arguments.quick else 5)
    prefixes = dict(zip(FORMS, prepare(rows), strict=True))
    with (
        memory_directory("cache-bench-") as directory,
        object_server(DATA) as endpoint,
        LocalCluster(2, directory / "cache") as cluster,
        bare_load(directory, BUCKET, endpoint, _KEYS) as bare,
    ):
        timings = measure(prefixes, endpoint, CacheClient(cluster.endpoint), bare, rows, repeats)
    print(f"\n{rows:,} rows of {ROW_BYTES} bytes, {rows * ROW_BYTES / 1e9:.2f} GB\n")
    print_table(timings)
    ratios = {
        OVER_DATAFUSION.format(form): ratio(timings, CACHE.format(form), DATAFUSION.format(form))
        for form in FORMS
    }
    ratios |= {
        BARE_OVER_DATAFUSION.format(form): ratio(
            timings, BARE.format(form), DATAFUSION.format(form)
        )
        for form in FORMS
    }
    ratios[SMALL_OVER_ONE] = ratio(timings, CACHE.format(FORMS[2]), CACHE.format(FORMS[1]))
    for name, contender in (
        ("DataFusion alone", DATAFUSION),
        ("the same, packed and sealed", BARE),
    ):
        ratios[f"{name}, {SMALL_OBJECTS:,} objects over 1 object"] = ratio(
            timings, contender.format(FORMS[2]), contender.format(FORMS[1])
        )
    print()
    print_ratios(ratios, TARGETS)
    write_timings(
        "stores",
        timings,
        ratios,
        TARGETS,
        quick=arguments.quick,
        rows=rows,
        row_bytes=ROW_BYTES,
        stored_bytes={form: stored_bytes(prefix) for form, prefix in prefixes.items()},
    )


def prepare(rows: int) -> tuple[Path, Path, Path]:
    """Folders of the same table: as eight files, as one, as 2,000; written once."""
    several = floats(rows)

    def write(target: Path, files: int) -> None:
        table = pq.read_table(several)
        bounds = [rows * i // files for i in range(files + 1)]
        for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
            path = target / f"part-{index:05d}.parquet"
            pq.write_table(pa.table(table.slice(start, stop - start)), path)

    one = write_once(DATA / f"f32x32-one-{rows}", lambda to: write(to, 1))
    small = write_once(DATA / f"f32x32-small-{rows}", lambda to: write(to, SMALL_OBJECTS))
    return several, one, small


def stored_bytes(directory: Path) -> int:
    """Of all objects."""
    return sum(path.stat().st_size for path in directory.glob("*.parquet"))


def measure(
    prefixes: dict[str, Path],
    endpoint: str,
    client: CacheClient,
    bare: BareLoad,
    rows: int,
    repeats: int,
) -> dict[str, Timing]:
    """Every form by all, in turn: those of a form run right after one another."""
    contenders: dict[str, Callable[[], int]] = {}
    for form, directory in prefixes.items():
        uri = f"s3://{BUCKET}/{directory.name}/"
        contenders[DATAFUSION.format(form)] = partial(stream_to_nowhere, uri, endpoint)
        contenders[BARE.format(form)] = partial(bare.load, uri)
        contenders[CACHE.format(form)] = partial(load, uri, endpoint, client)

    def settle() -> None:
        drop_all(client)
        bare.drop()

    return measure_in_turn(
        contenders,
        num_rows=rows,
        num_bytes=rows * ROW_BYTES,
        repeats=repeats,
        settle=settle,
    )


def load(uri: str, endpoint: str, client: CacheClient) -> int:
    """From a spec to a dataset that is ready."""
    options = {"endpoint": endpoint, "region": "us-east-1", **_KEYS}
    return client.load(DatasetSpec("table", uri, storage_options=options)).num_rows


def stream_to_nowhere(uri: str, endpoint: str) -> int:
    """The rows that DataFusion alone finds, fetches and decodes, in a new session."""
    config = SessionConfig().with_target_partitions(PARTITIONS)
    context = with_store(config, BUCKET, endpoint, _KEYS)
    context.register_parquet("source", uri)
    streams = context.sql("SELECT * FROM source").execute_stream_partitioned()

    def drain(stream: RecordBatchStream) -> int:
        return sum(batch.to_pyarrow().num_rows for batch in stream)

    with ThreadPoolExecutor(len(streams)) as pool:
        return sum(pool.map(drain, streams))


if __name__ == "__main__":
    main()
