"""A short soak: `make soak` is the long one."""

from __future__ import annotations

from pathlib import Path

from benchmarks.trials.soak import soak


def test_readers_get_right_rows_while_nodes_die_and_sources_change(tmp_path: Path) -> None:
    findings = soak(tmp_path, seconds=4.0, seed=1)

    assert findings.wrong == []
    assert findings.epochs > 0
