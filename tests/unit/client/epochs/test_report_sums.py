"""The sums of a report are those that a reader has."""

from __future__ import annotations

from dataclasses import fields

from cache_client.epochs.stats import NodeStats, ReadStats
from cache_protocol.wire.records import NODE_SUMS, REPORT_SUMS


def test_a_reader_has_every_sum_of_its_reports() -> None:
    assert set(REPORT_SUMS) <= {each.name for each in fields(ReadStats)}
    assert set(NODE_SUMS) <= {each.name for each in fields(NodeStats)}
