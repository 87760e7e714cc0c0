"""Batches -> the same batches on a device, copied ahead of use, in the background.

A thread takes batches from their source, packs the tensors of each into one of two slots of host
memory, and copies the slot to the device at once:

    source -> slot (pinned) -> copy on a stream of its own -> handed out in the consumer's thread

On CUDA the copy of a batch therefore runs while the device works on the batches before it. What
is handed out is ordered behind its copy on the stream that is the consumer's current one at that
moment. On the CPU everything is the same but pinning, streams and events.

Knows tensors, threads and streams; knows neither rows nor nodes.
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

_SLOTS = 2  # one is filled while the other is copied
_ALIGNMENT = 256  # bytes; of each tensor in a slot, as the device's own allocator aligns
_SMALLEST_SLOT = 4096
_EXIT_WAIT_S = 3.0  # a program that ends waits so long for the threads of iterators alive


def find_device(device: torch.device | str | None) -> torch.device | None:
    """The device that is meant; None for none.

    Asks nothing of the device itself: that could leave this process unable to fork.

    Raises:
        ConfigError: quoting what is no CPU or CUDA device.
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
    """The batches of a source, in its order, with their tensors on ``device``.

    A batch is a tensor, or dicts, lists and tuples of them in any depth. Each tensor becomes a
    contiguous one of the same dtype, shape and values; all of a batch are views of one piece of
    device memory that the batch owns. Everything else passes through as it is: strings, numbers,
    None, objects of other types, and tensors that are sparse or not on the CPU.

    At most two batches are taken from the source and copied ahead of the one handed out last.
    Nothing is begun before the first batch is asked for. Whoever uses a batch on another stream
    than the one on which it was taken must order that, as always in torch. A program may end while
    iterators are alive: they are broken off, and their threads awaited for a few seconds at most.

    Args:
        batches: the source. Runs in a thread of this function's from the first batch on, and is
            closed there.
        device: a CPU or CUDA device; ``cuda`` is the current one of the thread that asks for the
            first batch.
        interrupt: called from the consumer's thread when the iterator is closed or has ended;
            makes a source that waits give up, so that closing need not wait for it. May be called
            when there is nothing to interrupt.

    Raises:
        ConfigError: torch does not find the device.
        Exception: whatever the source raises, after the batches before it were handed out.

    Thread-safety: iterate and close from one thread at a time. When it is closed, its thread has
    ended.
    """
    mover = _Mover(_resolved(device))
    ready: Queue[_Moved | _End] = Queue(maxsize=1)
    stop = threading.Event()
    # A daemon: an iterator that somebody keeps must not keep the interpreter from ending.
    thread = threading.Thread(
        target=_move_all, args=(batches, mover, ready, stop), name="cache-device", daemon=True
    )
    hand_off = _HandOff(thread, ready, stop, interrupt)
    try:
        _running.add(hand_off)  # first, or a program that ends just then would not know of it
        thread.start()
        while isinstance(item := ready.get(), _Moved):
            yield mover.hand_out(item)
        if item.error is not None:
            try:
                raise item.error
            finally:
                del item  # its traceback holds this frame
    finally:
        # The last thing an interpreter does is to close what is alive: no other thread runs then.
        if not sys.is_finalizing():
            hand_off.break_off()
            # Not by itself, which may have collected the iterator, nor one that did not begin.
            if thread.is_alive() and threading.current_thread() is not thread:
                thread.join()
        _running.discard(hand_off)


@dataclass(frozen=True, eq=False)
class _HandOff:
    """What runs behind an iterator of `on_device`."""

    thread: threading.Thread
    ready: Queue[_Moved | _End]
    stop: threading.Event
    interrupt: Callable[[], None]

    def break_off(self) -> None:
        """Makes the thread end soon; waits for nothing."""
        self.stop.set()
        self.interrupt()
        _let_go(self.ready)


_running: set[_HandOff] = set()
# A forked child has none of the threads.
os.register_at_fork(after_in_child=_running.clear)


def _end_all() -> None:
    """Ends every thread before the interpreter does.

    A thread that is inside C++ when the interpreter has ended, and wants to go on with Python,
    aborts the process.
    """
    left = list(_running)
    for hand_off in left:
        hand_off.break_off()
    deadline = time.monotonic() + _EXIT_WAIT_S
    for hand_off in left:
        if hand_off.thread.is_alive():  # not: one that is about to begin, and then ends at once
            hand_off.thread.join(max(0.0, deadline - time.monotonic()))
        _let_go(hand_off.ready)
        with suppress(Full):  # for a consumer in another thread, which may be waiting
            hand_off.ready.put_nowait(_End(CacheError("no more batches: the program ends")))


# Before the threads of pools are awaited, which may themselves wait for nodes until they are
# interrupted. Where Python has no such hook any more, after that.
getattr(threading, "_register_atexit", atexit.register)(_end_all)


@dataclass(frozen=True)
class _Moved:
    """A batch whose copy was begun; ``memory`` holds its tensors, and ``copied`` says when."""

    batch: Any
    memory: Tensor
    copied: torch.cuda.Event | None


@dataclass(frozen=True)
class _End:
    """The source ended, or raised."""

    error: BaseException | None = None


def _resolved(device: torch.device) -> torch.device:
    """The device with its number; a thread has a current CUDA device of its own, which is 0."""
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


def _move_all(
    batches: Generator[Any, None, None],
    mover: _Mover,
    ready: Queue[_Moved | _End],
    stop: threading.Event,
) -> None:
    def put(item: _Moved | _End) -> None:
        # One item at most is put after a stop: `_let_go` makes room for it.
        if not stop.is_set():
            ready.put(item)

    try:
        # Or pinning would open a context on device 0, which costs it memory.
        with mover.current_device(), closing(batches):
            for batch in batches:
                put(mover.move(batch))  # no name is kept for what fills device memory
                if stop.is_set():
                    break
        put(_End())
    except BaseException as error:  # raised in the consumer's thread, in its turn
        put(_End(error))


def _let_go(ready: Queue[_Moved | _End]) -> None:
    """Frees the place that the thread may be waiting for."""
    try:
        while True:
            ready.get_nowait()
    except Empty:
        return


class _Slot:
    """Host memory that a batch passes through on its way. Used by one thread."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.copied: torch.cuda.Event | None = None  # of the batch that lies in it

    def room(self, num_bytes: int) -> Tensor:
        """So many bytes to fill: waits until those of the last batch were copied."""
        if self.copied is not None:
            self.copied.synchronize()
        if len(self._memory) < num_bytes:
            size = max(_SMALLEST_SLOT, 1 << (num_bytes - 1).bit_length())
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory[:num_bytes]


class _Mover:
    """Copies batches to a device: `move` in one thread, `hand_out` in another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _new_stream(device) if device.type == "cuda" else None
        self._slots = itertools.cycle([_Slot(self._stream is not None) for _ in range(_SLOTS)])

    def current_device(self) -> Any:
        """A context in which the device is the thread's current one."""
        return nullcontext() if self._stream is None else torch.cuda.device(self._device)

    def move(self, batch: Any) -> _Moved:
        """Begins the copy of a batch; waits for the copy before the last one only."""
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
        host = slot.room(size)
        for tensor, start in places:
            _view(host, start, tensor).copy_(tensor.detach())
        memory, slot.copied = self._copy(host)
        starts = iter([start for _, start in places])
        moved = _map_tensors(batch, lambda tensor: _view(memory, next(starts), tensor))
        return _Moved(moved, memory, slot.copied)

    def _copy(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Device memory that will hold the bytes of ``host``, and when it will."""
        if self._stream is None:
            return host.clone(), None
        with torch.cuda.stream(self._stream):
            memory = torch.empty(len(host), dtype=torch.uint8, device=self._device)
            memory.copy_(host, non_blocking=True)
            copied = _new_event()
            copied.record(self._stream)
        return memory, copied

    def hand_out(self, moved: _Moved) -> Any:
        """The batch, ordered behind its copy on the calling thread's current stream.

        The memory is of the copying stream: the allocator must learn who else reads it, or it
        would give it to a later batch while the consumer still works on this one.
        """
        if moved.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(moved.copied)
            moved.memory.record_stream(stream)
        return moved.batch


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _new_event() -> torch.cuda.Event:
    """Waiting for it must not burn a core."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes from ``start`` on as a tensor of the dtype and shape of ``like``."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every dense CPU tensor changed, always in the same order."""
    if isinstance(value, Tensor):
        movable = value.device.type == "cpu" and value.layout is torch.strided
        return change(value) if movable else value
    if isinstance(value, dict):
        clone = copy.copy(value)  # of its own class
        clone.update({key: _map_tensors(item, change) for key, item in value.items()})
        return clone
    if isinstance(value, list):
        return [_map_tensors(item, change) for item in value]
    if isinstance(value, tuple):
        items = [_map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
