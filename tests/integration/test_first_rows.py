"""Training that begins while its table is loaded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from cache_client import CacheClient, CacheIterableDataset, CacheMixture, Connection, DatasetSpec
from cache_client.cli import step_rows
from cache_client.job.connection import access_to
from cache_client.order import audit, audit_record
from cache_client.order import order as ordering
from cache_protocol.errors import ConfigError, LengthUnknownError, LoadError, StaleVersionError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server import LocalCluster
from tests.conftest import numbered_table, rows_of
from tests.job_arguments import grouped
from tests.object_store import S3Server
from tests.waiting import wait_until

FILES, ROWS = 8, 30  # rows of a file, which becomes a shard
WAIT_S = 30.0
_numbers = count()


class LoadedInSteps:
    """A table of which each file is read when a test lets it be."""

    def __init__(self, s3: S3Server, nodes: LocalCluster, name: str, **options: Any) -> None:
        self.nodes, self.name, self.has_filter = nodes, name, "filter" in options
        self.holds = []
        for number in range(FILES):
            file = io.BytesIO()
            pq.write_table(numbered_table(ROWS, number * ROWS), file)
            s3.put("tables", f"{name}/part-{number}.parquet", file.getvalue(), public=True)
            self.holds.append(s3.hold(f"{name}/part-{number}", after=1))  # after the plan
        self.client = CacheClient(nodes.endpoint)
        self.client.load(
            DatasetSpec(
                name, f"s3://tables/{name}/", target_shard_bytes=1,
                storage_options={**s3.options, "skip_signature": "true"}, **options,
            ),
            wait=False,
        )  # fmt: skip

    def release(self, *numbers: int) -> None:
        for number in numbers or range(FILES):
            self.holds[number].set()

    def reader(self, **arguments: Any) -> CacheIterableDataset:
        defaults: dict[str, Any] = {"batch_size": 8, "shuffle": True, "version": "first-rows"}
        return CacheIterableDataset(
            self.name,
            **grouped(
                cache=Connection(self.nodes.endpoint, deadline_s=WAIT_S),
                **{**defaults, **arguments},
            ),
        )

    @property
    def log(self) -> pb.LoadLog:
        with self.nodes.coordinator() as coordinator:
            return coordinator.get(self.name).log

    @property
    def is_loading(self) -> bool:
        return self.client.describe(self.name).state == "loading"

    def wait_for_shards(self, count: int) -> None:
        """Until so many are in the log, whose groups have one or more."""
        wait_until(
            lambda: sum(len(group.shards) for group in self.log.groups) >= count,
            WAIT_S,
            f"{count} shards in the log",
        )

    def rows_of_the_log(self, seed: int = 0) -> list[int]:
        """All rows in the order that the log says: shuffled in each group."""
        rows: list[int] = []
        for number, group in enumerate(self.log.groups):
            held = [index * ROWS + row for index in group.shards for row in range(ROWS)]
            order = ordering.EpochOrder(len(held), shuffle=True, seed=(seed << 32) + number)
            rows += [held[place] for place in order.row_ids(np.arange(len(held))).tolist()]
        return rows


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    with LocalCluster(2, node_timeout_s=1.5) as running:
        yield running


@pytest.fixture
def table(s3: S3Server, nodes: LocalCluster, request: pytest.FixtureRequest) -> Iterator[Any]:
    made = LoadedInSteps(s3, nodes, f"table-{next(_numbers)}", **request.param)
    yield made
    s3.clear()
    made.client.drop(made.name)


of_known_length = pytest.mark.parametrize("table", [{}], ids=["known"], indirect=True)
of_unknown_length = pytest.mark.parametrize(
    "table", [{"filter": "label >= 0"}], ids=["unknown"], indirect=True
)
of_both = pytest.mark.parametrize(
    "table", [{}, {"filter": "label >= 0"}], ids=["known", "unknown"], indirect=True
)


def in_turns(ranks: list[CacheIterableDataset]) -> list[list[list[int]]]:
    """The rows of each step of each rank, all ranks at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(lambda rank: [rows_of([batch]) for batch in rank], ranks)]


def joined(ranks: list[list[list[int]]]) -> list[int]:
    """The rows over steps and ranks."""
    assert len({len(steps) for steps in ranks}) == 1
    return [row for step in zip(*ranks, strict=True) for rows in step for row in rows]


@of_both
def test_ranks_that_begin_at_different_times_read_what_the_log_says(table: LoadedInSteps) -> None:
    table.release(0, 1, 2)
    first = table.reader(rank=0, world_size=2, audit="states", seed=5)
    batches = iter(first)
    begun = [rows_of([batch]) for batch in islice(batches, 2)]
    state = first.state_dict()
    assert table.is_loading
    if table.has_filter:
        with pytest.raises(LengthUnknownError, match="is loading"):
            len(first)
    else:
        assert len(first) == FILES * ROWS // 16

    table.release(3, 4)
    table.wait_for_shards(5)
    second = table.reader(rank=1, world_size=2, audit="states", seed=5)
    other = iter(second)
    ends = [rows_of([next(other)])]
    table.release()
    with ThreadPoolExecutor(2) as pool:
        rest = [pool.submit(lambda it=it: [rows_of([b]) for b in it]) for it in (batches, other)]
        steps = [begun + rest[0].result(), ends + rest[1].result()]

    expected = table.rows_of_the_log(seed=5)
    assert joined(steps) == expected
    assert sorted(expected) == [*range(FILES * ROWS)]
    assert len(first) == len(second) == FILES * ROWS // 16
    records = [
        audit_record.AuditRecord.from_dict(rank.state_dict()["audit"]) for rank in (first, second)
    ]
    assert [
        (each.outcome, each.rows) for each in audit.audit([*map(audit_record.Evidence, records)])
    ] == [("proven", FILES * ROWS)]
    begin = audit_record.AuditRecord.from_dict(state["audit"])  # of when fewer groups were known
    (found,) = audit.audit([*map(audit_record.Evidence, (begin, records[1]))])
    assert (found.outcome, found.rows) == ("proven", 32)

    # Resumed as another number of ranks, and by workers.
    resumed = [table.reader(rank=rank, world_size=3, batch_size=5, seed=5) for rank in range(3)]
    for rank in resumed:
        rank.load_state_dict(state)
        assert rank.steps_left == -(-(FILES * ROWS - 32) // 15)
    assert joined(in_turns(resumed)) == expected[32:]
    with pytest.raises(StaleVersionError, match="fingerprint"):
        table.reader(version="ready", seed=5).load_state_dict(state)

    # Later epochs are those of everyone.
    plain = table.reader(rank=0, world_size=2, version="ready", seed=5)
    for dataset in (plain, first):
        dataset.set_epoch(1)
    assert rows_of(first) == rows_of(plain)
    assert first.fingerprint == plain.fingerprint != second.fingerprint
    plain.load_state_dict(second.state_dict())  # which is at the end of its epoch
    assert plain.epoch == 1


@of_unknown_length
@pytest.mark.usefixtures("forked_workers")
def test_workers_read_the_same_and_go_on_to_the_next_epoch(table: LoadedInSteps) -> None:
    table.release(0)
    dataset = table.reader(audit="states", batch_size=7)
    loader = dataset.loader(num_workers=2, persistent_workers=True)
    batches = iter(loader)
    rows = rows_of([next(batches)])
    assert table.is_loading
    table.release()
    rows += rows_of(batches)
    assert rows == table.rows_of_the_log()
    state = dataset.state_dict()
    assert (state["epoch"], state["rows_consumed"]) == (1, 0)
    (found,) = audit.audit(
        [audit_record.Evidence(audit_record.AuditRecord.from_dict(state["audit"]))]
    )
    assert (found.outcome, found.rows) == ("proven", FILES * ROWS)
    asked = step_rows.question_of(
        audit_record.AuditRecord.from_dict(state["audit"]), step=2, rank=0
    )
    # Readers may have every row a moment before the version is ready.
    wait_until(lambda: not table.is_loading, WAIT_S, "the end of the load")
    shown = step_rows.step_rows(access_to(dataset.endpoint), asked)[1]
    assert [row.values["row"] for row in shown] == rows[14:21]
    dataset.set_epoch(1)
    assert sorted(rows_of(loader)) == [*range(FILES * ROWS)]
    dataset.set_epoch(0)
    assert rows_of(loader) == rows


@of_unknown_length
def test_a_lost_node_and_a_restarted_coordinator_change_nothing(table: LoadedInSteps) -> None:
    coordinator, node = table.nodes.nodes
    table.release(0, 1, 2, 3)
    dataset = table.reader()
    batches = iter(dataset)
    rows = rows_of(islice(batches, 2))
    state = dataset.state_dict()
    table.wait_for_shards(4)
    before = table.log

    coordinator.kill()
    rows += rows_of(islice(batches, 1))
    coordinator.start()
    table.nodes.wait_for_nodes()
    node.kill()
    table.release()
    rows += rows_of(batches)

    log = table.log
    assert (log.id, [*log.groups][: len(before.groups)]) == (before.id, [*before.groups])
    assert rows == table.rows_of_the_log()
    again = table.reader(batch_size=3)
    again.load_state_dict(state)
    assert rows_of(again) == rows[16:]
    node.start()
    table.nodes.wait_for_nodes()


@of_unknown_length
def test_a_load_that_fails_is_named_on_every_rank(table: LoadedInSteps, s3: S3Server) -> None:
    table.release(0, 1)
    ranks = [table.reader(rank=rank, world_size=2) for rank in range(2)]
    passes = [iter(rank) for rank in ranks]
    for each in passes:
        next(each)
    for number in range(2, FILES):
        s3.delete("tables", f"{table.name}/part-{number}.parquet")
    table.release()
    for each in passes:
        with pytest.raises(LoadError, match="does not exist"):
            rows_of(each)
    with pytest.raises(LoadError, match="does not exist"):
        ranks[0].set_epoch(1)


def test_tables_that_are_loaded_at_once_have_one_group(nodes: LocalCluster) -> None:
    client = CacheClient(nodes.endpoint)
    client.write("written", numbered_table(50))
    client.write("none", numbered_table(0))
    for name, num_rows in (("written", 50), ("none", 0)):
        dataset = CacheIterableDataset(
            name, cache=nodes.endpoint, batch_size=8, shuffle=True, version="first-rows"
        )
        assert len(dataset) == -(-num_rows // 8)
        assert sorted(rows_of(dataset)) == [*range(num_rows)]
        with pytest.raises(ConfigError, match="version='first-rows'"):
            CacheMixture({"a": (dataset, 1.0), "b": (dataset, 1.0)})
        client.drop(name)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"version": "today"}, "'today'"),
        ({"shuffle": False}, "shuffle=True"),
        ({"skip_steps": {0: [1]}}, "excludes skip_steps"),
        ({"where": "a > 1", "fold": (0, 5)}, "excludes where, fold"),
        ({"weights": "a"}, "excludes weights"),
        ({"group_by": "label"}, "excludes group_by"),
    ],
)
def test_what_needs_all_rows_at_the_begin_is_refused(arguments: Any, named: str) -> None:
    given = {"batch_size": 8, "shuffle": True, "version": "first-rows", **arguments}
    with pytest.raises(ConfigError, match=named):
        CacheIterableDataset("table", **grouped(cache="grpc://127.0.0.1:1", **given))
