"""`.ci/run`, with a make that only says what it was asked for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[3] / ".ci" / "run"
# Root would install packages.
PROGRAMS = {
    "id": "echo 1000",
    "make": 'mkdir -p "$VENV"\necho "$1 $VENV"\n[ "$1" != "$FAILING" ]',
}


TARGETS = ["check", "floor", "docs", "test", "test-frameworks", "e2e"]


@pytest.mark.parametrize("failing", ["", *TARGETS])
def test_ci_makes_a_virtual_environment_of_its_own_and_removes_it(
    tmp_path: Path, failing: str
) -> None:
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "TMPDIR": str(temporary),
        "VENV": "somebody/else's",
        "FAILING": failing,
    }

    done = subprocess.run([RUN], env=environ, capture_output=True, text=True, timeout=60)

    calls = [line.split() for line in done.stdout.splitlines()]
    assert [target for target, _ in calls] == (
        TARGETS[: TARGETS.index(failing) + 1] if failing else TARGETS
    )
    assert len({venv for _, venv in calls}) == 1
    assert all(Path(venv).is_relative_to(temporary) for _, venv in calls)
    assert (done.returncode != 0) == bool(failing)
    assert not list(temporary.iterdir())
