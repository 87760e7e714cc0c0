from __future__ import annotations

from cache_client.reading import node_health
from tests.fake_streams import Clock, location, shard_map

NODE, OTHER = location(0), location(1)


def test_a_node_is_avoided_for_twice_as_long_at_each_failure() -> None:
    clock = Clock()
    health = node_health.NodeHealth(shard_map(1), clock)
    for number, avoid_s in enumerate([2, 4, 8, 16, 32, 64, 120, 120]):
        assert health.record_failure(NODE) == (number == 0)
        clock.now += avoid_s - 1
        assert health.nodes_to_avoid() == {NODE} and health.nodes_to_probe() == set()
        clock.now += 1
        assert health.nodes_to_probe() == {NODE}


def test_a_failure_while_the_node_is_avoided_is_not_counted() -> None:
    clock = Clock()
    health = node_health.NodeHealth(shard_map(1), clock)
    assert health.record_failure(NODE)
    assert not health.record_failure(NODE)
    clock.now += 2
    assert health.nodes_to_probe() == {NODE}


def test_a_node_that_sent_rows_has_no_failures() -> None:
    health = node_health.NodeHealth(shard_map(2), Clock())
    health.record_failure(NODE)
    health.record_failure(OTHER)
    health.clear_failures(NODE)
    health.clear_failures("grpc://never-failed:1")
    assert health.nodes_to_avoid() == {OTHER}
    assert health.record_failure(NODE)  # the first again


def test_a_node_that_is_asked_again_and_fails_is_avoided_for_longer() -> None:
    clock = Clock()
    health = node_health.NodeHealth(shard_map(1), clock)
    health.record_failure(NODE)
    health.stop_avoiding(NODE)
    assert health.nodes_to_avoid() == set()

    assert not health.record_failure(NODE)
    clock.now += 3
    assert health.nodes_to_probe() == set()
    clock.now += 1
    assert health.nodes_to_probe() == {NODE}
