"""A `NodeStatus` in the text formats of Prometheus.

Imported at the first scrape, because the import is slow. Names follow
https://prometheus.io/docs/practices/naming/: base units, and ``_total`` for counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import STATE_NAMES
from cache_server.node.status import CacheStatus, NodeStatus


def exposition(status: NodeStatus, accept: str) -> tuple[bytes, str]:
    """Body and content type of an answer, in the format of the Accept header."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(_StatusCollector(status))
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


class _StatusCollector(Collector):
    def __init__(self, status: NodeStatus) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        yield from _of_node(self._status)
        if self._status.cache is not None:
            yield from _of_cache(self._status.cache)


def _of_node(status: NodeStatus) -> Iterator[Metric]:
    yield _gauge(
        "ready", "1 while the node can serve. Loads do not change it.", float(status.ready)
    )
    yield _gauge("stored_bytes", "Bytes of the shard files.", status.node.stored_bytes)
    what = "Bytes of the shard files in huge pages, which make random reads faster."
    yield _gauge("huge_page_bytes", what, status.huge_page_bytes)
    if status.node.memory_limit_bytes:
        limit = status.node.memory_limit_bytes
        yield _gauge("memory_limit_bytes", "Limit of the bytes of the shard files.", limit)
    shards = GaugeMetricFamily(
        "data_cache_shards",
        "Shards of a version on this node: sealed, served (also sealed), loading, failed.",
        labels=["dataset", "fingerprint", "state"],
    )
    for version in status.versions:
        for state in ("sealed", "served", "loading", "failed"):
            shards.add_metric(
                [version.key.dataset, version.key.fingerprint, state], getattr(version, state)
            )
    yield shards
    what = "Loads and copies of shards that this node runs now."
    yield _gauge("loads_running", what, status.loads_running)
    yield CounterMetricFamily(
        "data_cache_scrubbed_bytes",
        "Bytes of shard files read again to find damage.",
        value=status.scrubbed_bytes,
    )
    yield CounterMetricFamily(
        "data_cache_damaged_shards",
        "Shards that were dropped because their file was damaged.",
        value=status.damaged_shards,
    )
    yield CounterMetricFamily(
        "data_cache_bucket_rows",
        "Rows that came from buckets of announced orders.",
        value=status.orders.num_rows,
    )
    orders = CounterMetricFamily(
        "data_cache_orders", "Announced orders that ended so.", labels=["state"]
    )
    orders.add_metric(["prepared"], status.orders.num_prepared)
    orders.add_metric(["failed"], status.orders.num_failed)
    yield orders
    yield _gauge("scratch_bytes", "Bytes of bucket files.", status.orders.num_bytes)
    rows = CounterMetricFamily(
        "data_cache_served_rows",
        "Rows sent, by Flight verb. Trainers on the same machine read the files directly.",
        labels=["dataset", "verb"],
    )
    sent = CounterMetricFamily(
        "data_cache_served_bytes",
        "Bytes of the columns and files sent.",
        labels=["dataset", "verb"],
    )
    for read, served in status.counts.served.items():
        rows.add_metric(read, served.rows)
        sent.add_metric(read, served.num_bytes)
    yield rows
    yield sent
    between = CounterMetricFamily(
        "data_cache_zone_bytes",
        "Bytes of rows and files between this node and callers, by zones, where both are known.",
        labels=["from_zone", "to_zone"],
    )
    for way, num_bytes in status.counts.zones.items():
        between.add_metric(way, num_bytes)
    yield between
    errors = CounterMetricFamily(
        "data_cache_errors", "Failed Flight calls, by name of the error.", labels=["error"]
    )
    for name, times in status.counts.errors.items():
        errors.add_metric([name], times)
    yield errors


def _of_cache(cache: CacheStatus) -> Iterator[Metric]:
    nodes = GaugeMetricFamily(
        "data_cache_nodes", "Nodes that belong to the cache.", labels=["state"]
    )
    alive = sum(node.alive for node in cache.nodes)
    drained = [node for node in cache.nodes if node.alive and node.HasField("drain")]
    done = sum(node.drain.done for node in drained)
    nodes.add_metric(["alive"], alive - len(drained))
    nodes.add_metric(["draining"], len(drained) - done)
    nodes.add_metric(["drained"], done)
    untrusted = sum(bool(node.untrusted) for node in cache.nodes)
    nodes.add_metric(["untrusted"], untrusted)
    nodes.add_metric(["lost"], len(cache.nodes) - alive - untrusted)
    yield nodes
    left = sum(node.drain.bytes_left for node in drained)
    yield _gauge("drain_left_bytes", "Bytes of shards that drained nodes must still move.", left)
    what = "Catalogue entries that were set aside because they are damaged."
    yield _gauge("damaged_entries", what, cache.damaged_entries)
    yield CounterMetricFamily(
        "data_cache_evictions", "Datasets that made room for others.", value=cache.num_evicted
    )
    yield CounterMetricFamily(
        "data_cache_evicted_bytes", "Bytes of these, of all replicas.", value=cache.bytes_evicted
    )
    state = GaugeMetricFamily(
        "data_cache_dataset_state",
        "1 for the current state of a dataset.",
        labels=["dataset", "state"],
    )
    rows = GaugeMetricFamily(
        "data_cache_dataset_rows",
        "Rows; during a load, the rows loaded so far.",
        labels=["dataset"],
    )
    size = GaugeMetricFamily(
        "data_cache_dataset_bytes",
        "Bytes of the sealed shards, one replica; none of an evicted dataset.",
        labels=["dataset"],
    )
    for info in cache.datasets:
        name = info.spec.name
        for code, word in STATE_NAMES.items():
            state.add_metric([name, word], float(info.state == code))
        rows.add_metric([name], info.num_rows or info.progress.rows_done)
        is_evicted = info.state == pb.DATASET_STATE_EVICTED
        size.add_metric([name], 0 if is_evicted else info.num_bytes)
    yield from (state, rows, size)
    yield from _of_loads(cache)
    yield from _of_readers(cache)


def _of_loads(cache: CacheStatus) -> Iterator[Metric]:
    loaded = GaugeMetricFamily(
        "data_cache_dataset_loaded_ratio",
        "Share of the shards of a dataset that are loaded.",
        labels=["dataset"],
    )
    for info in cache.datasets:
        total = info.progress.shards_total
        is_ready = STATE_NAMES.get(info.state) == "ready"
        ratio = 1.0 if is_ready else info.progress.shards_done / total if total else 0.0
        loaded.add_metric([info.spec.name], ratio)
    yield loaded


def _of_readers(cache: CacheStatus) -> Iterator[Metric]:
    """What readers report, by job; live jobs only."""
    labels = ["training_job", "dataset"]  # Prometheus has a label job
    ranks = GaugeMetricFamily("data_cache_job_ranks", "Ranks of a running job.", labels=labels)
    rate = GaugeMetricFamily(
        "data_cache_job_rows_per_second",
        "Rows that all ranks of a job take, mapped files included.",
        labels=labels,
    )
    waits = GaugeMetricFamily(
        "data_cache_job_wait_ratio",
        "Share of its time that the rank that waits most waits for data.",
        labels=labels,
    )
    local = GaugeMetricFamily(
        "data_cache_job_local_ratio",
        "Share of the rows that come from files of the reader's machine.",
        labels=labels,
    )
    done = GaugeMetricFamily(
        "data_cache_job_epoch_ratio", "Share of the steps of the epoch.", labels=labels
    )
    disagree = GaugeMetricFamily(
        "data_cache_job_ranks_disagree",
        "1: ranks of a job read by other settings than others, so on wrong rows.",
        labels=labels,
    )
    for job in cache.jobs:
        if job.live:
            name = [job.name, job.dataset]
            disagree.add_metric(name, float(job.ranks_disagree))
            ranks.add_metric(name, job.world_size)
            rate.add_metric(name, job.rows_per_s)
            waits.add_metric(name, job.wait_share)
            local.add_metric(name, job.local_share)
            if job.num_steps:
                done.add_metric(name, job.step / job.num_steps)
    yield from (ranks, rate, waits, local, done, disagree)


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"data_cache_{name}", what, value)
