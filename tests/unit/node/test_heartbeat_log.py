from __future__ import annotations

import logging

import pytest

from cache_protocol.errors import NodeUnavailableError
from cache_server.node import heartbeat_log
from cache_server.node.heartbeat_log import HeartbeatLog

ERROR = NodeUnavailableError("nobody answers")


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, heartbeat_log.logger.name)


def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(heartbeat_log.time, "monotonic", lambda: seconds)


def test_a_coordinator_that_starts_with_its_nodes_is_not_spoken_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = HeartbeatLog()
    for seconds in (100.0, 100.3, 100.9):
        at(monkeypatch, seconds)
        log.record_failure(ERROR, joined=False)
    log.record_answer()
    assert not caplog.messages


def test_one_that_does_not_answer_is_said_every_ten_seconds_and_once_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = HeartbeatLog()
    for tenths in range(1000, 1250):
        at(monkeypatch, tenths / 10)
        log.record_failure(ERROR, joined=False)
    log.record_answer()
    log.record_answer()
    assert caplog.messages == [
        "waiting for the coordinator to join it since_s=1 reason=nobody answers",
        "waiting for the coordinator to join it since_s=11 reason=nobody answers",
        "waiting for the coordinator to join it since_s=21 reason=nobody answers",
        "the coordinator answers after_s=24.9",
    ]


def test_one_that_a_node_had_joined_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at(monkeypatch, 100.0)
    HeartbeatLog().record_failure(ERROR, joined=True)
    assert caplog.messages == ["heartbeat failed since_s=0 reason=nobody answers"]
