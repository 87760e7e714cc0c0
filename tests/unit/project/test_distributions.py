"""The source distribution holds every folder; the wheel holds packages and manifests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (
    "benchmarks",
    "cache_client",
    "cache_server",
    "docs",
    "examples",
    "protos",
    "runtimes",
    "tests",
)
BUILD = "from setuptools.build_meta import *\nbuild_sdist('dist')\nbuild_wheel('dist')"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this project with both distributions in ``dist/``."""
    copy = tmp_path_factory.mktemp("source") / "project"
    copy.mkdir()
    cached = shutil.ignore_patterns("__pycache__", "*-quick.*")
    for path in ROOT.iterdir():
        if path.name in FOLDERS:
            shutil.copytree(path, copy / path.name, ignore=cached)
        elif path.is_file():
            shutil.copy(path, copy)
    built = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )
    assert built.returncode == 0, built.stderr
    return copy


def test_the_source_distribution_holds_every_folder_whole(source: Path) -> None:
    (path,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        file.relative_to(source).as_posix()
        for folder in FOLDERS
        for file in (source / folder).rglob("*")
        if file.is_file()
    }
    assert expected <= names
    assert {"CHANGELOG.md", "LICENSE", "Makefile", "README.md", "constraints.txt"} <= names


def test_the_wheel_holds_packages_and_manifests_only(source: Path) -> None:
    (path,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == {
        "cache_client",
        "cache_protocol",
        "cache_runtimes",
        "cache_server",
    }
    assert {name.rpartition(".")[2] for name in names} == {"py", "pyi", "typed", "yaml"}
