"""Copies batches to a device in the background, ahead of use.

A thread takes batches from their source, packs the tensors of each batch into one of two slots of
host memory, and copies the slot to the device:

    source -> slot (pinned) -> copy on a separate stream -> yielded in the consumer's thread

On CUDA, the copy of a batch runs while the device works on earlier batches. The consumer's current
stream waits for the copy of each batch when it is yielded. On the CPU there is no pinning, stream
or event; the rest is the same.

Knows tensors, threads and streams, but neither rows nor nodes.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # its hook at exit must follow the one below
import copy
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import Any

import torch
from torch import Tensor

from cache_protocol.errors import CacheError, ConfigError

_NUM_SLOTS = 2  # one is filled while the other is copied
_ALIGNMENT = 256  # bytes; of each tensor in a slot, as in CUDA's allocator
_MIN_SLOT_BYTES = 4096
_NO_TENSORS = frozenset((str, bytes, type(None)))
_EXIT_WAIT_S = 3.0  # how long a program that ends waits for the threads of open iterators


def find_device(device: torch.device | str | None) -> torch.device | None:
    """The device of an argument; None for None.

    Does not touch the device: that could leave this process unable to fork.

    Raises:
        ConfigError: quotes an argument that is no CPU or CUDA device.
    """
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be 'cpu', 'cuda' or 'cuda:<n>', got {device!r}")
    return found


def on_device(
    batches: Generator[Any, None, None],
    device: torch.device,
    *,
    interrupt: Callable[[], None] = lambda: None,
) -> Generator[Any, None, None]:
    """Yields the batches of a source, in its order, with their tensors on ``device``.

    A batch is a tensor, or dicts, lists and tuples of tensors in any depth. Each tensor becomes a
    contiguous one of the same dtype, shape and values. All tensors of a batch are views of one
    block of device memory, which the batch owns. Everything else stays as it is: strings, numbers,
    None, other objects, and tensors that are sparse or not on the CPU.

    At most two batches are copied ahead. Nothing starts before the first batch is asked for. If you
    use a batch on another stream than the current one at its yield, you must order the streams, as
    always in torch. At the end of a program, open iterators are cancelled, and the program waits a
    few seconds at most for their threads.

    Args:
        batches: the source. Runs in a background thread, and is closed there.
        device: a CPU or CUDA device; ``cuda`` is the current device of the thread that asks for
            the first batch.
        interrupt: called from the consumer's thread when the iterator is closed or has ended. It
            must make a waiting source give up, so that closing does not wait for it. May be called
            when the source does not wait.

    Raises:
        ConfigError: torch does not find the device.
        Exception: the source raised it, after the batches before it.

    Thread-safety: iterate and close from one thread at a time. The background thread has ended when
    the iterator is closed.
    """
    copier = _BatchCopier(_resolved(device))
    ready: Queue[_CopiedBatch | _End] = Queue(maxsize=1)
    stop = threading.Event()
    # A daemon: an iterator that is kept must not keep the interpreter alive.
    thread = threading.Thread(
        target=_copy_all, args=(batches, copier, ready, stop), name="cache-device", daemon=True
    )
    task = _CopyTask(thread, ready, stop, interrupt)
    try:
        _running.add(task)  # before the start, so that the exit hook cannot miss it
        thread.start()
        while isinstance(item := ready.get(), _CopiedBatch):
            yield copier.deliver(item)
        if item.error is not None:
            try:
                raise item.error
            finally:
                del item  # its traceback holds this frame
    finally:
        # An interpreter that ends closes generators last, when no other thread runs any more.
        if not sys.is_finalizing():
            task.cancel()
            # The thread itself may be the one that collects the iterator.
            if thread.is_alive() and threading.current_thread() is not thread:
                thread.join()
        _running.discard(task)


@dataclass(frozen=True, eq=False)
class _CopyTask:
    """The background work of one iterator of `on_device`."""

    thread: threading.Thread
    ready: Queue[_CopiedBatch | _End]
    stop: threading.Event
    interrupt: Callable[[], None]

    def cancel(self) -> None:
        """Makes the thread end soon; does not wait."""
        self.stop.set()
        self.interrupt()
        _drain(self.ready)


_running: set[_CopyTask] = set()
# A forked child has none of the threads.
os.register_at_fork(after_in_child=_running.clear)


def _cancel_all() -> None:
    """Ends every thread before the interpreter ends.

    A thread that returns from C++ to Python after that would abort the process.
    """
    running = list(_running)
    for task in running:
        task.cancel()
    deadline = time.monotonic() + _EXIT_WAIT_S
    for task in running:
        if task.thread.is_alive():  # a thread that starts later ends at once
            task.thread.join(max(0.0, deadline - time.monotonic()))
        _drain(task.ready)
        with suppress(Full):  # a consumer in another thread may wait
            task.ready.put_nowait(_End(CacheError("no more batches: the program ends")))


# Exit hooks run in reverse order. This one must run before that of `concurrent.futures`, which
# waits for threads that may wait for nodes. Later versions of Python may lack this private hook.
getattr(threading, "_register_atexit", atexit.register)(_cancel_all)


@dataclass(frozen=True)
class _CopiedBatch:
    """A batch whose copy has started into ``memory``; the event ``copied`` marks its end."""

    batch: Any
    memory: Tensor
    copied: torch.cuda.Event | None


@dataclass(frozen=True)
class _End:
    """The source ended, or raised."""

    error: BaseException | None = None


def _resolved(device: torch.device) -> torch.device:
    """The device with its index, because the current CUDA device of a new thread is 0."""
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(
            f"device must be one of the {count} CUDA devices that torch finds, got '{device}'"
        )
    return torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )


def _copy_all(
    batches: Generator[Any, None, None],
    copier: _BatchCopier,
    ready: Queue[_CopiedBatch | _End],
    stop: threading.Event,
) -> None:
    def put(item: _CopiedBatch | _End) -> None:
        # One item at most is put after a stop: `_drain` makes room for it.
        if not stop.is_set():
            ready.put(item)

    try:
        # Otherwise pinning would open a context on device 0, which takes memory there.
        with copier.current_device(), closing(batches):
            for batch in batches:
                put(copier.copy(batch))  # no variable, which would keep device memory alive
                if stop.is_set():
                    break
        put(_End())
    except BaseException as error:  # raised in the consumer's thread, in order
        put(_End(error))


def _drain(ready: Queue[_CopiedBatch | _End]) -> None:
    """Makes room in the queue, for which the thread may wait."""
    try:
        while True:
            ready.get_nowait()
    except Empty:
        return


class _Slot:
    """Host memory that batches are packed into. Used by one thread."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.copied: torch.cuda.Event | None = None  # the end of the last copy from it

    def reserve(self, num_bytes: int) -> Tensor:
        """Memory of so many bytes; waits until the last batch in it was copied."""
        if self.copied is not None:
            self.copied.synchronize()
        if len(self._memory) < num_bytes:
            size = max(_MIN_SLOT_BYTES, 1 << (num_bytes - 1).bit_length())
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory[:num_bytes]


class _BatchCopier:
    """Copies batches to a device: `copy` in one thread, `deliver` in another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _new_stream(device) if device.type == "cuda" else None
        self._slots = itertools.cycle([_Slot(self._stream is not None) for _ in range(_NUM_SLOTS)])

    def current_device(self) -> Any:
        """A context that makes the device the current one of this thread."""
        return nullcontext() if self._stream is None else torch.cuda.device(self._device)

    def copy(self, batch: Any) -> _CopiedBatch:
        """Starts to copy a batch; waits only for the copy before the last one."""
        places: list[tuple[Tensor, int]] = []
        size = 0

        def place(tensor: Tensor) -> Tensor:
            nonlocal size
            start = -(-size // _ALIGNMENT) * _ALIGNMENT
            size = start + tensor.nbytes
            places.append((tensor, start))
            return tensor

        _map_tensors(batch, place)
        slot = next(self._slots)
        host = slot.reserve(size)
        for tensor, start in places:
            _view(host, start, tensor).copy_(tensor.detach())
        memory, slot.copied = self._copy(host)
        starts = iter([start for _, start in places])
        moved = _map_tensors(batch, lambda tensor: _view(memory, next(starts), tensor))
        return _CopiedBatch(moved, memory, slot.copied)

    def _copy(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Starts a copy of ``host``; returns the device memory, and the event of its end."""
        if self._stream is None:
            return host.clone(), None
        with torch.cuda.stream(self._stream):
            memory = torch.empty(len(host), dtype=torch.uint8, device=self._device)
            memory.copy_(host, non_blocking=True)
            copied = _new_event()
            copied.record(self._stream)
        return memory, copied

    def deliver(self, moved: _CopiedBatch) -> Any:
        """The batch; makes the current stream of this thread wait for its copy.

        The memory belongs to the copying stream. The allocator must know that another stream reads
        it; otherwise it could give it to a later batch too early.
        """
        if moved.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(moved.copied)
            moved.memory.record_stream(stream)
        return moved.batch


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _new_event() -> torch.cuda.Event:
    """An event that blocks its waiter, instead of using CPU time."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """A tensor at byte ``start``, with dtype and shape of ``like``."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with each dense CPU tensor changed, in a fixed order."""
    if isinstance(value, Tensor):
        movable = value.device.type == "cpu" and value.layout is torch.strided
        return change(value) if movable else value
    if isinstance(value, dict):
        clone = copy.copy(value)  # keeps the class
        clone.update({key: _map_tensors(item, change) for key, item in value.items()})
        return clone
    if isinstance(value, list):
        if _NO_TENSORS.issuperset(map(type, value)):  # a twentieth of the time for strings
            return value
        return [_map_tensors(item, change) for item in value]
    if isinstance(value, tuple):
        items = [_map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
