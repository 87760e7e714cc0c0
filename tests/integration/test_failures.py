"""Nodes that are lost, hang or cannot be reached, and what the others and the callers see."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

import psutil
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import cache_protocol.wire.channels
from cache_client import (
    CacheClient,
    CacheError,
    Connection,
    DatasetInfo,
    DatasetSpec,
    LoadError,
    NodeUnavailableError,
    NotReadyError,
)
from cache_client.control import coordinator
from cache_protocol.v1 import cache_pb2 as pb
from cache_server import LocalCluster
from cache_server.coordination.members import placement
from cache_server.local import LocalNode
from cache_server.plan.pinned_version import plan_version
from tests.conftest import write_numbered
from tests.flight_clients import connect
from tests.store_stubs import FilesStub, Served
from tests.waiting import suspend, wait_until

WAIT_S = 30.0
NUM_ROWS, FILES = 60, 6  # each file becomes a shard
OPTIONS = flight.FlightCallOptions(timeout=60)
ROW_SCHEMA = pa.schema([pa.field("row", pa.int64())])


@pytest.fixture(scope="module")
def breakable() -> Iterator[LocalCluster]:
    """Three nodes that these tests may break; all are running between two tests."""
    with LocalCluster(nodes=3, node_timeout_s=1.5) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def patient() -> Iterator[LocalCluster]:
    """Two nodes that may hang for a while before they count as lost."""
    with LocalCluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "source", NUM_ROWS, files=FILES)


@pytest.fixture
def client(breakable: LocalCluster) -> Iterator[CacheClient]:
    """A client of the breakable nodes, which run again without a dataset afterwards."""
    found = CacheClient(Connection(breakable.endpoint, deadline_s=15.0))
    yield found
    for node in breakable.nodes:
        with suppress(CacheError):  # it runs
            node.start()
    breakable.wait_for_nodes()
    for info in found.datasets():
        found.drop(info.name)


@pytest.fixture
def patient_client(patient: LocalCluster) -> Iterator[CacheClient]:
    """A client of the patient nodes, which have no dataset afterwards."""
    found = CacheClient(Connection(patient.endpoint, deadline_s=15.0))
    yield found
    for info in found.datasets():
        found.drop(info.name)


def load(client: CacheClient, source: Path, replicas: int) -> DatasetInfo:
    """Loads the table and waits for every replica, not just the first of each shard."""
    client.load(DatasetSpec("table", source, target_shard_bytes=1, replicas=replicas))
    return wait_for_replicas(client, replicas)


def wait_for_replicas(client: CacheClient, replicas: int, *, without: str = "") -> DatasetInfo:
    def complete() -> DatasetInfo | None:
        info = client.describe("table")
        homes = info.placement.values()
        whole = all(len(nodes) == replicas and without not in nodes for nodes in homes)
        return info if info.state == "ready" and whole else None

    found = wait_until(complete, WAIT_S, f"{replicas} replicas of each shard, none on {without}")
    assert found is not None
    return found


@contextmanager
def stopped(node: LocalNode) -> Iterator[None]:
    """The node hangs: it is there, and does nothing."""
    process = psutil.Process(node.pid)
    suspend(process)
    try:
        yield
    finally:
        process.resume()


def read_all(endpoint: str) -> list[int]:
    """Every row as a plain Flight client reads it that tries the locations in turn."""
    rows: list[int] = []
    with connect(endpoint) as entry:
        info = entry.get_flight_info(flight.FlightDescriptor.for_path("table"), OPTIONS)
    for part in info.endpoints:
        for location in part.locations:
            try:
                with connect(location) as node:
                    rows += node.do_get(part.ticket, OPTIONS).read_all().column("row").to_pylist()
                break
            except flight.FlightUnavailableError:
                continue
    return rows


# -- replicas --------------------------------------------------------------------------------------


def test_the_rows_of_a_killed_node_come_from_the_other_replicas(
    breakable: LocalCluster, client: CacheClient, source: Path
) -> None:
    load(client, source, replicas=2)

    breakable.nodes[2].kill()

    assert read_all(breakable.endpoint) == [*range(NUM_ROWS)]
    assert client.head("table", NUM_ROWS).column("row").to_pylist() == [*range(NUM_ROWS)]


def test_lost_replicas_are_built_again_elsewhere_after_the_node_timeout(
    breakable: LocalCluster, client: CacheClient, source: Path
) -> None:
    load(client, source, replicas=2)
    lost = breakable.nodes[1]
    lost.kill()

    info = wait_for_replicas(client, 2, without=lost.node_id)

    assert {n for nodes in info.placement.values() for n in nodes} == {
        breakable.nodes[0].node_id,
        breakable.nodes[2].node_id,
    }
    assert {node.id: node.alive for node in client.nodes()}[lost.node_id] is False


def test_a_lost_node_that_comes_back_takes_its_shards_and_the_stand_ins_drop_theirs(
    breakable: LocalCluster, client: CacheClient, source: Path
) -> None:
    before = load(client, source, replicas=2)
    lost = breakable.nodes[2]
    lost.kill()
    wait_for_replicas(client, 2, without=lost.node_id)

    lost.start()

    wait_until(
        lambda: client.describe("table").placement == before.placement,
        WAIT_S,
        "the placement before the loss",
    )
    assert client.head("table", NUM_ROWS).column("row").to_pylist() == [*range(NUM_ROWS)]


def test_with_one_replica_a_lost_nodes_shards_are_loaded_again_from_the_source(
    breakable: LocalCluster, client: CacheClient, source: Path
) -> None:
    load(client, source, replicas=1)
    lost = breakable.nodes[1]

    lost.kill()
    wait_for_replicas(client, 1, without=lost.node_id)

    assert client.head("table", NUM_ROWS).column("row").to_pylist() == [*range(NUM_ROWS)]


def test_a_lost_replica_is_copied_from_another_node_even_when_its_source_is_gone(
    breakable: LocalCluster, client: CacheClient, source: Path
) -> None:
    load(client, source, replicas=2)
    lost = breakable.nodes[2]
    for path in source.iterdir():
        path.unlink()

    lost.kill()
    left = {node.node_id for node in breakable.nodes[:2]}
    wait_until(
        lambda: all(set(ids) == left for ids in client.describe("table").placement.values()),
        WAIT_S,
        "two replicas of every shard on the nodes that are left",
    )

    assert client.describe("table").state == "ready"
    assert client.head("table", NUM_ROWS).column("row").to_pylist() == [*range(NUM_ROWS)]


def test_a_lost_shard_without_a_source_is_failed_with_the_path_until_its_node_is_back(
    breakable: LocalCluster, client: CacheClient, source: Path
) -> None:
    load(client, source, replicas=1)
    lost = breakable.nodes[1]
    for path in source.iterdir():
        path.unlink()

    lost.kill()
    wait_until(lambda: client.describe("table").state == "failed", WAIT_S, "failed")
    reason = client.describe("table").error
    assert reason is not None and str(source) in reason
    lost.start()
    wait_until(lambda: client.describe("table").state == "ready", WAIT_S, "ready")

    assert client.head("table", NUM_ROWS).column("row").to_pylist() == [*range(NUM_ROWS)]


def test_a_load_waits_for_a_lost_node_without_which_there_is_no_room(tmp_path: Path) -> None:
    source = write_numbered(tmp_path / "source", 60_000, files=FILES)
    # What comes of a filter is not known beforehand; rows of 36 bytes are on two nodes too many.
    wanted = DatasetSpec("table", source, filter="row >= 0", target_shard_bytes=1)
    limit = 900_000
    with LocalCluster(3, memory_limit_bytes=limit, node_timeout_s=1.5) as cluster:
        client = CacheClient(cluster.endpoint)
        with stopped(cluster.nodes[2]):
            client.load(wanted, wait=False)
            waits = wait_until(lambda: client.describe("table").waits, WAIT_S, "the load waits")
            assert "a lost node may be back" in waits
            assert f"memory limit of {limit} bytes" in waits
            assert client.describe("table").state == "loading"

        info = client.load(wanted, timeout_s=WAIT_S)

        assert info.num_rows == 60_000 and info.waits is None


# -- the coordinator -------------------------------------------------------------------------------


def test_reads_of_the_other_nodes_go_on_while_the_coordinator_is_down(
    breakable: LocalCluster, client: CacheClient, source: Path
) -> None:
    info = load(client, source, replicas=3)
    ticket = pb.ReadTicket(
        dataset="table", fingerprint=info.fingerprint, rows=pb.RowRange(start=0, stop=NUM_ROWS)
    )
    gather = pb.GatherRequest(dataset="table", fingerprint=info.fingerprint, columns=["row"])
    with connect(breakable.nodes[1].endpoint) as node:
        writer, reader = node.do_exchange(
            flight.FlightDescriptor.for_command(gather.SerializeToString()), OPTIONS
        )
        writer.begin(ROW_SCHEMA)

        def ask(*ids: int) -> int:
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array(ids)], schema=ROW_SCHEMA))
            return int(reader.read_chunk().data.num_rows)

        assert ask(1, 59, 30) == 3
        breakable.nodes[0].kill()

        assert ask(7) == 1  # the stream that was open
        table = node.do_get(flight.Ticket(ticket.SerializeToString()), OPTIONS).read_all()
        assert table.column("row").to_pylist() == [*range(NUM_ROWS)]  # and a new one
        writer.close()


def test_a_call_that_needs_the_coordinator_says_that_it_does_not_answer(
    breakable: LocalCluster, client: CacheClient, source: Path
) -> None:
    load(client, source, replicas=1)
    location = breakable.nodes[0].control_location
    breakable.nodes[0].kill()

    by_other_node = CacheClient(Connection(breakable.nodes[1].endpoint, deadline_s=5.0))
    with pytest.raises(NodeUnavailableError, match=rf"coordinator at {location}"):
        by_other_node.describe("table")
    with pytest.raises(NodeUnavailableError, match=breakable.endpoint):
        client.describe("table")


def test_a_coordinator_that_is_not_there_is_an_error_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never says a word
        endpoint = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        for call in ("datasets", "nodes"):
            with pytest.raises(NodeUnavailableError, match=endpoint):
                getattr(CacheClient(Connection(endpoint, deadline_s=0.5)), call)()


@pytest.mark.parametrize("call", ["load", "plan"])
def test_a_call_with_a_timeout_of_its_own_does_not_wait_longer_for_the_coordinator(
    source: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(coordinator, "MIN_LOOKUP_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(NodeUnavailableError, match=endpoint):
            getattr(CacheClient(Connection(endpoint, deadline_s=400.0)), call)(
                DatasetSpec("table", source), timeout_s=0.3
            )
    assert time.monotonic() - start < 100


def test_what_finding_the_coordinator_took_is_taken_from_the_time_of_the_call(
    patient_client: CacheClient, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[float | None] = []
    calls, now = coordinator.Calls, time.monotonic
    call = calls.call

    def noting(self: object, method: object, request: object, deadline: float | None) -> object:
        deadlines.append(deadline)
        return call(self, method, request, deadline)

    monkeypatch.setattr(calls, "call", noting)
    start = now()
    spec = DatasetSpec("table", source)
    patient_client.load(spec, timeout_s=WAIT_S)
    patient_client.plan(spec, timeout_s=WAIT_S)
    patient_client.load(spec)
    patient_client.datasets()

    load, plan, endless, datasets = deadlines
    assert load is not None and plan is not None and datasets is not None
    assert endless is None
    assert start + WAIT_S <= load <= plan <= now() + WAIT_S
    assert datasets <= now() + 15.0  # of this client


def test_a_coordinator_that_hangs_is_noticed_by_who_watches_a_load_without_a_limit(
    patient: LocalCluster,
    patient_client: CacheClient,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_protocol.wire.channels, "_KEEPALIVE_MS", 1_000)
    errors: list[Exception] = []

    def watch() -> None:
        try:
            patient_client.load(DatasetSpec("table", source, target_shard_bytes=1))
        except CacheError as error:
            errors.append(error)

    with stopped(patient.nodes[1]):  # so the load does not end
        thread = threading.Thread(target=watch)
        thread.start()
        wait_until(
            lambda: [info.state for info in patient_client.datasets()] == ["loading"],
            WAIT_S,
            "loading",
        )
        with stopped(patient.nodes[0]):
            thread.join(WAIT_S)
            assert not thread.is_alive()

    assert isinstance(errors[0], NodeUnavailableError)
    assert patient.nodes[0].control_location in str(errors[0])


# -- deadlines of a load ---------------------------------------------------------------------------


def test_a_load_that_takes_longer_than_its_timeout_is_not_ready_and_goes_on(
    patient: LocalCluster, patient_client: CacheClient, source: Path
) -> None:
    spec = DatasetSpec("table", source, target_shard_bytes=1, replicas=1)
    with stopped(patient.nodes[1]):
        with pytest.raises(NotReadyError) as caught:
            patient_client.load(spec, timeout_s=1.5)
        again = patient_client.load(spec, wait=False)

    for quote in ("'table'", "of 6 shards", "the load goes on"):
        assert quote in str(caught.value)
    assert again.state == "loading"
    assert patient_client.load(spec, timeout_s=WAIT_S).num_rows == NUM_ROWS


def test_a_plan_that_takes_longer_than_the_timeout_is_not_ready_either(
    patient: LocalCluster, patient_client: CacheClient, source: Path
) -> None:
    # No load is planned in a microsecond.
    with pytest.raises(NotReadyError, match="'table' was not planned within 1e-06 s"):
        patient_client.load(DatasetSpec("table", source, target_shard_bytes=1), timeout_s=1e-6)


def test_a_read_of_a_dataset_that_is_loading_says_how_far_it_is(
    patient: LocalCluster, patient_client: CacheClient, source: Path
) -> None:
    with stopped(patient.nodes[1]):
        patient_client.load(DatasetSpec("table", source, target_shard_bytes=1), wait=False)
        with pytest.raises(NotReadyError, match=r"'table' is loading: \d of 6 shards"):
            patient_client.head("table")


# -- splits that end nodes -------------------------------------------------------------------------


class EndsItsReaders(FilesStub):
    """A server of files that kills each node, but for the coordinator, that reads one whole."""

    nodes: ClassVar[list[LocalNode]] = []
    killed: ClassVar[list[LocalNode]] = []

    def do_GET(self) -> None:
        for node in self.nodes:
            if node in self.killed:
                continue
            sockets = psutil.Process(node.pid).net_connections("tcp")
            if any(found.laddr.port == self.client_address[1] for found in sockets):
                node.kill()
                self.killed.append(node)
                return
        super().do_GET()


def test_a_split_that_ends_two_nodes_is_given_to_no_other(
    breakable: LocalCluster, client: CacheClient, tmp_path: Path
) -> None:
    (tmp_path / "t.jsonl").write_text('{"a": 1}\n')
    coordinator, *others = breakable.nodes
    members = [node.node_id for node in breakable.nodes]
    handler = type("Handler", (EndsItsReaders,), {"nodes": others, "killed": []})
    with Served(partial(handler, directory=tmp_path)) as server:
        # Its shard belongs on two nodes before it belongs on the coordinator.
        for target_shard_bytes in itertools.count(1):
            spec = DatasetSpec("t", f"{server}/t.jsonl", target_shard_bytes=target_shard_bytes)
            with closing(plan_version(spec)) as planned:
                fingerprint = planned.version.key.fingerprint
            ((first, second),) = placement.place(fingerprint, 1, members, 2)
            if coordinator.node_id not in (first, second):
                break
        with pytest.raises(
            LoadError, match=r"cannot load http.*/t\.jsonl: node .* ended meanwhile"
        ):
            client.load(spec, timeout_s=WAIT_S)
    assert [node.node_id for node in handler.killed] == [first, second]
