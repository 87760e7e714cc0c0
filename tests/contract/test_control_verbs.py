"""The gRPC verbs and the standard health service, by their stubs alone."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import grpc
import pyarrow as pa
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cache_client import CacheClient, Connection
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    DatasetNotFoundError,
    LoadError,
    NodeUnavailableError,
    RequestError,
    StaleVersionError,
    from_proto,
)
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1.cache_pb2_grpc import CoordinatorStub
from cache_server import LocalCluster
from cache_server.config import NodeConfig
from cache_server.coordination import loads
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.coordinator import Coordinator
from cache_server.node.links.coordinator_link import RemoteCoordinator
from cache_server.rpc import control_service, planning_slots
from cache_server.rpc.control_service import ControlService
from cache_server.server import CacheServer
from tests.answering_control import answering_control
from tests.conftest import write_numbered
from tests.control_clients import open_channel
from tests.waiting import files_below, wait_until

TIMEOUT_S = 60.0
HEALTH = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def stub(cluster: LocalCluster) -> Iterator[CoordinatorStub]:
    with open_channel(cluster.nodes[0].control_location) as channel:
        yield CoordinatorStub(channel)


def spec(name: str, source: Path | str, **changes: object) -> pb.DatasetSpec:
    """By default each file becomes a shard."""
    table = pb.TableSpec(name="source", source=[str(source)], format=str(changes.pop("format", "")))
    fields: dict[str, object] = {"name": name, "tables": [table], "target_shard_bytes": 1}
    return pb.DatasetSpec(**{**fields, **changes})


def create(
    stub: CoordinatorStub, dataset: pb.DatasetSpec, *, refresh: bool = False
) -> pb.DatasetInfo:
    request = pb.CreateDatasetRequest(spec=dataset, refresh=refresh)
    return stub.CreateDataset(request, timeout=TIMEOUT_S).dataset


def watch(stub: CoordinatorStub, name: str, fingerprint: str = "") -> list[pb.DatasetInfo]:
    request = pb.WatchDatasetRequest(name=name, fingerprint=fingerprint)
    return [answer.dataset for answer in stub.WatchDataset(request, timeout=TIMEOUT_S)]


def load(stub: CoordinatorStub, dataset: pb.DatasetSpec) -> pb.DatasetInfo:
    created = create(stub, dataset)
    info = watch(stub, dataset.name, created.fingerprint)[-1]
    assert info.state == pb.DATASET_STATE_READY, info.error.message
    return info


def shard_files(cluster: LocalCluster, name: str) -> dict[Path, int]:
    """Every shard file of a dataset on every node, with its inode: a new file is a new load."""
    found = {}
    for path in files_below(*(node.cache_dir / name for node in cluster.nodes)):
        with suppress(FileNotFoundError):  # dropped just now
            if path.name.startswith("shard-"):
                found[path] = path.stat().st_ino
    return found


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, CacheError]:
    """Status and named error of a call; the status text is the message of the error."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    trailers = dict(caught.value.trailing_metadata())
    error = from_proto(pb.Error.FromString(trailers["cache-error-bin"]))
    assert caught.value.details() == str(error)
    assert "Traceback" not in str(error)
    return caught.value.code(), error


# -- datasets --------------------------------------------------------------------------------------


def test_create_answers_at_once_with_the_plan(
    stub: CoordinatorStub, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 30, files=3)

    info = create(stub, spec(dataset_name, source))

    assert info.spec.name == dataset_name
    assert list(info.spec.tables[0].source) == [str(source)]
    assert len(info.fingerprint) == 32
    assert [shard.index for shard in info.shards] == [0, 1, 2]
    assert info.progress.shards_total == 3
    assert info.progress.estimated_rows == 30
    schema = pa.ipc.read_schema(pa.py_buffer(info.schema))
    assert schema.names == ["row", "a", "b", "label", "text"]


def test_watch_streams_the_load_and_ends_when_the_dataset_is_ready(
    stub: CoordinatorStub, dataset_name: str, tmp_path: Path
) -> None:
    created = create(stub, spec(dataset_name, write_numbered(tmp_path / "source", 900, files=6)))

    seen = watch(stub, dataset_name, created.fingerprint)

    assert {info.state for info in seen[:-1]} <= {pb.DATASET_STATE_LOADING}
    last = seen[-1]
    assert last.state == pb.DATASET_STATE_READY
    assert (last.num_rows, last.progress.rows_done, last.progress.shards_done) == (900, 900, 6)
    assert last.num_bytes == last.progress.bytes_done == sum(s.num_bytes for s in last.shards)
    assert [(s.rows.start, s.rows.stop) for s in last.shards] == [
        (150 * i, 150 * (i + 1)) for i in range(6)
    ]
    done = [info.progress.shards_done for info in seen]
    assert done == sorted(done)


def test_watch_of_a_ready_dataset_says_so_once(
    stub: CoordinatorStub, dataset_name: str, tmp_path: Path
) -> None:
    load(stub, spec(dataset_name, write_numbered(tmp_path / "source", 3)))

    (info,) = watch(stub, dataset_name)

    assert info.state == pb.DATASET_STATE_READY


def test_watch_ends_when_the_dataset_has_failed_and_gives_the_reason(
    stub: CoordinatorStub, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 20)
    sql = "SELECT 1 / (label - 3) AS label FROM source"
    created = create(stub, spec(dataset_name, source, sql=sql))

    last = watch(stub, dataset_name, created.fingerprint)[-1]

    assert last.state == pb.DATASET_STATE_FAILED
    error = from_proto(last.error)
    assert type(error) is LoadError
    assert str(source / "part-000.parquet") in str(error)


def test_watch_of_a_dataset_that_is_dropped_meanwhile_ends_with_not_found(tmp_path: Path) -> None:
    # Without a node nothing loads, so the watch is sure to be waiting.
    with lonely_coordinator(tmp_path) as stub:
        create(stub, spec("gone", write_numbered(tmp_path / "source", 3)))
        answers = stub.WatchDataset(pb.WatchDatasetRequest(name="gone"), timeout=TIMEOUT_S)
        assert next(answers).dataset.state == pb.DATASET_STATE_LOADING
        stub.DeleteDataset(pb.DeleteDatasetRequest(name="gone"), timeout=TIMEOUT_S)

        code, error = refused(lambda: list(answers))

    assert code == grpc.StatusCode.NOT_FOUND
    assert type(error) is DatasetNotFoundError


def test_list_gives_every_dataset_by_name_and_get_gives_one(
    stub: CoordinatorStub, dataset_name: str, tmp_path: Path
) -> None:
    info = load(stub, spec(dataset_name, write_numbered(tmp_path / "source", 3)))

    listed = stub.ListDatasets(pb.ListDatasetsRequest(), timeout=TIMEOUT_S).datasets
    by_name = stub.GetDataset(pb.GetDatasetRequest(name=dataset_name), timeout=TIMEOUT_S)
    by_version = stub.GetDataset(
        pb.GetDatasetRequest(name=dataset_name, fingerprint=info.fingerprint), timeout=TIMEOUT_S
    )

    names = [dataset.spec.name for dataset in listed]
    assert names == sorted(names) and dataset_name in names
    assert by_name.dataset == by_version.dataset
    assert by_name.dataset.fingerprint == info.fingerprint


def test_the_same_spec_attaches_and_loads_nothing(
    stub: CoordinatorStub, cluster: LocalCluster, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 40, files=4)
    first = load(stub, spec(dataset_name, source))
    files = shard_files(cluster, dataset_name)

    for _ in range(3):
        again = create(stub, spec(dataset_name, source))
        assert again.state == pb.DATASET_STATE_READY
        assert again.fingerprint == first.fingerprint

    assert len(files) == 4
    assert shard_files(cluster, dataset_name) == files


def test_more_replicas_are_the_same_version_and_only_add_copies(
    stub: CoordinatorStub, cluster: LocalCluster, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 40, files=4)
    first = load(stub, spec(dataset_name, source))
    files = shard_files(cluster, dataset_name)

    again = create(stub, spec(dataset_name, source, replicas=2))

    assert again.fingerprint == first.fingerprint
    assert again.state == pb.DATASET_STATE_READY
    wait_until(lambda: len(shard_files(cluster, dataset_name)) == 8, TIMEOUT_S, "two copies")
    assert files.items() <= shard_files(cluster, dataset_name).items()


def test_a_refresh_with_fewer_replicas_drops_copies_and_the_dataset_stays_ready(
    stub: CoordinatorStub, cluster: LocalCluster, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 40, files=4)
    load(stub, spec(dataset_name, source, replicas=2))
    wait_until(lambda: len(shard_files(cluster, dataset_name)) == 8, TIMEOUT_S, "two copies")

    assert create(stub, spec(dataset_name, source)).spec.replicas == 2  # of another user

    create(stub, spec(dataset_name, source, replicas=1), refresh=True)

    wait_until(lambda: len(shard_files(cluster, dataset_name)) == 4, TIMEOUT_S, "one copy")
    wait_until(
        lambda: {len(shard.node_ids) for shard in watch(stub, dataset_name)[-1].shards} == {1},
        TIMEOUT_S,
        "one node a shard",
    )


def test_another_spec_of_the_same_name_replaces_the_version_when_it_is_ready(
    stub: CoordinatorStub, cluster: LocalCluster, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 40, files=4)
    old = load(stub, spec(dataset_name, source))

    new = load(stub, spec(dataset_name, source, filter="row < 10"))

    assert new.fingerprint != old.fingerprint
    assert (old.num_rows, new.num_rows) == (40, 10)
    get = pb.GetDatasetRequest(name=dataset_name, fingerprint=old.fingerprint)
    code, error = refused(lambda: stub.GetDataset(get, timeout=TIMEOUT_S))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert type(error) is StaleVersionError
    assert old.fingerprint in str(error) and new.fingerprint in str(error)
    wait_until(
        lambda: (
            {path.parent.name for path in shard_files(cluster, dataset_name)} == {new.fingerprint}
        ),
        TIMEOUT_S,
        "no file of the old version",
    )


def test_the_old_version_is_served_while_a_new_one_has_failed(
    stub: CoordinatorStub, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", 40, files=4)
    old = load(stub, spec(dataset_name, source))
    sql = "SELECT 1 / (label - 3) AS label FROM source"
    new = create(stub, spec(dataset_name, source, sql=sql))
    assert watch(stub, dataset_name, new.fingerprint)[-1].state == pb.DATASET_STATE_FAILED

    (still,) = watch(stub, dataset_name, old.fingerprint)
    again = create(stub, spec(dataset_name, source))

    assert still.state == pb.DATASET_STATE_READY
    # Asking for the old one again makes it the newest, and nothing is left of the failed one.
    assert again.state == pb.DATASET_STATE_READY
    (newest,) = watch(stub, dataset_name)
    assert newest.fingerprint == old.fingerprint
    get = pb.GetDatasetRequest(name=dataset_name, fingerprint=new.fingerprint)
    assert type(refused(lambda: stub.GetDataset(get, timeout=TIMEOUT_S))[1]) is StaleVersionError


def test_delete_forgets_the_dataset_and_the_nodes_remove_its_files(
    stub: CoordinatorStub, cluster: LocalCluster, tmp_path: Path
) -> None:
    name = "to-delete"
    load(stub, spec(name, write_numbered(tmp_path / "source", 40, files=4)))
    folders = [node.cache_dir / name for node in cluster.nodes]
    assert any(folder.exists() for folder in folders)

    stub.DeleteDataset(pb.DeleteDatasetRequest(name=name), timeout=TIMEOUT_S)

    listed = stub.ListDatasets(pb.ListDatasetsRequest(), timeout=TIMEOUT_S).datasets
    assert name not in [dataset.spec.name for dataset in listed]
    wait_until(
        lambda: not any(folder.exists() for folder in folders), TIMEOUT_S, "its folders are gone"
    )


def test_nodes_are_listed_with_their_locations_and_what_they_hold(
    stub: CoordinatorStub, cluster: LocalCluster, dataset_name: str, tmp_path: Path
) -> None:
    info = load(stub, spec(dataset_name, write_numbered(tmp_path / "source", 40, files=4)))
    placed = [node_id for shard in info.shards for node_id in shard.node_ids]

    nodes = stub.ListNodes(pb.ListNodesRequest(), timeout=TIMEOUT_S).nodes

    assert [node.id for node in nodes] == sorted(node.node_id for node in cluster.nodes)
    found = {node.id: node for node in nodes}
    for node in cluster.nodes:
        described = found[node.node_id]
        assert described.alive
        assert described.flight_location == node.endpoint
        assert described.control_location == node.control_location
        assert described.cache_dir == str(node.cache_dir)
        assert described.stored_shards >= placed.count(node.node_id)
        assert described.stored_bytes > 0 or not placed.count(node.node_id)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda stub: stub.GetDataset(pb.GetDatasetRequest(name="nope"), timeout=TIMEOUT_S),
        lambda stub: stub.DeleteDataset(pb.DeleteDatasetRequest(name="nope"), timeout=TIMEOUT_S),
        lambda stub: watch(stub, "nope"),
    ],
    ids=["get", "delete", "watch"],
)
def test_an_unknown_dataset_is_not_found_and_the_answer_lists_those_there_are(
    stub: CoordinatorStub,
    dataset_name: str,
    tmp_path: Path,
    call: Callable[[CoordinatorStub], object],
) -> None:
    load(stub, spec(dataset_name, write_numbered(tmp_path / "source", 3)))

    code, error = refused(lambda: call(stub))

    assert code == grpc.StatusCode.NOT_FOUND
    assert type(error) is DatasetNotFoundError
    assert "'nope'" in str(error) and dataset_name in str(error)


def test_a_bad_spec_is_refused_with_every_bad_field_quoted(stub: CoordinatorStub) -> None:
    table = pb.TableSpec(name="source", format="xml")
    bad = pb.DatasetSpec(name="no spaces please", tables=[table], filter="a > 1", sql="SELECT 1")

    code, error = refused(lambda: create(stub, bad))

    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert type(error) is ConfigError
    for quote in ("'no spaces please'", "'xml'", "sql cannot be combined", "source"):
        assert quote in str(error)


@pytest.mark.parametrize(
    ("changes", "code", "kind", "quotes"),
    [
        ({"format": "csv"}, "FAILED_PRECONDITION", LoadError, "csv files"),
        ({"sql": "SELECT colour FROM source"}, "INVALID_ARGUMENT", RequestError, "colour"),
        ({"sql": "DROP TABLE source"}, "INVALID_ARGUMENT", RequestError, "DROP TABLE source"),
    ],
    ids=["no such files", "unknown column", "DDL"],
)
def test_a_load_that_cannot_be_planned_is_refused_and_leaves_no_dataset(
    stub: CoordinatorStub,
    tmp_path: Path,
    changes: dict[str, object],
    code: str,
    kind: type[CacheError],
    quotes: str,
) -> None:
    dataset = spec("unplanned", write_numbered(tmp_path / "source", 3), **changes)

    status, error = refused(lambda: create(stub, dataset))

    assert status == grpc.StatusCode[code]
    assert type(error) is kind
    assert quotes in str(error)
    listed = stub.ListDatasets(pb.ListDatasetsRequest(), timeout=TIMEOUT_S).datasets
    assert "unplanned" not in [info.spec.name for info in listed]


# -- a coordinator without a node ------------------------------------------------------------------


class lonely_coordinator:  # reads as a function
    """The gRPC service of a coordinator in this process, to which no node reports."""

    def __init__(self, directory: Path, **options: int) -> None:
        coordinator = Coordinator(
            Catalogue(directory / "catalogue"),
            endpoints=pb.CoordinatorEndpoints(flight_location="grpc://here:1"),
            heartbeat_interval_s=0.25,
            node_timeout_s=10.0,
        )
        self.service = ControlService("127.0.0.1", 0)
        self.service.start(lambda: coordinator)
        given = [(f"grpc.{name}", value) for name, value in options.items()]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.service.port}", options=given)

    def __enter__(self) -> CoordinatorStub:
        return CoordinatorStub(self.channel)

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.service.stop(grace_s=0.0)


def test_a_heartbeat_joins_and_is_told_the_interval_the_coordinator_and_what_to_hold(
    tmp_path: Path,
) -> None:
    with lonely_coordinator(tmp_path) as stub, answering_control() as control:
        created = create(stub, spec("wanted", write_numbered(tmp_path / "source", 6, files=2)))
        node = pb.Node(id="one", flight_location="grpc://one:1", control_location=control)
        beat = pb.HeartbeatRequest(node=node)

        answer = stub.Heartbeat(beat, timeout=TIMEOUT_S)
        nodes = stub.ListNodes(pb.ListNodesRequest(), timeout=TIMEOUT_S).nodes

    assert answer.interval_s == 0.25
    assert answer.coordinator.flight_location == "grpc://here:1"
    (desired,) = answer.datasets
    assert desired.plan.fingerprint == created.fingerprint
    assert [shard.index for shard in desired.shards] == [0, 1]
    assert not desired.rows_fixed
    assert [(node.id, node.alive) for node in nodes] == [("one", True)]


def test_a_watch_is_ended_by_the_deadline_of_its_caller(tmp_path: Path) -> None:
    with lonely_coordinator(tmp_path) as stub:
        create(stub, spec("waiting", write_numbered(tmp_path / "source", 3)))

        with pytest.raises(grpc.RpcError) as caught:
            list(stub.WatchDataset(pb.WatchDatasetRequest(name="waiting"), timeout=0.5))

    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def answers_at_once(service: ControlService, stub: CoordinatorStub) -> None:
    """Whether verbs that wait for nothing are served."""
    with answering_control() as control:
        node = pb.Node(id="one", control_location=control)
        stub.Heartbeat(pb.HeartbeatRequest(node=node), timeout=TIMEOUT_S)
    assert [n.id for n in stub.ListNodes(pb.ListNodesRequest(), timeout=TIMEOUT_S).nodes] == ["one"]
    assert check(f"127.0.0.1:{service.port}", "live") == HEALTH.SERVING


def test_a_watch_beyond_those_that_may_stay_answers_once_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_service, "_WATCHING_THREADS", 4)  # for two that stay
    request = pb.WatchDatasetRequest(name="waiting")
    coordinator = lonely_coordinator(tmp_path)
    with coordinator as stub:
        create(stub, spec("waiting", write_numbered(tmp_path / "source", 3)))
        staying = [stub.WatchDataset(request, timeout=TIMEOUT_S) for _ in range(2)]
        for answers in staying:
            assert next(answers).dataset.state == pb.DATASET_STATE_LOADING

        for _ in range(5):
            (info,) = watch(stub, "waiting")
            assert info.state == pb.DATASET_STATE_LOADING
        answers_at_once(coordinator.service, stub)
        assert next(staying[0]).dataset.state == pb.DATASET_STATE_LOADING

        staying[0].cancel()
        wait_until(lambda: stays(stub, request), TIMEOUT_S, "another one takes its place")


def stays(stub: CoordinatorStub, request: pb.WatchDatasetRequest) -> bool:
    """Whether a new watch gives more than one answer."""
    answers = stub.WatchDataset(request, timeout=TIMEOUT_S)
    found = len(list(itertools.islice(answers, 2))) == 2
    answers.cancel()
    return found


def test_a_caller_that_waits_long_for_a_plan_may_send_many_keepalive_pings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_service, "_MIN_PING_INTERVAL_MS", 10)
    over = threading.Event()
    monkeypatch.setattr(loads.Loads, "create", lambda *_, **__: over.wait(TIMEOUT_S))
    often = {"keepalive_time_ms": 100, "http2.max_pings_without_data": 0}
    with lonely_coordinator(tmp_path, **often) as stub:
        try:
            with pytest.raises(grpc.RpcError) as caught:
                # gRPC sends one a second; the fifth was too many.
                stub.CreateDataset(pb.CreateDatasetRequest(spec=spec("slow", tmp_path)), timeout=5)
        finally:
            over.set()

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED, caught.value.details()


@pytest.mark.parametrize("verb", ["CreateDataset", "PlanDataset"])
def test_datasets_that_are_planned_for_long_hold_up_no_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(planning_slots, "THREADS", 2)
    monkeypatch.setattr(control_service, "_HANDLER_THREADS", 2)
    listed = threading.Event()

    def plan(*_: object, **__: object) -> NoReturn:
        listed.wait(TIMEOUT_S)
        raise LoadError("no such file")

    monkeypatch.setattr(loads.Loads, "create", plan)
    monkeypatch.setattr(loads.Loads, "plan", plan)
    kind = getattr(pb, f"{verb}Request")
    coordinator = lonely_coordinator(tmp_path)
    with coordinator as stub:
        try:
            call = getattr(stub, verb).future
            calls = [call(kind(spec=spec("slow", tmp_path)), timeout=TIMEOUT_S) for _ in range(5)]
            answers_at_once(coordinator.service, stub)
            assert not any(call.done() for call in calls)
        finally:
            listed.set()
        for call in calls:
            assert type(refused(call.result)[1]) is LoadError


# -- health ----------------------------------------------------------------------------------------


def check(location: str, service: str) -> int:
    with open_channel(location) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S).status)


def test_every_node_serves_the_health_services(cluster: LocalCluster) -> None:
    for node in cluster.nodes:
        for service in ("", "live"):
            assert check(node.control_location, service) == HEALTH.SERVING
        wait_until(
            lambda at=node.control_location: check(at, "ready") == HEALTH.SERVING,
            TIMEOUT_S,
            "ready",
        )


def test_an_unknown_health_service_is_not_found(cluster: LocalCluster) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        check(cluster.nodes[0].control_location, "happiness")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_node_stays_ready_while_a_further_dataset_loads(
    cluster: LocalCluster, client: CacheClient, stub: CoordinatorStub, tmp_path: Path
) -> None:
    name = "health"
    request = health_pb2.HealthCheckRequest(service="ready")
    with open_channel(cluster.nodes[1].control_location) as channel:
        wait_until(
            lambda: check(cluster.nodes[1].control_location, "ready") == HEALTH.SERVING,
            TIMEOUT_S,
            "ready",
        )
        seen: list[int] = []
        statuses = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=TIMEOUT_S)
        watcher = threading.Thread(target=_collect, args=(statuses, seen))
        watcher.start()
        load(stub, spec(name, write_numbered(tmp_path / "source", 8), replicas=2))
        wait_until(lambda: client.describe(name).state == "ready", TIMEOUT_S, "ready")

        statuses.cancel()
        watcher.join()
        assert set(seen) <= {HEALTH.SERVING}
    (node_ids,) = client.describe(name).placement.values()
    assert cluster.nodes[1].node_id in node_ids
    client.drop(name)


def _collect(statuses: Any, seen: list[int]) -> None:
    with suppress(grpc.RpcError):  # it was cancelled
        seen.extend(answer.status for answer in statuses)


# -- the wrong port --------------------------------------------------------------------------------


def test_whoever_takes_one_port_of_a_node_for_the_other_is_told(cluster: LocalCluster) -> None:
    node = cluster.nodes[0]
    with pytest.raises(ConfigError, match="does not serve Arrow Flight: give the Flight port"):
        CacheClient(Connection(f"grpc://{node.control_location}", deadline_s=10)).datasets()

    page = urlsplit(node.page).netloc
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="does not serve Arrow Flight: give the Flight port"):
        CacheClient(Connection(f"grpc://{page}", deadline_s=60)).datasets()
    assert time.monotonic() - begun < 30  # it does not try until the deadline

    flight_location = node.endpoint.removeprefix("grpc://")
    with (
        RemoteCoordinator(flight_location) as link,
        pytest.raises(NodeUnavailableError, match="is no coordinator: give the control port"),
    ):
        link.heartbeat(pb.HeartbeatRequest(node=pb.Node(id="one")))


@pytest.mark.parametrize("port", ["flight_port", "control_port", "http_port"])
def test_a_port_that_is_taken_is_refused_with_its_option(tmp_path: Path, port: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"flight_port": 0, "control_port": 0, "http_port": 0}
        ports[port] = taken.getsockname()[1]
        config = NodeConfig.build(cache_dir=tmp_path, bind="127.0.0.1", **ports)

        option = f"--{port.replace('_', '-')}"
        with pytest.raises(ConfigError, match=rf":{ports[port]}: .* choose another with {option}$"):
            CacheServer(config)
