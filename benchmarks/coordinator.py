"""What does a coordinator cost with 1,000 nodes, 100,000 shards and 10,000 readers?

    python -m benchmarks.coordinator [--quick]

A real cache server coordinates. One other process stands for all other nodes, over real gRPC: each
sends the heartbeats of a node, has each shard at once that the coordinator names, and asks for the
shard map when its readers begin and renew their leases. Readers report as those of one job do,
together 50 reports a second. Each byte range of small Parquet files is a shard; no replica.

Measured are the processor time of the coordinator while the dataset loads, while all readers begin
within half a minute, and while nothing changes; the size of the shard map; and after which time the
first and the last shards of ten nodes that stop are given to others, which hear of them in the
answers to their next heartbeats.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.common import memory_directory, write_result
from cache_client import CacheClient, Connection, DatasetSpec
from cache_client.reading.lease import _RENEWALS_PER_LEASE
from cache_protocol.errors import NodeUnavailableError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.channels import MAX_MESSAGE_BYTES
from cache_server import LocalCluster
from cache_server.coordination.members import membership

NODES, SHARDS, READERS = 999, 100_000, 10_000
FILES = 100
LOST = 10
REPORTS_PER_S = 50  # of all ranks of a job
BEGIN_S, STEADY_S = 30.0, 30.0
NODE_TIMEOUT_S = 10.0
LIMIT_S = 1200.0  # of the whole run
TARGETS = {"steady": 0.2, "map_bytes": 8e6, "lost_s": 2.0}
_SERVICE = "/cache.v1.Coordinator/"


@dataclass
class SimulatedNode:
    """A node that has each shard at once.

    Attributes:
        shards: that it has, as it reports them.
        told: shards of the last answer.
        report: number of the last report; ``known`` and ``answer``: of the report and the answer
            that the other side has.
        is_changed: its shards differ from that report.
        reports: of readers, for the next heartbeat.
        map_tag: of the shard map that it has.
        asks: held while it asks for the map.
    """

    node: pb.Node
    shards: dict[int, pb.ActualShard] = field(default_factory=dict)
    told: frozenset[int] = frozenset()
    plan: pb.LoadPlan = field(default_factory=pb.LoadPlan)
    reports: list[pb.ReaderReport] = field(default_factory=list)
    map_tag: str = ""
    report: int = 0
    known: int = 0
    answer: int = 0
    is_changed: bool = True
    asks: asyncio.Lock = field(default_factory=asyncio.Lock)

    def heartbeat(self) -> bytes:
        """The message of the next heartbeat."""
        self.report += 1
        request = pb.HeartbeatRequest(
            node=self.node,
            reports=self.reports,
            report=self.report,
            since=self.known,
            answer=self.answer,
        )
        self.reports = []
        if self.shards:
            actual = request.datasets.add(
                dataset=self.plan.dataset, fingerprint=self.plan.fingerprint, idle_s=1.0
            )
            if self.known and not self.is_changed:
                actual.unchanged = True
            else:
                actual.attempt = self.plan.attempt
                actual.shards.extend(self.shards.values())
        return request.SerializeToString()

    def apply(self, answer: pb.HeartbeatResponse) -> bool:
        """Takes the shards of an answer; returns whether there is news to report."""
        self.known = 0 if answer.resend else self.report
        if answer.resend or answer.unchanged:
            return answer.resend
        has_news = False
        self.answer = answer.answer
        for desired in answer.datasets:
            self.told = frozenset(shard.index for shard in desired.shards)
            self.plan = desired.plan
            for shard in desired.shards:
                held = self.shards.get(shard.index)
                if held is None and not (shard.splits or shard.copy_from):
                    continue  # another node loads it first
                if held is None:
                    rows = shard.num_rows or sum(split.num_rows for split in shard.splits)
                    self.shards[shard.index] = pb.ActualShard(
                        index=shard.index,
                        sealed=True,
                        num_rows=rows,
                        num_bytes=rows * 16,
                        checksum=f"{shard.index:032x}",
                    )
                    has_news = True
                elif desired.rows_fixed and not held.rows_fixed:
                    held.rows_fixed, held.row_start = True, shard.row_start
                    has_news = True
        self.is_changed = has_news
        return has_news


class World:
    """All nodes but the coordinator, in one process."""

    def __init__(self, location: str, token: str, num_nodes: int, spec: DatasetSpec) -> None:
        self._location = location
        self._metadata = (("authorization", f"Bearer {token}"),)
        self.nodes = [_simulated_node(number) for number in range(num_nodes)]
        self.spec = spec
        self.fingerprint = ""
        self.lost: set[int] = set()
        self.heartbeats = self.unanswered = 0
        self.maps = self.map_bytes = 0
        self._asked = itertools.cycle(range(num_nodes))
        self._beat: Callable[..., Any]
        self._get: Callable[..., Any]

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Beats for every node until the end of the block."""
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        async with (
            _answering_control(self.nodes),
            grpc.aio.insecure_channel(self._location, options) as channel,
        ):
            self._beat = channel.unary_unary(f"{_SERVICE}Heartbeat")
            self._get = channel.unary_unary(f"{_SERVICE}GetDataset")
            beats = [
                asyncio.create_task(self._beats(number), name=f"node {number}")
                for number in range(len(self.nodes))
            ]
            for beat in beats:
                beat.add_done_callback(_raise_failure)
            try:
                yield
            finally:
                for beat in beats:
                    beat.cancel()
                await asyncio.gather(*beats, return_exceptions=True)

    async def _beats(self, number: int) -> None:
        node, timeout_s = self.nodes[number], 10.0
        await asyncio.sleep(random.random())
        while number not in self.lost:
            request = node.heartbeat()
            try:
                content = await self._beat(request, metadata=self._metadata, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:  # others are called back first
                    await asyncio.sleep(random.random())
                    continue
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                self.unanswered += 1
                timeout_s *= 2  # as a node does
                node.known = 0
                await asyncio.sleep(random.random())
                continue
            answer = pb.HeartbeatResponse.FromString(content)
            self.heartbeats += 1
            timeout_s = max(timeout_s / 2, 10.0)
            if not node.apply(answer):
                await asyncio.sleep(answer.interval_s)

    async def read_map(self) -> None:
        """The next node asks for the shard map, for one of its readers, unless it has it."""
        node = self.nodes[next(self._asked)]
        async with node.asks:
            request = pb.GetDatasetRequest(
                name=self.spec.name,
                fingerprint=self.fingerprint,
                lease=True,
                known_tag=node.map_tag,
                short_shards=True,
            )
            answer = await self._get(
                request.SerializeToString(), metadata=self._metadata, timeout=60
            )
        if len(answer) > 0:
            self.map_bytes = len(answer)
            self.maps += 1
            node.map_tag = _tag(answer)

    async def begin_readers(self, num_readers: int, seconds: float) -> None:
        """All readers ask for the map, evenly over some time."""
        asked = []
        begun = time.monotonic()
        for number in range(num_readers):
            asked.append(asyncio.create_task(self.read_map()))
            await asyncio.sleep(begun + seconds * number / num_readers - time.monotonic())
        await asyncio.gather(*asked)

    async def read(self, num_readers: int, lease_s: float, seconds: float) -> None:
        """Readers report and renew their leases for some time."""
        renewals_per_s = num_readers * _RENEWALS_PER_LEASE / lease_s
        ends_at = time.monotonic() + seconds
        tick_s = 0.1
        owed_renewals = owed_reports = 0.0
        ranks = itertools.cycle(range(num_readers))
        renewing = set()
        while time.monotonic() < ends_at:
            owed_renewals += renewals_per_s * tick_s
            owed_reports += REPORTS_PER_S * tick_s
            for _ in range(int(owed_renewals)):
                renewing.add(asyncio.create_task(self.read_map()))
            for _ in range(int(owed_reports)):
                rank = next(ranks)
                self.nodes[rank % len(self.nodes)].reports.append(
                    _report(self.spec.name, self.fingerprint, rank, num_readers)
                )
            owed_renewals, owed_reports = owed_renewals % 1, owed_reports % 1
            await asyncio.sleep(tick_s)
        await asyncio.gather(*renewing)

    async def lose(self, numbers: set[int]) -> tuple[float, float]:
        """Nodes stop; returns the seconds until others have the first and all of their shards."""
        orphaned = {index for number in numbers for index in self.nodes[number].shards}
        living = [node for number, node in enumerate(self.nodes) if number not in numbers]
        self.lost |= numbers
        stopped_at, first_s = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(0.1)
            left = len(orphaned - frozenset().union(*(node.told for node in living)))
            if left < len(orphaned) and not first_s:
                first_s = time.monotonic() - stopped_at
            # The rest is given to the coordinator's own node: one on average, seldom ten.
            if left <= 10 + 2 * len(orphaned) / len(living):
                return first_s, time.monotonic() - stopped_at


async def _ask(call: Callable[..., Any], *arguments: str) -> Any:
    """Calls the cache in a thread, until it answers."""
    while True:
        try:
            return await asyncio.to_thread(call, *arguments)
        except NodeUnavailableError as error:
            print(error, file=sys.stderr)


def _raise_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        print(task.get_name(), repr(error)[:500], file=sys.stderr)


def _tag(answer: bytes) -> str:
    """The tag of a map, which is the last field of its message; it is not parsed as a whole."""
    start = answer.rindex(b"\x7a\x20") + 2
    return answer[start : start + 32].decode()


def _simulated_node(number: int) -> SimulatedNode:
    place = f"{10 + number // 65536}.{number // 256 % 256}.{number % 256}.1"
    return SimulatedNode(
        pb.Node(
            id=uuid.uuid4().hex,
            flight_location=f"grpc://{place}:8815",
            control_location=f"{place}:8816",
            cache_dir="/cache",
            memory_limit_bytes=2**36,
            process=uuid.uuid4().hex,
        )
    )


@asynccontextmanager
async def _answering_control(nodes: list[SimulatedNode]) -> AsyncIterator[None]:
    """The control port of every node, for the coordinator that calls them back."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(_Healthy(), server)
    port = server.add_insecure_port("0.0.0.0:0")
    await server.start()
    for number, each in enumerate(nodes):  # a machine has a few members only
        each.node.control_location = (
            f"127.1.0.{1 + number // membership.MAX_MEMBERS_OF_HOST}:{port}"
        )
    try:
        yield
    finally:
        await server.stop(None)


class _Healthy(health_pb2_grpc.HealthServicer):
    async def Check(self, request: object, context: object) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


def _report(dataset: str, fingerprint: str, rank: int, ranks: int) -> pb.ReaderReport:
    return pb.ReaderReport(
        namespace="default",
        principal="trainers",
        job="train",
        dataset=dataset,
        fingerprint=fingerprint,
        rank=rank,
        world_size=ranks,
        run=f"{rank:032x}",
        step=1,
        num_steps=1_000,
        elapsed_s=60.0,
        waited_s=1.0,
        computed_s=59.0,
        batches=1,
        rows=1024,
        expires_s=600.0,
    )


def write_table(folder: Path, num_shards: int) -> None:
    """Files whose row groups become one shard each."""
    groups, rows = 2 * num_shards // FILES, 8  # a byte range may hold none
    table = pa.table({"x": np.arange(groups * rows), "y": np.zeros(groups * rows)})
    for number in range(FILES):
        pq.write_table(table, folder / f"{number:04}.parquet", row_group_size=rows)


class Clock:
    """Processor time and wall time of a process since the last look."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.look()

    def look(self) -> dict[str, float]:
        """Seconds, processor seconds, and their ratio."""
        times = self._process.cpu_times()
        now, cpu = time.monotonic(), times.user + times.system
        before = getattr(self, "_before", (now, cpu))
        self._before = (now, cpu)
        seconds, cpu_s = now - before[0], cpu - before[1]
        return {"seconds": seconds, "cpu_s": cpu_s, "cores": cpu_s / max(seconds, 1e-9)}

    @property
    def memory_bytes(self) -> int:
        """Resident memory."""
        return int(self._process.memory_info().rss)


class _Told(dict[str, Any]):
    """A result whose parts are shown as soon as they are known."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        print(name, value, file=sys.stderr, flush=True)


async def measure(
    num_nodes: int, num_shards: int, num_readers: int, *, quick: bool
) -> dict[str, Any]:
    """All phases; the result file."""
    begin_s, steady_s = (5.0, 5.0) if quick else (BEGIN_S, STEADY_S)
    with (
        memory_directory("coordinator") as folder,
        LocalCluster(node_timeout_s=NODE_TIMEOUT_S) as cluster,
    ):
        write_table(folder, num_shards)
        spec = DatasetSpec("table", folder, target_shard_bytes=1)
        world = World(cluster.nodes[0].control_location, str(cluster.token), num_nodes, spec)
        client = CacheClient(Connection(cluster.endpoint, token=cluster.token, deadline_s=600))
        clock = Clock(cluster.nodes[0].pid)
        result = _Told({"nodes": num_nodes, "shards": num_shards, "readers": num_readers})
        async with world.run():
            while sum(node.alive for node in await _ask(client.nodes)) <= num_nodes:
                await asyncio.sleep(0.5)
            clock.look()
            info = await asyncio.to_thread(client.load, spec)
            result["shards"] = info.num_shards  # a byte range may have no row group, or two
            world.fingerprint = info.fingerprint
            result["load"] = clock.look()
            await asyncio.sleep(2 * NODE_TIMEOUT_S if not quick else 2)
            beats = world.heartbeats
            clock.look()
            await asyncio.sleep(steady_s)
            result["idle"] = clock.look()
            result["idle"]["heartbeats_per_s"] = (world.heartbeats - beats) / steady_s
            await world.begin_readers(num_readers, begin_s)
            result["begin"] = clock.look() | {"maps": world.maps}
            result["map_bytes"] = world.map_bytes
            await world.read(num_readers, 600.0, steady_s)
            result["steady"] = clock.look()
            first_s, last_s = await world.lose(set(range(min(LOST, num_nodes // 2))))
            result["first_given_s"] = first_s - NODE_TIMEOUT_S
            result["lost_s"] = last_s - NODE_TIMEOUT_S
            result["lost"] = clock.look()
            result["memory_bytes"] = clock.memory_bytes
            result["unanswered_heartbeats"] = world.unanswered
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20 nodes, 1,000 shards, 100 readers")
    quick = parser.parse_args(arguments).quick
    sizes = (20, 1_000, 100) if quick else (NODES, SHARDS, READERS)
    result = asyncio.run(asyncio.wait_for(measure(*sizes, quick=quick), LIMIT_S))
    result["targets"] = TARGETS
    print(f"written to {write_result('coordinator-quick' if quick else 'coordinator', result)}")


if __name__ == "__main__":
    main()
