"""Spans of OpenTelemetry, where this process has set it up; else every function does nothing.

Nothing here imports OpenTelemetry before somebody else did, and set a provider of tracers. So it
costs nothing where it is not used. Spans travel to nodes as ``traceparent``, in headers and in
messages; see docs/traces.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, TypeVar

from cache_protocol.errors import CacheError

TRACEPARENT = "traceparent"
_SCOPE = "trainer-data-cache"
_T = TypeVar("_T")


def _api() -> Any:
    """The module `opentelemetry.trace`; None without a provider of tracers."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    try:
        provider = trace and trace.get_tracer_provider()
        is_set = provider and not isinstance(
            provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider
        )
    except AttributeError:  # another thread imports it right now
        return None
    return trace if is_set else None


def is_on() -> bool:
    """Whether spans are made."""
    return _api() is not None


def begin(name: str, **attributes: str | int) -> Any:
    """Starts a span below the current one; None where nothing is traced. `end` must follow."""
    trace = _api()
    return trace and _tracer(trace.get_tracer_provider()).start_span(name, attributes=attributes)


def begin_below(traceparent: str, name: str, **attributes: str | int) -> Any:
    """Starts a span below one of another process; None if that is none. `end` must follow."""
    trace: Any = _api() if traceparent else None
    context = trace and _remote(trace, {TRACEPARENT: traceparent})
    if context is None:
        return None
    tracer = _tracer(trace.get_tracer_provider())
    return tracer.start_span(name, context, attributes=attributes)


def end(span: Any, error: BaseException | None = None) -> None:
    """Ends a span of `begin`, with the error by which it failed. More than once does nothing."""
    if span is None:
        return
    if isinstance(error, Exception):
        # Other errors than ours may hold secrets.
        reason = str(error) if isinstance(error, CacheError) else type(error).__name__
        trace = sys.modules["opentelemetry.trace"]
        span.set_status(trace.Status(trace.StatusCode.ERROR, reason))
    span.end()


@contextmanager
def current(span: Any) -> Iterator[None]:
    """Makes a span the current one of this thread; it does not end."""
    if span is None:
        yield
        return
    with sys.modules["opentelemetry.trace"].use_span(
        span, record_exception=False, set_status_on_exception=False
    ):
        yield


@contextmanager
def ending(span: Any) -> Iterator[None]:
    """Ends a span. It is not the current one, so a generator may yield inside."""
    try:
        yield
    except BaseException as error:
        end(span, error)
        raise
    end(span)


@contextmanager
def spanning(span: Any) -> Iterator[None]:
    """Makes a span the current one, and ends it."""
    with ending(span), current(span):
        yield


@contextmanager
def below(headers: Mapping[str, str]) -> Iterator[None]:
    """Makes the span of a caller the current one.

    Args:
        headers: of the call, by lower-case name.
    """
    trace: Any = _api() if TRACEPARENT in headers else None
    context = trace and _remote(trace, headers)
    if context is None:
        yield
        return
    with current(trace.get_current_span(context)):
        yield


def bound(function: Callable[..., _T]) -> Callable[..., _T]:
    """A function that other threads call below the current span of this thread."""
    trace = _api()
    span = trace and trace.get_current_span()
    if not span:
        return function

    def call(*args: Any) -> _T:
        with current(span):
            return function(*args)

    return call


def headers() -> tuple[tuple[str, str], ...]:
    """The headers that name the current span to another process; none where there is none."""
    if _api() is None:
        return ()
    carrier: dict[str, str] = {}
    _propagator().inject(carrier)
    return tuple(carrier.items())


def traceparent(span: Any = None) -> str:
    """What names a span, or the current one, to another process; empty: there is none."""
    if span is None:
        trace = _api()
        span = trace and trace.get_current_span()
    found = span and span.get_span_context()
    if not (found and found.is_valid):
        return ""
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"


def ids() -> Mapping[str, str]:
    """The ids of the current span, for a line of a log; empty: there is none."""
    trace = _api()
    found = trace and trace.get_current_span().get_span_context()
    if not (found and found.is_valid):
        return {}
    return {
        "trace_id": trace.format_trace_id(found.trace_id),
        "span_id": trace.format_span_id(found.span_id),
    }


def _remote(trace: Any, carrier: Mapping[str, str]) -> Any:
    """The context of the span that headers name; None: they name none."""
    context = _propagator().extract(carrier)
    return context if trace.get_current_span(context).get_span_context().is_valid else None


@lru_cache(maxsize=1)
def _tracer(provider: Any) -> Any:
    """The tracer of a provider, which makes a new one at each call: a fifth of a span's time."""
    return provider.get_tracer(_SCOPE)


@cache
def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
