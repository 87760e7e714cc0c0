"""A node's way to its coordinator, also by a name that a DNS server learns later."""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import NodeUnavailableError, RequestError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire import protocol_version
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.coordinator import Coordinator
from cache_server.node.links import coordinator_link
from cache_server.node.links.coordinator_link import RemoteCoordinator
from cache_server.rpc import call_threads, control_service
from cache_server.rpc.control_service import ControlService
from tests.answering_control import answering_control
from tests.waiting import wait_until

WAIT_S = 60.0
_A, _ANSWER, _NO_SUCH_NAME = 1, 0x8580, 0x8583


class NameServer:
    """Knows no name before `learn`; then 127.0.0.1 for every one."""

    def __init__(self) -> None:
        self.questions = 0
        self._knows = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> NameServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join()
        self._socket.close()

    def learn(self) -> None:
        self._knows = True

    def _serve(self) -> None:
        while message := self._socket.recvfrom(2048):
            question, sender = message
            if not question:
                return
            end = question.index(0, 12) + 5
            (kind,) = struct.unpack(">H", question[end - 4 : end - 2])
            self.questions += kind == _A
            found = self._knows and kind == _A
            flags = _ANSWER if self._knows else _NO_SUCH_NAME
            answer = question[:2] + struct.pack(">HHHHH", flags, 1, int(found), 0, 0)
            answer += question[12:end]
            if found:
                answer += b"\xc0\x0c" + struct.pack(">HHIH", _A, 1, 1, 4) + bytes([127, 0, 0, 1])
            self._socket.sendto(answer, sender)


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return Coordinator(
        Catalogue(tmp_path),
        endpoints=pb.CoordinatorEndpoints(),
        heartbeat_interval_s=1.0,
        node_timeout_s=10.0,
    )


@contextmanager
def served(coordinator: Coordinator) -> Iterator[ControlService]:
    service = ControlService("127.0.0.1", 0)
    service.start(lambda: coordinator)
    yield service
    service.stop(0.0)


@pytest.fixture
def control(coordinator: Coordinator) -> Iterator[ControlService]:
    with served(coordinator) as service:
        yield service


@pytest.fixture
def beat() -> Iterator[pb.HeartbeatRequest]:
    """Of a node that answers the coordinator."""
    with answering_control() as location:
        node = pb.Node(id="one", flight_location="grpc://one:1", control_location=location)
        yield pb.HeartbeatRequest(node=node)


def test_a_coordinator_whose_name_comes_late_is_found_soon_after(
    control: ControlService, monkeypatch: pytest.MonkeyPatch, beat: pb.HeartbeatRequest
) -> None:
    monkeypatch.setattr(coordinator_link, "_RECONNECT_S", 0.05)

    def answered() -> bool:
        try:
            link.heartbeat(beat)
        except NodeUnavailableError as error:
            assert f"127.0.0.1:{names.port}/cache-0.job" in str(error)
            return False
        return True

    with (
        NameServer() as names,
        RemoteCoordinator(f"dns://127.0.0.1:{names.port}/cache-0.job:{control.port}") as link,
    ):
        # One channel of gRPC waits longer each time: it would ask this often in seven minutes.
        wait_until(lambda: answered() or names.questions >= 12, WAIT_S, "twelve questions")
        names.learn()
        wait_until(answered, WAIT_S, "the coordinator answers")


def test_a_description_travels_again_only_after_a_change(
    control: ControlService,
    coordinator: Coordinator,
    tmp_path: Path,
    beat: pb.HeartbeatRequest,
) -> None:
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "x.parquet")
    coordinator.create(DatasetSpec("x", tmp_path / "x.parquet"))
    with RemoteCoordinator(f"127.0.0.1:{control.port}") as link:
        first = link.get("x")
        assert first == coordinator.get("x")
        assert link.get("x") is first
        assert link.get("x", first.fingerprint) is not first
        link.heartbeat(beat)
        coordinator.create(DatasetSpec("x", tmp_path / "x.parquet", replicas=2))
        changed = link.get("x")
        assert changed.spec.replicas == 2
        assert link.get("x") is changed
        for number in range(20):
            coordinator.create(DatasetSpec(f"other-{number}", tmp_path / "x.parquet"))
            link.get(f"other-{number}")
        assert link.get("x") == changed


def test_a_coordinator_that_is_late_with_every_report_takes_them_in_the_end(
    control: ControlService,
    coordinator: Coordinator,
    monkeypatch: pytest.MonkeyPatch,
    beat: pb.HeartbeatRequest,
) -> None:
    monkeypatch.setattr(coordinator_link, "_CALL_TIMEOUT_S", 0.05)
    heartbeat, pause = coordinator.heartbeat, threading.Event()

    def late(*args: Any, **kwargs: Any) -> pb.HeartbeatResponse:
        pause.wait(0.3)
        return heartbeat(*args, **kwargs)

    monkeypatch.setattr(coordinator, "heartbeat", late)
    failed = 0
    with RemoteCoordinator(f"127.0.0.1:{control.port}") as link:
        while True:
            try:
                link.heartbeat(beat)
                break
            except NodeUnavailableError:
                failed += 1
                assert failed < 10
    assert failed > 0


def test_no_node_counts_as_silent_while_reports_wait_to_be_taken(
    control: ControlService, coordinator: Coordinator, beat: pb.HeartbeatRequest
) -> None:
    membership = coordinator.state.membership
    with RemoteCoordinator(f"127.0.0.1:{control.port}") as link:
        link.heartbeat(beat)  # its answer may come before it counts as taken
        wait_until(lambda: membership.waiting_since() == math.inf, WAIT_S, "it was taken")
        before = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            with coordinator.state.changed:  # as while it places shards
                reported = pool.submit(link.heartbeat, beat)
                wait_until(lambda: membership.waiting_since() < math.inf, WAIT_S, "a report waits")
                assert before < membership.waiting_since() < time.monotonic()
            reported.result()
        wait_until(lambda: membership.waiting_since() == math.inf, WAIT_S, "it was taken")


def test_a_report_whose_node_gave_up_before_it_was_read_is_noted(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, beat: pb.HeartbeatRequest
) -> None:
    monkeypatch.setattr(call_threads, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(control_service, "_HEARTBEAT_THREADS", 1)
    membership = coordinator.state.membership
    with (
        served(coordinator) as control,
        RemoteCoordinator(f"127.0.0.1:{control.port}") as link,
        grpc.insecure_channel(f"127.0.0.1:{control.port}") as channel,
        ThreadPoolExecutor(1) as pool,
    ):
        link.heartbeat(beat)
        wait_until(lambda: membership.waiting_since() == math.inf, WAIT_S, "it was taken")
        begun = time.monotonic()
        with coordinator.state.changed:  # as while it places shards
            reported = pool.submit(link.heartbeat, beat)
            wait_until(lambda: membership.waiting_since() < math.inf, WAIT_S, "a report waits")
            with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
                channel.unary_unary("/cache.v1.Coordinator/Heartbeat")(b"", timeout=0.2)
        reported.result()
        wait_until(lambda: membership.unread_at() > begun, WAIT_S, "it was noted")
        assert membership.alive() == {beat.node.id}
        assert membership.members[beat.node.id].last_seen >= membership.unread_at()


def test_a_node_acts_on_no_answer_of_a_coordinator_that_is_too_old(
    control: ControlService, monkeypatch: pytest.MonkeyPatch, beat: pb.HeartbeatRequest
) -> None:
    monkeypatch.setattr(protocol_version, "PROTOCOL", 3)
    with (
        RemoteCoordinator(f"127.0.0.1:{control.port}") as link,  # its endpoints tell no version
        pytest.raises(RequestError, match=r"the coordinator .* too old .* protocol 1"),
    ):
        link.heartbeat(beat)
