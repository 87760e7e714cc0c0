"""What DataLoaders of this process have handed out, and programs that would lose rows.

torch does not tell a dataset that an iterator starts workers for it, nor how many of their batches
the training loop has taken. Both are found here: a worker starts inside a method of its iterator,
so the call stack names the iterator, and the iterator counts. The call stack also tells of programs
that would divide or collate the batches of a dataset once more, and so lose rows without an error.

It reads private names of torch, as do `cache_client.epochs.cursor` (a shared storage) and
`cache_client.job.parallel_groups` (the process groups). It knows the class names of other libraries
and imports none.
"""

from __future__ import annotations

import secrets
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils.fetch import _BaseDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cache_protocol.errors import ConfigError


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
    for caller in _selves_in_stack("torch.utils.data.dataloader", "torchdata.stateful_dataloader"):
        if isinstance(caller, _BaseDataLoaderIter):
            return caller
    return None


def batches_skipped_by_accelerate() -> int:
    """How many batches a loader of accelerate in the call stack drops, 0 where there is none."""
    loaders = _selves_in_stack("accelerate.data_loader")
    return max((getattr(each, "skip_batches", 0) for each in loaders), default=0)


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
            owner = frame.f_locals.get("self")
            if owner is not None:
                yield owner
        frame = frame.f_back


REMEDY = (
    "use dataset.loader(num_workers=...), which accelerate, Lightning and Fabric leave alone; for "
    "a Trainer of transformers or TRL use TrainsFromCache, see docs/fine-tuning.md"
)

# How a wrapper that keeps every n-th element names n.
_COUNTS = {
    "num_processes": "process_index",  # accelerate's and transformers' IterableDatasetShard
    "num_replicas": "rank",
    "num_shards": "index",
    "num_of_instances": "instance_id",  # torch's ShardingFilterIterDataPipe
}


def refuse_callers(dataset: object, *, batch_size: int, world_size: int) -> None:
    """Raises ConfigError if a caller of this function divides or collates batches of ``dataset``.

    Call it where a pass begins, where a process is started that will begin one, and where an epoch
    is set.

    Args:
        dataset: that is iterated; it gives ready batches.
        batch_size: of it, for the message.
        world_size: ranks among which it is divided. With 1 a caller may divide it.
    """
    for caller in _callers(dataset):
        if isinstance(caller, _BaseDatasetFetcher):
            if caller.auto_collation and caller.dataset is dataset:
                raise ConfigError(
                    f"the dataset gives ready batches of {batch_size} rows, and this DataLoader "
                    f"would collate several of them to one: {REMEDY}; or pass batch_size=None to "
                    "the DataLoader"
                )
            continue
        count = _divides_by(caller)
        if count > 1 and world_size > 1:
            raise ConfigError(
                f"the dataset is divided among {world_size} ranks already, and "
                f"{type(caller).__name__} would divide the rows of each rank by {count} again, so "
                f"that most rows are lost: {REMEDY}"
            )


def refuse_random_split() -> None:
    """Raises ConfigError if torch's `random_split` asks for the length of the caller."""
    if sys._getframe(2).f_code.co_name == "random_split":
        raise ConfigError(
            "random_split needs rows by number, and CacheIterableDataset has none: use "
            "CacheDataset, or load two datasets with a filter in each spec"
        )


def _callers(dataset: object) -> Iterator[Any]:
    """The objects, other than ``dataset``, whose methods are in the call stack."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        # Methods only: before Python 3.13 a frame whose locals were read keeps what they were, such
        # as a batch of the training loop.
        if frame.f_code.co_varnames[:1] == ("self",):
            caller = frame.f_locals.get("self")
            if caller is not None and caller is not dataset:
                yield caller
        frame = frame.f_back


def _divides_by(caller: object) -> int:
    """Among how many ranks ``caller`` divides what it reads; 1 if it does not."""
    # By the true type: a loader of accelerate passes itself off as one of torch.
    kind = type(caller)
    if kind.__name__ == "DataLoaderDispatcher":
        return int(getattr(getattr(caller, "state", None), "num_processes", 1))
    if not issubclass(kind, IterableDataset):
        return 1
    for count, index in _COUNTS.items():
        found = getattr(caller, count, 1)
        if hasattr(caller, index) and isinstance(found, int) and found > 1:
            return found
    return 1
