"""Hashes of rows that were forgotten, by which later loads leave them out. Pure.

A tombstone has 24 bytes: a quick hash of 8 that finds candidates among many rows, then a keyed
BLAKE2b of 16 over the whole row. Only who has the key of the cluster can try values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_protocol.storage.layout import Layout, as_matrix
from cache_protocol.storage.row_sets import RowIds, encode_rows

BYTES = 24
_MIX = np.uint64(0x9E3779B97F4A7C15)
_Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Tombstones:
    """Those of a dataset.

    Attributes:
        number: of the last act of the dataset.
        key: of the hashes.
        known: 24 bytes each, ascending.
    """

    number: int
    key: bytes
    known: bytes

    def find(self, batch: pa.RecordBatch) -> bytes:
        """A row set of the rows of a stored batch that were forgotten."""
        if not self.known or not batch.num_rows:
            return b""
        rows = np.frombuffer(self.known, ">u8").reshape(-1, BYTES // 8)
        quick = np.unique(rows[:, 0].astype(np.uint64))
        hashes = _quick(batch, self.key)
        at = np.minimum(np.searchsorted(quick, hashes), len(quick) - 1)
        candidates = np.flatnonzero(quick[at] == hashes)
        known = {self.known[i : i + BYTES] for i in range(0, len(self.known), BYTES)}
        made = tombstones_of(batch, candidates, self.key, hashes)
        hits = [row for row, each in zip(candidates.tolist(), made, strict=True) if each in known]
        return encode_rows(np.array(hits, np.int64))


def joined(tombstones: Iterable[bytes]) -> bytes:
    """Tombstones as bytes: ascending, each once."""
    return b"".join(sorted(set(tombstones)))


def tombstones_of(
    batch: pa.RecordBatch, rows: RowIds, key: bytes, quick: _Words | None = None
) -> list[bytes]:
    """The tombstones of some rows of a stored batch."""
    if not len(rows):
        return []
    quick = _quick(batch, key) if quick is None else quick
    layout = Layout.of_stored(batch.schema)
    named = [f"{each.name}:{each.type}" for each in layout.logical]
    begun = hashlib.blake2b("\n".join(named).encode(), digest_size=16, key=key)
    columns = list(zip(layout.columns, batch.columns, strict=True))
    matrices = {c.names: as_matrix(a) for c, a in columns if c.dtype is not None and c.names}
    nulls: dict[str, Any] = {}
    if layout.null_index is not None:
        bits = as_matrix(batch.column(layout.null_index)).view(np.uint8)
        nulls = layout.nulls.unpack_all(bits)
    found = []
    for row in rows.tolist():
        state = begun.copy()
        for column, array in columns:
            if column.kind == "plain":
                _add(state, array[row].as_py())
            elif column.names:
                state.update(matrices[column.names][row].tobytes())
        for name, mask in sorted(nulls.items()):
            if mask[row].any():
                state.update(f"\0{name}".encode() + np.packbits(mask[row]).tobytes())
        found.append(int(quick[row]).to_bytes(8, "big") + state.digest())
    return found


def _add(state: Any, value: Any) -> None:
    """Adds one value: its kind, its length and its content."""
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        state.update(b"l%d:" % len(value))
        for each in value:
            _add(state, each)
        return
    data = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
    state.update(b"%s%d:" % (type(value).__name__.encode(), len(data)) + data)


def _quick(batch: pa.RecordBatch, key: bytes) -> _Words:
    """A quick hash of each row, over what has a fixed place, and the lengths of texts."""
    layout = Layout.of_stored(batch.schema)
    mixed = np.full(batch.num_rows, int.from_bytes(key[:8], "big"), np.uint64)
    with np.errstate(over="ignore"):
        for column, array in zip(layout.columns, batch.columns, strict=True):
            if column.kind == "nulls":
                continue
            for word in _words(array, plain=column.kind == "plain"):
                mixed = (mixed ^ word) * _MIX
                mixed ^= mixed >> np.uint64(29)
    return mixed


def _words(array: pa.Array, *, plain: bool) -> Iterable[_Words]:
    if not plain:
        matrix = np.ascontiguousarray(as_matrix(array))
        octets = matrix.view(np.uint8).reshape(len(matrix), -1)
        for start in range(0, octets.shape[1], 8):
            word = np.zeros((len(octets), 8), np.uint8)
            part = octets[:, start : start + 8]
            word[:, : part.shape[1]] = part
            yield word.view(np.uint64)[:, 0]
        return
    types, kind = pa.types, array.type
    bounds = None
    if types.is_string(kind) or types.is_binary(kind):
        bounds = np.frombuffer(array.buffers()[1], np.int32)
    elif types.is_large_string(kind) or types.is_large_binary(kind):
        bounds = np.frombuffer(array.buffers()[1], np.int64)
    if bounds is not None:
        bounds = bounds[array.offset : array.offset + len(array) + 1]
        yield np.diff(bounds).astype(np.uint64)
