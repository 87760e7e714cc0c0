"""The last release beside this one: its wheel, its nodes and its clients, as other processes.

Its wheel is built from a commit of this repository. A checkout without that commit skips the tests.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from cache_server.local import LocalNode

# The commit that clients and nodes in use were built from. A release sets it to its tag.
LAST_RELEASE = "269737f43e97ab3d4d5db72601da0c14658d5275"
_NEWER = "--memory-share="  # of a `LocalCluster`; that release does not know it
_ROOT = Path(__file__).resolve().parents[1]
_STEPS = _ROOT / "tests" / "steps_of_any_release.py"


@functools.cache
def last_release() -> Path:
    """The packages of the last release, unpacked: a path for ``PYTHONPATH``. Built once.

    Skips the test in a checkout without the commit, such as a shallow clone.
    """
    git = ["git", "-C", str(_ROOT)]
    found = subprocess.run(
        [*git, "cat-file", "-e", f"{LAST_RELEASE}^{{commit}}"], capture_output=True
    )
    if found.returncode:
        pytest.skip(f"this checkout has no commit {LAST_RELEASE[:12]}: git fetch --unshallow")
    folder = _temporary_folder()
    source, unpacked = folder / "source", folder / "packages"
    source.mkdir()
    archive = subprocess.run([*git, "archive", LAST_RELEASE], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
    subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
            "--no-index", "--wheel-dir", str(folder), str(source),
        ],
        check=True,
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packages:
        packages.extractall(unpacked)
    return unpacked


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="last-release-")  # removed at the end of the process


def _temporary_folder() -> Path:
    return Path(_folder().name)


def _environment(is_old: bool) -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(last_release() if is_old else "")}


def run_as(node: LocalNode, *, is_old: bool) -> None:
    """Lets a node of a `LocalCluster` run as this release or the last one from its next start."""

    def spawn(command: Sequence[str], log_file: IO[bytes]) -> None:
        _spawn(node, command, log_file, is_old=is_old)

    node._spawn = spawn  # type: ignore[method-assign]


@contextmanager
def nodes_are_old(is_old: Callable[[Sequence[str]], bool]) -> Iterator[None]:
    """Nodes that are started here are of the last release where their command says so."""

    def spawn(node: LocalNode, command: Sequence[str], log_file: IO[bytes]) -> None:
        _spawn(node, command, log_file, is_old=is_old(command))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalNode, "_spawn", spawn)
        yield


def _spawn(node: LocalNode, command: Sequence[str], log_file: IO[bytes], *, is_old: bool) -> None:
    if is_old:
        command = [each for each in command if not each.startswith(_NEWER)]
    node._process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file, text=True,
        env=_environment(is_old), cwd=node.cache_dir,
    )  # fmt: skip


class ReleaseClient:
    """A process with the client of one release, which does one step after the other."""

    def __init__(self, *, is_old: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_STEPS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=_environment(is_old), cwd=_temporary_folder(),
        )  # fmt: skip

    def __enter__(self) -> ReleaseClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def do(self, step: str, endpoint: str, **arguments: Any) -> Any:
        """What a function of `steps_of_any_release` returns; its error fails the test."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"step": step, "endpoint": endpoint, **arguments}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process ended"}')
        assert "error" not in answer, answer["error"]
        return answer["result"]
