"""Damaged files of every format: see `benchmarks.trials.damaged_files`, which tries thousands."""

from __future__ import annotations

from pathlib import Path

from benchmarks.trials import damaged_files
from tests.object_store import S3Server

CASES, IN_A_STORE = 240, 40


def test_a_damaged_file_is_read_or_refused_by_name_and_ends_no_process(tmp_path: Path) -> None:
    counts = damaged_files.run(range(CASES), 0, tmp_path, store=None)
    assert counts["refused"] > CASES / 2
    assert sum(counts.values()) == CASES


def test_damaged_objects_of_a_store_are_refused_by_name_too(tmp_path: Path) -> None:
    with S3Server() as store:
        counts = damaged_files.run(range(CASES, CASES + IN_A_STORE), 0, tmp_path, store=store)
    assert sum(counts.values()) == IN_A_STORE
