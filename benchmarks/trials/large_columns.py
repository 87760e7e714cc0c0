"""Loads columns of more than 2 GiB, and reads them as any Flight client does.

Not part of the suite: each case takes 8 GB of memory, 5 GB of disk and a minute. Run it by
``make large``, or some cases by ``make large ARGS="delta-lists csv"``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.csv
import pyarrow.flight as flight
import pyarrow.parquet as pq
from deltalake import write_deltalake

from cache_client import CacheClient
from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_server import LocalCluster
from tests.flight_clients import connect
from tests.postgres_server import PASSWORD, PostgresServer, running_server

TEXT_BYTES, ROWS, PART_ROWS = 66_000, 34_000, 1_000  # 2.2 GB


def parts(*, lists: bool = False) -> Iterator[pa.Table]:
    """Rows whose text repeats their number."""
    for start in range(0, ROWS, PART_ROWS):
        texts = [f"{row:08}" * (TEXT_BYTES // 8) for row in range(start, start + PART_ROWS)]
        docs = pa.array([[text] for text in texts] if lists else texts)
        yield pa.table({"id": range(start, start + PART_ROWS), "doc": docs})


def parquet(path: Path, row_group_rows: int, *, lists: bool = False) -> str:
    schema = next(parts(lists=lists)).schema
    rows: list[pa.Table] = []
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        for part in parts(lists=lists):
            rows.append(part)
            if sum(map(len, rows)) >= row_group_rows or part["id"][-1].as_py() == ROWS - 1:
                writer.write_table(pa.concat_tables(rows), row_group_size=ROWS)
                rows.clear()
    return str(path)


def delta(folder: Path, row_group_rows: int, *, lists: bool = False) -> str:
    """A table of one data file, whose row groups are those of Arrow."""
    write_deltalake(folder, next(parts(lists=lists)))
    (file,) = folder.glob("*.parquet")
    parquet(file, row_group_rows, lists=lists)
    log = folder / "_delta_log" / f"{0:020}.json"
    lines = [line for line in log.read_text().splitlines() if '"add"' not in line]
    add = f'{{"add":{{"path":"{file.name}","partitionValues":{{}},"size":{file.stat().st_size},'
    log.write_text("\n".join([*lines, f'{add}"modificationTime":0,"dataChange":true}}}}']))
    return str(folder)


def csv(path: Path) -> str:
    with pa.csv.CSVWriter(path, next(parts()).schema) as writer:
        for part in parts():
            writer.write_table(part)
    return str(path)


def arrow(path: Path) -> str:
    with pa.ipc.new_stream(path, next(parts()).schema) as writer:
        for part in parts():
            writer.write_table(part)
    return str(path)


def postgres(server: PostgresServer) -> str:
    """A query without a split column, whose texts the server expects to be short."""
    texts = f"repeat(lpad(id::text, 8, '0'), {TEXT_BYTES // 8})"
    query = f"SELECT id, {texts} AS doc FROM generate_series(0, {ROWS - 1}) AS id"
    user = f"owner:{quote(PASSWORD, safe='')}"
    return server.uri("postgres", user=user, query=query)


CASES: dict[str, Callable[[Path, ExitStack], str]] = {
    "parquet-one-row-group": lambda folder, _: parquet(folder / "a.parquet", ROWS),
    "delta-lists": lambda folder, _: delta(folder / "delta", ROWS, lists=True),
    "delta-ten-row-groups": lambda folder, _: delta(folder / "delta", ROWS // 10),
    "delta-one-row-group": lambda folder, _: delta(folder / "delta", ROWS),
    "csv": lambda folder, _: csv(folder / "a.csv"),
    "arrow": lambda folder, _: arrow(folder / "a.arrow"),
    "postgres": lambda _, stack: postgres(stack.enter_context(running_server())),
}


def check(name: str, folder: Path) -> None:
    """Loads a case, and compares every row."""
    format = "delta" if name.startswith("delta") else None
    with ExitStack() as stack:
        source = CASES[name](folder, stack)
        begun = time.monotonic()
        cluster = stack.enter_context(LocalCluster(nodes=1, cache_dir=folder / "cache"))
        client = CacheClient(cluster.endpoint)
        lengths = DatasetSpec("lengths", source, format=format, sql=LENGTHS)
        if "lists" not in name:
            client.load(lengths)
            assert set(client.head("lengths", ROWS)["n"].to_pylist()) == {TEXT_BYTES}
        info = client.load(DatasetSpec("texts", source, format=format))
        loaded = time.monotonic()
        assert info.num_rows == ROWS, info
        row, largest = 0, 0
        with connect(cluster.endpoint) as connection:
            found = connection.get_flight_info(flight.FlightDescriptor.for_path("texts"))
            for endpoint in found.endpoints:
                for chunk in connection.do_get(endpoint.ticket):
                    largest = max(largest, chunk.data.nbytes)
                    for number, doc in zip(*chunk.data.to_pydict().values(), strict=True):
                        text = doc[0] if isinstance(doc, list) else doc
                        assert number == row and text == f"{row:08}" * (TEXT_BYTES // 8)
                        row += 1
        assert row == ROWS
    print(
        f"{name}: {info.schema.field('doc').type}, loaded in {loaded - begun:.0f} s, read in "
        f"{time.monotonic() - loaded:.0f} s, messages up to {largest / 1e6:.1f} MB",
        flush=True,
    )


LENGTHS = "SELECT length(doc) AS n FROM source WHERE doc LIKE '%0%' OR id >= 0"


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory(prefix="large-columns-") as directory:
            check(name, Path(directory))
