from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tenacity
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from cache_client import (
    CacheClient,
    CacheDataset,
    CacheIterableDataset,
    ConfigError,
    Connection,
    DatasetNotFoundError,
    DatasetSpec,
    NodeUnavailableError,
    NotReadyError,
    Reading,
    RequestError,
    StaleVersionError,
)
from cache_client.flight import connections
from cache_client.reading import shard_maps
from cache_server import LocalCluster
from tests.conftest import write_numbered
from tests.job_arguments import grouped
from tests.worker_errors import raises_in_workers


@pytest.fixture
def table(client: CacheClient, dataset_name: str, tmp_path: Path) -> str:
    client.load(DatasetSpec(dataset_name, write_numbered(tmp_path / "t", 100, files=2)))
    return dataset_name


def test_what_is_shown_of_a_dataset_says_what_it_reads(table: str, cluster: LocalCluster) -> None:
    dataset = CacheIterableDataset(
        table, cache=cluster.endpoint, batch_size=7, rank=1, world_size=3, shuffle=True, seed=4
    )
    dataset.set_epoch(2)
    names = CacheClient(cluster.endpoint).describe(table).schema.names
    assert repr(dataset) == (
        f"CacheIterableDataset({table!r}, fingerprint={dataset.fingerprint!r}, num_rows=100, "
        f"columns={names!r}, batch_size=7, rank=1, world_size=3, "
        "shuffle=True, seed=4, epoch=2)"
    )
    assert repr(CacheClient(cluster.endpoint)) == f"CacheClient({cluster.endpoint!r})"


def test_every_bad_argument_is_quoted_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        CacheIterableDataset(
            "",
            cache="nowhere",
            batch_size=0,
            rank=3,
            world_size=3,
            shuffle_block_size=4,
        )
    for words in ("''", "batch_size", "rank=3 world_size=3", "got 4", "got 'nowhere'"):
        assert words in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        Reading(prefetch_batches=0, message_bytes=0)
    for words in ("message_bytes must be at least 1, got 0", "prefetch_batches must be"):
        assert words in str(caught.value)


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"name": 5}, "name must be the name of a dataset, got 5"),
    ({"columns": "row"}, "columns must be a list of names, got 'row'"),
    ({"columns": ["row", 1]}, "columns must be a list of names, got ['row', 1]"),
    ({"columns": {"row"}}, "columns must be a list of names, got {'row'}"),
    ({"columns": {"row": "r"}}, "columns must be a list of names, got {'row': 'r'}"),
    ({"stack": {"x": {"a"}}}, "stack 'x' must be a list of columns, got {'a'}"),
    ({"columns": np.array([], str)}, "columns must name a column, or be omitted for all, got"),
    ({"columns": []}, "columns must name a column, or be omitted for all, got []"),
    ({"columns": ["a", "a"]}, "columns must not repeat a name, got ['a', 'a']"),
    (
        {"batch_format": "pandas"},
        "batch_format must be one of torch, numpy, arrow, jax, polars, got 'pandas'",
    ),
    ({"transform": "x"}, "transform must be a function, got 'x'"),
    ({"local": "no"}, "local must be True or False, got 'no'"),
    ({"stack": {"x": "ab"}}, "stack 'x' must be a list of columns, got 'ab'"),
    ({"stack": ["a", "b"]}, "stack must be a dict from name to columns, got ['a', 'b']"),
    ({"name": "\udc80"}, "name must be the name of a dataset, got '\\udc80'"),
    ({"columns": ["\udc80"]}, "columns must be a list of names, got ['\\udc80']"),
    ({"columns": np.array("row")}, "columns must be a list of names, got array('row'"),
    ({"stack": {5: ["a"]}}, "stack must be a dict from name to columns, got {5: ['a']}"),
    ({"batch_format": np.array(["torch", "numpy"])}, "batch_format must be one of torch, numpy"),
    ({"deadline_s": 10**400}, "deadline_s must be a number greater than 0, got 1000"),
    ({"deadline_s": "60"}, "deadline_s must be a number greater than 0, got '60'"),
    ({"deadline_s": float("nan")}, "deadline_s must be a number greater than 0, got nan"),
    ({"message_bytes": 1e6}, "message_bytes must be an integer, got 1000000.0"),
    ({"message_bytes": 2**40}, "message_bytes must be at most 2147483647, got 1099511627776"),
    ({"prefetch_batches": "60"}, "prefetch_batches must be an integer, got '60'"),
    ({"prefetch_batches": 2**64}, "prefetch_batches must be at most 2147483647, got 1844674"),
    ({"rank": 0.0, "world_size": 1.0}, "rank must be an integer, got 0.0; world_size must be"),
    ({"rank": "0", "world_size": 2}, "rank must be an integer, got '0'"),
    ({"rank": 0, "world_size": True}, "world_size must be an integer, got True"),
    ({"batch_size": 2.0}, "batch_size must be an integer, got 2.0"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_ARGUMENTS)
def test_an_argument_of_another_type_or_range_is_quoted_before_a_node_is_asked(
    arguments: dict[str, Any], words: str
) -> None:
    given = {"name": "t", "endpoint": "grpc://127.0.0.1:1", "batch_size": 1, **arguments}
    with pytest.raises(ConfigError) as caught:
        CacheIterableDataset(**grouped(**given))
    assert words in str(caught.value)
    if set(arguments) <= {
        *("name", "columns", "stack", "deadline_s", "batch_format", "transform", "local")
    }:
        del given["batch_size"]
        with pytest.raises(ConfigError) as caught:
            CacheDataset(**grouped(**given))
        assert words in str(caught.value)


def test_all_arguments_of_another_type_are_quoted_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        CacheIterableDataset(
            "t",
            cache=7,  # type: ignore[arg-type]
            batch_size="1",  # type: ignore[arg-type]
            columns="row",
            stack={"x": "ab"},
            rank="0",  # type: ignore[arg-type]
            world_size=1.0,  # type: ignore[arg-type]
            reading=8,  # type: ignore[arg-type]
            seed="s",  # type: ignore[arg-type]
            shuffle=2,  # type: ignore[arg-type]
            batch_format="pandas",  # type: ignore[arg-type]
            transform=1,  # type: ignore[arg-type]
            view={"where": "x"},  # type: ignore[arg-type]
        )
    for name in (
        *("batch_size", "columns", "stack 'x'", "rank", "world_size", "reading", "cache"),
        *("view", "seed", "batch_format", "transform"),
    ):
        assert f"{name} must be" in str(caught.value)
    with pytest.raises(ConfigError, match=r"deadline_s must be.*local must be.*token must be"):
        Connection("grpc://127.0.0.1:1", deadline_s="60", local=0, token=5)  # type: ignore


def test_every_bad_argument_of_a_client_is_quoted_at_once() -> None:
    for bad in ("x", 0, -1.0, float("nan"), None, True):
        with pytest.raises(ConfigError) as caught:
            CacheClient(Connection("nowhere", deadline_s=bad))  # type: ignore[arg-type]
        assert f"deadline_s must be a number greater than 0, got {bad!r}" in str(caught.value)
        assert "'nowhere'" in str(caught.value)
    for bad in (5, 0, False, [], "grpc://\udc80:1", "grpc://a\0:1"):
        with pytest.raises(ConfigError) as caught:
            CacheClient(bad)  # type: ignore[arg-type]
        assert f"grpc://HOST:PORT, got {bad!r}" in str(caught.value)


BAD_CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("load", {"spec": 5}, "spec must be a DatasetSpec or the path of a YAML file, got 5"),
    ("load", {"spec": None}, "got None"),
    ("load", {"spec": {"name": "t"}}, "got a dict: convert it with DatasetSpec.from_mapping"),
    ("load", {"spec": "/not/there.yaml", "timeout_s": -1}, "/not/there.yaml"),
    ("load", {"spec": "/not/there.yaml", "timeout_s": -1}, "timeout_s must be a number greater"),
    ("load", {"spec": 5, "timeout_s": "1"}, "greater than 0, got '1'; spec must be"),
    ("load", {"spec": 5, "refresh": "yes"}, "refresh must be True or False, got 'yes'"),
    ("load", {"spec": 5, "wait": "no"}, "wait must be True or False, got 'no'"),
    ("load", {"spec": 5, "progress": None}, "progress must be True or False, got None"),
    ("load", {"spec": 5, "on_progress": "p"}, "on_progress must be a function, got 'p'"),
    ("load", {"spec": ""}, "spec must be a DatasetSpec or the path of a YAML file, got ''"),
    (
        "load",
        {"spec": 5, "timeout_s": 10**400},
        "timeout_s must be a number greater than 0, got 10",
    ),
    ("plan", {"spec": 5, "timeout_s": "1", "world_size": 0}, "world_size must be at least 1"),
    ("plan", {"spec": 5, "timeout_s": "1", "world_size": 0}, "greater than 0, got '1'"),
    ("plan", {"spec": "x", "batch_size": None}, "batch_size must be an integer, got None"),
    ("describe", {"name": 5}, "name must be the name of a dataset, got 5"),
    ("describe", {"name": ""}, "got ''"),
    ("describe", {"name": "\udc80"}, "name must be the name of a dataset, got '\\udc80'"),
    ("drop", {"name": ["t"]}, "name must be the name of a dataset, got ['t']"),
    ("head", {"name": 5}, "name must be the name of a dataset, got 5"),
    ("head", {"name": "t", "num_rows": "3"}, "num_rows must be an integer, got '3'"),
    ("head", {"name": "t", "num_rows": -1}, "num_rows must be at least 0, got -1"),
]


@pytest.mark.parametrize(("call", "arguments", "words"), BAD_CALLS)
def test_a_bad_argument_of_a_call_is_quoted_before_a_node_is_asked(
    call: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        getattr(CacheClient("grpc://127.0.0.1:1"), call)(**arguments)
    assert words in str(caught.value)


def test_a_mapping_in_place_of_a_spec_is_not_quoted() -> None:
    with pytest.raises(ConfigError) as caught:
        CacheClient("grpc://127.0.0.1:1").load({"storage_options": {"key": "hush"}})  # type: ignore
    assert "hush" not in str(caught.value)


def test_a_time_limit_may_be_endless(client: CacheClient, table: str) -> None:
    endless = CacheClient(Connection(client.endpoint, deadline_s=float("inf")))
    assert endless.describe(table).num_rows == 100
    assert endless.head(table, 2).num_rows == 2


def test_a_time_limit_may_be_a_number_of_numpy(
    client: CacheClient, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 of seconds, added to a time of day, is wrong by a minute."""
    limits: list[object] = []

    def noting(
        self: connections.NodeConnection,
        name: str,
        fingerprint: str,
        columns: Any,
        limit: float,
        **options: Any,
    ) -> Any:
        limits.append(limit)
        return read_shard_map(self, name, fingerprint, columns, limit, **options)

    read_shard_map = connections.NodeConnection.read_shard_map
    monkeypatch.setattr(connections.NodeConnection, "read_shard_map", noting)
    limit: Any = np.float32(60)
    impatient = CacheClient(Connection(client.endpoint, deadline_s=limit))
    spec = DatasetSpec(table, tmp_path / "t")
    assert impatient.load(spec, timeout_s=limit).num_rows == 100
    assert impatient.plan(spec, timeout_s=limit).num_rows == 100
    assert impatient.describe(table).num_rows == impatient.head(table, 100).num_rows == 100
    given: Any = {"endpoint": client.endpoint, "deadline_s": limit, "local": False}
    assert len(CacheDataset(table, **grouped(**given)).fetch([1, 2])["row"]) == 2
    assert len(list(CacheIterableDataset(table, **grouped(batch_size=10, **given)))) == 10
    assert limits and {type(limit) for limit in limits} == {float}


def test_an_epoch_is_an_integer_of_64_bits(cluster: LocalCluster, table: str) -> None:
    dataset = CacheIterableDataset(table, cache=cluster.endpoint, batch_size=10)
    for bad in (2**70, -1, 1.0, "1", True):
        with pytest.raises(
            ConfigError, match=r"epoch must be an integer in \[0, 2\*\*62\]"
        ) as caught:
            dataset.set_epoch(bad)  # type: ignore[arg-type]
        assert repr(bad) in str(caught.value)
    dataset.set_epoch(2**62)
    assert len([*dataset]) == 10 and dataset.state_dict()["epoch"] == 2**62 + 1


@pytest.mark.parametrize("bad", ["1", 1.5, True, -1, 11])
def test_steps_that_were_not_taken_are_quoted(cluster: LocalCluster, table: str, bad: Any) -> None:
    dataset = CacheIterableDataset(table, cache=cluster.endpoint, batch_size=10)
    with pytest.raises(ConfigError, match=rf"steps must be .*, got {bad!r}"):
        dataset.state_dict(steps=bad)


def test_integers_of_numpy_are_integers(cluster: LocalCluster, table: str) -> None:
    small, state = np.uint8, {}
    for number in (small, int):
        dataset = CacheIterableDataset(
            table,
            cache=cluster.endpoint,
            batch_size=number(20),
            columns=["row"],
            rank=number(1),
            world_size=number(2),
            shuffle=True,
            shuffle_block_size=number(3),
            seed=number(255),
            reading=Reading(prefetch_batches=number(200), message_bytes=number(200)),
        )
        dataset.set_epoch(number(4))
        rows = [batch["row"].tolist() for batch in dataset]
        state[number] = json.dumps([dataset.state_dict(steps=number(2)), rows])
    assert state[small] == state[int]


def test_a_batch_may_be_longer_than_memory(cluster: LocalCluster, table: str) -> None:
    for local in (True, False):
        for size in (2**32, sys.maxsize):
            dataset = CacheIterableDataset(
                table,
                cache=Connection(cluster.endpoint, local=local),
                batch_size=size,
                rank=1,
                world_size=2,
            )
            (batch,) = dataset
            assert batch["row"].tolist() == list(range(50, 100))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"columns": ["nope"]}, RequestError, "'nope'"),
        ({"stack": {"x": ["text"]}}, ConfigError, "'text'"),
        ({"batch_format": "pandas"}, ConfigError, "'pandas'"),
    ],
)
def test_what_the_dataset_does_not_have_is_named(
    cluster: LocalCluster, table: str, arguments: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        CacheIterableDataset(table, **grouped(cache=cluster.endpoint, batch_size=1, **arguments))


def test_an_unknown_dataset_is_named(cluster: LocalCluster) -> None:
    with pytest.raises(DatasetNotFoundError, match="'not-there'"):
        CacheIterableDataset("not-there", cache=cluster.endpoint, batch_size=1)


def test_a_cache_that_is_not_there_is_an_error_at_the_deadline() -> None:
    start = time.monotonic()
    with pytest.raises(NodeUnavailableError, match=r"127\.0\.0\.1:9"):
        CacheIterableDataset(
            "t", cache=Connection("grpc://127.0.0.1:9", deadline_s=1.0), batch_size=1
        )
    assert time.monotonic() - start < 15


def make_clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of those who wait for a shard map; a pause takes no time."""
    clock = SimpleNamespace(now_s=0.0)

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    monkeypatch.setattr(shard_maps, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(tenacity.nap.time, "sleep", sleep)
    return clock


def test_no_attempt_to_read_the_shard_map_goes_past_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends, clock = [], make_clock(monkeypatch)

    def silent(self: connections.NodeConnection, *arguments: Any, **options: Any) -> Any:
        clock.now_s += arguments[-1]
        ends.append(clock.now_s)
        raise NodeUnavailableError("never said a word")

    monkeypatch.setattr(shard_maps, "REQUEST_TIMEOUT_S", 0.6)
    monkeypatch.setattr(connections.NodeConnection, "read_shard_map", silent)
    cache = Connection("grpc://127.0.0.1:9", deadline_s=1.0)
    with pytest.raises(NodeUnavailableError, match="never said a word"):
        CacheIterableDataset("t", cache=cache, batch_size=1)
    assert len(ends) >= 2
    assert max(ends) < 1.1


def test_a_dataset_that_is_not_ready_is_asked_for_until_just_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts, clock = [], make_clock(monkeypatch)

    def not_ready(self: connections.NodeConnection, *arguments: Any, **options: Any) -> Any:
        starts.append(clock.now_s)
        raise NotReadyError("3 of 7 shards")

    monkeypatch.setattr(connections.NodeConnection, "read_shard_map", not_ready)
    cache = Connection("grpc://127.0.0.1:9", deadline_s=1.0)
    with pytest.raises(NotReadyError, match="3 of 7 shards"):
        CacheIterableDataset("t", cache=cache, batch_size=1)
    assert starts[-1] >= 0.7


def test_the_endpoint_comes_from_the_environment(
    cluster: LocalCluster, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_ENDPOINT", cluster.endpoint)
    assert len(CacheIterableDataset(table, batch_size=7)) == 15


def test_a_rank_that_torch_distributed_has_later_and_otherwise_is_refused(
    cluster: LocalCluster, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made too early, every process would take itself for 0 of 1 and read all rows."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def make(**arguments: Any) -> CacheIterableDataset:
        return CacheIterableDataset(
            table, **grouped(cache=cluster.endpoint, batch_size=10, **arguments)
        )

    early, given = make(), make(rank=1, world_size=2)
    assert len(list(early)) == 5
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"rank 1 of 2, .* rank 0 of 1"):
            iter(early)
        with raises_in_workers(ConfigError, match=r"rank 1 of 2, .* rank 0 of 1"):
            next(iter(DataLoader(early, batch_size=None, num_workers=1)))
        assert len(list(given)) == 5
        assert len(list(make())) == 10
    finally:
        dist.destroy_process_group()


def test_batches_may_be_changed_in_place_without_touching_others(
    cluster: LocalCluster, table: str
) -> None:
    for shuffle in (False, True):
        dataset = CacheIterableDataset(
            table, cache=cluster.endpoint, batch_size=10, shuffle=shuffle
        )
        sums = []
        for batch in dataset:
            sums.append(int(batch["row"].sum()))
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        assert sum(sums) == sum(range(100))
        dataset.set_epoch(0)
        assert sum(int(batch["row"].sum()) for batch in dataset) == sum(range(100))


def test_a_state_of_something_else_is_refused_naming_both(
    cluster: LocalCluster, client: CacheClient, table: str
) -> None:
    dataset = CacheIterableDataset(table, cache=cluster.endpoint, batch_size=10, shuffle=True)
    state = dataset.state_dict()
    with pytest.raises(StaleVersionError) as caught:
        dataset.load_state_dict({**state, "fingerprint": "other"})
    assert "other" in str(caught.value) and dataset.fingerprint in str(caught.value)
    with pytest.raises(ConfigError, match=r"seed=5.*seed=0"):
        dataset.load_state_dict({**state, "seed": 5})
    with pytest.raises(ConfigError, match="rows_consumed"):
        dataset.load_state_dict({**state, "rows_consumed": 101})
    with pytest.raises(ConfigError, match="bad state: epoch must be at most"):
        dataset.load_state_dict({**state, "epoch": 2**64})
    with pytest.raises(ConfigError, match="bad state"):
        dataset.load_state_dict({})
    assert dataset.state_dict() == state


def test_a_transform_and_the_last_states_of_an_epoch(cluster: LocalCluster, table: str) -> None:
    dataset = CacheIterableDataset(
        table, cache=cluster.endpoint, batch_size=30, transform=lambda batch: batch["row"]
    )
    states = [dataset.state_dict() for rows in dataset if rows.dtype == torch.int64]
    consumed = [(state["epoch"], state["rows_consumed"]) for state in states]
    assert consumed == [(0, 30), (0, 60), (0, 90), (0, 100)]
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["rows_consumed"]) == (1, 0)
