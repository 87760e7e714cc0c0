"""What the suite shares: real clusters on free ports, and tables whose rows know their number."""

from __future__ import annotations

import gc
import itertools
import multiprocessing.spawn
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import IO, Any

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_client import CacheClient, DatasetSpec
from cache_client.flight import connections
from cache_client.reading import reader
from cache_server import LocalCluster
from cache_server.local import LocalNode
from tests import error_rules, forked_python
from tests.waiting import wait_until

# A busy machine is no defect. The cases are the same in each run, so a change fails by what it did;
# --hypothesis-profile=explore makes new ones.
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")

# What only `make test-frameworks` installs.
_FRAMEWORKS = {
    "accelerate",
    "deepspeed",
    "grain",
    "jax",
    "lightning",
    "mpi4py",
    "pyspark",
    "ray",
    "transformers",
    "xgboost",
}


class _WithoutFrameworks(PathFinder):
    """Finds what `make test` installs."""

    @classmethod
    def find_spec(cls, fullname: str, *args: Any, **kwargs: Any) -> ModuleSpec | None:
        return None if fullname in _FRAMEWORKS else super().find_spec(fullname, *args, **kwargs)


def pytest_configure(config: pytest.Config) -> None:
    """Makes the process of a developer who has all extras as that of `make test`.

    Where tests run in the background of a script, SIGINT is ignored, and by children too.
    """
    if "not frameworks" in config.option.markexpr:
        sys.meta_path[sys.meta_path.index(PathFinder)] = _WithoutFrameworks
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # a fifth of the time in which tests are collected


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection looks through it, no fork copies it."""
    gc.enable()
    gc.collect()
    gc.freeze()


_execute_node = LocalNode._spawn


def _fork_node(node: LocalNode, command: Sequence[str], log_file: IO[bytes]) -> None:
    node._process = forked_python.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file, text=True
    )


@pytest.fixture(scope="session", autouse=True)
def forked_nodes() -> Iterator[None]:
    """The nodes of every `LocalCluster` are forks; see `executed_nodes`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalNode, "_spawn", _fork_node)
        yield


@pytest.fixture(scope="session")
def bad_errors() -> Iterator[list[str]]:
    """What is wrong with the errors that this process has made, of the project's classes."""
    with error_rules.watched() as bad:
        yield bad


@pytest.fixture(autouse=True)
def errors_are_good(bad_errors: list[str]) -> Iterator[None]:
    """Every error that a test makes is short, begins with its cause, and advises what is there."""
    yield
    found = [*bad_errors]
    bad_errors.clear()
    assert not found


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """What multiprocessing spawns is forked from what has imported torch."""
    executed = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(forked_python.executable())
    yield
    multiprocessing.set_executable(executed)


@contextmanager
def nodes_executed() -> Iterator[None]:
    """Nodes that are started here are started as a user's are, and start processes as those do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalNode, "_spawn", _execute_node)
        patch.setattr(forked_python, "Popen", subprocess.Popen)
        yield


@pytest.fixture
def executed_nodes() -> Iterator[None]:
    """`nodes_executed` in a test."""
    with nodes_executed():
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Two cache nodes that a test must leave as it found them; use `dataset_name` for names."""
    with LocalCluster(nodes=2) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> CacheClient:
    return CacheClient(cluster.endpoint)


@pytest.fixture
def dataset_name(request: pytest.FixtureRequest, client: CacheClient) -> Iterator[str]:
    """A name no other test uses; its dataset is dropped afterwards."""
    allowed = "".join(c if c.isalnum() else "-" for c in request.node.name)
    name = f"t-{allowed}"[:120]
    yield name
    if name in {info.name for info in client.datasets()}:
        client.drop(name)


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows readers were asked for, at each time."""
    sizes: list[int] = []
    ask = reader.Reader.ask

    def noting(self: reader.Reader, row_ids: Any, *args: Any, **options: Any) -> Any:
        sizes.append(len(row_ids))
        return ask(self, row_ids, *args, **options)

    monkeypatch.setattr(reader.Reader, "ask", noting)
    return sizes


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The location of each gather stream that is opened."""
    opened: list[str] = []
    open_gather = connections.NodeConnection.open_gather

    def spy(self: connections.NodeConnection, *arguments: object, **options: object) -> object:
        opened.append(self.location)
        return open_gather(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(connections.NodeConnection, "open_gather", spy)
    return opened


def numbered_table(num_rows: int, start: int = 0) -> pa.Table:
    """Columns of each kind; ``row`` is the row's number in source order."""
    row = np.arange(start, start + num_rows, dtype=np.int64)
    return pa.table(
        {
            "row": row,
            "a": (row * 0.5).astype(np.float32),
            "b": (row * 2.0).astype(np.float32),
            "label": (row % 7).astype(np.int32),
            "text": pa.array([f"row {number}" for number in row], pa.string()),
        }
    )


def write_numbered(
    directory: Path, num_rows: int, *, files: int = 1, row_group_size: int | None = None
) -> Path:
    """A folder of Parquet files that hold `numbered_table` in order of their names."""
    directory.mkdir(parents=True, exist_ok=True)
    bounds = [num_rows * i // files for i in range(files + 1)]
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        pq.write_table(
            numbered_table(stop - start, start),
            directory / f"part-{index:03d}.parquet",
            row_group_size=row_group_size or max(1, stop - start),
        )
    return directory


def rows_of(batches: Iterable[Any]) -> list[int]:
    """The numbers of the rows of `numbered_table` in batches, in their order."""
    return [row for batch in batches for row in batch["row"].tolist()]


def load_everywhere(cluster: LocalCluster, spec: DatasetSpec) -> Mapping[int, tuple[str, ...]]:
    """Loads and waits for every replica, not only for the first of each shard."""
    client = CacheClient(cluster.endpoint)
    client.load(spec)

    def complete() -> bool:
        homes = client.describe(spec.name).placement.values()
        return all(len(of_shard) == spec.replicas for of_shard in homes)

    wait_until(complete, 30.0, "every replica")
    return client.describe(spec.name).placement
