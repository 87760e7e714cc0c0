"""Waiting on state with a deadline, which is the only way a test may wait."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

_POLL_S, _LONGEST_POLL_S = 0.01, 0.1
_STOP_S = 30.0
_LEAST_S = 60.0
_T = TypeVar("_T")


def wait_until(
    predicate: Callable[[], _T], timeout_s: float, what: str, poll_s: float = _POLL_S
) -> _T:
    """The first true value of ``predicate``; an AssertionError naming ``what`` after the deadline.

    Args:
        timeout_s: at least a minute is waited: beside other work, all takes many times as long. No
            test may find by it that something is slow.
        what: the state that is waited for, for the message.
    """
    timeout_s = max(timeout_s, _LEAST_S)
    begun = time.monotonic()
    pause = threading.Event()
    while not (value := predicate()):
        waited_s = time.monotonic() - begun
        assert waited_s < timeout_s, f"not within {timeout_s:g} s: {what}"
        # A look may cost what it waits for: the longer it lasts, the rarer they are.
        pause.wait(max(poll_s, min(waited_s / 8, _LONGEST_POLL_S)))
    return value


def files_below(*directories: Path) -> list[Path]:
    """The files below directories that others may remove meanwhile; `Path.glob` may fail then."""
    return [
        Path(folder, name)
        for directory in directories
        for folder, _, names in os.walk(directory)
        for name in names
    ]


def suspend(process: psutil.Process) -> None:
    """Stops a process and returns when none of its threads runs any more.

    The signal alone is no more than sent: until each thread has met it, the process may still
    answer what it is asked next.
    """
    process.suspend()
    wait_until(lambda: _is_stopped(process.pid), _STOP_S, f"process {process.pid} is stopped")


def _is_stopped(pid: int) -> bool:
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
