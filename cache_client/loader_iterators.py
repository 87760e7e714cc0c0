"""What the DataLoader iterators of this process have handed out.

torch does not tell a dataset that an iterator starts workers for it, nor how many of their batches
the training loop has taken. Both are found here: a worker starts inside a method of its iterator,
so the call stack names the iterator, and the iterator counts. That needs private names of torch,
accelerate and Lightning. `callers` and `cursor` read one private name of torch each.
"""

from __future__ import annotations

import secrets
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter


class LoaderIterator:
    """A DataLoader iterator that starts workers; answers also after the iterator is gone.

    It does not keep the iterator alive.

    Attributes:
        token: names the iterator; not 0, random, below 2**62.
        in_order: False under ``DataLoader(in_order=False)``.
    """

    def __init__(self, iterator: _BaseDataLoaderIter) -> None:
        self.token = secrets.randbits(61) + 1
        self.in_order = bool(getattr(iterator, "_in_order", True))
        self._taken = 0
        self._fields: dict[str, Any] | None = vars(iterator)  # outlives the iterator by a moment
        self._iterator = weakref.ref(iterator, self._note_the_end)

    def _note_the_end(self, _: object) -> None:
        self._taken = self.taken
        self._fields = None

    def stands_for(self, iterator: _BaseDataLoaderIter) -> bool:
        """Whether this is the record of that iterator."""
        return self._iterator() is iterator

    @property
    def alive(self) -> bool:
        """Whether the iterator still exists."""
        return self._fields is not None

    @property
    def taken(self) -> int:
        """Batches that the loop has taken in the latest pass of the iterator."""
        return self._taken if self._fields is None else int(self._fields["_num_yielded"])

    @property
    def waits(self) -> bool:
        """Whether it is alive and the loop has not yet asked for the first batch of its pass."""
        if self._fields is None:
            return False
        # `_num_yielded` begins above 0 where torchdata resumes; `_rcvd_idx` lags out of order.
        asked = self._fields.get("_rcvd_idx", 0) or (not self.in_order and self.taken)
        return not asked and not self._fields.get("_shutdown", False)


def iterator_in_stack() -> _BaseDataLoaderIter | None:
    """The DataLoader iterator in whose method this is called, from however deep."""
    for this in _selves_in_stack("torch.utils.data.dataloader", "torchdata.stateful_dataloader"):
        if isinstance(this, _BaseDataLoaderIter):
            return this
    return None


def batches_skipped_by_accelerate() -> int:
    """How many batches a loader of accelerate in the call stack drops, 0 where there is none."""
    loaders = _selves_in_stack("accelerate.data_loader")
    return max((getattr(this, "skip_batches", 0) for this in loaders), default=0)


def batches_taken_ahead() -> int:
    """How many batches a loader of Ray Train in the call stack takes before the loop needs them.

    That of `ray.train.torch.prepare_data_loader` takes one.
    """
    return int(any(True for _ in _selves_in_stack("ray.train.torch.train_loop_utils")))


def epoch_that_lightning_begins() -> int | None:
    """The epoch whose start a Trainer of Lightning in the call stack prepares, if it does.

    Where it resumes, it makes the iterator first, and only then counts the epoch before as over.
    """
    modules = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")
    for loop in _selves_in_stack(*modules):
        epoch: int = loop.epoch_progress.current.processed
        trained: int = loop.epoch_loop.batch_progress.current.ready
        if not trained:
            return epoch
        limits = getattr(loop._combined_loader, "limits", None) or [None]
        is_over = all(limit is not None and trained >= limit for limit in limits)
        return epoch + 1 if is_over else None
    return None


def _selves_in_stack(*modules: str) -> Iterator[Any]:
    """What ``self`` is in the frames of these modules and of modules inside them.

    Not of others: before Python 3.13, a frame whose locals were read keeps what they were.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if any(module == each or module.startswith(f"{each}.") for each in modules):
            this = frame.f_locals.get("self")
            if this is not None:
                yield this
        frame = frame.f_back
