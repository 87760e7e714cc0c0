"""Batches that DataLoader workers send, and tensors that a loop may change in place.

torch sends each storage of a batch in shared memory of its own, for a file descriptor and a tenth
of a millisecond. So the tensors of a batch are packed into one block of shared memory. Where the
batch arrives, a tensor that is at most a quarter of the block is copied out of it: a loop that
keeps a column keeps neither the other ones nor shared memory. Knows neither rows nor nodes.
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


class _Place(NamedTuple):
    """Where a tensor lies in a block."""

    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


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
    """The same batches, made outside `torch.inference_mode`, whatever the mode of the caller.

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


def _packed(batch: Any) -> tuple[Tensor | None, Any]:
    """A block of shared memory, and the batch with a place in it for each tensor that is there."""
    tensors: list[Tensor] = []
    places: dict[int, _Place] = {}
    size = 0

    def place(tensor: Tensor) -> _Place:
        nonlocal size
        found = places.get(id(tensor))
        if found is None:
            found = _Place(size, tensor.nbytes, tensor.dtype, tuple(tensor.shape))
            places[id(tensor)] = found
            tensors.append(tensor)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return found

    def pack(value: Any) -> Any:
        if _is_packed(value):
            return place(value)
        if isinstance(value, ListColumn):
            rebuild, arguments = value.__reduce__()
            if rebuild is cut:
                return _Lists(place(arguments[0]), arguments[1:])
        return value

    with torch.inference_mode(False):
        rest = _mapped(batch, pack)
        if not size:
            return None, _mapped(batch, lambda value: value)
        # Not by `share_memory_`: torch copies larger tensors with threads that a fork lacks.
        storage = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
        block = torch.empty(0, dtype=torch.uint8, device=torch.device("cpu"))
        block.set_(storage, 0, (size,), (1,))
        memory = block.numpy()
        for tensor in tensors:
            start, num_bytes, _, _ = places[id(tensor)]
            if num_bytes:
                values = tensor.reshape(-1).view(torch.uint8).numpy()
                memory[start : start + num_bytes] = values
    return block, rest


def _is_packed(value: Any) -> bool:
    """Whether a value is a plain tensor that owns its storage."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_complex() or value.is_quantized)
        and value.is_contiguous()
        and value.untyped_storage().nbytes() == value.nbytes
    )


def _received(block: Tensor | None, batch: Any) -> Any:
    if block is None:
        return batch
    memory, made = block.numpy(), dict[_Place, Tensor]()

    def take(value: Any) -> Any:
        if isinstance(value, _Lists):
            return cut(take(value.joined), *value.rest)
        if not isinstance(value, _Place):
            return value
        tensor = made.get(value)
        if tensor is None:
            start, num_bytes, dtype, shape = value
            if num_bytes * _SMALL <= len(memory):
                own = torch.from_numpy(memory[start : start + num_bytes].copy())
            else:
                own = block[start : start + num_bytes]
            # `data`, because torch would count a change in place of one as a change of all.
            tensor = made[value] = own.view(dtype).view(shape).data
        return tensor

    with torch.inference_mode(False):
        return _mapped(batch, take)


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
