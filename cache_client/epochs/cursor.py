"""Where passes begin, agreed on by a dataset and its copies in DataLoader workers.

A worker process holds a copy of the dataset, made when it starts; `set_epoch` in the training
process must reach copies that live on. So epoch and offset lie in shared memory. Worker 0 of a pass
reads them and writes down what it read; the other workers of that pass take this, whenever they
begin. The training process can therefore tell whether a change comes too late for a pass.
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from multiprocessing.context import get_spawning_popen
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from cache_client.epochs.loader_iterators import (
    LoaderIterator,
    batches_skipped_by_accelerate,
    epoch_that_lightning_begins,
    iterator_in_stack,
)
from cache_client.order.permutation import checked_integer
from cache_protocol.errors import ConfigError

LAST_EPOCH: Final = 2**62  # epochs lie in 64 bits

# Cells of 64 bits. Those of the training process, and of whichever pass begins:
_EPOCH, _OFFSET, _STEPS, _GENERATION, _ANNOUNCED = range(5)
_CLAIM, _CLAIM_LOADER, _CLAIM_IS_LOOK, _READ_BY_WORKERS = range(5, 9)
_ENDED, _ENDED_EPOCH, _WARNED = range(9, 12)
_HEADER: Final = 16
# Then the latest decisions of workers 0, each in the slot that the name of its pass says:
_SLOTS: Final = 256
_STATUS, _LOADER, _NAME, _AT_EPOCH, _AT_OFFSET, _AT_GENERATION, _BEGUN_NS, _CHECK = range(8)
_SLOT_CELLS: Final = 8
_EXTRA: Final = _HEADER + _SLOTS * _SLOT_CELLS

_DECIDING: Final = 1
_DECIDED: Final = 2
_NO_PASS: Final = 0
OWN_START: Final = -1
"""Offset of a pass whose workers begin where a state of each worker stands."""

_POLL_S: Final = 0.002
_DECISION_S: Final = 5.0  # a decision takes microseconds, unless its process is stopped


def is_epoch(epoch: object) -> bool:
    """Whether `RankBatches.set_epoch` takes this epoch."""
    try:
        checked_integer("epoch", epoch, 0, LAST_EPOCH)
    except ValueError:
        return False
    return True


class Start(NamedTuple):
    """Where a pass begins."""

    epoch: int
    offset: int


class Cursor:
    """Epoch and offset of the next pass, shared with copies in DataLoader workers.

    Any other copy, as by plain pickle or `copy.deepcopy`, begins with the same values and shares
    them with workers started from it only. So does one in any other process, from its first use.

    A loaded offset is used by one pass: the first that hands out more than one batch.

    Written by the training process and, in separate cells, by worker 0 of each pass. Each cell is
    one aligned 64-bit word. Where order matters, the reader checks it: see `_Slot`.

    Args:
        num_extra: cells for other uses, see `extra`.
    """

    def __init__(self, num_extra: int = 0) -> None:
        self._take(np.zeros(_EXTRA + num_extra, np.int64))
        self._started_by: int | None = None  # token of the iterator that starts workers
        self._skipped = 0
        self._lightning_epoch: int | None = None

    def _take(self, values: npt.NDArray[np.int64]) -> None:
        """Uses new cells with these values, which no other process has yet; zeros for `extra`.

        Not by `share_memory_`: torch copies larger tensors with threads that a forked child lacks.
        """
        with torch.inference_mode(False):
            storage = torch.UntypedStorage._new_shared(  # type: ignore[no-untyped-call]
                values.nbytes, device="cpu"
            )
            cells = torch.empty(0, dtype=torch.int64, device=torch.device("cpu"))
            cells.set_(storage, 0, (len(values),), (1,))
        self._keep(cells)
        self._array[:_EXTRA] = values[:_EXTRA]
        self._array[_EXTRA:] = 0

    def _keep(self, cells: torch.Tensor) -> None:
        self._shared = cells
        # Not by torch's operators: they follow inference_mode and default devices.
        self._array: npt.NDArray[np.int64] = cells.numpy()
        self._process = os.getpid()
        self._loaders: dict[int, LoaderIterator] = {}
        self._begun_here = (0, 0)  # process, and passes that it began as a worker
        self.given_up_at = 0  # offset of the pass before in this worker, if it was not read on
        _cursors.add(self)

    def __getstate__(self) -> dict[str, Any]:
        self.detach()
        if get_spawning_popen() is not None:
            self.note_iterator()
        return {
            "cells": self._shared,
            "process": self._process,
            "started_by": self._started_by,
            "skipped": self._skipped,
            "lightning_epoch": self._lightning_epoch,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        cells = state["cells"]
        if cells.is_shared():
            self._keep(cells)
            self._process = state["process"]
        else:
            self._take(cells.numpy())
        self._started_by, self._skipped = state["started_by"], state["skipped"]
        self._lightning_epoch = state["lightning_epoch"]

    @property
    def _cells(self) -> npt.NDArray[np.int64]:
        self.detach()
        return self._array

    def detach(self) -> None:
        """Becomes independent if this process is neither the original one nor its worker.

        This cannot be done when a copy arrives, because only a running process knows that it is a
        worker.
        """
        if self._process != os.getpid() and get_worker_info() is None:
            self._take(self._array)

    def note_iterator(self) -> None:
        """Remembers the DataLoader iterator that starts a worker now; workers of it agree.

        Called in the training process before it starts any process.
        """
        if get_worker_info() is not None:
            return
        iterator = iterator_in_stack()
        if iterator is None:
            self._started_by = None
            return
        for loader in self._loaders.values():
            if loader.stands_for(iterator):
                self._started_by = loader.token
                return
        kept = {token: each for token, each in self._loaders.items() if self._is_needed(each)}
        loader = LoaderIterator(iterator)
        self._array[_CLAIM_IS_LOOK] = self._claim_is_look()
        self._loaders = {**kept, loader.token: loader}
        self._started_by = loader.token
        self._skipped = batches_skipped_by_accelerate()
        self._lightning_epoch = epoch_that_lightning_begins()

    def _is_needed(self, loader: LoaderIterator) -> bool:
        current = self._decided(int(self._array[_GENERATION]))
        return loader.alive or loader.token in current[:, _LOADER]

    @property
    def _slots(self) -> npt.NDArray[np.int64]:
        return self._array[_HEADER:_EXTRA].reshape(_SLOTS, _SLOT_CELLS)

    @property
    def extra(self) -> npt.NDArray[np.int64]:
        """Cells for other uses, shared in the same way; zeros in a copy that shares nothing."""
        return self._cells[_EXTRA:]

    # -- what is set -----------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the next pass."""
        return int(self._cells[_EPOCH])

    @property
    def generation(self) -> int:
        """Number of calls of `set`."""
        return int(self._cells[_GENERATION])

    @property
    def next_offset(self) -> int:
        """Offset of the next pass, if it began now: 0 once the offset was used."""
        cells = self._cells
        free = cells[_CLAIM] == _NO_PASS or self._claim_is_look()
        return int(cells[_OFFSET]) if free else 0

    @property
    def has_workers(self) -> bool:
        """Whether a DataLoader iterator of this process that started workers still exists."""
        return any(loader.alive for loader in self._loaders.values())

    @property
    def read_by_workers(self) -> bool:
        """Whether a worker process started a pass since the last `set`."""
        return bool(self._cells[_READ_BY_WORKERS])

    def tell(self) -> None:
        """Notes that the program said which epoch or state is next, changed or not."""
        self._cells[_ANNOUNCED] += 1

    def set(self, epoch: int, offset: int, *, num_steps: int, any_offset: bool = False) -> None:
        """The next pass begins at row ``offset`` of ``epoch``.

        Args:
            epoch: in [0, 2**62].
            offset: rows of it consumed before.
            num_steps: of the pass that begins there.
            any_offset: a pass of this epoch whose workers have begun is no error.

        Raises:
            ConfigError: DataLoader workers have begun a pass elsewhere, and the training loop has
                not yet taken its first batch. Nothing changes.
        """
        cells, now = self._cells, self.generation
        before = now - now % 2  # odd: a former call was interrupted while it wrote
        cells[_GENERATION] = before + 1  # odd: being written; no worker 0 decides now
        os.sched_yield()
        # One that read an even number wrote before that it decides.
        deadline = time.monotonic() + _DECISION_S
        while (deciding := self._slots[:, _STATUS] == _DECIDING).any():
            if time.monotonic() > deadline:  # killed; a slow one looks again before it ends
                self._slots[deciding, _STATUS] = _NO_PASS
                break
            time.sleep(_POLL_S / 10)
        try:
            self._refuse_if_begun(before, Start(epoch, -2 if any_offset else offset))
        except ConfigError:
            cells[_GENERATION] = now
            raise
        cells[_EPOCH], cells[_OFFSET], cells[_STEPS] = epoch, offset, num_steps
        cells[_CLAIM] = _NO_PASS
        cells[_READ_BY_WORKERS] = 0
        cells[_GENERATION] = before + 2

    def _decided(self, generation: int) -> npt.NDArray[np.int64]:
        """The slots of passes that began when `generation` was this; the earliest first."""
        slots = self._slots
        found = (slots[:, _STATUS] == _DECIDED) & (slots[:, _AT_GENERATION] == generation)
        earliest_first: npt.NDArray[np.int64] = slots[found]
        return earliest_first[earliest_first[:, _BEGUN_NS].argsort()]

    def _refuse_if_begun(self, generation: int, new: Start) -> None:
        for slot in self._decided(generation):
            begun = Start(int(slot[_AT_EPOCH]), int(slot[_AT_OFFSET]))
            loader = self._loaders.get(int(slot[_LOADER]))
            agrees = begun.epoch == new.epoch and new.offset in (-2, begun.offset)
            if loader is not None and loader.waits and not agrees:
                where = "" if begun.offset <= 0 else f" at row {begun.offset}"
                raise ConfigError(
                    f"too late: DataLoader workers have begun a pass over epoch {begun.epoch}"
                    f"{where}, and its first batch is not taken yet, so epoch {new.epoch} would "
                    "count for some of them: call set_epoch or load_state_dict before "
                    "iter(loader), or delete the iterator and its loader and make others afterwards"
                )

    # -- passes ----------------------------------------------------------------------------------

    def planned(self) -> Start:
        """Where a pass of this process would begin now."""
        return Start(self.epoch, self.next_offset)

    def begin(self, *, is_look: bool) -> int:
        """Notes that a pass of this process hands out its first batch.

        Args:
            is_look: there are more batches; until the second one, the pass does not use the offset.

        Returns:
            A name for `use`; 0 where the pass does not begin at the offset.
        """
        cells = self._cells
        if cells[_CLAIM] != _NO_PASS and not self._claim_is_look():
            return _NO_PASS
        claim = secrets.randbits(62) + 1
        cells[_CLAIM], cells[_CLAIM_LOADER], cells[_CLAIM_IS_LOOK] = claim, _NO_PASS, is_look
        return claim

    def use(self, claim: int) -> None:
        """Notes that the pass of that name hands out its second batch."""
        if claim != _NO_PASS and self._cells[_CLAIM] == claim:
            self._cells[_CLAIM_IS_LOOK] = 0

    def begin_in_worker(
        self, worker: int, seed: int, own: Start | None, *, deadline_s: float
    ) -> Start:
        """Where the pass begins that this worker process begins now.

        Args:
            worker: its number.
            seed: torch's base seed of the pass; it names the pass where the iterator is unknown.
            own: where this worker itself must begin, by a state of a worker.
            deadline_s: how long to wait for worker 0 of the pass.

        Raises:
            ConfigError: worker 0 did not begin, or `set` was interrupted and not called again.
        """
        process, number = self._begun_here
        number = number + 1 if process == os.getpid() else 1
        self._begun_here, self.given_up_at = (os.getpid(), number), 0
        self._array[_READ_BY_WORKERS] = 1
        loader = self._started_by or seed % 2**61 + 1
        slot = _Slot(self._slots[(loader + number) % _SLOTS], loader, loader + number)
        if worker == 0:
            return self._decide(slot, own, deadline_s)
        return own or slot.wait(worker, deadline_s)

    def _decide(self, slot: _Slot, own: Start | None, deadline_s: float) -> Start:
        cells = self._array
        deadline = time.monotonic() + deadline_s
        while True:
            if time.monotonic() > deadline:
                raise ConfigError(
                    "set_epoch or load_state_dict was interrupted in the training process, so the "
                    f"next epoch is not known after {deadline_s:g} s: call it again"
                )
            generation = int(cells[_GENERATION])
            if generation % 2:
                time.sleep(_POLL_S / 10)
                continue
            slot.open()
            start = Start(int(cells[_EPOCH]), int(cells[_OFFSET]))
            claim, loader = int(cells[_CLAIM]), int(cells[_CLAIM_LOADER])
            used = claim != _NO_PASS and (loader == slot.loader or not cells[_CLAIM_IS_LOOK])
            begun_at, start = start.offset, Start(start.epoch, 0) if used else start
            first = start if own is None else Start(own.epoch, OWN_START)
            slot.write(first, generation)
            if generation == int(cells[_GENERATION]):
                break
            slot.give_up()
        if own is None and not used:
            cells[_CLAIM], cells[_CLAIM_LOADER] = slot.name, slot.loader
            cells[_CLAIM_IS_LOOK] = 0
        slot.close()
        read_to_its_end = cells[_ENDED] == cells[_ANNOUNCED] + 1
        if own is None and claim == slot.name - 1 and not read_to_its_end:
            self.given_up_at = begun_at
        return own or start

    def _claim_is_look(self) -> bool:
        """Whether the pass that used the offset took one batch of several, as far as known."""
        cells = self._array
        if cells[_CLAIM] == _NO_PASS or cells[_CLAIM_LOADER] == _NO_PASS:
            return bool(cells[_CLAIM_IS_LOOK])
        loader = self._loaders.get(int(cells[_CLAIM_LOADER]))
        passes = self._slots[self._slots[:, _LOADER] == cells[_CLAIM_LOADER]]
        if loader is None or not len(passes):
            return False
        latest = passes[passes[:, _BEGUN_NS].argmax(), _NAME] == cells[_CLAIM]
        return bool(latest and loader.taken <= 1 < cells[_STEPS])

    def pass_of_workers(self, steps: int) -> tuple[int, bool] | None:
        """Offset of the pass of workers that training consumes, and whether it is in order.

        Of several passes since the last `set`, it is the first whose loop has taken ``steps``
        batches, else the latest. None where no worker has begun one.
        """
        found = self._decided(self.generation)
        if not len(found):
            return None
        latest = {int(slot[_LOADER]): int(slot[_NAME]) for slot in found}
        chosen = found[-1]
        for slot in found:
            loader = self._loaders.get(int(slot[_LOADER]))
            is_latest = latest[int(slot[_LOADER])] == int(slot[_NAME])
            if loader is not None and loader.alive and is_latest and loader.taken == steps:
                chosen = slot
                break
        loader = self._loaders.get(int(chosen[_LOADER]))
        return max(0, int(chosen[_AT_OFFSET])), loader is None or loader.in_order

    # -- habits that lose rows ---------------------------------------------------------------------

    @property
    def announced(self) -> int:
        """How often the program said which epoch or state is next."""
        return int(self._cells[_ANNOUNCED])

    def end(self, epoch: int, announced: int) -> None:
        """Notes that a pass over ``epoch``, begun when `announced` was this, came to its end."""
        self._array[_ENDED], self._array[_ENDED_EPOCH] = announced + 1, epoch

    def repeats(self, epoch: int) -> bool:
        """Whether a pass over ``epoch`` came to its end, and no other is announced; True once."""
        cells = self._cells
        ended = cells[_ENDED] == cells[_ANNOUNCED] + 1 and cells[_ENDED_EPOCH] == epoch
        if not ended or cells[_WARNED]:
            return False
        cells[_WARNED] = 1
        return True

    def skipped_batches(self) -> int:
        """Batches that accelerate drops at the start of the pass that begins now."""
        return batches_skipped_by_accelerate() if get_worker_info() is None else self._skipped

    def lightning_epoch(self) -> int | None:
        """The epoch whose first pass Lightning begins with the pass that begins now."""
        in_worker = get_worker_info() is not None
        return self._lightning_epoch if in_worker else epoch_that_lightning_begins()


class _Slot:
    """The decision of worker 0 about one pass, in shared cells.

    Processors may show writes to others in another order. So the last cell is a sum of the others,
    and a reader goes by a decision only when the sum is right.
    """

    def __init__(self, cells: npt.NDArray[np.int64], loader: int, name: int) -> None:
        self._cells, self.loader, self.name = cells, loader, name

    def open(self) -> None:
        """Says that values are being read."""
        self._cells[_STATUS] = _DECIDING
        os.sched_yield()  # not before others see it

    def write(self, start: Start, generation: int) -> None:
        cells = self._cells
        cells[_LOADER], cells[_NAME] = self.loader, self.name
        cells[_AT_EPOCH], cells[_AT_OFFSET], cells[_AT_GENERATION] = *start, generation
        cells[_BEGUN_NS] = time.monotonic_ns()

    def close(self) -> None:
        self._cells[_STATUS] = _DECIDED
        self._cells[_CHECK] = _sum_of(self._cells)

    def give_up(self) -> None:
        """Says that there is no decision yet."""
        self._cells[_STATUS] = _NO_PASS

    def wait(self, worker: int, deadline_s: float) -> Start:
        """What worker 0 decided for this pass."""
        deadline = time.monotonic() + deadline_s
        while True:
            cells = self._cells.copy()
            decided = cells[_STATUS] == _DECIDED and cells[_NAME] == self.name
            if decided and cells[_CHECK] == _sum_of(cells):
                break
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"DataLoader worker {worker} waited {deadline_s:g} s for worker 0 to begin the "
                    "same pass: all workers of a DataLoader must iterate the dataset, equally often"
                )
            time.sleep(_POLL_S)
        if cells[_AT_OFFSET] == OWN_START:
            raise ConfigError(
                f"worker 0 resumes a state of its own, and worker {worker} has none: load a state "
                "in every DataLoader worker or in none"
            )
        return Start(int(cells[_AT_EPOCH]), int(cells[_AT_OFFSET]))


def _sum_of(cells: npt.NDArray[np.int64]) -> int:
    return sum((k + 1) * int(cell) for k, cell in enumerate(cells[:_CHECK])) % 2**61


def _before_fork() -> None:
    for cursor in list(_cursors):
        cursor.detach()
        cursor.note_iterator()


_cursors: weakref.WeakSet[Cursor] = weakref.WeakSet()
# A fork may make a worker, which is to share with its parent and not with that one's.
os.register_at_fork(before=_before_fork)
