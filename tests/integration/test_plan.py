"""Forecasts against what the loads come to: rows, bytes, nodes and steps; the way of a query."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

from cache_client import CacheClient, CacheIterableDataset, DatasetSpec
from cache_client.control import forecast as control_forecast
from cache_protocol.cli.output import size
from cache_protocol.errors import EXIT_CONFIG, EXIT_DATA, ConfigError, LoadError, RequestError
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.memory_budget import load_bytes
from cache_server import LocalCluster
from cache_server.shards.packing import logical_schema
from tests import forked_python
from tests.conftest import write_numbered

NUM_ROWS = 20_000
FIXED = ("small", "whole", "half", "flag", "day")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns of every kind; words repeat, notes do not."""
    rng = np.random.default_rng(1)
    words = np.array(["a", "somewhat longer", "one more word of thirty-two bytes"])
    rows = pa.table(
        {
            "small": rng.integers(0, 100, NUM_ROWS).astype(np.int16),
            "whole": np.arange(NUM_ROWS),
            "half": rng.uniform(0, 1, NUM_ROWS),
            "flag": rng.integers(0, 2, NUM_ROWS).astype(bool),
            "day": pa.array(rng.integers(0, 9999, NUM_ROWS), pa.int32()).cast(pa.date32()),
            "word": words[rng.integers(0, 3, NUM_ROWS)],
            "note": [f"note {n} of {'x' * (n % 50)}" for n in range(NUM_ROWS)],
            "tags": [[n] * (n % 4) for n in range(NUM_ROWS)],
        }
    )
    directory = tmp_path_factory.mktemp("table")
    for index, start in enumerate(range(0, NUM_ROWS, 5000)):
        pq.write_table(rows.slice(start, 5000), directory / f"{index}.parquet", row_group_size=1250)
    return directory


@pytest.mark.parametrize(
    ("columns", "within"),
    [(FIXED, 0.10), (("whole", "word"), 0.30), (("note",), 0.30), (("tags", "half"), 0.30),
     (None, 0.30)],
    ids=["fixed width", "repeated words", "notes", "lists", "all"],
)  # fmt: skip
def test_the_bytes_of_a_load_are_foretold(
    client: CacheClient,
    dataset_name: str,
    table: Path,
    columns: tuple[str, ...] | None,
    within: float,
) -> None:
    spec = DatasetSpec(dataset_name, table, columns=columns, target_shard_bytes="256KiB")

    forecast = client.plan(spec)
    info = client.load(spec)

    assert (forecast.num_rows, forecast.rows_exact) == (info.num_rows, True)
    assert forecast.fingerprint == info.fingerprint
    assert (forecast.num_shards, forecast.schema) == (info.num_shards, info.schema)
    assert forecast.num_bytes == pytest.approx(info.num_bytes, rel=within)
    assert len(forecast.node_bytes) == 2
    assert sum(forecast.node_bytes) == forecast.num_bytes
    assert forecast.fits and forecast.memory_limit_bytes is None


def test_words_are_foretold_without_size_statistics_too(
    client: CacheClient, dataset_name: str, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cache_server.plan.pinned_version import plan_version
    from cache_server.tables import column_sizes

    monkeypatch.setattr(
        column_sizes, "unencoded_bytes", lambda f: [[None] * f.num_columns] * f.num_row_groups
    )
    spec = DatasetSpec(dataset_name, table, columns=["word", "note"])

    plan = plan_version(spec).version
    info = client.load(spec)

    assert plan.shards is not None
    foretold = sum(shard.estimated_bytes for shard in plan.shards)
    assert foretold == pytest.approx(info.num_bytes, rel=0.30)


def _as_parquet(rows: pa.Table, root: Path) -> dict[str, Any]:
    root.mkdir()
    pq.write_table(rows, root / "a.parquet", row_group_size=1250)
    return {"source": root}


def _as_delta(rows: pa.Table, root: Path) -> dict[str, Any]:
    for start in range(0, NUM_ROWS, 5000):
        write_deltalake(str(root), rows.slice(start, 5000), mode="append", partition_by=["word"])
    return {"source": root, "format": "delta"}


def _as_iceberg(rows: pa.Table, root: Path) -> dict[str, Any]:
    """Some of its columns have other names in the first files."""
    places = {"uri": f"sqlite:///{root}.db", "warehouse": f"file://{root}"}
    with closing(SqlCatalog("default", **places)) as catalog:
        catalog.create_namespace("ns")
        old = {"note": "text", "tags": "note"}
        names = [old.get(name, name) for name in rows.column_names]
        table = catalog.create_table("ns.t", rows.rename_columns(names).schema)
        for start in range(0, NUM_ROWS, 5000):
            table.append(rows.rename_columns(names).slice(start, 5000))
        for new, name in {"tags": "note", "note": "text"}.items():
            with table.update_schema() as update:
                update.rename_column(name, new)
        return {"source": table.metadata_location}


@pytest.fixture(scope="module", params=[_as_parquet, _as_delta, _as_iceberg])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """A table of every format that has footers, as arguments of its spec."""
    rows = pa.table(
        {
            "half": np.linspace(0, 1, NUM_ROWS),
            "whole": np.arange(NUM_ROWS),
            "word": [("short", "quite a lot longer than that")[n % 2] for n in range(NUM_ROWS)],
            "note": ["y" * (n % 300) for n in range(NUM_ROWS)],
            "tags": [[n] * (n % 40) for n in range(NUM_ROWS)],
            "person": [{"name": "z" * (n % 200), "age": n} for n in range(NUM_ROWS)],
        }
    )
    arguments: dict[str, Any] = request.param(rows, tmp_path_factory.mktemp("written") / "table")
    return arguments


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT half, whole FROM source",
        "SELECT note AS word, word AS note FROM source",
        "SELECT arrow_cast(note, 'LargeUtf8') AS t, CAST(half AS FLOAT) AS f FROM source",
        "SELECT tags FROM source",
        "SELECT CAST(t AS DOUBLE[]) AS d FROM (SELECT tags AS t FROM source)",
        "SELECT person['name'] AS name FROM source",
        "SELECT word FROM source",
    ],
)
def test_columns_that_are_passed_on_are_foretold_in_any_format_with_footers(
    cluster: LocalCluster, dataset_name: str, written: dict[str, Any], sql: str
) -> None:
    spec = DatasetSpec(dataset_name, sql=sql, **written)
    client = CacheClient(cluster.endpoint)

    forecast = client.plan(spec)
    info = client.load(spec)

    assert forecast.num_bytes == pytest.approx(info.num_bytes, rel=0.05)


def test_the_time_of_a_load_is_foretold_by_the_last_one_that_took_any(
    table: Path, tmp_path: Path
) -> None:
    values = np.zeros((1 << 20,))
    large = tmp_path / "large.parquet"
    pq.write_table(pa.table({name: values for name in "abcd"}), large, row_group_size=1 << 17)
    with LocalCluster(2) as cluster:
        client = CacheClient(cluster.endpoint)
        client.load(DatasetSpec("small", table))
        spec = DatasetSpec("t", large, target_shard_bytes="4MiB")

        before = client.plan(spec).load_s
        client.load(spec)
        spec = DatasetSpec("not-loaded", large, target_shard_bytes="4MiB")
        two, four = client.plan(spec), client.plan(spec, num_nodes=4)

    assert before is None
    assert two.load_s is not None and four.load_s is not None
    assert 0 < two.load_s < 60
    assert four.load_s == pytest.approx(two.load_s / 2)


def test_the_steps_of_a_job_are_foretold(
    client: CacheClient, cluster: LocalCluster, dataset_name: str, table: Path
) -> None:
    spec = DatasetSpec(dataset_name, table, columns=["half", "whole"])

    forecast = client.plan(spec, world_size=3, batch_size=64)
    client.load(spec)

    dataset = CacheIterableDataset(
        dataset_name, cache=cluster.endpoint, batch_size=64, rank=0, world_size=3
    )
    assert forecast.steps_per_epoch == len(dataset)
    assert forecast.step_bytes == 64 * (8 + 8)


def test_the_nodes_that_a_memory_limit_needs_are_foretold(client: CacheClient, table: Path) -> None:
    spec = DatasetSpec("t", table, columns=["half"], replicas=2, target_shard_bytes="10KB")

    one = client.plan(spec, num_nodes=2, memory_limit_bytes=200_000)
    few = client.plan(spec, num_nodes=2, memory_limit_bytes=100_000)
    none = client.plan(spec, num_nodes=2, memory_limit_bytes=5_000)

    assert one.node_bytes == (160_000, 160_000) and one.fits and one.nodes_needed == 2
    assert few.nodes_needed == 4 and not few.fits
    assert none.nodes_needed is None and not none.fits
    again = client.plan(spec, num_nodes=4, memory_limit_bytes=100_000)
    assert again.fits and len(again.node_bytes) == 4


def test_the_memory_that_a_load_takes_beside_the_shards_is_foretold(
    client: CacheClient, table: Path, tmp_path: Path
) -> None:
    rows = pa.concat_tables([pq.read_table(table)] * 8)  # in no small file
    groups = {}
    for name, group_rows in (("few", len(rows)), ("many", 10_000)):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(
            rows, path, row_group_size=group_rows, use_dictionary=False, compression="none"
        )
        groups[name] = path

    def foretold(path: Path, **options: Any) -> control_forecast.LoadForecast:
        return client.plan(DatasetSpec("t", path, **options))

    few = foretold(groups["few"], columns=["whole", "half"])
    assert few.load_memory_bytes == load_bytes(of_columns(groups["few"], ("whole", "half")))
    many = foretold(groups["many"])
    filtered = foretold(groups["many"], filter="whole > 5")
    fixed = rows.select(FIXED)
    placed = Layout(logical_schema(fixed.schema)).fixed_row_bytes * len(rows)
    assert filtered.load_memory_bytes == many.load_memory_bytes + placed
    query = foretold(groups["few"], sql="SELECT max(whole) AS most FROM source")
    assert query.load_memory_bytes == load_bytes(of_columns(groups["few"], ("whole",)))
    for forecast in (few, query):
        shown = dict(control_forecast.forecast_facts(forecast))["memory to load"]
        assert shown.startswith(f"about {size(forecast.load_memory_bytes)}")


def of_columns(path: Path, names: Sequence[str]) -> int:
    """What the one row group of a file takes as it is stored, of some columns."""
    footer = pq.read_metadata(path)
    assert footer.num_row_groups == 1
    group = footer.row_group(0)
    chunks = [group.column(index) for index in range(group.num_columns)]
    return sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema in names)


def test_a_load_that_cannot_fit_is_refused_with_the_forecast(tmp_path: Path, table: Path) -> None:
    with LocalCluster(2, memory_limit_bytes=200_000) as cluster:
        client = CacheClient(cluster.endpoint)
        spec = DatasetSpec("t", table, columns=FIXED, target_shard_bytes="10KB")
        forecast = client.plan(spec)

        with pytest.raises(LoadError) as caught:
            client.load(spec)

        planned = cachectl("plan", as_yaml(tmp_path, spec), "--endpoint", cluster.endpoint)
        more = cachectl("plan", tmp_path / "t.yaml", "--nodes", 9, "--endpoint", cluster.endpoint)

        assert not forecast.fits and forecast.memory_limit_bytes == 200_000
        assert forecast.refusal == str(caught.value)
        assert (planned.returncode, more.returncode) == (EXIT_DATA, 0)
        assert "it does not fit" in planned.stdout and forecast.refusal in planned.stderr
        assert f"needs {forecast.nodes_needed} nodes of that limit" in str(caught.value)
        assert f"about {forecast.num_bytes} bytes" in str(caught.value)
        assert client.datasets() == []


def test_a_load_is_not_refused_for_what_was_guessed_or_may_be_dropped(
    tmp_path: Path, table: Path
) -> None:
    with LocalCluster(1, memory_limit_bytes=300_000) as cluster:
        client = CacheClient(cluster.endpoint)
        guessed = DatasetSpec("t", table, sql="SELECT CAST(small AS VARCHAR) AS s FROM source")
        filtered = DatasetSpec("u", table, columns=["half", "whole"], filter="whole < 10")

        for spec in (guessed, filtered):
            forecast = client.plan(spec)
            info = client.load(spec)

            assert forecast.num_bytes > 300_000 > info.num_bytes
            assert forecast.fits is None


def as_yaml(directory: Path, spec: DatasetSpec) -> Path:
    path = directory / f"{spec.name}.yaml"
    columns = list(spec.columns or ())
    written: dict[str, Any] = {
        "name": spec.name,
        "source": list(spec.tables[0].source),
        "columns": columns,
    }
    written["target_shard_bytes"] = spec.target_shard_bytes
    path.write_text(yaml.safe_dump(written))
    return path


def test_what_a_dataset_of_the_cache_leaves_no_room_for_is_refused_by_its_plan_too(
    table: Path,
) -> None:
    with LocalCluster(1, memory_limit_bytes=200_000) as cluster:
        client = CacheClient(cluster.endpoint)
        client.load(DatasetSpec("first", table, columns=FIXED[:1]))
        second = DatasetSpec("second", table, columns=FIXED)
        refused = client.plan(second).refusal

        with pytest.raises(LoadError) as caught:
            client.load(second)

        assert refused == str(caught.value) and "which holds" in refused
        assert client.plan(DatasetSpec("first", table, columns=FIXED[:1])).refusal == ""


def _written(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources that no load can read; metadata tell it."""
    root = tmp_path_factory.mktemp("faulty")
    rows = pa.table({"row": pa.array(range(8)), "price": pa.array([0.5] * 8), "s": ["a"] * 8})
    text = pa.array(["a"] * 8)
    others = {
        "good": rows,
        "types": rows.set_column(1, "price", text),
        "missing": rows.drop_columns(["price"]),
        "wider": rows.set_column(1, "price", pa.array([2**60 + 1] * 8)),
        "nulls": rows.set_column(1, "price", pa.array([None, *[0.5] * 7])),
    }
    for name, other in others.items():
        _written(rows, root / name / "a.parquet")
        _written(other, root / name / "b.parquet")
    _written(pa.table([text, text], names=["a", "a"]), root / "twice" / "a.parquet")
    for name, content in {"words.parquet": b"no Parquet" * 9, "nothing.parquet": b""}.items():
        (root / name).write_bytes(content)
    (root / "cut.parquet").write_bytes((root / "good" / "a.parquet").read_bytes()[:300])
    (root / "plain.csv").write_text("a,b\n1,2\n")
    (root / "cells.csv").write_text("a,b\n1,2\n3,4,5\n")
    (root / "none").mkdir()
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    with pa.ipc.new_file(str(root / "union.arrow"), pa.schema([("u", union.type)])) as file:
        file.write_table(pa.table({"u": union}))
    return root


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("nowhere", {}, "does not exist"),
        ("none", {}, "holds no files of a known format"),
        ("words.parquet", {}, "cannot read the Parquet footer"),
        ("nothing.parquet", {}, "file size is 0 bytes"),
        ("cut.parquet", {}, "cannot read the Parquet footer"),
        ("good/a.parquet", {"format": "csv"}, "it is Parquet: say format: parquet"),
        ("cells.csv", {}, "line 3"),
        ("types", {}, "price is string instead of double"),
        ("missing", {}, "price missing; missing_columns: null makes them null"),
        ("wider", {}, "price is int64 instead of double"),
        ("twice", {}, "several columns are named 'a'"),
        ("union.arrow", {}, "cannot be stored"),
        ("nulls", {"nulls": "refuse"}, "column 'price' holds 1 null"),
        ("good", {"columns": ["colour"]}, "No field named colour"),
        ("good", {"filter": "colour > 1"}, "No field named colour"),
        ("good", {"filter": "price"}, "non-boolean predicate"),
        ("good", {"sql": "SELECT * FROM other"}, "no table 'other'"),
        ("good", {"sql": "SELECT row + s AS x FROM source"}, "Cannot coerce"),
        ("plain.csv", {"types": {"colour": "int64"}}, "types names the column 'colour'"),
    ],
)  # fmt: skip
def test_a_fault_that_metadata_tell_is_told_by_the_plan_as_by_the_load(
    client: CacheClient, faulty: Path, source: str, options: dict[str, Any], says: str
) -> None:
    spec = DatasetSpec("faulty", faulty / source, **options)
    told = []
    for ask in (client.plan, client.load):
        with pytest.raises((LoadError, RequestError)) as caught:
            ask(spec)
        told.append((caught.type, str(caught.value)))

    assert told[0] == told[1] and says in told[0][1]
    assert "faulty" not in {info.name for info in client.datasets()}


def test_a_plan_loads_nothing_and_names_what_is_wrong(
    client: CacheClient, table: Path, tmp_path: Path
) -> None:
    before = {info.name for info in client.datasets()}

    client.plan(DatasetSpec("planned-only", table))
    with pytest.raises(LoadError, match="nowhere"):
        client.plan(DatasetSpec("planned-only", tmp_path / "nowhere"))
    with pytest.raises(RequestError, match="colour"):
        client.plan(DatasetSpec("planned-only", table, columns=["colour"]))
    with pytest.raises(
        ConfigError,
        match=r"num_nodes must be at least 1, got -1; batch_size must be at least 1, got 0",
    ):
        client.plan(DatasetSpec("planned-only", table), batch_size=0, num_nodes=-1)
    many: Any = {"num_nodes": 1.5, "memory_limit_bytes": 2**64, "world_size": "2"}
    with pytest.raises(ConfigError) as caught:
        client.plan(DatasetSpec("planned-only", table), **many)
    for words in ("num_nodes must be an integer, got 1.5", f"got {2**64}", "got '2'"):
        assert words in str(caught.value)

    assert {info.name for info in client.datasets()} == before


@pytest.mark.parametrize(
    ("sql", "way", "because"),
    [
        (
            "SELECT whole FROM source WHERE flag",
            "split by split",
            "each row is computed independently",
        ),
        ("SELECT flag, count(*) AS n FROM source GROUP BY flag ORDER BY flag", "whole", "ORDER BY"),
        ("SELECT max(half) AS m FROM source", "whole", "an aggregate"),
    ],
)
def test_explain_says_which_way_a_query_goes_and_why(
    client: CacheClient, table: Path, sql: str, way: str, because: str
) -> None:
    forecast = client.plan(DatasetSpec("t", table, sql=sql))

    assert forecast.sql_goes.startswith(way)
    assert forecast.whole == (way == "whole")
    assert because in forecast.why
    assert forecast.ordered


def test_a_join_with_a_small_table_goes_split_by_split(
    client: CacheClient, table: Path, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"small": [1, 2], "name": ["x", "y"]}), tmp_path / "names.parquet")
    forecast = client.plan(
        DatasetSpec(
            "t",
            sources={"big": str(table), "names": str(tmp_path / "names.parquet")},
            sql="SELECT b.whole, n.name FROM big b JOIN names n ON b.small = n.small",
            allow_unordered=True,
        )
    )

    assert not forecast.whole and not forecast.ordered
    assert [(t.name, t.by_split, t.columns) for t in forecast.tables] == [
        ("big", True, ("small", "whole")),
        ("names", False, ("small", "name")),
    ]
    assert "every node reads 'names' whole" in forecast.why


def test_a_join_is_foretold_and_cut_by_the_columns_that_come_of_it(
    client: CacheClient, table: Path, tmp_path: Path, dataset_name: str
) -> None:
    wide = {f"f{n}": np.random.default_rng(n).uniform(size=100) for n in range(50)}
    pq.write_table(pa.table({"small": np.arange(100), **wide}), tmp_path / "wide.parquet")
    spec = DatasetSpec(
        dataset_name,
        sources={"big": str(table), "wide": str(tmp_path / "wide.parquet")},
        sql="SELECT b.whole, w.* EXCLUDE (small) FROM big b JOIN wide w ON b.small = w.small",
        allow_unordered=True,
        target_shard_bytes=1024**2,
    )

    forecast = client.plan(spec)
    info = client.load(spec)

    assert forecast.num_bytes == pytest.approx(info.num_bytes, rel=0.10)
    assert info.num_bytes / info.num_shards < 2 * 1024**2


def test_what_nobody_can_foretell_is_said_to_be_unknown(
    client: CacheClient, table: Path, tmp_path: Path
) -> None:
    def plan(sql: str, **arguments: Any) -> control_forecast.LoadForecast:
        spec = DatasetSpec("t", **{"source": table, **arguments}, sql=sql)
        return client.plan(spec, memory_limit_bytes=10_000_000)

    (tmp_path / "a.csv").write_text("n,word\n" + "1,one\n" * 100)
    spread = plan("SELECT unnest(tags) AS tag, word FROM source")
    total = plan("SELECT word, count(*) AS n FROM source GROUP BY word ORDER BY word")
    made = plan("SELECT upper(note) AS loud, note AS same, half FROM source WHERE half < 0.5")
    text = plan("SELECT n FROM source", source=tmp_path / "a.csv")
    plain = plan("SELECT note, tags AS more FROM source")

    assert spread.makes_rows and spread.num_rows is None
    assert total.whole and total.num_rows is None and total.num_shards == 0
    for forecast in (spread, total, made):
        assert forecast.fits is None and forecast.nodes_needed is None
    assert made.guessed_columns == ("loud",) and not made.bytes_known and plain.bytes_known
    assert text.tables[0].bytes_by == "the sizes of the files"
    assert plain.guessed_columns == () and plain.tables[0].bytes_by == ""
    shown = {
        forecast.why: dict(control_forecast.forecast_facts(forecast))
        for forecast in (spread, total)
    }
    assert "unknown" in shown[spread.why]["decoded"]
    assert "unknown" in shown[spread.why]["nodes needed"]
    assert "not known" in shown[total.why]["result"]
    assert "column loud" in dict(control_forecast.forecast_facts(made))["guessed"]
    assert dict(control_forecast.forecast_facts(text))["decoded"].startswith("about ")


def cachectl(*arguments: object) -> subprocess.CompletedProcess[str]:
    return forked_python.run(
        [sys.executable, "-m", "cache_client", *map(str, arguments)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_cachectl_plan_and_explain_print_it_for_people_and_programs(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 1000, files=4)
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"name: t\nsource: {source}\nfilter: a < 100\ntarget_shard_bytes: 1\n")
    at = ("--endpoint", cluster.endpoint)

    shown = cachectl("plan", spec, *at, "--nodes", 3, "--ranks", 2, "--memory-limit", "1GiB")
    facts: dict[str, Any] = json.loads(cachectl("plan", spec, *at, "--json").stdout)
    way = cachectl("explain", spec, *at)

    assert shown.returncode == 0, shown.stderr
    for fact in ("1,000 before the query", "on 3 nodes", "4 shards"):
        assert fact in shown.stdout
    assert facts["num_rows"] == 1000 and facts["fits"] is True
    assert facts["schema"]["row"] == "int64"
    assert "split by split" in way.stdout and "each row is computed independently" in way.stdout
    bad = cachectl("plan", spec, *at, "--memory-limit", "lots")
    assert bad.returncode == EXIT_CONFIG and "'lots'" in bad.stderr
    long = cachectl("plan", spec, *at, "--memory-limit", "99999PiB")
    assert long.returncode == EXIT_CONFIG and "got '99999PiB'" in long.stderr
    many = cachectl("plan", spec, *at, "--nodes", 5_000_000_000)
    assert many.returncode == 2 and "'--nodes': Input should be less" in many.stderr
