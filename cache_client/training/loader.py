"""`CacheLoader`: the DataLoader of a dataset that is divided and batched already.

Training frameworks leave it alone: it belongs to each rank, its batches are ready, and it says to
accelerate that it is prepared. It counts the batches that the loop takes, so that the dataset's
state is right with any number of workers. This is the only module that knows how accelerate
prepares loaders.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from cache_client.batches.sending import changeable
from cache_client.epochs.loader_iterators import batches_taken_ahead
from cache_client.epochs.passes import Pass
from cache_protocol.errors import ConfigError

_FIXED = {
    "batch_size": "give it to CacheIterableDataset",
    "shuffle": "give it to CacheIterableDataset",
    "drop_last": "give it to CacheIterableDataset",
    "sampler": "the dataset has an order; CacheDataset takes a sampler",
    "batch_sampler": "the dataset has an order; CacheDataset takes a sampler",
    "collate_fn": "use transform=",
}


class CacheLoader(DataLoader[Any]):
    """Gives the batches of one rank unchanged; made by `CacheIterableDataset.loader`.

    A pass begins at its first batch, so `set_epoch` and `load_state_dict` count until then, also
    with workers. Lightning saves and loads the state of this loader, and `Accelerator.save_state`
    does after `prepare`.

    After accelerate's `prepare`, batches are moved to the accelerator's device, unless
    ``device_placement=False``.

    Thread-safety: as torch's DataLoader.
    """

    dataset: Any  # a `CacheIterableDataset`, whose module imports this one
    use_stateful_dataloader = True
    """Makes `Accelerator.save_state` save `state_dict`."""

    _accelerate_device: torch.device | None = None
    _known_amendments: object = ()

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass one over ``epoch``; see `CacheIterableDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the training loop stands: the dataset's state, the same on every rank."""
        state: dict[str, Any] = self.dataset.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next pass begin there; see `CacheIterableDataset.load_state_dict`."""
        self.dataset.load_state_dict(state_dict)

    @property
    def sampler(self) -> Any:
        """An object whose `set_epoch` Lightning's Trainer calls before each epoch."""
        return _Epochs(self.dataset)

    @sampler.setter
    def sampler(self, value: Any) -> None:
        """Takes what torch sets; an iterable dataset has none."""

    @property
    def total_batch_size(self) -> int:
        """Rows of all ranks in a full step, as accelerate's loaders have it."""
        return int(self.dataset.batch_size * self.dataset.world_size)

    @property
    def total_dataset_length(self) -> int:
        """Rows of the dataset, as accelerate's loaders have it."""
        return int(self.dataset.num_rows)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True: accelerate returns such a loader as it is. Notes which device it would use."""
        asks = sys._getframe(1)
        if asks.f_code.co_name == "prepare_data_loader":
            accelerator, placed = asks.f_locals["self"], asks.f_locals.get("device_placement")
            placed = accelerator.device_placement if placed is None else placed
            self._accelerate_device = accelerator.device if placed else None
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Takes what `prepare` sets on every object."""

    def __iter__(self) -> Any:
        """The batches of one pass."""
        if self.num_workers == 0:
            return self._through_accelerate(super().__iter__())
        # Workers start with the first batch, so that they begin where the dataset stands then.
        dataset = self.dataset
        pass_ = dataset._place(Pass(of_loader=True), dataset._cursor.planned())
        batches = self._of_workers(pass_)
        pass_.iterator = weakref.ref(batches)
        dataset._passes.begin(pass_)
        return self._through_accelerate(batches)

    def _of_workers(self, pass_: Pass) -> Generator[Any, None, None]:
        dataset = self.dataset
        yield from self._batches_of(pass_)
        while pass_.superseded:
            pass_ = Pass(of_loader=True, iterator=pass_.iterator)
            dataset._passes.begin(dataset._place(pass_, dataset._cursor.planned()))
            yield from self._batches_of(pass_)

    def _batches_of(self, pass_: Pass) -> Generator[Any, None, None]:
        dataset = self.dataset
        dataset._place(pass_, dataset._cursor.planned())
        pass_.superseded = False
        if self._known_amendments != dataset._amendments:
            self._iterator = None  # persistent workers know nothing of the others
            self._known_amendments = dataset._amendments
        pass_.ahead = batches_taken_ahead()
        arriving = changeable(super().__iter__())
        with closing(dataset._observer.watch(pass_, arriving)) as batches:
            for batch in batches:
                dataset._passes.hand_out(pass_)
                dataset._note_handed_out(pass_)
                yield batch
                if pass_.superseded:
                    return
        pass_.ended = True

    def _through_accelerate(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Lets accelerate know the last batch, and moves batches as it would."""
        accelerate = sys.modules.get("accelerate.state")
        if accelerate is None or not accelerate.GradientState._shared_state:
            return batches
        return self._of_accelerate(batches, accelerate.GradientState())

    def _of_accelerate(
        self, batches: Iterator[Any], gradient_state: Any
    ) -> Generator[Any, None, None]:
        from accelerate.utils import send_to_device

        cursor = self.dataset._cursor
        plan = self.dataset._plan(cursor.next_offset, cursor.epoch)
        end = _End()
        gradient_state._add_dataloader(end)
        try:
            for step, batch in enumerate(batches, 1):
                if step == plan.num_steps:
                    end.end_of_dataloader = True
                    if plan.pad:
                        left = plan.num_rows - plan.rows_consumed
                        end.remainder = left % plan.rows_per_step
                if self._accelerate_device is not None:
                    batch = send_to_device(batch, self._accelerate_device)
                yield batch
        finally:
            gradient_state._remove_dataloader(end)


class _Epochs:
    """Stands for a sampler: torch asks it for the index of each batch, Lightning sets epochs.

    Fabric counts passes instead of epochs, from 0 in each process. So its calls change nothing.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[None]:
        return itertools.repeat(None)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the dataset."""
        callers = sys._getframe(1), sys._getframe(1).f_back
        names = [frame.f_globals.get("__name__", "") for frame in callers if frame is not None]
        if not any(name.endswith("fabric.wrappers") for name in names):
            self._dataset.set_epoch(epoch)


class _End:
    """What accelerate reads of the loader that is iterated.

    Attributes:
        end_of_dataloader: whether the batch handed out is the last.
        remainder: rows of the last step that are not repeated, over all ranks; 0 if all steps
            are full, -1 if they are not padded. `gather_for_metrics` drops the others.
    """

    end_of_dataloader = False
    remainder = -1


def make_loader(dataset: Dataset[Any], options: Mapping[str, Any]) -> CacheLoader:
    """The loader of a dataset, with options of torch's DataLoader.

    Raises:
        ConfigError: an option that the dataset decides, or one that torch refuses; quoted.
    """
    fixed = [f"{name}={options[name]!r}: {why}" for name, why in _FIXED.items() if name in options]
    if fixed:
        raise ConfigError(f"loader does not take {'; '.join(fixed)}")
    try:
        return CacheLoader(dataset, batch_size=None, collate_fn=_unchanged, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"bad option for the loader: {error}") from None


def _unchanged(batch: Any) -> Any:
    return batch
