"""A coordinator that continues although it cannot write its catalogue."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_protocol.errors import LoadError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.coordinator import Coordinator
from tests.fake_nodes import (
    Clock,
    FakeNode,
    failing,
    make_coordinator,
    serving,
    settle,
    spec,
    state,
)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What cannot be written while its name stands here."""
    names: list[str] = []
    replace_file = os.replace

    def refuse(source: Path, target: Path) -> None:
        if any(name in str(target) for name in names):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    yield names
    names.clear()


def test_a_dataset_whose_readiness_cannot_be_kept_fails_and_the_coordinator_goes_on(
    coordinator: Coordinator, source: Path, full_disk: list[str]
) -> None:
    node = FakeNode(coordinator, "one")
    settle(node)
    coordinator.create(spec(source))

    full_disk.append("table@")
    settle(node)

    info = coordinator.get("table")
    assert info.state == pb.DATASET_STATE_FAILED
    assert "catalogue entry of 'table': No space left" in info.error.message
    with pytest.raises(LoadError, match="No space left"):
        coordinator.create(spec(source))
    full_disk.clear()
    coordinator.create(spec(source))
    settle(node)
    assert state(coordinator) == "ready"


def test_members_that_cannot_be_kept_are_kept_when_there_is_room(
    tmp_path: Path, coordinator: Coordinator, clock: Clock, full_disk: list[str]
) -> None:
    full_disk.append(".members.json")
    node = FakeNode(coordinator, "one")
    node.beat()
    assert make_coordinator(tmp_path, clock).nodes() == []

    full_disk.clear()
    node.beat()

    assert [node.id for node in make_coordinator(tmp_path, clock).nodes()] == ["one"]


def test_a_failure_that_cannot_be_kept_is_kept_when_there_is_room(
    tmp_path: Path, coordinator: Coordinator, source: Path, clock: Clock, full_disk: list[str]
) -> None:
    node = FakeNode(coordinator, "one")
    node.failing = failing("corrupt")
    coordinator.create(spec(source))
    full_disk.append("table@")
    settle(node)
    assert state(coordinator) == "failed"
    assert state(make_coordinator(tmp_path, clock)) == "loading"

    full_disk.clear()
    clock.now += 1.0  # without a change, it is tried once a second
    node.beat()

    assert state(make_coordinator(tmp_path, clock)) == "failed"


def test_a_drop_that_cannot_be_kept_is_one_all_the_same(
    coordinator: Coordinator, source: Path, full_disk: list[str]
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    node.failing = failing("corrupt")
    node.beat()
    late = node.report()

    full_disk.append(".dropped.json")
    coordinator.delete("table")
    coordinator.create(spec(source))
    coordinator.heartbeat(late)

    assert state(coordinator) == "loading"


def test_attaching_while_nothing_can_be_written_changes_nothing(
    coordinator: Coordinator, source: Path, full_disk: list[str]
) -> None:
    serving(coordinator, spec(source), "one", "two")

    full_disk.append("table@")
    with pytest.raises(LoadError, match="No space left"):
        coordinator.create(spec(source, replicas=2))

    assert coordinator.get("table").spec.replicas == 1
    assert state(coordinator) == "ready"
