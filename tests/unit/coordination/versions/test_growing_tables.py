"""A version that has shards in common with the one before: who holds them, and what is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from cache_protocol.errors import LoadError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Principal
from cache_server.coordination.coordinator import Coordinator
from tests.conftest import numbered_table
from tests.fake_nodes import (
    FILES,
    LEASE_S,
    ROWS_PER_FILE,
    SHARDS,
    TIMEOUT_S,
    Clock,
    FakeNode,
    homes,
    make_coordinator,
    settle,
    spec,
    state,
)

MORE = frozenset(range(2 * FILES))


def add_file(source: Path, index: int) -> None:
    table = numbered_table(ROWS_PER_FILE, index * ROWS_PER_FILE)
    pq.write_table(table, source / f"part-{index:03d}.parquet")


def beat(*nodes: FakeNode) -> None:
    for _ in range(5):
        for node in nodes:
            node.beat(load=MORE)


def test_a_grown_table_loads_new_files_only_and_keeps_each_shard_on_its_nodes(
    coordinator: Coordinator, source: Path
) -> None:
    nodes = [FakeNode(coordinator, name) for name in ("one", "two", "three")]
    beat(*nodes)
    coordinator.create(spec(source))
    beat(*nodes)
    before, loads = homes(coordinator), sum(node.loads for node in nodes)
    add_file(source, FILES)

    info = coordinator.create(spec(source))
    beat(*nodes)

    assert state(coordinator) == "ready"
    assert homes(coordinator)[:FILES] == before
    assert sum(node.loads for node in nodes) == loads + 1
    assert sum(node.shared for node in nodes) == FILES
    assert info.progress.shards_reused == info.progress.shards_done == FILES
    assert coordinator.create(spec(source)).fingerprint == info.fingerprint
    assert [node.report().node.stored_bytes for node in nodes] == [300, 300, 300]


def test_after_a_restart_a_grown_version_stays_where_it_is(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    nodes = [FakeNode(coordinator, name) for name in ("one", "two")]
    beat(*nodes)
    coordinator.create(spec(source))
    beat(*nodes)
    for index in (FILES, FILES + 1):
        add_file(source, index)
        coordinator.create(spec(source))
        beat(*nodes)
    before, loads = homes(coordinator), sum(node.loads for node in nodes)

    restarted = make_coordinator(tmp_path, clock)
    nodes = [node.restart(restarted) for node in nodes]
    beat(*nodes)

    assert homes(restarted) == before
    assert sum(node.loads for node in nodes) == 0
    assert loads == FILES + 2


def test_a_coordinator_that_restarts_meanwhile_still_shares(
    coordinator: Coordinator, source: Path, tmp_path: Path, clock: Clock
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    beat(node)
    add_file(source, FILES)
    coordinator.create(spec(source))

    restarted = make_coordinator(tmp_path, clock)
    node = node.restart(restarted)
    beat(node)

    assert (state(restarted), node.loads, node.shared) == ("ready", 1, FILES)


def test_of_a_node_that_joined_since_then_others_give_it_what_is_the_same(
    coordinator: Coordinator, source: Path
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    coordinator.create(spec(source))
    beat(one)
    add_file(source, FILES)
    two.beat(load=())
    coordinator.create(spec(source))

    desired = [d for d in coordinator.heartbeat(two.report()).datasets if len(d.shards)][-1]

    old = [shard for shard in desired.shards if shard.index < FILES]
    assert old and all(list(shard.same_as.copy_from) == [one.location] for shard in old)
    assert all(shard.checksum == f"sum-{shard.index}" for shard in old)
    assert all(shard.splits for shard in old)  # if that fails


@pytest.mark.parametrize("breaks", ["lost", "fails"])
def test_without_the_version_before_all_is_read(
    coordinator: Coordinator, source: Path, clock: Clock, breaks: str
) -> None:
    one, two = FakeNode(coordinator, "one"), FakeNode(coordinator, "two")
    coordinator.create(spec(source))
    if breaks == "fails":
        one.failing = {("table", index): "corrupt" for index in SHARDS}
    settle(one)
    one.failing = {}
    add_file(source, FILES)
    coordinator.create(spec(source))
    if breaks == "lost":
        clock.now += TIMEOUT_S + 1

    beat(two)
    if breaks == "fails":
        beat(one, two)

    assert state(coordinator) == "ready"
    assert one.shared == two.shared == 0
    assert homes(coordinator) == [["two"]] * (FILES + 1) or breaks == "fails"


def test_another_query_shares_nothing_and_a_replaced_file_only_the_others(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    coordinator.create(spec(source))
    beat(node)
    assert coordinator.create(spec(source, filter="row < 3")).progress.shards_reused == 0
    pq.write_table(numbered_table(ROWS_PER_FILE, 1000), source / "part-003.parquet")

    reused = coordinator.create(spec(source)).progress.shards_reused

    assert reused == FILES - 1
    assert coordinator.plan(spec(source)).shards_reused == FILES - 1


def test_credentials_of_others_share_nothing(coordinator: Coordinator, source: Path) -> None:
    ann, bob = Principal("ann"), Principal("bob")
    coordinator.create(spec(source), by=ann)
    node = FakeNode(coordinator, "one")
    beat(node)
    (version,) = coordinator.state.versions.values()
    version.pinned = replace(version.pinned, has_secrets=True)
    version.secrets = pb.Secrets(tables={"source": pb.TableSecrets(values={"key": "k"})})
    add_file(source, FILES)

    assert coordinator.plan(spec(source), by=bob).shards_reused == 0
    assert coordinator.plan(spec(source), by=ann).shards_reused == FILES
    assert coordinator.create(spec(source), by=bob).progress.shards_reused == 0


def test_only_new_bytes_need_room(coordinator: Coordinator, source: Path) -> None:
    size = 600
    node = FakeNode(coordinator, "one", limit_bytes=size * FILES + size)
    node.shard_bytes = size
    coordinator.create(spec(source))
    beat(node)
    add_file(source, FILES)
    coordinator.create(spec(source))
    beat(node)
    assert (state(coordinator), node.shared) == ("ready", FILES)

    for index in range(FILES + 1, FILES + 8):
        add_file(source, index)
    with pytest.raises(LoadError, match="cannot fit"):
        coordinator.create(spec(source))


def test_a_shard_that_is_shared_is_told_once_with_the_splits_of_its_home(
    coordinator: Coordinator, source: Path
) -> None:
    node = FakeNode(coordinator, "one")
    old = coordinator.create(spec(source))
    beat(node)
    add_file(source, FILES)
    coordinator.create(spec(source))

    answer = coordinator.heartbeat(node.report())
    desired = max(answer.datasets, key=lambda dataset: len(dataset.shards))

    assert [shard.same_as.index for shard in desired.shards[:FILES]] == [*range(FILES)]
    assert {shard.same_as.fingerprint for shard in desired.shards[:FILES]} == {old.fingerprint}
    assert not desired.shards[FILES].HasField("same_as") and desired.shards[FILES].splits


# -- the version of an epoch -----------------------------------------------------------------------


def test_the_first_rank_of_an_epoch_chooses_the_newest_ready_version_for_all(
    coordinator: Coordinator, source: Path, clock: Clock
) -> None:
    def asked(epoch: int, job: str = "job") -> str:
        follow = pb.EpochOfJob(job=job, epoch=epoch)
        return coordinator.get("table", lease=True, follow=follow).fingerprint

    node = FakeNode(coordinator, "one")
    old = coordinator.create(spec(source)).fingerprint
    beat(node)
    assert asked(0) == old
    add_file(source, FILES)
    new = coordinator.create(spec(source)).fingerprint
    assert asked(1) == old  # the new one is not ready
    beat(node)

    assert [asked(0), asked(1), asked(2), asked(1, "other")] == [old, old, new, new]
    assert (
        coordinator.get("table", old, follow=pb.EpochOfJob(job="job", epoch=2)).fingerprint == old
    )
    clock.now += LEASE_S + 1  # another start of the job
    beat(node)
    assert asked(1) == new


def test_all_ranks_know_as_many_acts_of_erasing_as_the_first(
    coordinator: Coordinator, source: Path
) -> None:
    def known(at: int, fingerprint: str = "", job: str = "job") -> int:
        follow = pb.EpochOfJob(job=job, epoch=0, amended_at=at)
        return coordinator.get("table", fingerprint, lease=True, follow=follow).erasures

    def erase(number: int) -> None:
        version = coordinator.state.find("table")
        starts = version.row_starts() or ()
        version.erasures = version.erasures.with_act(number, np.array([number]), starts)
        coordinator.state.mark_changed()

    node = FakeNode(coordinator, "one")
    version = coordinator.create(spec(source)).fingerprint
    beat(node)
    assert [known(0), known(0, version)] == [0, 0]
    with coordinator.state.changed:
        erase(1)

    assert [known(0), known(0, version), known(8), known(8, version)] == [0, 0, 1, 1]
    assert known(0, job="other") == 1
    assert coordinator.get("table").erasures == 1, "others are told what there is"
