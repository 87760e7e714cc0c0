"""Tries out a server image as a pod runs it.

A container with a random user, a read-only root and no capabilities loads a table and serves every
row. SIGTERM ends it with exit code 143.
"""

from __future__ import annotations

import random
import subprocess
import time

NUM_ROWS = 20_000
READY_DEADLINE_S = 120.0
CALL_TIMEOUT_S = 120.0
TERMINATED = 143

# The node is process 1, as in a pod.
_SERVE = f"""
python -c 'print("id,half"); [print(f"{{i}},{{i / 2}}") for i in range({NUM_ROWS})]' > /tmp/rows.csv
exec cache-server serve --cache-dir=/cache --load-from-env --signal-exit-code={TERMINATED}
"""
_READ = f"""
from importlib.util import find_spec
from cache_client import CacheClient

assert find_spec("torch") is None, "torch is installed"
rows = CacheClient("grpc://127.0.0.1:50051").head("rows", {NUM_ROWS})
assert rows.column("id").to_pylist() == list(range({NUM_ROWS}))
"""
# The node does not listen yet, or has not planned or loaded the dataset yet.
_NOT_YET = ("NodeUnavailableError", "DatasetNotFoundError", "NotReadyError")


class SmokeError(Exception):
    """An image that does not do what it must."""


def try_server(engine: str, image: str) -> str:
    """Runs a server image; returns what was tried.

    Args:
        engine: ``docker`` or ``podman``.

    Raises:
        SmokeError: the image does not do what it must; has the log of the container.
    """
    user = random.randrange(10_000, 60_000)
    started = _call(
        *(engine, "run", "--detach", "--read-only", f"--user={user}:0"),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *("--tmpfs=/tmp:mode=1777", "--tmpfs=/cache:mode=1777", "--env=HOME=/tmp"),
        *("--env=STORAGE_URI=file:///tmp/rows.csv", "--env=CACHE_DATASET=rows"),
        *(image, "sh", "-ec", _SERVE),
    )
    if started.returncode != 0:
        raise SmokeError(f"{image} does not start: {started.stderr}")
    container = started.stdout.strip()
    try:
        _wait_for_rows(engine, container)
        _call(engine, "stop", "-t", "30", container)
        state = _call(engine, "inspect", "--format={{.State.ExitCode}}", container).stdout.strip()
        if state != str(TERMINATED):
            raise SmokeError(_with_log(engine, container, f"SIGTERM ended it with {state}"))
    finally:
        _call(engine, "rm", "--force", container)
    return f"user {user} loaded and read {NUM_ROWS} rows; SIGTERM ended it with {TERMINATED}"


def _wait_for_rows(engine: str, container: str) -> None:
    """Reads the rows as soon as they are loaded.

    Raises:
        SmokeError: they are not there in time, or are other ones.
    """
    deadline = time.monotonic() + READY_DEADLINE_S
    while True:
        read = _call(engine, "exec", container, "python", "-c", _READ)
        if read.returncode == 0:
            return
        waits = any(error in read.stderr for error in _NOT_YET)
        if not waits or time.monotonic() > deadline:
            raise SmokeError(_with_log(engine, container, read.stderr))
        time.sleep(1.0)


def _with_log(engine: str, container: str, what: str) -> str:
    log = _call(engine, "logs", container)
    return f"{what}\nThe log of the container:\n{log.stdout}{log.stderr}"


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    """What a command of the engine answers.

    Raises:
        SmokeError: it did not end in time.
    """
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CALL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        what = " ".join(command[:2])
        raise SmokeError(f"{what} did not end within {CALL_TIMEOUT_S:.0f} s") from None
