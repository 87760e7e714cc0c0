"""``kubectl kustomize``, for tests of what users build from runtimes/."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache_runtimes import MANIFESTS

Json = dict[str, Any]

KUBECTL = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(
    KUBECTL is None, reason="needs kubectl, whose kustomize builds the overlays"
)


def build(folder: Path) -> dict[str, Json]:
    """The objects of a kustomization by kind and name."""
    assert KUBECTL is not None
    done = subprocess.run(
        [KUBECTL, "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
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
