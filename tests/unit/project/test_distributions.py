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
PACKAGES = {  # import name -> folder
    "cache_client": "cache_client",
    "cache_protocol": "protos/cache_protocol",
    "cache_runtimes": "runtimes/cache_runtimes",
    "cache_server": "cache_server",
}
BUILD = "from hatchling.build import *"


def build(folder: Path, *distributions: str) -> None:
    """Runs functions of hatchling in ``folder``, which write into its ``dist/``."""
    program = "\n".join([BUILD, *(f"{name}('dist')" for name in distributions)])
    built = subprocess.run(
        [sys.executable, "-B", "-c", program],  # no byte code of the hook beside it
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
            shutil.copytree(path, copy / path.name, ignore=cached, symlinks=True)
        elif path.is_file():
            shutil.copy(path, copy)
    build(copy, "build_sdist", "build_wheel")
    return copy


def test_the_source_distribution_holds_every_folder_whole(source: Path) -> None:
    (path,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = [source / folder for folder in FOLDERS]
    charted = source / "runtimes" / "chart" / "manifests"  # links to other folders
    expected = {
        file.relative_to(source).as_posix()
        for folder in (*folders, *charted.iterdir())
        for file in folder.rglob("*")
        if file.is_file()
    }
    assert len([name for name in expected if "chart/manifests/" in name]) > 20
    assert expected <= names
    assert {"CHANGELOG.md", "LICENSE", "Makefile", "README.md", "constraints.txt"} <= names


def test_the_wheel_of_the_source_distribution_is_the_same(source: Path, tmp_path: Path) -> None:
    (path,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    build(unpacked, "build_wheel")
    assert files_of_wheel(unpacked) == files_of_wheel(source)


def test_the_wheel_holds_every_module_of_every_package(source: Path) -> None:
    modules = {
        f"{name}/{path.relative_to(source / folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for suffix in ("py", "pyi", "typed")
        for path in (source / folder).rglob(f"*.{suffix}")
    }
    assert len(modules) > 200
    assert modules == {name for name in files_of_wheel(source) if "/manifests/" not in name}


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for name in PACKAGES.values() for path in (ROOT / name).rglob("*.py")}
    assert len(folders) > 20
    assert [path for path in folders if not (path / "__init__.py").is_file()] == []


def test_the_wheel_holds_packages_and_manifests_only(source: Path) -> None:
    names = files_of_wheel(source)
    assert {name.partition("/")[0] for name in names} == set(PACKAGES)
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
