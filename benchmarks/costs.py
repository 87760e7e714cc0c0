"""What a row, a message and a request cost this machine: the cost table of `benchmarks.simulation`.

Every entry is processor time of parts that other benchmarks measure too: raw gather streams to one
node, the client without a wire (`benchmarks.scale`), and loads. None is fitted to a prediction. The
constants are the least squares of relative errors over the points; the largest error is kept.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.clusters import drop_all
from benchmarks.common import cpu_seconds, memory_directory, pin, process_cpu_s
from benchmarks.scale import BATCH_SIZE, InstantNode, make_case
from benchmarks.tables import FEATURES, ROW_BYTES
from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_client.flight.connections import NodeConnection
from cache_client.order.order import EpochOrder
from cache_client.reading.shard_maps import wait_for_shard_map
from cache_client.reading.window_sizes import WindowSizes
from cache_protocol.wire.credentials import Credentials
from cache_server import LocalCluster

SHARD_BYTES = 4 * 1024 * 1024  # small, so that a small table lies on eight nodes
# Rows of a request, messages of its answer, and requests of a stream.
_REQUESTS = (
    *((128, 1, 100), (1_024, 1, 100), (7_680, 1, 100), (15_360, 1, 100)),
    *((61_440, 4, 100), (61_440, 30, 100), (128, 1, 1)),
)
_NODES = (1, 2, 4, 8, 100)  # of the client without a wire
_REQUESTS_AHEAD = 2
_IDLE_TIMES = 4
_REPEATS = 3  # of which the least counts; the first one warms up
_LEAST_S = 0.2  # of processor time, for each point


@dataclass(frozen=True)
class Costs:
    """Processor time in nanoseconds, and the size of a row in bytes.

    Attributes:
        plan_row: the client computes the row id and the node of a row.
        client_request, client_message, client_row: the client sends requests, takes messages, and
            makes batches of rows; without ``plan_row``.
        order_row: more for each row of a window from several nodes, which the client puts in order.
        node_request, node_message, node_row: a node takes requests, gathers and sends.
        client_stream, node_stream: a stream is opened for a request.
        node_idle: of one second of a node of a `LocalCluster` that does nothing but report.
        load_byte: a node loads a byte of a shard from Parquet.
        copy_byte: a byte of a shard is copied from node to node; both ends together.
    """

    plan_row: float
    client_request: float
    client_message: float
    client_row: float
    order_row: float
    node_request: float
    node_message: float
    node_row: float
    client_stream: float
    node_stream: float
    node_idle: float
    load_byte: float
    copy_byte: float
    row_bytes: int = ROW_BYTES


def measure_costs(table: Path) -> tuple[Costs, dict[str, float]]:
    """The table, and how far each fit is from its points at most.

    The client runs on the first core of this process, the node on the last one.

    Args:
        table: of `benchmarks.tables.floats`.
    """
    plan, client, client_error = client_without_wire()
    with memory_directory("cache-bench-") as directory, LocalCluster(2, directory) as cluster:
        load, copy = _loads(cluster, table)
        idle = _idle(cluster)
    with memory_directory("cache-bench-") as directory, LocalCluster(1, directory) as cluster:
        spec = DatasetSpec("table", table, target_shard_bytes=SHARD_BYTES)
        CacheClient(cluster.endpoint).load(spec)
        with pin({cluster.nodes[0].pid: -1}):
            wire, node, wire_error, node_error = _wire(cluster)
    costs = Costs(
        plan_row=plan,
        client_request=client[1] + wire[0],
        client_message=wire[1],
        client_row=client[0] + wire[2] - plan,
        order_row=client[2],
        node_request=node[0],
        node_message=node[1],
        node_row=node[2],
        client_stream=wire[3],
        node_stream=node[3],
        node_idle=idle,
        load_byte=load,
        copy_byte=copy,
    )
    return costs, {"client": client_error, "wire, client": wire_error, "wire, node": node_error}


def client_without_wire() -> tuple[float, list[float], float]:
    """Nanoseconds of planning a row; of a row, a request and a row in order; the error of the fit.

    An epoch of a dataset whose nodes answer at once, beside its permutation and routing alone.
    """
    points, costs = [], []
    plan_ns = 0.0
    for num_nodes in _NODES:
        case = make_case(num_nodes * 10, num_nodes, 5)
        steps = WindowSizes(case.shards, BATCH_SIZE).steps_per_window(case.router.num_nodes)
        if num_nodes == 2:
            cpu = _repeated(lambda case=case: case.permute() + case.route())  # type: ignore[misc]
            plan_ns = cpu / sum(map(len, case.windows))
        with (
            mock.patch("cache_client.training.opened.wait_for_shard_map", return_value=case.shards),
            mock.patch("cache_client.reading.node_streams.NodeConnection", InstantNode),
            closing(_windows(steps)) as windows,
        ):
            next(windows)
            costs.append(_repeated(lambda windows=windows: next(windows)))  # type: ignore[misc]
        rows = steps * BATCH_SIZE
        points.append((rows, num_nodes, rows if num_nodes > 1 else 0))
    return plan_ns, *_fit(points, costs)


def _windows(steps: int) -> Any:
    """Reads one window of a dataset of all nodes at each `next`."""
    dataset = CacheIterableDataset(
        "table",
        cache=Connection("grpc://node-0:50051", local=False),
        batch_size=BATCH_SIZE,
        stack={"features": FEATURES},
        shuffle=True,
        seed=1,
    )
    for epoch in itertools.count():
        dataset.set_epoch(epoch)
        batches = iter(dataset)
        for _ in range(len(dataset) // steps):
            yield sum(len(batch["label"]) for batch in itertools.islice(batches, steps))


def _wire(cluster: LocalCluster) -> tuple[list[float], list[float], float, float]:
    """Nanoseconds of a request, a message, a row and a stream, for client and node; the errors.

    From one node, on one stream that has requests ahead, as a reader has it.
    """
    pid = cluster.nodes[0].pid
    credentials = Credentials(token=cluster.token)
    shards = wait_for_shard_map(cluster.endpoint, "table", (), 30.0, credentials)
    row_ids = EpochOrder(shards.num_rows, shuffle=True, seed=1).row_ids(np.arange(shards.num_rows))
    connection = NodeConnection(cluster.endpoint, credentials)
    points: list[tuple[float, ...]] = []
    client_ns: list[float] = []
    node_ns: list[float] = []

    def read(count: int, rows: int, messages: int, requests: int) -> None:
        for first in range(0, count, requests):
            stream = connection.open_gather(
                "table", shards.fingerprint, (), 60.0, rows_per_message=-(-rows // messages)
            )
            asked = range(first, min(count, first + requests))
            for at in asked:
                begin = at * rows % (len(row_ids) - rows)
                stream.send(row_ids[begin : begin + rows])
                if at - first >= _REQUESTS_AHEAD:
                    stream.receive(rows)
            for _ in asked[-_REQUESTS_AHEAD:]:
                stream.receive(rows)
            stream.close()

    for rows, messages, requests in _REQUESTS:
        count = min(1_000, max(4, shards.num_rows // rows))
        spent = []
        for _ in range(1 + _REPEATS):
            before = time.process_time(), process_cpu_s(pid)
            read(count, rows, messages, requests)
            spent.append((time.process_time() - before[0], process_cpu_s(pid) - before[1]))
        for found, values in zip((client_ns, node_ns), zip(*spent[1:], strict=True), strict=True):
            found.append(min(values) / count * 1e9)
        points.append((1, messages, rows, 1 / min(count, requests)))
    connection.close()
    wire, wire_error = _fit(points, client_ns)
    node, node_error = _fit(points, node_ns)
    return wire, node, wire_error, node_error


def _idle(cluster: LocalCluster) -> float:
    """Nanoseconds of a second of one node; the least of several seconds."""
    pids = [node.pid for node in cluster.nodes]
    found = []
    for _ in range(_IDLE_TIMES):
        begun, before = time.perf_counter(), sum(map(process_cpu_s, pids))
        time.sleep(1.0)
        used = sum(map(process_cpu_s, pids)) - before
        found.append(used / len(pids) / (time.perf_counter() - begun) * 1e9)
    return min(found)


def _loads(cluster: LocalCluster, table: Path) -> tuple[float, float]:
    """Nanoseconds of loading a byte, and of copying one to a second node."""
    client = CacheClient(cluster.endpoint)
    found: dict[int, float] = {}
    for replicas in (1, 1, 2):  # the first warms up
        before = cpu_seconds()
        info = client.load(DatasetSpec("table", table, replicas=replicas))
        found[replicas] = (cpu_seconds() - before) / info.num_bytes * 1e9
        drop_all(client)
    return found[1], max(0.0, found[2] - found[1])


def _repeated(run: Callable[[], object]) -> float:
    """Nanoseconds of processor time of one run; the least of some repeats."""
    found = []
    for _ in range(_REPEATS):
        runs, used, begun = 0, 0.0, time.process_time()
        while used < _LEAST_S:
            run()
            runs, used = runs + 1, time.process_time() - begun
        found.append(used / runs * 1e9)
    return min(found)


def _fit(points: Sequence[Sequence[float]], costs: Sequence[float]) -> tuple[list[float], float]:
    """The constants, none negative, and the largest relative error."""
    counts, weights = np.array(points, float), 1 / np.array(costs)
    scaled = counts * weights[:, None]
    used = list(range(counts.shape[1]))
    found = np.zeros(counts.shape[1])
    while used:
        found[:] = 0
        found[used] = np.linalg.lstsq(scaled[:, used], np.ones(len(costs)), rcond=None)[0]
        if found.min() >= 0:
            break
        used.remove(int(found.argmin()))
    return found.tolist(), float(np.abs(scaled @ found - 1).max())
