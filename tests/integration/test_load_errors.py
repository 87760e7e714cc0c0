"""Loads that cannot work, from the client to the nodes and back: named, cleaned up, survived."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from cache_client import (
    CacheClient,
    ConfigError,
    DatasetInfo,
    DatasetNotFoundError,
    DatasetSpec,
    LoadError,
    RequestError,
)
from cache_server import LocalCluster
from tests.conftest import numbered_table, write_numbered
from tests.waiting import wait_until

WAIT_S = 60.0


@pytest.fixture(scope="module")
def neighbour(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Another dataset, which every failure here must leave alone."""
    client = CacheClient(cluster.endpoint)
    name = "neighbour-of-errors"
    client.load(DatasetSpec(name, write_numbered(tmp_path_factory.mktemp("neighbour"), 20)))
    yield name
    client.drop(name)


@pytest.fixture
def unharmed(cluster: LocalCluster, client: CacheClient, neighbour: str) -> Callable[[str], None]:
    """Checks that a load left nothing behind, in the caches and for the other dataset."""

    def check(name: str) -> None:
        folders = [node.cache_dir / name for node in cluster.nodes]
        wait_until(lambda: not any(f.exists() for f in folders), WAIT_S, f"no files of {name}")
        assert client.head(neighbour, 20).column("row").to_pylist() == [*range(20)]

    return check


def corrupt(path: Path, row_group: int) -> None:
    """Overwrites the first page header of one row group; footer, size and mtime stay as they were.

    So the plan is made without a complaint, and the load of that row group fails.
    """
    stat = path.stat()
    chunk = pq.read_metadata(path).row_group(row_group).column(0)
    offset = chunk.dictionary_page_offset or chunk.data_page_offset
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 64)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


# -- refused before anything is loaded -------------------------------------------------------------


def _missing(directory: Path) -> Path:
    return directory / "nowhere"


def _empty_folder(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _glob_of_nothing(directory: Path) -> Path:
    return directory / "*.parquet"


def _garbage(directory: Path) -> Path:
    directory.mkdir()
    path = directory / "garbage.parquet"
    path.write_bytes(b"PAR1 this is no Parquet at all PAR1")
    return path


def _truncated(directory: Path) -> Path:
    write_numbered(directory, 1000)
    path = directory / "part-000.parquet"
    os.truncate(path, path.stat().st_size // 2)
    return path


def _empty_file(directory: Path) -> Path:
    directory.mkdir()
    path = directory / "empty.parquet"
    path.touch()
    return path


def _columns_that_differ(directory: Path) -> Path:
    write_numbered(directory, 10)
    pq.write_table(numbered_table(10).drop_columns(["label"]), directory / "part-001.parquet")
    return directory


def _columns_of_one_name(directory: Path) -> Path:
    path = directory / "twice.parquet"
    directory.mkdir()
    pq.write_table(pa.table([[1], [2], [3]], names=["a", "b", "a"]), path)
    return path


def _name_with_nul(directory: Path) -> Path:
    directory.mkdir()
    pq.write_table(pa.table({"a": [{"b\0c": 1}]}), directory / "nul.parquet")
    return directory


def _key_with_nul(directory: Path) -> Path:
    directory.mkdir()
    (directory / "nul.jsonl").write_text(json.dumps({"b\0c": 1}))
    return directory


@pytest.mark.parametrize(
    ("make", "quotes"),
    [
        (_missing, ["nowhere", "does not exist"]),
        (_empty_folder, ["source", "holds no"]),
        (_glob_of_nothing, ["*.parquet", "matches no file"]),
        (_garbage, ["garbage.parquet", "footer"]),
        (_truncated, ["part-000.parquet", "footer"]),
        (_empty_file, ["empty.parquet", "footer"]),
        (_columns_that_differ, ["part-001.parquet", "label", "missing"]),
        (_columns_of_one_name, ["twice.parquet", "several columns are named 'a'"]),
        (_name_with_nul, ["nul.parquet", r"'b\x00c' has a NUL character"]),
        (_key_with_nul, ["nul.jsonl", r"'b\x00c' has a NUL character"]),
    ],
    ids=lambda value: getattr(value, "__name__", "")[1:],
)
def test_a_source_that_cannot_be_read_is_refused_with_its_path_and_the_reason(
    client: CacheClient,
    unharmed: Callable[[str], None],
    tmp_path: Path,
    make: Callable[[Path], Path],
    quotes: list[str],
) -> None:
    source = make(tmp_path / "source")

    with pytest.raises(LoadError) as caught:
        client.load(DatasetSpec("unreadable", source))

    for quote in quotes:
        assert quote in str(caught.value)
    assert "unreadable" not in {info.name for info in client.datasets()}
    unharmed("unreadable")


@pytest.mark.parametrize(
    ("arguments", "quotes"),
    [
        ({"columns": ["row", "colour"]}, ["colour"]),
        ({"filter": "colour > 3"}, ["colour"]),
        ({"sql": "SELECT colour FROM source"}, ["colour"]),
        ({"sql": "SELEC row FROM source"}, ["SELEC"]),
        ({"sql": "SELECT row FROM elsewhere"}, ["elsewhere"]),
        ({"sql": "SELECT nosuch(row) FROM source"}, ["nosuch"]),
        ({"sql": "CREATE TABLE t (a INT)"}, ["CREATE TABLE t"]),
        ({"sql": "DROP TABLE source"}, ["DROP TABLE source"]),
        ({"sql": "INSERT INTO source VALUES (1)"}, ["INSERT INTO source"]),
        ({"sql": "COPY source TO '/tmp/stolen.parquet'"}, ["COPY source"]),
        ({"sql": "SET datafusion.execution.batch_size = 1"}, ["SET datafusion"]),
        (
            {"sql": "SELECT label, sum(a) AS s FROM source GROUP BY label"},
            ["defined order", "ORDER BY"],
        ),
        ({"sql": "SELECT row FROM source LIMIT 3"}, ["LIMIT", "allow_unordered: true"]),
        ({"sql": "SELECT DISTINCT label FROM source"}, ["DISTINCT", "defined order"]),
        ({"sql": "SELECT row_number() OVER () AS n FROM source"}, ["a window function"]),
        ({"sql": "SELECT row FROM (SELECT row FROM source ORDER BY a) q"}, ["orders nothing"]),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_a_query_that_cannot_be_run_or_has_no_order_is_refused_by_name(
    client: CacheClient,
    unharmed: Callable[[str], None],
    tmp_path: Path,
    arguments: dict[str, object],
    quotes: list[str],
) -> None:
    source = write_numbered(tmp_path / "source", 10)

    with pytest.raises(RequestError) as caught:
        client.load(DatasetSpec("refused", source, **arguments))  # type: ignore[arg-type]

    for quote in quotes:
        assert quote.lower() in str(caught.value).lower()
    assert "refused" not in {info.name for info in client.datasets()}
    unharmed("refused")


def test_a_source_of_a_scheme_that_is_not_served_is_refused_by_name(client: CacheClient) -> None:
    with pytest.raises(RequestError, match="ftp://host/table"):
        client.load(DatasetSpec("remote", "ftp://host/table.parquet"))


def test_a_spec_that_is_none_never_reaches_the_cache(client: CacheClient, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("name: x y\nsource: []\ncolour: red\n")

    with pytest.raises(ConfigError, match=r"spec\.yaml.*'colour'"):
        client.load(path)


# -- loads that fail -------------------------------------------------------------------------------


def failed_load(client: CacheClient, spec: DatasetSpec) -> str:
    """The reason why a load failed: as raised, and as the dataset says afterwards."""
    with pytest.raises(LoadError) as caught:
        client.load(spec)
    info = client.describe(spec.name)
    assert info.state == "failed"
    assert info.error == str(caught.value)
    assert spec.name in info.error
    with pytest.raises(LoadError) as read:
        client.head(spec.name)
    assert str(read.value) == info.error
    return info.error


def test_a_corrupt_page_in_the_middle_fails_the_dataset_and_no_shard_is_left_anywhere(
    cluster: LocalCluster,
    client: CacheClient,
    unharmed: Callable[[str], None],
    dataset_name: str,
    tmp_path: Path,
) -> None:
    source = write_numbered(tmp_path / "source", 40_000, files=3, row_group_size=2_000)
    corrupt(source / "part-001.parquet", row_group=3)

    reason = failed_load(client, DatasetSpec(dataset_name, source, target_shard_bytes="64KiB"))

    assert f"cannot load {source / 'part-001.parquet'} (split" in reason
    unharmed(dataset_name)


def test_refused_nulls_fail_the_load_with_the_coalesce_of_their_column(
    client: CacheClient,
    unharmed: Callable[[str], None],
    dataset_name: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "nulls.parquet"
    x = pa.array([1, None, 3, None], pa.int32())
    pq.write_table(pa.table({"x": x, "ones": pa.array([1, 1, 2, 1], pa.int32())}), path)
    sql = "SELECT COALESCE(x, 0) AS x, x / ones AS ratio FROM source"

    some = DatasetSpec(dataset_name, path, filter="ones > 0", nulls="refuse")
    reason = failed_load(client, some)
    computed = failed_load(client, DatasetSpec(dataset_name, path, sql=sql, nulls="refuse"))

    assert str(path) in reason
    assert "column 'x' holds 2 nulls" in reason and 'COALESCE("x", ...) AS "x"' in reason
    assert "column 'ratio' holds 2 nulls" in computed and "COALESCE((x / ones), ...)" in computed
    unharmed(dataset_name)
    assert client.load(DatasetSpec(dataset_name, path)).nulls == {"x": 2}


def test_a_value_that_does_not_fit_its_column_fails_the_load_with_file_and_value(
    client: CacheClient,
    unharmed: Callable[[str], None],
    dataset_name: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "late.csv"
    csv.write_csv(pa.table({"x": [*range(5_000)]}), path)
    with path.open("a") as file:
        file.write("surprise\n")  # far behind the rows that tell the types

    reason = failed_load(client, DatasetSpec(dataset_name, path))

    assert str(path) in reason and "surprise" in reason
    unharmed(dataset_name)


def test_a_query_that_fails_on_some_row_fails_the_load_with_the_split(
    client: CacheClient,
    unharmed: Callable[[str], None],
    dataset_name: str,
    tmp_path: Path,
) -> None:
    source = write_numbered(tmp_path / "source", 40, files=4)

    reason = failed_load(
        client,
        DatasetSpec(
            dataset_name, source, sql="SELECT 1 / (row - 25) AS x FROM source", target_shard_bytes=1
        ),
    )

    assert str(source / "part-002.parquet") in reason
    assert "divide by zero" in reason.lower()
    unharmed(dataset_name)


def test_a_lake_table_whose_metadata_counts_its_rows_wrong_fails_the_load(
    client: CacheClient, dataset_name: str, tmp_path: Path, unharmed: Callable[[str], None]
) -> None:
    write_deltalake(str(tmp_path), pa.table({"row": range(5)}))
    (commit,) = (tmp_path / "_delta_log").glob("*.json")
    text = commit.read_text()
    assert text.count('numRecords\\":5') == 1
    commit.write_text(text.replace('numRecords\\":5', 'numRecords\\":7'))
    with pytest.raises(LoadError, match=r"has 5 rows, but the metadata .* says 7"):
        client.load(DatasetSpec(dataset_name, str(tmp_path), format="delta"))
    unharmed(dataset_name)


def test_a_failed_load_that_is_tried_again_on_the_same_bytes_fails_again(
    client: CacheClient, unharmed: Callable[[str], None], dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 40, files=4)
    corrupt(source / "part-002.parquet", row_group=0)
    spec = DatasetSpec(dataset_name, source, target_shard_bytes=1)

    first, second = failed_load(client, spec), failed_load(client, spec)

    assert first == second
    unharmed(dataset_name)


def test_a_mended_file_is_another_version_which_loads(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 40, files=4)
    corrupt(source / "part-002.parquet", row_group=0)
    spec = DatasetSpec(dataset_name, source, target_shard_bytes=1)
    failed_load(client, spec)
    failed = client.describe(dataset_name).fingerprint

    write_numbered(source, 40, files=4)
    info = client.load(spec)

    assert info.state == "ready"
    assert info.fingerprint != failed
    assert client.head(dataset_name, 40).column("row").to_pylist() == [*range(40)]


def test_a_load_that_failed_for_a_passing_reason_succeeds_when_asked_for_again(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 40, files=4)
    victim = source / "part-002.parquet"
    good, stat = victim.read_bytes(), victim.stat()
    corrupt(victim, row_group=0)
    spec = DatasetSpec(dataset_name, source, target_shard_bytes=1)
    failed_load(client, spec)
    failed = client.describe(dataset_name).fingerprint

    victim.write_bytes(good)
    os.utime(victim, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    info = client.load(spec)

    assert (info.state, info.fingerprint, info.error) == ("ready", failed, None)
    assert client.head(dataset_name, 40).column("row").to_pylist() == [*range(40)]


def test_a_failed_dataset_can_be_dropped(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 10)
    corrupt(source / "part-000.parquet", row_group=0)
    failed_load(client, DatasetSpec(dataset_name, source))

    client.drop(dataset_name)

    with pytest.raises(DatasetNotFoundError):
        client.describe(dataset_name)
    with pytest.raises(DatasetNotFoundError):
        client.drop(dataset_name)


def test_load_without_waiting_returns_at_once_and_the_failure_is_told_later(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 10)
    corrupt(source / "part-000.parquet", row_group=0)

    info = client.load(DatasetSpec(dataset_name, source), wait=False)

    assert info.state == "loading"
    assert (info.num_rows, info.num_shards) == (0, 1)
    wait_until(lambda: client.describe(dataset_name).state == "failed", WAIT_S, "failed")


# -- memory ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Iterator[LocalCluster]:
    """Two nodes of 100 KiB each."""
    with LocalCluster(nodes=2, memory_limit_bytes=100 * 1024) as cluster:
        yield cluster


def test_a_table_larger_than_the_caches_is_refused_before_it_is_loaded_with_the_numbers(
    small: LocalCluster, tmp_path: Path
) -> None:
    client = CacheClient(small.endpoint)
    source = write_numbered(tmp_path / "source", 20_000, files=4)

    with pytest.raises(LoadError) as caught:
        client.load(DatasetSpec("large", source, target_shard_bytes=1))

    for quote in ("'large' cannot fit", "memory limit of 102400", "replicas=1"):
        assert quote in str(caught.value)
    assert client.datasets() == []


def loaded(client: CacheClient, spec: DatasetSpec) -> DatasetInfo | None:
    try:
        return client.load(spec)
    except LoadError:
        return None


def test_a_load_that_turns_out_too_large_fails_and_frees_what_it_took(
    small: LocalCluster, tmp_path: Path
) -> None:
    client = CacheClient(small.endpoint)
    source = write_numbered(tmp_path / "source", 20_000, files=8)
    spec = DatasetSpec("large", source, filter="row >= 0", target_shard_bytes=1)

    with pytest.raises(LoadError, match="memory limit of 102400 bytes"):
        client.load(spec)

    wait_until(
        lambda: not any((node.cache_dir / "large").exists() for node in small.nodes),
        WAIT_S,
        "nothing is left",
    )
    client.drop("large")
    wait_until(lambda: not any(n.stored_bytes for n in client.nodes()), WAIT_S, "no bytes")
    # A node that had not begun its part when the other failed may seal a shard yet, and drop it.
    smaller = DatasetSpec("fits", source, filter="row < 2000", target_shard_bytes=1)
    fits = wait_until(
        lambda: loaded(client, smaller),
        WAIT_S,
        "room for a smaller one",
    )
    assert fits.num_rows == 2000
    client.drop("fits")


# -- tables that are odd, and work -----------------------------------------------------------------


def test_a_filter_that_keeps_nothing_gives_a_ready_dataset_of_no_rows(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 40, files=4)

    info = client.load(DatasetSpec(dataset_name, source, filter="row < 0", target_shard_bytes=1))

    assert (info.state, info.num_rows, info.num_shards) == ("ready", 0, 4)
    assert client.head(dataset_name).num_rows == 0
    assert client.head(dataset_name).schema.names == ["row", "a", "b", "label", "text"]


def test_a_file_without_rows_is_a_ready_dataset_of_no_rows(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    info = client.load(DatasetSpec(dataset_name, write_numbered(tmp_path / "source", 0)))

    assert (info.state, info.num_rows) == ("ready", 0)
    assert client.head(dataset_name).num_rows == 0


def test_a_filter_that_empties_some_shards_leaves_the_others_in_order(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 40, files=8)

    info = client.load(
        DatasetSpec(dataset_name, source, filter="row IN (7, 8, 21)", target_shard_bytes=1)
    )

    assert (info.num_rows, info.num_shards) == (3, 8)
    assert client.head(dataset_name).column("row").to_pylist() == [7, 8, 21]


def test_one_row_works(client: CacheClient, dataset_name: str, tmp_path: Path) -> None:
    info = client.load(DatasetSpec(dataset_name, write_numbered(tmp_path / "source", 1)))

    assert (info.num_rows, info.num_shards) == (1, 1)
    assert client.head(dataset_name).to_pylist() == numbered_table(1).to_pylist()


def test_more_nodes_than_row_groups_works(
    cluster: LocalCluster, client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 1000, row_group_size=1000)

    info = client.load(DatasetSpec(dataset_name, source, target_shard_bytes=1))

    assert (info.num_rows, info.num_shards) == (1000, 1)
    assert len(info.placement) < len(cluster.nodes)
    assert client.head(dataset_name, 1000).column("row").to_pylist() == [*range(1000)]


def test_a_file_of_many_small_row_groups_is_spread_over_the_nodes_in_order(
    cluster: LocalCluster, client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 1000, row_group_size=100)

    info = client.load(DatasetSpec(dataset_name, source, target_shard_bytes=1))

    assert info.num_rows == 1000
    assert {node for nodes in info.placement.values() for node in nodes} == {
        node.node_id for node in cluster.nodes
    }
    assert client.head(dataset_name, 1000).column("row").to_pylist() == [*range(1000)]
