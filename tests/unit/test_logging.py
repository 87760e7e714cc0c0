"""The log level of a node, and the line of its start."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from cache_server.__main__ import _print_line, _set_up_logging

LOGGERS = [logging.getLogger(name) for name in ("", "cache_server", "cache_protocol")]


@pytest.fixture(autouse=True)
def _levels_are_restored() -> Iterator[None]:
    levels = [logger.level for logger in LOGGERS]
    yield
    for logger, level in zip(LOGGERS, levels, strict=True):
        logger.setLevel(level)


def test_the_log_level_applies_to_both_packages_of_a_node_and_to_no_library() -> None:
    _set_up_logging("debug")

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
