"""Readers that take the newest version of a growing table at each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cache_client import CacheClient, CacheIterableDataset, CacheMixture, DatasetSpec
from cache_protocol.errors import ConfigError, StaleVersionError
from cache_server import LocalCluster
from tests.conftest import numbered_table, rows_of, write_numbered
from tests.job_arguments import grouped

ROWS = 40  # of a file


class Growing:
    """A table of a cache, to which files are added."""

    def __init__(self, directory: Path, nodes: LocalCluster) -> None:
        self.endpoint = nodes.endpoint
        self._client = CacheClient(nodes.endpoint)
        self._source = write_numbered(directory / "source", ROWS)
        self.num_rows = ROWS
        self._load()

    def _load(self) -> None:
        self._client.load(DatasetSpec("table", self._source, target_shard_bytes=1))

    def grow(self) -> None:
        name = f"part-{self.num_rows:05d}.parquet"
        pq.write_table(numbered_table(ROWS, self.num_rows), self._source / name)
        self.num_rows += ROWS
        self._load()

    def reader(self, job: str, **arguments: object) -> CacheIterableDataset:
        defaults = {"batch_size": 16, "version": "each-epoch", "job": job, "deadline_s": 5.0}
        return CacheIterableDataset(
            "table", **grouped(cache=self.endpoint, **{**defaults, **arguments})
        )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    with LocalCluster() as running:
        yield running


@pytest.fixture
def table(tmp_path: Path, nodes: LocalCluster) -> Iterator[Growing]:
    yield Growing(tmp_path, nodes)
    CacheClient(nodes.endpoint).drop("table")


def test_an_epoch_keeps_its_version_and_the_next_one_takes_the_newest(table: Growing) -> None:
    dataset = table.reader("growing", shuffle=True, audit="states")
    batches = iter(dataset)
    next(batches)
    table.grow()
    assert len(rows_of(batches)) == ROWS - 16
    assert len(dataset) == 3

    for epoch in (1, 2):
        dataset.set_epoch(epoch)
        table.grow()  # too late for this epoch
        assert sorted(rows_of(dataset)) == [*range((epoch + 1) * ROWS)]
    assert dataset.stats().rows > 0


def test_all_ranks_read_the_version_that_the_first_of_them_began_the_epoch_with(
    table: Growing,
) -> None:
    ranks = [table.reader("ranks", rank=rank, world_size=2) for rank in range(2)]
    for epoch in (1, 2, 3):
        ranks[epoch % 2].set_epoch(epoch)
        table.grow()
        ranks[1 - epoch % 2].set_epoch(epoch)

        assert len({rank.fingerprint for rank in ranks}) == 1
        assert len({len(rank) for rank in ranks}) == 1
        assert sorted(row for rank in ranks for row in rows_of(rank)) == [*range(epoch * ROWS)]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.usefixtures("forked_workers")
def test_workers_follow_too(table: Growing, persistent: bool) -> None:
    dataset = table.reader(f"workers-{persistent}")
    loader = dataset.loader(num_workers=2, persistent_workers=persistent)
    for epoch in (1, 2, 3):
        dataset.set_epoch(epoch)
        assert rows_of(loader) == [*range(table.num_rows)]
        table.grow()


def test_a_state_inside_an_epoch_keeps_its_version_and_one_at_the_end_moves_on(
    table: Growing, nodes: LocalCluster
) -> None:
    first = table.reader("states")
    batches = iter(first)
    next(batches)
    inside = first.state_dict()
    table.grow()

    second = table.reader("states-again")
    assert second.num_rows == 2 * ROWS
    second.load_state_dict(inside)
    assert (second.fingerprint, second.num_rows) == (first.fingerprint, ROWS)
    assert rows_of(second) == [*range(16, ROWS)]
    end = second.state_dict()

    third = table.reader("states-at-last")
    third.load_state_dict(end)
    assert (third.epoch, rows_of(third)) == (1, [*range(2 * ROWS)])

    CacheClient(nodes.endpoint).drop("table")
    table._load()
    before = third.fingerprint
    with pytest.raises(StaleVersionError, match=inside["fingerprint"]):
        third.load_state_dict(inside)
    assert third.fingerprint == before


def test_an_epoch_that_is_refused_changes_no_version(table: Growing) -> None:
    dataset = table.reader("refused")
    before = dataset.fingerprint
    table.grow()

    with pytest.raises(ConfigError, match="epoch must be"):
        dataset.set_epoch(-1)
    with pytest.raises(ConfigError, match="bad state"):
        dataset.load_state_dict({"format": 1})

    assert dataset.fingerprint == before
    dataset.set_epoch(0)  # is set already
    assert dataset.fingerprint == before


def test_who_cannot_follow_is_refused_by_name(
    table: Growing, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CACHE_JOB", "TRAIN_JOB_NAME", "MASTER_ADDR", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"version must be one of ready, each.*got 'step'"):
        table.reader("j", version="step")
    with pytest.raises(ConfigError, match="needs a job of one name"):
        table.reader(None, rank=0, world_size=2)  # type: ignore[arg-type]
    table.reader(None, rank=0, world_size=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'a' has version='each-epoch'"):
        CacheMixture({"a": (table.reader("j"), 1), "b": (table.reader("j", version="ready"), 1)})
