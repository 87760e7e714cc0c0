"""A node with a real store and coordinator in this process, and loads that wait for the test."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import (
    DatasetNotFoundError,
    LoadError,
    NodeUnavailableError,
    NotReadyError,
    RequestError,
    StaleVersionError,
)
from cache_protocol.storage.row_sets import encode_rows
from cache_protocol.storage.shard_files import Selection
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.credentials import Credentials
from cache_server.auth.principals import ANYONE
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.coordinator import Coordinator
from cache_server.coordination.members import membership
from cache_server.node.desired import DesiredShard
from cache_server.node.loads import load_threads, loading, version_state
from cache_server.node.node import Node
from cache_server.plan.pinned_version import split_from_proto
from cache_server.shards.store import ShardStore
from cache_server.shards.tombstones import joined, tombstones_of
from cache_server.shards.version_key import VersionKey
from cache_server.sql import loader
from cache_server.sql.local_tables import LocalFile
from tests.conftest import numbered_table, write_numbered
from tests.waiting import wait_until

WAIT_S = 60.0
FILES = 4  # each becomes a shard of 10 rows


class Harness:
    """One node, its store and its coordinator."""

    def __init__(self, directory: Path, memory_limit_bytes: int | None = None) -> None:
        self.coordinator = Coordinator(
            Catalogue(directory / "catalogue"),
            endpoints=pb.CoordinatorEndpoints(control_location="here:1"),
            heartbeat_interval_s=0.05,
            node_timeout_s=10.0,
        )
        self.store = ShardStore(directory / "cache", memory_limit_bytes)
        self.reachable = True
        self.ready: list[None] = []
        self.node = Node(
            self.store,
            self,
            pb.Node(id=self.store.node_id, flight_location="grpc://here:2"),
            load_threads=2,
            on_ready=lambda: self.ready.append(None),
        )

    # The link of the node: its coordinator, when it can be reached.

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        if not self.reachable:
            raise NodeUnavailableError("the coordinator does not answer")
        return self.coordinator.heartbeat(request)

    def get(self, name: str, fingerprint: str = "") -> pb.DatasetInfo:
        return self.coordinator.get(name, fingerprint)

    def write_schema(self, write_id: str) -> bytes:
        return self.coordinator.write_schema(write_id)

    def datasets(self) -> list[pb.DatasetInfo]:
        return self.coordinator.datasets()

    def tombstones(self, dataset: str) -> pb.GetTombstonesResponse:
        return self.coordinator.tombstones(dataset)

    def wait(self, state: pb.DatasetState.ValueType, name: str = "table") -> pb.DatasetInfo:
        wait_until(
            lambda: self.coordinator.get(name).state == state,
            WAIT_S,
            f"{name} is {pb.DatasetState.Name(state)}",
        )
        return self.coordinator.get(name)

    def files(self) -> list[str]:
        """What lies in the cache directory beside the node's own name and lock."""
        # Unlike rglob, walk minds no folder that goes away meanwhile.
        found = (name for _, _, names in os.walk(self.store.cache_dir) for name in names)
        return sorted(
            name for name in found if not name.startswith((".lock", ".node-id", ".format"))
        )


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path)
    with made.store, made.node:
        yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "source", 10 * FILES, files=FILES)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Loads stop after their first batch until the gate opens."""
    made = Gate()
    monkeypatch.setattr(loader, "read_split", made.read_split)
    yield made
    made.open.set()


class Gate:
    def __init__(self) -> None:
        self.read = loader.read_split
        self.arrived = threading.Semaphore(0)
        self.open = threading.Event()
        self.files: set[str] = set()

    def read_split(self, file: LocalFile, *arguments: Any) -> Iterator[pa.RecordBatch]:
        self.files.add(file.path.name)
        for batch in self.read(file, *arguments):
            yield batch
            self.arrived.release()
            assert self.open.wait(WAIT_S)

    def wait_for(self, loads: int) -> None:
        for _ in range(loads):
            assert self.arrived.acquire(timeout=WAIT_S), "no load has begun"


def spec(source: Path, name: str = "table", **changes: object) -> DatasetSpec:
    return DatasetSpec(name, source, target_shard_bytes=1, **changes)  # type: ignore[arg-type]


def row_ids(node: Node, info: pb.DatasetInfo) -> list[int]:
    rows = node.rows(info.spec.name, info.fingerprint)
    ids = np.arange(info.num_rows, dtype=np.int64)
    selection = Selection(rows.layout, ["row"])
    (stored,) = rows.gather(ids, selection)
    return list(selection.layout.unpack(stored).column("row").to_pylist())


# -- joining ---------------------------------------------------------------------------------------


def test_a_node_that_has_not_reached_its_coordinator_asks_its_callers_to_wait(
    harness: Harness, source: Path
) -> None:
    harness.reachable = False
    info = harness.coordinator.create(spec(source))
    harness.node.start()

    with pytest.raises(NotReadyError, match="has not reached its coordinator"):
        harness.node.rows("table", info.fingerprint)
    assert not harness.node.is_ready()

    harness.reachable = True
    info = harness.wait(pb.DATASET_STATE_READY)
    assert row_ids(harness.node, info) == [*range(10 * FILES)]


def test_a_node_whose_coordinator_is_lost_serves_on(harness: Harness, source: Path) -> None:
    harness.coordinator.create(spec(source))
    harness.node.start()
    info = harness.wait(pb.DATASET_STATE_READY)

    harness.reachable = False

    assert row_ids(harness.node, info) == [*range(10 * FILES)]
    assert harness.node.is_ready()


def test_a_load_does_not_make_a_ready_node_unready(
    harness: Harness, source: Path, gate: Gate
) -> None:
    harness.node.start()
    wait_until(harness.node.is_ready, WAIT_S, "ready without a dataset")

    harness.coordinator.create(spec(source))
    gate.wait_for(2)
    assert harness.node.is_ready()
    gate.open.set()
    harness.wait(pb.DATASET_STATE_READY)

    assert harness.node.is_ready()
    assert len(harness.ready) == 1


def test_while_a_dataset_loads_its_rows_are_not_ready_and_progress_is_reported(
    harness: Harness, source: Path, gate: Gate
) -> None:
    info = harness.coordinator.create(spec(source))
    harness.node.start()
    gate.wait_for(2)

    with pytest.raises(NotReadyError, match="'table' is loading"):
        harness.node.rows("table", info.fingerprint)
    wait_until(
        lambda: harness.coordinator.get("table").progress.rows_done == 20,
        WAIT_S,
        "20 rows reported",
    )
    assert harness.coordinator.get("table").progress.shards_done == 0


def test_unknown_datasets_and_other_versions_are_told_apart(harness: Harness, source: Path) -> None:
    harness.coordinator.create(spec(source))
    harness.node.start()
    info = harness.wait(pb.DATASET_STATE_READY)

    with pytest.raises(DatasetNotFoundError, match=r"'nope' on this node; datasets: table"):
        harness.node.rows("nope", info.fingerprint)
    with pytest.raises(StaleVersionError, match=f"fingerprint {info.fingerprint}, not f00d"):
        harness.node.rows("table", "f00d")


def test_rows_are_gathered_while_the_files_of_another_dataset_are_removed(
    harness: Harness, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()
    drop_version = harness.store.drop_version

    def slow(key: VersionKey) -> None:
        begun.set()
        assert ended.wait(WAIT_S)
        drop_version(key)

    monkeypatch.setattr(harness.store, "drop_version", slow)
    harness.node.start()
    harness.coordinator.create(spec(source, "table"))
    harness.coordinator.create(spec(source, "other"))
    info = harness.wait(pb.DATASET_STATE_READY)
    gone = harness.wait(pb.DATASET_STATE_READY, "other")

    harness.coordinator.delete("other")
    assert begun.wait(WAIT_S)

    gathered: list[list[int]] = []
    gather = threading.Thread(target=lambda: gathered.append(row_ids(harness.node, info)))
    gather.start()
    gather.join(WAIT_S)
    assert gathered == [[*range(10 * FILES)]]
    with pytest.raises(DatasetNotFoundError):
        harness.node.rows("other", gone.fingerprint)
    assert len(harness.store.shards(VersionKey("other", gone.fingerprint))) == FILES
    ended.set()
    wait_until(lambda: len(harness.store.versions()) == 1, WAIT_S, "its files are removed")


# -- loads that fail -------------------------------------------------------------------------------


def test_a_source_that_changed_since_it_was_planned_fails_the_load_with_both_sizes(
    harness: Harness, source: Path
) -> None:
    harness.coordinator.create(spec(source))
    changed = source / "part-002.parquet"
    before = changed.stat().st_size
    pq.write_table(numbered_table(11, 20), changed)
    after = changed.stat().st_size
    harness.node.start()

    info = harness.wait(pb.DATASET_STATE_FAILED)

    message = info.error.message
    assert f"{changed} changed since the dataset was planned: it had {before} bytes" in message
    assert f"now {after} bytes" in message
    wait_until(lambda: harness.files() == [], WAIT_S, "nothing is left")


def test_a_source_that_changes_while_it_is_read_fails_the_load(
    harness: Harness, source: Path, gate: Gate
) -> None:
    harness.coordinator.create(spec(source))
    harness.node.start()
    gate.wait_for(2)

    for path in source.iterdir():
        os.utime(path, ns=(1, 1))
    gate.open.set()
    info = harness.wait(pb.DATASET_STATE_FAILED)

    assert "changed since the dataset was planned" in info.error.message
    assert (
        "now" in info.error.message and "mtime" in info.error.message
    ) or "ns" in info.error.message
    wait_until(lambda: harness.files() == [], WAIT_S, "nothing is left")


def test_a_source_that_vanished_fails_the_load_with_its_path(
    harness: Harness, source: Path
) -> None:
    harness.coordinator.create(spec(source))
    (source / "part-003.parquet").unlink()
    harness.node.start()

    info = harness.wait(pb.DATASET_STATE_FAILED)

    assert str(source / "part-003.parquet") in info.error.message
    assert "No such file" in info.error.message
    wait_until(lambda: harness.files() == [], WAIT_S, "nothing is left")


class Panic(BaseException):
    """As that of a library in Rust: no Exception."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, Panic])
def test_a_defect_in_a_load_is_a_failure_that_names_the_split(
    harness: Harness, source: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def broken(*arguments: object) -> Iterator[pa.RecordBatch]:
        raise kind("by a defect")

    monkeypatch.setattr(loader, "read_split", broken)
    harness.coordinator.create(spec(source))
    harness.node.start()

    info = harness.wait(pb.DATASET_STATE_FAILED)

    assert "part-00" in info.error.message
    assert f"{kind.__name__}('by a defect')" in info.error.message


def test_a_load_that_can_never_succeed_fails_with_the_words_of_its_error_and_names_the_node(
    harness: Harness, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> Iterator[pa.RecordBatch]:
        raise RequestError("pip install 'trainer-data-cache[iceberg]'")

    monkeypatch.setattr(loader, "read_split", refused)
    harness.coordinator.create(spec(source))
    harness.node.start()

    info = harness.wait(pb.DATASET_STATE_FAILED)

    message = "dataset 'table': pip install 'trainer-data-cache[iceberg]'"
    assert info.error.message == f"{message} (on node {harness.store.node_id})"


def test_an_unexpected_exception_shows_no_secret(
    tmp_path: Path,
    harness: Harness,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = json.dumps({"private_key": "-----BEGIN-----\nhush-line\n-----END-----"}, indent=1)
    secrets = {"token": "hush-hush", "service_account_key": key}

    def broken(*arguments: object) -> Iterator[pa.RecordBatch]:
        try:
            raise ValueError(f"no key in {key}")
        except ValueError as error:
            raise ZeroDivisionError(f"with {secrets}") from error

    monkeypatch.setattr(loader, "read_split", broken)
    harness.coordinator.create(spec(source, storage_options=secrets))
    harness.node.start()

    info = harness.wait(pb.DATASET_STATE_FAILED)

    assert "ZeroDivisionError" in info.error.message and "hush" not in info.error.message
    assert "ZeroDivisionError" in caplog.text and "no key in" in caplog.text
    assert "hush" not in caplog.text
    (kept,) = (tmp_path / "catalogue" / ".catalogue").iterdir()
    assert "ZeroDivisionError" in kept.read_text() and "hush" not in kept.read_text()


def test_a_shard_over_the_memory_limit_fails_the_load_and_removes_what_was_written(
    tmp_path: Path, source: Path
) -> None:
    # With a filter the size is not known beforehand.
    limit = 2500
    harness = Harness(tmp_path, memory_limit_bytes=limit)
    with harness.store, harness.node:
        harness.node.start()
        harness.coordinator.create(spec(source, filter="row >= 0"))

        info = harness.wait(pb.DATASET_STATE_FAILED)

        assert f"memory limit of {limit} bytes" in info.error.message
        wait_until(lambda: harness.files() == [], WAIT_S, "nothing is left")
        assert harness.store.stored_bytes == 0


@pytest.fixture
def room_is_awaited(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set while a node was lost, or came back, a moment ago."""
    lately = threading.Event()
    monkeypatch.setattr(membership.Membership, "is_stable", lambda _: not lately.is_set())
    lately.set()
    return lately


@pytest.mark.parametrize(
    "query", [{"filter": "row >= 0"}, {"sql": "SELECT * FROM source ORDER BY row"}]
)
def test_a_load_waits_for_room_that_may_come_and_says_once_why(
    tmp_path: Path,
    source: Path,
    room_is_awaited: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    query: dict[str, str],
) -> None:
    monkeypatch.setattr(load_threads, "_RETRY_S", 0.01)
    harness = Harness(tmp_path)
    with harness.store, harness.node:
        harness.node.start()
        harness.coordinator.create(spec(source, name="other"))
        harness.wait(pb.DATASET_STATE_READY, "other")
        limit = harness.store.memory_limit_bytes = harness.store.stored_bytes  # it is full
        harness.coordinator.create(DatasetSpec("table", source, **query))
        waits = wait_until(
            lambda: harness.coordinator.get("table").progress.waits, WAIT_S, "it waits"
        )
        assert harness.node.description.id in waits
        assert (
            "until a lost node may be back" in waits and f"memory limit of {limit} bytes" in waits
        )

        harness.coordinator.delete("other")

        harness.wait(pb.DATASET_STATE_READY)
        wait_until(
            lambda: not harness.coordinator.get("table").progress.waits, WAIT_S, "it says so"
        )
        assert caplog.text.count("load waits dataset=table") == 1


def test_a_load_that_waits_for_room_fails_when_none_may_come_any_more(
    tmp_path: Path, source: Path, room_is_awaited: threading.Event
) -> None:
    harness = Harness(tmp_path, memory_limit_bytes=2500)
    with harness.store, harness.node:
        harness.node.start()
        harness.coordinator.create(spec(source, filter="row >= 0"))
        wait_until(lambda: harness.coordinator.get("table").progress.waits, WAIT_S, "it waits")
        assert harness.coordinator.get("table").state == pb.DATASET_STATE_LOADING

        room_is_awaited.clear()

        assert "memory limit of 2500" in harness.wait(pb.DATASET_STATE_FAILED).error.message


def test_a_load_begins_at_once_however_many_wait_for_a_thread(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = 8_000
    (tmp_path / "rows.json").write_text('{"row": 1}\n' * (shards // 11 + 1))
    begun: set[int] = set()

    def begin(store: ShardStore, job: loading.Job, *_: object) -> None:
        assert job.index is not None
        begun.add(job.index)

    monkeypatch.setattr(loading, "load_shard", begin)
    harness.coordinator.create(spec(tmp_path / "rows.json"))
    harness.node.start()

    wait_until(lambda: len(begun) >= shards, WAIT_S, "every load has begun")


def test_a_report_of_a_sealed_shard_counts_its_files(
    harness: Harness, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat, load = harness.coordinator.heartbeat, loading.load_shard
    reports: list[pb.ActualDataset] = []

    def heartbeat(request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        for actual in request.datasets:
            reports.append(pb.ActualDataset())
            reports[-1].CopyFrom(actual)
        return beat(request)

    def load_and_wait(store: ShardStore, job: loading.Job, tables: loading.SpooledTables) -> None:
        load(store, job, tables)
        assert job.shard is not None
        index = job.shard.index
        wait_until(
            lambda: any(shard.index == index for shard in sealed(reports[-1])), WAIT_S, "a report"
        )

    def sealed(actual: pb.ActualDataset) -> list[pb.ActualShard]:
        return [shard for shard in actual.shards if shard.sealed]

    monkeypatch.setattr(harness.coordinator, "heartbeat", heartbeat)
    monkeypatch.setattr(loading, "load_shard", load_and_wait)
    harness.coordinator.create(spec(source))
    harness.node.start()
    assert harness.wait(pb.DATASET_STATE_READY).progress.files_read == FILES
    assert all(len(sealed(report)) <= report.files_read for report in reports)


# -- cancelled loads -------------------------------------------------------------------------------


def test_a_dataset_that_is_dropped_while_it_loads_leaves_nothing_behind(
    harness: Harness, source: Path, gate: Gate
) -> None:
    info = harness.coordinator.create(spec(source))
    harness.node.start()
    gate.wait_for(2)

    harness.coordinator.delete("table")

    def forgotten() -> bool:
        try:
            harness.node.rows("table", info.fingerprint)
        except DatasetNotFoundError:
            return True
        except NotReadyError:
            return False
        raise AssertionError("it is served")

    wait_until(forgotten, WAIT_S, "the dataset is forgotten, though its loads have yet to end")
    wait_until(harness.node.is_ready, WAIT_S, "ready")
    gate.open.set()
    wait_until(lambda: harness.files() == [], WAIT_S, "nothing is left")


def test_a_dataset_that_is_loaded_again_while_a_load_of_a_dropped_one_hangs_has_no_old_failure(
    harness: Harness, source: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, another_hangs = loader.read_split, threading.Event()

    def first_fails(file: LocalFile, *arguments: Any) -> Iterator[pa.RecordBatch]:
        if file.path.name == "part-000.parquet":
            assert another_hangs.wait(WAIT_S)
            raise LoadError("gone for a moment")
        yield from read(file, *arguments)

    monkeypatch.setattr(loader, "read_split", first_fails)
    harness.coordinator.create(spec(source))
    harness.node.start()
    gate.wait_for(1)
    another_hangs.set()
    failed = harness.wait(pb.DATASET_STATE_FAILED)
    assert "gone for a moment" in failed.error.message
    harness.coordinator.delete("table")
    monkeypatch.setattr(loader, "read_split", read)

    harness.coordinator.create(spec(source))
    gate.open.set()

    info = harness.wait(pb.DATASET_STATE_READY)
    assert row_ids(harness.node, info) == [*range(10 * FILES)]


def test_a_copy_for_which_there_was_no_room_is_tried_again(
    harness: Harness, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_state, "_COPY_AGAIN_S", 0.0)
    answer, tries = harness.coordinator.heartbeat, itertools.count()

    def replicas(request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        for actual in request.datasets:  # of a shard that is elsewhere too, no failure of the load
            kept = [shard for shard in actual.shards if not shard.failure]
            del actual.shards[:]
            actual.shards.extend(kept)
        response = answer(request)
        for shard in (shard for desired in response.datasets for shard in desired.shards):
            if shard.splits:
                splits[shard.index] = tuple(map(split_from_proto, shard.splits))
                shard.copy_from.append("grpc://another:1")
                shard.checksum = "of-another"
        return response

    splits = {}

    def copy(store: ShardStore, job: loading.Job, _: Credentials) -> None:
        if next(tries) < FILES:
            raise LoadError("no room")
        load = loading.Job(job.plan, DesiredShard(job.index, splits=splits[job.index]))
        loading.load_shard(store, load, loading.SpooledTables(store.scratch / "none"))

    monkeypatch.setattr(harness.coordinator, "heartbeat", replicas)
    monkeypatch.setattr(loading, "copy_shard", copy)
    harness.coordinator.create(spec(source))
    harness.node.start()

    assert harness.wait(pb.DATASET_STATE_READY).num_rows == 10 * FILES


@pytest.mark.parametrize("answers_old", [False, True])
def test_a_load_waits_for_the_tombstones_that_it_needs(
    harness: Harness, source: Path, monkeypatch: pytest.MonkeyPatch, *, answers_old: bool
) -> None:
    harness.node.start()
    harness.coordinator.create(spec(source, "other"))
    other = VersionKey("other", harness.wait(pb.DATASET_STATE_READY, "other").fingerprint)
    key = b"k" * 16
    hashes = tombstones_of(harness.store.shards(other)[0].batch, np.array([3]), key)
    answer, tries, answers = harness.coordinator.heartbeat, itertools.count(), threading.Event()

    def heartbeat(request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        response = answer(request)
        for desired in response.datasets:
            if desired.plan.dataset == "table":
                desired.tombstones = 2
        return response

    def tombstones(dataset: str) -> pb.GetTombstonesResponse:
        assert dataset == "table"
        next(tries)
        if answers.is_set():
            return pb.GetTombstonesResponse(number=2, key=key, tombstones=joined(hashes))
        if answers_old:  # of a coordinator that is no longer the one
            return pb.GetTombstonesResponse(number=1, key=key)
        raise NodeUnavailableError("the coordinator does not answer")

    read: list[str] = []
    load = loading.load_shard
    monkeypatch.setattr(
        loading, "load_shard", lambda *each: (read.append("a shard"), load(*each))[1]
    )
    monkeypatch.setattr(load_threads, "_RETRY_S", 0.01)
    monkeypatch.setattr(harness.coordinator, "heartbeat", heartbeat)
    monkeypatch.setattr(harness, "tombstones", tombstones)
    harness.coordinator.create(spec(source))
    wait_until(lambda: next(tries) > 20, WAIT_S, "the node has asked a few times")
    assert read == []
    answers.set()

    table = VersionKey("table", harness.wait(pb.DATASET_STATE_READY).fingerprint)
    erased = {i: shard.erased for i, shard in harness.store.shards(table).items() if shard.erased}
    assert erased == {0: encode_rows(np.array([3]))}


def test_a_shard_that_was_another_nodes_meanwhile_is_tried_again(
    harness: Harness, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, read, seen = harness.coordinator.heartbeat, loader.read_split, set[str]()

    def fails_once(file: LocalFile, *arguments: Any) -> Iterator[pa.RecordBatch]:
        if file.path.name not in seen:
            seen.add(file.path.name)
            raise LoadError("the share is not mounted")
        yield from read(file, *arguments)

    def elsewhere(request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        failed = set()
        for actual in request.datasets:  # which fails no version that was ready before
            failed |= {shard.index for shard in actual.shards if shard.failure}
            kept = [shard for shard in actual.shards if not shard.failure]
            del actual.shards[:]
            actual.shards.extend(kept)
        request.answer = 0
        response = answer(request)
        response.report = 0  # both send everything: this changes what the other side has said
        for desired in response.datasets:
            kept = [shard for shard in desired.shards if shard.index not in failed]
            del desired.shards[:]
            desired.shards.extend(kept)
        return response

    monkeypatch.setattr(loader, "read_split", fails_once)
    monkeypatch.setattr(harness.coordinator, "heartbeat", elsewhere)
    harness.coordinator.create(spec(source))
    harness.node.start()

    info = harness.wait(pb.DATASET_STATE_READY)
    assert row_ids(harness.node, info) == [*range(10 * FILES)]


def test_a_node_whose_coordinator_fails_for_a_moment_goes_on(
    harness: Harness, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = itertools.count()
    answer = harness.coordinator.heartbeat

    def heartbeat(request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        if next(beats) == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return answer(request)

    monkeypatch.setattr(harness.coordinator, "heartbeat", heartbeat)
    harness.coordinator.create(spec(source))
    harness.node.start()

    assert harness.wait(pb.DATASET_STATE_READY).num_rows == 10 * FILES


def test_a_report_of_a_reader_whose_heartbeat_is_not_answered_is_sent_again(
    harness: Harness, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, lost = harness.coordinator.heartbeat, list[pb.ReaderReport]()

    def heartbeat(request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        if request.reports and not lost:
            lost.extend(request.reports)
            raise NodeUnavailableError("the coordinator is late")
        return answer(request)

    monkeypatch.setattr(harness.coordinator, "heartbeat", heartbeat)
    harness.coordinator.create(spec(source))
    harness.node.start()
    harness.wait(pb.DATASET_STATE_READY)
    report = pb.ReaderReport(
        job="train", dataset="table", run="run", world_size=1, step=7, expires_s=60.0
    )
    harness.node.take_report(report, ANYONE)

    (job,) = wait_until(harness.coordinator.jobs.jobs, WAIT_S, "the report came")
    assert (job.name, job.step, len(lost)) == ("train", 7, 1)


def test_a_failed_dataset_that_is_requested_while_its_loads_run_is_loaded_again(
    harness: Harness, source: Path, gate: Gate
) -> None:
    harness.coordinator.create(spec(source))
    harness.node.start()
    gate.wait_for(2)
    created = harness.coordinator.get("table")
    beat = pb.HeartbeatRequest(node=pb.Node(id=harness.store.node_id))
    actual = beat.datasets.add(dataset="table", fingerprint=created.fingerprint)
    actual.shards.add(index=3, failure="corrupt")
    harness.coordinator.heartbeat(beat)
    assert harness.coordinator.get("table").state == pb.DATASET_STATE_FAILED

    harness.coordinator.create(spec(source))
    gate.open.set()

    info = harness.wait(pb.DATASET_STATE_READY)
    assert row_ids(harness.node, info) == [*range(10 * FILES)]


def test_what_is_sealed_of_a_dropped_dataset_makes_room_while_its_last_load_hangs(
    harness: Harness, source: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = gate.read_split

    def read_split(file: LocalFile, *arguments: Any) -> Iterator[pa.RecordBatch]:
        read = slow if file.path.name.endswith("3.parquet") else gate.read
        return read(file, *arguments)

    monkeypatch.setattr(loader, "read_split", read_split)
    harness.coordinator.create(spec(source))
    harness.node.start()
    gate.wait_for(1)
    wait_until(
        lambda: harness.coordinator.get("table").progress.shards_done == FILES - 1,
        WAIT_S,
        "all shards but one are sealed",
    )

    harness.coordinator.delete("table")

    wait_until(lambda: not harness.store.stored_bytes, WAIT_S, "nothing is stored")
    wait_until(
        lambda: not harness.coordinator.nodes()[0].stored_bytes, WAIT_S, "the coordinator knows"
    )
    gate.open.set()
    wait_until(lambda: not harness.files(), WAIT_S, "nothing is left behind")


def test_loads_of_a_dropped_dataset_that_wait_for_a_thread_read_no_source(
    harness: Harness, source: Path, gate: Gate
) -> None:
    harness.coordinator.create(spec(source))
    harness.node.start()
    gate.wait_for(2)  # as many as there are threads
    running = {load.job.index for load in harness.node._loads() if load.future.running()}

    harness.coordinator.delete("table")
    wait_until(
        lambda: all(load.job.cancelled.is_set() for load in harness.node._loads()),
        WAIT_S,
        "the node knows that it is dropped",
    )
    gate.open.set()

    wait_until(lambda: not harness.node._loads(), WAIT_S, "all loads have ended")
    assert gate.files == {f"part-{index:03d}.parquet" for index in running}


def test_a_load_waits_for_the_room_that_a_dropped_load_gives_back_at_its_end(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    rows, columns = 10_000, ["row"]
    source = write_numbered(tmp_path / "source", rows)
    harness = Harness(tmp_path, memory_limit_bytes=rows * 12)  # 8 bytes a row
    with harness.store, harness.node:
        harness.coordinator.create(spec(source, columns=columns))
        harness.node.start()
        gate.wait_for(1)

        harness.coordinator.delete("table")
        harness.coordinator.create(spec(source, name="other", columns=columns))
        waits = wait_until(
            lambda: harness.coordinator.get("other").progress.waits, WAIT_S, "it finds no room"
        )
        assert "until a cancelled load has ended" in waits
        gate.open.set()

        assert harness.wait(pb.DATASET_STATE_READY, "other").num_rows == rows
        assert caplog.text.count("load waits") == 1


@pytest.mark.parametrize("loaded_again", [False, True])
def test_of_a_damaged_file_that_is_copied_only_its_own_shard_is_dropped(
    harness: Harness, source: Path, loaded_again: bool
) -> None:
    harness.node.start()
    harness.coordinator.create(spec(source))
    info = harness.wait(pb.DATASET_STATE_READY)
    key = VersionKey("table", info.fingerprint)
    damaged = harness.store.versions()[key][0]
    content = damaged.path.read_bytes()
    damaged.path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    copied = harness.node.shard_file(key, 0, 2**20)
    next(copied)

    if loaded_again:  # while it is copied
        harness.coordinator.delete("table")
        wait_until(lambda: harness.files() == [], WAIT_S, "it is dropped")
        harness.coordinator.create(spec(source))
        harness.wait(pb.DATASET_STATE_READY)
    healthy = harness.store.versions()[key]
    assert list(copied) == []

    wait_until(lambda: len(harness.store.versions().get(key, ())) == FILES, WAIT_S, "it is whole")
    held = harness.store.versions()[key]
    assert held[0] is not damaged
    assert (held[0] is healthy[0]) == loaded_again


def test_a_shard_whose_file_was_removed_is_made_again_when_it_is_copied(
    harness: Harness, source: Path
) -> None:
    harness.node.start()
    harness.coordinator.create(spec(source))
    info = harness.wait(pb.DATASET_STATE_READY)
    key = VersionKey("table", info.fingerprint)
    lost = harness.store.versions()[key][0]
    lost.path.unlink()

    with pytest.raises(NotReadyError, match="shard 0 of 'table' is made again: its file was remov"):
        harness.node.shard_file(key, 0, 2**20)

    wait_until(lambda: len(harness.store.versions().get(key, ())) == FILES, WAIT_S, "it is whole")
    assert harness.store.versions()[key][0] is not lost
    assert lost.path.exists()


def test_a_shard_that_was_just_dropped_is_not_ready_to_be_copied(
    harness: Harness, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.node.start()
    harness.coordinator.create(spec(source))
    info = harness.wait(pb.DATASET_STATE_READY)
    key = VersionKey("table", info.fingerprint)
    harness.node.close()  # it loads nothing again

    def drop_first(path: str) -> None:
        harness.store.drop_version(key)
        raise FileNotFoundError(path)

    monkeypatch.setattr(pa, "memory_map", drop_first)
    with pytest.raises(NotReadyError, match="shard 0 of 'table' was just dropped"):
        harness.node.shard_file(key, 0, 2**20)


def test_a_node_that_closes_while_it_loads_keeps_what_is_sealed_and_no_half_file(
    tmp_path: Path, source: Path, gate: Gate
) -> None:
    harness = Harness(tmp_path)
    with harness.store, harness.node:
        harness.coordinator.create(spec(source))
        harness.node.start()
        gate.wait_for(2)
        closing = threading.Thread(target=harness.node.close)
        closing.start()
        wait_until(lambda: harness.node._stop.is_set(), WAIT_S, "closing has begun")
        gate.open.set()
        closing.join(WAIT_S)
        assert not closing.is_alive()

    assert not [name for name in harness.files() if name.endswith(".tmp")]


def test_a_node_whose_loads_hang_closes_in_the_time_it_is_given_and_says_so(
    tmp_path: Path, source: Path, gate: Gate
) -> None:
    harness = Harness(tmp_path)
    with harness.store:
        harness.coordinator.create(spec(source))
        harness.node.start()
        gate.wait_for(2)

        begun = time.monotonic()
        assert not harness.node.close(0.2)
        assert time.monotonic() - begun < WAIT_S
        gate.open.set()
        assert harness.node.close(WAIT_S)

    assert not [name for name in harness.files() if name.endswith(".tmp")]


def test_a_restarted_node_adopts_its_shards_and_reads_no_source(
    tmp_path: Path, source: Path
) -> None:
    first = Harness(tmp_path)
    with first.store, first.node:
        first.coordinator.create(spec(source))
        first.node.start()
        before = first.wait(pb.DATASET_STATE_READY)
    for path in source.iterdir():
        path.unlink()

    again = Harness(tmp_path)
    with again.store, again.node:
        again.node.start()
        info = again.wait(pb.DATASET_STATE_READY)

        assert info.fingerprint == before.fingerprint
        assert row_ids(again.node, info) == [*range(10 * FILES)]
