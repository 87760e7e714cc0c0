"""`.ci/run`, with a make that only says what it was asked for."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
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


def test_an_extra_that_the_makefile_does_not_install_is_contained_in_another_one() -> None:
    """`make floor` needs the extra demo, which `make check` has installed before."""
    root = RUN.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    every = re.search(r"^EXTRAS := (.*)$", makefile, re.MULTILINE)
    assert every
    said = dict(re.findall(r"^AND_(\w+) := (.*)$", makefile, re.MULTILINE))

    def contained(extra: str) -> set[str]:
        requirements = " ".join(project["optional-dependencies"][extra])
        own = re.findall(rf"{project['name']}\[(.*?)\]", requirements)
        names = {name for names in own for name in names.split(",")}
        return names.union(*map(contained, names))

    assert said
    for extra, others in said.items():
        assert {*others.replace("$(EXTRAS)", every[1]).split()} <= contained(extra), extra
