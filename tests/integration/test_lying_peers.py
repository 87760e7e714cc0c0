"""Attacks of a node or a coordinator that lies, on real processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_server.local import LocalNode
from tests.waiting import wait_until

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


@pytest.mark.parametrize("as_kept", [False, True])
def test_a_false_coordinator_makes_no_node_touch_what_is_outside_its_directory(
    tmp_path: Path, as_kept: bool
) -> None:
    victim = tmp_path / "victim" / "f00"
    victim.mkdir(parents=True)
    (victim / "manifest.jsonl").write_text("precious", encoding="utf-8")
    coordinator = FalseCoordinator()
    if as_kept:
        coordinator.answer.kept.add(dataset="../victim", fingerprint="f00")
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
