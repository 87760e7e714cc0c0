"""Damaged files of JSON and CSV: read or refused by name; no process ends."""

from __future__ import annotations

import pytest

from benchmarks.trials import text_fuzz


def test_damaged_files_end_no_process_and_each_refusal_names_its_file(
    capfd: pytest.CaptureFixture[str],
) -> None:
    text_fuzz.main(["--cases", "80"])

    assert "80 damaged files" in capfd.readouterr().out
