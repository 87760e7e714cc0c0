"""A job that reads while a test does something to its cache."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Self

from cache_client import CacheIterableDataset, Connection, Reading
from tests.conftest import rows_of
from tests.waiting import wait_until

WAIT_S = 60.0


@dataclass
class ReadingJob:
    """Reads one epoch of a dataset after the other, in a thread.

    Attributes:
        step_s: the loop works so long for each batch.
        epochs: the row numbers of each, in the order of the batches.
        longest_pause_s: between two batches.
        error: that ended it.
    """

    connection: Connection
    dataset: str
    step_s: float = 0.002
    epochs: list[list[int]] = field(default_factory=list)
    longest_pause_s: float = 0.0
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self.epochs or self.error, WAIT_S, f"an epoch of {self.dataset}")
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            dataset = CacheIterableDataset(
                self.dataset,
                cache=self.connection,
                columns=["row"],
                batch_size=50,
                shuffle=True,
                reading=Reading(message_bytes=4096, prefetch_batches=8),
            )
            while not self._enough.is_set():
                dataset.set_epoch(len(self.epochs))
                rows: list[int] = []
                last = time.monotonic()
                for batch in dataset:
                    now = time.monotonic()
                    self.longest_pause_s = max(self.longest_pause_s, now - last)
                    rows += rows_of([batch])
                    self._enough.wait(self.step_s)
                    last = time.monotonic()
                self.epochs.append(rows)
        except BaseException as error:
            self.error = error

    def read_on(self) -> None:
        """Returns after another whole epoch."""
        begun = len(self.epochs)
        wait_until(lambda: self.error or len(self.epochs) > begun + 1, WAIT_S, "two epochs more")

    def assert_exact(self, num_rows: int) -> None:
        """Each epoch had each row once, in another order."""
        assert self.error is None
        assert all(sorted(rows) == list(range(num_rows)) for rows in self.epochs)
        assert len({tuple(rows) for rows in self.epochs}) == len(self.epochs)
