"""The script of the TorchTune runtime that writes a cached dataset to Parquet, as a process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from cache_protocol.wire.credentials import find_token
from cache_runtimes import MANIFESTS
from tests.manifests import container_named, env_of, job_named, pod_of, read


def start_export(
    endpoint: str, folder: Path, index: int = 0, limit_bytes: int | None = None
) -> subprocess.Popen[str]:
    """As the init container of the pod ``index`` runs it.

    Args:
        limit_bytes: of its files, beyond which a write fails.
    """
    runtime = read(MANIFESTS / "torchtune-qwen2.5-1.5b/runtime.yaml")
    container = container_named(pod_of(job_named(runtime, "node")), "export-dataset")
    assert container["command"] == ["python", "-c"]
    told = {
        "CACHE_ENDPOINT": endpoint,
        "EXPORT_DIR": str(folder),
        "JOB_COMPLETION_INDEX": str(index),
    }
    assert told.keys() <= env_of(container).keys()

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.Popen(
        [sys.executable, "-c", *container["args"]],
        env={**os.environ, **told, "CACHE_TOKEN": find_token(endpoint) or ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    )


def run_export(endpoint: str, folder: Path, index: int = 0) -> tuple[int, str, str]:
    """Its exit code, output and errors."""
    with start_export(endpoint, folder, index) as process:
        output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors
