"""Rows that become Parquet files first: in a folder of this machine and in S3."""

from __future__ import annotations

import datetime
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from cache_client import (
    CacheClient,
    CacheError,
    ConfigError,
    LoadError,
    NodeUnavailableError,
    RequestError,
    SchemaError,
    UnauthenticatedError,
)
from cache_server import LocalCluster
from cache_server.coordination import loads
from tests.conftest import numbered_table
from tests.fake_nodes import Clock, make_coordinator, spec
from tests.object_store import S3Server
from tests.waiting import wait_until

ROWS = 1000
SHARD_BYTES = 2048
WAIT_S = 30.0
Place = tuple[str, Mapping[str, str] | None]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        server.put("bucket", "other/table", b"")
        yield server


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return str(tmp_path / "through"), None
    server: S3Server = request.getfixturevalue("s3")
    return f"s3://bucket/{tmp_path.name}/", server.storage_options


def rows_of(client: CacheClient, name: str) -> list[int]:
    rows: list[int] = client.read(name).read_all()["row"].to_pylist()
    return rows


def reading(rows: pa.Table, then: Callable[[], object]) -> pa.RecordBatchReader:
    """The rows as a stream that calls ``then`` when they are read."""

    def batches() -> Iterator[pa.RecordBatch]:
        yield from rows.to_batches()
        then()

    return pa.RecordBatchReader.from_batches(rows.schema, batches())


def test_rows_are_loaded_from_files_and_appends_read_only_their_own(
    client: CacheClient, dataset_name: str, place: Place
) -> None:
    through, options = place

    def write(table: pa.Table, **arguments: Any) -> Any:
        return client.write(
            dataset_name, table, through=through, storage_options=options,
            target_shard_bytes=SHARD_BYTES, **arguments,
        )  # fmt: skip

    first = write(numbered_table(500).to_reader(max_chunksize=33), append=True)
    assert first.num_rows == 500 and first.num_shards > 1
    ordered = numbered_table(500, 500).select(["text", "row", "a", "b", "label"])
    second = write(ordered, append=True, replicas=2)
    assert second.shards_reused == first.num_shards
    assert second.files_read == second.num_shards - first.num_shards  # once for each of its shards
    assert second.replicas == 2
    assert client.read(dataset_name).read_all().equals(numbered_table(ROWS).cast(second.schema))
    with pytest.raises(SchemaError, match="must have a column 'a', 'b', 'label', 'text'"):
        write(numbered_table(1).select(["row"]), append=True)

    third = write(numbered_table(10))
    assert (third.num_rows, third.files_read) == (10, 1)
    plain = client.write(dataset_name, numbered_table(1))
    with pytest.raises(RequestError, match=r"its rows come from write://"):
        write(numbered_table(1), append=True)
    assert client.describe(dataset_name).fingerprint == plain.fingerprint


def test_columns_that_parquet_stores_as_others_are_appended(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    times = [datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 2)]
    rows = pa.table(
        {
            "second": pa.array(times, pa.timestamp("s")),
            "date": pa.array(times, pa.date64()),
            "time": pa.array([1, 2], pa.time32("s")),
            "list": pa.array([[1.0], [2.0, 3.0]], pa.list_(pa.float32())),
            "vector": pa.array([[1.0], [2.0]], pa.list_(pa.float32(), 1)),
            "view": pa.array(["a", "b"], pa.string_view()),
        }
    )
    rows = rows.append_column("n\"'", pa.array([1, 2]))
    client.write(dataset_name, rows, through=tmp_path)
    first = client.read(dataset_name).read_all()
    direct = client.write(f"{dataset_name[:100]}-direct", rows)
    assert first.equals(client.read(direct.name).read_all())
    assert first.schema.equals(direct.schema)

    client.write(dataset_name, rows.select(rows.column_names[::-1]), through=tmp_path, append=True)
    assert client.read(dataset_name).read_all().equals(pa.concat_tables([first, first]))
    for name, values in (
        ("list", pa.array([[0.1]], pa.list_(pa.float64()))),
        ("second", pa.array([1500], pa.timestamp("ms"))),
        ("date", pa.array([pa.MonthDayNano([1, 2, 3])])),
    ):
        other = rows.slice(0, 1).drop_columns([name]).append_column(name, values)
        with pytest.raises(SchemaError, match=f"column {name!r}"):
            client.write(dataset_name, other, through=tmp_path, append=True)
    nested = pa.table({"s": pa.array([{"x": times[0]}], pa.struct([("x", pa.timestamp("s"))]))})
    with pytest.raises(SchemaError, match="Parquet has no seconds"):
        client.write(dataset_name, nested, through=tmp_path)


def test_a_refused_first_append_blocks_no_later_one(
    client: CacheClient, dataset_name: str, place: Place
) -> None:
    through, options = place

    def append(*values: float | None) -> None:
        client.write(
            dataset_name, pa.table({"row": [*values]}), through=through, storage_options=options,
            append=True, nulls="refuse",
        )  # fmt: skip

    with pytest.raises(LoadError, match="null"):
        append(1.0, None)
    append(2.0)
    append(3.0)
    assert rows_of(client, dataset_name) == [2.0, 3.0]


def test_a_lost_node_costs_no_rows_that_were_written_through_a_folder(tmp_path: Path) -> None:
    with LocalCluster(nodes=2, node_timeout_s=1.0) as cluster:
        client = CacheClient(cluster.endpoint)
        client.write("rows", numbered_table(ROWS), through=tmp_path, target_shard_bytes=SHARD_BYTES)
        cluster.nodes[1].kill()
        wait_until(
            lambda: not all(node.alive for node in client.nodes()), WAIT_S, "the node is lost"
        )
        wait_until(lambda: client.describe("rows").state == "ready", WAIT_S, "it is loaded again")
        assert rows_of(client, "rows") == list(range(ROWS))


class RefusesRemovals(fs.LocalFileSystem):  # type: ignore[misc]  # no stubs
    """Moves as a store does: it copies, then removes."""

    def move(self, src: str, dest: str) -> None:
        self.copy_file(src, dest)
        raise OSError("ACCESS_DENIED")


def test_a_write_that_fails_leaves_no_file_and_the_version_before(
    client: CacheClient, dataset_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(data: object, **arguments: Any) -> Any:
        return client.write(dataset_name, data, through=tmp_path, **arguments)

    def failing() -> Iterator[pa.RecordBatch]:
        yield from numbered_table(10).to_batches()
        raise OSError("the source broke")

    info = write(numbered_table(10))
    (file,) = tmp_path.rglob("*.parquet")
    for append in (False, True):
        reader = pa.RecordBatchReader.from_batches(numbered_table(1).schema, failing())
        with pytest.raises(OSError, match="the source broke"):
            write(reader, append=append)
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    with pytest.raises(CacheError, match="union"):
        write(pa.table({"s": union}))
    with pytest.raises(ConfigError, match="gs://bucket"):
        client.write(dataset_name, numbered_table(1), through="gs://bucket")
    with pytest.raises(ConfigError, match="give both"):
        client.write(dataset_name, numbered_table(1), storage_options={})
    with pytest.raises(ConfigError, match=r"append must be .* got 'no'; through must be a folder"):
        client.write(dataset_name, numbered_table(1), through=[tmp_path], append="no")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="nulls='refuse'"):
        write(numbered_table(1), append=True, nulls="refuse")
    with monkeypatch.context() as patched:
        patched.setattr(fs, "LocalFileSystem", RefusesRemovals)
        with pytest.raises(LoadError, match=r"cannot write .*: ACCESS_DENIED"):
            write(numbered_table(1), append=True)
    (tmp_path / "file").touch()
    with pytest.raises(LoadError, match="cannot write"):
        client.write(dataset_name, numbered_table(1), through=tmp_path / "file")

    assert [*tmp_path.rglob("*.parquet")] == [file]
    assert pq.read_table(file)["row"].to_pylist() == rows_of(client, dataset_name)
    assert client.describe(dataset_name).fingerprint == info.fingerprint
    shutil.rmtree(file.parent)
    with pytest.raises(LoadError, match=r"its files in .* are gone"):
        write(numbered_table(1), append=True)


@pytest.mark.parametrize("error", [UnauthenticatedError, NodeUnavailableError, KeyboardInterrupt])
def test_a_file_whose_load_may_continue_stays_and_a_warning_names_it(
    client: CacheClient, dataset_name: str, tmp_path: Path, error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def wait(*_: object) -> None:
        raise error("no answer")

    monkeypatch.setattr("cache_client.control.client.wait_until_loaded", wait)
    with caplog.at_level(logging.WARNING), pytest.raises(error):
        client.write(dataset_name, numbered_table(10), through=tmp_path)

    (file,) = tmp_path.rglob("*.parquet")
    assert f"file stays, because its load may continue path={file}" in caplog.text


def test_options_of_s3_are_those_of_loads_or_refused_by_name(
    client: CacheClient, dataset_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(**options: object) -> None:
        client.write(
            dataset_name, numbered_table(1), through="s3://bucket/a", storage_options=options
        )

    with pytest.raises(ConfigError, match="cannot use 'aws_requester_pays'; it knows"):
        write(aws_requester_pays="true")

    given: list[dict[str, object]] = []

    def connect(**arguments: object) -> None:
        given.append(arguments)
        raise OSError("not now")

    monkeypatch.setattr(fs, "S3FileSystem", connect)
    with pytest.raises(ConfigError, match="not now"):
        write(**{"AWS_SKIP_SIGNATURE": True, "s3.endpoint": "http://a:1", "allow-http": "true",
                 "virtual-hosted-style-request": "false"})  # fmt: skip
    assert given == [
        {"anonymous": True, "endpoint_override": "a:1", "scheme": "http",
         "force_virtual_addressing": False}
    ]  # fmt: skip


def test_appends_at_the_same_time_are_all_there(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    client.write(dataset_name, numbered_table(10), through=tmp_path)

    def write(number: int) -> None:
        rows = numbered_table(10, number * 10)
        client.write(dataset_name, rows, through=tmp_path, append=True)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(1, 7)))

    assert sorted(rows_of(client, dataset_name)) == list(range(70))


def test_the_rows_of_an_append_come_last_though_it_began_first_or_its_clock_is_late(
    client: CacheClient, dataset_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(rows: object) -> None:
        client.write(dataset_name, rows, through=tmp_path, append=True)

    append(numbered_table(10))
    append(reading(numbered_table(10, 20), lambda: append(numbered_table(10, 10))))
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    append(numbered_table(10, 30))

    assert rows_of(client, dataset_name) == list(range(40))


@pytest.mark.parametrize("is_first", [True, False])
def test_an_append_while_another_write_makes_the_dataset_is_refused(
    client: CacheClient, dataset_name: str, tmp_path: Path, is_first: bool
) -> None:
    def write(rows: object, **arguments: bool) -> None:
        client.write(dataset_name, rows, through=tmp_path, **arguments)

    if not is_first:
        write(numbered_table(10))
    with pytest.raises(RequestError, match="another write made or replaced its rows"):
        other = reading(
            numbered_table(10, 10), lambda: write(numbered_table(10, 20), append=is_first)
        )
        write(other, append=True)
    assert rows_of(client, dataset_name) == list(range(20, 30))
    assert len([*tmp_path.rglob("*.parquet")]) == (1 if is_first else 2)

    write(numbered_table(10, 30), append=True)
    assert rows_of(client, dataset_name) == list(range(20, 40))


@pytest.fixture
def while_planning(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Future[Any]]]:
    """Begins a load, and does something after the load has looked at its source."""
    plan, waits, goes_on = loads.plan_version, threading.Event(), threading.Event()

    def slow_plan(*arguments: Any) -> Any:
        planned = plan(*arguments)
        if not waits.is_set():
            waits.set()
            assert goes_on.wait(WAIT_S)
        return planned

    def begin(load: Callable[[], object], then: Callable[[], object]) -> Future[Any]:
        slow = pool.submit(load)
        assert waits.wait(WAIT_S)
        then()
        goes_on.set()
        return slow

    monkeypatch.setattr(loads, "plan_version", slow_plan)
    with ThreadPoolExecutor(1) as pool:
        yield begin


def test_a_load_that_another_one_overtook_looks_at_the_files_again(
    tmp_path: Path, while_planning: Callable[..., Future[Any]]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    pq.write_table(numbered_table(10), source / "0.parquet")
    coordinator = make_coordinator(tmp_path, Clock())

    def add_a_file() -> None:
        pq.write_table(numbered_table(10, 10), source / "1.parquet")
        coordinator.create(spec(source))

    slow = while_planning(lambda: coordinator.create(spec(source)), add_a_file)
    assert slow.result(WAIT_S).fingerprint == coordinator.get("table").fingerprint
    assert len(coordinator.get("table").shards) == 2


def test_an_append_that_the_load_of_another_source_overtook_is_refused(
    tmp_path: Path, while_planning: Callable[..., Future[Any]]
) -> None:
    for name in ("a", "b"):
        pq.write_table(numbered_table(10), tmp_path / f"{name}.parquet")
    first, other = spec(tmp_path / "a.parquet"), spec(tmp_path / "b.parquet")
    coordinator = make_coordinator(tmp_path, Clock())

    slow = while_planning(
        lambda: coordinator.create(first, append=True), lambda: coordinator.create(other)
    )
    with pytest.raises(RequestError, match="Append again"):
        slow.result(WAIT_S)
    assert list(coordinator.get("table").spec.tables[0].source) == list(other.source)
