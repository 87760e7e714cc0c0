"""What a job reads of a version other than each row once, on real nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    ConfigError,
    DatasetSpec,
    RequestError,
    StaleVersionError,
    __main__,
)
from cache_client.job import ranks as job_ranks
from cache_client.reading import shard_maps
from cache_client.view_options import columns
from cache_server import LocalCluster
from tests.conftest import rows_of, write_numbered
from tests.job_arguments import grouped
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.usefixtures("forked_workers"),
]

ROWS, FILES = 1003, 5
USERS = [None if row % 50 == 7 else f"user {row % 97}" for row in range(ROWS)]
SPLIT = {"train": 0.8, "val": 0.1, "test": 0.1}
WHERE = "price > 100 AND city = 'Oslo'"
KEPT = [row for row in range(ROWS) if 0.5 * row > 100 and row % 3 == 0]


@pytest.fixture(scope="module")
def table(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``row`` is the row id; five shards, each on both nodes."""
    source, row = tmp_path_factory.mktemp("views"), np.arange(ROWS)
    rows = pa.table(
        {
            "row": row,
            "price": (row * 0.5).astype(np.float32),
            "city": [["Oslo", "Bergen", None][number % 3] for number in row],
            "user": USERS,
            "group": pa.array(row % 11, pa.int32()),
            "day": pa.array(row.astype(np.int32), pa.date32()),
        }
    )
    bounds = [ROWS * index // FILES for index in range(FILES + 1)]
    for index in range(FILES):
        part = rows.slice(bounds[index], bounds[index + 1] - bounds[index])
        pq.write_table(part, source / f"{index}.parquet")
    client = CacheClient(cluster.endpoint)
    client.load(DatasetSpec("views", source, target_shard_bytes=1, replicas=2))
    yield "views"
    client.drop("views")


def make(cluster: LocalCluster, **options: Any) -> CacheIterableDataset:
    given = {"batch_size": 7, "columns": ["row"], "endpoint": cluster.endpoint, **options}
    return CacheIterableDataset("views", **grouped(**given))


def version(cluster: LocalCluster, name: str = "views", **options: Any) -> columns.VersionNodes:
    credentials = job_ranks.find_credentials(cluster.endpoint)
    shards = shard_maps.wait_for_shard_map(cluster.endpoint, name, (), 20, credentials)
    return columns.VersionNodes(cluster.endpoint, shards, credentials, **options)


@pytest.mark.parametrize("local", [True, False])
def test_ranks_and_workers_read_the_rows_of_a_filter_once_in_one_order(
    table: str, cluster: LocalCluster, local: bool
) -> None:
    options: dict[str, Any] = {"where": WHERE, "shuffle": True, "seed": 3, "local": local}
    alone = make(cluster, **options)

    assert (alone.num_samples, len(alone), alone.num_rows) == (len(KEPT), 39, ROWS)
    order = rows_of(alone)
    assert sorted(order) == KEPT != order
    assert rows_of(make(cluster, where=WHERE)) == KEPT
    ranks = [make(cluster, **options, rank=rank, world_size=2) for rank in range(2)]
    steps = zip(*(each.loader(num_workers=rank) for rank, each in enumerate(ranks)), strict=True)
    assert [row for step in steps for row in rows_of(step)] == order


def test_spawned_workers_read_a_view_from_one_mapped_file(
    table: str, cluster: LocalCluster
) -> None:
    dataset = make(cluster, where=WHERE)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")

    assert rows_of(loader) == KEPT


def test_a_state_resumes_a_view_with_other_ranks_and_batches_and_refuses_other_views(
    table: str, cluster: LocalCluster
) -> None:
    options: dict[str, Any] = {"where": WHERE, "shuffle": True, "split": SPLIT, "part": "train"}
    first = make(cluster, **options)
    order = rows_of(make(cluster, **options))
    batches = iter(first)
    before = rows_of(next(batches) for _ in range(5))
    state = first.state_dict()

    ranks = [make(cluster, **options, rank=r, world_size=2, batch_size=3) for r in range(2)]
    for each in ranks:
        each.load_state_dict(state)
    after = [row for step in zip(*ranks, strict=True) for row in rows_of(step)]

    assert before + after[: len(order) - len(before)] == order
    for other in (None, WHERE, "price > 101"):
        with pytest.raises(StaleVersionError):
            make(cluster, shuffle=True, where=other).load_state_dict(state)
    make(cluster, **{**options, "where": f"  {WHERE}\n"}).load_state_dict(state)


def test_a_key_never_crosses_from_one_part_or_fold_to_another(
    table: str, cluster: LocalCluster
) -> None:
    def hashed(kind: str, user: str | None, group: int) -> int:
        text = "-" if user is None else f"{len(user)}:{user},"
        text = f"{kind}:{text}{len(str(group))}:{group},"
        return int(hashlib.md5(text.encode()).hexdigest()[:16], 16)

    keys = [(USERS[row], row % 11) for row in range(ROWS)]
    split, by = {"train": 0.5, "val": 0.5}, {"split_by": ["user", "group"]}

    train = rows_of(make(cluster, split=split, part="train", **by))
    val = rows_of(make(cluster, split=split, part="val", **by))
    fold = rows_of(make(cluster, split=split, part="val", except_fold=(1, 3), **by))

    in_train = [hashed("split", *key) < 2**63 for key in keys]
    assert train == [row for row in range(ROWS) if in_train[row]]
    assert val == [row for row in range(ROWS) if not in_train[row]]
    assert fold == [row for row in val if hashed("fold", *keys[row]) * 3 >> 64 != 1]
    assert {*train} and {*val} and len(fold) < len(val)


def test_what_a_filter_keeps_of_a_list_of_rows_keeps_its_order(
    table: str, cluster: LocalCluster
) -> None:
    ids = np.random.default_rng(5).permutation(ROWS)[:300]

    assert rows_of(make(cluster, subset=ids)) == ids.tolist()
    kept = rows_of(make(cluster, subset=ids, where=WHERE))
    assert kept == [row for row in ids.tolist() if row in KEPT]


def test_a_filter_that_keeps_no_row_is_an_empty_dataset(table: str, cluster: LocalCluster) -> None:
    empty = make(cluster, where="price < 0", shuffle=True)

    assert (len(empty), empty.num_samples, list(empty)) == (0, 0, [])
    assert list(empty.loader(num_workers=1)) == []
    assert rows_of(make(cluster, subset=[])) == []


def test_bad_views_are_refused_when_the_dataset_is_made(table: str, cluster: LocalCluster) -> None:
    with pytest.raises(RequestError, match="aggregate"):
        make(cluster, where="price > avg(price)")
    with pytest.raises(RequestError, match="No field named nope"):
        make(cluster, split={"train": 0.5}, part="train", split_by=["nope"])
    with pytest.raises(ConfigError) as caught:
        make(cluster, where="", split=("dev", 1))
    for words in ("where must be SQL", "('dev', 1)"):
        assert words in str(caught.value)
    with pytest.raises(TypeError, match="were: did you mean where"):
        make(cluster, were="x")


def test_an_audit_proves_what_a_view_read(table: str, cluster: LocalCluster) -> None:
    client = CacheClient(cluster.endpoint)
    dataset = make(cluster, where=WHERE, shuffle=True, audit="reports", job="filtered")
    rows_of(dataset)

    def audits() -> int:
        return sum(len(j.audits) for j in client.jobs(audits=True) if j.name == "filtered")

    wait_until(lambda: audits() == 1, 20, "the audit record")
    result = CliRunner().invoke(__main__.app, ["audit", "filtered", "--endpoint", cluster.endpoint])
    assert result.exit_code == 0, result.output


def test_values_of_rows_come_in_row_order_from_any_replica(tmp_path: Path) -> None:
    rows = range(400)
    with LocalCluster(nodes=2) as nodes:
        client = CacheClient(nodes.endpoint)
        source = write_numbered(tmp_path / "t", 400, files=4)
        client.load(DatasetSpec("t", source, target_shard_bytes=1, replicas=2))
        wait_until(
            lambda: all(len(n) == 2 for n in client.describe("t").placement.values()),
            20,
            "two replicas of each shard",
        )
        asked = version(nodes, "t", deadline_s=20)
        assert columns.row_values(asked, "row").to_pylist() == [*rows]
        nodes.nodes[1].kill()

        assert columns.row_values(asked, "label * 2", ["row >= 390"]).to_pylist() == [
            2 * (row % 7) for row in rows if row >= 390
        ]
        assert [part.tolist() for part in columns.selected_rows(asked, "row % 50 = 3")] == [
            [3, 53]
        ] * 4
