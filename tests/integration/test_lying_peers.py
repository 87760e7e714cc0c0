"""Attacks of a node or a coordinator that lies, on real processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path

import grpc
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec, Reading
from cache_protocol.errors import RequestError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_server.local import LocalCluster, LocalNode
from cache_server.plan.pinned_version import plan_version, split_to_proto
from cache_server.rpc.flight_service import MAX_ROW_IDS
from tests import flight_clients, forked_python
from tests.answering_control import answering_control
from tests.conftest import write_numbered
from tests.control_clients import open_channel
from tests.false_nodes import FalseNode, false_copy, false_report
from tests.waiting import suspend, wait_until

WAIT_S = 30.0


class FalseCoordinator(cache_pb2_grpc.CoordinatorServicer):
    """Answers each heartbeat with `answer`."""

    def __init__(self) -> None:
        self.answer = pb.HeartbeatResponse(interval_s=0.05)
        self.reports: list[pb.HeartbeatRequest] = []

    def Heartbeat(self, request: pb.HeartbeatRequest, context: object) -> pb.HeartbeatResponse:
        self.reports.append(request)
        return self.answer


@contextmanager
def false_coordinator(servicer: FalseCoordinator) -> Iterator[str]:
    """Serves it; yields ``host:port``."""
    server = grpc.server(ThreadPoolExecutor(2))
    cache_pb2_grpc.add_CoordinatorServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize("as_gone", [False, True])
def test_a_false_coordinator_makes_no_node_touch_what_is_outside_its_directory(
    tmp_path: Path, as_gone: bool
) -> None:
    victim = tmp_path / "victim" / "f00"
    victim.mkdir(parents=True)
    (victim / "manifest.jsonl").write_text("precious", encoding="utf-8")
    coordinator = FalseCoordinator()
    if as_gone:
        coordinator.answer.gone.add(dataset="../victim", fingerprint="f00")
    else:
        desired = coordinator.answer.datasets.add()
        desired.plan.dataset, desired.plan.fingerprint = "../victim", "f00"
    with false_coordinator(coordinator) as location:
        node = LocalNode(tmp_path / "node", ["--coordinator", location])
        try:
            node.start()
            problem = "not a name of a dataset: '../victim'"
            wait_until(lambda: problem in node.log_tail(), WAIT_S, problem)
            coordinator.answer = pb.HeartbeatResponse(interval_s=0.05)  # drop it again
            seen = len(coordinator.reports)
            wait_until(lambda: len(coordinator.reports) > seen + 3, WAIT_S, "more heartbeats")
            assert node.exit_code is None and "Traceback" not in node.log_tail()
        finally:
            node.close()
    assert [path.name for path in (tmp_path / "victim").rglob("*")] == ["f00", "manifest.jsonl"]


def test_a_reader_reads_on_while_made_up_nodes_lie_about_its_shards(
    tmp_path: Path, dataset_name: str
) -> None:
    source = write_numbered(tmp_path / "source", 4000, files=4)
    with (
        answering_control() as control,
        LocalCluster(insecure=True) as cluster,  # as a node of the cache
    ):
        client = CacheClient(cluster.endpoint)
        info = client.load(DatasetSpec(dataset_name, source, target_shard_bytes=1))
        report = pb.HeartbeatRequest(
            node=pb.Node(
                id="liar", flight_location="grpc://127.0.0.1:1", cache_dir="/nowhere",
                control_location=control,
            )
        )  # fmt: skip
        claim = report.datasets.add(dataset=dataset_name, fingerprint=info.fingerprint, attempt=0)
        claim.shards.add(index=0, sealed=True, num_rows=1, checksum="x", rows_fixed=True)
        rows = []
        with grpc.insecure_channel(cluster.nodes[0].control_location) as channel:
            coordinator = cache_pb2_grpc.CoordinatorStub(channel)
            dataset = CacheIterableDataset(
                dataset_name, batch_size=500, cache=cluster.endpoint, columns=["row"]
            )
            for batch in dataset:
                coordinator.Heartbeat(report)
                rows += batch["row"].tolist()
            report.node.cache_dir = "relative"
            with pytest.raises(grpc.RpcError, match="not an absolute cache_dir: 'relative'"):
                coordinator.Heartbeat(report)
        assert rows == list(range(4000))
        assert client.describe(dataset_name).state == "ready"
        assert {node.id: bool(node.untrusted) for node in client.nodes()} == {
            "liar": True, cluster.nodes[0].node_id: False,
        }  # fmt: skip
        assert cluster.nodes[0].log_tail().count("node untrusted id=liar") == 1


@pytest.mark.parametrize("insecure", [False, True])
def test_no_reader_gets_a_row_of_nodes_that_repeat_the_checksums_of_others(
    tmp_path: Path, dataset_name: str, insecure: bool
) -> None:
    source = write_numbered(tmp_path / "source", 4000, files=4)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(2, tmp_path / "cache", insecure=insecure))
        honest = {node.node_id for node in cluster.nodes}
        client = CacheClient(cluster.endpoint)
        client.load(DatasetSpec(dataset_name, source, target_shard_bytes=1))
        false = FalseNode()
        stack.callback(false.shutdown)
        for node in cluster.nodes:
            copy = tmp_path / f"copy-of-{node.node_id}"
            false_copy(node.cache_dir, copy, "false-00")
        coordinator = cache_pb2_grpc.CoordinatorStub(
            stack.enter_context(open_channel(cluster.nodes[0].control_location))
        )
        info = coordinator.GetDataset(pb.GetDatasetRequest(name=dataset_name)).dataset
        control = stack.enter_context(answering_control())
        nodes = [  # one answers nobody
            pb.Node(
                id=f"false-{number:02d}", process="one", cache_dir=str(copy),
                flight_location=false.location if number else "grpc://127.0.0.1:1",
                control_location=control,
            )
            for number in range(11)
        ]  # fmt: skip
        reports = [false_report(info, node) for node in nodes]

        def untrusted() -> set[str]:
            for report in reports:
                coordinator.Heartbeat(report)
            for local in (False, True):
                dataset = CacheIterableDataset(
                    dataset_name,
                    batch_size=500,
                    cache=Connection(cluster.endpoint, local=local),
                    columns=["row"],
                )
                assert [row for batch in dataset for row in batch["row"].tolist()] == [*range(4000)]
            described = coordinator.GetDataset(pb.GetDatasetRequest(name=dataset_name)).dataset
            assert {node.id for node in described.nodes} <= honest
            return {node.id for node in client.nodes() if node.untrusted}

        wanted = {node.id for node in nodes[1:]}
        wait_until(lambda: untrusted() == wanted, WAIT_S, "every false node is untrusted", 0.2)
        assert false.files >= len(wanted) and not false.gathers
        assert len({path.name for path in (tmp_path / "cache").rglob("shard-*.arrow")}) == 4


@pytest.mark.parametrize("kind", ["zeros", "changes"])
def test_no_reader_gets_a_row_of_a_process_that_lies(
    tmp_path: Path, dataset_name: str, kind: str
) -> None:
    source = write_numbered(tmp_path / "source", 4000, files=4)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(2, tmp_path / "cache"))
        client = CacheClient(cluster.endpoint)
        client.load(DatasetSpec(dataset_name, source, target_shard_bytes=1))
        honest = cluster.nodes[1]
        command = [sys.executable, "-m", "tests.false_nodes", kind]
        command += [cluster.nodes[0].control_location, honest.endpoint, str(honest.cache_dir)]
        liar = stack.enter_context(
            forked_python.Popen([*command, dataset_name], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(liar.kill)
        assert liar.stdout is not None
        for line in liar.stdout:
            name, gathers, _ = line.split()
            dataset = CacheIterableDataset(
                dataset_name,
                batch_size=500,
                cache=Connection(cluster.endpoint, local=False),
                columns=["row"],
            )
            assert [row for batch in dataset for row in batch["row"].tolist()] == [*range(4000)]
            assert not int(gathers)
            if any(node.id == name and node.untrusted for node in client.nodes()):
                break
        later = (line.split() for line in islice(liar.stdout, 200))
        assert any(int(files) >= 2 for _, gathers, files in later if not int(gathers))


def test_a_node_reads_no_file_of_its_machine_for_a_caller_or_a_coordinator(
    tmp_path: Path,
) -> None:
    source = write_numbered(tmp_path / "source", 10)
    ports = ["--flight-port", "0", "--control-port", "0", "--http-port", "0"]
    command = [sys.executable, "-m", "cache_server", "serve", *ports]
    planned = plan_version(DatasetSpec("t", source)).version
    assert planned.shards is not None
    coordinator = FalseCoordinator()
    desired = coordinator.answer.datasets.add(plan=planned.to_load_plan(0))
    desired.shards.add(index=0, splits=map(split_to_proto, planned.shards[0].splits))
    with ExitStack() as stack:
        location = stack.enter_context(false_coordinator(coordinator))
        nodes = [
            stack.enter_context(
                forked_python.Popen(
                    [*command, "--cache-dir", str(tmp_path / name), *more],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                )
            )
            for name, more in (("honest", []), ("misled", ["--coordinator", location]))
        ]  # fmt: skip
        for node in nodes:
            stack.callback(node.kill)
        assert nodes[0].stdout is not None
        client = CacheClient(json.loads(nodes[0].stdout.readline())["flight"])
        for place in (source, "/etc/shadow", "http://127.0.0.1:1/x.csv", "http://169.254.169.254/"):
            spec = DatasetSpec("t", place, format="csv")
            for call in (client.load, client.plan):
                with pytest.raises(RequestError, match=r"this cache may not read .*--allow-source"):
                    call(spec)

        def failure() -> str:
            shards = [s for r in coordinator.reports for d in r.datasets for s in d.shards]
            return next((shard.failure for shard in shards if shard.failure), "")

        wait_until(lambda: bool(failure()), WAIT_S, "the misled node refuses")
        assert "this cache may not read" in failure() and "part-000.parquet" in failure()


def test_a_hundred_loads_from_a_server_that_never_answers_delay_nobody(
    tmp_path: Path, dataset_name: str
) -> None:
    source = write_numbered(tmp_path / "source", 10)
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=200))
        cluster = stack.enter_context(LocalCluster(insecure=True))
        channel = stack.enter_context(grpc.insecure_channel(cluster.nodes[0].control_location))
        coordinator = cache_pb2_grpc.CoordinatorStub(channel)
        place = f"http://127.0.0.1:{silent.getsockname()[1]}/x.parquet"
        request = pb.CreateDatasetRequest(spec=DatasetSpec("slow", place).to_proto())
        calls = [coordinator.CreateDataset.future(request, timeout=600) for _ in range(100)]
        start = time.monotonic()
        assert CacheClient(cluster.endpoint).load(DatasetSpec(dataset_name, source)).num_rows == 10
        assert time.monotonic() - start < 2 * WAIT_S
        for call in calls:
            assert not call.done()
            call.cancel()


def test_a_request_for_too_many_rows_is_refused_with_the_limit(
    cluster: LocalCluster, client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 10)
    info = client.load(DatasetSpec(dataset_name, source))
    request = pb.GatherRequest(dataset=dataset_name, fingerprint=info.fingerprint)
    command = flight.FlightDescriptor.for_command(request.SerializeToString())
    for location in [node.endpoint for node in cluster.nodes]:
        with flight_clients.connect(location) as connection:
            writer, reader = connection.do_exchange(command)
            batch = pa.record_batch({"row": np.zeros(MAX_ROW_IDS + 1, np.int64)})
            writer.begin(batch.schema)
            writer.write_batch(batch)
            writer.done_writing()
            with pytest.raises(flight.FlightError, match="at most 4194304 row ids"):
                reader.read_all()
            with suppress(flight.FlightError, pa.ArrowException):
                writer.close()


def test_a_reader_with_a_replica_soon_leaves_a_frozen_node(
    tmp_path: Path, dataset_name: str
) -> None:
    source = write_numbered(tmp_path / "source", 40_000, files=8)
    with LocalCluster(2) as cluster:
        spec = DatasetSpec(dataset_name, source, target_shard_bytes=1, replicas=2)
        CacheClient(cluster.endpoint).load(spec)
        node = psutil.Process(cluster.nodes[1].pid)
        longest_s = []
        try:
            for freeze_at in (None, 20, None):  # the last reader opens new connections
                dataset = CacheIterableDataset(
                    dataset_name,
                    batch_size=100,
                    cache=Connection(cluster.endpoint, local=False),
                    columns=["row"],
                    reading=Reading(prefetch_batches=1, message_bytes=4096),
                )
                rows, waits_s, before = [], [], time.monotonic()
                for number, batch in enumerate(dataset):
                    waits_s.append(time.monotonic() - before)
                    rows += batch["row"].tolist()
                    if number == freeze_at:
                        suspend(node)
                    before = time.monotonic()
                assert rows == list(range(40_000))
                longest_s.append(max(waits_s))
        finally:
            node.resume()
    # 1.2 to 1.7 s on an idle machine. It was 20 s, and 5 s for new connections.
    usual_s, *frozen_s = longest_s
    assert all(0.5 < found < 4.0 + 5 * usual_s for found in frozen_s), longest_s
