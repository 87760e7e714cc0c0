"""``kubectl kustomize``, for tests of what users build from runtimes/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from cache_runtimes import MANIFESTS

Json = dict[str, Any]

KUBECTL = Path(sys.executable).with_name("kubectl")
QUICK = {**os.environ, "GOGC": "off"}  # a program of Go ends before its garbage is worth a look


def build(folder: Path) -> dict[str, Json]:
    """The objects of a kustomization by kind and name."""
    done = subprocess.run(
        [str(KUBECTL), "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env=QUICK,
    )
    assert done.returncode == 0, done.stderr
    built = list(yaml.load_all(done.stdout, yaml.CSafeLoader))
    found = {f"{thing['kind']}/{thing['metadata']['name']}": thing for thing in built}
    assert len(found) == len(built)
    return found


def customised(folder: Path, **fields: Any) -> dict[str, Json]:
    """What a user's kustomization builds; its folders are relative to runtimes/."""
    for kind in ("resources", "components"):
        fields[kind] = [os.path.relpath(MANIFESTS / name, folder) for name in fields.get(kind, ())]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(fields), encoding="utf-8")
    return build(folder)
