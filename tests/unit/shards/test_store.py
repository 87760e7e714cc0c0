import errno
import json
import os
import random
import re
import resource
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cache_protocol.errors import (
    ConfigError,
    LoadError,
    NodeUnavailableError,
)
from cache_protocol.storage.row_sets import encode_rows
from cache_protocol.storage.shard_files import (
    MappedShard,
    SealedShard,
    Selection,
    read_manifest,
    shard_file_name,
)
from cache_server.shards import adoption, directory_format, node_name, removals, state_files
from cache_server.shards.checksums import file_checksum, file_digests
from cache_server.shards.draft import shard_writer
from cache_server.shards.packing import ShardBuilder
from cache_server.shards.resident_rows import ResidentRows
from cache_server.shards.store import ShardStore
from cache_server.shards.version_key import VersionKey
from tests.stored_rows import (
    KEY,
    LAYOUT,
    LOGICAL,
    expected,
    gather,
    rows_of,
    stored,
)

WAIT_S = 60.0
OTHER = VersionKey("table", "f2")
ROW_3 = encode_rows(np.array([3]))


def files_of(store: ShardStore) -> list[str]:
    names = (str(path.relative_to(store.cache_dir)) for path in store.cache_dir.rglob("*"))
    return sorted(name for name in names if not name.startswith("."))


def indices(store: ShardStore, key: VersionKey = KEY) -> list[int]:
    return sorted(store.versions().get(key, {}))


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(cache_dir: Path) -> Iterator[ShardStore]:
    with ShardStore(cache_dir) as opened:
        yield opened


@pytest.fixture
def three_shards(cache_dir: Path) -> Path:
    """A closed store with the shards 0, 1 and 2 of 10 rows each."""
    with ShardStore(cache_dir) as opened:
        for index in range(3):
            opened.seal(KEY, index, stored(range(10 * index, 10 * index + 10)))
    return cache_dir


def shard_path(cache_dir: Path, index: int, key: VersionKey = KEY) -> Path:
    return cache_dir / key.dataset / key.fingerprint / shard_file_name(index)


def test_a_node_with_an_address_is_the_same_after_it_lost_its_directory(tmp_path: Path) -> None:
    def node_id(name: str, address: str | None) -> str:
        with ShardStore(tmp_path / name, address=address) as opened:
            return opened.node_id

    first = node_id("first", "cache-0.job:50051")
    assert node_id("second", "cache-0.job:50051") == first
    assert node_id("third", "cache-1.job:50051") != first
    assert node_id("first", "elsewhere:50051") == first
    assert node_id("fourth", None) != node_id("fifth", None)


def test_shards_of_a_newer_release_are_refused_and_left_as_they_are(three_shards: Path) -> None:
    newer = state_files.encode(json.dumps({"format": 3}))
    (three_shards / ".format.json").write_text(newer)
    (three_shards / ".node-id").write_text("of a newer form, too")
    before = {path: path.read_bytes() for path in three_shards.rglob("*") if path.is_file()}

    with pytest.raises(ConfigError, match=r"a newer release wrote the shards in .* in format 3"):
        ShardStore(three_shards)
    assert {path: path.read_bytes() for path in three_shards.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("content", [None, b"", b'{"format": 2', b'{"format": "x"}', b"[1]"])
def test_shards_without_a_format_are_adopted(three_shards: Path, content: bytes | None) -> None:
    path = three_shards / ".format.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with ShardStore(three_shards) as opened:
        assert indices(opened) == [0, 1, 2]
    assert state_files.decode(path.read_bytes()) == ({"format": 1}, True)


def format_of(cache_dir: Path) -> int:
    return int(state_files.decode((cache_dir / ".format.json").read_bytes())[0]["format"])


def erase_one(store: ShardStore) -> None:
    store.erase(KEY, 1, ROW_3)


def load_without_one(store: ShardStore) -> None:
    store.left_out = lambda *_: ROW_3
    store.seal(OTHER, 0, stored(range(10)))


def receive_an_erased_one(store: ShardStore) -> None:
    with ShardStore(store.cache_dir.with_name("sender")) as sender:
        load_without_one(sender)
        shard = sender.shards(OTHER)[0]
        store.receive(OTHER, shard.sealed, [pa.py_buffer(shard.path.read_bytes())])


@pytest.mark.parametrize("act", [erase_one, load_without_one, receive_an_erased_one])
def test_a_directory_with_erased_rows_has_a_format_that_older_releases_refuse(
    three_shards: Path, act: Callable[[ShardStore], None]
) -> None:
    with ShardStore(three_shards) as opened:
        opened.seal(KEY, 3, stored(range(30, 40)))
        assert format_of(three_shards) == 1  # others can still go back
        act(opened)
        assert format_of(three_shards) == 2
    (three_shards / ".format.json").write_bytes(b"damaged")
    with ShardStore(three_shards) as opened:
        assert sum(bool(shard.erased) for shard in opened.sealed()) == 1
    assert format_of(three_shards) == 2


def test_a_mapped_file_that_was_removed_tells_that_rows_are_erased_under_another_name(
    three_shards: Path,
) -> None:
    removed = three_shards / "removed"
    removed.hardlink_to(shard_path(three_shards, 1))
    with ShardStore(three_shards) as opened:
        mapped = MappedShard(opened.shards(KEY)[1].sealed, removed)
        removed.unlink()
        assert mapped.is_unchanged()
        opened.erase(KEY, 1, ROW_3)
    assert not mapped.is_unchanged()


def test_rows_are_not_erased_where_the_format_cannot_be_written(
    three_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with ShardStore(three_shards) as opened:
        monkeypatch.setattr(directory_format, "replace_file", full)
        before = shard_path(three_shards, 1).read_bytes()
        with pytest.raises(OSError, match="No space left"):
            opened.erase(KEY, 1, ROW_3)
        with pytest.raises(LoadError, match="No space left"):
            load_without_one(opened)
        assert shard_path(three_shards, 1).read_bytes() == before
        assert OTHER not in opened.versions()
    assert format_of(three_shards) == 1


# -- seal ------------------------------------------------------------------------------------------


def test_a_sealed_shard_is_a_mapped_file_that_says_what_it_is(store: ShardStore) -> None:
    batch = stored(range(10))

    shard = store.seal(KEY, 7, batch)

    assert shard.path == store.cache_dir / "table" / "f1" / "shard-00007.arrow"
    assert shard.sealed == SealedShard(7, 10, shard.path.stat().st_size, file_checksum(shard.path))
    assert shard.batch.equals(batch)
    assert shard.layout.logical.equals(LOGICAL, check_metadata=True)
    assert store.versions() == {KEY: {7: shard}}
    assert store.stored_bytes == shard.sealed.num_bytes
    assert files_of(store) == [
        *("table", "table/f1", "table/f1/manifest.jsonl", "table/f1/shard-00007.arrow")
    ]


def test_a_shard_is_one_arrow_file_of_one_batch(store: ShardStore) -> None:
    shard = store.seal(KEY, 0, stored(range(10)))

    reader = pa.ipc.open_file(str(shard.path))
    assert reader.num_record_batches == 1
    assert reader.get_batch(0).equals(stored(range(10)))


def test_replicas_of_a_shard_have_the_same_checksum(tmp_path: Path) -> None:
    with ShardStore(tmp_path / "a") as first, ShardStore(tmp_path / "b") as second:
        one = first.seal(KEY, 0, stored(range(50))).sealed
        two = second.seal(KEY, 0, stored(range(50))).sealed
        other = second.seal(KEY, 1, stored(range(1, 51))).sealed

    assert one == two
    assert other.checksum != one.checksum


def test_a_shard_without_rows_is_a_shard(cache_dir: Path) -> None:
    with ShardStore(cache_dir) as store:
        assert store.seal(KEY, 0, stored([])).sealed.num_rows == 0
    with ShardStore(cache_dir) as store:
        assert indices(store) == [0]


def test_sealing_again_replaces_the_shard(cache_dir: Path) -> None:
    with ShardStore(cache_dir) as store:
        before = store.seal(KEY, 0, stored(range(10)))
        after = store.seal(KEY, 0, stored(range(20)))

        assert before.batch.equals(stored(range(10)))
        assert store.stored_bytes == after.sealed.num_bytes
    with ShardStore(cache_dir) as store:
        assert store.versions()[KEY][0].sealed == after.sealed


# -- drafts ----------------------------------------------------------------------------------------


def fill_and_seal(store: ShardStore, index: int, ids: Sequence[int]) -> MappedShard:
    with store.draft(KEY, index, LAYOUT, len(ids)) as draft:
        builder = ShardBuilder(LOGICAL, len(ids), draft)
        for half in (ids[: len(ids) // 2], ids[len(ids) // 2 :]):
            builder.append(rows_of(half))
        return store.seal(KEY, index, builder.finish(), draft)


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_shard_that_was_filled_in_place_is_the_same_file_to_the_byte(
    store: ShardStore, size: int
) -> None:
    written = store.seal(KEY, 0, stored(range(size)))

    filled = fill_and_seal(store, 1, range(size))

    assert filled.path.read_bytes() == written.path.read_bytes()
    assert filled.sealed.checksum == written.sealed.checksum
    assert len(files_of(store)) == 5  # two directories, the manifest, two shards


def test_no_byte_of_a_draft_is_written_twice(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    pwrite = os.pwrite

    def spy(handle: int, data: bytes, at: int) -> int:
        written.append(memoryview(data).nbytes)
        return pwrite(handle, data, at)

    monkeypatch.setattr(os, "pwrite", spy)
    shard = fill_and_seal(store, 0, range(10_000))

    assert sum(written) < shard.sealed.num_bytes + 20_000


def test_a_batch_that_does_not_lie_in_its_draft_is_copied(store: ShardStore) -> None:
    with store.draft(KEY, 0, LAYOUT, 10) as draft:
        shard = store.seal(KEY, 0, stored(range(10)), draft)
    assert shard.batch.equals(stored(range(10)))


def test_a_column_of_a_shard_may_have_more_numbers_than_32_bits_count() -> None:
    numbers = pa.array(np.zeros(2**31 + 2, np.uint8))  # untouched pages
    rows = pa.FixedSizeListArray.from_arrays(numbers, 2)
    sink = pa.MockOutputStream()

    with shard_writer(sink, pa.schema({"image": rows.type})) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([rows], ["image"]))

    assert sink.size() > 2**31


def test_a_draft_that_is_not_sealed_leaves_nothing(store: ShardStore) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        store.draft(KEY, 0, LAYOUT, 10) as draft,
    ):
        assert draft.path.exists()
        raise ZeroDivisionError
    assert files_of(store) == []


def test_drafts_count_towards_the_limit_until_they_end(cache_dir: Path) -> None:
    size = 100 * LAYOUT.fixed_row_bytes
    with ShardStore(cache_dir, memory_limit_bytes=2 * size - 1) as store:
        with (
            store.draft(KEY, 0, LAYOUT, 100),
            pytest.raises(LoadError, match=f"{size} of the memory limit of {2 * size - 1} bytes"),
            store.draft(KEY, 1, LAYOUT, 100),
        ):
            pass
        with store.draft(KEY, 1, LAYOUT, 100):
            assert store.free_bytes() == size - 1
        assert files_of(store) == [] and store.free_bytes() == 2 * size - 1


def test_a_draft_for_which_there_is_no_room_is_a_named_load_error(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        pytest.raises(LoadError, match=r"cannot write shard 3 of 'table' .*No space left"),
        store.draft(KEY, 3, LAYOUT, 10),
    ):
        pass
    assert files_of(store) == []


def test_a_directory_that_was_removed_is_a_named_load_error(store: ShardStore) -> None:
    shutil.rmtree(store.cache_dir)

    with pytest.raises(LoadError, match=f"cannot use cache_dir {store.cache_dir}: No such file"):
        store.seal(KEY, 0, stored([0, 1]))


# -- adopt -----------------------------------------------------------------------------------------


def chunks_of(path: Path) -> list[pa.Buffer]:
    data = path.read_bytes()
    return [pa.py_buffer(data[start : start + 700]) for start in range(0, len(data), 700)]


def test_a_shard_that_was_copied_is_the_same_file_and_lasts(
    cache_dir: Path, tmp_path: Path
) -> None:
    with ShardStore(tmp_path / "other") as other:
        sealed = other.seal(KEY, 3, stored(range(50)))
        with ShardStore(cache_dir) as store:
            copied = store.receive(KEY, sealed.sealed, chunks_of(sealed.path))
            assert copied.path.read_bytes() == sealed.path.read_bytes()
            assert copied.sealed == sealed.sealed

    with ShardStore(cache_dir) as again:
        assert indices(again) == [3]


@pytest.mark.parametrize("damage", ["short", "other", "nothing"])
def test_a_copy_that_did_not_arrive_as_it_was_sealed_is_refused_and_leaves_nothing(
    store: ShardStore, tmp_path: Path, damage: str
) -> None:
    with ShardStore(tmp_path / "other") as other:
        sealed = other.seal(KEY, 3, stored(range(50)))
        chunks = chunks_of(sealed.path)
    damaged = {"short": chunks[:-1], "other": [*chunks[:-1], pa.py_buffer(b"x")], "nothing": []}

    with pytest.raises(NodeUnavailableError, match=r"shard 3 of .* did not arrive"):
        store.receive(KEY, sealed.sealed, damaged[damage])

    assert files_of(store) == [] and indices(store) == []


def test_a_copy_that_breaks_off_leaves_nothing(store: ShardStore, tmp_path: Path) -> None:
    with ShardStore(tmp_path / "other") as other:
        sealed = other.seal(KEY, 3, stored(range(50)))
        chunks = chunks_of(sealed.path)

    def broken() -> Iterator[pa.Buffer]:
        yield chunks[0]
        raise NodeUnavailableError("the node is gone")

    with pytest.raises(NodeUnavailableError, match="the node is gone"):
        store.receive(KEY, sealed.sealed, broken())

    assert files_of(store) == []


def test_a_copy_over_the_memory_limit_is_refused(cache_dir: Path, tmp_path: Path) -> None:
    with ShardStore(tmp_path / "other") as other:
        sealed = other.seal(KEY, 3, stored(range(50)))
        chunks = chunks_of(sealed.path)
    with (
        ShardStore(cache_dir, memory_limit_bytes=100) as store,
        pytest.raises(LoadError, match="memory limit of 100"),
    ):
        store.receive(KEY, sealed.sealed, chunks)


def test_what_a_killed_process_left_in_the_scratch_folder_is_removed(cache_dir: Path) -> None:
    with ShardStore(cache_dir) as store:
        scratch = store.scratch
    scratch.mkdir(parents=True)
    (scratch / "half.arrow").write_bytes(b"x")

    with ShardStore(cache_dir):
        assert not scratch.exists()


def test_a_restarted_store_adopts_what_was_sealed(cache_dir: Path) -> None:
    with ShardStore(cache_dir) as store:
        for key, index, size in ((KEY, 0, 10), (KEY, 2, 0), (OTHER, 0, 5)):
            store.seal(key, index, stored(range(size)))
        before = store.versions()
        size = store.stored_bytes

    with ShardStore(cache_dir) as store:
        after = store.versions()

        assert store.stored_bytes == size
        assert {key: sorted(shards) for key, shards in after.items()} == {KEY: [0, 2], OTHER: [0]}
        for key, shards in after.items():
            for index, shard in shards.items():
                assert shard.sealed == before[key][index].sealed
                assert shard.batch.equals(before[key][index].batch)


def test_shards_are_hashed_by_several_threads(
    three_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(3)

    def hashed(path: Path) -> bytes:
        together.wait(WAIT_S)
        return file_digests(path)

    monkeypatch.setattr(adoption, "file_digests", hashed)
    with ShardStore(three_shards, adopt_threads=3) as store:
        assert list(store.versions()[KEY]) == [0, 1, 2]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def swap(path: Path) -> None:
    """Another sound shard of the same size."""
    path.write_bytes(path.with_name(shard_file_name(2)).read_bytes())


@pytest.mark.parametrize("damage", [flip, truncate, empty, swap, Path.unlink])
def test_a_damaged_shard_is_not_adopted_but_removed(
    three_shards: Path, damage: Callable[[Path], None]
) -> None:
    damage(shard_path(three_shards, 1))

    with ShardStore(three_shards) as store:
        assert indices(store) == [0, 2]
        assert not shard_path(three_shards, 1).exists()
        store.seal(KEY, 1, stored(range(10, 20)))
    with ShardStore(three_shards) as store:
        assert indices(store) == [0, 1, 2]


@pytest.mark.parametrize("reason", [errno.ENOMEM, errno.EMFILE, errno.EACCES])
def test_a_sound_shard_that_cannot_be_opened_is_kept_and_the_store_says_why(
    three_shards: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def refuse(path: Path) -> bytes:
        raise OSError(reason, os.strerror(reason), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(adoption, "file_digests", refuse)
        with pytest.raises(ConfigError, match=rf"shard-00000.*{os.strerror(reason)}"):
            ShardStore(three_shards)

    with ShardStore(three_shards) as store:
        assert indices(store) == [0, 1, 2]


def test_the_manifest_names_nulls_only_where_there_are_some(cache_dir: Path) -> None:
    with ShardStore(cache_dir) as store:
        store.seal(KEY, 0, stored(range(10)))
        store.seal(KEY, 1, stored(range(10)), nulls={"x": 3})
        manifest = store.cache_dir / "table" / "f1" / "manifest.jsonl"
        plain, counted = manifest.read_text().splitlines()[1::2]

    assert "nulls" not in plain and '"nulls": {"x": 3}' in counted
    assert [sealed.nulls for sealed in read_manifest(manifest)] == [{}, {"x": 3}]


def test_a_torn_manifest_line_costs_its_own_shard_only(three_shards: Path) -> None:
    manifest = three_shards / "table" / "f1" / "manifest.jsonl"
    manifest.write_text(manifest.read_text()[:-20])

    with ShardStore(three_shards) as store:
        assert indices(store) == [0, 1]
        store.seal(KEY, 3, stored(range(30, 40)))
    with ShardStore(three_shards) as store:
        assert indices(store) == [0, 1, 3]


@pytest.mark.parametrize("room", [0, 20])
def test_a_manifest_line_for_which_there_is_no_room_costs_no_other_shard(
    cache_dir: Path, room: int
) -> None:
    manifest = cache_dir / "table" / "f1" / "manifest.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ShardStore(cache_dir) as store:
        store.seal(KEY, 0, stored(range(10)))
        with manifest.open("a") as file:
            file.write("x" * 100_000 + "\n")  # so that of all files it is the one that is too long
        resource.setrlimit(resource.RLIMIT_FSIZE, (manifest.stat().st_size + room, limits[1]))
        try:
            with pytest.raises(LoadError, match="cannot write shard 1"):
                store.seal(KEY, 1, stored(range(10, 20)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert indices(store) == [0]
        store.seal(KEY, 2, stored(range(20, 30)))
    with ShardStore(cache_dir) as store:
        assert indices(store) == [0, 2]


@pytest.mark.parametrize(
    "line", [b"\xff\xfe\n", b"\n", b"7\n", b"null\n", b'{"index": 9}\n', b"{}\n", b"{"]
)
def test_a_manifest_line_that_makes_no_sense_is_passed_over(
    three_shards: Path, line: bytes
) -> None:
    manifest = three_shards / "table" / "f1" / "manifest.jsonl"
    manifest.write_bytes(line + b"\n" + manifest.read_bytes() + line)

    with ShardStore(three_shards) as store:
        assert indices(store) == [0, 1, 2]


def test_a_file_that_the_manifest_does_not_name_never_counts(three_shards: Path) -> None:
    unnamed = shard_path(three_shards, 9)
    unnamed.write_bytes(shard_path(three_shards, 0).read_bytes())
    orphan = shard_path(three_shards, 0, VersionKey("orphan", "f"))
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(unnamed.read_bytes())

    with ShardStore(three_shards) as store:
        assert indices(store) == [0, 1, 2]
        assert list(store.versions()) == [KEY]
        assert not unnamed.exists()
        assert not (three_shards / "orphan").exists()


def test_temporary_files_of_a_crash_are_removed(three_shards: Path) -> None:
    beside = three_shards / "table" / "f1" / ".shard-00004.arrow.abc.tmp"
    alone = three_shards / "new" / "f" / ".shard-00000.arrow.abc.tmp"
    alone.parent.mkdir(parents=True)
    for path in (beside, alone):
        path.write_bytes(b"half")

    with ShardStore(three_shards) as store:
        assert indices(store) == [0, 1, 2]
        assert not beside.exists()
        assert not (three_shards / "new").exists()


def test_what_others_have_in_the_directory_stays(three_shards: Path) -> None:
    empty, other = three_shards / "project" / "empty", three_shards / "project" / "notes"
    for directory in (empty, other):
        directory.mkdir(parents=True)
    (other / ".draft.tmp").write_text("half a letter")

    with ShardStore(three_shards) as store:
        assert indices(store) == [0, 1, 2]
    assert empty.is_dir() and (other / ".draft.tmp").exists()


def test_a_version_of_which_nothing_is_left_leaves_no_directory(three_shards: Path) -> None:
    for index in range(3):
        flip(shard_path(three_shards, index))

    with ShardStore(three_shards) as store:
        assert store.versions() == {}
        assert files_of(store) == []


def test_files_of_others_are_left_alone(three_shards: Path) -> None:
    notes = [three_shards / "table" / "f1" / "notes.txt", three_shards / "x" / "y" / "data.arrow"]
    for path in notes:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")

    with ShardStore(three_shards) as store:
        assert list(store.versions()) == [KEY]
        assert [path.read_text() for path in notes] == ["mine", "mine"]


def test_a_file_of_another_layout_is_not_adopted(three_shards: Path) -> None:
    path = shard_path(three_shards, 1)
    foreign = pa.RecordBatch.from_pydict({"a": [1]})
    with pa.ipc.new_file(str(path), foreign.schema) as writer:
        writer.write_batch(foreign)
    line = f'{{"index": 1, "num_rows": 1, "num_bytes": {path.stat().st_size}, '
    line += f'"checksum": "{file_checksum(path)}"}}\n'
    with (path.parent / "manifest.jsonl").open("a") as manifest:
        manifest.write(line)

    with ShardStore(three_shards) as store:
        assert indices(store) == [0, 2]


# -- limits and failures ---------------------------------------------------------------------------


def test_a_shard_beyond_the_memory_limit_is_refused_and_leaves_nothing(cache_dir: Path) -> None:
    big = stored(range(10_000))
    with ShardStore(cache_dir, memory_limit_bytes=big.nbytes - 1) as store:
        with pytest.raises(LoadError, match=f"{big.nbytes} bytes does not fit") as caught:
            store.seal(KEY, 0, big)

        assert f"memory limit of {big.nbytes - 1} bytes" in str(caught.value)
        assert files_of(store) == []
        assert store.versions() == {}
        assert store.seal(KEY, 0, stored(range(10))).sealed.num_rows == 10


def test_what_is_stored_counts_towards_the_limit_until_it_is_dropped(cache_dir: Path) -> None:
    batch = stored(range(10_000))
    with ShardStore(cache_dir, memory_limit_bytes=int(1.5 * batch.nbytes)) as store:
        store.seal(KEY, 0, batch)
        with pytest.raises(LoadError, match="does not fit"):
            store.seal(KEY, 1, batch)

        store.drop(KEY, 0)

        store.seal(KEY, 1, batch)
        assert indices(store) == [1]
        assert store.free_bytes() == int(1.5 * batch.nbytes) - store.stored_bytes


def test_adopted_shards_count_towards_the_limit(cache_dir: Path) -> None:
    batch = stored(range(10_000))
    with ShardStore(cache_dir) as store:
        store.seal(KEY, 0, batch)

    limited = ShardStore(cache_dir, memory_limit_bytes=int(1.5 * batch.nbytes))
    with limited as store, pytest.raises(LoadError, match="does not fit"):
        store.seal(KEY, 1, batch)


def test_shards_that_are_sealed_at_once_share_the_limit(cache_dir: Path) -> None:
    batch = stored(range(20_000))
    barrier = threading.Barrier(5)
    refused: list[int] = []

    def seal(index: int) -> None:
        barrier.wait(60)
        try:
            store.seal(KEY, index, batch)
        except LoadError:
            refused.append(index)

    with ShardStore(cache_dir, memory_limit_bytes=int(2.5 * batch.nbytes)) as store:
        threads = [threading.Thread(target=seal, args=(index,)) for index in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

        assert len(refused) == 3
        assert sorted([*indices(store), *refused]) == [0, 1, 2, 3, 4]


def test_a_shard_that_cannot_be_written_is_a_named_load_error(store: ShardStore) -> None:
    (store.cache_dir / "table").write_text("in the way")

    with pytest.raises(LoadError, match="cannot write shard 3 of 'table'") as caught:
        store.seal(KEY, 3, stored(range(10)))

    assert str(store.cache_dir / "table" / "f1") in str(caught.value)
    assert "None" not in str(caught.value)
    assert files_of(store) == ["table"]
    assert store.versions() == {}


def test_a_shard_that_the_manifest_cannot_name_leaves_no_file(store: ShardStore) -> None:
    (store.cache_dir / "table" / "f1" / "manifest.jsonl").mkdir(parents=True)

    with pytest.raises(LoadError, match="Is a directory"):
        store.seal(KEY, 0, stored(range(10)))

    assert files_of(store) == ["table", "table/f1", "table/f1/manifest.jsonl"]
    assert store.stored_bytes == 0


def test_a_failed_seal_gives_its_room_back(cache_dir: Path) -> None:
    batch = stored(range(10_000))
    with ShardStore(cache_dir, memory_limit_bytes=int(1.5 * batch.nbytes)) as store:
        blocker = cache_dir / "table"
        blocker.write_text("in the way")
        with pytest.raises(LoadError):
            store.seal(KEY, 0, batch)
        blocker.unlink()

        assert store.seal(KEY, 0, batch).sealed.num_rows == 10_000


# -- one process, one lasting name -----------------------------------------------------------------


def test_a_directory_has_one_store_at_a_time(store: ShardStore) -> None:
    with pytest.raises(ConfigError, match="used by another cache node") as caught:
        ShardStore(store.cache_dir)
    assert str(store.cache_dir) in str(caught.value)

    store.close()
    ShardStore(store.cache_dir).close()


@pytest.mark.parametrize("below", ["", "sub"])
def test_a_cache_dir_that_cannot_be_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / below

    with pytest.raises(ConfigError, match="cannot use cache_dir") as caught:
        ShardStore(path)
    assert str(path) in str(caught.value)


def test_the_node_id_lasts_and_is_its_own(tmp_path: Path) -> None:
    with ShardStore(tmp_path / "a") as first, ShardStore(tmp_path / "b") as second:
        assert first.node_id
        assert first.node_id != second.node_id
        kept = first.node_id

    with ShardStore(tmp_path / "a") as again:
        assert again.node_id == kept


def test_a_node_id_that_was_never_written_out_is_made_anew(cache_dir: Path) -> None:
    cache_dir.mkdir()
    (cache_dir / ".node-id").touch()

    with ShardStore(cache_dir) as store:
        assert len(store.node_id) == 12


def test_a_node_id_that_cannot_be_read_is_named(cache_dir: Path) -> None:
    path = cache_dir / ".node-id"
    path.mkdir(parents=True)

    with pytest.raises(ConfigError, match="cannot use the name of the node") as caught:
        ShardStore(cache_dir)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("with_checksum", [True, False])
def test_a_damaged_node_id_is_set_aside_and_the_shards_stay(
    three_shards: Path, with_checksum: bool
) -> None:
    path = three_shards / ".node-id"
    with ShardStore(three_shards) as store:
        before, shards = store.node_id, store.versions().keys()
    damages = [b"\xff\xfe", b"../../x", b"a b", before.encode() + b"\n\0"]
    if with_checksum:
        data = before.encode()
        damages += [data[:cut] for cut in range(1, len(data))]
        damages += [
            data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            for at in range(len(data))
            for bit in range(8)
        ]
    checksum = path.with_name(".node-id.sha256")
    known = checksum.read_bytes()
    for damage in damages:
        path.write_bytes(damage)
        checksum.write_bytes(known)
        if not with_checksum:
            checksum.unlink()

        name = node_name.load(three_shards, None)

        assert re.fullmatch("[0-9a-f]{12}", name) and name not in (before, damage.decode("latin1"))
        assert path.with_name(".node-id.damaged").read_bytes() == damage
        assert node_name.load(three_shards, None) == name
    with ShardStore(three_shards) as store:
        assert store.versions().keys() == shards


def test_an_id_of_an_earlier_release_is_kept_and_gets_a_checksum(cache_dir: Path) -> None:
    cache_dir.mkdir()
    (cache_dir / ".node-id").write_text("0123456789ab")

    for _ in range(2):
        assert node_name.load(cache_dir, "host:1") == "0123456789ab"
    assert (cache_dir / ".node-id.sha256").exists()


def test_a_line_of_a_manifest_that_was_changed_counts_for_no_shard(three_shards: Path) -> None:
    path = shard_path(three_shards, 0).with_name("manifest.jsonl")
    sealed = {each.index: each for each in read_manifest(path)}
    data, chance = path.read_bytes(), random.Random(41)
    deep = b"[" * 100_000
    wrong = [b'{"index": "a", "num_rows": 1, "num_bytes": 1, "checksum": "x"}', b"3", b'"digests"']
    wrong += [b'{"index": -1, "num_rows": 1, "num_bytes": 1, "checksum": "x"}', deep]
    damages = [data + each + b"\n" for each in wrong]
    for _ in range(500):
        at = chance.randrange(len(data))
        damages.append(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        damages.append(data[: chance.randrange(len(data))])

    for damage in damages:
        path.write_bytes(damage)

        for found in read_manifest(path):
            assert found == sealed[found.index], damage


def test_a_shard_with_another_number_of_rows_than_its_line_says_is_not_adopted(
    three_shards: Path,
) -> None:
    path = shard_path(three_shards, 0).with_name("manifest.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [{**line, "num_rows": 10**6} for line in lines if "digests" not in line]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    with ShardStore(three_shards) as store:
        assert not store.versions()


def test_a_manifest_that_cannot_be_read_is_named(cache_dir: Path) -> None:
    path = cache_dir / "table" / "f1" / "manifest.jsonl"
    path.mkdir(parents=True)

    with pytest.raises(ConfigError, match="Is a directory") as caught:
        ShardStore(cache_dir)
    assert str(path) in str(caught.value)


def test_a_manifest_that_cannot_be_written_without_its_torn_line_is_named(
    three_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shard_path(three_shards, 0).with_name("manifest.jsonl")
    path.write_bytes(path.read_bytes()[:-10])

    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", no_room)
        with pytest.raises(ConfigError, match="No space left on device") as caught:
            ShardStore(three_shards)
    assert str(path) in str(caught.value)
    with ShardStore(three_shards) as store:
        assert indices(store) == [0, 1]


def test_a_manifest_for_which_there_is_no_room_leaves_no_half_of_it_behind(
    three_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ShardStore(three_shards) as store:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", no_room)
            store.drop(KEY, 1)
        assert indices(store) == [0, 2]
        assert not [name for name in files_of(store) if name.endswith(".tmp")]


# -- drop ------------------------------------------------------------------------------------------


def test_a_dropped_shard_is_gone_for_good(three_shards: Path) -> None:
    with ShardStore(three_shards) as store:
        before = store.stored_bytes
        dropped = store.versions()[KEY][1].sealed

        store.drop(KEY, 1)
        store.drop(KEY, 1)
        store.drop(OTHER, 0)

        assert indices(store) == [0, 2]
        assert store.stored_bytes == before - dropped.num_bytes
        assert not shard_path(three_shards, 1).exists()
    with ShardStore(three_shards) as store:
        assert indices(store) == [0, 2]


@pytest.mark.parametrize("indices", [(1,), (0, 2), (0, 1, 2)])
def test_a_dropped_shard_is_no_damaged_one_after_a_restart(
    three_shards: Path, indices: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with ShardStore(three_shards) as store:
        store.drop(KEY, *indices)
    with ShardStore(three_shards) as store:
        assert sorted(store.versions().get(KEY, {})) == sorted({0, 1, 2} - set(indices))
    assert not caplog.records


def test_shards_that_are_sealed_while_others_are_dropped_last(three_shards: Path) -> None:
    with ShardStore(three_shards) as store:
        sealing = [
            threading.Thread(target=store.seal, args=(KEY, index, stored(range(10))))
            for index in range(3, 20)
        ]
        for thread in sealing:
            thread.start()
        for index in range(3):
            store.drop(KEY, index)
        for thread in sealing:
            thread.join()
    with ShardStore(three_shards) as store:
        assert indices(store) == [*range(3, 20)]


def test_a_dropped_version_leaves_no_directory_behind(three_shards: Path) -> None:
    with ShardStore(three_shards) as store:
        store.seal(OTHER, 0, stored(range(10)))

        store.drop_version(KEY)
        assert files_of(store) == [
            *("table", "table/f2", "table/f2/manifest.jsonl", "table/f2/shard-00000.arrow")
        ]

        store.drop_version(OTHER)
        store.drop_version(OTHER)
        assert files_of(store) == []
        assert store.stored_bytes == 0


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Everything counts as large, and is freed when the event is set."""
    go_on, remove = threading.Event(), removals.remove

    def wait_and_remove(path: Path) -> None:
        if path.name.startswith(".removed-"):
            assert go_on.wait(WAIT_S)
        remove(path)

    monkeypatch.setattr(removals, "remove", wait_and_remove)
    monkeypatch.setattr(removals, "_AT_ONCE_BYTES", 0)
    yield go_on
    go_on.set()


def test_dropping_something_large_does_not_wait_until_it_is_freed(
    three_shards: Path, held_up: threading.Event
) -> None:
    with ShardStore(three_shards) as store:
        store.drop(KEY, 0)
        assert files_of(store) == [
            *("table", "table/f1", "table/f1/manifest.jsonl"),
            *("table/f1/shard-00001.arrow", "table/f1/shard-00002.arrow"),
        ]
        store.drop_version(KEY)
        assert files_of(store) == [] and store.stored_bytes == 0
        assert len(list(three_shards.glob(".removed-*/*"))) == 2
    held_up.set()
    with ShardStore(three_shards) as store:
        assert store.versions() == {} and not list(three_shards.glob(".removed-*"))


def test_a_shard_that_needs_the_room_of_what_was_dropped_waits_until_it_is_freed(
    three_shards: Path, held_up: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(three_shards)._replace(free=0)
    usage = {False: free, True: free._replace(free=free.total)}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage[held_up.is_set()])
    with ShardStore(three_shards) as store:
        store.drop_version(KEY)
        threading.Timer(0.1, held_up.set).start()
        store.seal(OTHER, 0, stored(range(10)))
        assert indices(store, OTHER) == [0]


def test_what_cannot_be_moved_away_is_removed_where_it_lies(
    three_shards: Path, held_up: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with ShardStore(three_shards) as store:
        monkeypatch.setattr(Path, "mkdir", full)
        store.drop_version(KEY)
        assert files_of(store) == []


def test_dropping_shard_by_shard_leaves_nothing_to_adopt(three_shards: Path) -> None:
    with ShardStore(three_shards) as store:
        for index in range(3):
            store.drop(KEY, index)
        assert store.versions() == {}
    with ShardStore(three_shards) as store:
        assert store.versions() == {}
        assert files_of(store) == []


@pytest.mark.parametrize(
    "end",
    [
        lambda store: store.drop(KEY, 0),
        lambda store: store.drop_version(KEY),
        lambda store: store.seal(KEY, 0, stored(range(100, 110))),
        lambda store: store.close(),
    ],
    ids=["drop", "drop_version", "replace", "close"],
)
def test_readers_keep_the_rows_they_have(
    store: ShardStore, end: Callable[[ShardStore], None]
) -> None:
    shard = store.seal(KEY, 0, stored(range(10)))
    rows = ResidentRows(KEY, shard.layout, 10, {0: shard})
    (view,) = rows.gather(np.arange(10), Selection(LAYOUT, []))

    end(store)

    assert gather(rows, [9, 0, 9]) == expected([9, 0, 9])
    assert view.equals(stored(range(10)))


# -- files that versions share ---------------------------------------------------------------------


def test_a_shared_file_takes_room_once_and_lasts_as_long_as_a_version_has_it(
    store: ShardStore, cache_dir: Path
) -> None:
    sealed = store.seal(KEY, 0, stored(range(10))).sealed
    size = store.stored_bytes

    shared = store.share(OTHER, replace(sealed, index=4), KEY, 0)

    assert os.path.samefile(shared.path, shard_path(cache_dir, 0))
    assert read_manifest(shard_path(cache_dir, 4, OTHER).parent / "manifest.jsonl") == [
        replace(sealed, index=4)
    ]
    assert (store.stored_bytes, len(store.sealed())) == (size, 1)
    store.drop_version(KEY)
    assert (store.stored_bytes, indices(store), indices(store, OTHER)) == (size, [], [4])
    assert store.shards(OTHER)[4].batch.equals(stored(range(10)))
    store.close()
    with ShardStore(cache_dir) as again:
        assert (again.stored_bytes, indices(again, OTHER)) == (size, [4])
        again.drop(OTHER, 4)
        assert (again.stored_bytes, files_of(again)) == (0, [])


def test_a_shared_file_fits_where_a_copy_would_not(cache_dir: Path) -> None:
    with ShardStore(cache_dir, 6_000) as store:
        sealed = store.seal(KEY, 0, stored(range(100))).sealed
        assert sealed.num_bytes > 6_000  # with its schema

        store.share(OTHER, sealed, KEY, 0)

        assert store.stored_bytes == sealed.num_bytes


def test_a_file_that_is_not_the_wanted_one_is_not_shared(
    store: ShardStore, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = store.seal(KEY, 0, stored(range(10))).sealed
    with pytest.raises(NodeUnavailableError, match="not on this node"):
        store.share(OTHER, sealed, KEY, 1)
    with pytest.raises(NodeUnavailableError, match="not on this node"):
        store.share(OTHER, replace(sealed, checksum="another"), KEY, 0)

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(NodeUnavailableError, match="cannot be shared: Operation not permitted"):
        store.share(OTHER, sealed, KEY, 0)
    assert indices(store, OTHER) == []
    assert not shard_path(cache_dir, 0, OTHER).parent.exists()


def test_a_directory_without_shards_stays_while_a_file_gets_a_name_in_it(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = [store.seal(KEY, index, stored(range(10))).sealed for index in range(2)]
    link = os.link

    def link_while_dropping(path: Path, name: Path) -> None:
        key = VersionKey("table", name.parent.name)
        dropping = threading.Thread(target=store.drop, args=(key, 7))
        dropping.start()
        dropping.join(0.2)  # it must wait for the link
        link(path, name)

    monkeypatch.setattr(os, "link", link_while_dropping)
    store.move(KEY, 0, OTHER, 0)
    store.share(VersionKey("table", "f3"), sealed[1], KEY, 1)

    assert (indices(store), indices(store, OTHER)) == ([1], [0])


def test_a_damaged_file_is_dropped_from_every_version_that_shares_it(store: ShardStore) -> None:
    first = store.seal(KEY, 0, stored(range(10)))
    store.seal(OTHER, 1, stored(range(20)))
    store.share(OTHER, first.sealed, KEY, 0)

    assert store.drop_this(KEY, first)

    assert (indices(store), indices(store, OTHER)) == ([], [1])
