"""Splits as the files of this machine that the loader reads, of objects and of files."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_server import staging
from cache_server.pinned import PinnedTable
from cache_server.sql import loader
from cache_server.tables import files
from protos.errors import LoadError
from protos.spec import DatasetSpec, TableSpec
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
