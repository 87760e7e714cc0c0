"""Versions of a dataset: new ones beside old ones, and who attaches to which."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import (
    DatasetNotFoundError,
    PermissionDeniedError,
    StaleVersionError,
)
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Principal, Role, Viewer
from cache_server.coordination import loads
from cache_server.coordination.coordinator import Coordinator
from cache_server.plan.pinned_version import OpenPlan, PinnedVersion, plan_version
from cache_server.shards.version_key import VersionKey
from tests.fake_nodes import (
    FILES,
    TIMEOUT_S,
    Clock,
    FakeNode,
    make_coordinator,
    serving,
    settle,
    spec,
    state,
    told,
)


def test_a_new_version_is_loaded_beside_the_old_one_which_goes_when_the_new_is_ready(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    old = coordinator.create(spec(source))
    settle(node)

    new = coordinator.create(spec(source, columns=["row"]))
    assert coordinator.get("table").fingerprint == new.fingerprint
    assert coordinator.get("table", old.fingerprint).state == pb.DATASET_STATE_READY
    node.beat(load=[])
    assert len(node.sealed[VersionKey("table", old.fingerprint)]) == FILES
    settle(node)

    assert state(coordinator) == "ready"
    with pytest.raises(StaleVersionError) as caught:
        coordinator.get("table", old.fingerprint)
    assert old.fingerprint in str(caught.value) and new.fingerprint in str(caught.value)
    node.beat()
    assert set(node.sealed) == {VersionKey("table", new.fingerprint)}


def test_asking_for_the_old_version_again_gives_up_the_new_one(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    old = coordinator.create(spec(source))
    settle(node)
    coordinator.create(spec(source, columns=["row"]))

    again = coordinator.create(spec(source))
    settle(node)

    assert again.state == pb.DATASET_STATE_READY
    assert again.fingerprint == old.fingerprint
    assert set(node.sealed) == {VersionKey("table", old.fingerprint)}
    assert node.loads == FILES


def test_a_deleted_dataset_is_asked_of_no_node(coordinator: Coordinator, source: Path) -> None:
    (node,) = serving(coordinator, spec(source), "one")

    coordinator.delete("table")

    assert node.beat() == {}
    assert coordinator.datasets() == []
    with pytest.raises(DatasetNotFoundError, match=r"no dataset 'table'; datasets: none"):
        coordinator.delete("table")


# -- attaching to what was there before ------------------------------------------------------------


SECRETS = {"aws_secret_access_key": "hush-hush"}


def secret_spec(source: Path, **changes: object) -> DatasetSpec:
    return spec(source, storage_options=SECRETS, **changes)


def test_the_very_spec_of_a_dataset_that_was_ready_attaches_though_its_source_is_gone(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    before = coordinator.create(secret_spec(source))
    settle(node)
    again = make_coordinator(tmp_path, clock)
    node = node.restart(again)
    shutil.rmtree(source)

    info = again.attach(secret_spec(source, replicas=2))

    assert info is not None and info.fingerprint == before.fingerprint
    settle(node)
    assert state(again) == "ready"
    assert node.loads == 0
    assert secrets_for_lost_shards(again, node) == SECRETS


def test_another_spec_or_a_load_that_never_came_to_its_end_is_nothing_to_attach_to(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    assert coordinator.attach(spec(source)) is None
    coordinator.create(spec(source))
    assert coordinator.attach(spec(source)) is None
    settle(node)

    assert coordinator.attach(spec(source, columns=["row"])) is None
    assert coordinator.attach(spec(source, name="other")) is None
    assert coordinator.attach(spec(source)) is not None


# -- secrets ---------------------------------------------------------------------------------------


def secrets_for_lost_shards(coordinator: Coordinator, node: FakeNode) -> dict[str, str]:
    """What a node is told of the secrets when it must read the source again."""
    node.sealed = {key: {} for key in node.sealed}
    return dict(told(coordinator, node).secrets.tables["source"].values)


ALICE = Principal("alice", "team-a", frozenset({Role.WRITER}))
ALBERT = replace(ALICE, name="albert")
ROOT = Principal("root", roles=frozenset({Role.ADMIN}))


def test_only_its_owner_an_admin_and_who_knows_the_secrets_attach_to_a_dataset_with_secrets(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    made = coordinator.create(secret_spec(source, name="team-a/t"), by=ALICE)
    settle(node)
    without = spec(source, name="team-a/t")
    wrong = spec(source, name="team-a/t", storage_options={"aws_secret_access_key": "guessed"})

    for given in (without, wrong):
        with pytest.raises(PermissionDeniedError, match="'team-a/t' of 'alice'") as caught:
            coordinator.create(given, by=ALBERT)
        assert "hush" not in str(caught.value)
    for given, by in ((secret_spec(source, name="team-a/t"), ALBERT), (without, ROOT)):
        assert coordinator.create(given, by=by).fingerprint == made.fingerprint
    assert secrets_for_lost_shards(coordinator, node) == SECRETS

    again = make_coordinator(tmp_path, clock)  # it knows the owner, and no secrets
    for given in (without, wrong, secret_spec(source, name="team-a/t")):
        with pytest.raises(PermissionDeniedError):
            again.create(given, by=ALBERT)
    assert again.create(secret_spec(source, name="team-a/t"), by=ALICE).spec.name == "t"


def test_anyone_of_the_namespace_attaches_to_a_dataset_without_secrets_and_sets_its_readers(
    coordinator: Coordinator, source: Path
) -> None:
    settle_on = FakeNode(coordinator, "one")
    coordinator.create(spec(source, name="team-a/t"), by=ALICE)
    settle(settle_on)
    team_b = Viewer("team-b", sees_all=False)
    with pytest.raises(DatasetNotFoundError, match="no dataset 'team-a/t'; datasets: none"):
        coordinator.get("team-a/t", viewer=team_b)

    info = coordinator.create(spec(source, name="team-a/t", readers=["team-b"]), by=ALBERT)

    assert (info.state, list(info.spec.readers)) == (pb.DATASET_STATE_READY, ["team-b"])
    assert coordinator.get("team-a/t", viewer=team_b).spec.name == "team-a/t"
    assert list(told(coordinator, settle_on).plan.readers) == ["team-b"]
    assert settle_on.loads == FILES


def test_the_id_of_a_node_belongs_to_its_principal_until_the_node_is_lost(
    coordinator: Coordinator, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    first, second = (
        Principal("system:serviceaccount:cache:node", roles=frozenset({Role.NODE}), instance=pod)
        for pod in ("cache-0", "cache-1")
    )
    coordinator.heartbeat(node.report(), by=first)
    with pytest.raises(PermissionDeniedError, match="node/cache-1' reported for node one"):
        coordinator.heartbeat(node.report(), by=second)
    clock.now += TIMEOUT_S + 1
    coordinator.heartbeat(node.report(), by=second)
    with pytest.raises(PermissionDeniedError):
        coordinator.heartbeat(node.report(), by=first)


def test_a_spec_without_secrets_keeps_the_stored_ones(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(secret_spec(source))
    settle(node)

    coordinator.create(spec(source))

    assert told(coordinator, node).plan.has_secrets
    assert not told(coordinator, node).secrets.tables  # it reads no source
    assert secrets_for_lost_shards(coordinator, node) == SECRETS


def test_new_secrets_replace_the_old_ones_and_none_are_missed_where_there_were_none(
    coordinator: Coordinator, source: Path
) -> None:
    (node,) = serving(coordinator, spec(source), "one")
    coordinator.create(spec(source))
    assert not told(coordinator, node).plan.has_secrets

    coordinator.create(secret_spec(source))
    coordinator.create(spec(source, storage_options={"aws_secret_access_key": "newer"}))

    assert told(coordinator, node).plan.has_secrets
    assert secrets_for_lost_shards(coordinator, node)["aws_secret_access_key"] == "newer"


def test_a_load_that_lost_its_secrets_in_a_restart_goes_on_when_they_are_given_again(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(secret_spec(source))
    node.beat(load=[0, 1, 2])
    node.beat(load=[])

    again = make_coordinator(tmp_path, clock)
    assert state(again) == "loading"  # no node has said yet what it holds
    node = node.restart(again)
    node.beat()
    info = again.get("table")
    assert info.state == pb.DATASET_STATE_FAILED
    assert "credentials of 'table' were not kept" in info.error.message
    assert "load its spec again" in info.error.message
    assert node.holds("table") == {0, 1, 2}  # nothing was asked that needs the secrets

    assert again.create(secret_spec(source)).state == pb.DATASET_STATE_LOADING
    settle(node)

    assert state(again) == "ready"
    assert node.loads == FILES - 3


def test_a_dataset_that_is_whole_misses_no_secrets_after_a_restart(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(secret_spec(source))
    settle(node)

    again = make_coordinator(tmp_path, clock)
    settle(node.restart(again))

    assert state(again) == "ready"


# -- what keeps a source as it was planned ---------------------------------------------------------


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables whose pins were let go."""
    names: list[str] = []

    def plan_with_counted_pins(
        wanted: DatasetSpec, before: Sequence[PinnedVersion] = (), functions: Any = None
    ) -> OpenPlan:
        planned = plan_version(wanted, before, functions)
        pins = {
            name: replace(pin, close=lambda: names.append(wanted.name))
            for name, pin in planned.pins.items()
        }
        return replace(planned, pins=pins)

    monkeypatch.setattr(loads, "plan_version", plan_with_counted_pins)
    return names


def test_a_load_that_came_out_with_the_wrong_number_of_rows_lets_go_of_its_source(
    coordinator: Coordinator, source: Path, closed: list[str]
) -> None:
    node = FakeNode(coordinator, "one")
    node.rows_of = {3: 4}
    coordinator.create(spec(source))

    settle(node)

    assert state(coordinator) == "failed"
    assert closed == ["table"]


def test_a_coordinator_that_closes_lets_go_of_the_sources_of_its_loads(
    coordinator: Coordinator, source: Path, closed: list[str]
) -> None:
    serving(coordinator, spec(source, name="done"), "one")
    coordinator.create(spec(source, name="under-way"))
    assert closed == ["done"]

    coordinator.close()
    coordinator.close()

    assert closed == ["done", "under-way"]
