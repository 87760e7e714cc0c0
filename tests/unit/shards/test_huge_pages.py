"""Shards that are moved to huge pages, where this machine can do that."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cache_protocol.storage.machine import is_in_memory
from cache_protocol.storage.mapped_table import MappedTable
from cache_protocol.storage.shard_files import MappedShard, SealedShard, Selection
from cache_protocol.storage.virtual_memory import AddressRange, huge_page_bytes
from cache_server.shards.huge_pages import HugePages
from cache_server.shards.packing import ShardBuilder
from tests.waiting import wait_until

PAGE = huge_page_bytes()
WAIT_S = 60.0
ROWS = 40_000  # of 136 bytes: two whole pages, and a part of one
SCHEMA = pa.schema([("x", pa.list_(pa.float32(), 32)), ("label", pa.int64())])


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder on a tmpfs whose files can lie in huge pages."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or not is_in_memory(shm):
        pytest.skip("/dev/shm is no tmpfs that can be written to")
    folder = Path(tempfile.mkdtemp(prefix="cache-test-", dir=shm))
    try:
        shard = sealed(folder, 0)
        if shard.file.size < 2 * PAGE:
            pytest.skip(f"huge pages of {PAGE} bytes are larger than these shards")
        with HugePages(folder, lambda: [shard], lambda: True) as huge_pages:
            huge_pages.move_all()
    except OSError as error:
        pytest.skip(f"this kernel does not move files to huge pages: {error}")
    else:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is in use, or for which memory is short, may stay small for a moment."""
    monkeypatch.setattr("cache_server.shards.huge_pages._TRY_AGAIN_S", 0.0)
    monkeypatch.setattr("cache_server.shards.huge_pages._LOOK_EVERY_S", 0.01)


def moved(folder: Path, *shards: MappedShard) -> HugePages:
    """Who has moved all whole pages of these shards."""
    huge_pages = HugePages(folder, lambda: shards, lambda: True)
    move(huge_pages, sum(shard.file.size // PAGE * PAGE for shard in shards))
    return huge_pages


def move(huge_pages: HugePages, num_bytes: int) -> None:
    """Moves pages until so many bytes, and no more, are in huge ones."""

    def are_moved() -> bool:
        huge_pages.move_all()
        return huge_pages.num_bytes >= num_bytes

    wait_until(are_moved, WAIT_S, "pages are moved")
    assert huge_pages.num_bytes == num_bytes


def rows_of(index: int) -> pa.RecordBatch:
    x = np.random.default_rng(index).standard_normal(ROWS * 32, dtype=np.float32)
    label = pa.array(np.arange(ROWS) + index * ROWS)
    return pa.record_batch([pa.FixedSizeListArray.from_arrays(x, 32), label], schema=SCHEMA)


def sealed(folder: Path, index: int) -> MappedShard:
    """A shard without a store around it, in small pages."""
    builder = ShardBuilder(SCHEMA)
    builder.append(rows_of(index))
    stored = builder.finish()
    path = folder / f"{index}.arrow"
    with pa.ipc.new_file(str(path), stored.schema) as writer:
        writer.write_batch(stored)
    return MappedShard(SealedShard(index, ROWS, path.stat().st_size, ""), path)


def attached(*shards: MappedShard) -> MappedTable:
    starts = np.arange(len(shards), dtype=np.int64) * ROWS
    table = MappedTable(shards[0].layout, starts, [ROWS] * len(shards))
    for position, shard in enumerate(shards):
        table.attach(position, shard)
    return table


def check_rows(table: MappedTable, shards: int) -> None:
    ids = np.random.default_rng(9).integers(0, shards * ROWS, 5000)
    layout = ShardBuilder(SCHEMA).layout
    found = table.gather(ids, ids // ROWS, Selection(layout, []))
    every = pa.Table.from_batches([rows_of(index) for index in range(shards)])
    assert pa.Table.from_batches([layout.unpack(found)]).equals(every.take(pa.array(ids)))


def bytes_by_huge_pages() -> int:
    """What this process has mapped of files in huge pages, by their own entries."""
    maps = Path("/proc/self/smaps").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in maps if line.startswith("ShmemPmdMapped:"))


def test_all_whole_pages_are_moved_and_readers_find_the_same_rows(memory: Path) -> None:
    shards = [sealed(memory, index) for index in range(2)]
    before = attached(*shards)
    check_rows(before, 2)

    moved(memory, *shards)

    check_rows(before, 2)
    check_rows(attached(*shards), 2)


def test_readers_have_them_by_their_own_entries(memory: Path) -> None:
    shards = [sealed(memory, index) for index in range(2)]
    moved(memory, *shards)
    before = bytes_by_huge_pages()

    table = attached(*shards)
    check_rows(table, 2)

    assert bytes_by_huge_pages() - before >= 2 * PAGE  # of the features: one page a shard, at least


def test_rows_are_right_while_their_pages_are_moved(memory: Path) -> None:
    shards = [sealed(memory, index) for index in range(4)]
    table = attached(*shards)
    thread = threading.Thread(target=moved, args=(memory, *shards))
    thread.start()
    check_rows(table, 4)
    thread.join(2 * WAIT_S)

    check_rows(table, 4)


def test_nothing_is_moved_while_something_is_loaded(memory: Path) -> None:
    shards = [sealed(memory, 0)]
    idle = threading.Event()
    with HugePages(memory, lambda: shards, idle.is_set) as huge_pages:
        huge_pages.move_all()
        assert huge_pages.num_bytes == 0

        idle.set()
        huge_pages.start()
        wait_until(lambda: huge_pages.num_bytes, WAIT_S, "the shard is moved once it may be")


def test_shards_that_come_later_are_moved_and_those_that_go_do_not_count(memory: Path) -> None:
    shards = [sealed(memory, 0)]
    with HugePages(memory, lambda: list(shards), lambda: True) as huge_pages:
        huge_pages.start()
        wait_until(lambda: huge_pages.num_bytes == 2 * PAGE, WAIT_S, "the first is moved")
        shards.append(sealed(memory, 1))
        wait_until(lambda: huge_pages.num_bytes == 4 * PAGE, WAIT_S, "the second is moved")

        del shards[0]

        assert huge_pages.num_bytes == 2 * PAGE


def test_a_shard_that_is_dropped_is_not_held(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [sealed(memory, 0), sealed(memory, 1)]
    asked: list[int] = []

    def dropping(self: AddressRange, at: int, size: int) -> None:
        asked.append(size)
        shards.clear()  # only the mover holds the first one

    monkeypatch.setattr(AddressRange, "collapse", dropping)
    HugePages(memory, lambda: shards, lambda: True).move_all()

    assert asked == [2 * PAGE]


def test_a_page_that_cannot_be_moved_stays_small_and_others_are_moved(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [sealed(memory, 0)]
    collapse = AddressRange.collapse

    def one_fails(self: AddressRange, at: int, size: int) -> None:
        if at <= PAGE < at + size:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        collapse(self, at, size)

    monkeypatch.setattr(AddressRange, "collapse", one_fails)
    move(HugePages(memory, lambda: shards, lambda: True), PAGE)
    check_rows(attached(*shards), 1)


def test_a_page_that_is_refused_for_good_keeps_none_of_another_shard_from_being_moved(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [sealed(memory, index) for index in range(3)]
    refused: list[AddressRange] = []
    collapse = AddressRange.collapse

    def second_is_refused(self: AddressRange, at: int, size: int) -> None:
        if huge_pages.num_bytes == 2 * PAGE and not refused:
            refused.append(self)
        if self in refused:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        collapse(self, at, size)

    monkeypatch.setattr(AddressRange, "collapse", second_is_refused)
    huge_pages = HugePages(memory, lambda: shards, lambda: True)
    move(huge_pages, 4 * PAGE)


@pytest.mark.parametrize(("after_s", "tries"), [(0.0, 2), (3600.0, 1)])
def test_what_could_not_be_moved_is_tried_again_after_a_while(
    memory: Path, monkeypatch: pytest.MonkeyPatch, after_s: float, tries: int
) -> None:
    asked: list[int] = []

    def out_of_memory(self: AddressRange, at: int, size: int) -> None:
        asked.append(size)
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(AddressRange, "collapse", out_of_memory)
    monkeypatch.setattr("cache_server.shards.huge_pages._TRY_AGAIN_S", after_s)
    shards = [sealed(memory, 0)]
    huge_pages = HugePages(memory, lambda: shards, lambda: True)

    huge_pages.move_all()
    huge_pages.move_all()

    assert asked == tries * [2 * PAGE, PAGE, PAGE]


def test_a_kernel_without_them_is_named_once(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(self: AddressRange, at: int, size: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(AddressRange, "collapse", cannot)
    shards = [sealed(memory, 0)]
    with (
        caplog.at_level(logging.INFO),
        HugePages(memory, lambda: shards, lambda: True) as huge_pages,
    ):
        huge_pages.start()
        wait_until(lambda: "no huge pages" in caplog.text, WAIT_S, "it is told")

    assert caplog.text.count("no huge pages: Invalid argument") == 1
    assert huge_pages.num_bytes == 0


def test_shards_on_a_disk_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cache_server.shards.huge_pages.is_in_memory", lambda directory: False)
    shards = [sealed(tmp_path, 0)]
    with (
        caplog.at_level(logging.INFO),
        HugePages(tmp_path, lambda: shards, lambda: True) as huge_pages,
    ):
        huge_pages.start()
        wait_until(lambda: "is not in memory" in caplog.text, WAIT_S, "it is told")

    assert huge_pages.num_bytes == 0
