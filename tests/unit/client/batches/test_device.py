from __future__ import annotations

import gc
import itertools
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cache_client import ConfigError
from cache_client.batches import device as batches_device
from tests import forked_python
from tests.interrupts import Interrupt
from tests.waiting import wait_until

CPU = torch.device("cpu")
HAS_CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="torch finds no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


class Pair(NamedTuple):
    left: torch.Tensor
    right: str


class Source:
    """Batches with their number, and what became of them."""

    def __init__(self, *, count: int | None = None, fails_after: int | None = None) -> None:
        self.taken = 0
        self.closed_in: str | None = None
        self._count = count
        self._fails_after = fails_after

    def batches(self) -> Generator[dict[str, Any], None, None]:
        try:
            for number in itertools.count() if self._count is None else range(self._count):
                if number == self._fails_after:
                    raise OSError(f"no batch {number}")
                self.taken += 1
                yield {"number": torch.full((4,), number), "text": [f"batch {number}"]}
        finally:
            self.closed_in = threading.current_thread().name


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("cache-device")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert threads() == []


def through(batch: Any, device: str) -> Any:
    def source() -> Generator[Any, None, None]:
        yield batch

    (moved,) = batches_device.on_device(source(), torch.device(device))
    return moved


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype",
    ["uint8", "uint16", "uint32", "uint64", "int8", "int64", "float16", "float32", "float64"],
)
def test_every_dtype_keeps_its_values_and_shape(device: str, dtype: str) -> None:
    values = np.arange(60, dtype=dtype).reshape(5, 12)
    tensor = torch.from_numpy(values)
    batch = {
        "whole": tensor,
        "strided": tensor[:, 3],
        "turned": tensor.T,
        "one": tensor[2, 1],
        "none": tensor[:0],
        "images": tensor.view(5, 3, 4),
    }
    moved = through(batch, device)
    assert list(moved) == list(batch)
    for name, want in batch.items():
        assert moved[name].device.type == device
        assert moved[name].dtype == want.dtype
        assert moved[name].is_contiguous()
        assert np.array_equal(moved[name].cpu().numpy(), want.numpy()), name


@pytest.mark.parametrize("device", DEVICES)
def test_nesting_is_kept_and_all_but_dense_tensors_pass_through(device: str) -> None:
    sparse = torch.eye(3).to_sparse()
    batch = OrderedDict(
        ragged=[torch.arange(n) for n in (3, 0, 1)],
        nullable=[torch.ones(2), None],
        text=["a", b"b", None],
        pair=Pair(torch.zeros(2), "right"),
        tuple=(torch.tensor(True), 7),
        sparse=sparse,
        array=np.arange(3),
    )
    moved = through(batch, device)
    assert type(moved) is OrderedDict and list(moved) == list(batch)
    assert [t.tolist() for t in moved["ragged"]] == [[0, 1, 2], [], [0]]
    assert {t.device.type for t in moved["ragged"]} == {device}
    assert moved["nullable"][0].tolist() == [1.0, 1.0] and moved["nullable"][1] is None
    assert moved["text"] is batch["text"]  # thousands of strings: none is copied
    assert type(moved["pair"]) is Pair and moved["pair"].right == "right"
    assert moved["tuple"][0].item() is True and moved["tuple"][1] == 7
    assert moved["sparse"] is sparse
    assert moved["array"] is batch["array"]


@pytest.mark.parametrize("batch", [{}, {"text": ["a"]}, [], "text", None])
def test_a_batch_without_tensors_passes_through(batch: Any) -> None:
    assert through(batch, "cpu") == batch


def test_a_batch_that_is_a_tensor_is_moved_without_its_gradient() -> None:
    weights = torch.ones(3, requires_grad=True)
    moved = through(weights * 2, "cpu")
    assert moved.tolist() == [2.0, 2.0, 2.0]
    assert not moved.requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_batches_come_in_order_each_in_separate_memory(device: str) -> None:
    source = Source(count=20)
    kept = list(batches_device.on_device(source.batches(), torch.device(device)))
    assert [batch["number"].tolist() for batch in kept] == [[n] * 4 for n in range(20)]
    assert [batch["text"] for batch in kept] == [[f"batch {n}"] for n in range(20)]
    kept[0]["number"].zero_()
    assert [int(batch["number"][0]) for batch in kept] == list(range(20))


def test_batches_that_grow_and_shrink_keep_their_values() -> None:
    sizes = [1, 70_000, 3, 0, 200_000, 5, 200_001]

    def source() -> Generator[torch.Tensor, None, None]:
        for size in sizes:
            yield torch.arange(size)

    moved = list(batches_device.on_device(source(), CPU))
    assert [len(tensor) for tensor in moved] == sizes
    assert all(torch.equal(tensor, torch.arange(len(tensor))) for tensor in moved)


def test_two_batches_are_made_ahead_and_no_more() -> None:
    source = Source()
    with closing(batches_device.on_device(source.batches(), CPU)) as moved:
        for handed_out in range(1, 6):
            next(moved)
            wait_until(lambda n=handed_out: source.taken == n + 2, 10.0, "two batches ahead")
    assert source.taken == 5 + 2


def test_an_error_of_the_source_comes_after_the_batches_before_it() -> None:
    source = Source(fails_after=3)
    seen = []
    with pytest.raises(OSError, match="no batch 3"):
        for batch in batches_device.on_device(source.batches(), CPU):
            seen.append(int(batch["number"][0]))
    assert seen == [0, 1, 2]
    assert threads() == []


def test_a_batch_that_cannot_be_moved_is_an_error_in_its_turn() -> None:
    class Stubborn(dict[str, Any]):
        def __copy__(self) -> Stubborn:
            raise TypeError("not to be copied")

    def source() -> Generator[Any, None, None]:
        yield {"a": torch.ones(1)}
        yield Stubborn(a=torch.ones(1))

    moved = batches_device.on_device(source(), CPU)
    assert next(moved)["a"].tolist() == [1.0]
    with pytest.raises(TypeError, match="not to be copied"):
        next(moved)


@pytest.mark.parametrize("handed_out", [1, 2, 5])
def test_closing_early_closes_the_source_in_the_thread_that_ran_it(handed_out: int) -> None:
    source = Source()
    moved = batches_device.on_device(source.batches(), CPU)
    for _ in range(handed_out):
        next(moved)
    moved.close()
    assert source.closed_in == "cache-device"
    assert threads() == []


def test_an_interrupt_while_its_thread_begins_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start, source = threading.Thread.start, Source()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise Interrupt

    moved = batches_device.on_device(source.batches(), CPU)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(Interrupt):
            next(moved)
    assert source.closed_in == "cache-device"


def test_an_iterator_whose_thread_cannot_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        next(batches_device.on_device(Source().batches(), CPU))


def test_an_iterator_without_references_stops() -> None:
    source = Source()
    moved = batches_device.on_device(source.batches(), CPU)
    next(moved)
    del moved
    gc.collect()
    assert source.closed_in == "cache-device"


def test_an_iterator_that_its_thread_collects_ends_there() -> None:
    closed: list[BaseException | None] = []

    def source() -> Generator[Any, None, None]:
        yield torch.zeros(2)
        assert handed_out.wait(30.0)
        try:
            batches.close()
        except BaseException as error:
            closed.append(error)
        else:
            closed.append(None)
        yield torch.zeros(2)

    handed_out = threading.Event()
    batches = batches_device.on_device(source(), torch.device("cpu"))
    next(batches)
    handed_out.set()
    wait_until(lambda: closed, 30.0, "the iterator is closed")
    assert closed == [None]


def test_closing_interrupts_a_source_that_waits() -> None:
    waits, interrupted = threading.Event(), threading.Event()

    def source() -> Generator[torch.Tensor, None, None]:
        yield torch.zeros(1)
        waits.set()
        assert interrupted.wait(60.0)
        raise OSError("interrupted")

    moved = batches_device.on_device(source(), CPU, interrupt=interrupted.set)
    next(moved)
    assert waits.wait(60.0)
    moved.close()
    assert interrupted.is_set()


ENDS_BEFORE_ITS_CONSUMER = """
import itertools, threading, torch
from cache_client.batches.device import on_device

begun, interrupted = threading.Event(), threading.Event()

def source():
    yield torch.zeros(1)
    begun.set()
    interrupted.wait()
    yield from (torch.zeros(1) for _ in itertools.count())

def consume():
    try:
        for batch in on_device(source(), torch.device("cpu"), interrupt=interrupted.set):
            pass
    except Exception as error:
        print(type(error).__name__, error)

threading.Thread(target=consume).start()
begun.wait()
"""


# The consumer's thread goes on only when the program has ended all that it knew of.
AS_IT_BEGINS = """
import threading
ended, start = threading.Event(), threading.Thread.start
threading._register_atexit(ended.set)  # hooks run in the reverse of their order

def slow(thread):
    start(thread)
    if thread.name == "cache-device":
        ended.wait()

threading.Thread.start = slow
"""


@pytest.mark.parametrize("before", ["", AS_IT_BEGINS], ids=["while it waits", "as it begins"])
def test_a_consumer_in_a_thread_that_outlives_the_program_is_told(before: str) -> None:
    done = forked_python.run(
        [sys.executable, "-c", before + ENDS_BEFORE_ITS_CONSUMER],
        env={**os.environ, "FORKED_PYTHON_FINALIZES": "1"},
        capture_output=True,
        text=True,
        timeout=60.0,
        check=True,
    )
    assert done.stdout == "CacheError no more batches: the program ends\n"
    assert done.stderr == ""


def test_nothing_begins_before_the_first_batch_is_asked_for() -> None:
    source = Source()
    moved = batches_device.on_device(source.batches(), CPU)
    assert threads() == []
    moved.close()
    assert source.taken == 0


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None),
        ("cpu", torch.device("cpu")),
        ("cuda", torch.device("cuda")),
        ("cuda:1", torch.device("cuda", 1)),
        (torch.device("cuda", 3), torch.device("cuda", 3)),
    ],
)
def test_devices_are_found_by_name_without_asking_them(given: Any, found: Any) -> None:
    assert batches_device.find_device(given) == found


@pytest.mark.parametrize("given", ["gpu", "cuda:x", "meta", "", 1.5, torch.device("meta")])
def test_a_bad_device_is_quoted(given: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"got {given!r}") + "$"):
        batches_device.find_device(given)


@pytest.mark.parametrize(
    "device",
    ["cuda:97", pytest.param("cuda", marks=pytest.mark.skipif(HAS_CUDA, reason="it is there"))],
)
def test_a_device_that_torch_does_not_find_is_an_error_at_the_first_batch(device: str) -> None:
    source = Source()
    with pytest.raises(ConfigError, match=f"'{device}'"):
        next(batches_device.on_device(source.batches(), torch.device(device)))
    assert source.taken == 0


@needs_cuda
def test_on_cuda_a_batch_is_right_on_whatever_stream_it_is_taken() -> None:
    size = 1 << 22

    def source() -> Generator[torch.Tensor, None, None]:
        for number in range(12):
            yield torch.full((size,), number)

    sums = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for batch in batches_device.on_device(source(), torch.device("cuda")):
            torch.cuda._sleep(10_000_000)  # the consumer is behind: memory must not be given away
            sums.append(batch.sum())
            del batch
    stream.synchronize()
    assert [int(total) for total in sums] == [number * size for number in range(12)]
