"""Catalogue entries that are damaged: set aside, named, kept, and never taken for another."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import ConfigError, LoadError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Viewer
from cache_server.coordination.catalogue import Catalogue, CatalogueLog, SealedSummary
from cache_server.coordination.coordinator import Coordinator
from cache_server.plan.pinned_version import plan_version
from cache_server.shards import state_files
from cache_server.shards.version_key import VersionKey
from tests.fake_nodes import LEASE_S, SHARDS, Clock, FakeNode, make_coordinator, settle, spec, state

DEEP = b'{"spec": ' + b"[" * 100_000
DAMAGES = {
    "empty": b"",
    "cut": b'{"spec": {"name": "table"',
    "no text": b"\xff\xfe",
    "deep": DEEP,
    "a list": b"[]",
    "unknown field": b'{"newField": 3}',
    "no dataset": b"{}",
    "bad name": b'{"plan": {"dataset": "x"}}',
    "newer": b'{"format": 6, "newField": 3}',
    "no format": b'{"format": "new"}',
    "huge number": b'{"created": 1e999}',
    "infinite format": b'{"format": Infinity}',
}


def entries_of(directory: Path) -> Path:
    return directory / "catalogue" / ".catalogue"


def entry_of(directory: Path, name: str = "table") -> Path:
    (path,) = entries_of(directory).glob(f"{name}@*.json*")
    return path


def flips_and_cuts(data: bytes, number: int, seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    for _ in range(number // 4):
        at, stop = sorted((chance.randrange(len(data)), chance.randrange(len(data))))
        yield data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        yield data[:at] + chance.randbytes(1) + data[at + 1 :]
        yield data[:at]
        yield data[:at] + data[stop:]


@pytest.mark.parametrize("with_failure", [False, True])
def test_no_damage_makes_another_entry(
    tmp_path: Path, with_failure: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    source = tmp_path / "a.csv"
    source.write_text("a\n1\n")
    plan = plan_version(DatasetSpec("table", source, filter="a > 0", replicas=2)).version
    sealed = [SealedSummary(1, 2, "sum", {"a": 3})]
    failure = LoadError("gone") if with_failure else None
    catalogue = Catalogue(tmp_path)
    catalogue.write(plan, 2, sealed, 7, was_ready=True, failure=failure, owner="me")
    (expected,) = catalogue.read()
    (path,) = (tmp_path / ".catalogue").glob("*.json")
    data = path.read_bytes()
    for damage in flips_and_cuts(data, 1000, 41):
        path.write_bytes(damage)
        again = Catalogue(tmp_path)
        if found := again.read():
            assert (*map(repr, found),) == (repr(expected),), damage
        else:
            assert again.damaged.keys() == {plan.key}


def test_no_damage_makes_other_members_drops_or_logs(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    catalogue = Catalogue(tmp_path)
    plan = plan_version(spec(source)).version
    catalogue.write(plan, 2, [])
    log = CatalogueLog("id", 2, ((0,),), {0: SealedSummary(1, 2, "sum", {"a": 3})})
    catalogue.write_log(plan.key, log)
    catalogue.write_members(["one", "two"])
    catalogue.write_dropped({VersionKey("a", "b"): 3})

    for path, read, right in (
        (tmp_path / ".members.json", Catalogue.read_members, ["one", "two"]),
        (tmp_path / ".dropped.json", Catalogue.read_dropped, {VersionKey("a", "b"): 3}),
        (next(tmp_path.glob("*/*.log")), lambda found: found.read()[0].log, log),
    ):
        for damage in flips_and_cuts(path.read_bytes(), 100, 43):
            path.write_bytes(damage)
            assert read(Catalogue(tmp_path)) in ([], {}, None, right), damage


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_named_and_its_rows_are_kept_while_others_are_served(
    damage: str,
    tmp_path: Path,
    source: Path,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    coordinator = make_coordinator(tmp_path, clock)
    node = FakeNode(coordinator, "one")
    for name in ("other", "table"):
        coordinator.create(spec(source, name))
    settle(node)
    path = entry_of(tmp_path)
    path.write_bytes(DAMAGES[damage])
    clock.now += 10 * LEASE_S  # the catalogue is not new

    for _ in range(2):
        coordinator = make_coordinator(tmp_path, clock)
        node = node.restart(coordinator)
        settle(node)
        clock.now += 2 * LEASE_S
        settle(node)

        assert state(coordinator, "other") == "ready"
        assert node.holds("other") == node.holds("table") == SHARDS
        aside = path.with_name(f"{path.name}.damaged")
        assert aside.read_bytes() == DAMAGES[damage] and not path.exists()
        assert str(aside) in caplog.text
        with pytest.raises(LoadError, match="the catalogue entry of dataset 'table' is damaged"):
            coordinator.get("table")
        for listed in (coordinator.datasets(), coordinator.summaries()):
            assert [info.spec.name for info in listed] == ["other", "table"]
            assert listed[1].state == pb.DATASET_STATE_FAILED
            assert aside.name in listed[1].error.message
        assert coordinator.datasets(Viewer("elsewhere", sees_all=False)) == []


class Restarted:
    """A coordinator that found the entry of ``table`` damaged, and a node that holds its rows."""

    def __init__(self, directory: Path, source: Path, clock: Clock) -> None:
        self.directory, self.clock = directory, clock
        coordinator = make_coordinator(directory, clock)
        self.node = FakeNode(coordinator, "one")
        coordinator.create(spec(source))
        settle(self.node)
        self.path = entry_of(directory)
        self.good = self.path.read_bytes()
        self.path.write_bytes(b"")
        self.start()

    def start(self) -> Coordinator:
        self.coordinator = make_coordinator(self.directory, self.clock)
        self.node = self.node.restart(self.coordinator)
        settle(self.node)
        return self.coordinator


@pytest.fixture
def restarted(tmp_path: Path, source: Path, clock: Clock) -> Restarted:
    return Restarted(tmp_path, source, clock)


def test_an_entry_that_is_put_back_is_served_after_a_start(restarted: Restarted) -> None:
    restarted.path.write_bytes(restarted.good)

    assert state(restarted.start()) == "ready"
    assert [*entries_of(restarted.directory).glob("*.damaged")] == []
    assert restarted.node.loads == 0


def test_a_release_that_can_read_an_entry_puts_it_back(restarted: Restarted) -> None:
    restarted.path.with_name(f"{restarted.path.name}.damaged").write_bytes(restarted.good)

    assert state(restarted.start()) == "ready"
    assert restarted.path.read_bytes() == restarted.good


def test_a_catalogue_of_a_newer_release_is_refused_and_left_as_it_is(
    restarted: Restarted,
) -> None:
    content = json.loads(restarted.good)
    del content["sha256"]
    newer = state_files.encode(json.dumps({**content, "format": 700, "newField": 3}))
    restarted.path.write_text(newer)
    directory = restarted.directory / "catalogue"
    (directory / ".catalogue" / "other@0.json").write_bytes(b'{"format": 700, "damaged')
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}

    with pytest.raises(ConfigError, match=r"a newer release wrote the catalogue .* in format 700"):
        make_coordinator(restarted.directory, restarted.clock)
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_a_damaged_dataset_is_dropped_by_its_name(restarted: Restarted) -> None:
    restarted.coordinator.delete("table")
    settle(restarted.node)

    assert restarted.node.holds("table") == set()
    assert restarted.coordinator.datasets() == restarted.start().datasets() == []


def test_a_damaged_dataset_that_is_loaded_again_keeps_its_rows(
    restarted: Restarted, source: Path
) -> None:
    restarted.coordinator.create(spec(source))
    settle(restarted.node)

    assert state(restarted.coordinator) == state(restarted.start()) == "ready"
    assert restarted.node.loads == 0


def test_another_version_that_is_ready_replaces_a_damaged_one(
    restarted: Restarted, source: Path
) -> None:
    restarted.coordinator.create(spec(source, columns=["row"]))
    assert len(restarted.node.sealed) == 1
    settle(restarted.node)

    assert state(restarted.coordinator) == "ready"
    assert len(restarted.node.sealed) == 1
    assert state(restarted.start()) == "ready"


def test_an_older_version_does_not_stand_in_for_a_damaged_one(
    tmp_path: Path, source: Path, clock: Clock
) -> None:
    coordinator = make_coordinator(tmp_path, clock)
    node = FakeNode(coordinator, "one")
    old = coordinator.create(spec(source))
    settle(node)
    coordinator.get("table", lease=True)
    new = coordinator.create(spec(source, columns=["row"]))
    settle(node)
    (entries_of(tmp_path) / f"table@{new.fingerprint}.json").write_bytes(b"")

    again = make_coordinator(tmp_path, clock)

    settle(node.restart(again))
    assert again.get("table", old.fingerprint).state == pb.DATASET_STATE_READY
    for follow in (None, pb.EpochOfJob(job="job", epoch=1)):
        with pytest.raises(LoadError, match="damaged"):
            again.get("table", follow=follow)


def test_rows_of_a_damaged_dataset_are_not_appended_to(restarted: Restarted) -> None:
    request = pb.BeginWriteRequest(
        spec=pb.DatasetSpec(name="table"), ttl_s=10, full_wait_s=1, append=True
    )
    with pytest.raises(LoadError, match="damaged"):
        restarted.coordinator.begin_write(request, None)  # type: ignore[arg-type]


def test_puts_of_a_commit_stay_with_its_damaged_entry(restarted: Restarted) -> None:
    write_id = restarted.node.coordinator.state.writes.catalogue_id + "0" * 24
    put = VersionKey("table", f"put-{write_id}-0-0-{'1' * 8}")
    other = VersionKey("other", put.fingerprint)
    for key in (put, other):
        restarted.node.sealed[key] = {0: pb.SealedShard(num_rows=1, num_bytes=1, checksum="x")}

    settle(restarted.node)

    assert put in restarted.node.sealed and other not in restarted.node.sealed


def test_an_entry_under_the_name_of_another_is_damaged(
    tmp_path: Path, source: Path, clock: Clock
) -> None:
    make_coordinator(tmp_path, clock).create(spec(source))
    path = entry_of(tmp_path)
    (path.parent / "other@f.json").write_bytes(path.read_bytes())
    (path.parent / "no key.json").write_bytes(path.read_bytes())
    (path.parent / "a@folder.json").mkdir()
    (path.parent / "a@link.json").symlink_to("nowhere")

    listed = make_coordinator(tmp_path, clock).datasets()

    assert [info.spec.name for info in listed] == ["a", "other", "table"]
    assert json.loads(path.read_bytes())["plan"]["dataset"] == "table"
