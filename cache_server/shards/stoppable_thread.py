"""A thread with a start and an end."""

from __future__ import annotations

import threading
from typing import Self


class StoppableThread:
    """Work in a thread, from `start` to `close`; a context manager.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Tells the thread to stop, and waits for its end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        """The work; it ends soon after ``_stop`` is set."""
        raise NotImplementedError
