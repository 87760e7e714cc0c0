"""Decimals -> the nearest float64. Pure."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_MOST_EXACT_INTEGER, _MOST_EXACT_POWER = 2**53, 22  # exact in a float64: powers of two, of ten

Floats: TypeAlias = npt.NDArray[np.float64]


def nearest_floats(decimals: pa.Array) -> pa.Array:
    """Each decimal as its nearest float64.

    A cast of Arrow rounds twice: it multiplies by a rounded power of ten, so 0.57 becomes
    0.5700000000000001. A quotient of two exact floats, or a string, is rounded once.
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
    if words > 1:  # the upper words hold only the sign
        exact &= (integers[:, 1:] == (low >> 63)[:, None]).all(axis=1)
    if decimals.null_count:
        mask = decimals.is_null().to_numpy(zero_copy_only=False)
        exact |= mask
    if not exact.all():
        return pc.cast(pc.cast(decimals, pa.string()), pa.float64())
    return pa.array(low / 10.0**dtype.scale, mask=mask)


def scaled_floats(integers: npt.NDArray[np.signedinteger[Any]], scale: int) -> Floats:
    """The nearest float64 of ``integers / 10**scale``, of the same shape; a new array."""
    if not 0 <= scale <= _MOST_EXACT_POWER:
        exact = np.zeros(integers.shape, np.bool_)
        floats: Floats = np.empty(integers.shape, np.float64)
    else:
        floats = integers / 10.0**scale
        exact = (integers >= -_MOST_EXACT_INTEGER) & (integers <= _MOST_EXACT_INTEGER)
    if not exact.all():
        texts = (f"{number}e{-scale}" for number in integers[~exact].tolist())
        floats[~exact] = [float(text) for text in texts]
    return floats
