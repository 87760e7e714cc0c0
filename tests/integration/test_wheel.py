"""The wheel of this project: every package and every manifest, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import pytest

from cache_runtimes import MANIFESTS
from tests.dockerfiles import DOCKERFILES, copied_for_the_wheel

ROOT = MANIFESTS.parent
NOT_IN_A_CHECKOUT = shutil.ignore_patterns(
    *(".*", "build", "dist", "*.egg-info", "__pycache__", "*.pyc")
)
PACKAGES = {"cache_client", "cache_protocol", "cache_runtimes", "cache_server"}


def build(source: Path, folder: Path) -> list[str]:
    """The files of the wheel of ``source``, which the build writes into."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
            *("--disable-pip-version-check", f"--wheel-dir={folder}", str(source)),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        return file.namelist()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The files of the wheel of the whole checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT, folder / "source", ignore=NOT_IN_A_CHECKOUT)
    return build(folder / "source", folder / "wheels")


def test_the_wheel_holds_every_manifest(files: list[str]) -> None:
    shipped = {path.parent.name for path in MANIFESTS.glob("*/runtime.yaml")}
    assert "torch-distributed-data-cache" in shipped
    assert {f"cache_runtimes/manifests/{name}/runtime.yaml" for name in shipped} <= {*files}
    manifests = {path.relative_to(MANIFESTS).as_posix() for path in MANIFESTS.rglob("*.yaml")}
    assert {f"cache_runtimes/manifests/{name}" for name in manifests} <= {*files}


def test_the_wheel_holds_the_packages_and_nothing_else(files: list[str]) -> None:
    roots = {PurePosixPath(name).parts[0] for name in files}
    assert {root for root in roots if not root.endswith(".dist-info")} == PACKAGES
    for pattern in ("*tests/*", "*results/*", "*benchmarks/*", "*/manifests/cache_runtimes/*"):
        assert not [name for name in files if fnmatch(name, pattern)]
    assert {PurePosixPath(name).suffix for name in files if "/manifests/" in name} == {".yaml"}


def test_an_image_builds_the_same_wheel_from_the_files_that_it_copies(
    files: list[str], tmp_path: Path
) -> None:
    server, *_ = DOCKERFILES  # `test_images` checks that all of them copy the same
    source = tmp_path / "source"
    source.mkdir()
    for name in copied_for_the_wheel(server):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, source)
        else:  # .dockerignore leaves out the Dockerfiles
            ignore = shutil.ignore_patterns("__pycache__", "Dockerfile")
            shutil.copytree(ROOT / name, source / name, ignore=ignore)
    assert sorted(build(source, tmp_path / "wheels")) == sorted(files)
