"""Reports of a reader on their way to the cache."""

from __future__ import annotations

import threading

import pytest

from cache_client.epochs import reports
from cache_client.epochs.passes import Pass
from cache_client.epochs.reports import ReaderIdentity, Reporter
from cache_client.epochs.stats import ReadStats
from cache_client.order.order import StepPlan
from cache_protocol.errors import CacheError, NodeUnavailableError, RequestError
from cache_protocol.v1 import cache_pb2 as pb
from tests.waiting import wait_until

WAIT_S = 30.0


class Nodes:
    """Stands for the connections to all nodes: the first calls fail.

    Attributes:
        taken: the reports that a node took.
    """

    def __init__(self, *errors: CacheError) -> None:
        self.errors = list(errors)
        self.taken: list[pb.ReaderReport] = []
        self.calls = 0
        self.is_closed = False

    def connect(self, *_: object) -> Nodes:
        return self

    def close(self) -> None:
        """Another call opens it again."""

    def report(self, report: pb.ReaderReport, timeout_s: float) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        self.taken.append(report)


def end_a_pass(monkeypatch: pytest.MonkeyPatch, nodes: Nodes) -> list[pb.PassEnd.ValueType]:
    """Reports the end of a pass; returns what nodes took, once nothing more is sent."""
    monkeypatch.setattr(reports, "NodeConnection", nodes.connect)
    monkeypatch.setattr(reports, "_AGAIN_S", 0.0)
    reporter = Reporter(
        ReaderIdentity("run", "job", "table", "f", 0, 1),
        ["grpc://here:1", "grpc://here:2"],
        standing=pb.ReaderReport(),
        is_shared=True,
    )
    pass_ = Pass()
    pass_.epoch, pass_.plan = 0, StepPlan(100, 1, 10)
    sums = ReadStats(0.0, 0.0, 0.0, 0, 0, 0, 0, {}, 0.0, 0.0, 0, 0, 0.0)
    reporter.send(sums, None, pass_, end=pb.PASS_END_FINISHED)
    wait_until(
        lambda: "cache-report" not in {thread.name for thread in threading.enumerate()},
        WAIT_S,
        "all is sent",
    )
    return [each.end for each in nodes.taken]


def test_the_last_report_of_a_pass_is_sent_until_a_node_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = Nodes(*[NodeUnavailableError("it does not answer")] * 10)

    assert end_a_pass(monkeypatch, nodes) == [pb.PASS_END_FINISHED]
    assert nodes.calls == 11


def test_the_last_report_of_a_pass_is_given_up_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reports, "_KEPT_S", 0.0)
    nodes = Nodes(*[NodeUnavailableError("it does not answer")] * 10)

    assert end_a_pass(monkeypatch, nodes) == []
    assert nodes.calls == 3


def test_a_report_that_the_cache_refuses_is_not_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = Nodes(RequestError("a bad name"))

    assert end_a_pass(monkeypatch, nodes) == []
    assert nodes.calls == 1
