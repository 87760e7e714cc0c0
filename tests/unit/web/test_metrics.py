"""Metrics, read back by the parser of Prometheus's own client."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.status import CacheStatus, NodeStatus, VersionStatus
from cache_server.node.traffic import Read, Traffic
from cache_server.shards.version_key import VersionKey
from cache_server.web.metrics import exposition


def status(**changes: object) -> NodeStatus:
    traffic = Traffic()
    for rows in (100, 23):
        traffic.count(Read("trips", "exchange"), rows=rows, num_bytes=8 * rows)
    traffic.count(Read("trips", "file"), rows=0, num_bytes=77)
    traffic.count_error("NotReadyError")
    version = VersionStatus(
        VersionKey("trips", "f00"), served=7, sealed=8, loading=2, failed=1, num_bytes=64
    )
    node = pb.Node(id="a1", stored_bytes=64, memory_limit_bytes=100)
    counts = traffic.counts({"trips"})
    return replace(NodeStatus(node, True, "host:2", "", (version,), 32, counts, None, 2), **changes)  # type: ignore[arg-type]


def samples(of: NodeStatus) -> dict[tuple[str, ...], float]:
    """Values by name and labels."""
    body, content_type = exposition(of, "")
    assert content_type.startswith("text/plain")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.name.startswith("data_cache_")
    }


def test_a_node_tells_its_memory_its_shards_and_the_sums_of_what_it_served() -> None:
    assert samples(status()) == {
        ("data_cache_ready",): 1,
        ("data_cache_stored_bytes",): 64,
        ("data_cache_huge_page_bytes",): 32,
        ("data_cache_scrubbed_bytes_total",): 0,
        ("data_cache_damaged_shards_total",): 0,
        ("data_cache_loads_running",): 2,
        ("data_cache_memory_limit_bytes",): 100,
        ("data_cache_shards", "trips", "f00", "sealed"): 8,
        ("data_cache_shards", "trips", "f00", "served"): 7,
        ("data_cache_shards", "trips", "f00", "loading"): 2,
        ("data_cache_shards", "trips", "f00", "failed"): 1,
        ("data_cache_served_rows_total", "trips", "exchange"): 123,
        ("data_cache_served_rows_total", "trips", "file"): 0,
        ("data_cache_served_bytes_total", "trips", "exchange"): 984,
        ("data_cache_served_bytes_total", "trips", "file"): 77,
        ("data_cache_errors_total", "NotReadyError"): 1,
        ("data_cache_bucket_rows_total",): 0,
        ("data_cache_orders_total", "prepared"): 0,
        ("data_cache_orders_total", "failed"): 0,
        ("data_cache_scratch_bytes",): 0,
    }


def test_a_node_counts_bytes_between_zones_where_both_are_known() -> None:
    traffic, read = Traffic("a"), Read("trips", "exchange")
    for zone in ("a", "b", "b", ""):
        traffic.count(read, rows=1, num_bytes=10, to_zone=zone)
    traffic.count_received(7, "b")
    traffic.count_received(5, "")
    for number in range(100):  # callers name their zones
        traffic.count(read, rows=1, num_bytes=1, to_zone=f"z{number}")

    found = samples(status(counts=traffic.counts({"trips"})))

    ways = {key[1:]: value for key, value in found.items() if "zone" in key[0]}
    assert (ways["a", "a"], ways["a", "b"], ways["b", "a"]) == (10, 20, 7)
    assert len(ways) == 65 and ways["a", "other"] == 100 - 61
    assert not [key for key in samples(status()) if "zone" in key[0]]


def test_a_node_without_a_limit_has_no_such_metric_and_one_that_is_not_ready_says_0() -> None:
    found = samples(status(node=pb.Node(), ready=False))

    assert ("data_cache_memory_limit_bytes",) not in found
    assert found["data_cache_ready",] == 0


def test_a_coordinator_tells_of_its_nodes_and_datasets() -> None:
    datasets = (
        pb.DatasetInfo(
            spec=pb.DatasetSpec(name="a"), state=pb.DATASET_STATE_READY, num_rows=5, num_bytes=40
        ),
        pb.DatasetInfo(
            spec=pb.DatasetSpec(name="b"),
            state=pb.DATASET_STATE_LOADING,
            progress=pb.LoadProgress(rows_done=3),
        ),
    )
    nodes = (pb.Node(id="a1", alive=True), pb.Node(id="b2"), pb.Node(id="c3", alive=True))

    found = samples(status(cache=CacheStatus(nodes, datasets)))

    assert found["data_cache_nodes", "alive"] == 2
    assert found["data_cache_nodes", "lost"] == 1
    states = {
        key[1:] for key, value in found.items() if key[0] == "data_cache_dataset_state" and value
    }
    assert states == {("a", "ready"), ("b", "loading")}
    assert found["data_cache_dataset_rows", "a"] == 5
    assert found["data_cache_dataset_rows", "b"] == 3
    assert found["data_cache_dataset_bytes", "a"] == 40


def test_process_metrics_and_the_open_format_are_there_for_who_asks() -> None:
    body, _ = exposition(status(), "")
    assert b"process_resident_memory_bytes" in body

    body, content_type = exposition(status(), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_a_coordinator_tells_which_nodes_are_drained_and_how_many_bytes_are_left() -> None:
    drains = pb.Drain(bytes_left=70), pb.Drain(bytes_left=7), pb.Drain(done=True)
    nodes = tuple(pb.Node(id=f"n{i}", alive=True, drain=each) for i, each in enumerate(drains))
    cache = CacheStatus((*nodes, pb.Node(id="a", alive=True), pb.Node(id="b", drain=drains[0])), ())
    found = samples(status(cache=cache))
    states = {name[1]: found[name] for name in found if name[0] == "data_cache_nodes"}
    assert states == {"alive": 1, "draining": 2, "drained": 1, "lost": 1, "untrusted": 0}
    assert found["data_cache_drain_left_bytes",] == 77


def test_a_coordinator_counts_what_it_evicted_and_an_evicted_dataset_has_no_bytes() -> None:
    evicted = pb.DatasetInfo(
        spec=pb.DatasetSpec(name="a"), state=pb.DATASET_STATE_EVICTED, num_bytes=40
    )
    cache = CacheStatus((), (evicted,), num_evicted=3, bytes_evicted=120)

    found = samples(status(cache=cache))

    assert found["data_cache_evictions_total",] == 3
    assert found["data_cache_evicted_bytes_total",] == 120
    assert found["data_cache_dataset_state", "a", "evicted"] == 1
    assert found["data_cache_dataset_bytes", "a"] == 0
