"""Refuses programs that would divide or collate the batches of a dataset once more.

torch does not tell a dataset who iterates it. The call stack does: it holds the fetcher of a
DataLoader, and the object of a library that keeps only some of the batches. Such a program would
otherwise lose rows without an error. Knows the class names of other libraries and imports none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils.fetch import _BaseDatasetFetcher

from cache_protocol.errors import ConfigError

REMEDY = (
    "use dataset.loader(num_workers=...), which accelerate, Lightning and Fabric leave alone; in "
    "transformers' Trainer override get_train_dataloader and get_eval_dataloader to return it"
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
