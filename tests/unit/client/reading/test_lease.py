"""`Lease`: renewed when it is due, by the first node that answers."""

from __future__ import annotations

import logging

import pytest

from cache_client.reading import lease as reading_lease
from cache_client.reading import local_shards, node_health
from cache_protocol.errors import NodeUnavailableError, StaleVersionError
from tests.fake_streams import ENDPOINT, LEASE_S, Clock, FakeStreams, location, shard_map
from tests.waiting import wait_until

WAIT_S = 30.0


def make_lease(
    streams: FakeStreams,
    clock: Clock,
    *,
    local: local_shards.LocalShards | None = None,
    deadline_s: float = 60,
) -> reading_lease.Lease:
    return reading_lease.Lease(
        streams, node_health.NodeHealth(streams.shards), ENDPOINT,
        local=local, timeout_s=10.0, deadline_s=deadline_s, clock=clock,
    )  # fmt: skip


def test_a_lease_is_due_four_times_in_its_time_and_later_after_a_use() -> None:
    clock, streams = Clock(), FakeStreams(shard_map(1))
    lease = make_lease(streams, clock)
    clock.now += LEASE_S / 4 - 1
    assert not lease.is_due
    clock.now += 1
    assert lease.is_due

    lease.record_use()
    assert not lease.is_due
    clock.now += LEASE_S / 4
    assert lease.is_due

    lease.renew()
    assert not lease.is_due


def test_a_lease_that_is_not_due_is_not_renewed() -> None:
    streams = FakeStreams(shard_map(1))
    make_lease(streams, Clock()).renew_if_due()
    assert streams.calls == []


def test_a_due_lease_is_renewed_in_a_thread_of_this_name() -> None:
    clock, streams = Clock(), FakeStreams(shard_map(1))
    lease = make_lease(streams, clock)
    clock.now += LEASE_S
    lease.renew_if_due()
    wait_until(lambda: streams.threads == ["cache-lease"], WAIT_S, "renewed")


def test_nothing_is_renewed_once_the_reader_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    clock, streams = Clock(), FakeStreams(shard_map(1))
    lease = make_lease(streams, clock)
    clock.now += LEASE_S
    streams.is_closed = True
    lease.renew_if_due()
    assert streams.calls == []

    streams.errors = {ENDPOINT: StaleVersionError("gone")}
    lease.renew()  # a thread that was under way
    assert caplog.records == []


def test_nodes_are_asked_one_after_the_other_until_one_renews(
    caplog: pytest.LogCaptureFixture,
) -> None:
    streams = FakeStreams(shard_map(3))
    for gone in (ENDPOINT, location(0)):
        streams.errors[gone] = NodeUnavailableError("gone")
    make_lease(streams, Clock()).renew()
    assert streams.calls == [("renew", at) for at in (ENDPOINT, location(0), location(1))]
    assert set(streams.timeouts_s) == {2.0} and caplog.records == []


def test_a_refused_renewal_is_logged_with_its_reason_and_no_other_node_is_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    streams = FakeStreams(shard_map(2), errors={ENDPOINT: StaleVersionError("version f is gone")})
    local = local_shards.LocalShards(streams.shards)
    make_lease(streams, Clock(), local=local).renew()
    assert streams.calls == [("renew", ENDPOINT)] and local.leased_at == 0.0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "dataset=table reason=version f is gone" in record.getMessage()


def test_a_renewal_that_no_node_answers_is_logged_with_the_first_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    streams = FakeStreams(shard_map(1))
    streams.errors = {
        ENDPOINT: NodeUnavailableError("endpoint is gone"),
        location(0): NodeUnavailableError("node is gone"),
    }
    make_lease(streams, Clock()).renew()
    assert "reason=endpoint is gone" in caplog.text and len(streams.calls) == 2


def test_no_node_is_asked_after_the_deadline() -> None:
    clock, streams = Clock(), FakeStreams(shard_map(3))

    def take_two_seconds() -> None:
        clock.now += 2.0

    streams.on_call = take_two_seconds
    for node in (ENDPOINT, *map(location, range(3))):
        streams.errors[node] = NodeUnavailableError("hangs")
    make_lease(streams, clock, deadline_s=3.0).renew()
    assert streams.timeouts_s == [2.0, 1.0]


def test_later_readers_of_the_same_files_know_when_the_lease_was_renewed() -> None:
    clock, streams = Clock(), FakeStreams(shard_map(1))
    local = local_shards.LocalShards(streams.shards)
    first = make_lease(streams, clock, local=local)
    assert first.is_due  # the shard map is older than the lease
    first.renew()

    clock.now += LEASE_S / 4 - 1
    later = make_lease(streams, clock, local=local)
    assert not later.is_due
    clock.now += 1
    assert later.is_due


def test_a_lease_from_the_future_is_due_at_once() -> None:
    """Its time is of another machine, or from before a restart of this one."""
    clock = Clock()
    streams = FakeStreams(shard_map(1, leased_at=clock.now + 1))
    assert make_lease(streams, clock, local=local_shards.LocalShards(streams.shards)).is_due
