"""Loads as runs of lineage: names of sources as OpenLineage has them, and one end of each run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
from openlineage.client.naming import dataset as naming

from cache_protocol.datasets.dataset_spec import DatasetSpec, TableSpec
from cache_protocol.errors import LoadError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire import lineage
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.versions.load_run import LoadRun, named
from cache_server.plan.pinned_version import PinnedVersion
from cache_server.shards.version_key import VersionKey
from tests.fake_nodes import Clock, FakeNode, make_coordinator, settle, spec

SECRET = "not-to-be-seen"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("/data/a.parquet", naming.LocalFileSystem("/data/a.parquet")),
        ("/data/*/a-?.parquet", naming.LocalFileSystem("/data")),
        ("file:///data/a", naming.LocalFileSystem("/data/a")),
        ("s3://bucket/key/a.parquet", naming.S3("bucket", "key/a.parquet")),
        ("s3://bucket/key/*.parquet", naming.S3("bucket", "key")),
        ("gs://bucket/key/", naming.GCS("bucket", "key")),
        ("abfss://box@account.dfs.core.windows.net/a", naming.ABFSS("box", "account", "a")),
        (
            f"postgresql://me:{SECRET}@db:5433/shop/public.orders",
            naming.Postgres("db", "5433", "shop", "public", "orders"),
        ),
        (
            "postgresql://db/shop/public.orders",
            naming.Postgres("db", "5432", "shop", "public", "orders"),
        ),
    ],
)
def test_a_source_has_the_name_that_openlineage_gives_it(
    source: str, expected: naming.DatasetNaming
) -> None:
    found = named(source, TableSpec("source", (source,)))
    assert found == (expected.get_namespace(), expected.get_name())


def test_a_table_of_a_catalogue_has_the_name_of_its_place() -> None:
    table = TableSpec("source", ("a.b",), options={"catalog.uri": "https://lake/api?key=1"})
    assert named("a.b", table) == ("https://lake/api", "a.b")


@dataclass
class Told:
    """In place of a sender."""

    events: list[tuple[str, lineage.Run, str]] = field(default_factory=list)

    def send(self, state: str, run: Callable[[], lineage.Run], error: str = "") -> None:
        self.events.append((state, run(), error))


def a_run(sql: str) -> LoadRun:
    spec = DatasetSpec("a", "s3://bucket/a.parquet", sql=sql)
    schema = pa.schema({"a": pa.int64()})
    pinned = PinnedVersion(spec, VersionKey("a", "f" * 32), sql, (), schema, (), True)
    secrets = pb.Secrets(tables={"source": pb.TableSecrets(values={"aws_secret": SECRET})})
    return LoadRun.of(pinned, secrets, "trainer", "catalogue", 1, 0)


def test_a_run_ends_once_and_tells_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(lineage, "sender", lambda: told)
    run = a_run(f"SELECT a FROM source WHERE a = '{SECRET}'")
    run.begin()
    run.fail(LoadError(f"no object {SECRET} of s3://me:{SECRET}@bucket"))
    run.abort()
    assert [state for state, *_ in told.events] == ["START", "FAIL"]
    assert SECRET not in repr(told.events) and "SELECT a" in told.events[0][1].sql
    assert len({run.run_id for _, run, _ in told.events}) == 1


def test_a_restarted_coordinator_ends_the_run_that_it_began() -> None:
    assert a_run("SELECT a FROM source").run_id == a_run("SELECT a FROM source").run_id


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    found = Told()
    monkeypatch.setattr(lineage, "sender", lambda: found)
    return found


def test_a_dataset_that_is_dropped_while_it_loads_aborts_its_run(
    coordinator: Coordinator, source: Path, told: Told
) -> None:
    FakeNode(coordinator, "one").beat(load=())
    coordinator.create(spec(source))
    coordinator.delete("table")
    assert [state for state, *_ in told.events] == ["START", "ABORT"]


def test_a_run_that_a_coordinator_began_is_ended_by_the_next_one(
    source: Path, tmp_path: Path, clock: Clock, told: Told
) -> None:
    coordinator = make_coordinator(tmp_path, clock)
    FakeNode(coordinator, "one").beat(load=())
    coordinator.create(spec(source))
    again = make_coordinator(tmp_path, clock)
    settle(FakeNode(again, "one"))
    assert again.get("table").state == pb.DATASET_STATE_READY
    assert [state for state, *_ in told.events] == ["START", "COMPLETE"]
    assert len({run.run_id for _, run, _ in told.events}) == 1
    again.create(spec(source))  # attaches
    assert len(told.events) == 2


def test_what_is_missing_is_told_as_a_run_that_failed(
    coordinator: Coordinator, tmp_path: Path, told: Told
) -> None:
    with pytest.raises(LoadError) as raised:
        coordinator.create(DatasetSpec("table", tmp_path / "none.parquet"))
    (_, started, _), (state, _, error) = told.events
    assert (state, error) == ("FAIL", str(raised.value))
    assert started.inputs[0].name == str(tmp_path / "none.parquet")
