"""Versions of a dataset: new ones beside old ones, and who attaches to which."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cache_protocol.errors import DatasetNotFoundError, StaleVersionError
from cache_protocol.spec.dataset_spec import DatasetSpec
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination import coordinator as coordinator_module
from cache_server.coordination.coordinator import Coordinator
from cache_server.plan.pinned_version import OpenPlan, plan_version
from cache_server.shards.version_key import VersionKey
from tests.fake_nodes import FILES, Clock, FakeNode, make_coordinator, settle, spec, state, told


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
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    settle(node)

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
    assert told(again, node).secrets.tables["source"].values == SECRETS
    assert node.loads == 0


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


def test_a_spec_without_secrets_keeps_the_stored_ones(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(secret_spec(source))
    settle(node)

    coordinator.create(spec(source))

    desired = told(coordinator, node)
    assert desired.plan.has_secrets
    assert desired.secrets.tables["source"].values == SECRETS


def test_new_secrets_replace_the_old_ones_and_none_are_missed_where_there_were_none(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    settle(node)
    coordinator.create(spec(source))
    assert not told(coordinator, node).plan.has_secrets

    coordinator.create(secret_spec(source))
    coordinator.create(spec(source, storage_options={"aws_secret_access_key": "newer"}))

    desired = told(coordinator, node)
    assert desired.plan.has_secrets
    assert desired.secrets.tables["source"].values["aws_secret_access_key"] == "newer"


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

    def plan_with_counted_pins(wanted: DatasetSpec) -> OpenPlan:
        planned = plan_version(wanted)
        pins = {
            name: replace(pin, close=lambda: names.append(wanted.name))
            for name, pin in planned.pins.items()
        }
        return replace(planned, pins=pins)

    monkeypatch.setattr(coordinator_module, "plan_version", plan_with_counted_pins)
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
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source, name="done"))
    settle(node)
    coordinator.create(spec(source, name="under-way"))
    assert closed == ["done"]

    coordinator.close()
    coordinator.close()

    assert closed == ["done", "under-way"]
