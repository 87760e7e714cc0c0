"""How fast does one process write rows into a cache, beside a bare Flight `DoPut`?

    python -m benchmarks.writes [--quick] [--rows N] [--repeats N]

A table in memory, 32 float32 columns and an int64 label, and one of strings. `CacheClient.write`
puts it to one node in another process over loopback: the node packs, checksums and seals it in
memory, and the version is ready at the end. A bare `DoPut` sends the same messages to a server that
keeps the batches, as they came, or drops them.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

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
from benchmarks.processes import child_process
from benchmarks.tables import FEATURES, ROW_BYTES
from cache_client import CacheClient
from cache_server import LocalCluster

KEPT, DROPPED = "bare DoPut to a server that keeps the batches", "and to one that drops them"
OURS = "CacheClient.write, 1 node"
TARGETS = {"floats: written over bare DoPut": 0.5, "strings: written over bare DoPut": 0.5}
MESSAGE_BYTES = 2 * 1024 * 1024
STRING_BYTES = 64


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, in less than a minute")
    parser.add_argument("--rows", type=int, help="default: 8 million, which are 1.1 GB")
    parser.add_argument("--repeats", type=int, help="default: 5")
    arguments = parser.parse_args()
    rows: int = arguments.rows or (4_000_000 if arguments.quick else 8_000_000)
    repeats: int = arguments.repeats or (3 if arguments.quick else 5)
    ratios, timings = {}, []
    for name, table in {"floats": floats(rows), "strings": strings(rows)}.items():
        measured = measure_writes(table, repeats)
        print(f"\n{name}: {rows:,} rows, {table.nbytes / 1e9:.2f} GB\n")
        print_table(measured)
        ratios[f"{name}: written over bare DoPut"] = ratio(measured, OURS, KEPT)
        ratios[f"{name}: written over DoPut that drops"] = ratio(measured, OURS, DROPPED)
        timings += [{"table": name, **timing.summary()} for timing in measured.values()]
    print()
    print_ratios(ratios, TARGETS)
    path = write_result(
        "writes-quick" if arguments.quick else "writes",
        {"rows": rows, "row_bytes": ROW_BYTES, "timings": timings, "ratios": ratios},
    )
    print(f"\nwritten to {path}")


def floats(num_rows: int) -> pa.Table:
    """Random float32 columns and a label."""
    chance = np.random.default_rng(1)
    values = chance.random(num_rows, np.float32)
    columns = {name: np.roll(values, at) for at, name in enumerate(FEATURES)}
    return pa.table({**columns, "label": np.arange(num_rows)})


def strings(num_rows: int) -> pa.Table:
    """One column of strings of `STRING_BYTES` letters, and a label."""
    letters = np.random.default_rng(1).integers(97, 123, num_rows * STRING_BYTES, np.uint8)
    ends = np.arange(num_rows + 1, dtype=np.int32) * STRING_BYTES
    text = pa.StringArray.from_buffers(num_rows, pa.py_buffer(ends), pa.py_buffer(letters))
    return pa.table({"text": text, "label": np.arange(num_rows)})


def measure_writes(table: pa.Table, repeats: int) -> dict[str, Timing]:
    """The same rows by each, in turn."""
    step = max(1, table.num_rows * MESSAGE_BYTES // table.nbytes)
    batches = table.to_batches(max_chunksize=step)
    with (
        memory_directory("cache-bench-") as directory,
        LocalCluster(1, directory) as cluster,
        _bare_server() as bare,
    ):
        client = CacheClient(cluster.endpoint)

        def put_bare(what: str) -> int:
            writer, _ = bare.do_put(flight.FlightDescriptor.for_path(what), table.schema)
            for batch in batches:
                writer.write_batch(batch)
            writer.done_writing()
            writer.close()
            return int(table.num_rows)

        return measure_in_turn(
            {
                DROPPED: lambda: put_bare("drop"),
                KEPT: lambda: put_bare("keep"),
                OURS: lambda: client.write("rows", table).num_rows,
            },
            num_rows=table.num_rows,
            num_bytes=table.nbytes,
            repeats=repeats,
            settle=lambda: drop_all(client),
        )


class _Bare(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Reads what it is sent; keeps the last stream to ``keep``."""

    kept: tuple[pa.RecordBatch, ...] = ()

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        self.kept = ()
        batches = (chunk.data for chunk in reader)
        if descriptor.path == [b"keep"]:
            self.kept = tuple(batches)
        else:
            deque(batches, maxlen=0)


def _serve(pipe: Connection) -> None:
    server = _Bare("grpc://127.0.0.1:0")
    pipe.send("ready")
    pipe.send(server.port)
    try:
        pipe.recv()
    except EOFError:
        server.shutdown()


@contextmanager
def _bare_server() -> Iterator[flight.FlightClient]:
    with child_process(_serve) as pipe, flight.connect(f"grpc://127.0.0.1:{pipe.recv()}") as client:
        yield client


if __name__ == "__main__":
    main()
