"""`CacheIterableDataset.loader`, and what a DataLoader of another kind gets instead of rows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, random_split

from cache_client import CacheClient, CacheIterableDataset, ConfigError, DatasetSpec
from cache_server import LocalCluster
from tests.conftest import rows_of, write_numbered
from tests.job_arguments import grouped

ROWS = 203  # 13 steps of 16, the last of 11


@pytest.fixture(scope="module")
def table(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    client = CacheClient(cluster.endpoint)
    source = write_numbered(tmp_path_factory.mktemp("source"), ROWS, files=2)
    client.load(DatasetSpec("loader-table", source))
    yield "loader-table"
    client.drop("loader-table")


@pytest.fixture
def dataset(cluster: LocalCluster, table: str) -> CacheIterableDataset:
    return CacheIterableDataset(
        table, cache=cluster.endpoint, batch_size=16, shuffle=True, columns=["row"]
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"batch_size": 8}])
def test_a_data_loader_that_would_collate_again_fails_at_its_first_batch(
    dataset: CacheIterableDataset, workers: int, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.loader\(num_workers=\.\.\.\)"):
        next(iter(DataLoader(dataset, num_workers=workers, **options)))


def test_a_stateful_data_loader_that_would_collate_again_fails_too(
    dataset: CacheIterableDataset,
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    with pytest.raises(ConfigError, match="ready batches of 16 rows"):
        next(iter(stateful(dataset, batch_size=8)))


class Every(IterableDataset[Any]):
    """Keeps every n-th batch, as the wrappers of frameworks do."""

    def __init__(self, dataset: Any, process_index: int, num_processes: int) -> None:
        self.dataset, self.process_index, self.num_processes = dataset, process_index, num_processes

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.dataset):
            if number % self.num_processes == self.process_index:
                yield batch


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrapper_that_divides_again_is_refused_where_the_rows_are_divided_already(
    cluster: LocalCluster, table: str, workers: int
) -> None:
    def wrapped(**ranks: int) -> DataLoader[Any]:
        made = CacheIterableDataset(
            table, **grouped(cache=cluster.endpoint, batch_size=16, **ranks)
        )
        return DataLoader(Every(made, 0, 2), batch_size=None, num_workers=workers)

    with pytest.raises(ConfigError, match="Every would divide the rows of each rank by 2 again"):
        next(iter(wrapped(rank=0, world_size=2)))
    assert len(rows_of(wrapped(rank=0, world_size=1))) == 6 * 16 + 11  # steps 0, 2, ... 12


def test_a_wrapper_that_makes_rows_of_batches_may_collate(dataset: CacheIterableDataset) -> None:
    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            for batch in dataset:
                yield from batch["row"].tolist()

    seen = torch.cat(list(DataLoader(Rows(), batch_size=50)))
    assert sorted(seen.tolist()) == list(range(ROWS))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_format", ["torch", "numpy", "arrow"])
def test_the_loader_keeps_the_format_of_the_batches(
    cluster: LocalCluster, table: str, workers: int, batch_format: Any
) -> None:
    made = CacheIterableDataset(
        table, cache=cluster.endpoint, batch_size=16, batch_format=batch_format
    )
    batch = next(iter(made.loader(num_workers=workers)))
    kind = {"torch": torch.Tensor, "numpy": np.ndarray, "arrow": pa.ChunkedArray | pa.Array}
    assert isinstance(batch["row"], kind[batch_format])


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_the_loader_needs_no_count_of_steps(
    cluster: LocalCluster, dataset: CacheIterableDataset, workers: int, persistent: bool
) -> None:
    loader = dataset.loader(num_workers=workers, persistent_workers=persistent and workers > 0)
    for epoch in range(2):
        loader.set_epoch(epoch)
        whole = rows_of(loader)
        assert sorted(whole) == list(range(ROWS))
    loader.set_epoch(2)
    taken, state = [], {}
    for step, batch in enumerate(loader, 1):
        taken += batch["row"].tolist()
        if step == 5:
            state = loader.state_dict()
            assert state == dataset.state_dict() == dataset.state_dict(steps=5)
        if step == 9:
            break
    del batch
    gc.collect()
    resumed = CacheIterableDataset(
        dataset.name, cache=cluster.endpoint, batch_size=8, shuffle=True, columns=["row"]
    ).loader(num_workers=2 - workers)
    resumed.load_state_dict(state)
    assert sorted(taken[: 5 * 16] + rows_of(resumed)) == list(range(ROWS))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_or_a_state_that_is_set_after_iter_counts(
    dataset: CacheIterableDataset, workers: int
) -> None:
    loader = dataset.loader(num_workers=workers)
    loader.set_epoch(1)
    expected = rows_of(loader)
    loader.set_epoch(0)
    iterator = iter(loader)
    loader.set_epoch(1)
    assert rows_of(iterator) == expected
    state = dataset.state_dict() | {"epoch": 1, "rows_consumed": 160}
    iterator = iter(loader)
    loader.load_state_dict(state)
    assert rows_of(iterator) == expected[160:]


RAYS_LOADER = """
class Wrapped:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        self.iterator = iter(self.loader)
        self.next_batch = next(self.iterator, None)
        return self

    def __next__(self):
        if self.next_batch is None:
            raise StopIteration
        batch, self.next_batch = self.next_batch, next(self.iterator, None)
        return batch
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_tells_of_no_batch_that_ray_took_ahead_of_the_loop(
    dataset: CacheIterableDataset, workers: int
) -> None:
    module: dict[str, Any] = {"__name__": "ray.train.torch.train_loop_utils"}
    exec(RAYS_LOADER, module)
    consumed = []
    for _ in module["Wrapped"](dataset.loader(num_workers=workers)):
        consumed.append((dataset.state_dict()["epoch"], dataset.state_dict()["rows_consumed"]))
    assert consumed == [(0, 16 * step) for step in range(1, 13)] + [(0, ROWS)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_look_at_a_batch_leaves_the_state_alone(
    dataset: CacheIterableDataset, workers: int
) -> None:
    loader = dataset.loader(num_workers=workers)
    training = iter(loader)
    for _ in range(3):
        next(training)
    next(iter(loader))
    assert loader.state_dict()["rows_consumed"] == 48
    next(training)
    assert loader.state_dict()["rows_consumed"] == 64


def test_options_that_the_dataset_decides_are_refused_with_their_place(
    dataset: CacheIterableDataset,
) -> None:
    with pytest.raises(ConfigError, match="batch_size=8: give it to CacheIterableDataset"):
        dataset.loader(batch_size=8)
    with pytest.raises(ConfigError, match=r"bad option for the loader: .*prefetch_factor"):
        dataset.loader(prefetch_factor=2)
    with pytest.raises(ConfigError, match=r"bad option for the loader: .*nope"):
        dataset.loader(nope=1)


@pytest.mark.parametrize("lengths", [[0.5, 0.5], [100, 103]])
def test_random_split_is_told_what_to_use_instead(
    dataset: CacheIterableDataset, lengths: list[float]
) -> None:
    with pytest.raises(ConfigError, match="CacheDataset"):
        random_split(dataset, lengths)
    with pytest.raises(ConfigError, match="use CacheDataset for rows by number"):
        dataset[3]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_format", ["torch", "numpy", "arrow"])
def test_a_mask_tells_the_rows_that_fill_the_last_batch(
    cluster: LocalCluster, table: str, workers: int, batch_format: Any
) -> None:
    seen = []
    for rank in range(3):
        made = CacheIterableDataset(
            table, cache=cluster.endpoint, batch_size=10, shuffle=True, pad_mask="valid",
            batch_format=batch_format, rank=rank, world_size=3)  # fmt: skip
        batches = list(made.loader(num_workers=workers))
        assert len(batches) == len(made) == 7
        for batch in batches:
            row, valid = np.asarray(batch["row"]), np.asarray(batch["valid"])
            assert len(row) == 10 and valid.dtype == np.bool_
            seen += row[valid].tolist()
    assert sorted(seen) == list(range(ROWS))


def test_a_padded_pass_resumes(cluster: LocalCluster, table: str) -> None:
    def made() -> CacheIterableDataset:
        return CacheIterableDataset(
            table, cache=cluster.endpoint, batch_size=64, shuffle=True, pad_mask="valid"
        )

    first, rest = made(), made()
    batch = next(iter(first))
    rest.load_state_dict(first.state_dict())
    seen = batch["row"].tolist()
    for batch in rest:
        assert batch["row"].shape == (64,)
        seen += batch["row"][batch["valid"]].tolist()
    assert sorted(seen) == list(range(ROWS))


def test_a_mask_needs_a_new_name_and_a_last_step(cluster: LocalCluster, table: str) -> None:
    options: dict[str, Any] = {"endpoint": cluster.endpoint, "batch_size": 8}
    with pytest.raises(ConfigError, match="pad_mask adds a column 'row', and batches have one"):
        CacheIterableDataset(table, **grouped(pad_mask="row", **options))
    with pytest.raises(ConfigError, match="pad_mask must be the name of a new column, got True"):
        CacheIterableDataset(table, **grouped(pad_mask=True, **options))
    with pytest.raises(ConfigError, match="pad_mask and drop_last exclude each other"):
        CacheIterableDataset(table, **grouped(pad_mask="valid", drop_last=True, **options))
