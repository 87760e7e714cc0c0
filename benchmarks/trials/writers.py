"""Compares what is loaded of files of eight writers with DuckDB's answers on the same files.

    python -m benchmarks.trials.writers [--tables 200] [--first 0] [--filters 30] [--seed 0]

Tables have columns of every type that a writer has, nulls at every level, and parts without rows.
The suite tries some; `make writers` all. It ends with 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import logging
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import deltalake
import duckdb
import fastparquet
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from cache_protocol.datasets.dataset_spec import DatasetSpec
from tests.iceberg_tables import opened_catalog
from tests.load_here import load_here

EPOCH = datetime.datetime(2020, 1, 1)
WORDS = ["", "a", "b", "ab", "é", "a long word that is not inlined", "'quoted'", "%"]
# Name -> type and a value of it.
Draw = Callable[[random.Random], Any]
PLAIN: dict[str, tuple[pa.DataType, Draw]] = {
    "i8": (pa.int8(), lambda r: r.randint(-128, 127)),
    "i32": (pa.int32(), lambda r: r.choice([0, -1, 2**31 - 1, -(2**31), r.randint(-9, 9)])),
    "i64": (pa.int64(), lambda r: r.choice([0, 2**62, -(2**62), r.randint(-9, 9)])),
    "f64": (pa.float64(), lambda r: r.choice([0.5, -1e300, 1e-9, float(r.randint(-9, 9))])),
    "word": (pa.string(), lambda r: r.choice(WORDS)),
    "flag": (pa.bool_(), lambda r: r.random() < 0.5),
    "time": (pa.timestamp("us"), lambda r: EPOCH + datetime.timedelta(hours=r.randint(-9, 9))),
}
MORE: dict[str, tuple[pa.DataType, Draw]] = {
    "u8": (pa.uint8(), lambda r: r.randint(0, 255)),
    "u32": (pa.uint32(), lambda r: r.choice([0, 2**31, 2**32 - 1, r.randint(0, 9)])),
    "u64": (pa.uint64(), lambda r: r.choice([0, 2**63, 2**64 - 1, r.randint(0, 9)])),
}
RICH: dict[str, tuple[pa.DataType, Draw]] = {
    "f32": (pa.float32(), lambda r: r.choice([0.5, -2.25, float(r.randint(-9, 9))])),
    "day": (pa.date32(), lambda r: EPOCH.date() + datetime.timedelta(days=r.randint(-9, 9))),
    "price": (pa.decimal128(9, 2), lambda r: decimal.Decimal(r.randint(-900, 900)) / 100),
    "blob": (pa.binary(), lambda r: r.choice(WORDS).encode()),
    "words": (
        pa.list_(pa.string()),
        lambda r: [r.choice([None, *WORDS]) for _ in range(r.randrange(4))],
    ),
    "address": (
        pa.struct([pa.field("zip", pa.int32(), nullable=False), ("city", pa.string())]),
        lambda r: {"zip": r.randint(0, 9), "city": r.choice([None, *WORDS])},
    ),
    "deep": (
        pa.list_(pa.list_(pa.int32())),
        lambda r: [r.choice([None, [], [1, None, 2]]) for _ in range(r.randrange(3))],
    ),
}
FIELDS = {"zip": "i32", "city": "word"}  # of "address" -> the kind of its literals
LITERALS = {
    **dict.fromkeys(("i8", "i32", "i64", "u8", "u32", "u64"), str),
    "f64": repr, "f32": repr, "price": str,
    "word": lambda value: "'" + value.replace("'", "''") + "'",
    "time": lambda value: f"TIMESTAMP '{value.isoformat(sep=' ')}'",
    "day": lambda value: f"DATE '{value.isoformat()}'",
}  # fmt: skip


def made_table(draw: random.Random, kinds: dict[str, tuple[pa.DataType, Draw]]) -> pa.Table:
    """Rows with numbers, and columns with or without nulls."""
    num_rows = draw.choice([1, 7, 40])
    columns: dict[str, pa.Array] = {"id": pa.array(range(num_rows), pa.int64())}
    for name, (dtype, value) in kinds.items():
        nulls = draw.choice([0.0, 0.3, 0.3, 1.0])
        values = [None if draw.random() < nulls else value(draw) for _ in range(num_rows)]
        columns[name] = pa.array(values, dtype)
    return pa.table(columns)


def parts(table: pa.Table, draw: random.Random) -> Iterator[pa.Table]:
    """The table in pieces; some have no rows."""
    bounds = sorted(draw.randrange(table.num_rows + 1) for _ in range(draw.randrange(3)))
    for start, stop in zip([0, *bounds], [*bounds, table.num_rows], strict=True):
        yield table.slice(start, stop - start)


def _each(write: Callable[[pa.Table, str], object], suffix: str = "parquet") -> Any:
    def written(pieces: Sequence[pa.Table], folder: Path) -> tuple[str, list[str]]:
        paths = [str(folder / f"{number}.{suffix}") for number in range(len(pieces))]
        for piece, path in zip(pieces, paths, strict=True):
            write(piece, path)
        return str(folder), paths

    return written


def _duckdb(piece: pa.Table, path: str) -> None:
    duckdb.from_arrow(piece).write_parquet(path, row_group_size=2048)


def _fastparquet(piece: pa.Table, path: str) -> None:
    fastparquet.write(path, _nullable(piece), stats=True)


def _nullable(piece: pa.Table) -> pd.DataFrame:
    """A frame whose integers keep nulls."""
    kinds = {
        dtype: getattr(pd, f"{str(dtype).replace('u', 'U', 1).replace('int', 'Int')}Dtype")()
        for dtype in (pa.int8(), pa.int32(), pa.int64())
    }
    return piece.to_pandas(types_mapper={**kinds, pa.bool_(): pd.BooleanDtype()}.get)


def _hugging_face(pieces: Sequence[pa.Table], folder: Path) -> tuple[str, list[str]]:
    datasets.disable_progress_bars()
    datasets.Dataset(pa.concat_tables(pieces)).save_to_disk(folder / "saved")
    return str(folder / "saved"), [str(path) for path in sorted(folder.glob("saved/*.arrow"))]


def _delta(pieces: Sequence[pa.Table], folder: Path) -> tuple[str, list[str]]:
    for piece in pieces:
        deltalake.write_deltalake(folder, piece, mode="append")
    return str(folder), sorted(map(str, deltalake.DeltaTable(folder).file_uris()))


def _iceberg(pieces: Sequence[pa.Table], folder: Path) -> tuple[str, list[str]]:
    with opened_catalog(folder) as catalog:
        made = catalog.create_table("ns.t", pieces[0].schema)
        for piece in pieces:
            made.append(piece)
        paths = [task.file.file_path for task in made.scan().plan_files()]
        return made.metadata_location.removeprefix("file://"), sorted(
            path.removeprefix("file://") for path in paths
        )


ALL = {**PLAIN, **MORE, **RICH}
SIGNED = {**PLAIN, **RICH}
WRITERS: dict[str, tuple[Any, dict[str, tuple[pa.DataType, Draw]]]] = {
    "pyarrow": (_each(lambda t, path: pq.write_table(t, path, row_group_size=5)), ALL),
    "polars": (_each(lambda t, path: pl.from_arrow(t).write_parquet(path)), ALL),
    "polars-ipc": (_each(lambda t, path: pl.from_arrow(t).write_ipc(path), "arrow"), ALL),
    "duckdb": (_each(_duckdb), ALL),
    "pandas": (_each(lambda t, path: _nullable(t).to_parquet(path)), PLAIN),
    "fastparquet": (_each(_fastparquet), PLAIN),
    "hugging-face": (_hugging_face, ALL),
    "delta": (_delta, SIGNED),
    "iceberg": (_iceberg, {k: v for k, v in SIGNED.items() if k not in ("i8",)}),
}


def conditions(table: pa.Table, draw: random.Random, num_conditions: int) -> Iterator[str]:
    """SQL that DuckDB and DataFusion must agree about."""
    for _ in range(num_conditions):
        yield f" {draw.choice(['AND', 'OR'])} ".join(
            f"({_condition(table, draw)})" for _ in range(draw.randint(1, 2))
        )


def _condition(table: pa.Table, draw: random.Random) -> str:
    name = draw.choice(table.column_names[1:])
    values = [value for value in table.column(name).to_pylist() if value is not None]
    if name == "flag":
        return draw.choice(["flag", "NOT flag", "flag IS NULL", "flag IS NOT TRUE"])
    kind = name
    if name == "address" and draw.random() < 0.8:
        field = draw.choice(list(FIELDS))
        name, kind = f"address['{field}']", FIELDS[field]
        values = [value[field] for value in values if value[field] is not None]
    if kind not in LITERALS or not values or draw.random() < 0.2:
        return f"{name} IS {draw.choice(['', 'NOT '])}NULL"
    some = [LITERALS[kind](draw.choice(values)) for _ in range(2)]
    if kind == "word" and draw.random() < 0.3:
        return f"{name} LIKE '{draw.choice(['a%', '%b', '%é%', '_'])}'"
    operator = draw.choice(["=", "<>", "<", "<=", ">", ">=", "BETWEEN", "IN", "NOT IN", "DISTINCT"])
    if operator == "BETWEEN":
        return f"{name} BETWEEN {some[0]} AND {some[1]}"
    if operator in ("IN", "NOT IN"):
        return f"{name} {operator} ({', '.join(some)})"
    return f"{name} {'IS DISTINCT FROM' if operator == 'DISTINCT' else operator} {some[0]}"


class Truth:
    """DuckDB's answers over some files."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._connection = duckdb.connect(config={"threads": 1})
        if paths[0].endswith(".parquet"):
            self._connection.read_parquet(list(paths), union_by_name=True).create_view("source")
        else:
            tables = [_read_arrow(path) for path in paths]
            self._connection.register("source", pa.concat_tables(tables, promote_options="default"))

    def ids(self, condition: str) -> list[int]:
        """The rows that fulfil a condition."""
        sql = f"SELECT id FROM source WHERE {condition} ORDER BY id"
        return [row[0] for row in self._connection.execute(sql).fetchall()]


def _read_arrow(path: str) -> pa.Table:
    with pa.OSFile(path) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file).read_all()


def differences(number: int, seed: int, writer: str, filters: int, directory: Path) -> list[str]:
    """What differs for one table of one writer."""
    draw = random.Random(f"{seed}/{number}/{writer}")
    write, kinds = WRITERS[writer]
    chosen = draw.sample(sorted(kinds), min(len(kinds), 6))
    if "price" in chosen:  # a query that compares decimals and doubles with numbers is refused
        chosen = [name for name in chosen if name not in ("f32", "f64")]
    table = made_table(draw, {name: kinds[name] for name in chosen})
    (folder := directory / "source").mkdir()
    try:
        source, paths = write(list(parts(table, draw)), folder)
        format = {"delta": "delta", "iceberg": "iceberg"}.get(writer)
        truth = Truth(paths)
        found = []
        asked = list(conditions(table, draw, filters))
        flags = ", ".join(
            f"CASE WHEN {condition} THEN 1 ELSE 0 END AS c{index}"
            for index, condition in enumerate(asked)
        )
        spec = DatasetSpec("t", source, format=format, sql=f"SELECT id, {flags} FROM source")
        computed = load_here(spec, directory / "cache")
        for index, condition in enumerate(asked):
            wanted = truth.ids(condition)
            kept = computed.filter(pa.compute.equal(computed[f"c{index}"], 1))
            answers = {"computed": kept["id"].to_pylist()}
            if index < max(1, filters // 3):
                spec = DatasetSpec("t", source, format=format, columns=["id"], filter=condition)
                answers["filtered"] = load_here(spec, directory / "cache")["id"].to_pylist()
            for how, ids in answers.items():
                if sorted(ids) != wanted:
                    found.append(f"{how} {condition!r}: {sorted(ids)} instead of {wanted}")
        return [f"table {number} of {writer}, seed {seed}: {text}" for text in found]
    except Exception as error:
        error.add_note(f"table {number} of {writer}, seed {seed}: {table.schema}")
        raise
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(directory / "cache", ignore_errors=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--filters", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"seed {arguments.seed}", flush=True)
    found = []
    with tempfile.TemporaryDirectory(prefix="writers-") as directory:
        for number in range(arguments.first, arguments.first + arguments.tables):
            for writer in WRITERS:
                try:
                    found += differences(
                        number, arguments.seed, writer, arguments.filters, Path(directory)
                    )
                except Exception:
                    found.append(traceback.format_exc())
                    print(found[-1], flush=True)
    print(*found, f"{len(found)} answers differ or fail", sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
