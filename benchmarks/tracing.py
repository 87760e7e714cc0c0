"""What do spans cost?

    python -m benchmarks.tracing [--rows N] [--turns N] [--quick]

Six epochs, shuffled and over Flight from two nodes, in batches of 1,024 rows of 136 bytes.
Processor time (user and system) is that of the trainer and of both nodes. Three kinds of passes
follow each other, forwards and backwards in turn: without the calls of
`cache_protocol.wire.tracing` in the trainer; with them and without a provider (off); and with a
provider that traces and exports every window (on), to a collector in another process that does not
count. A pass ends when its spans are exported, by the nodes too: they export every two seconds, and
by default every five.

Other work on the machine only adds to a pass, by up to a fifth. So a cost is given by the least
passes of both kinds; by the median over the turns, with its confidence interval; and by the calls
of a window alone, in a loop, beside the least time of a window.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection as Pipe
from threading import Thread
from typing import Any
from unittest import mock

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.common import median_interval, memory_directory, process_cpu_s, write_result
from benchmarks.processes import child_process
from benchmarks.tables import floats
from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_protocol.wire import tracing
from cache_server import LocalCluster

BARE, OFF, ON = "without the calls", "off", "on"
TARGETS = {OFF: 0.005, ON: 0.03}
BATCH_SIZE = 1024
_EPOCHS = 6  # of a pass
_EXPORT_S = 2.0  # between two exports of a node
_CALLS = 2_000
_NODES = 2


def main() -> None:
    """Measures, prints, and writes ``results/tracing.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="few rows and turns")
    arguments = parser.parse_args()
    rows, turns = (50_000, 2) if arguments.quick else (arguments.rows, arguments.turns)
    seconds, windows = measure(rows, turns)
    found = costs(seconds, windows)
    result = {
        "rows": rows,
        "turns": turns,
        "epochs": _EPOCHS,
        "windows": windows,
        "cpu_seconds": seconds,
        "costs": found,
        "targets": TARGETS,
    }
    for name, cost in found.items():
        low, high = cost["interval"]
        print(
            f"{name:4} {cost['least']:+.2%} of the least processor time; "
            f"median {cost['median']:+.2%}, {low:+.2%} to {high:+.2%}; "
            f"the calls alone {cost['calls_ms']:.3f} ms a window, {cost['calls']:.2%}"
        )
    path = write_result("tracing-quick" if arguments.quick else "tracing", result)
    print(f"\nwritten to {path}")


def measure(rows: int, turns: int) -> tuple[dict[str, list[float]], int]:
    """Processor seconds of the passes of each kind, and the windows of an epoch."""
    with ExitStack() as stack:
        pipe = stack.enter_context(child_process(_collect))
        endpoint = f"http://127.0.0.1:{_ask(pipe)}"
        nodes = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": str(round(_EXPORT_S * 1000)),
        }
        stack.enter_context(mock.patch.dict("os.environ", nodes))
        directory = stack.enter_context(memory_directory("cache-bench-"))
        cluster = stack.enter_context(LocalCluster(_NODES, directory))
        CacheClient(cluster.endpoint).load(DatasetSpec("table", floats(rows)))
        dataset = CacheIterableDataset(
            "table",
            cache=Connection(cluster.endpoint, local=False),
            batch_size=BATCH_SIZE,
            shuffle=True,
        )
        provider = TracerProvider()
        provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces"))
        )
        stack.callback(provider.shutdown)
        kinds: dict[str, Callable[[], Any]] = {
            BARE: _without_calls,
            OFF: nullcontext,
            ON: lambda: mock.patch.object(trace, "_TRACER_PROVIDER", provider),
        }
        pids = [node.pid for node in cluster.nodes]
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for turn in range(-1, turns):
            for name in kinds if turn % 2 else reversed(kinds):
                begun = time.process_time() + sum(map(process_cpu_s, pids))
                with kinds[name]():
                    for epoch in range(_EPOCHS):
                        dataset.set_epoch(epoch)
                        assert sum(len(batch["label"]) for batch in dataset) == rows
                if name == ON:
                    provider.force_flush()
                time.sleep(_EXPORT_S * 1.2)
                spent = time.process_time() + sum(map(process_cpu_s, pids)) - begun
                if turn >= 0:  # the first one warms up
                    seconds[name].append(spent)
        return seconds, _windows_of_a_pass(dataset)


def costs(seconds: Mapping[str, list[float]], windows: int) -> dict[str, dict[str, Any]]:
    """What spans cost as a share of a pass: by whole passes, and by the calls alone."""
    found: dict[str, dict[str, Any]] = {}
    for name, before in ((OFF, BARE), (ON, OFF)):
        pairs = zip(seconds[name], seconds[before], strict=True)
        shares = [after / base - 1 for after, base in pairs]
        interval = median_interval(shares)
        window_s = min(seconds[before]) / windows / _EPOCHS
        calls_s = calls_of_a_window(is_on=name == ON)
        found[name] = {
            "least": min(seconds[name]) / min(seconds[before]) - 1,
            "median": statistics.median(shares),
            "interval": [interval.low, interval.high],
            "confidence": interval.confidence,
            "calls_ms": calls_s * 1e3,
            "calls": calls_s / window_s,
        }
    return found


def calls_of_a_window(*, is_on: bool) -> float:
    """Processor seconds of what a window calls in the trainer and on two nodes.

    With the encoding of its spans for a collector.
    """
    with ExitStack() as stack:
        if is_on:
            provider = TracerProvider()
            provider.add_span_processor(BatchSpanProcessor(_Encoded()))
            stack.callback(provider.shutdown)
            stack.enter_context(mock.patch.object(trace, "_TRACER_PROVIDER", provider))
        begun = time.process_time()
        for number in range(_CALLS):
            batch = tracing.begin("cache.batch", epoch=0, number=number, rank=0)
            named = tracing.traceparent(batch)
            window = tracing.begin_below(named, "cache.window", step=number, rows=BATCH_SIZE)
            with tracing.current(window):
                sent = [tracing.traceparent() for _ in range(_NODES)]
            for traceparent in sent:
                tracing.end(tracing.begin_below(traceparent, "cache.node", dataset="t", rows=512))
            with tracing.spanning(window):
                pass
            tracing.end(batch)
        if is_on:
            provider.force_flush()
        return (time.process_time() - begun) / _CALLS


class _Encoded(SpanExporter):
    """Encodes spans as for a collector, and sends none."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def _windows_of_a_pass(dataset: CacheIterableDataset) -> int:
    """How many windows a pass waits for."""
    config, opened = dataset.config, dataset.opened
    steps = opened.sizes_of(config, 1).steps_per_window(len(opened.nodes))
    return -(-len(dataset) // steps)


@contextmanager
def _without_calls() -> Iterator[None]:
    """The trainer as if no line of it knew of spans."""
    nothing: dict[str, Any] = {
        "is_on": lambda: False,
        "begin": lambda *_, **__: None,
        "begin_below": lambda *_, **__: None,
        "end": lambda *_: None,
        "traceparent": lambda *_: "",
        "current": lambda _: nullcontext(),
        "spanning": lambda _: nullcontext(),
        "bound": lambda function: function,
        "headers": lambda: (),
    }
    with mock.patch.multiple(tracing, **nothing):
        yield


def _ask(pipe: Pipe) -> int:
    pipe.send(None)
    return int(pipe.recv())


def _collect(pipe: Pipe) -> None:
    """A collector that takes everything, until the pipe is closed."""

    class Taking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
    Thread(target=server.serve_forever, daemon=True).start()
    pipe.send("ready")
    try:
        pipe.recv()
        pipe.send(server.server_port)
        pipe.recv()
    except EOFError:
        server.shutdown()


if __name__ == "__main__":
    main()
