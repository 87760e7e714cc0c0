"""Whatever happens, and in whatever order its news arrive: what a user may rely on.

Loads, drops, reports that come late or twice, nodes that die and come back, coordinators that start
again. Nodes are the fake ones, whose reports this test delivers when it likes.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from cache_protocol.errors import ConfigError, DatasetNotFoundError, StaleVersionError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import ANYONE, Principal
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.holdings import holder_checks, shard_holders
from cache_server.coordination.members import placement
from cache_server.shards.version_key import VersionKey
from tests.conftest import write_numbered
from tests.fake_nodes import LEASE_S, TIMEOUT_S, Clock, FakeNode, make_coordinator, spec

FILES = 3
NODES = ("one", "two", "three")
ALL = frozenset(range(FILES))
READY, FAILED = pb.DATASET_STATE_READY, pb.DATASET_STATE_FAILED

names = st.sampled_from(["a", "b"])
nodes = st.sampled_from(NODES)
contents = st.sampled_from([None, ["row"]])  # each makes another version
shards = st.sets(st.sampled_from(sorted(ALL))) | st.just(ALL)


class AnyOrder(RuleBasedStateMachine):
    """A cache of three nodes.

    Attributes:
        loads: version -> number of its latest load; of those that were asked for and not dropped.
        asked: version -> when it was asked for last, counted.
        attempts: version and attempt -> the load that it belongs to.
        gone: versions that were dropped or replaced and not asked for since.
        said: node -> its latest report that was delivered, and when.
    """

    reports = Bundle("reports")

    def __init__(self, source: Path) -> None:
        super().__init__()
        self.source = source
        self.directory = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.coordinator: Coordinator = make_coordinator(self.directory, self.clock)
        self.count = 0
        self.loads: dict[VersionKey, int] = {}
        self.asked: dict[VersionKey, int] = {}
        self.attempts: dict[tuple[VersionKey, int], int] = {}
        self.ready: set[VersionKey] = set()
        self.leased: dict[VersionKey, float] = {}
        self.gone: set[VersionKey] = set()
        self.said: dict[str, tuple[float, pb.HeartbeatRequest]] = {}
        self.nodes: dict[str, Process] = {}
        for node_id in NODES:
            self.nodes[node_id] = Process(self, node_id, self._next())
            self.nodes[node_id].beat()

    def teardown(self) -> None:
        try:
            self._comes_to_its_end()
        finally:
            self.coordinator.close()
            shutil.rmtree(self.directory)

    # -- what happens --------------------------------------------------------------------------

    @rule(name=names, columns=contents, replicas=st.integers(1, 2), refresh=st.booleans())
    def load(self, name: str, columns: list[str] | None, replicas: int, refresh: bool) -> None:
        before = {key: self._state(key) for key in self.loads}
        wanted = spec(self.source, name=name, columns=columns, replicas=replicas)
        key = VersionKey(name, self.coordinator.create(wanted, refresh=refresh).fingerprint)
        self.asked[key] = self._next()
        if before.get(key) in {None, FAILED}:
            self.loads[key] = self._next()
            self.ready.discard(key)
        self.gone.discard(key)

    @rule(name=names)
    def drop(self, name: str) -> None:
        dropped = {key for key in self.loads if key.dataset == name}
        if not dropped:
            with pytest.raises(DatasetNotFoundError):
                self.coordinator.delete(name)
            return
        self.coordinator.delete(name)
        self._forget(dropped)

    @rule(name=names)
    def lease(self, name: str) -> None:
        if any(key.dataset == name for key in self.loads):
            info = self.coordinator.get(name, lease=True)
            self.leased[VersionKey(name, info.fingerprint)] = self.clock.now

    @rule(node_id=nodes, load=shards)
    def beat(self, node_id: str, load: set[int]) -> None:
        if node_id in self.nodes:
            self.nodes[node_id].beat_unless_refused(load)

    @rule(node_id=nodes, index=st.sampled_from(sorted(ALL)), name=names)
    def cannot_load(self, node_id: str, name: str, index: int) -> None:
        if node_id in self.nodes:
            self.nodes[node_id].broken ^= {(name, index)}

    @rule(target=reports, node_id=nodes)
    def report_is_under_way(self, node_id: str) -> tuple[float, pb.HeartbeatRequest]:
        node = self.nodes.get(node_id)
        return self.clock.now, node.report() if node else pb.HeartbeatRequest()

    @rule(report=reports)
    def report_arrives(self, report: tuple[float, pb.HeartbeatRequest]) -> None:
        made_at, request = report
        if request.node.id and self.clock.now - made_at < TIMEOUT_S:
            try:
                self.heartbeat(request)
            except ConfigError as error:  # the node is another process by now
                assert "same id" in str(error)

    @rule(node_id=nodes)
    def node_dies(self, node_id: str) -> None:
        self.nodes.pop(node_id, None)

    @rule(node_id=nodes, keeps=st.booleans())
    def node_starts_again(self, node_id: str, keeps: bool) -> None:
        before, again = self.nodes.get(node_id), Process(self, node_id, self._next())
        if keeps and before is not None:
            again.sealed = {key: dict(held) for key, held in before.sealed.items() if held}
        self.nodes[node_id] = again

    @rule()
    def coordinator_starts_again(self) -> None:
        # Of one that was ready, no more than what live nodes say of it.
        failed = {key for key in self.loads.keys() - self.ready if self._state(key) == FAILED}
        self.coordinator.close()
        self.coordinator = make_coordinator(self.directory, self.clock)
        self.said.clear()
        # Nobody has read rows of one that was never ready.
        self.leased = {key: at for key, at in self.leased.items() if key in self.ready}
        assert all(self._state(key) == FAILED for key in failed)

    @rule(seconds=st.sampled_from([1, TIMEOUT_S / 2, TIMEOUT_S + 1, LEASE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    # -- what a user may rely on ---------------------------------------------------------------

    @invariant()
    def what_was_asked_for_is_there_until_it_is_dropped_or_replaced(self) -> None:
        states = {key: self._state(key) for key in self.loads}
        self.ready |= {key for key, state in states.items() if state == READY}
        for key in [key for key, state in states.items() if state is None]:
            newer = [other for other in states if self._is_newer(other, key)]
            assert any(other in self.ready for other in newer), f"{key} is lost"
            used = self.leased.get(key, -LEASE_S)
            assert key not in self.ready or self.clock.now - used >= LEASE_S, f"{key} was leased"
            self._forget({key})

    @invariant()
    def what_was_dropped_or_replaced_does_not_come_back(self) -> None:
        for key in self.gone:
            assert self._state(key) is None
        assert {info.spec.name for info in self.coordinator.datasets()} == {
            key.dataset for key in self.loads
        }

    @invariant()
    def the_holders_that_follow_each_report_are_those_of_all_reports(
        self,
    ) -> None:
        for version in self.coordinator.state.versions.values():
            view = self.coordinator.state.holdings(version)
            kept, found = (
                view._holders,
                shard_holders.ShardHolders(version, self.coordinator.state.checks),
            )
            found.update(kept.reports.keys(), view.last_report, None)
            assert kept.reports.keys() == self.coordinator.state.membership.alive()
            for what in ("saying", "holding", "serving", "reports"):
                assert getattr(kept, what) == getattr(found, what), what

    @invariant()
    def a_failure_is_one_of_the_latest_load(self) -> None:
        for key, number in self.loads.items():
            info = self.coordinator.get(key.dataset, key.fingerprint)
            # Here a node may die twice before it reports what it has begun.
            if info.state == FAILED and "ended meanwhile" not in info.error.message:
                assert f"{key.fingerprint} load {number};" in info.error.message

    @invariant()
    def a_name_finds_the_newest_version_that_has_not_failed(self) -> None:
        for name in {key.dataset for key in self.loads}:
            versions = [key for key in self.loads if key.dataset == name]
            good = [key for key in versions if self._state(key) != FAILED]
            newest = max(good or versions, key=lambda key: self.asked[key])
            assert self.coordinator.get(name).fingerprint == newest.fingerprint

    @invariant()
    def what_is_ready_is_served_by_live_nodes_that_said_so(self) -> None:
        for key in self.loads:
            info = self.coordinator.get(key.dataset, key.fingerprint)
            alive = {node.id for node in info.nodes}
            assert alive <= {
                node_id for node_id, (at, _) in self.said.items()
                if self.clock.now - at <= TIMEOUT_S
            }  # fmt: skip
            for shard in info.shards:
                assert set(shard.node_ids) <= alive
                assert shard.node_ids or info.state != READY
                for node_id in shard.node_ids if info.state == READY else ():
                    (said,) = (s for s in self._last_report(node_id, key) if s.index == shard.index)
                    assert said.sealed and said.rows_fixed
                    assert said.row_start == shard.rows.start

    # -- the wire ------------------------------------------------------------------------------

    def heartbeat(
        self, request: pb.HeartbeatRequest, *, by: Principal | None = None
    ) -> pb.HeartbeatResponse:
        self.coordinator.heartbeat(request, by=by or ANYONE)
        while (check := self.coordinator.next_check(0.0)) is not None:
            self.coordinator.apply_check(check, holder_checks.Outcome.MATCHES)
        answer = self.coordinator.heartbeat(request, by=by or ANYONE)
        self._equals_a_fresh_answer(request, answer)
        self.said[request.node.id] = self.clock.now, request
        self.what_was_asked_for_is_there_until_it_is_dropped_or_replaced()
        assert not answer.kept  # the catalogue was never lost
        for desired in answer.datasets:
            key = VersionKey(desired.plan.dataset, desired.plan.fingerprint)
            number = self.attempts.setdefault((key, desired.plan.attempt), self.loads[key])
            assert number == self.loads[key], "two loads have the same attempt"
        return answer

    def _equals_a_fresh_answer(
        self, request: pb.HeartbeatRequest, answer: pb.HeartbeatResponse
    ) -> None:
        """What the coordinator keeps between changes is never of before one."""
        kept = self.coordinator.datasets()
        with self.coordinator.state.changed:
            self.coordinator.state.mark_changed()
        assert self.coordinator.datasets() == kept
        assert self.coordinator.heartbeat(request, by=ANYONE) == answer

    def _last_report(self, node_id: str, key: VersionKey) -> list[pb.ActualShard]:
        """The shards that a node reported last, of the latest load of a version."""
        for actual in self.said[node_id][1].datasets:
            if VersionKey(actual.dataset, actual.fingerprint) == key:
                attempt = actual.attempt if actual.HasField("attempt") else None
                assert attempt is None or self.attempts[key, attempt] == self.loads[key]
                return list(actual.shards)
        return []

    # -- in the end ----------------------------------------------------------------------------

    def _comes_to_its_end(self) -> None:
        for node_id in NODES:
            self.nodes.setdefault(node_id, Process(self, node_id, self._next())).broken = set()
        self._settle()
        for key in self.loads:
            assert self._state(key) in {READY, FAILED}
        for node in self.nodes.values():
            assert {key for key, held in node.sealed.items() if held} <= self.loads.keys()
        before = self._homes()
        for key, homes in before.items():
            replicas = self.coordinator.get(key.dataset, key.fingerprint).spec.replicas
            assert homes == placement.place(key.fingerprint, FILES, NODES, replicas)

        self.coordinator_starts_again()
        self._settle()
        after = self._homes()
        assert {key: after[key] for key in before if key in self.loads} == {
            key: homes for key, homes in before.items() if key in self.loads
        }

    def _settle(self) -> None:
        self.clock.now += TIMEOUT_S + 1  # who a late report took for another process, is itself
        for _ in range(8):
            for node in self.nodes.values():
                node.beat_unless_refused(ALL)
            self.clock.now += 1
            self.what_was_asked_for_is_there_until_it_is_dropped_or_replaced()

    def _homes(self) -> dict[VersionKey, tuple[tuple[str, ...], ...]]:
        """Where the shards lie of versions of which no shard was ever lost and not rebuilt."""
        unbuilt = {key for node in self.nodes.values() for key in node.failed}
        return {
            key: tuple(
                tuple(shard.node_ids)
                for shard in self.coordinator.get(key.dataset, key.fingerprint).shards
            )
            for key in self.loads
            if self._state(key) == READY and key not in unbuilt
        }

    # -- the model -----------------------------------------------------------------------------

    def _next(self) -> int:
        self.count += 1
        return self.count

    def _state(self, key: VersionKey) -> pb.DatasetState.ValueType | None:
        try:
            return self.coordinator.get(key.dataset, key.fingerprint).state
        except (DatasetNotFoundError, StaleVersionError):
            return None

    def _is_newer(self, key: VersionKey, other: VersionKey) -> bool:
        return key.dataset == other.dataset and self.asked[key] > self.asked[other]

    def _forget(self, keys: set[VersionKey]) -> None:
        for key in keys:
            del self.loads[key]
            self.leased.pop(key, None)
        self.ready -= keys
        self.gone |= keys


class Process(FakeNode):
    """A process of a node; says of a shard that it cannot load which load that was.

    Attributes:
        broken: dataset and shard that it cannot load.
    """

    def __init__(self, machine: AnyOrder, node_id: str, process: int) -> None:
        super().__init__(machine, node_id)  # type: ignore[arg-type]
        self.machine = machine
        self.process = str(process)
        self.broken: set[tuple[str, int]] = set()

    def beat_unless_refused(self, load: set[int] | frozenset[int]) -> None:
        """A round, unless a late report of the process before had this one taken for another."""
        reason = " ".join(
            f"{key.fingerprint} load {number};" for key, number in self.machine.loads.items()
        )
        self.failing = dict.fromkeys(self.broken, reason)
        try:
            self.beat(load=load)
        except ConfigError as error:
            assert "same id" in str(error)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples: where shards lie follows from its path and times."""
    return write_numbered(tmp_path_factory.mktemp("source"), 5 * FILES, files=FILES)


def test_what_a_user_may_rely_on_holds_in_any_order(source: Path) -> None:
    run_state_machine_as_test(
        partial(AnyOrder, source),
        settings=settings(max_examples=40, stateful_step_count=30),
    )
