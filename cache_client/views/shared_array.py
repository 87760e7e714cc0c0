"""A table of numbers that all processes of a job on one machine share.

Forked processes share the memory of the process that made it. A process that is spawned maps a
temporary file, which is written once; a plain pickle, which may go to another machine, has the
numbers.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import weakref
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_Numbers = npt.NDArray[Any]


class SharedArray:
    """Immutable numbers of any shape; thread-safe.

    Args:
        values: kept without a copy, and made read-only.
    """

    def __init__(self, values: _Numbers) -> None:
        self.values = values
        values.flags.writeable = False
        self._lock = threading.Lock()
        self._path: str | None = None  # of the file, which this process removes

    def __len__(self) -> int:
        return len(self.values)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None or not len(self):
            return {"values": self.values}
        return {"path": self._file(), "dtype": self.values.dtype.str, "shape": self.values.shape}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values = state.get("values")
        if values is None:
            values = np.memmap(
                state["path"], np.dtype(state["dtype"]), mode="r", shape=state["shape"]
            ).view(np.ndarray)
        self.__init__(values)  # type: ignore[misc]  # as when it was made

    def _file(self) -> str:
        with self._lock:
            if self._path is None:
                number, path = tempfile.mkstemp(prefix="cache-view-", suffix=".bin")
                weakref.finalize(self, _remove, path, os.getpid())
                with os.fdopen(number, "wb") as file:
                    self.values.tofile(file)
                self._path = path
            return self._path


def _remove(path: str, process: int) -> None:
    """Removes the file, unless this process is a fork of the one that made it."""
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            Path(path).unlink()
