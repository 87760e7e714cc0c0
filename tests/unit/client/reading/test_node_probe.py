"""`NodeProbe`: finds failed nodes that answer again, and the newest shard map."""

from __future__ import annotations

import logging

import pytest

from cache_client.reading import lease, node_health
from cache_protocol.errors import NodeUnavailableError, NotReadyError, StaleVersionError
from tests.fake_streams import ENDPOINT, Clock, FakeStreams, location, shard_map
from tests.waiting import wait_until

WAIT_S = 30.0
NODE, OTHER = location(0), location(1)


class Probing:
    """A probe of fake nodes of which some have failed, and how often the probe reported."""

    def __init__(self, *failed: str) -> None:
        self.clock = Clock()
        self.streams = FakeStreams(shard_map(2))
        self.health = node_health.NodeHealth(shard_map(2), self.clock)
        self.changes = 0
        self.probe = lease.NodeProbe(
            self.streams, self.health, ENDPOINT,
            columns=(), timeout_s=10.0, on_change=self.count, clock=self.clock,
        )  # fmt: skip
        for node in failed:
            self.health.record_failure(node)
        self.clock.now += 2.0  # the time to probe them

    def count(self) -> None:
        self.changes += 1


def test_a_node_that_answers_is_asked_for_rows_again() -> None:
    probing = Probing(NODE)
    probing.probe.probe([NODE])
    assert probing.health.nodes_to_avoid() == set() and probing.changes == 1
    assert probing.streams.calls == [("map", ENDPOINT), ("renew", NODE)]
    assert probing.streams.timeouts_s == [2.0, 2.0]
    assert not probing.health.record_failure(NODE)  # not the first: it has sent no rows yet


@pytest.mark.parametrize("error", [NodeUnavailableError("gone"), NotReadyError("loading")])
def test_a_node_that_does_not_answer_is_avoided_for_longer(error: Exception) -> None:
    probing = Probing(NODE, OTHER)
    probing.streams.errors[NODE] = error
    probing.probe.probe([NODE, OTHER])
    assert probing.health.nodes_to_avoid() == {NODE} and probing.streams.dropped == [NODE]
    probing.clock.now += 3.0
    assert probing.health.nodes_to_probe() == set()
    probing.clock.now += 1.0
    assert probing.health.nodes_to_probe() == {NODE}


def test_a_node_that_holds_no_shard_any_more_is_not_asked() -> None:
    probing = Probing(OTHER)
    probing.streams.shards = shard_map(1)
    probing.probe.probe([OTHER])
    assert probing.health.shards is probing.streams.shards
    assert probing.health.nodes_to_avoid() == set()
    assert probing.streams.calls == [("map", ENDPOINT)]


def test_a_version_that_is_gone_leaves_every_node_avoided(caplog: pytest.LogCaptureFixture) -> None:
    probing = Probing(NODE, OTHER)
    probing.streams.errors[ENDPOINT] = StaleVersionError("version f is gone")
    with caplog.at_level(logging.DEBUG, "cache_client.reading.lease"):
        probing.probe.probe([NODE, OTHER])
    assert probing.health.nodes_to_avoid() == {NODE, OTHER} and probing.changes == 0
    assert probing.health.nodes_to_probe() == set()
    assert "dataset=table reason=version f is gone" in caplog.text


def test_a_probe_ends_when_the_reader_is_closed() -> None:
    probing = Probing(NODE)
    probing.streams.is_closed = True
    probing.probe.start_if_due()
    assert probing.streams.calls == []

    probing.probe.probe([NODE])  # a thread that was under way
    assert probing.streams.calls == [("map", ENDPOINT)] and probing.changes == 0
    assert probing.health.nodes_to_avoid() == {NODE}


def test_only_nodes_that_were_avoided_for_long_enough_are_probed_in_the_background() -> None:
    probing = Probing(NODE)
    probing.health.record_failure(OTHER)
    probing.probe.start_if_due()
    wait_until(lambda: probing.changes, WAIT_S, "the end of the probe")
    assert probing.streams.calls == [("map", ENDPOINT), ("renew", NODE)]
    assert set(probing.streams.threads) == {"cache-nodes"}
    assert probing.health.nodes_to_avoid() == {OTHER}


def test_a_map_is_read_from_the_first_node_that_answers() -> None:
    probing = Probing()
    probing.streams.errors[ENDPOINT] = NodeUnavailableError("gone")
    probing.probe.refresh_map(probing.clock.now + 60.0)
    assert probing.streams.calls == [("map", ENDPOINT), ("map", NODE)]
    assert probing.health.shards is probing.streams.shards


def test_the_old_map_is_kept_where_no_node_has_a_newer_one() -> None:
    probing = Probing()
    old = probing.health.shards
    probing.probe.refresh_map(probing.clock.now)  # no time left
    assert probing.streams.calls == []
    probing.streams.errors[ENDPOINT] = NotReadyError("a shard is nowhere")
    probing.probe.refresh_map(probing.clock.now + 60.0)
    assert probing.streams.calls == [("map", ENDPOINT)]
    for node in (ENDPOINT, NODE, OTHER):
        probing.streams.errors[node] = NodeUnavailableError("gone")
    probing.probe.refresh_map(probing.clock.now + 60.0)
    assert probing.health.shards is old
