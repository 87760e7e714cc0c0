"""`CacheClient.read`: a stream of Arrow batches, as it is and through engines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_client import (
    CacheClient,
    ConfigError,
    Connection,
    DatasetNotFoundError,
    DatasetSpec,
    NodeUnavailableError,
    StaleVersionError,
)
from cache_client.reading import table_reads
from cache_server import LocalCluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
ROWS = 10_000
RNG = np.random.default_rng(0)
TABLE = pa.table(
    {
        "row": np.arange(ROWS),
        "label": RNG.integers(0, 5, ROWS).astype(np.int32),
        "x": RNG.random(ROWS, np.float32),
        "text": [None if row % 7 == 0 else f"text {row}" for row in range(ROWS)],
    }
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    path: Path = tmp_path_factory.mktemp("tables") / "t.parquet"
    pq.write_table(TABLE, path, row_group_size=1000)
    with LocalCluster(nodes=2) as cluster:
        CacheClient(cluster.endpoint).load(
            DatasetSpec("t", path, target_shard_bytes="32KiB", replicas=2)
        )
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> CacheClient:
    monkeypatch.setattr(table_reads, "WINDOW_BYTES", 64 * 1024)  # many windows
    return CacheClient(cluster.endpoint)


@pytest.mark.parametrize("local", [True, False])
def test_a_stream_has_all_rows_in_source_order(client: CacheClient, local: bool) -> None:
    assert client.describe("t").num_shards > 3
    reader = CacheClient(Connection(client.endpoint, local=local)).read("t")
    assert reader.schema.names == TABLE.column_names
    batches = list(reader)
    assert len(batches) > 3
    assert pa.Table.from_batches(batches).cast(TABLE.schema).equals(TABLE)


def test_a_stream_has_the_asked_columns_and_rows(client: CacheClient) -> None:
    info = client.describe("t")
    ends = np.linspace(0, ROWS, 4).astype(int).tolist()
    parts = [
        client.read(
            "t", columns=["text", "row"], rows=range(start, stop), fingerprint=info.fingerprint
        ).read_all()
        for start, stop in pairwise(ends)
    ]
    assert [len(part) for part in parts] == np.diff(ends).tolist()
    assert pa.concat_tables(parts).to_pydict() == TABLE.select(["text", "row"]).to_pydict()
    assert len(client.read("t", rows=range(5, 5)).read_all()) == 0


def test_engines_take_the_stream_as_it_is(client: CacheClient) -> None:
    expected = TABLE.to_pandas().groupby("label")["x"].sum().to_dict()
    reader = client.read("t", columns=["label", "x"])
    query = "SELECT label, sum(x) FROM reader GROUP BY label"
    found = duckdb.connect().register("reader", reader).sql(query).fetchall()
    assert dict(found) == pytest.approx(expected, rel=1e-4)
    frame = pl.from_arrow(client.read("t"))
    assert isinstance(frame, pl.DataFrame)
    assert frame["text"].to_list() == TABLE["text"].to_pylist()
    assert client.read("t").read_pandas()["row"].tolist() == list(range(ROWS))


def test_the_page_about_engines_holds(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    houses = pa.table({"price": np.arange(3000.0), "area": np.arange(3000.0)})
    pq.write_table(houses, tmp_path / "houses.parquet")
    CacheClient(cluster.endpoint).load(DatasetSpec("houses", tmp_path / "houses.parquet"))
    monkeypatch.setenv("CACHE_ENDPOINT", cluster.endpoint)
    names: dict[str, Any] = {}
    page = PAGE.read_text(encoding="utf-8").partition("\n## Read\n")[2].partition("\n## ")[0]
    for block in re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE):
        exec(compile(block.replace("1_000_000", "1_000"), str(PAGE), "exec"), names)
    assert duckdb.from_arrow(names["reader"]).aggregate("count(*)").fetchall() == [(3000,)]
    assert names["frame"].npartitions == 3
    assert names["frame"]["price"].sum().compute() == houses["price"].to_numpy().sum()
    assert names["stream"].num_shards == 3
    assert [row["area"] for row in names["stream"]] == houses["area"].to_pylist()


def test_a_stream_goes_on_when_a_node_ends_and_fails_by_name_without_nodes(
    client: CacheClient, tmp_path: Path
) -> None:
    pq.write_table(TABLE, tmp_path / "t.parquet", row_group_size=500)
    with LocalCluster(nodes=2) as own:
        client = CacheClient(Connection(own.endpoint, deadline_s=2, local=False))
        client.load(
            DatasetSpec("t", tmp_path / "t.parquet", target_shard_bytes="16KiB", replicas=2)
        )
        reader = client.read("t")
        first = reader.read_next_batch()
        own.nodes[1].kill()
        rest = pa.Table.from_batches([first, *reader])
        assert rest["row"].to_pylist() == list(range(ROWS))
        reader = client.read("t")
        reader.read_next_batch()
        own.nodes[0].kill()
        with pytest.raises(NodeUnavailableError):
            reader.read_all()


def test_bad_arguments_are_quoted(client: CacheClient) -> None:
    with pytest.raises(ConfigError, match=r"columns must .*'row'; rows must be a range, got 3"):
        client.read("t", columns="row", rows=3)  # type: ignore[arg-type]
    for rows in range(0, ROWS + 1), range(0, 10, 2), range(-1, 5):
        with pytest.raises(ConfigError, match=rf"consecutive rows within {ROWS}, got range"):
            client.read("t", rows=rows)
    with pytest.raises(DatasetNotFoundError, match="nothing"):
        client.read("nothing")
    with pytest.raises(StaleVersionError, match="0123"):
        client.read("t", fingerprint="0123")
