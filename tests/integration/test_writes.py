"""Rows of this process as a dataset: what may be written, what is refused, and what is left."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cache_client import (
    CacheClient,
    CacheError,
    CacheIterableDataset,
    ConfigError,
    DatasetInfo,
    DatasetNotFoundError,
    DatasetSpec,
    LoadError,
    LoadReport,
    LostPartitionsError,
    NodeUnavailableError,
    RequestError,
    SchemaError,
)
from cache_client.writing import writes
from cache_server import LocalCluster
from tests.conftest import numbered_table
from tests.job_arguments import grouped
from tests.waiting import wait_until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
WAIT_S = 30.0
ROWS = 1000
I8 = pa.int8()
SHARD_BYTES = 8192  # some shards for `ROWS`


class Stream:
    """Of a library that nobody here knows."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return numbered_table(ROWS).__arrow_c_stream__(requested_schema)


def _hugging_face(table: pa.Table) -> Any:
    import datasets

    return datasets.Dataset(datasets.table.InMemoryTable(table))


KINDS: Mapping[str, Callable[[pa.Table], Any]] = {
    "table": lambda table: table,
    "chunked table": lambda table: pa.Table.from_batches(table.to_batches(max_chunksize=7)),
    "batch": lambda table: table.combine_chunks().to_batches()[0],
    "reader": lambda table: table.to_reader(max_chunksize=100),
    "pandas": lambda table: table.to_pandas(),
    "polars": pl.from_arrow,
    "lazy polars": lambda table: pl.from_arrow(table).lazy(),  # type: ignore[union-attr]
    "duckdb": lambda table: duckdb.from_arrow(table),
    "stream": lambda _: Stream(),
    "hugging face": _hugging_face,
    "hugging face stream": lambda table: _hugging_face(table).to_iterable_dataset(),
    "hugging face rows": lambda table: _hugging_face(
        pa.concat_tables([table, table])
    ).select(range(ROWS)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_table_is_read_back_as_it_was(
    client: CacheClient, dataset_name: str, kind: str
) -> None:
    table = numbered_table(ROWS)
    reports: list[LoadReport] = []

    info = client.write(
        dataset_name,
        KINDS[kind](table),
        target_shard_bytes=SHARD_BYTES,
        on_progress=reports.append,
    )

    assert (info.state, info.num_rows) == ("ready", ROWS) and info.num_shards > 1
    back = pa.Table.from_batches([client.head(dataset_name, ROWS)])
    assert back.cast(table.schema).equals(table)
    assert reports[-1].num_rows == ROWS


def test_arrays_and_tensors_become_columns_with_their_shapes(
    client: CacheClient, cluster: LocalCluster, dataset_name: str
) -> None:
    images = np.arange(ROWS * 6, dtype=np.uint8).reshape(ROWS, 2, 3)
    rows = {"image": images, "label": torch.arange(ROWS), "even": np.arange(ROWS) % 2 == 0}

    info = client.write(dataset_name, rows)

    assert info.schema.field("even").type == pa.bool_()
    dataset = CacheIterableDataset(
        dataset_name, cache=cluster.endpoint, batch_size=ROWS, rank=0, world_size=1
    )
    (batch,) = dataset
    order = batch["label"].numpy()
    assert np.array_equal(batch["image"].numpy(), images[order])
    assert sorted(order) == list(range(ROWS))


def test_written_rows_are_stored_as_loaded_ones(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    days = pa.array([1, 2, 3], pa.date32())
    table = pa.table(
        {
            "day": days,
            "time": pa.array([1, 2, 3], pa.timestamp("us", "UTC")),
            "flag": [True, False, True],
            "half": pa.array([0.5, None, 1.5], pa.float32()),
            "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
            "list": [[1], [], [2, 3]],
            "point": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6.0)), 2),
        }
    )
    pq.write_table(table, tmp_path / "table.parquet")

    written = client.write(dataset_name, table)
    loaded = client.load(DatasetSpec(f"{dataset_name[:100]}-loaded", tmp_path / "table.parquet"))

    assert written.schema.equals(loaded.schema)
    assert written.nulls == loaded.nulls == {"half": 1}
    assert str(client.head(dataset_name).to_pydict()) == str(client.head(loaded.name).to_pydict())
    client.drop(loaded.name)


def test_the_same_rows_are_the_same_version_and_others_are_a_new_one(
    client: CacheClient, dataset_name: str
) -> None:
    first = client.write(dataset_name, numbered_table(ROWS), target_shard_bytes=SHARD_BYTES)
    chunks = numbered_table(ROWS).to_reader(max_chunksize=33)

    assert client.write(dataset_name, chunks, target_shard_bytes=SHARD_BYTES) is not first
    again = client.describe(dataset_name)
    other = client.write(dataset_name, numbered_table(ROWS, start=1))

    fixed = numbered_table(ROWS).select(["row", "a", "b"])
    by_table = client.write(dataset_name, fixed, target_shard_bytes=SHARD_BYTES)
    by_reader = client.write(
        dataset_name, fixed.to_reader(max_chunksize=33), target_shard_bytes=SHARD_BYTES
    )

    assert again.num_rows == ROWS
    assert other.fingerprint != first.fingerprint
    assert by_table.fingerprint == by_reader.fingerprint  # rows of one size: the same shards


def test_what_cannot_be_written_is_refused_by_name_and_leaves_nothing(
    client: CacheClient, dataset_name: str
) -> None:
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    refused: list[tuple[object, type[CacheError], str]] = [
        ([1, 2], ConfigError, "list"),
        ({"a": np.arange(2), "b": np.arange(3)}, ConfigError, "one length"),
        ({"a": np.arange(2).astype(np.complex64)}, SchemaError, "'a'"),
        (pa.table({"s": union}), SchemaError, "'s': a column of sparse_union"),
        ({}, ConfigError, "one length"),
    ]
    for data, kind, text in refused:
        with pytest.raises(kind, match=text):
            client.write(dataset_name, data)

    def failing() -> Iterator[pa.RecordBatch]:
        yield from numbered_table(ROWS).to_batches(max_chunksize=10)
        raise OSError("the source broke")

    reader = pa.RecordBatchReader.from_batches(numbered_table(1).schema, failing())
    with pytest.raises(OSError, match="the source broke"):
        client.write(dataset_name, reader, target_shard_bytes=SHARD_BYTES)

    with pytest.raises(DatasetNotFoundError):
        client.describe(dataset_name)


def test_tasks_put_partitions_and_the_driver_commits_one_attempt_of_each(
    client: CacheClient, cluster: LocalCluster, dataset_name: str
) -> None:
    table = numbered_table(ROWS)
    begun = client.begin_write(dataset_name, table.schema, target_shard_bytes=SHARD_BYTES)
    task: writes.Write = pickle.loads(pickle.dumps(begun))

    late = task.put(7, 0, table.slice(600))
    lost = task.put(2, 0, table.slice(0, 600))
    task.put(2, 1, table.slice(0, 600).to_reader())  # a speculative copy
    repeated = task.put(2, 0, table.slice(0, 600))
    empty = task.put(5, 9, table.slice(0, 0))
    assert (late.num_rows, lost.num_rows, empty.num_rows) == (400, 600, 0)
    assert repeated == lost

    with pytest.raises(LostPartitionsError, match="3") as caught:
        begun.commit({2: 0, 3: 0, 5: 9})
    assert caught.value.partitions == (3,)
    info = begun.commit({7: late, 2: 1, 5: empty})

    assert begun.commit({7: 0}).fingerprint == info.fingerprint  # the first commit holds
    begun.abort()  # does nothing any more
    back = pa.Table.from_batches([client.head(dataset_name, ROWS)])
    assert back.equals(table.cast(back.schema))
    with pytest.raises(RequestError, match="not open"):
        task.put(8, 0, table)
    wait_until(
        lambda: (
            sum(node.stored_bytes for node in client.nodes())
            == sum(each.num_bytes for each in client.datasets())
        ),
        WAIT_S,
        "rows that were not chosen are dropped",
    )


def test_rows_of_other_columns_and_of_an_aborted_write_are_refused(
    client: CacheClient, dataset_name: str
) -> None:
    table = numbered_table(10)
    begun = client.begin_write(dataset_name, table.schema)

    with pytest.raises(
        RequestError, match="must have a column 'a'; the rows cannot have a column 'half'"
    ):
        begun.put(0, 0, table.rename_columns(["row", "half", "b", "label", "text"]))
    with pytest.raises(ConfigError, match="partition"):
        begun.put(-1, 0, table)
    with pytest.raises(RequestError, match="other rows"):
        begun.put(1, 0, table)
        begun.put(1, 0, table.slice(1))
    begun.abort()
    with pytest.raises(RequestError, match="not open"):
        begun.put(0, 1, table)
    with pytest.raises(RequestError, match="no open write"):
        begun.commit({})
    with pytest.raises(ConfigError, match="replicas"):
        client.begin_write(dataset_name, table.schema, replicas=0)


def test_puts_take_the_types_of_their_write_without_a_loss_or_leave_nothing(
    client: CacheClient, dataset_name: str
) -> None:
    schema = pa.schema(
        {"number": pa.int64(), "half": pa.float32(), "flag": pa.bool_(), "list": pa.list_(I8, 2)}
    )
    begun = client.begin_write(dataset_name, schema)
    row = {"list": [[1, 2]], "flag": [True], "half": [0.5], "number": pa.array([3], pa.uint64())}
    for name, values, problem in (
        ("half", [0.1], r"'half': 0\.1 in row 0 cannot become float"),
        ("half", [1e300], r"'half': 1e\+300 in row 0"),
        ("flag", [0.3], "'flag' comes as double, which cannot become bool"),
        ("number", ["7"], "'number' comes as string, which cannot become int64"),
        ("number", pa.array([2**63], pa.uint64()), "'number': 9223372036854775808 in row 0"),
        ("list", [[1, 200]], "'list': 200 in row 0"),
        ("list", [[1]], "'list': .* in row 0"),
        ("other", [1], "cannot have a column 'other'"),
    ):
        with pytest.raises(SchemaError, match=problem):
            begun.put(0, 0, pa.table({**row, name: values}))

    begun.commit({1: begun.put(1, 0, pa.table(row))})
    assert client.read(dataset_name).read_all().to_pylist() == [
        {"number": 3, "half": 0.5, "flag": 1, "list": [1, 2]}
    ]


# -- appends -----------------------------------------------------------------------------------


def test_appended_rows_follow_the_old_ones_which_keep_their_files_numbers_and_readers(
    client: CacheClient, cluster: LocalCluster, dataset_name: str
) -> None:
    def grow(start: int, stop: int, **arguments: Any) -> DatasetInfo:
        rows = numbered_table(ROWS).slice(start, stop - start)
        return client.write(
            dataset_name, rows, append=True, target_shard_bytes=SHARD_BYTES, **arguments
        )

    def reader(**arguments: Any) -> CacheIterableDataset:
        return CacheIterableDataset(
            dataset_name,
            **grouped(
                cache=cluster.endpoint,
                batch_size=100,
                rank=0,
                world_size=1,
                **{"shuffle": False, **arguments},
            ),
        )

    first = grow(0, 500, replicas=2)
    following = reader(version="each-epoch", job=dataset_name)
    pinned = iter(reader(shuffle=True))
    seen = next(pinned)["row"].tolist()
    before = {node.id: node.stored_bytes for node in client.nodes()}

    second = grow(500, ROWS)

    added = second.num_bytes - first.num_bytes
    assert (second.num_rows, second.replicas, second.shards_reused) == (ROWS, 2, first.num_shards)
    assert {node.id: node.stored_bytes - before[node.id] for node in client.nodes()} == {
        node_id: added for node_id in before
    }
    assert {len(nodes) for nodes in second.placement.values()} == {2}
    back = client.read(dataset_name).read_all()
    assert back.equals(numbered_table(ROWS).cast(back.schema))
    seen += [row for batch in pinned for row in batch["row"].tolist()]
    assert sorted(seen) == list(range(500))
    assert following.num_rows == 500
    following.set_epoch(1)
    assert [row for batch in following for row in batch["row"].tolist()] == list(range(ROWS))
    view = reader(shuffle=True, where="row >= 400 AND row < 600", local=False)
    assert sorted(row for batch in view for row in batch["row"].tolist()) == list(range(400, 600))
    assert grow(0, 0).fingerprint == second.fingerprint
    again = client.write(dataset_name, numbered_table(10))
    assert again.num_rows == 10


@pytest.mark.parametrize("place", ["", "files"])
def test_appended_rows_take_the_types_that_arrived_without_a_loss(
    client: CacheClient, dataset_name: str, place: str, tmp_path: Path
) -> None:
    def append(**columns: Any) -> None:
        through = tmp_path if place else None
        client.write(dataset_name, pa.table(columns), through=through, append=True)

    def times(values: list[int], unit: str, zone: str | None = None) -> pa.Array:
        return pa.array(values, pa.timestamp(unit, zone))

    first = {
        "text": pa.array(["a"]),
        "flag": [True],
        "time": times([1000], "ms", "UTC"),
        "day": pa.array([1], pa.date32()),
        "share": pa.array([0.5], pa.float32()),
        "list": pa.array([[1]], pa.list_(I8)),
    }
    append(**first)
    append(
        list=pa.array([[2]], pa.large_list(pa.field("element", pa.int64(), nullable=False))),
        share=pa.array([None], pa.null()),
        time=times([2_000_000], "us", "Etc/UTC"),
        day=pa.array([86_400_000 * 2], pa.date64()),
        text=pa.array(["b"], pa.string_view()),
        flag=pa.array([False]).dictionary_encode(),
    )
    before = client.describe(dataset_name).fingerprint
    for name, values, problem in (
        ("text", [1], "'text' comes as int64, which cannot become string"),
        ("flag", pa.array([7], pa.uint8()), "'flag' comes as uint8, which cannot become bool"),
        ("time", [5], "'time' comes as int64, which cannot become timestamp"),
        ("time", times([1], "ms"), "'time' comes as timestamp.ms., which cannot become"),
        ("time", times([1], "us", "UTC"), "'time': 1970-01-01 00:00:00.000001Z? in row 0"),
        ("share", [0.1], r"'share': 0\.1 in row 0"),
        ("list", [[300]], "'list': 300 in row 0"),
    ):
        with pytest.raises(SchemaError, match=problem) as refused:
            append(**{**first, name: values})
        assert "in the sql" not in str(refused.value)
    assert client.describe(dataset_name).fingerprint == before
    rows = client.read(dataset_name).read_all().to_pydict()
    assert rows["share"] == [0.5, None]
    assert (rows["text"], rows["flag"], rows["list"]) == (["a", "b"], [True, False], [[1], [2]])


def test_rows_that_were_read_from_the_dataset_can_be_appended_to_it(
    client: CacheClient, dataset_name: str
) -> None:
    days = pa.table({"day": pa.array([1, 2], pa.date32()), "share": pa.array([0.5, 1.5])})
    client.write(dataset_name, days)
    client.write(dataset_name, client.read(dataset_name), append=True)
    assert client.read(dataset_name).read_all().equals(pa.concat_tables([days, days]))


def test_appends_at_the_same_time_all_land_and_none_twice(
    client: CacheClient, dataset_name: str
) -> None:
    def write(number: int) -> None:
        for part in range(number * 100, number * 100 + 100, 50):
            client.write(dataset_name, numbered_table(50, part), append=True)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))

    rows = client.read(dataset_name).read_all()["row"].to_pylist()
    assert sorted(rows) == list(range(300))
    assert all(rows[at : at + 50] == [*range(rows[at], rows[at] + 50)] for at in range(0, 300, 50))
    for number in range(3):
        assert rows.index(number * 100) < rows.index(number * 100 + 50)


def test_an_append_to_loaded_rows_is_refused_and_leaves_them(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    pq.write_table(numbered_table(10), tmp_path / "table.parquet")
    loaded = client.load(DatasetSpec(dataset_name, tmp_path))
    with pytest.raises(RequestError, match=r"it was loaded.*Add files to its source"):
        client.write(dataset_name, numbered_table(10), append=True)

    begun = client.begin_write(f"{dataset_name[:100]}-later", numbered_table(1).schema, append=True)
    ack = begun.put(0, 0, numbered_table(10))
    client.load(DatasetSpec(begun.name, tmp_path))
    with pytest.raises(RequestError, match="it was loaded"):  # after the begin
        begun.commit({0: ack})
    assert client.describe(begun.name).num_rows == client.describe(dataset_name).num_rows == 10
    assert client.describe(dataset_name).fingerprint == loaded.fingerprint
    begun.abort()
    client.drop(begun.name)


# -- nodes that are full, lost or alone --------------------------------------------------------


def test_a_full_node_lets_writers_wait_and_then_refuses_them_by_name() -> None:
    rows = {"x": np.zeros((1000, 1000), np.float32)}  # 4 MB
    with LocalCluster(nodes=1, memory_limit_bytes=6_000_000) as cluster:
        client = CacheClient(cluster.endpoint)
        client.write("first", rows, target_shard_bytes="1MiB")
        schema = pa.schema([("x", pa.list_(pa.float32(), 1000))])

        short = client.begin_write("second", schema, target_shard_bytes="1MiB", full_wait_s=0.3)
        with pytest.raises(LoadError, match=r"was full for 0\.3 s"):
            short.put(0, 0, rows)
        short.abort()

        patient = client.begin_write("second", schema, target_shard_bytes="1MiB")
        dropping = threading.Timer(0.3, lambda: client.drop("first"))
        dropping.start()
        ack = patient.put(0, 0, rows)
        assert patient.commit({0: ack}).num_rows == 1000
        dropping.join()


def test_rows_outlive_a_node_only_with_replicas_and_come_back_with_it() -> None:
    with LocalCluster(nodes=2, node_timeout_s=1.0) as cluster:
        client = CacheClient(cluster.endpoint)
        table = numbered_table(ROWS)
        one = client.write("one", table, target_shard_bytes=SHARD_BYTES)
        two = client.write("two", table, target_shard_bytes=SHARD_BYTES, replicas=2)
        assert {len(nodes) for nodes in two.placement.values()} == {2}
        assert {len(nodes) for nodes in one.placement.values()} == {1}

        cluster.nodes[1].kill()

        wait_until(lambda: client.describe("one").state == "unavailable", WAIT_S, "rows are away")
        assert "only on nodes that are away" in str(client.describe("one").error)
        with pytest.raises(NodeUnavailableError, match="only on nodes that are away"):
            client.head("one")
        assert client.describe("two").state == "ready"
        assert client.head("two", ROWS).column("row").to_pylist() == list(range(ROWS))
        cluster.nodes[1].start()
        wait_until(lambda: client.describe("one").state == "ready", WAIT_S, "rows are back")

        cluster.nodes[0].kill()  # the coordinator
        cluster.nodes[0].start()
        cluster.wait_for_nodes()
        with suppress(CacheError):
            wait_until(lambda: client.describe("one").state == "ready", WAIT_S, "rows are served")
        for name in ("one", "two"):
            assert client.head(name, ROWS).column("row").to_pylist() == list(range(ROWS))


def test_the_page_about_writes_runs_as_it_stands(
    client: CacheClient, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CACHE_ENDPOINT", cluster.endpoint)
    page = PAGE.read_text(encoding="utf-8").partition("\n## Write\n")[2].partition("\n## ")[0]
    page = page.replace("/shared/written", str(tmp_path))
    for block in re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), {"table": numbered_table(ROWS)})

        assert client.head("houses", ROWS).column("row").to_pylist() == list(range(ROWS))
        client.drop("houses")


def test_a_frame_keeps_the_levels_of_its_index_that_have_a_name(
    client: CacheClient, dataset_name: str
) -> None:
    frame = pd.DataFrame({"x": [1.5, 2.5]}, index=pd.Index(["a", "b"], name="key"))

    client.write(dataset_name, frame)

    assert client.head(dataset_name).to_pydict() == {"key": ["a", "b"], "x": [1.5, 2.5]}
