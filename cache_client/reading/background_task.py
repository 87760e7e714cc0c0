"""A function that runs in a background thread, one run at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

CALL_TIMEOUT_S = 2.0  # of a call to a node in a run: a program that ends waits for the run


class BackgroundTask:
    """Runs a function in a thread, one run at a time. Thread-safe.

    Args:
        name: of the thread.
        function: must return soon, because a program that ends waits for it.
    """

    def __init__(self, name: str, function: Callable[..., None]) -> None:
        self._name = name
        self._function = function
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, *args: Any) -> None:
        """Starts ``function(*args)``; does nothing while the last run is under way.

        Raises:
            RuntimeError: the system starts no more threads; the next call tries again.
        """
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._function, args=args, name=self._name)
                self._thread.start()
