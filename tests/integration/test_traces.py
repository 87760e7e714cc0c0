"""Spans of a client and its nodes, as a collector gets them."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from torch.utils.data import DataLoader

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec, LoadError
from cache_server import LocalCluster
from cache_server.local import LocalNode
from tests.conftest import rows_of, write_numbered
from tests.waiting import wait_until

WAIT_S = 30.0
ROWS, FILES = 400, 4


class Span(NamedTuple):
    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    attributes: dict[str, Any]
    error: str


class Collector:
    """A collector of OTLP over HTTP, on a free port."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(otlp.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, request: otlp.ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {
                        each.key: each.value.string_value or each.value.int_value
                        for each in span.attributes
                    }
                    self.spans.append(
                        Span(
                            service=names["service.name"],
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent=span.parent_span_id.hex(),
                            attributes=values,
                            error=span.status.message,
                        )
                    )

    def named(self, name: str) -> list[Span]:
        return [span for span in list(self.spans) if span.name == name]

    def parent(self, span: Span) -> Span:
        def found() -> list[Span]:
            return [each for each in list(self.spans) if each.span_id == span.parent]

        (parent,) = wait_until(found, WAIT_S, f"the parent of {span}")
        assert parent.trace_id == span.trace_id
        return parent

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


@pytest.fixture(scope="module", autouse=True)
def traced_client(collector: Collector) -> Iterator[None]:
    """The process of the tests is traced as a trainer is, from here to the end of this module."""
    before = trace._TRACER_PROVIDER
    provider = TracerProvider(resource=Resource.create({"service.name": "trainer"}))
    exporter = OTLPSpanExporter(endpoint=f"{collector.endpoint}/v1/traces")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace._TRACER_PROVIDER = provider
    yield
    provider.shutdown()
    trace._TRACER_PROVIDER = before


@pytest.fixture(scope="module")
def cluster(collector: Collector) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        spawn = LocalNode._spawn

        def spawn_with_json(node: LocalNode, command: list[str], log_file: IO[bytes]) -> None:
            spawn(node, [*command, "--log-format", "json"], log_file)

        patch.setattr(LocalNode, "_spawn", spawn_with_json)
        with LocalCluster(nodes=2) as running:
            yield running


@pytest.fixture(scope="module")
def loaded(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    source = write_numbered(tmp_path_factory.mktemp("source"), ROWS, files=FILES)
    with trace.get_tracer("tests").start_as_current_span("prepare"):
        CacheClient(cluster.endpoint).load(DatasetSpec("traced", source, target_shard_bytes=1))
    return "traced"


def test_a_load_has_a_span_for_each_shard_and_split_on_the_nodes(
    collector: Collector, loaded: str
) -> None:
    wait_until(lambda: len(collector.named("cache.split")) == FILES, WAIT_S, "every split")
    for split in collector.named("cache.split"):
        assert "part-" in split.attributes["source"]
        shard = collector.parent(split)
        load = collector.parent(shard)
        assert (shard.name, load.name) == ("cache.shard", "cache.load")
        assert split.service == load.service == "cache-server"
        assert load.attributes["dataset"] == loaded
        prepare = collector.parent(load)
        assert (prepare.service, prepare.name) == ("trainer", "prepare")
    assert len(collector.named("cache.load")) == 1
    assert len(collector.named("cache.shard")) == FILES


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_a_batch_waits_for_is_below_it_to_the_nodes(
    collector: Collector, cluster: LocalCluster, loaded: str, shuffle: bool
) -> None:
    dataset = CacheIterableDataset(
        loaded, cache=Connection(cluster.endpoint, local=False), batch_size=50, shuffle=shuffle
    )
    collector.spans.clear()
    with trace.get_tracer("tests").start_as_current_span("epoch"):
        assert sorted(rows_of(dataset)) == list(range(ROWS))
    wait_until(lambda: len(collector.named("cache.node")) >= 2, WAIT_S, "spans of the nodes")
    for node in collector.named("cache.node"):
        window = collector.parent(node)
        batch = collector.parent(window)
        assert (node.service, node.attributes["dataset"]) == ("cache-server", loaded)
        assert (window.name, batch.name) == ("cache.window", "cache.batch")
        assert collector.parent(batch).name == "epoch"
    assert sum(window.attributes["rows"] for window in collector.named("cache.window")) == ROWS


def test_a_forked_worker_traces_what_it_reads(
    collector: Collector, cluster: LocalCluster, loaded: str
) -> None:
    cache = Connection(cluster.endpoint, local=False)
    dataset = CacheIterableDataset(loaded, cache=cache, batch_size=50, shuffle=True)
    dataset.set_epoch(3)
    collector.spans.clear()
    with trace.get_tracer("tests").start_as_current_span("with a worker"):
        workers = DataLoader(dataset, None, num_workers=1, multiprocessing_context="fork")
        assert sorted(rows_of(workers)) == list(range(ROWS))
    wait_until(lambda: len(collector.named("cache.node")) >= 2, WAIT_S, "spans of the nodes")
    for node in collector.named("cache.node"):
        batch = collector.parent(collector.parent(node))
        assert collector.parent(batch).name == "with a worker"


def broken_spec(directory: Path, name: str) -> DatasetSpec:
    """Its last row is none."""
    source = directory / "a.csv"
    source.write_text("a\n" + "1\n" * 2_000 + "x\n")
    return DatasetSpec(name, source, filter="a > 0")


def test_a_load_that_fails_says_why_in_its_spans(
    collector: Collector, cluster: LocalCluster, tmp_path: Path
) -> None:
    with pytest.raises(LoadError) as raised:
        CacheClient(cluster.endpoint).load(broken_spec(tmp_path, "broken"))
    failed = wait_until(lambda: [s for s in collector.named("cache.load") if s.error], WAIT_S, "it")
    assert failed[-1].error == str(raised.value)


def test_nodes_log_json_lines_with_the_ids_of_spans(
    collector: Collector, cluster: LocalCluster, tmp_path: Path
) -> None:
    with pytest.raises(LoadError):
        CacheClient(cluster.endpoint).load(broken_spec(tmp_path, "logged"))
    lines = [
        json.loads(line)
        for node in cluster.nodes
        for line in node.log_tail(max_bytes=1_000_000).splitlines()
    ]
    assert {"time", "level", "logger", "message"} <= lines[0].keys()
    failed = [line for line in lines if "load failed dataset=logged" in line["message"]]
    (planned,) = [line for line in lines if "planned name=logged" in line["message"]]
    assert failed and {line["level"] for line in failed} == {"error"}
    assert planned["level"] == "info" and "trace_id" not in planned  # the client was in no span

    def spans() -> list[Span]:
        known = {line["span_id"] for line in failed}
        return [span for span in collector.named("cache.shard") if span.span_id in known]

    found = wait_until(spans, WAIT_S, "the spans of the failed shards")
    assert {span.trace_id for span in found} == {line["trace_id"] for line in failed}
