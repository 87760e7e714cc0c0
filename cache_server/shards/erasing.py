"""Overwrites rows in a shard file with zeros, in place: who has it mapped loses them, too.

Strings and lists keep their lengths, and nulls within lists stay nulls: Arrow's messages say how
many there are.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_protocol.storage.row_sets import RowIds
from cache_protocol.storage.shard_files import MappedShard

_Places = npt.NDArray[np.int64]


def erase(path: Path, shard: MappedShard, places: RowIds) -> None:
    """Overwrites rows in the file of a shard, and waits until they are on disk.

    Its time changes first, so that a reader on this machine finds that it changed.

    Args:
        shard: the same file, mapped.

    Raises:
        OSError: it cannot be written.
    """
    path.chmod(0o644)
    try:
        os.utime(path)
        with path.open("r+b") as file:
            with mmap.mmap(file.fileno(), 0) as writable:
                _overwrite(np.frombuffer(writable, np.uint8), shard, places)
                writable.flush()
            os.fsync(file.fileno())
        os.utime(path)
    finally:
        path.chmod(0o444)


def _overwrite(target: npt.NDArray[np.uint8], shard: MappedShard, places: RowIds) -> None:
    for index, matrix in shard.matrices.items():
        row_bytes = matrix.shape[1] * matrix.itemsize
        start = shard.offset(index)
        rows = target[start : start + len(matrix) * row_bytes].reshape(len(matrix), row_bytes)
        rows[places] = 0
    base = shard.address
    for index, column in enumerate(shard.layout.columns):
        if column.kind == "plain":
            for start, stop in _ranges(shard.batch.column(index), places):
                target[start - base : stop - base] = 0


def _ranges(array: pa.Array, places: _Places) -> Iterator[tuple[int, int]]:
    """The addresses of the values of some rows; offsets were checked before."""
    if not len(places):
        return
    kind, types = array.type, pa.types
    if types.is_struct(kind):
        for child in range(kind.num_fields):
            yield from _ranges(array.field(child), places + array.offset)
        return
    if types.is_fixed_size_list(kind):
        width = kind.list_size
        inner = (places[:, None] + array.offset) * width + np.arange(width)
        yield from _ranges(array.values, inner.reshape(-1))
        return
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = array.offsets.to_numpy()
        child = array.values if not types.is_map(kind) else _entries(array)
        runs = [np.arange(offsets[at], offsets[at + 1]) for at in places.tolist()]
        yield from _ranges(child, np.concatenate(runs).astype(np.int64))
        return
    buffers = array.buffers()
    data = buffers[-1]
    if data is None:
        return
    if types.is_string(kind) or types.is_binary(kind):
        yield from _texts(array, buffers[1], data, places, np.dtype(np.int32))
    elif types.is_large_string(kind) or types.is_large_binary(kind):
        yield from _texts(array, buffers[1], data, places, np.dtype(np.int64))
    elif types.is_boolean(kind):  # eight rows a byte: those around it are kept by no one
        raise AssertionError("booleans are stored as bytes")
    else:
        width = kind.bit_width // 8
        for at in (places + array.offset).tolist():
            yield data.address + at * width, data.address + (at + 1) * width


def _entries(array: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([array.keys, array.items], names=["key", "value"])


def _texts(
    array: pa.Array, offsets: pa.Buffer, data: pa.Buffer, places: _Places, dtype: np.dtype
) -> Iterator[tuple[int, int]]:
    bounds = np.frombuffer(offsets, dtype)
    for at in (places + array.offset).tolist():
        if bounds[at + 1] > bounds[at]:
            yield data.address + int(bounds[at]), data.address + int(bounds[at + 1])
