"""The import names: none is a folder that users have, and every package is in the wheel."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "setuptools"
]


def test_a_project_with_folders_named_protos_and_runtimes_imports_every_package(
    tmp_path: Path,
) -> None:
    for name in ("protos", "runtimes", "tests", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
    program = (
        "import cache_client, cache_server, cache_runtimes, cache_protocol\n"
        "import protos, runtimes\n"
        "assert protos.mine and runtimes.mine"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr


def test_every_folder_with_modules_is_a_package_of_the_wheel() -> None:
    folders = SETTINGS["package-dir"]
    found = {"cache_runtimes.manifests"}
    for name in ("cache_client", "cache_protocol", "cache_runtimes", "cache_server"):
        root = ROOT / folders.get(name, name)
        found |= {
            ".".join((name, *path.parent.relative_to(root).parts)) for path in root.rglob("*.py")
        }
    assert sorted(found) == SETTINGS["packages"]
