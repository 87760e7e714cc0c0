"""The page, the metrics and the readiness of running nodes, over HTTP."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    Connection,
    DatasetNotFoundError,
    DatasetSpec,
)
from cache_server import LocalCluster
from cache_server.config import NodeConfig
from cache_server.server import CacheServer
from tests.conftest import write_numbered
from tests.http_pages import ask, metric
from tests.waiting import wait_until

WAIT_S = 30.0
ROWS = 1000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    source = write_numbered(tmp_path_factory.mktemp("source"), ROWS)
    with LocalCluster(nodes=2, insecure=True) as running:
        CacheClient(running.endpoint).load(DatasetSpec("table", source))
        wait_until_ready(running)
        yield running


def wait_until_ready(cluster: LocalCluster) -> None:
    """Until each node says so, which is a heartbeat after its coordinator."""

    def all_are_ready() -> bool:
        return all(ask(node.page, "/ready")[0] == 200 for node in cluster.nodes)

    wait_until(all_are_ready, WAIT_S, "every node is ready")


def test_the_page_of_the_coordinator_shows_the_dataset_and_every_node(
    cluster: LocalCluster,
) -> None:
    code, content_type, page = ask(cluster.nodes[0].page)

    assert (code, content_type) == (200, "text/html; charset=utf-8")
    assert "<td>table</td><td>ready</td>" in page
    assert f">{ROWS:,}<" in page
    for node in cluster.nodes:
        name = f"{socket.gethostname()} ({node.node_id})"
        assert f"<td>{name}</td><td>alive</td>" in page
        assert f"<td>{node.endpoint}</td>" in page


def test_every_other_node_links_to_the_page_of_the_coordinator(cluster: LocalCluster) -> None:
    _, _, page = ask(cluster.nodes[1].page)

    assert f'<a href="{cluster.nodes[0].page}">' in page


def test_the_rows_that_a_pass_reads_over_flight_are_counted_exactly(cluster: LocalCluster) -> None:
    def served() -> float:
        return sum(
            metric(node.page, "data_cache_served_rows_total", dataset="table", verb="exchange")
            for node in cluster.nodes
        )

    before = served()
    rows = CacheIterableDataset(
        "table", cache=Connection(cluster.endpoint, local=False), batch_size=64, shuffle=True
    )
    assert sum(len(batch["row"]) for batch in rows) == ROWS
    # Counted when a message is on its way, which its reader may be done with before.
    assert wait_until(lambda: served() == before + ROWS, WAIT_S, "every row is counted")


def test_a_dataset_that_was_dropped_leaves_no_counters_behind(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def mentions() -> list[bool]:
        return ['dataset="brief"' in ask(node.page, "/metrics")[2] for node in cluster.nodes]

    client = CacheClient(cluster.endpoint)
    client.load(DatasetSpec("brief", write_numbered(tmp_path, 20), replicas=2))
    client.head("brief")
    wait_until(lambda: all(mentions()), WAIT_S, "both nodes show it")

    client.drop("brief")

    wait_until(lambda: not any(mentions()), WAIT_S, "no node shows it")


def test_a_call_that_is_refused_is_counted_by_the_name_of_its_error(cluster: LocalCluster) -> None:
    page = cluster.nodes[0].page
    before = metric(page, "data_cache_errors_total", error="DatasetNotFoundError")

    with pytest.raises(DatasetNotFoundError):
        CacheClient(cluster.endpoint).head("no-such-table")

    after = metric(page, "data_cache_errors_total", error="DatasetNotFoundError")
    assert after == before + 1


def test_the_nodes_add_up_to_the_dataset(cluster: LocalCluster) -> None:
    pages = [node.page for node in cluster.nodes]

    (info,) = CacheClient(cluster.endpoint).datasets()
    assert sum(metric(page, "data_cache_stored_bytes") for page in pages) == info.num_bytes
    served = [metric(page, "data_cache_shards", dataset="table", state="served") for page in pages]
    assert sum(served) == info.num_shards
    assert metric(pages[0], "data_cache_dataset_state", dataset="table", state="ready") == 1
    assert metric(pages[0], "data_cache_dataset_rows", dataset="table") == ROWS
    assert metric(pages[0], "data_cache_nodes", state="alive") == 2


def test_other_paths_and_methods_are_refused_and_head_has_no_body(cluster: LocalCluster) -> None:
    page = cluster.nodes[0].page

    assert ask(page, "/nowhere") == (
        404,
        "text/plain; charset=utf-8",
        "not found; paths: /, /metrics, /metrics/node, /live, /ready\n",
    )
    assert ask(page, "/ready?verbose=1")[0] == 200
    assert ask(page, "/", "HEAD")[::2] == (200, "")
    assert ask(page, "/", "DELETE")[0] == 501


def test_a_node_is_ready_for_http_probes_once_it_has_joined(tmp_path: Path) -> None:
    def node(name: str, coordinator: str | None) -> CacheServer:
        return CacheServer(
            NodeConfig(
                cache_dir=tmp_path / name, coordinator=coordinator,
                flight_port=0, control_port=0, http_port=0,
            )
        )  # fmt: skip

    with node("waiting", "127.0.0.1:1") as waiting:  # where nobody listens
        assert ask(waiting.page, "/ready") == (503, "text/plain; charset=utf-8", "not ready\n")
        assert ask(waiting.page, "/live") == (200, "text/plain; charset=utf-8", "live\n")
        assert "not reached yet" in ask(waiting.page)[2]

    with node("alone", None) as alone:
        wait_until(lambda: ask(alone.page, "/ready")[0] == 200, WAIT_S, "it is ready")


def test_a_closed_server_frees_grpc_at_once_so_that_the_process_can_fork(tmp_path: Path) -> None:
    config = NodeConfig(cache_dir=tmp_path, flight_port=0, control_port=0, http_port=0)
    server = CacheServer(config)
    server.close()
    freed = weakref.ref(server)
    gc.disable()  # gRPC ends with the last reference, and a cycle would keep one
    try:
        del server
        assert freed() is None
    finally:
        gc.enable()


def test_a_node_that_stops_is_not_ready_while_a_call_still_runs(tmp_path: Path) -> None:
    config = NodeConfig(
        cache_dir=tmp_path, flight_port=0, control_port=0, http_port=0, drain_timeout_s=WAIT_S
    )
    serving = health_pb2.HealthCheckResponse
    with CacheServer(config) as server:
        wait_until(lambda: ask(server.page, "/ready")[0] == 200, WAIT_S, "it is ready")
        with grpc.insecure_channel(server.endpoints.control_location) as channel:
            request = health_pb2.HealthCheckRequest(service="ready")
            watched = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=WAIT_S)
            assert next(watched).status == serving.SERVING
            closing = threading.Thread(target=server.close)
            closing.start()
            assert next(watched).status == serving.NOT_SERVING

            answer = ask(server.page, "/ready")
            watched.cancel()
        closing.join(WAIT_S)

    assert answer == (503, "text/plain; charset=utf-8", "not ready\n")


def test_a_node_answers_while_its_coordinator_is_down_and_beside_a_caller_that_says_nothing(
    tmp_path: Path,
) -> None:
    source = write_numbered(tmp_path, 20)
    with LocalCluster(nodes=2, insecure=True) as cluster:
        CacheClient(cluster.endpoint).load(DatasetSpec("table", source, replicas=2))
        wait_until_ready(cluster)
        page = cluster.nodes[1].page
        cluster.nodes[0].kill()
        with socket.create_connection((urlsplit(page).hostname or "", urlsplit(page).port or 0)):
            assert "<td>table</td>" in ask(page)[2]
            assert metric(page, "data_cache_ready") == 1
            # The silent one does not hold up the end of the node either.
            assert cluster.nodes[1].stop() == 0
