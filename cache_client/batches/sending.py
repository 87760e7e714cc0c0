"""Batches that DataLoader workers send, and tensors that a loop may change in place.

torch sends each storage of a batch separately, each for a file descriptor. So the tensors of a
batch are packed into one block of shared memory. Where the batch arrives, a tensor that is at most
a quarter of the block is copied out of it: a loop that keeps a column keeps neither the other ones
nor shared memory. Knows neither rows nor nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from cache_client.batches.batch_formats import ListColumn, cut

_T = TypeVar("_T")
_ALIGNMENT = 64  # bytes, of each tensor in a block
_SMALL = 4  # a tensor is copied out of a block of at least so many times its bytes
_END: Any = object()
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_OF_NUMPY = frozenset((*_INTEGERS, torch.float16, torch.float32, torch.float64))


class _Here:
    """Stands for the next tensor of a block."""


class _Same(NamedTuple):
    """Stands for a tensor that came before."""

    number: int


class _Group(NamedTuple):
    """Tensors of one dtype and shape in a block, and their numbers among all."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    numbers: list[int]

    def all_in(self, block: Tensor) -> Tensor:
        """The tensors as one, ``[n, *shape]``; a view."""
        part = block[self.start : self.start + self.num_bytes * len(self.numbers)]
        return part.view(self.dtype).view(len(self.numbers), *self.shape)


class _Lists(NamedTuple):
    """A `ListColumn` whose tensors are joined; the other arguments of `cut`."""

    joined: Any
    rest: tuple[Any, ...]


class _Sent:
    """What is packed when it is pickled. It arrives as its plain type. Not thread-safe."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, _packed(self)


class _SentDict(_Sent, dict[str, Any]):
    def __copy__(self) -> Self:  # not by pickling; torch copies dicts before it sends them
        return type(self)(self)


class _SentList(_Sent, list[Any]):
    def __copy__(self) -> Self:
        return type(self)(self)


class _SentTuple(_Sent, tuple[Any, ...]):
    pass


_KINDS: dict[type, type] = {dict: _SentDict, list: _SentList, tuple: _SentTuple}
_PLAIN = {kind: plain for plain, kind in _KINDS.items()} | {plain: plain for plain in _KINDS}


def sent(batch: Any) -> Any:
    """The batch, in a DataLoader worker such that it is packed when it is sent.

    There a dict, list or tuple becomes an equal one of a subclass. Others stay as they are.
    """
    kind = _KINDS.get(type(batch))
    return batch if kind is None or get_worker_info() is None else kind(batch)


def changeable(batches: Iterator[_T]) -> Generator[_T, None, None]:
    """The same batches, made outside `torch.inference_mode`, also if the caller is inside it.

    A tensor that is made inside it can never be changed in place outside.
    """
    while True:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                batch = next(batches, _END)
        else:
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def _packed(batch: Any) -> tuple[Tensor | None, list[_Group], Any]:
    """A block of shared memory, what lies in it, and the batch without that."""
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}

    def pack(value: Any) -> Any:
        if _is_packed(value):
            number = numbers.setdefault(id(value), len(tensors))
            if number < len(tensors):
                return _Same(number)
            tensors.append(value)
            return _Here
        if isinstance(value, ListColumn):
            rebuild, arguments = value.__reduce__()
            if rebuild is cut:
                return _Lists(pack(arguments[0]), arguments[1:])
        return value

    with torch.inference_mode(False):
        rest = _mapped(batch, pack)
        if not tensors:
            return None, [], rest
        groups, size = _groups(tensors)
        # Not by `share_memory_`: torch copies larger tensors with threads that a fork lacks.
        storage = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
        block = torch.empty(0, dtype=torch.uint8, device=torch.device("cpu"))
        block.set_(storage, 0, (size,), (1,))
        for group in groups:
            torch.stack([tensors[number] for number in group.numbers], out=group.all_in(block))
    return block, groups, rest


def _groups(tensors: list[Tensor]) -> tuple[list[_Group], int]:
    """Where tensors lie in a block, and its bytes."""
    alike: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for number, tensor in enumerate(tensors):
        alike.setdefault((tensor.dtype, tensor.shape), []).append(number)
    groups, size = [], 0
    for (dtype, shape), numbers in alike.items():
        num_bytes = tensors[numbers[0]].nbytes
        groups.append(_Group(dtype, tuple(shape), size, num_bytes, numbers))
        size += -(-num_bytes * len(numbers) // _ALIGNMENT) * _ALIGNMENT
    return groups, size


def _is_packed(value: Any) -> bool:
    """Whether a value is a plain tensor that owns its storage, and has one."""
    return (
        type(value) is Tensor
        and value.nbytes > 0
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_complex() or value.is_quantized)
        and value.is_contiguous()
        and value.untyped_storage().nbytes() == value.nbytes
    )


def _received(block: Tensor | None, groups: list[_Group], batch: Any) -> Any:
    if block is None:
        return batch
    made: list[Any] = [None] * sum(len(group.numbers) for group in groups)
    with torch.inference_mode(False):
        for group in groups:
            own = group.num_bytes * _SMALL <= len(block)
            for number, tensor in zip(group.numbers, _cut_out(block, group, own), strict=True):
                made[number] = tensor
        following = iter(made)

        def take(value: Any) -> Any:
            if value is _Here:
                return next(following)
            if isinstance(value, _Same):
                return made[value.number]
            if isinstance(value, _Lists):
                return cut(take(value.joined), *value.rest)
            return value

        return _mapped(batch, take)


def _cut_out(block: Tensor, group: _Group, own: bool) -> list[Tensor]:
    """The tensors of a group: copies, or views."""
    together = group.all_in(block)
    if not own:
        # `data`, because torch would count a change in place of one as a change of all.
        return [tensor.data for tensor in together.unbind(0)]
    # By numpy, which copies short arrays in a third of the time.
    if len(group.shape) == 1 and group.dtype in _OF_NUMPY:
        return [torch.from_numpy(row.copy()) for row in together.numpy()]
    return [tensor.clone() for tensor in together.unbind(0)]


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with all that is in its dicts, lists and tuples changed."""
    plain = _PLAIN.get(type(value))
    if plain is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    if plain is not None:
        if {str, bytes, int, float, bool, type(None)}.issuperset(map(type, value)):
            return plain(value)
        return plain([_mapped(item, change) for item in value])
    return change(value)
