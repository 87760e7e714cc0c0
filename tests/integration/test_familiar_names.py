"""What people who come from other libraries try first on a dataset."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cache_client
import cache_server
from cache_client import (
    CacheClient,
    CacheDataset,
    CacheIterableDataset,
    CacheMixture,
    ConfigError,
    DatasetSpec,
    View,
)
from cache_client.training.familiar import HERE
from cache_server import LocalCluster

ROWS = 40
NAME = "familiar <b>"  # of a column


@pytest.fixture(scope="module")
def table(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    rows = np.arange(ROWS)
    columns = {
        "row": pa.array(rows),
        "price": pa.array([None if row % 10 == 3 else row / 2 for row in rows], pa.float32()),
        "city": pa.array(["Oslo" if row % 2 else "Bergen" for row in rows]),
        NAME: pa.array(rows.astype(np.int8)),
    }
    path = tmp_path_factory.mktemp("familiar") / "t.parquet"
    pq.write_table(pa.table(columns), path)
    client = CacheClient(cluster.endpoint)
    client.load(DatasetSpec("familiar", path))
    yield "familiar"
    client.drop("familiar")


def reading(table: str, cluster: LocalCluster, **arguments: Any) -> CacheIterableDataset:
    return CacheIterableDataset(table, cache=cluster.endpoint, **{"batch_size": 8, **arguments})


def every_dataset(table: str, cluster: LocalCluster) -> list[Any]:
    dataset = reading(table, cluster)
    return [
        dataset,
        CacheMixture({"one": (dataset, 1), "two": (reading(table, cluster), 2)}),
        CacheDataset(table, cache=cluster.endpoint),
    ]


def test_names_of_other_libraries_say_how_it_is_done_here(
    table: str, cluster: LocalCluster
) -> None:
    for dataset in every_dataset(table, cluster):
        for name, advice in HERE.items():
            assert not hasattr(dataset, name) and getattr(dataset, name, 7) == 7
            with pytest.raises(AttributeError, match=re.escape(advice)) as caught:
                getattr(dataset, name)
            assert f"has no {name!r}" in str(caught.value) and caught.value.name == name
        with pytest.raises(AttributeError, match="object has no attribute 'nonsense'"):
            dataset.nonsense  # noqa: B018
    assert {"map", "filter", "select", "batch", "to_table"} <= set(HERE)


def test_a_property_that_fails_keeps_its_own_error(table: str, cluster: LocalCluster) -> None:
    class Broken(CacheIterableDataset):
        @property
        def broken(self) -> int:
            return self.missing  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(AttributeError, match="'missing'"):
        Broken(table, cache=cluster.endpoint, batch_size=8).broken  # noqa: B018


def test_columns_are_those_of_batches_and_the_schema_is_that_of_what_is_read(
    table: str, cluster: LocalCluster
) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"columns": ["city", "row"]},
        {"stack": {"x": ["row", NAME]}, "pad_mask": "real"},
        {"nulls": "mask"},
        {"view": View(codes=["city"])},
        {"batch_format": "arrow"},
    ]
    for given in variants:
        dataset = reading(table, cluster, **given)
        (batch,) = dataset.take(1)
        names = batch.schema.names if isinstance(batch, pa.RecordBatch) else list(batch)
        assert dataset.column_names == names, given
        head = dataset._first_rows(3)
        assert head.num_rows == 3 and dataset.schema.equals(head.schema), given
    sources = {"one": (reading(table, cluster), 1)}
    (batch,) = CacheMixture(sources, source_column="of").take()
    assert CacheMixture(sources, source_column="of").column_names == list(batch)
    for dataset in every_dataset(table, cluster):
        assert dataset.schema.names == ["row", "price", "city", NAME]
        assert dataset.column_names == dataset.schema.names


@pytest.mark.parametrize("shuffle", [False, True])
def test_take_gives_the_first_batches_of_the_next_pass_and_changes_nothing(
    table: str, cluster: LocalCluster, shuffle: bool
) -> None:
    def seen(batches: Any) -> list[list[int]]:
        return [batch["row"].tolist() for batch in batches]

    dataset = reading(
        table, cluster, columns=["row"], shuffle=shuffle, rank=1, world_size=2, audit="states"
    )
    dataset.set_epoch(3)
    before = pickle.dumps(dataset.state_dict())
    looks = [seen(dataset.take(count)) for count in (0, 1, 2, 99)]
    assert pickle.dumps(dataset.state_dict()) == before and dataset.stats().batches == 0
    whole = seen(dataset)
    assert looks == [[], whole[:1], whole[:2], whole] and len(whole) == 3
    dataset.set_epoch(4)
    passing = iter(dataset)
    first = next(passing)["row"].tolist()
    assert seen(dataset.take(1)) == [first]  # the loop goes on
    state = dataset.state_dict()
    assert seen(passing) == seen(dataset.take(3))[1:]
    resumed = reading(table, cluster, columns=["row"], shuffle=shuffle, rank=1, world_size=2)
    resumed.load_state_dict({key: value for key, value in state.items() if key != "audit"})
    assert seen(resumed.take(9)) == seen(resumed)
    doubled = reading(table, cluster, columns=["row"], transform=lambda b: {"x": 2 * b["row"]})
    assert doubled.take()[0]["x"].tolist() == list(range(0, 16, 2))
    for bad in (-1, 1.5, "2", True):
        with pytest.raises(ConfigError, match=re.escape(repr(bad))):
            dataset.take(bad)  # type: ignore[arg-type]


def test_head_is_a_frame_of_the_first_rows_of_the_view(table: str, cluster: LocalCluster) -> None:
    where = reading(table, cluster, shuffle=True, view=View(where="row >= 30"))
    frame = where.head(3)
    assert frame["row"].tolist() == [30, 31, 32]
    assert str(frame.dtypes["price"]) == "float[pyarrow]"
    assert CacheDataset(table, cache=cluster.endpoint).head()["row"].tolist() == [0, 1, 2, 3, 4]
    assert len(where.head(99)) == 10 and len(where.head(0)) == 0
    none = reading(table, cluster, view=View(where="row > 99"))
    assert none.head().columns.tolist() == none.schema.names and len(none.head()) == 0
    mixed = every_dataset(table, cluster)[1]
    assert len(mixed.head(4)) == 4 and mixed.head(4).columns.tolist() == mixed.schema.names
    groups = reading(table, cluster, batch_size=1, view=View(group_by="city"))
    assert len(groups.head(7)) == 7


def test_head_without_pandas_says_what_to_do(
    table: str, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        reading(table, cluster).head()


def test_a_view_shows_its_samples_and_the_rows_of_its_table(
    table: str, cluster: LocalCluster
) -> None:
    shown = repr(reading(table, cluster, view=View(where="row >= 30")))
    assert "num_samples=10, table_rows=40" in shown and "num_rows" not in shown
    assert "num_rows=40" in repr(reading(table, cluster))


def test_notebooks_show_datasets_infos_and_plans_as_tables(
    table: str, cluster: LocalCluster, tmp_path: Path
) -> None:
    client = CacheClient(cluster.endpoint)
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({NAME: [1, 2, 3]}), path)
    plan = client.plan(DatasetSpec("planned", path))
    for shown in (*every_dataset(table, cluster), client.describe(table), plan):
        html = shown._repr_html_()
        assert html.startswith("<div><b>") and html.count("<table>") == html.count("</table>") >= 1
        assert NAME not in html and "['row', 'price'" not in html  # escaped; columns once
    assert "familiar &lt;b&gt;</td><td>int8" in client.describe(table)._repr_html_()
    lines = repr(plan).splitlines()
    assert lines[0] == "LoadForecast('planned')" and max(map(len, lines)) < 200
    assert any(line.split() == ["rows", "3"] for line in lines)


def test_packages_have_a_version() -> None:
    assert cache_client.__version__ == cache_server.__version__ == version("trainer-data-cache")
    with pytest.raises(AttributeError, match="nonsense"):
        cache_server.nonsense  # type: ignore[attr-defined]  # noqa: B018
