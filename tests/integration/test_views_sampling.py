"""Weights, classes, epoch lengths, codes and joins over a cluster: exact, elastic, resumable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    ConfigError,
    DatasetSpec,
    Frequent,
    Join,
    View,
    Vocabulary,
)
from cache_protocol.errors import CacheError, StaleVersionError
from cache_server import LocalCluster
from tests.conftest import rows_of
from tests.job_arguments import grouped

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.usefixtures("forked_workers"),
]

ROWS, USERS = 240, 12
RNG = np.random.default_rng(0)
LABELS = RNG.choice(["cat", "dog", "eel"], ROWS, p=[0.7, 0.25, 0.05])
WEIGHTS = RNG.integers(0, 5, ROWS)
USER_OF = RNG.integers(0, USERS, ROWS)
AGES = RNG.integers(18, 90, USERS)
NAMES = [f"name {user}" for user in range(USERS)]


@pytest.fixture(scope="module")
def tables(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("sampled")
    clicks = pa.table(
        {
            "row": np.arange(ROWS),
            "label": LABELS,
            "weight": WEIGHTS,
            "user_id": USER_OF,
            "half": (USER_OF / 2).astype(np.float16),
            "city": pa.array([None if row % 9 == 0 else f"c{row % 5}" for row in range(ROWS)]),
        }
    )
    users = pa.table({"user_id": np.arange(USERS)[::-1], "age": AGES[::-1], "name": NAMES[::-1]})
    client = CacheClient(cluster.endpoint)
    for name, table in (("clicks", clicks), ("users", users)):
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=50)
        client.load(DatasetSpec(name, folder / f"{name}.parquet", target_shard_bytes=2000))
    yield "clicks"
    client.drop("clicks")
    client.drop("users")


def dataset(cluster: LocalCluster, **options: Any) -> CacheIterableDataset:
    options = {"columns": ["row"], "batch_size": 4, "shuffle": True, "seed": 7, **options}
    return CacheIterableDataset("clicks", **grouped(cache=cluster.endpoint, **options))


VIEWS: list[dict[str, Any]] = [
    {"weights": "weight"},
    {"weights": "weight", "replacement": False},
    {"weights": "1.0 / (1 + weight)", "epoch_rows": 50, "where": "label <> 'eel'"},
    {"per_class": "label"},
    {"per_class": "label", "epoch_rows": 31, "where": "weight > 0"},
    {"epoch_rows": 100},
    {"epoch_rows": 500, "split": {"train": 0.8}, "part": "train"},
]


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_an_epoch_is_the_same_for_any_ranks_and_workers_and_resumes_inside(
    cluster: LocalCluster, tables: str, view: dict[str, Any]
) -> None:
    whole = dataset(cluster, **view)
    whole.set_epoch(1)
    expected = rows_of(whole)
    assert len(expected) == whole.num_samples

    ranks = [dataset(cluster, rank=rank, world_size=2, **view) for rank in range(2)]
    taken = []
    for each in ranks:
        each.set_epoch(1)
    for step in zip(*ranks, strict=True):
        taken += rows_of(step)
    assert taken[: len(expected)] == expected  # a last step of one row is given to both ranks

    begun = dataset(cluster, **view)
    begun.set_epoch(1)
    batches = iter(begun)
    first = rows_of([next(batches), next(batches)])
    resumed = dataset(cluster, **{**view, "batch_size": 9})
    resumed.load_state_dict(begun.state_dict())
    assert first + rows_of(resumed.loader(num_workers=2)) == expected


def test_each_option_reads_what_it_says(cluster: LocalCluster, tables: str) -> None:
    taken = rows_of(dataset(cluster, weights="weight", replacement=False))
    assert len(set(taken)) == len(taken)
    assert WEIGHTS[taken].all()
    drawn = rows_of(dataset(cluster, weights="weight", epoch_rows=20_000, batch_size=1000))
    shares = np.bincount(drawn, minlength=ROWS) / len(drawn)
    assert np.abs(shares - WEIGHTS / WEIGHTS.sum()).max() < 0.005
    balanced = LABELS[rows_of(dataset(cluster, per_class="label"))]
    for start in range(0, len(balanced), 3):
        assert sorted(balanced[start : start + 3]) == ["cat", "dog", "eel"]
    short = dataset(cluster, epoch_rows=100)
    epochs: list[int] = []
    for epoch in range(3):
        short.set_epoch(epoch)
        epochs += rows_of(short)
    assert len(short) == 25
    assert sorted(epochs[:ROWS]) == list(range(ROWS))


def test_a_state_of_another_view_is_refused(cluster: LocalCluster, tables: str) -> None:
    state = dataset(cluster, weights="weight").state_dict()
    for view in VIEWS[1:]:
        with pytest.raises(StaleVersionError):
            dataset(cluster, **view).load_state_dict(state)


@pytest.mark.parametrize(
    ("view", "problem"),
    [
        ({"weights": "label"}, "weights='label' must give numbers, got string"),
        ({"weights": "row - 5"}, "at least 0, got -5 in 5 of 240 rows"),
        ({"per_class": "city"}, "per_class='city' is null in 27 of 240 rows"),
        ({"weights": "weight", "group_by": "label"}, "group_by and weights exclude each other"),
        ({"codes": ["town"]}, "no column 'town'"),
        ({"join": {"row": Join("users", "user_id")}}, "have no row in dataset 'users'"),
        ({"join": {"user_id": Join("users", columns=["row"])}}, "no column 'row'"),
    ],
)
def test_what_cannot_be_is_refused_when_the_dataset_is_made(
    cluster: LocalCluster, tables: str, view: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CacheError) as raised:
        dataset(cluster, **view)
    assert problem in str(raised.value)


def test_none_stands_for_an_option_that_is_left_out(cluster: LocalCluster, tables: str) -> None:
    names = ("where", "split", "subset", "weights", "per_class", "replacement", "epoch_rows",
             "pack", "group_by", "length_buckets", "pad_lists", "codes", "join")  # fmt: skip
    plain = dataset(cluster)
    assert dataset(cluster, **dict.fromkeys(names)).fingerprint == plain.fingerprint


# -- codes and joins -------------------------------------------------------------------------------


def test_codes_are_those_of_the_vocabulary(cluster: LocalCluster, tables: str) -> None:
    cities = [None if row % 9 == 0 else f"c{row % 5}" for row in range(ROWS)]
    coded = dataset(cluster, columns=["row", "city", "label"], codes=["city"])
    vocabulary = coded.vocabulary("city")
    assert vocabulary.values.to_pylist() == ["c0", "c1", "c2", "c3", "c4"]
    for batch in coded:
        assert batch["city"].dtype == torch.int32
        assert vocabulary.decode(batch["city"]) == [cities[row] for row in batch["row"].tolist()]
        assert batch["label"] == LABELS[batch["row"]].tolist()
    rules = {"city": Vocabulary(["c3", "c1"]), "label": Frequent(1)}
    for batch in dataset(cluster, columns=["row"], codes=rules, stack={"x": ["city", "label"]}):
        known = [{"c3": 1, "c1": 2}.get(cities[row], 0) for row in batch["row"].tolist()]
        assert batch["x"][:, 0].tolist() == known
        assert batch["x"][:, 1].tolist() == (LABELS[batch["row"]] == "cat").astype(int).tolist()


def test_a_batch_may_have_codes_alone(cluster: LocalCluster, tables: str) -> None:
    only = CacheIterableDataset(
        "clicks",
        cache=cluster.endpoint,
        batch_size=60,
        columns=["city"],
        view=View(codes={"city": 10}),
    )
    batches = list(only)
    assert {tuple(batch) for batch in batches} == {("city",)}
    assert sum(len(batch["city"]) for batch in batches) == ROWS


@pytest.mark.parametrize(
    "rule", ["sorted", Frequent(), Vocabulary(np.arange(USERS, dtype=np.float32) / 2)]
)
def test_half_floats_have_codes(cluster: LocalCluster, tables: str, rule: Any) -> None:
    coded = dataset(cluster, columns=["row", "half"], codes={"half": rule})
    values = coded.vocabulary("half")
    for batch in coded:
        assert values.decode(batch["half"]) == (USER_OF[batch["row"]] / 2).tolist()


@pytest.mark.parametrize("batch_format", ["torch", "numpy", "arrow"])
def test_a_batch_has_the_columns_of_its_users(
    cluster: LocalCluster, tables: str, batch_format: Any
) -> None:
    joined = dataset(cluster, join={"user_id": "users"}, batch_format=batch_format)
    seen = 0
    for batch in joined.loader(num_workers=1):
        found = batch.to_pydict() if batch_format == "arrow" else batch
        users = USER_OF[np.asarray(found["row"])]
        assert np.asarray(found["age"]).tolist() == AGES[users].tolist()
        assert list(found["name"]) == [NAMES[user] for user in users]
        seen += len(users)
    assert seen == ROWS


def test_local_and_remote_reads_look_up_the_same(cluster: LocalCluster, tables: str) -> None:
    options = {"codes": ["city", "label"], "join": {"user_id": Join("users", columns=["age"])}}
    local = [
        {name: list(map(str, value)) for name, value in batch.items()}
        for batch in dataset(cluster, columns=None, **options)
    ]
    remote = [
        {name: list(map(str, value)) for name, value in batch.items()}
        for batch in dataset(cluster, columns=None, local=False, **options)
    ]
    assert local == remote
    assert set(local[0]) == {"row", "weight", "user_id", "half", "city", "label", "age"}
    assert dataset(cluster, **options).view_bytes > 3 * 4 * ROWS


def test_a_checkpoint_of_other_codes_is_refused(cluster: LocalCluster, tables: str) -> None:
    state = dataset(cluster, codes=["city"]).state_dict()
    with pytest.raises(StaleVersionError):
        dataset(cluster, codes={"city": 10}).load_state_dict(state)
    with pytest.raises(ConfigError, match="no codes of 'label'"):
        dataset(cluster, codes=["city"]).vocabulary("label")
