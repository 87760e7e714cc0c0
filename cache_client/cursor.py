"""Where the next pass begins, shared by a dataset and its copies in DataLoader workers.

A worker process holds a copy of the dataset, made when it starts; `set_epoch` in the training
process must reach copies that live on. So epoch and offset lie in shared memory. An offset that
was set by loading a state holds for one pass only: the workers of that pass claim it, so that the
next pass over the same epoch begins at its beginning.
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
_MOST_WORKERS = 1024  # of which it is known who used the offset; nobody has more


class Cursor:
    """Epoch and offset of the next pass. Copies by fork or pickling to a worker share it.

    Any other copy, as by plain pickle or `copy.deepcopy`, stands where this one does and goes on by
    itself; its own copies in workers share it in turn. So does one in any other process, from its
    first use there.

    Written by the training process, read by its workers; each field is one aligned 64-bit word.
    """

    def __init__(self) -> None:
        # From `_WORKERS` on: the generation whose offset the worker of each number used.
        self._take(torch.zeros(_WORKERS + _MOST_WORKERS, dtype=torch.int64))
        self._used_generation = -1  # of this copy: its offset was used up here
        _cursors.add(self)

    def _take(self, cells: torch.Tensor) -> None:
        """Goes on with these, which nobody else has; with workers of this process alone."""
        self._shared: torch.Tensor = cells
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._shared.is_shared():  # type: ignore[no-untyped-call]
            self._take(self._shared)
        _cursors.add(self)

    @property
    def _cells(self) -> torch.Tensor:
        self.settle()
        return self._shared

    def settle(self) -> None:
        """In another process that is no worker: parts from the one that this came from.

        A process is known for a worker only once it runs, so this cannot be done on arrival.
        """
        if self._process != os.getpid() and get_worker_info() is None:
            self._take(self._shared.clone())

    @property
    def epoch(self) -> int:
        """Epoch of the next pass."""
        return int(self._cells[_EPOCH])

    @property
    def generation(self) -> int:
        """Grows whenever `set` changes something."""
        return int(self._cells[_GENERATION])

    @property
    def offset(self) -> int:
        """Where the latest pass since `set` began; where the next one does, if there was none."""
        return int(self._cells[_BEGUN_AT])

    @property
    def next_offset(self) -> int:
        """Offset of the next pass, if it began now: 0 once the offset was used."""
        if int(self._cells[_CLAIMED_BY]) != _UNCLAIMED:
            return 0
        return int(self._cells[_OFFSET])

    @property
    def read_by_workers(self) -> bool:
        """Whether a worker process began a pass since the last `set`."""
        return bool(self._cells[_READ_BY_WORKERS])

    def set(self, epoch: int, offset: int) -> None:
        """The next pass begins at row ``offset`` of ``epoch``."""
        self._cells[_EPOCH] = epoch
        self._cells[_OFFSET] = self._cells[_BEGUN_AT] = offset
        self._cells[_CLAIMED_BY] = _UNCLAIMED
        self._cells[_READ_BY_WORKERS] = 0
        self._cells[_GENERATION] += 1

    def begin(self, token: int, *, worker: int | None) -> tuple[int, int]:
        """Epoch and offset of a pass that begins now.

        Args:
            token: not 0; the same for all workers of one pass, another for every pass.
            worker: its number, in a worker process; None in the training process.

        Raises:
            ConfigError: another pass of the same token used the offset. (torch's seed is all that
                workers share. Where it is set alike before two passes, nothing tells a worker of
                the second from one of the first that came late, and to take some workers for
                others would lose rows. That two have one number tells that there are two passes.)
        """
        if worker is not None:
            self._cells[_READ_BY_WORKERS] = 1
        generation, claimed_by = self.generation, int(self._cells[_CLAIMED_BY])
        if generation == self._used_generation or claimed_by not in (_UNCLAIMED, token):
            self._cells[_BEGUN_AT] = 0
            return self.epoch, 0
        offset = int(self._cells[_OFFSET])
        if worker is not None and worker < _MOST_WORKERS:
            if offset and int(self._cells[_WORKERS + worker]) == generation:
                raise ConfigError(
                    "torch was seeded alike before two passes that DataLoader workers read, so the "
                    f"second cannot be told from the first, which resumed epoch {self.epoch} from "
                    f"row {offset}: set another epoch or load a state between them, or seed "
                    "otherwise"
                )
            self._cells[_WORKERS + worker] = generation
        self._used_generation = generation
        self._cells[_CLAIMED_BY] = token
        return self.epoch, offset


def _settle_all() -> None:
    for cursor in list(_cursors):
        cursor.settle()


_cursors: weakref.WeakSet[Cursor] = weakref.WeakSet()
# A fork may make a worker, which is to share with its parent and not with that one's.
os.register_at_fork(before=_settle_all)
