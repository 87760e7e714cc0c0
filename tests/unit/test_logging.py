"""The log level of a node, and the line of its start."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from cache_protocol.errors import ConfigError
from cache_server.__main__ import _print_line
from cache_server.telemetry import JsonLines, set_up_logging, set_up_spans

LOGGERS = [logging.getLogger(name) for name in ("", "cache_server", "cache_protocol")]


@pytest.fixture(autouse=True)
def _levels_are_restored() -> Iterator[None]:
    levels = [logger.level for logger in LOGGERS]
    yield
    for logger, level in zip(LOGGERS, levels, strict=True):
        logger.setLevel(level)


def test_the_log_level_applies_to_both_packages_of_a_node_and_to_no_library() -> None:
    set_up_logging("debug")

    for name in ("cache_server.node.node", "cache_protocol.wire.load_progress"):
        assert logging.getLogger(name).isEnabledFor(logging.DEBUG)
    assert not logging.getLogger("library.of.no.test").isEnabledFor(logging.INFO)


def test_the_line_of_a_start_is_one_write_that_no_log_line_divides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []

    class Unbuffered(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Unbuffered())
    _print_line("{}")
    assert list(filter(None, written)) == ["{}\n"]


def test_a_line_of_json_has_the_message_and_the_error() -> None:
    record = logging.LogRecord("a.b", logging.ERROR, "", 0, "load of %s failed", ("t",), None)
    try:
        raise ValueError('of "t"')
    except ValueError:
        record.exc_info = sys.exc_info()
    line = JsonLines().format(record)
    content = json.loads(line)
    assert "\n" not in line
    assert content["message"] == "load of t failed" and content["level"] == "error"
    assert content["logger"] == "a.b" and content["time"].endswith("+00:00")
    assert content["exception"].endswith('ValueError: of "t"')


def test_an_unknown_format_is_quoted() -> None:
    with pytest.raises(ConfigError, match="--log-format must be text or json, got 'xml'"):
        set_up_logging("info", "xml")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    ],
)
def test_spans_are_sent_only_where_the_environment_names_a_collector(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # as if it were missing
    assert set_up_spans(environ)() is None
    with pytest.raises(ConfigError, match=r"pip install 'trainer-data-cache\[traces\]'"):
        set_up_spans({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"})
