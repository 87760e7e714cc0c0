"""Where the next pass starts, shared by a dataset and its copies in DataLoader workers.

A worker process has a copy of the dataset from its start. With persistent workers, `set_epoch` in
the training process must reach that copy, so epoch and offset are in shared memory. The offset of a
loaded state is for one pass only: the workers of that pass claim it, and the next pass over the
same epoch starts at row 0.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch.utils.data import get_worker_info

from cache_protocol.errors import ConfigError

_EPOCH, _OFFSET, _GENERATION, _CLAIMED_BY, _READ_BY_WORKERS, _BEGUN_AT, _WORKERS = range(7)
_UNCLAIMED = 0
_MAX_WORKERS = 1024  # cells for workers that used the offset


class Cursor:
    """Epoch and offset of the next pass, shared with copies in DataLoader workers.

    Any other copy, such as one by pickle or `copy.deepcopy`, has the same position but is
    independent; it shares with its own workers. A copy in another process that is no worker
    becomes independent at its first use there.

    The training process writes, and its workers read. Each field is one aligned 64-bit word.
    """

    def __init__(self) -> None:
        # From `_WORKERS` on: for each worker the generation whose offset it used.
        self._own(torch.zeros(_WORKERS + _MAX_WORKERS, dtype=torch.int64))
        self._used_generation = -1  # whose offset this copy has used
        _cursors.add(self)

    def _own(self, cells: torch.Tensor) -> None:
        """Uses cells that no other copy has, and shares them with workers of this process."""
        self._shared: torch.Tensor = cells
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        self.detach()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._shared.is_shared():  # type: ignore[no-untyped-call]
            self._own(self._shared)
        _cursors.add(self)

    @property
    def _cells(self) -> torch.Tensor:
        self.detach()
        return self._shared

    def detach(self) -> None:
        """Becomes independent if this process is neither the original one nor its worker.

        This cannot be done when a copy arrives, because only a running process knows that it is a
        worker.
        """
        if self._process != os.getpid() and get_worker_info() is None:
            self._own(self._shared.clone())

    @property
    def epoch(self) -> int:
        """Epoch of the next pass."""
        return int(self._cells[_EPOCH])

    @property
    def generation(self) -> int:
        """Number of calls of `set`."""
        return int(self._cells[_GENERATION])

    @property
    def offset(self) -> int:
        """Offset of the last pass since `set`; if there was none, of the next pass."""
        return int(self._cells[_BEGUN_AT])

    @property
    def next_offset(self) -> int:
        """Offset of the next pass: 0 once a pass has used the offset."""
        if int(self._cells[_CLAIMED_BY]) != _UNCLAIMED:
            return 0
        return int(self._cells[_OFFSET])

    @property
    def read_by_workers(self) -> bool:
        """Whether a worker process started a pass since the last `set`."""
        return bool(self._cells[_READ_BY_WORKERS])

    def set(self, epoch: int, offset: int) -> None:
        """Makes the next pass start at row ``offset`` of ``epoch``."""
        self._cells[_EPOCH] = epoch
        self._cells[_OFFSET] = self._cells[_BEGUN_AT] = offset
        self._cells[_CLAIMED_BY] = _UNCLAIMED
        self._cells[_READ_BY_WORKERS] = 0
        self._cells[_GENERATION] += 1

    def begin(self, token: int, *, worker: int | None) -> tuple[int, int]:
        """Starts a pass; returns its epoch and offset.

        Args:
            token: not 0; the same for all workers of one pass, different for every pass.
            worker: number of this worker; None in the training process.

        Raises:
            ConfigError: another pass with the same token used the offset. Workers of a pass share
                only torch's seed. With the same seed before two passes, a worker of the second pass
                looks like a late worker of the first; to confuse them would lose rows. Two workers
                with the same number reveal that there are two passes.
        """
        if worker is not None:
            self._cells[_READ_BY_WORKERS] = 1
        generation, claimed_by = self.generation, int(self._cells[_CLAIMED_BY])
        if generation == self._used_generation or claimed_by not in (_UNCLAIMED, token):
            self._cells[_BEGUN_AT] = 0
            return self.epoch, 0
        offset = int(self._cells[_OFFSET])
        if worker is not None and worker < _MAX_WORKERS:
            if offset and int(self._cells[_WORKERS + worker]) == generation:
                raise ConfigError(
                    "torch had the same seed before two passes with DataLoader workers, so the "
                    f"second looks like the first, which resumed epoch {self.epoch} at row "
                    f"{offset}: set another epoch or load a state between them, or use another "
                    "seed"
                )
            self._cells[_WORKERS + worker] = generation
        self._used_generation = generation
        self._cells[_CLAIMED_BY] = token
        return self.epoch, offset


def _detach_all() -> None:
    for cursor in list(_cursors):
        cursor.detach()


_cursors: weakref.WeakSet[Cursor] = weakref.WeakSet()
# A fork may create a worker, which must share with this process, not with its parent.
os.register_at_fork(before=_detach_all)
