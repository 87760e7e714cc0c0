"""The import names: none is a folder that users have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


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
