"""``helm template``, for tests of the chart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from cache_runtimes import MANIFESTS
from tests.kustomize import QUICK

Json = dict[str, Any]

HELM = Path(sys.executable).with_name("helm")
CHART = MANIFESTS / "chart"


def helm(*values: str, with_tests: bool = False) -> dict[str, Json]:
    """The objects of the chart by kind and name.

    Args:
        values: each ``PATH=JSON``.
        with_tests: also those of ``helm test``.
    """
    done = template(*values, with_tests=with_tests)
    assert done.returncode == 0, done.stderr
    built = [thing for thing in yaml.load_all(done.stdout, yaml.CSafeLoader) if thing]
    found = {f"{thing['kind']}/{thing['metadata']['name']}": thing for thing in built}
    assert len(found) == len(built)
    return found


def template(*values: str, with_tests: bool = False) -> subprocess.CompletedProcess[str]:
    """``helm template`` with values, each ``PATH=JSON``."""
    command = [str(HELM), "template", "data-cache", str(CHART)]
    command += [] if with_tests else ["--skip-tests"]
    for value in values:
        command += ["--set-json", value]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=QUICK)
