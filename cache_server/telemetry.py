"""What a node tells beside its metrics: lines of its log, and spans of OpenTelemetry."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from cache_protocol.errors import ConfigError, missing_package
from cache_protocol.wire import tracing

FORMATS = ("text", "json")
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_LAST_SPANS_S = 2.0  # a collector that is away delays the end of a node no longer
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class JsonLines(logging.Formatter):
    """One JSON object a line, with the ids of the span in which it was logged."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **tracing.ids(),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content)


def set_up_logging(level: str, log_format: str = "text") -> None:
    """Logs on standard error: this project's lines from a level on, libraries' from warnings on.

    Raises:
        ConfigError: one of both is unknown.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"--log-level must be debug, info, warning or error, got {level!r}")
    if log_format not in FORMATS:
        raise ConfigError(f"--log-format must be {' or '.join(FORMATS)}, got {log_format!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else logging.Formatter(_TEXT))
    # Libraries log signed addresses at info and headers at debug.
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler])
    for name in ("__main__", "cache_server", "cache_protocol"):
        logging.getLogger(name).setLevel(number)


def set_up_spans(environ: Mapping[str, str]) -> Callable[[], object]:
    """Sends spans to the collector that the standard variables of OpenTelemetry name, if any.

    Returns:
        Sends what is left, within two seconds, and ends.

    Raises:
        ConfigError: the packages of OpenTelemetry are missing.
    """
    is_off = (
        environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
        or not any(environ.get(name) for name in _ENDPOINTS)
    )
    if is_off or tracing.is_on():  # `opentelemetry-instrument` has set it up
        return lambda: None
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(missing_package(error, "tracing", "traces")) from None
    name = {} if environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "cache-server"}
    provider = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)

    def send() -> None:
        sender = threading.Thread(target=provider.shutdown, name="send-spans", daemon=True)
        sender.start()
        sender.join(_LAST_SPANS_S)

    return send
