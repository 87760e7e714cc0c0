"""Decimals as the numbers that are stored for them. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_MOST_EXACT_INTEGER, _MOST_EXACT_POWER = 2**53, 22  # of a float64: of two, of ten


def nearest_floats(decimals: pa.Array) -> pa.Array:
    """Each decimal as the float64 next to it.

    Not by a cast, which multiplies by a power of ten that is itself rounded, and so makes
    0.5700000000000001 of 0.57. A quotient of two exact floats is rounded once, and so is a text.
    """
    dtype, mask = decimals.type, None
    if not 0 <= dtype.scale <= _MOST_EXACT_POWER or not len(decimals):
        return pc.cast(pc.cast(decimals, pa.string()), pa.float64())
    words = max(dtype.bit_width // 64, 1)
    word = np.dtype(f"i{min(dtype.bit_width // 8, 8)}")
    stop = decimals.offset + len(decimals)
    raw = np.frombuffer(decimals.buffers()[1], word, count=stop * words)
    integers = raw.reshape(-1, words)[decimals.offset :]
    low: npt.NDArray[np.int64] = integers[:, 0]
    exact = (low >= -_MOST_EXACT_INTEGER) & (low <= _MOST_EXACT_INTEGER)
    if words > 1:  # the upper words say no more than the sign
        exact &= (integers[:, 1:] == (low >> 63)[:, None]).all(axis=1)
    if decimals.null_count:
        mask = decimals.is_null().to_numpy(zero_copy_only=False)
        exact |= mask
    if not exact.all():
        return pc.cast(pc.cast(decimals, pa.string()), pa.float64())
    return pa.array(low / 10.0**dtype.scale, mask=mask)


def of_strings(dtype: pa.DataType) -> pa.DataType:
    """Lists like ``dtype``, of strings."""
    if pa.types.is_fixed_size_list(dtype):
        return pa.list_(of_strings(dtype.value_type), dtype.list_size)
    if pa.types.is_list(dtype):
        return pa.list_(of_strings(dtype.value_type))
    if pa.types.is_large_list(dtype):
        return pa.large_list(of_strings(dtype.value_type))
    return pa.string()
