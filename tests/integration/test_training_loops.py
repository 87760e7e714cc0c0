"""Training loops as programs write them: whatever they do around the dataset, each row comes once.

Every case runs the real loaders of torch and torchdata on a real cache.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from cache_client import CacheClient, CacheIterableDataset, ConfigError, DatasetSpec
from cache_client.order import order as ordering
from cache_server import LocalCluster
from tests import forked_python
from tests.conftest import rows_of, write_numbered
from tests.job_arguments import grouped
from tests.waiting import wait_until
from tests.worker_errors import raises_in_workers

pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    # torch advises against more workers than cores; the order must not depend on it.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

ROWS = 62
BATCH = 4
STEPS = 16  # the last one is short
EPOCHS = 3


@pytest.fixture(scope="module")
def make(
    cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., CacheIterableDataset]]:
    """Makes datasets of one small table."""
    client = CacheClient(cluster.endpoint)
    source = write_numbered(tmp_path_factory.mktemp("loops"), ROWS)
    client.load(DatasetSpec("training-loops", source))

    def dataset(**arguments: Any) -> CacheIterableDataset:
        given = {"batch_size": BATCH, "shuffle": True, **arguments}
        return CacheIterableDataset(
            "training-loops", **grouped(cache=cluster.endpoint, columns=["row"], **given)
        )

    yield dataset
    client.drop("training-loops")


def rows_in(epoch: int) -> list[int]:
    order = ordering.EpochOrder(ROWS, shuffle=True, epoch=epoch)
    rows: list[int] = order.row_ids(np.arange(ROWS)).tolist()
    return rows


# -- The matrix ------------------------------------------------------------------------------------

LOADERS: dict[str, Any] = {"plain": DataLoader, "stateful": StatefulDataLoader}
STOPS = {"mid": 5, "last step": STEPS, "end of epoch": None}


def loader_of(
    dataset: CacheIterableDataset, kind: str, workers: int, method: str, persistent: bool
) -> Any:
    context = {"multiprocessing_context": method} if workers else {}
    return LOADERS[kind](
        dataset, batch_size=None, num_workers=workers, persistent_workers=persistent, **context
    )


Cell = tuple[str, tuple[int, str, bool], str, str]
IN_PROCESS = [
    (kind, (0, "-", False), stop, when)
    for kind, stop, when in itertools.product(LOADERS, STOPS, ["before iter", "after iter"])
]
# Each two values of two columns meet in one row: most faults need no third.
PAIRWISE: list[Cell] = [
    ("plain", (2, "fork", False), "mid", "before iter"),
    ("stateful", (2, "fork", False), "last step", "after iter"),
    ("plain", (2, "fork", False), "end of epoch", "after iter"),
    ("stateful", (2, "fork", True), "mid", "after iter"),
    ("plain", (2, "fork", True), "last step", "before iter"),
    ("stateful", (2, "fork", True), "end of epoch", "before iter"),
    ("plain", (4, "fork", False), "mid", "after iter"),
    ("stateful", (4, "fork", False), "last step", "before iter"),
    ("plain", (4, "fork", False), "end of epoch", "before iter"),
    # Each worker imports torch: one cell for each way to start.
    ("stateful", (2, "forkserver", False), "last step", "before iter"),
    ("stateful", (1, "spawn", False), "last step", "before iter"),
]
OTHERS = [
    pytest.param(*cell, marks=pytest.mark.frameworks)
    for cell in itertools.product(
        LOADERS,
        [(2, "fork", False), (2, "fork", True)],
        STOPS,
        ["before iter", "after iter"],
    )
    if cell not in PAIRWISE
]


@pytest.mark.parametrize(("kind", "how", "stop", "when"), [*IN_PROCESS, *PAIRWISE, *OTHERS])
def test_a_run_that_stops_and_resumes_trains_each_row_once_an_epoch(
    make: Callable[..., CacheIterableDataset],
    record_property: Callable[[str, object], None],
    kind: str,
    how: tuple[int, str, bool],
    stop: str,
    when: str,
) -> None:
    workers, method, persistent = how
    # Epoch 0 and a part of epoch 1, then the program ends.
    dataset = make()
    loader = loader_of(dataset, kind, workers, method, persistent)
    seen: list[list[int]] = [[] for _ in range(EPOCHS)]
    seen[0] = rows_of(loader) if persistent or not workers else rows_in(0)
    dataset.set_epoch(1)
    steps = iter(loader)
    seen[1] = rows_of(itertools.islice(steps, STOPS[stop]))
    taken = STEPS if STOPS[stop] is None else STOPS[stop]
    if kind == "stateful":
        state = loader.state_dict()
    else:
        state = dataset.state_dict(steps=taken) if workers else dataset.state_dict()
    del steps, loader, dataset

    # Another program goes on, by a counter of its own.
    first = 2 if stop == "end of epoch" else 1
    dataset = make()
    loader = loader_of(dataset, kind, workers, method, persistent)
    outcome = "exact"
    early: Any = None
    if when == "after iter":
        early = iter(loader)  # as Lightning does where it resumes
    if kind == "stateful":
        loader.load_state_dict(state)
        early = None  # of the loader's own state, torchdata tells only a new iterator
    else:
        try:
            dataset.load_state_dict(state)
        except ConfigError as error:
            assert workers and early is not None and "too late" in str(error)
            outcome, early, loader = "refused, then exact", None, None
            loader = loader_of(dataset, kind, workers, method, persistent)
            dataset.load_state_dict(state)
    for epoch in range(first, EPOCHS):
        if epoch == first and early is not None:
            try:
                dataset.set_epoch(epoch)
            except ConfigError as error:
                assert workers and "too late" in str(error)
                outcome, early, loader = "refused, then exact", None, None
                loader = loader_of(dataset, kind, workers, method, persistent)
                dataset.set_epoch(epoch)
        else:
            dataset.set_epoch(epoch)
        seen[epoch] += rows_of(loader if early is None else early)
        early = None
    record_property("outcome", outcome)
    assert seen == [rows_in(epoch) for epoch in range(EPOCHS)]


# -- What is set around the start of a pass --------------------------------------------------------


class Held:
    """A `worker_init_fn`: these workers begin when ``go`` is set."""

    def __init__(self, *workers: int) -> None:
        self.workers, self.go = workers, torch.multiprocessing.get_context("fork").Event()

    def __call__(self, worker: int) -> None:
        if worker in self.workers:
            assert self.go.wait(60)


@pytest.mark.parametrize(("what", "workers"), [("epoch", 2), ("state", 4)])
def test_a_change_before_worker_0_begins_counts_for_all_workers(
    make: Callable[..., CacheIterableDataset], workers: int, what: str
) -> None:
    dataset, held = make(), Held(0)
    state = {**dataset.state_dict(), "epoch": 1, "rows_consumed": 5 * BATCH}
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, worker_init_fn=held)
    batches = iter(loader)
    offset = 0
    if what == "epoch":
        dataset.set_epoch(1)
    else:
        offset = 5 * BATCH
        dataset.load_state_dict(state)
    held.go.set()
    assert rows_of(batches) == rows_in(1)[offset:]


@pytest.mark.parametrize(("what", "workers"), [("epoch", 2), ("state", 4)])
def test_a_change_after_worker_0_has_begun_is_refused_and_the_pass_stays_whole(
    make: Callable[..., CacheIterableDataset], workers: int, what: str
) -> None:
    dataset, held = make(), Held(*range(1, workers))
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, worker_init_fn=held)
    batches = iter(loader)
    wait_until(lambda: dataset._cursor.pass_of_workers(0) is not None, 30.0, "worker 0")
    with pytest.raises(ConfigError, match=r"too late: .* epoch 0, .* before iter\(loader\)"):
        if what == "epoch":
            dataset.set_epoch(1)
        else:
            dataset.load_state_dict(dataset.state_dict(steps=5))
    dataset.set_epoch(0)  # no change
    held.go.set()
    assert rows_of(batches) == rows_in(0)
    dataset.set_epoch(1)
    assert rows_of(loader) == rows_in(1)


def test_an_epoch_set_after_the_workers_of_a_stateful_loader_have_begun_is_refused(
    make: Callable[..., CacheIterableDataset],
) -> None:
    """Its `iter` waits until all workers have begun."""
    dataset = make()
    loader = StatefulDataLoader(dataset, batch_size=None, num_workers=2)
    batches = iter(loader)
    with pytest.raises(ConfigError, match="too late"):
        dataset.set_epoch(1)
    assert rows_of(batches) == rows_in(0)


def test_changes_that_race_with_the_start_of_workers_count_for_all_or_are_refused(
    make: Callable[..., CacheIterableDataset],
) -> None:
    dataset = make(batch_size=16)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    epoch, outcomes = 0, set()
    for _ in range(6):
        batches = iter(loader)
        try:
            dataset.set_epoch(epoch + 1)
            epoch += 1
            outcomes.add("counts")
        except ConfigError:
            outcomes.add("refused")
        assert rows_of(batches) == rows_in(epoch)
        dataset.set_epoch(epoch := epoch + 1)
    assert outcomes <= {"counts", "refused"}


@pytest.mark.parametrize(
    ("kind", "persistent", "kept"),
    [
        ("plain", False, False),
        ("plain", True, True),
        ("stateful", False, True),
        ("stateful", True, False),
    ],
)
def test_a_pass_given_up_after_its_first_batch_does_not_stop_the_next_epoch(
    make: Callable[..., CacheIterableDataset], kind: str, persistent: bool, kept: bool
) -> None:
    dataset = make()
    loader = loader_of(dataset, kind, 2, "fork", persistent)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        batches = iter(loader)
        assert next(batches)["row"].tolist() == rows_in(epoch)[:BATCH]
        if not kept:
            del batches
    dataset.set_epoch(3)
    assert rows_of(loader) == rows_in(3)


def test_two_loaders_of_one_dataset_that_live_on_do_not_disturb_each_other(
    make: Callable[..., CacheIterableDataset],
) -> None:
    dataset = make()
    loaders = [loader_of(dataset, "plain", 2, "fork", True) for _ in range(2)]
    for epoch in range(2):
        dataset.set_epoch(epoch)
        both = zip(*loaders, strict=True)
        rows = [rows_of(of_one) for of_one in zip(*both, strict=True)]
        assert rows == [rows_in(epoch)] * 2


class _InSomeWorkers(torch.utils.data.IterableDataset[Any]):
    def __init__(self, dataset: CacheIterableDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        return iter(self._dataset) if worker.id else iter([])


def test_a_worker_that_waits_for_worker_0_in_vain_says_so(
    make: Callable[..., CacheIterableDataset],
) -> None:
    dataset = _InSomeWorkers(make(deadline_s=0.2))
    with raises_in_workers(ConfigError, match=r"worker 1 waited 0\.2 s for worker 0"):
        rows_of(DataLoader(dataset, batch_size=None, num_workers=2))


# -- Looks and other passes ------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_other_passes_over_the_same_object_leave_the_state_alone(
    make: Callable[..., CacheIterableDataset], workers: int
) -> None:
    dataset = make(shuffle=False)
    dataset.load_state_dict({**dataset.state_dict(), "rows_consumed": 2 * BATCH})
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    training = iter(loader)
    for _ in range(8):
        next(training)

    def consumed() -> object:
        return dataset.state_dict(steps=8 if workers else None)["rows_consumed"]

    assert consumed() == 10 * BATCH
    next(iter(loader))
    assert consumed() == 10 * BATCH
    kept = iter(loader)
    next(kept)
    assert consumed() == 10 * BATCH
    assert rows_of(loader) == list(range(ROWS))
    assert consumed() == 10 * BATCH
    assert next(training)["row"][0] == 10 * BATCH


@pytest.mark.parametrize("workers", [0, 2])
def test_a_look_at_a_batch_leaves_a_loaded_state_to_the_training_loop(
    make: Callable[..., CacheIterableDataset], workers: int
) -> None:
    dataset = make()
    dataset.load_state_dict({**dataset.state_dict(), "epoch": 1, "rows_consumed": 5 * BATCH})
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    for _ in range(2):
        assert next(iter(loader))["row"].tolist() == rows_in(1)[5 * BATCH : 6 * BATCH]
    assert dataset.steps_left == STEPS - 5
    assert rows_of(loader) == rows_in(1)[5 * BATCH :]
    assert dataset.steps_left == STEPS


def test_workers_that_live_on_warn_where_a_look_used_up_a_loaded_state(
    make: Callable[..., CacheIterableDataset],
) -> None:
    """They cannot know how much of the pass before was taken."""
    dataset = make()
    dataset.load_state_dict({**dataset.state_dict(), "rows_consumed": 2 * BATCH})
    loader = loader_of(dataset, "plain", 2, "fork", True)
    next(iter(loader))
    with raises_in_workers(UserWarning, match="resumed epoch 0 at row 8 was not read to its end"):
        rows_of(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_epoch_that_is_read_twice_is_warned_of_once(
    make: Callable[..., CacheIterableDataset], workers: int
) -> None:
    dataset = make()
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert rows_of(loader) == rows_in(0)
    with raises_in_workers(UserWarning, match=r"read again in the same order: call set_epoch"):
        rows_of(loader)
    assert rows_of(loader) == rows_of(loader) == rows_in(0)


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_that_are_set_are_not_warned_of(
    make: Callable[..., CacheIterableDataset], workers: int
) -> None:
    dataset = make()
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    for epoch in (0, 0, 1):
        dataset.set_epoch(epoch)
        assert rows_of(loader) == rows_in(epoch)


def test_a_state_after_some_steps_of_a_loader_out_of_order_is_refused(
    make: Callable[..., CacheIterableDataset],
) -> None:
    dataset = make()
    loader = DataLoader(dataset, batch_size=None, num_workers=2, in_order=False)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with pytest.raises(ConfigError, match=r"steps=3 of 16 needs batches in order"):
        dataset.state_dict(steps=3)
    assert len(list(batches)) == STEPS - 3
    assert dataset.state_dict(steps=STEPS)["rows_consumed"] == ROWS


# -- Frameworks ------------------------------------------------------------------------------------


@pytest.mark.frameworks
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_accelerate_skips_need_an_epoch_that_was_set(
    make: Callable[..., CacheIterableDataset], workers: int
) -> None:
    """transformers' Trainer makes such a loader where it resumes, and tells it no epoch."""
    from accelerate import skip_first_batches

    dataset = make()
    skipping = skip_first_batches(DataLoader(dataset, batch_size=None, num_workers=workers), 5)
    with raises_in_workers(ConfigError, match=r"drops the first 5 batches.*ignore_data_skip=True"):
        rows_of(skipping)
    dataset.load_state_dict({**dataset.state_dict(steps=0), "epoch": 1, "rows_consumed": 20})
    with raises_in_workers(ConfigError, match=r"begins at row 20 of epoch 1"):
        rows_of(skipping)
    dataset.set_epoch(2)
    assert rows_of(skipping) == rows_in(2)[5 * BATCH :]


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")  # of Lightning, which warns of many things
@pytest.mark.parametrize("limit", [1.0, 10])
@pytest.mark.parametrize("stop", ["mid", "last step", "later"])
def test_lightning_resumes_where_it_saved_and_tells_a_loader_with_a_sampler_the_epoch(
    make: Callable[..., CacheIterableDataset], tmp_path: Path, limit: int | float, stop: str
) -> None:
    from tests.framework_trainers import LightningLoader, fit_with_lightning

    steps = STEPS if limit == 1.0 else 10
    seen: list[list[int]] = [[] for _ in range(EPOCHS)]
    for stop_at in ({"mid": 5, "last step": steps, "later": steps + 3}[stop], None):
        dataset = make()
        loader = LightningLoader(dataset, tells_epochs=True)
        fit_with_lightning(dataset, loader, seen, tmp_path, limit=limit, stop=stop_at)
    assert seen == [rows_in(epoch)[: steps * BATCH] for epoch in range(EPOCHS)]


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "limit"), [("custom", 1.0), ("custom", 10), ("stateful", 10)])
def test_lightning_that_begins_an_epoch_with_the_rest_of_another_is_refused(
    make: Callable[..., CacheIterableDataset], tmp_path: Path, limit: int | float, kind: str
) -> None:
    """It calls no hook of an epoch's start where it saved at the last step of the epoch before."""
    from tests.framework_trainers import LightningLoader, fit_with_lightning

    steps = STEPS if limit == 1.0 else 10
    seen: list[list[int]] = [[] for _ in range(EPOCHS)]
    with raises_in_workers(ConfigError, match=r"Lightning begins epoch 1, .* rest of epoch 0"):
        for stop_at in (steps, None):
            dataset = make()
            loader: Any = LightningLoader(dataset, tells_epochs=False)
            if kind == "stateful":
                loader = StatefulDataLoader(dataset, batch_size=None)
            fit_with_lightning(dataset, loader, seen, tmp_path, limit=limit, stop=stop_at)


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tells", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_trainer_of_transformers_that_skips_batches_reads_its_epoch_or_is_refused(
    make: Callable[..., CacheIterableDataset], tmp_path: Path, workers: int, tells: bool
) -> None:
    from tests.framework_trainers import train_with_transformers

    stop, seen = STEPS + 5, list[int]()
    train_with_transformers(make(), workers, seen, tmp_path, EPOCHS, stop=stop)
    resumed = functools.partial(
        train_with_transformers, make(), workers, seen, tmp_path, EPOCHS, resume=stop, tells=tells
    )
    expected = [row for epoch in range(EPOCHS) for row in rows_in(epoch)]
    if tells:
        resumed()
    else:
        with raises_in_workers(ConfigError, match="drops the first 5 batches"):
            resumed()
    assert seen == (expected if tells else expected[: ROWS + 5 * BATCH])


# -- Where a dataset is made -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["inference_mode", "meta device"])
def test_a_dataset_made_under_a_mode_of_torch_reads_and_is_set_outside_it(
    make: Callable[..., CacheIterableDataset], mode: str
) -> None:
    with contextlib.ExitStack() as modes:
        if mode == "inference_mode":
            modes.enter_context(torch.inference_mode())
        else:
            modes.enter_context(torch.device("meta"))
        dataset = make()
    dataset.set_epoch(1)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert rows_of(loader) == rows_in(1)
    with torch.inference_mode():
        dataset.set_epoch(2)
        duplicate = make()
        duplicate.set_epoch(2)
    assert rows_of(dataset) == rows_of(duplicate) == rows_in(2)


SPAWNS = """
import sys, torch.distributed
from torch.utils.data import DataLoader
from cache_client import CacheIterableDataset, ConfigError
if __name__ == "__main__":
    rank, endpoint, file, method = int(sys.argv[1]), *sys.argv[2:]
    dataset = CacheIterableDataset("training-loops", cache=endpoint, batch_size=4)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2
    )
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method)
    try:
        print(sum(len(batch["row"]) for batch in loader))
    except ConfigError as error:
        print(error)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_rank_that_changed_is_found_before_workers_start_that_cannot_know_it(
    make: Callable[..., CacheIterableDataset], cluster: LocalCluster, tmp_path: Path, method: str
) -> None:
    assert make().num_rows == ROWS
    script = tmp_path / "train.py"
    script.write_text(SPAWNS)
    arguments = [cluster.endpoint, str(tmp_path / "store"), method]
    ranks = [
        forked_python.Popen(
            [sys.executable, str(script), str(rank), *arguments], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    for rank, output in enumerate(outputs):
        assert "the dataset reads as rank 0 of 1" in output
        assert f"says rank {rank} of 2" in output
