"""Durations, and the words for drained nodes."""

from __future__ import annotations

import pytest

from cache_client import DrainInfo, NodeInfo, NodeUnavailableError, NotReadyError
from cache_client.cli.node_commands import seconds_of
from cache_client.control.drains import wait_until_drained
from cache_protocol.errors import ConfigError


def node(*, alive: bool = True, drain: DrainInfo | None = None) -> NodeInfo:
    return NodeInfo("one", "grpc://one:1", "one:2", "/cache", None, 0, 0, alive, drain=drain)


MOVING, DONE = (
    node(drain=DrainInfo(False, 3, 2048, "open writes")),
    node(drain=DrainInfo(True, 0, 0)),
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), (" 2h ", 7200)]
)
def test_a_duration_has_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "10 minutes", "-1s", "0", "nan", "1d"])
def test_what_is_no_duration_is_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match="--deadline must be a duration such as 90s or 10m"):
        seconds_of(text)


def test_a_drain_is_waited_for_until_it_is_done() -> None:
    seen: list[NodeInfo] = []
    assert wait_until_drained(MOVING, lambda: [DONE], None, seen.append) == DONE
    assert seen == [MOVING, DONE]


@pytest.mark.parametrize(
    ("after", "error", "words"),
    [
        (MOVING, NotReadyError, r"not drained within .* s: 3 shards \(.*\) are .*; open writes"),
        (node(alive=False), NodeUnavailableError, "was lost while it was drained"),
        (node(), NodeUnavailableError, "the drain of node one was ended"),
    ],
)
def test_a_drain_that_is_not_done_says_why(
    after: NodeInfo, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        wait_until_drained(MOVING, lambda: [after], 0.01)


def test_a_drained_node_that_the_coordinator_forgot_is_not_waited_for() -> None:
    with pytest.raises(NodeUnavailableError, match="node one was lost while it was drained"):
        wait_until_drained(MOVING, list, None)
