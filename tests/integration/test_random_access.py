"""Rows by number: the same rows from a process, its threads, and DataLoader workers of any kind."""

from __future__ import annotations

import gc
import io
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset

from cache_client import (
    CacheClient,
    CacheDataset,
    CacheIterableDataset,
    ConfigError,
    Connection,
    DatasetNotFoundError,
    DatasetSpec,
    RequestError,
)
from cache_client.reading import node_streams
from cache_client.training import random_access
from cache_server import LocalCluster
from tests import forked_python
from tests.conftest import numbered_table, write_numbered
from tests.job_arguments import grouped
from tests.waiting import suspend

ROWS = 1_000
WAIT_S = 30.0
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "reading.md"


@pytest.fixture(scope="module")
def table(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    source = write_numbered(tmp_path_factory.mktemp("t"), ROWS, files=3, row_group_size=97)
    client = CacheClient(cluster.endpoint)
    client.load(DatasetSpec("rows-by-number", source, target_shard_bytes=4_000))
    yield "rows-by-number"
    client.drop("rows-by-number")


@pytest.fixture(params=[True, False], ids=["local", "flight"])
def dataset(
    cluster: LocalCluster, table: str, request: pytest.FixtureRequest
) -> Iterator[CacheDataset]:
    """Read from the files of this machine, and from nodes."""
    with CacheDataset(table, cache=Connection(cluster.endpoint, local=request.param)) as opened:
        yield opened


# -- one row ---------------------------------------------------------------------------------------


def test_row_i_is_source_row_i_with_one_value_for_each_column(dataset: CacheDataset) -> None:
    assert len(dataset) == dataset.num_rows == ROWS
    source = numbered_table(ROWS).to_pylist()
    for index in (0, 1, 96, 97, 500, 999, -1, -1000, np.int64(7), torch.tensor(8)):
        row = dataset[index]
        assert {name: getattr(v, "item", lambda v=v: v)() for name, v in row.items()} == source[
            int(index)
        ]
    assert row["row"].shape == () and row["row"].dtype == torch.int64
    assert row["a"].dtype == torch.float32 and row["text"] == "row 8"


def test_it_is_the_version_and_the_row_ids_of_the_iterable_dataset(
    cluster: LocalCluster, dataset: CacheDataset, table: str
) -> None:
    iterable = CacheIterableDataset(table, cache=cluster.endpoint, batch_size=ROWS)
    assert (dataset.fingerprint, dataset.num_rows) == (iterable.fingerprint, iterable.num_rows)
    assert dataset.name == iterable.name == table
    (whole,) = iterable
    batch = dataset.fetch(range(ROWS))
    assert list(batch) == list(whole)
    assert all(np.array_equal(batch[name], whole[name]) for name in whole)


def test_a_loop_over_it_ends_where_the_rows_end(cluster: LocalCluster, table: str) -> None:
    with CacheDataset(table, cache=cluster.endpoint, columns=["row"]) as dataset:
        assert [int(row["row"]) for row in dataset] == list(range(ROWS))


@pytest.mark.parametrize(
    "index",
    [ROWS, -ROWS - 1, 10**15, 2**70, -(2**70), [3, ROWS], [-1, 2**63], [3, 2**70],
     np.array([2**63], "u8")],
)  # fmt: skip
def test_a_row_that_is_not_there_is_named(dataset: CacheDataset, index: Any) -> None:
    bad = index if isinstance(index, int) else int(index[-1])
    with pytest.raises(IndexError, match=rf"row {bad} is not in dataset .* of {ROWS} rows"):
        dataset[index]


@pytest.mark.parametrize(
    "index",
    [
        "3",
        3.0,
        True,
        None,
        [1.0],
        ["3"],
        [True],
        [True, 2],
        [np.False_, np.int64(2)],
        [[1]],
        [[1], [2, 3]],
        np.zeros((1, 1), int),
    ],
)
def test_what_is_no_integer_is_quoted(dataset: CacheDataset, index: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(repr(index))):
        dataset[index]


@pytest.mark.parametrize("rest", [np.uint64(5), np.uint8(5), torch.tensor(5), 5])
def test_integers_of_several_types_choose_rows(dataset: CacheDataset, rest: Any) -> None:
    assert dataset.fetch([np.int64(-1), rest, 3])["row"].tolist() == [ROWS - 1, 5, 3]


def test_nested_lists_and_stacks_are_one_value_a_row(
    cluster: LocalCluster, client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    images = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(24, dtype=np.uint8)), 6)
    ragged = pa.array([[1.0], [], [2.0, 3.0], [4.0]], pa.list_(pa.float32()))
    columns = {"image": images, "ragged": ragged, "x": np.arange(4.0), "y": np.arange(4.0)}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    client.load(DatasetSpec(dataset_name, tmp_path / "t.parquet"))
    with CacheDataset(dataset_name, cache=cluster.endpoint, stack={"xy": ["x", "y"]}) as dataset:
        row = dataset[2]
    assert list(row) == ["image", "ragged", "xy"]
    assert row["image"].tolist() == [12, 13, 14, 15, 16, 17]
    assert row["ragged"].tolist() == [2.0, 3.0]
    assert row["xy"].tolist() == [2.0, 2.0]


def test_numpy_and_arrow_rows(cluster: LocalCluster, table: str) -> None:
    with CacheDataset(table, cache=cluster.endpoint, batch_format="numpy") as dataset:
        row = dataset[4]
        assert (type(row["row"]), type(row["a"])) == (np.int64, np.float32)
        assert row == {"row": 4, "a": 2.0, "b": 8.0, "label": 4, "text": "row 4"}
    with CacheDataset(table, cache=cluster.endpoint, batch_format="arrow") as dataset:
        assert dataset[4] == {"row": 4, "a": 2.0, "b": 8.0, "label": 4, "text": "row 4"}
        assert dataset.fetch([4, 2]).column("row").to_pylist() == [4, 2]


# -- several rows ----------------------------------------------------------------------------------


def test_rows_asked_for_together_are_one_fetch(dataset: CacheDataset, fetches: list[int]) -> None:
    indices = [5, 999, 5, -1, 0]
    rows = dataset.__getitems__(indices)
    assert [int(row["row"]) for row in rows] == [5, 999, 5, 999, 0]
    assert [row["text"] for row in rows] == ["row 5", "row 999", "row 5", "row 999", "row 0"]
    assert fetches == [5]
    rows[0]["row"].zero_()  # in memory that only these rows share
    assert [int(row["row"]) for row in rows] == [0, 999, 5, 999, 0]


def test_more_rows_than_one_fetch_may_bring_are_several_and_the_same(
    cluster: LocalCluster, table: str, fetches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_access, "FETCH_BYTES", 5_200)
    monkeypatch.setattr(random_access, "row_bytes", lambda shards: 52)
    with CacheDataset(table, cache=cluster.endpoint) as dataset:
        indices = np.random.default_rng(0).permutation(ROWS)[:950]
        batch = dataset.fetch(indices)
        rows = dataset.__getitems__(indices)
    assert sorted(fetches) == sorted(([100] * 9 + [50]) * 2)
    assert batch["row"].tolist() == [int(row["row"]) for row in rows] == indices.tolist()
    assert batch["text"] == [f"row {index}" for index in indices]


@pytest.mark.parametrize(
    "indices", [[3, 1, 3], (3, 1, 3), np.array([3, 1, 3], np.uint8), torch.tensor([3, 1, 3])]
)
def test_several_numbers_are_a_batch_whatever_holds_them(
    dataset: CacheDataset, indices: Any
) -> None:
    batch = dataset[indices]
    assert batch["row"].tolist() == [3, 1, 3] and batch["text"] == ["row 3", "row 1", "row 3"]
    assert dataset[range(10, 4, -2)]["row"].tolist() == [10, 8, 6]


def test_a_slice_is_a_batch(dataset: CacheDataset) -> None:
    for some in (slice(1, 3), slice(-3, None), slice(None, None, -40), slice(5, 5)):
        assert dataset[some]["row"].tolist() == list(range(len(dataset)))[some]


def test_no_rows_are_an_empty_batch(dataset: CacheDataset) -> None:
    assert dataset.__getitems__([]) == []
    batch = dataset.fetch([])
    assert batch["row"].shape == (0,) and batch["row"].dtype == torch.int64 and batch["text"] == []


def test_a_transform_gets_what_is_asked_for(cluster: LocalCluster, table: str) -> None:
    with CacheDataset(
        table, cache=cluster.endpoint, transform=lambda it: it["row"] * 10
    ) as dataset:
        assert int(dataset[7]) == 70
        assert [int(row) for row in dataset.__getitems__([1, 2])] == [10, 20]
        assert dataset[[1, 2]].tolist() == [10, 20]


# -- loaders, processes, threads -------------------------------------------------------------------


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("method", [None, "fork", "spawn", "forkserver"])
def test_a_data_loader_collates_every_row_once_in_any_kind_of_worker(
    dataset: CacheDataset, method: str | None
) -> None:
    assert int(dataset[0]["row"]) == 0  # the main process has read, too
    loader = DataLoader(
        dataset, batch_size=64, shuffle=True, num_workers=0 if method is None else 2,
        multiprocessing_context=method,
    )  # fmt: skip
    batches = list(loader)
    assert [len(batch["row"]) for batch in batches] == [64] * 15 + [40]
    assert batches[0]["a"].dtype == torch.float32 and isinstance(batches[0]["text"], list)
    rows = torch.cat([batch["row"] for batch in batches])
    assert rows.tolist() != list(range(ROWS))
    assert sorted(rows.tolist()) == list(range(ROWS))
    assert torch.equal(torch.cat([batch["a"] for batch in batches]), rows * 0.5)
    assert int(dataset[1]["row"]) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_gets_whole_batches(dataset: CacheDataset, workers: int) -> None:
    sampler = BatchSampler(SequentialSampler(dataset), 64, drop_last=True)
    loader = DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=workers)
    batches = [batch["row"].tolist() for batch in loader]
    assert batches == [list(range(at, at + 64)) for at in range(0, 15 * 64, 64)]


def test_a_subset_asks_for_its_rows_together(dataset: CacheDataset, fetches: list[int]) -> None:
    subset = Subset(dataset, range(100, 200))
    loader = DataLoader(subset, batch_size=50, sampler=RandomSampler(subset))
    rows = [row for batch in loader for row in batch["row"].tolist()]
    assert sorted(rows) == list(range(100, 200))
    assert fetches == [50, 50]


def test_threads_share_it(dataset: CacheDataset) -> None:
    wanted = [list(range(at, at + 10)) for at in range(0, ROWS, 10)]
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(dataset.fetch, wanted))
    assert [batch["row"].tolist() for batch in batches] == wanted


READ_PICKLED = """
import pickle, sys
dataset = pickle.loads(sys.stdin.buffer.read())
print(repr(dataset), int(dataset[-1]["row"]))
"""


def test_a_copy_in_another_process_reads_the_same_and_has_the_same_repr(
    cluster: LocalCluster, dataset: CacheDataset
) -> None:
    assert int(dataset[0]["row"]) == 0
    done = forked_python.run(
        [sys.executable, "-c", READ_PICKLED],
        input=pickle.dumps(dataset), capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.decode().strip() == f"{dataset!r} {ROWS - 1}"
    assert dataset.fingerprint in repr(dataset)
    assert cluster.endpoint not in repr(dataset)


def test_its_repr_tells_apart_what_reads_differently(cluster: LocalCluster, table: str) -> None:
    variants: list[dict[str, Any]] = [
        {}, {"columns": ["row"]}, {"columns": ["a", "b"]}, {"batch_format": "numpy"},
        {"stack": {"x": ["a", "b"]}}, {"transform": numbered_table},
    ]  # fmt: skip
    seen = {repr(CacheDataset(table, **grouped(cache=cluster.endpoint, **v))) for v in variants}
    assert len(seen) == len(variants)
    assert not any(" at 0x" in text for text in seen)


def test_it_reads_again_after_it_was_closed_and_may_be_dropped_open(
    cluster: LocalCluster, table: str
) -> None:
    dataset = CacheDataset(table, cache=cluster.endpoint)
    with dataset:
        assert int(dataset[1]["row"]) == 1
    assert int(dataset[2]["row"]) == 2
    del dataset
    gc.collect()


def test_reads_that_run_when_it_is_closed_say_so_in_one_wording(tmp_path: Path) -> None:
    source = write_numbered(tmp_path / "t", ROWS)
    with LocalCluster(nodes=1) as nodes:
        CacheClient(nodes.endpoint).load(DatasetSpec("t", source))
        dataset = CacheDataset(
            "t", cache=Connection(nodes.endpoint, local=False, deadline_s=WAIT_S)
        )
        assert [int(dataset[row]["row"]) for row in range(2)] == [0, 1]
        node = psutil.Process(nodes.nodes[0].pid)
        suspend(node)
        try:
            with ThreadPoolExecutor(20) as pool:  # more than read at the same time
                # Rows that follow one another may have arrived already.
                reads = [pool.submit(dataset.__getitem__, row) for row in range(10, 50, 2)]
                assert not wait(reads, 0.2).done
                dataset.close()
                errors = {str(read.exception(WAIT_S / 4)) for read in reads}
        finally:
            node.resume()
        assert errors == {node_streams.CLOSED}
        assert int(dataset[3]["row"]) == 3
        dataset.close()


INTERRUPTED = """
import os, signal, sys, threading, time
import psutil
from cache_client import CacheDataset, Connection
from tests.waiting import suspend

endpoint, pid, wait_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
signal.signal(signal.SIGINT, signal.default_int_handler)
dataset = CacheDataset("t", cache=Connection(endpoint, local=False, deadline_s=wait_s))
assert int(dataset[1]["row"]) == 1
node = psutil.Process(pid)
suspend(node)
try:
    begun = time.monotonic()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    kept = None
    try:
        dataset[2]
    except KeyboardInterrupt as error:
        kept = error  # and with it all that it holds
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert kept is not None and time.monotonic() - begun < wait_s / 4, time.monotonic() - begun
    assert os.waitpid(child, 0)[1] == 0
finally:
    node.resume()
assert int(dataset[3]["row"]) == 3
dataset.close()
print("read on")
"""


def test_an_interrupt_ends_a_read_of_a_node_that_hangs_and_no_fork_waits_for_it(
    tmp_path: Path,
) -> None:
    """In a process of its own: a fork also waits for the gRPC that other tests left."""
    source = write_numbered(tmp_path / "t", ROWS)
    with LocalCluster(nodes=1) as nodes:
        CacheClient(nodes.endpoint).load(DatasetSpec("t", source))
        arguments = [nodes.endpoint, str(nodes.nodes[0].pid), str(8 * WAIT_S)]
        done = forked_python.run(
            [sys.executable, "-c", INTERRUPTED, *arguments],
            capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "read on\n"), done.stderr


def test_a_read_that_can_begin_no_thread_says_so_and_a_later_one_reads(
    cluster: LocalCluster, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # as where a container has too many

    with CacheDataset(table, cache=Connection(cluster.endpoint, local=False)) as dataset:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                dataset[1]
        assert int(dataset[2]["row"]) == 2


# -- arguments -------------------------------------------------------------------------------------


def test_every_bad_setting_is_quoted_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        CacheDataset("", cache="nowhere", stack=1)
    for words in ("''", "got 'nowhere'", "got 1"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"name": "not-there"}, DatasetNotFoundError, "'not-there'"),
        ({"columns": ["nope"]}, RequestError, "'nope'"),
        ({"stack": {"x": ["text"]}}, ConfigError, "'text'"),
        ({"batch_format": "pandas"}, ConfigError, "'pandas'"),
    ],
)
def test_what_is_not_there_is_named(
    cluster: LocalCluster, table: str, arguments: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        CacheDataset(**grouped(cache=cluster.endpoint, **{"name": table, **arguments}))


# -- the guide -------------------------------------------------------------------------------------


BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
GRAIN = [block for block in BLOCKS if "import grain" in block]
# Weights that training sets are in their own test.
OTHERS = [block for block in BLOCKS if block not in GRAIN and "set_weights" not in block]


@pytest.fixture
def run_block(
    cluster: LocalCluster,
    client: CacheClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], list[Any]]]:
    """Runs a block of the guide, on tables of its names; gives what its training loop got."""
    columns = {name: np.arange(600, dtype=np.float32) for name in ("rooms", "area", "price")}
    columns["street"] = np.arange(600) % 40
    image = io.BytesIO()
    Image.new("RGB", (4, 3)).save(image, "PNG")
    tables = {
        "houses": columns,
        "new-houses": columns,
        "streets": {"street": np.arange(40), "income": np.arange(40.0)},
        "photos": {"image": [image.getvalue()] * 300, "label": np.arange(300)},
    }
    loaded: list[str] = []
    monkeypatch.setenv("CACHE_ENDPOINT", cluster.endpoint)

    def run(block: str) -> list[Any]:
        steps: list[Any] = []
        source = block
        for name, table in tables.items():
            if f'"{name}"' in block:
                pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
                loaded.append(f"guide-{name}")
                client.load(DatasetSpec(loaded[-1], tmp_path / f"{name}.parquet"))
                source = source.replace(f'"{name}"', repr(loaded[-1]))
        exec(compile(source, GUIDE.name, "exec"), {"train_step": lambda *a: steps.append(a)})
        return steps

    yield run
    for name in loaded:
        client.drop(name)


def test_the_guide_has_its_examples() -> None:
    assert (len(OTHERS), len(GRAIN)) == (13, 1)


@pytest.mark.parametrize("block", OTHERS, ids=range(len(OTHERS)))
def test_an_example_of_the_guide_runs_as_it_stands_on_the_device_that_is_here(
    run_block: Callable[[str], list[Any]], block: str
) -> None:
    if not torch.cuda.is_available():
        block = block.replace('"cuda"', '"cpu"')
    assert run_block(block)


@pytest.mark.frameworks
def test_the_example_of_the_guide_with_grain_runs_as_it_stands(
    run_block: Callable[[str], list[Any]],
) -> None:
    pytest.importorskip("grain", reason="grain is not installed")
    batches = run_block(GRAIN[0])
    assert sum(len(area) for area, _ in batches) == 600
    assert sorted(np.concatenate([price for _, price in batches])) == list(range(600))
