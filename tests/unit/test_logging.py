"""The log level of a node."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from cache_server.telemetry import set_up_logging

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
