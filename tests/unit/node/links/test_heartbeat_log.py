from __future__ import annotations

import logging

import pytest

from cache_protocol.errors import NodeUnavailableError
from cache_server.node.links import heartbeat_log
from cache_server.node.links.heartbeat_log import HeartbeatLog

ERROR = NodeUnavailableError("no answer")


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, heartbeat_log.logger.name)


def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(heartbeat_log.time, "monotonic", lambda: seconds)


def test_a_coordinator_that_starts_with_its_nodes_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = HeartbeatLog()
    for seconds in (100.0, 100.3, 100.9):
        at(monkeypatch, seconds)
        log.record_failure(ERROR, joined=False)
    log.record_answer()
    assert not caplog.messages


def test_a_silent_coordinator_is_logged_every_ten_seconds_and_when_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = HeartbeatLog()
    for tenths in range(1000, 1250):
        at(monkeypatch, tenths / 10)
        log.record_failure(ERROR, joined=False)
    log.record_answer()
    log.record_answer()
    assert caplog.messages == [
        "waiting for the coordinator since_s=1 reason=no answer",
        "waiting for the coordinator since_s=11 reason=no answer",
        "waiting for the coordinator since_s=21 reason=no answer",
        "coordinator answers after_s=24.9",
    ]


def test_a_failure_after_joining_is_logged_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at(monkeypatch, 100.0)
    HeartbeatLog().record_failure(ERROR, joined=True)
    assert caplog.messages == ["heartbeat failed since_s=0 reason=no answer"]
