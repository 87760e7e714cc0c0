"""The tables that are measured, written as Parquet once and kept under `.data`."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from benchmarks.common import DATA

FEATURES = [f"f{i}" for i in range(32)]
ROW_BYTES = 32 * 4 + 8  # of the floats and their label
EMBEDDING_WIDTH = 768
FILES = 8


@dataclass(frozen=True)
class Table:
    """Parquet files, twice: all rows, and the rows that the other libraries read.

    Attributes:
        paths: a folder of the columns as its users have them.
        packed: a folder of the same rows with their numbers in one list column; may be ``paths``.
        row_bytes: of the values of a row, strings on average.
        stack: `stack` of the dataset; not needed for ``packed``.
    """

    name: str
    num_rows: int
    row_bytes: float
    paths: Path
    packed: Path
    peer_paths: Path | None
    peer_packed: Path | None
    stack: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return round(self.num_rows * self.row_bytes)


def floats(num_rows: int) -> Path:
    """A folder of random float32 columns and a label, by pyarrow's defaults; written once."""
    return write_once(DATA / f"f32x32-defaults-{num_rows}", lambda to: write_floats(to, num_rows))


def make_floats(rows: int, peer_rows: int | None) -> Table:
    """32 float32 columns and an int64 label."""

    def make(rows: int) -> tuple[Path, Path]:
        columns = floats(rows)
        packed = write_once(DATA / f"f32x32-packed-{rows}", lambda to: pack(columns, to))
        return columns, packed

    columns, packed = make(rows)
    peers = make(peer_rows) if peer_rows is not None else (None, None)
    stack = {"features": FEATURES}
    return Table("floats", rows, ROW_BYTES, columns, packed, peers[0], peers[1], stack)


def make_embeddings(rows: int, peer_rows: int | None) -> Table:
    """One column of 768 float32."""

    def make(rows: int) -> Path:
        return write_once(DATA / f"embeddings-{rows}", lambda to: write_embeddings(to, rows))

    path = make(rows)
    peers = make(peer_rows) if peer_rows is not None else None
    return Table("embeddings", rows, EMBEDDING_WIDTH * 4, path, path, peers, peers)


def make_lineitem(rows: int, peer_rows: int | None) -> Table:
    """TPC-H lineitem, decimals as float64 and dates as days, as the cache stores them."""

    def make(rows: int) -> Path:
        return write_once(DATA / f"lineitem-{rows}", lambda to: write_lineitem(to, rows))

    path = make(rows)
    table = pyarrow.dataset.dataset(path).head(10_000)
    peers = make(peer_rows) if peer_rows is not None else None
    return Table("lineitem", rows, table.nbytes / table.num_rows, path, path, peers, peers)


DLRM_READ = {"float": 27, "double": 5, "halffloat": 4, "int8": 4}  # columns of each type
DLRM_UNREAD = {"float": 33, "double": 42, "halffloat": 48, "int8": 37}
DLRM_ROW_BYTES = 27 * 4 + 5 * 8 + 4 * 2 + 4  # of the columns that are read
DLRM_COLUMNS = [f"read_{index:03d}" for index in range(sum(DLRM_READ.values()))]


def dlrm(num_rows: int) -> Path:
    """A folder of files like those of MLPerf Storage's DLRM; written once.

    A row has 200 columns of 761 bytes. A job reads 40 columns of 160 bytes. Row groups have 6,144
    rows and are not compressed. Source: configs/dlio/workload/dlrm_b200.yaml of version 3.0 of
    mlcommons/storage.
    """
    return write_once(DATA / f"dlrm-{num_rows}", lambda to: write_dlrm(to, num_rows))


MAKERS: dict[str, Callable[[int, int | None], Table]] = {
    "floats": make_floats,
    "embeddings": make_embeddings,
    "lineitem": make_lineitem,
}


def write_once(directory: Path, write: Callable[[Path], None]) -> Path:
    """The folder, written when it is not there yet."""
    if not directory.exists():
        partial = directory.with_name(f".{directory.name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        write(partial)
        partial.rename(directory)
    return directory


def write_floats(target: Path, num_rows: int) -> None:
    """Eight files of random numbers."""
    rng = np.random.default_rng(0)
    for index in range(FILES):
        count = num_rows * (index + 1) // FILES - num_rows * index // FILES
        features = {name: rng.standard_normal(count, dtype=np.float32) for name in FEATURES}
        columns = {**features, "label": rng.integers(0, 10, count)}
        pq.write_table(pa.table(columns), target / f"part-{index:03d}.parquet")


def write_dlrm(target: Path, num_rows: int) -> None:
    """Eight files of random numbers."""
    rng = np.random.default_rng(0)
    for index in range(FILES):
        count = num_rows * (index + 1) // FILES - num_rows * index // FILES
        columns = {}
        for kind, types in (("read", DLRM_READ), ("other", DLRM_UNREAD)):
            names = [name for name, number in types.items() for _ in range(number)]
            for number, name in enumerate(names):
                values = pa.array(rng.integers(0, 100, count, np.int8))
                columns[f"{kind}_{number:03d}"] = values.cast(name)
        path = target / f"part-{index:03d}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=6_144, compression="none")


def pack(columns: Path, target: Path) -> None:
    """The same rows, their 32 numbers as one list column."""
    for path in sorted(columns.glob("*.parquet")):
        table = pq.read_table(path)
        features = np.stack([table.column(name).to_numpy() for name in FEATURES], axis=1)
        lists = pa.FixedSizeListArray.from_arrays(features.ravel(), len(FEATURES))
        packed = pa.table({"features": lists, "label": table.column("label")})
        pq.write_table(packed, target / path.name)


def write_embeddings(target: Path, num_rows: int) -> None:
    """Four files of random vectors."""
    rng = np.random.default_rng(0)
    for index in range(4):
        count = num_rows * (index + 1) // 4 - num_rows * index // 4
        values = rng.standard_normal(count * EMBEDDING_WIDTH, dtype=np.float32)
        lists = pa.FixedSizeListArray.from_arrays(values, EMBEDDING_WIDTH)
        pq.write_table(pa.table({"embedding": lists}), target / f"part-{index}.parquet")


def write_lineitem(target: Path, num_rows: int) -> None:
    """The first rows of lineitem at scale factor 1, in four files."""
    source = DATA / "tpch-sf1"
    if not source.exists():
        partial = source.with_name(f".{source.name}.partial")
        subprocess.run(
            [
                str(Path(sysconfig.get_path("scripts")) / "tpchgen-cli"), "parquet", "-s", "1",
                "--tables", "lineitem", "--parts", "4", "--output-dir", str(partial),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        partial.rename(source)
    table = pa.concat_tables(
        pq.read_table(path) for path in sorted(source.glob("lineitem/*.parquet"))
    ).slice(0, num_rows)
    table = pa.table({name: simple(table.column(name)) for name in table.column_names})
    for index in range(4):
        start, stop = num_rows * index // 4, num_rows * (index + 1) // 4
        pq.write_table(table.slice(start, stop - start), target / f"part-{index}.parquet")


def simple(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """In a type that every library reads."""
    if pa.types.is_decimal(column.type):
        return column.cast(pa.float64())
    if pa.types.is_date(column.type):
        return column.cast(pa.int32())
    return column.cast(pa.string()) if column.type == pa.string_view() else column


def files_of(directory: Path) -> list[str]:
    """Its Parquet files, in order."""
    return [str(path) for path in sorted(directory.glob("*.parquet"))]
