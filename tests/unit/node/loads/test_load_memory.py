"""The loads of a node begin in turn, when there is the memory for them."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError
from cache_protocol.storage.memory_budget import memory_of_container
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.desired import DesiredShard
from cache_server.node.links.heartbeat_messages import decode_plan
from cache_server.node.loads.load_memory import LoadMemory
from cache_server.node.loads.loading import CancelledError, Job
from cache_server.plan.pinned_version import PinnedVersion, plan_version
from tests.waiting import wait_until

GIB, MIB = 1 << 30, 1 << 20
WAIT_S = 60.0


@pytest.fixture
def plan(tmp_path: Path) -> PinnedVersion:
    pq.write_table(pa.table({"x": range(100)}), tmp_path / "a.parquet")
    return plan_version(DatasetSpec("t", tmp_path / "a.parquet")).version


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def memory() -> Iterator[LoadMemory]:
    """Of a container of 4 GiB, where 896 MiB are for loads."""
    made = LoadMemory(memory_of_container(4 * GIB), lambda: 3 * GIB)
    yield made
    made.close()


class Load:
    """One load in a thread; it reads until `end` is set."""

    def __init__(
        self, memory: LoadMemory, threads: ThreadPoolExecutor, plan: PinnedVersion, group_bytes: int
    ) -> None:
        self.begun, self.end = threading.Event(), threading.Event()
        self.job = job_of(plan, group_bytes)
        self.future: Future[int] = threads.submit(memory.run, self.job, self._read)

    def _read(self) -> int:
        self.begun.set()
        assert self.end.wait(WAIT_S)
        return threading.get_ident()

    def finish(self) -> int:
        """The thread that read."""
        self.end.set()
        return self.future.result(WAIT_S)


def job_of(plan: PinnedVersion, group_bytes: int) -> Job:
    assert plan.shards is not None
    split = replace(plan.shards[0].splits[0], group_bytes=group_bytes)
    load_plan = decode_plan(plan.to_load_plan(1), pb.Secrets())
    return Job(load_plan, DesiredShard(0, splits=(split,)))


@pytest.fixture
def start(
    memory: LoadMemory, threads: ThreadPoolExecutor, plan: PinnedVersion
) -> Iterator[Callable[[int], Load]]:
    loads: list[Load] = []

    def begin(group_bytes: int) -> Load:
        loads.append(Load(memory, threads, plan, group_bytes))
        return loads[-1]

    yield begin
    for load in loads:
        load.end.set()


def test_loads_begin_one_after_the_other_where_the_memory_does_for_one(
    memory: LoadMemory, start: Callable[[int], Load]
) -> None:
    first = start(140 * MIB)
    assert first.begun.wait(WAIT_S)
    second = start(140 * MIB)
    wait_until(lambda: memory.num_waiting == 1, WAIT_S, "the second waits")

    assert not second.begun.is_set()
    thread = first.finish()
    assert second.begun.wait(WAIT_S)
    assert second.finish() == thread  # for which the allocator keeps what the first one freed


def test_loads_of_small_row_groups_run_beside_each_other(start: Callable[[int], Load]) -> None:
    loads = [start(5 * MIB) for _ in range(3)]

    assert all(load.begun.wait(WAIT_S) for load in loads)
    assert len({load.finish() for load in loads}) == 3


def test_a_small_load_does_not_overtake_a_large_one_that_waits(
    memory: LoadMemory, start: Callable[[int], Load]
) -> None:
    running = start(5 * MIB)
    assert running.begun.wait(WAIT_S)
    large = start(140 * MIB)
    wait_until(lambda: memory.num_waiting == 1, WAIT_S, "the large one waits")
    small = start(5 * MIB)
    wait_until(lambda: memory.num_waiting == 2, WAIT_S, "the small one waits")

    assert not small.begun.is_set()
    running.finish()
    assert large.begun.wait(WAIT_S)
    large.finish()
    small.finish()


def test_a_load_that_is_not_wanted_any_more_stops_waiting(
    memory: LoadMemory, start: Callable[[int], Load]
) -> None:
    first = start(140 * MIB)
    assert first.begun.wait(WAIT_S)
    second = start(140 * MIB)
    wait_until(lambda: memory.num_waiting == 1, WAIT_S, "the second waits")

    second.job.cancelled.set()

    with pytest.raises(CancelledError):
        second.future.result(WAIT_S)
    assert memory.num_waiting == 0
    third = start(140 * MIB)
    first.finish()
    third.finish()


def test_memory_is_given_back_by_a_load_that_fails(memory: LoadMemory, plan: PinnedVersion) -> None:
    def fail() -> None:
        raise LoadError("no such column")

    for _ in range(2):
        with pytest.raises(LoadError, match="no such column"):
            memory.run(job_of(plan, 140 * MIB), fail)


def test_a_row_group_that_would_end_the_process_is_refused_by_name(
    memory: LoadMemory, start: Callable[[int], Load]
) -> None:
    with pytest.raises(LoadError) as refused:
        start(600 * MIB).future.result(WAIT_S)

    for part in ("a.parquet", "600.0 MiB", "1.8 GiB", "4.0 GiB", "896.0 MiB", "smaller row groups"):
        assert part in str(refused.value)


def test_a_large_row_group_is_read_where_the_shards_leave_the_room(
    threads: ThreadPoolExecutor, plan: PinnedVersion
) -> None:
    memory = LoadMemory(memory_of_container(4 * GIB), lambda: GIB)

    Load(memory, threads, plan, 600 * MIB).finish()

    memory.close()


def test_loads_of_a_node_without_a_limit_never_wait(
    threads: ThreadPoolExecutor, plan: PinnedVersion
) -> None:
    memory = LoadMemory(None, lambda: 0)
    together = threading.Barrier(8)
    jobs = [job_of(plan, 100 * GIB) for _ in range(8)]
    wait = partial(together.wait, WAIT_S)

    list(threads.map(lambda job: memory.run(job, wait), jobs))

    memory.close()
