"""Spans where OpenTelemetry is set up, and nothing where it is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from threading import Thread

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cache_protocol.errors import LoadError
from cache_protocol.wire import tracing
from cache_protocol.wire.credentials import Credentials

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """The spans that end while the process is traced, from here to the end of the test."""
    before, found = trace._TRACER_PROVIDER, InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    trace._TRACER_PROVIDER = provider
    yield found
    trace._TRACER_PROVIDER = before


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


@pytest.mark.parametrize("is_imported", [False, True])
def test_without_a_provider_nothing_is_traced_and_nothing_imported(
    is_imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_imported:
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert not tracing.is_on()
    assert tracing.begin("a") is tracing.begin_below(PARENT, "a") is None
    with tracing.below({"traceparent": PARENT}), tracing.spanning(None):
        assert tracing.headers() == () and tracing.traceparent() == "" and tracing.ids() == {}
    assert tracing.bound(len) is len
    assert ("opentelemetry.trace" in sys.modules) is is_imported


def test_a_span_of_a_caller_is_the_parent(exporter: InMemorySpanExporter) -> None:
    with tracing.below({"traceparent": PARENT, "tracestate": "a=b"}):
        load = tracing.begin("cache.load", dataset="t")
    with tracing.spanning(load):
        assert tracing.ids()["trace_id"] == PARENT[3:35]
        assert dict(Credentials().headers())["tracestate"] == "a=b"
        assert dict(Credentials().headers())["traceparent"] == tracing.traceparent()
    span = only(exporter)
    assert span.parent is not None and span.parent.span_id == int(PARENT[36:52], 16)
    assert span.name == "cache.load" and span.attributes == {"dataset": "t"}


@pytest.mark.parametrize("bad", ["", "x", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\ufffd" * 55])
def test_what_names_no_span_is_no_parent(exporter: InMemorySpanExporter, bad: str) -> None:
    assert tracing.begin_below(bad, "cache.node") is None
    with tracing.below({"traceparent": bad}):
        assert tracing.ids() == {}
    assert not exporter.get_finished_spans()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(LoadError("the file is gone"), "the file is gone"), (ValueError("secret"), "ValueError")],
)
def test_a_span_that_fails_has_the_reason_and_no_text_of_others(
    exporter: InMemorySpanExporter, error: Exception, reason: str
) -> None:
    with pytest.raises(type(error)), tracing.spanning(tracing.begin("cache.shard")):
        raise error
    span = only(exporter)
    assert (span.status.status_code, span.status.description) == (trace.StatusCode.ERROR, reason)
    assert not span.events


def test_another_thread_works_below_a_bound_span(exporter: InMemorySpanExporter) -> None:
    found: list[str] = []
    with tracing.spanning(tracing.begin("cache.window")):
        thread = Thread(target=tracing.bound(lambda: found.append(tracing.traceparent())))
        thread.start()
        thread.join()
        assert found == [tracing.traceparent()]
    assert tracing.traceparent() == ""
