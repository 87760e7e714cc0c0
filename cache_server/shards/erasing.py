"""Overwrites rows in a shard file with zeros, in place: who has it mapped loses them, too.

Strings and lists keep their lengths, and nulls within lists stay nulls: Arrow's messages say how
many there are.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_protocol.storage.row_sets import RowIds
from cache_protocol.storage.shard_files import MARK, MappedShard

_Bytes = npt.NDArray[np.uint8]


def erase(path: Path, shard: MappedShard, places: RowIds, num_erased: int) -> None:
    """Overwrites rows in the file of a shard, and waits until they are on disk.

    Its mark and its time change first, so that a reader on this machine finds that it changed.

    Args:
        shard: the same file, mapped.
        num_erased: rows of the file that are erased then: the mark, the same on all nodes.

    Raises:
        OSError: it cannot be written.
    """
    path.chmod(0o644)
    try:
        with path.open("r+b") as file:
            with mmap.mmap(file.fileno(), 0) as writable:
                writable[MARK] = (num_erased % 2**16).to_bytes(2, "little")
                os.utime(path)
                _overwrite(np.frombuffer(writable, np.uint8), shard, places)
                writable.flush()
            os.fsync(file.fileno())
        os.utime(path)
    finally:
        path.chmod(0o444)


def _overwrite(target: _Bytes, shard: MappedShard, places: RowIds) -> None:
    for index, matrix in shard.matrices.items():
        row_bytes = matrix.shape[1] * matrix.itemsize
        start = shard.offset(index)
        rows = target[start : start + len(matrix) * row_bytes].reshape(len(matrix), row_bytes)
        rows[places] = 0
    for index, column in enumerate(shard.layout.columns):
        if column.kind == "plain":
            _zero(target, shard.address, shard.batch.column(index), places)


def _zero(target: _Bytes, base: int, array: pa.Array, places: RowIds) -> None:
    """Overwrites some values of an array; its offsets were checked before.

    Args:
        base: the address at which ``target`` begins, as arrays have it.
    """
    if not len(places):
        return
    kind, types = array.type, pa.types
    if types.is_struct(kind):
        for child in range(kind.num_fields):
            _zero(target, base, array.field(child), places)
        return
    if types.is_fixed_size_list(kind):
        width = kind.list_size
        inner = (places[:, None] + array.offset) * width + np.arange(width)
        _zero(target, base, array.values, inner.reshape(-1))
        return
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = array.offsets.to_numpy()
        runs = [np.arange(offsets[at], offsets[at + 1]) for at in places.tolist()]
        inner = np.concatenate(runs).astype(np.int64)
        for child in (array.keys, array.items) if types.is_map(kind) else (array.values,):
            _zero(target, base, child, inner)
        return
    buffers = array.buffers()
    data, own = buffers[-1], places + array.offset
    if data is None:
        return
    start = data.address - base
    if types.is_string(kind) or types.is_binary(kind):
        _zero_texts(target, start, np.frombuffer(buffers[1], np.int32), own)
    elif types.is_large_string(kind) or types.is_large_binary(kind):
        _zero_texts(target, start, np.frombuffer(buffers[1], np.int64), own)
    elif types.is_boolean(kind):  # eight values a byte, which other rows may share
        np.bitwise_and.at(target, start + own // 8, ~(np.uint8(1) << (own % 8).astype(np.uint8)))
    else:
        width = kind.bit_width // 8
        values = target[start : start + data.size // width * width].reshape(-1, width)
        values[own] = 0


def _zero_texts(target: _Bytes, start: int, bounds: npt.NDArray[Any], places: RowIds) -> None:
    for at in places.tolist():
        target[start + int(bounds[at]) : start + int(bounds[at + 1])] = 0
