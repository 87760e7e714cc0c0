"""What a version becomes, step by step."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from cache_protocol.errors import LoadError
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.holdings.holdings import Holdings
from cache_server.coordination.versions.states import TRANSITIONS, State, Step
from cache_server.coordination.versions.version_record import VersionRecord
from tests.conftest import write_numbered
from tests.fake_nodes import FakeNode, serving, settle, spec

# From each state: after COMPLETE, FAIL, SAVE, LOSE, RETURN, EVICT, RECALL; None: that step never
# happens there.
TABLE = {
    State.LOADING: (State.SERVED, State.FAILING, None, State.AWAITED, None, None, None),
    State.RESUMED: (State.SERVED, State.FAILING, None, State.AWAITED, None, None, None),
    State.AWAITED: (None, State.FAILING, None, None, State.LOADING, None, None),
    State.SERVED: (None, State.FAILING, None, State.UNAVAILABLE, None, State.EVICTED, None),
    State.UNAVAILABLE: (None, State.FAILING, None, None, State.SERVED, None, None),
    State.EVICTED: (None, None, None, None, None, None, State.SERVED),
    State.FAILING: (None, State.FAILING, State.FAILED, None, None, None, None),
    State.FAILED: (None, State.FAILED, None, None, None, None, None),
}


@pytest.mark.parametrize(("state", "step"), [*itertools.product(State, Step)])
def test_every_step_from_every_state(state: State, step: Step) -> None:
    assert TRANSITIONS.get((state, step)) is TABLE[state][[*Step].index(step)]


def test_a_state_loads_or_was_served_or_has_failed() -> None:
    for state in State:
        assert state.is_loading + state.was_served + state.has_failed == 1


def test_the_first_failure_stays_and_is_written_once(
    coordinator: Coordinator, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.create(spec(source))
    (version,) = coordinator.state.versions.values()
    written: list[object] = []
    monkeypatch.setattr(
        coordinator.state.catalogue, "write", lambda *args, **kw: written.append(kw)
    )

    version.fail(LoadError("first"))
    version.fail(LoadError("second"))
    for _ in range(2):
        with coordinator.state.changed:
            coordinator.state.mark_changed()
            coordinator.state.settle()

    assert (str(version.failure), version.state) == ("first", State.FAILED)
    assert len(written) == 1


def test_each_version_is_looked_at_once_however_many_there_are(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = FakeNode(coordinator, "one")
    for rows in range(4, 12):
        coordinator.create(spec(write_numbered(tmp_path / f"v{rows}", rows, files=1)))
        settle(node)
        for version in coordinator.state.versions.values():
            version.last_used = coordinator.state.clock()  # so none is forgotten
    assert len(coordinator.state.versions) == 8
    looks: Counter[int] = Counter()
    is_read_since = VersionRecord.is_read_since

    def counted(version: VersionRecord, time_s: float) -> bool:
        looks[version.created] += 1
        return is_read_since(version, time_s)

    monkeypatch.setattr(VersionRecord, "is_read_since", counted)
    with coordinator.state.changed:
        coordinator.state.mark_changed()
        for _ in range(10):  # while nothing changes, none is looked at again
            coordinator.state.settle()

    assert {*looks.values()} == {1} and len(looks) == 8


def test_a_heartbeat_without_news_looks_at_no_version(
    coordinator: Coordinator, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a cache of many datasets and nodes would do nothing else."""
    nodes = serving(coordinator, spec(source), "one", "two")
    looked: list[object] = []
    for method in ("desired", "loads", "is_ready"):
        monkeypatch.setattr(Holdings, method, lambda *_, m=method: looked.append(m))
    for node in nodes:
        node.beat()
    assert looked == []
    monkeypatch.undo()
    coordinator.delete("table")
    for node in nodes:
        node.beat()
        assert not node.holds("table")
