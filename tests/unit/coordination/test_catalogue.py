import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError
from cache_server.coordination.catalogue import Catalogue, CatalogueEntry, SealedSummary
from cache_server.plan.pinned_version import PinnedVersion, plan_version
from cache_server.shards.version_key import VersionKey


@pytest.fixture
def plan(tmp_path: Path) -> PinnedVersion:
    source = tmp_path / "source" / "ü.parquet"
    source.parent.mkdir()
    pq.write_table(
        pa.table({"a": range(1000), "text": [str(n) for n in range(1000)]}),
        source,
        row_group_size=100,
    )
    spec = DatasetSpec("t.1", source, filter="a > 1", replicas=2, target_shard_bytes=4000)
    return plan_version(spec).version


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(tmp_path / "cache")


def named(plan: PinnedVersion, dataset: str, fingerprint: str = "f") -> PinnedVersion:
    spec = DatasetSpec(dataset, plan.spec.source)
    return replace(plan, spec=spec, key=VersionKey(dataset, fingerprint))


def read_one(directory: Path) -> CatalogueEntry:
    (entry,) = Catalogue(directory).read()
    return entry


def test_an_unused_directory_holds_nothing(catalogue: Catalogue) -> None:
    assert catalogue.read() == []
    assert catalogue.read_members() == []


def test_a_version_is_read_back_as_it_was_planned(
    tmp_path: Path, catalogue: Catalogue, plan: PinnedVersion
) -> None:
    assert len(plan.shards) > 1

    catalogue.write(plan, 3, [])
    entry = read_one(tmp_path / "cache")

    assert entry == CatalogueEntry(plan, 3, ())
    assert entry.pinned.logical.equals(plan.logical, check_metadata=True)


@pytest.mark.parametrize("keeps", [True, False])
def test_whether_every_row_is_kept_is_read_back(
    tmp_path: Path, catalogue: Catalogue, plan: PinnedVersion, keeps: bool
) -> None:
    catalogue.write(replace(plan, keeps_every_row=keeps), 0, [])

    assert read_one(tmp_path / "cache").pinned.keeps_every_row is keeps


def test_the_sealed_shards_are_read_back(
    tmp_path: Path, catalogue: Catalogue, plan: PinnedVersion
) -> None:
    sealed = tuple(SealedSummary(n, 2**40 + n, f"sum-{n}") for n in range(len(plan.shards)))

    catalogue.write(plan, 0, sealed)

    assert read_one(tmp_path / "cache").sealed == sealed


def test_unknown_row_counts_stay_unknown(
    tmp_path: Path, catalogue: Catalogue, plan: PinnedVersion
) -> None:
    text = tmp_path / "a.json"
    text.write_text('{"a": 1}\n' * 10)
    counted, uncounted = plan, plan_version(DatasetSpec("u", text, target_shard_bytes=20)).version

    catalogue.write(counted, 0, [])
    catalogue.write(uncounted, 0, [])

    found = {entry.pinned.key: entry.pinned for entry in catalogue.read()}
    assert [shard.max_rows for shard in found[counted.key].shards] == [
        shard.max_rows for shard in counted.shards
    ]
    assert {shard.max_rows for shard in found[uncounted.key].shards} == {None}


def test_why_a_load_failed_is_read_back(
    tmp_path: Path, catalogue: Catalogue, plan: PinnedVersion
) -> None:
    catalogue.write(plan, 0, [], failure=LoadError("cannot read 'ü.parquet'"))

    failure = read_one(tmp_path / "cache").failure

    assert isinstance(failure, LoadError) and str(failure) == "cannot read 'ü.parquet'"


def test_writing_again_replaces_the_version(
    tmp_path: Path, catalogue: Catalogue, plan: PinnedVersion
) -> None:
    catalogue.write(plan, 0, [SealedSummary(1, 1, "x")])

    catalogue.write(plan, 1, [])

    assert read_one(tmp_path / "cache") == CatalogueEntry(plan, 1, ())


def test_a_forgotten_version_is_gone_and_the_others_are_not(
    catalogue: Catalogue, plan: PinnedVersion
) -> None:
    other = named(plan, "other")
    catalogue.write(plan, 0, [])
    catalogue.write(other, 0, [])

    catalogue.forget(plan.key)
    catalogue.forget(VersionKey("never", "seen"))

    assert [entry.pinned.key for entry in catalogue.read()] == [other.key]


def test_versions_come_in_the_order_they_were_last_written(
    tmp_path: Path, catalogue: Catalogue, plan: PinnedVersion
) -> None:
    order = ["b", "c", "a"]
    for age, name in enumerate(order):
        catalogue.write(named(plan, name), 0, [])
        path = tmp_path / "cache" / ".catalogue" / f"{name}@f.json"
        os.utime(path, ns=(0, 1_000_000 * age))

    assert [entry.pinned.key.dataset for entry in catalogue.read()] == order


def test_names_that_look_alike_do_not_meet(catalogue: Catalogue, plan: PinnedVersion) -> None:
    plans = [named(plan, name) for name in ("t", "t.1", "t.1.json", "T", "t-1", "t" * 128)]
    plans.append(named(plan, "t", "f2"))

    for each in plans:
        catalogue.write(each, 0, [])

    assert {entry.pinned.key for entry in catalogue.read()} == {each.key for each in plans}


def test_a_write_that_a_crash_cut_short_changes_nothing(
    tmp_path: Path, catalogue: Catalogue, plan: PinnedVersion
) -> None:
    catalogue.write(plan, 0, [])
    catalogue.write_members(["a"])
    (tmp_path / "cache" / ".catalogue" / "t.1@g.tmp").write_text('{"spec": {"na')
    (tmp_path / "cache" / ".members.tmp").write_text('["a", "')

    assert read_one(tmp_path / "cache").pinned == plan
    assert catalogue.read_members() == ["a"]


def test_an_entry_that_a_person_edited_is_read_and_gets_a_checksum(
    tmp_path: Path, catalogue: Catalogue, plan: PinnedVersion
) -> None:
    catalogue.write(plan, 0, [])
    (path,) = (tmp_path / "cache" / ".catalogue").iterdir()
    written = path.read_bytes()
    content = json.loads(written)
    del content["sha256"], content["format"]
    path.write_text(json.dumps(content))

    for _ in range(2):
        assert read_one(tmp_path / "cache").pinned == plan
        assert path.read_bytes() == written


DEEP = pytest.param(b"[" * 100_000, id="deep")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'["a", "', b'{"dropped": []}', DEEP])
def test_members_that_cannot_be_read_are_forgotten_and_the_log_says_so(
    tmp_path: Path, catalogue: Catalogue, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    catalogue.write_members(["a"])
    (tmp_path / "cache" / ".members.json").write_bytes(content)

    assert catalogue.read_members() == []
    assert str(tmp_path / "cache" / ".members.json") in caplog.text


def test_a_node_of_the_same_directory_sees_no_dataset_in_it(
    tmp_path: Path, catalogue: Catalogue, plan: PinnedVersion
) -> None:
    catalogue.write(plan, 0, [])

    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".catalogue"]


def test_members_are_kept_by_name(tmp_path: Path, catalogue: Catalogue) -> None:
    catalogue.write_members({"node-b", "node-a"})
    assert Catalogue(tmp_path / "cache").read_members() == ["node-a", "node-b"]

    catalogue.write_members(["node-c"])
    assert catalogue.read_members() == ["node-c"]


def test_zones_of_members_are_kept(tmp_path: Path, catalogue: Catalogue) -> None:
    catalogue.write_zones({"node-b": "eu-1b", "node-a": "eu-1a"})
    assert Catalogue(tmp_path / "cache").read_zones() == {"node-a": "eu-1a", "node-b": "eu-1b"}


def test_the_files_are_json_for_people(
    tmp_path: Path, catalogue: Catalogue, plan: PinnedVersion
) -> None:
    catalogue.write(plan, 0, [])

    (path,) = (tmp_path / "cache" / ".catalogue").iterdir()
    content = json.loads(path.read_text())
    assert path.name == f"t.1@{plan.key.fingerprint}.json"
    assert content["plan"]["sql"] == plan.sql
    assert content["shards"][0]["splits"][0]["file"]["path"].endswith("ü.parquet")


def test_what_was_dropped_is_read_back_in_the_same_order(
    tmp_path: Path, catalogue: Catalogue
) -> None:
    assert catalogue.read_dropped() == {}
    dropped = {VersionKey("t.2", "b"): 3, VersionKey("t.1", "a"): 0}

    catalogue.write_dropped(dropped)

    assert [*Catalogue(tmp_path / "cache").read_dropped().items()] == [*dropped.items()]


@pytest.mark.parametrize(
    "content", [b"", b"3", b"\xff", b'[["a", "b"]]', b'[["a", "b", null]]', DEEP]
)
def test_drops_that_cannot_be_read_are_forgotten_and_the_log_says_so(
    tmp_path: Path, catalogue: Catalogue, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    catalogue.write_dropped({})
    (tmp_path / "cache" / ".dropped.json").write_bytes(content)

    assert catalogue.read_dropped() == {}
    assert str(tmp_path / "cache" / ".dropped.json") in caplog.text


def test_only_those_that_were_proven_are_read_as_proven(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path)
    catalogue.write_members(["a", "false"])
    assert catalogue.read_proven() == []
    catalogue.write_proven(["a"])
    assert catalogue.read_proven() == ["a"]
