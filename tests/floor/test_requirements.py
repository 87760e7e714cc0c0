"""``requirements.txt`` beside this file pins exactly the floors of ``pyproject.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_floor_environment_has_the_lowest_version_of_every_dependency() -> None:
    lines = (HERE / "requirements.txt").read_text("utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {pin.name: _version(pin, "==") for pin in pins}
    floors = [Requirement(line) for line in PROJECT["dependencies"]]
    assert {floor.name: pinned[floor.name] for floor in floors} == {
        floor.name: _version(floor, ">=") for floor in floors
    }


def _version(requirement: Requirement, operator: str) -> Version:
    (specifier,) = requirement.specifier
    assert specifier.operator == operator, requirement
    return Version(specifier.version)
