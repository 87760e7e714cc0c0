"""The source distribution holds every folder; the wheel holds packages and manifests.

An image builds the same wheel.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from cache_runtimes import MANIFESTS
from tests.dockerfiles import DOCKERFILES, copied_for_the_wheel

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
BUILD = "from setuptools.build_meta import *"


def build(folder: Path, *distributions: str) -> None:
    """Runs functions of setuptools in ``folder``, which write into its ``dist/``."""
    program = "\n".join([BUILD, *(f"{name}('dist')" for name in distributions)])
    built = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )
    assert built.returncode == 0, built.stderr


def files_of_wheel(folder: Path) -> set[str]:
    (path,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


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
    build(copy, "build_sdist", "build_wheel")
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
    names = files_of_wheel(source)
    assert {name.partition("/")[0] for name in names} == {
        "cache_client",
        "cache_protocol",
        "cache_runtimes",
        "cache_server",
    }
    for pattern in ("*tests/*", "*results/*", "*benchmarks/*", "*/manifests/cache_runtimes/*"):
        assert not [name for name in names if fnmatch(name, pattern)]
    assert {name.rpartition(".")[2] for name in names} == {"py", "pyi", "typed", "yaml"}


def test_the_wheel_holds_every_manifest(source: Path) -> None:
    manifests = {path.relative_to(MANIFESTS).as_posix() for path in MANIFESTS.rglob("*.yaml")}
    assert "torch-distributed-data-cache/runtime.yaml" in manifests
    in_wheel = {name for name in files_of_wheel(source) if "/manifests/" in name}
    assert {f"cache_runtimes/manifests/{name}" for name in manifests} <= in_wheel
    assert {name.rpartition(".")[2] for name in in_wheel} == {"yaml"}


def test_an_image_builds_the_same_wheel_from_the_files_that_it_copies(
    source: Path, tmp_path: Path
) -> None:
    server, *_ = DOCKERFILES  # `test_images` checks that all of them copy the same
    for name in copied_for_the_wheel(server):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, tmp_path)
        else:  # .dockerignore leaves out the Dockerfiles
            ignore = shutil.ignore_patterns("__pycache__", "Dockerfile")
            shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    build(tmp_path, "build_wheel")
    assert files_of_wheel(tmp_path) == files_of_wheel(source)
