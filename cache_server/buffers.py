"""Memory for shards being built, kept from one shard to the next.

Fresh memory costs a page fault every 4 KiB, which is a third of the time that packing takes. A pool
hands the same blocks out again while a dataset loads; the node clears it when no load is left.
"""

from __future__ import annotations

import threading

import numpy as np

from protos.layout import Matrix


class BufferPool:
    """Blocks of memory that go round. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []

    def take(self, rows: int, width: int, dtype: np.dtype[np.generic]) -> Matrix:
        """An uninitialised ``[rows, width]`` array; `give_back` it when nothing refers to it."""
        size = rows * width * dtype.itemsize
        with self._lock:
            fitting = [block for block in self._free if size <= len(block) <= 2 * size]
            block = min(fitting, key=len, default=None)
            # Blocks that do not fit are let go of, so that no more are kept than are in use.
            self._free = [free for free in self._free if free is not block] if fitting else []
        if block is None:
            block = np.empty(size, np.uint8)
        return block[:size].view(dtype).reshape(rows, width)

    def give_back(self, matrix: Matrix) -> None:
        """Takes the block of a matrix from `take` back; its contents are lost."""
        block = matrix
        while isinstance(block.base, np.ndarray):
            block = block.base
        with self._lock:
            self._free.append(block)  # type: ignore[arg-type]  # the bytes that take() made

    def clear(self) -> None:
        """Lets go of the blocks that are not in use."""
        with self._lock:
            self._free.clear()

    @property
    def free_bytes(self) -> int:
        """Size of the blocks that are kept and not in use."""
        with self._lock:
            return sum(len(block) for block in self._free)
