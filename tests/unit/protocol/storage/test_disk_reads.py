"""`DiskReads`: which tables are read page by page, and how many rows at once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cache_protocol.storage.disk_reads import DiskReads

GB = 10**9
ROWS = 16_000_000
ROW_BYTES = 136
PAGE = 4096


def reads(memory_bytes: int, num_bytes: int = ROWS * ROW_BYTES) -> DiskReads:
    return DiskReads(num_bytes, ROWS, memory_bytes)


def test_a_table_that_fits_has_read_ahead_until_it_was_read_twice() -> None:
    disk = reads(4 * GB)
    for _ in range(4):
        assert not disk.is_exact
        disk.note(1000, GB, 0.1)
    disk.note(1000, GB, 0.1)
    assert disk.is_exact


def test_a_table_that_does_not_fit_is_read_exactly_from_its_first_row_on() -> None:
    assert reads(GB).is_exact


def test_rows_in_memory_are_taken_all_at_once() -> None:
    disk = reads(4 * GB)
    disk.note(disk.rows_at_once(30_000), 0, 0.001)
    assert not disk.is_cold
    assert disk.rows_at_once(30_000) == 30_000


def test_rows_from_a_disk_are_so_few_that_they_take_a_fraction_of_a_second() -> None:
    disk = reads(GB)
    for _ in range(5):
        rows = disk.rows_at_once(30_000)
        disk.note(rows, rows * PAGE, rows / 4000)
    assert rows / 4000 == pytest.approx(0.25, rel=0.01)


def test_some_rows_that_are_in_memory_do_not_make_a_large_table_count_as_such() -> None:
    disk = reads(GB)
    disk.note(1000, PAGE, 0.01)
    disk.note(1000, 0, 0.01)
    assert disk.is_cold
    for _ in range(1000):
        disk.note(1000, 0, 0.01)
    assert not disk.is_cold
    disk.note(1000, PAGE, 0.01)
    assert disk.is_cold


def test_random_rows_from_a_disk_are_told_once_with_their_rate_and_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = reads(GB)
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            disk.note(10_000, 10_000 * PAGE, 0.5)
    (record,) = caplog.records
    assert "20,000 a second" in record.getMessage()
    assert "2.2 GB" in record.getMessage() and "shuffle_block_size" in record.getMessage()


def test_rows_in_order_of_the_disk_are_no_cause_for_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = reads(GB)
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            disk.note(1_000_000, 1_000_000 * ROW_BYTES, 0.5)
    assert not caplog.records


def test_files_in_memory_need_no_look_at_a_disk() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("this machine has no tmpfs")
    assert DiskReads.of_files(shm / "table", 10**15, 1) is None
