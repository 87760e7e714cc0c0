"""Splits as the files of this machine that the loader reads, of objects and of files."""

from __future__ import annotations

import io
import itertools
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec, TableSpec
from cache_protocol.errors import LoadError
from cache_server.node.loads import staging
from cache_server.source.pinned import PinnedTable
from cache_server.sql import loader
from cache_server.tables import files
from tests.object_store import S3Server
from tests.waiting import files_below

ROWS = 200_000


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


def object_of(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="none", use_dictionary=False, row_group_size=ROWS)
    return sink.getvalue()


@pytest.mark.parametrize("column", ["x.y", "x", "z"])
def test_a_column_of_a_large_object_is_fetched_whatever_its_name(
    server: S3Server, tmp_path: Path, column: str
) -> None:
    numbers = np.random.default_rng(0).integers(0, 2**62, (5, ROWS))
    table = pa.table({"p": numbers[0], "x.y": numbers[1], "x": numbers[2], "z": numbers[3]})
    server.put("lake", "dots.parquet", object_of(table))
    options = {**server.options, **server.secrets}
    (spec,) = DatasetSpec("t", "s3://lake/dots.parquet", storage_options=options).tables
    _, pin = files.pin(spec)
    pinned = PinnedTable("t", "parquet", pin.schema, spec.options, columns=(column,))
    sql = f'SELECT "{column}" FROM t'

    with_rows = staging.stage(pinned, pin.cut(pin.schema, 10**9), spec.secrets, tmp_path)
    found = [
        batch.column(0) for (file,) in with_rows for batch in loader.read_split(file, sql, pinned)
    ]

    assert pa.chunked_array(found).equals(table[column])
    assert not files_below(tmp_path)


@pytest.mark.parametrize(("columns", "target"), [(("a", "d"), 10**9), (None, 3_000_000)])
def test_no_byte_that_a_split_needs_of_a_large_object_is_asked_for_twice(
    server: S3Server, tmp_path: Path, columns: tuple[str, ...] | None, target: int
) -> None:
    numbers = np.random.default_rng(0).integers(0, 2**62, (4, ROWS))
    table = pa.table(dict(zip("abcd", numbers, strict=True)))
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="none", use_dictionary=False, row_group_size=ROWS // 4)
    server.put("lake", "quarters.parquet", sink.getvalue())
    options = {**server.options, **server.secrets}
    (spec,) = DatasetSpec("t", "s3://lake/quarters.parquet", storage_options=options).tables
    _, pin = files.pin(spec)
    pinned = PinnedTable("t", "parquet", pin.schema, spec.options, columns=columns)
    names = list(columns or "abcd")
    server.clear()

    found, asked = [], []
    for split in pin.cut(pin.schema, target):
        for (file,) in staging.stage(pinned, [split], spec.secrets, tmp_path):
            found += loader.read_split(file, f"SELECT {', '.join(names)} FROM t", pinned)
        spans = [re.findall(r"\d+", request.span) for request in server.requests]
        asked.append(sorted((int(start), int(stop)) for start, stop in spans))
        server.clear()

    assert pa.Table.from_batches(found).equals(table.select(names))
    assert len(asked) == (1 if columns else 3)
    for spans in asked:
        assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(spans))


def put_small(server: S3Server | None, root: Path) -> TableSpec:
    """Eighty files of a row each, in two partitions."""
    for day in (1, 2):
        (root / f"day={day}").mkdir(parents=True)
        for part in range(40):
            data = object_of(pa.table({"row": [100 * day + part]}))
            if server is not None:
                server.put("lake", f"small/day={day}/{part:02d}.parquet", data)
            else:
                (root / f"day={day}" / f"{part:02d}.parquet").write_bytes(data)
    if server is None:
        return DatasetSpec("t", root).tables[0]
    options = {**server.options, **server.secrets}
    return DatasetSpec("t", "s3://lake/small", storage_options=options).tables[0]


@pytest.mark.parametrize("remote", [True, False])
def test_small_files_are_read_together_where_their_partitions_are_the_same(
    server: S3Server, tmp_path: Path, remote: bool
) -> None:
    spec = put_small(server if remote else None, tmp_path / "small")
    _, pin = files.pin(spec)
    pinned = PinnedTable("t", "parquet", pin.schema, spec.options)
    splits = pin.cut(pin.schema, 10**9)
    groups, rows = [], []

    for group in staging.stage(pinned, splits, spec.secrets, tmp_path / "scratch"):
        groups.append([file.split for file in group])
        for batch in loader.read_together(group, "SELECT day, row FROM t", pinned):
            rows += batch.to_pylist()

    assert [split for group in groups for split in group] == list(splits)
    for group in groups:
        assert len({split.file.path.rpartition("/")[0] for split in group}) == 1
    assert Counter(map(len, groups)) == {32: 2, 8: 2}
    assert rows == [{"day": day, "row": 100 * day + part} for day in (1, 2) for part in range(40)]
    assert not files_below(tmp_path / "scratch")
    assert not list((tmp_path / "scratch").iterdir())


def test_small_objects_that_are_read_together_are_asked_for_at_once(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = put_small(server, tmp_path / "small")
    _, pin = files.pin(spec)
    pinned = PinnedTable("t", "parquet", pin.schema, spec.options)
    together = threading.Barrier(32)
    answer = server.answer

    def wait(request: Any, environ: Any) -> Any:
        together.wait(60)
        return answer(request, environ)

    monkeypatch.setattr(server, "answer", wait)
    splits = pin.cut(pin.schema, 10**9)[:32]
    (group,) = staging.stage(pinned, splits, spec.secrets, tmp_path / "scratch")
    assert [file.split for file in group] == list(splits)


@pytest.mark.parametrize("change", ["removed", "replaced"])
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_small_file_that_changes_is_named_among_those_it_is_read_with(
    tmp_path: Path, change: str, when: str
) -> None:
    spec = put_small(None, tmp_path / "small")
    _, pin = files.pin(spec)
    pinned = PinnedTable("t", "parquet", pin.schema)
    path = tmp_path / "small" / "day=2" / "35.parquet"

    def act() -> None:
        path.unlink()
        if change == "replaced":
            path.write_bytes(object_of(pa.table({"row": [1, 2, 3]})))

    groups = staging.stage(pinned, pin.cut(pin.schema, 10**9), {}, tmp_path / "scratch")
    if when == "before":
        act()
    seen = 0
    with pytest.raises(LoadError, match=re.escape(str(path))):
        for group in groups:
            seen += len(group)
            if when == "while" and any(file.split.file.path == str(path) for file in group):
                act()

    assert seen == (72 if when == "before" else 80)
    assert not list((tmp_path / "scratch").iterdir())


def test_a_damaged_small_file_is_named_among_those_it_is_read_with(tmp_path: Path) -> None:
    spec = put_small(None, tmp_path / "small")
    path = tmp_path / "small" / "day=1" / "07.parquet"
    data = bytearray(path.read_bytes())
    data[4:24] = b"\xff" * 20
    path.write_bytes(data)
    _, pin = files.pin(spec)
    pinned = PinnedTable("t", "parquet", pin.schema)

    with pytest.raises(LoadError, match=f"cannot load {re.escape(str(path))}: "):
        for group in staging.stage(pinned, pin.cut(pin.schema, 10**9), {}, tmp_path / "scratch"):
            list(loader.read_together(group, "SELECT row FROM t", pinned))


ENCODED = {
    "bool": pa.array([True, False]),
    "float16": pa.array([0.5, -2.0], pa.float16()),
    "decimal": pa.array(["1.25", "-3.50"]).cast(pa.decimal128(25, 2)),
    "binary": pa.array([b"\x04\0\0\0abcd", b"\0\0\0\0\0\0\0\1"], pa.binary(8)),
    "time": pa.array([-1, 10**15], pa.int64()).cast(pa.timestamp("us", "Europe/Berlin")),
}


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("kind", ENCODED)
def test_dictionaries_that_datafusion_cannot_read_are_their_values(
    server: S3Server, tmp_path: Path, kind: str, is_remote: bool
) -> None:
    values, texts = ENCODED[kind], pa.array(["x", "y"])
    key = f"{kind}/day=7/a.parquet"
    path = tmp_path / key
    path.parent.mkdir(parents=True)
    encoded = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, 1], pa.int8()), values)
    columns = {"a": range(4), "x.y": encoded, "x": texts.dictionary_encode().take([1, 0, 0, 1])}
    pq.write_table(pa.table(columns), path, row_group_size=1, use_deprecated_int96_timestamps=True)
    source, options = f"{tmp_path}/{kind}", {}
    if is_remote:
        server.put("lake", key, path.read_bytes())
        source, options = f"s3://lake/{kind}", {**server.options, **server.secrets}
    (spec,) = DatasetSpec("t", source, storage_options=options).tables
    _, pin = files.pin(spec)
    table = PinnedTable("t", "parquet", pin.schema, spec.options)
    sql = 'SELECT "x.y" AS v, x, day, a FROM t WHERE a > 0'
    scratch = tmp_path / "scratch"

    splits = pin.cut(pa.schema({"a": pa.int64()}), 1)
    staged = staging.stage(table, splits, spec.secrets, scratch)
    found = pa.Table.from_batches(
        batch for (file,) in staged for batch in loader.read_split(file, sql, table)
    )

    assert len(splits) > 1
    assert found["v"].cast(values.type).combine_chunks().equals(values.take([1, 0, 1]))
    assert found["x"].cast(pa.string()).to_pylist() == ["x", "x", "y"]
    assert found["day"].to_pylist() == [7, 7, 7]
    assert found["a"].to_pylist() == [1, 2, 3]
    assert not files_below(scratch)


def test_timestamps_of_96_bits_with_a_time_zone_are_rounded_down_like_the_others(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.parquet"
    times = pa.array([-1, -1500, 1999], pa.int64()).cast(pa.timestamp("ns", "Europe/Berlin"))
    plain = times.cast(pa.timestamp("ns"))
    columns = {"zoned": times, "plain": plain, "number": range(3)}
    pq.write_table(pa.table(columns), path, use_deprecated_int96_timestamps=True)
    (spec,) = DatasetSpec("t", path).tables
    _, pin = files.pin(spec)
    found = {}
    for column in ("zoned", "plain"):
        table = PinnedTable("t", "parquet", pin.schema, columns=(column,))
        (split,) = pin.cut(pa.schema({"number": pa.int64()}), 10**9)
        staged = staging.stage(table, (split,), {}, tmp_path / "scratch")
        found[column] = [
            value.value
            for (file,) in staged
            for batch in loader.read_split(file, f"SELECT {column} FROM t", table)
            for value in batch.column(0)
        ]

    assert found == {"zoned": [-1, -2, 1], "plain": [-1, -2, 1]}


def test_rows_that_arrow_loses_fail_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": pa.array([True, False]).dictionary_encode()}), path)
    (spec,) = DatasetSpec("t", path).tables
    _, pin = files.pin(spec)
    table = PinnedTable("t", "parquet", pin.schema)
    splits = pin.cut(pa.schema({"a": pa.uint8()}), 10**9)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: iter(()))

    with pytest.raises(LoadError, match=r"cannot load .*a\.parquet: Arrow reads 2 rows fewer"):
        list(staging.stage(table, splits, {}, tmp_path / "scratch"))
    assert not files_below(tmp_path / "scratch")
