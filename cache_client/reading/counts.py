"""Counts what the readers of one process do, and adds up what DataLoader workers did.

A worker adds its counts to cells of shared memory, where the training process reads them. All
counts are whole numbers: times are nanoseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Cells = npt.NDArray[np.int64]

MAX_WORKERS: Final = 256  # a row of cells each
RING_STEPS: Final = 4096  # more than DataLoader workers are ahead of the training loop

LOCAL_ROWS, LOCAL_BYTES, FETCH_NS, TRANSFORM_NS = range(4)
FAILOVERS, REFETCHES, DEPTHS, WINDOWS = range(4, 8)
_NODES: Final = 8
NODE_ROWS, NODE_BYTES, NODE_WAIT_NS, NODE_FAILURES = range(4)
_NODE_CELLS: Final = 4

_BY_LOADER, _VERSION, _TOLD, _HEADER = 0, 1, 2, 8


class ReadCounts:
    """The counts of one process. Thread-safe.

    Args:
        node_ids: of the version; what others send is counted together.
    """

    def __init__(self, node_ids: Sequence[str] = ()) -> None:
        self._lock = threading.Lock()
        self._index = {node_id: index for index, node_id in enumerate(node_ids)}
        self.cells: Cells = np.zeros(num_cells(len(node_ids)), np.int64)
        self._nodes = self.cells[_NODES:].reshape(-1, _NODE_CELLS)

    def add(self, cell: int, value: int) -> None:
        """Adds to one of the first counts, such as `FETCH_NS`."""
        with self._lock:
            self.cells[cell] += value

    def add_local(self, num_rows: int, num_bytes: int) -> None:
        """Counts rows from files of this machine."""
        with self._lock:
            self.cells[LOCAL_ROWS] += num_rows
            self.cells[LOCAL_BYTES] += num_bytes

    def add_answer(self, node_id: str, num_rows: int, num_bytes: int, wait_ns: int) -> None:
        """Counts an answer of a node."""
        with self._lock:
            self._nodes[self._index.get(node_id, -1)] += (num_rows, num_bytes, wait_ns, 0)

    def add_failure(self, node_id: str) -> None:
        """Counts a request that a node did not answer."""
        with self._lock:
            self._nodes[self._index.get(node_id, -1), NODE_FAILURES] += 1

    def snapshot(self) -> Cells:
        """The counts now."""
        with self._lock:
            return self.cells.copy()


def num_cells(num_nodes: int) -> int:
    """How many cells the counts of a process take: one more node stands for unknown ones."""
    return _NODES + _NODE_CELLS * (num_nodes + 1)


def node_cells(cells: Cells) -> Cells:
    """The counts of each node, ``[nodes + 1, 4]``; the last are those of unknown nodes."""
    return cells[_NODES:].reshape(-1, _NODE_CELLS)


class SharedCounts:
    """Counts and step digests of DataLoader workers, in shared memory.

    Each worker writes one row. The digest of a step is written before its batch is sent,
    and read after the batch was received, so a reader finds it whole.

    Args:
        cells: zeros at first; see `size`.
        num_nodes: of the version.
    """

    def __init__(self, cells: Cells, num_nodes: int) -> None:
        self._header = cells[:_HEADER]
        ring = _HEADER + 3 * RING_STEPS
        self._ring = cells[_HEADER:ring].reshape(RING_STEPS, 3)
        self._rows = cells[ring:].reshape(MAX_WORKERS, num_cells(num_nodes))

    @staticmethod
    def size(num_nodes: int) -> int:
        """How many cells it takes."""
        return _HEADER + 3 * RING_STEPS + MAX_WORKERS * num_cells(num_nodes)

    @property
    def by_loader(self) -> bool:
        """Whether the training process counts the batches that it takes, and reports."""
        return bool(self._header[_BY_LOADER])

    @by_loader.setter
    def by_loader(self, value: bool) -> None:
        self._header[_BY_LOADER] = value

    @property
    def version(self) -> int:
        """A number for the version that the training process reads; 0: none was told."""
        return int(self._header[_VERSION])

    @version.setter
    def version(self, value: int) -> None:
        self._header[_VERSION] = value

    @property
    def is_told(self) -> bool:
        """Whether lineage was told that this run began."""
        return bool(self._header[_TOLD])

    @is_told.setter
    def is_told(self, value: bool) -> None:
        self._header[_TOLD] = value

    def add(self, worker: int, cells: Cells) -> None:
        """Adds to the counts of a worker."""
        self._rows[worker % MAX_WORKERS] += cells

    def total(self) -> Cells:
        """The sum over all workers."""
        total: Cells = self._rows.sum(0)
        return total

    def put_digest(self, tag: int, step: int, set_digest: int, order_digest: int) -> None:
        """Keeps the digests of a step for a while."""
        self._ring[step % RING_STEPS] = (tag + step, set_digest, order_digest)

    def digests(self, tag: int, steps: range) -> npt.NDArray[np.uint64] | None:
        """The set and order digests of consecutive steps, ``[steps, 2]``; None if some are gone."""
        numbers = np.arange(steps.start, steps.stop, dtype=np.int64)
        found = self._ring[numbers % RING_STEPS]
        is_whole = (found[:, 0] == tag + numbers).all()
        return found[:, 1:].view(np.uint64) if is_whole else None
