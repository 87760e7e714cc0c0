"""A load as a person sees it: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from cache_protocol.cli.load_bar import progress_bar
from cache_protocol.wire.load_progress import LoadReport


def report(rows: int, done: int, total: int) -> LoadReport:
    percent = 100 * done // total if total else None
    return LoadReport("houses", rows, done, total, 0, percent, None)


def shown(*reports: LoadReport) -> list[str]:
    """What a terminal of 80 columns is sent, without colours and movements."""
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with progress_bar("houses", console=console) as show:
        for each in reports:
            show(each)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    return [line for line in re.split(r"[\r\n]+", plain) if line]


def test_a_terminal_gets_a_bar_that_fits_it() -> None:
    *_, last = shown(report(10, 1, 12), report(6_001_215, 12, 12))
    assert last.startswith("load houses ━")
    assert "12/12 shards, 6,001,215 rows" in last
    assert len(last) <= 80


def test_the_reason_of_a_waiting_load_is_printed_once_above_its_bar() -> None:
    waits = replace(report(10, 1, 12), waits="shard 4 waits for room [1]")
    lines = shown(waits, waits, report(20, 2, 12))
    assert lines.count("shard 4 waits for room [1]") == 1


def test_the_bar_of_a_query_whose_shards_are_not_known_has_no_end() -> None:
    *_, last = shown(report(0, 0, 0))
    assert "0/? shards, 0 rows" in last


def test_without_a_terminal_lines_are_printed_instead_of_a_bar() -> None:
    screen, lines = StringIO(), list[str]()
    console = Console(file=screen, force_terminal=False)
    with progress_bar("houses", lines.append, console) as show:
        show(report(5, 1, 2))
        show(report(10, 2, 2))
    assert lines == [str(report(5, 1, 2)), str(report(10, 2, 2))]
    assert screen.getvalue() == ""


@pytest.mark.parametrize("closed", [True, False])
def test_a_load_goes_on_where_its_lines_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", None if closed else full)
        with progress_bar("houses") as show:
            show(report(5, 1, 2))
            show(report(10, 2, 2))
        with suppress(OSError):  # of what is left in it
            full.close()
