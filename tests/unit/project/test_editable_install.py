"""Type checkers and editors find the packages of `pip install -e` outside of the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.checkers,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("mypy", "pyright")),
        reason="no type checkers; make check installs them",
    ),
]

PROGRAM = """
from cache_client import CacheClient
from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.v1.cache_pb2 import DatasetInfo
from cache_runtimes.local.supported import check_supported
from cache_server import LocalCluster

reveal_type(CacheClient("").load)
reveal_type(DatasetSpec("t", "a.parquet").name)
reveal_type(DatasetInfo().fingerprint)
reveal_type(check_supported)
reveal_type(LocalCluster(nodes=2).endpoint)
"""
TYPES = ("DatasetSpec", "str", "str", "dict[str, Any]", "str")
# Large libraries, which say nothing of where ours are.
SETTINGS = """[mypy]
strict = true
[mypy-boto3.*,grpc.*,numpy.*,pyarrow.*,pydantic.*,torch.*]
follow_imports = skip
ignore_missing_imports = true
"""


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def test_mypy_finds_every_package(program: Path) -> None:
    (program.parent / "mypy.ini").write_text(SETTINGS, encoding="utf-8")
    found = run(program.parent, "mypy", "program.py")
    notes = [line for line in found.splitlines() if "Revealed type" in line]
    assert len(notes) == len(TYPES)
    assert all(name in note for name, note in zip(TYPES, notes, strict=True)), notes


def test_pyright_finds_every_package(program: Path) -> None:
    python = f"{sysconfig.get_path('scripts')}/python"
    found = run(program.parent, "pyright", "--outputjson", "--pythonpath", python, "program.py")
    notes = [each["message"] for each in json.loads(found)["generalDiagnostics"]]
    assert len(notes) == len(TYPES)
    assert all(name in note for name, note in zip(TYPES, notes, strict=True)), notes
