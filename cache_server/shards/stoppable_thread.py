"""Threads with a start and an end."""

from __future__ import annotations

import threading
import time
from typing import Self


class StoppableThread:
    """Work in threads, from `start` to `close`; a context manager.

    Args:
        name: of the threads.
        num_threads: that do the same work.
        close_s: how long `close` waits for them; None: until they end.
    """

    def __init__(self, name: str, *, num_threads: int = 1, close_s: float | None = None) -> None:
        self._stop = threading.Event()
        self._close_s = close_s
        self._threads = [
            threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Tells the threads to stop, and waits for their end."""
        self._stop.set()
        deadline = None if self._close_s is None else time.monotonic() + self._close_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        """The work; it ends soon after ``_stop`` is set."""
        raise NotImplementedError
