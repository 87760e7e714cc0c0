"""Rows drawn one after the other in proportion to weights, none twice. Pure.

Each row has a clock that rings after an exponential time whose rate is its weight. The first k
clocks are a sample of k rows, each drawn in proportion to the weights of those left: the keys of
Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006). A hash of the row makes
its time. So any process draws the same rows, in one pass over the weights.

All of it is multiplications, additions and divisions of doubles, which IEEE 754 defines to the last
bit. A library's logarithm is not the same on every processor, and two ranks must not differ.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cache_client.order.permutation import Permutation, splitmix64

_Weights = npt.NDArray[np.integer[Any]]
_Floats = npt.NDArray[np.float64]

_BLOCK_ROWS: Final = 8_192  # the arrays of one block stay in the processor's cache
_PROBE_ROWS: Final = 65_536
_PROBE_DEVIATIONS: Final = 6  # beyond which one sample in 10**9 lies
_LAST_TIME: Final = float(np.finfo(np.float64).max)  # before that of a weight of 0
_LOG_2: Final = 0.6931471805599453
_ONE_BITS: Final = 0x3FF0000000000000  # of 1.0
_ROOT_BITS: Final = 0x3FE6A09E667F3BCD  # of the root of 1/2


def successive_sample(
    weights: _Weights, count: int, key: int
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Which rows are drawn, ascending.

    One pass over the weights takes 40 to 50 ns a row. Its memory is the result, and 2% of the rows
    for a moment: where the last drawn clock rings is known from a part of the rows, and only the
    times near it are compared.

    Args:
        weights: of each row, at least 0; shape ``(n,)``.
        count: k, at most the number of weights above 0.
        key: of the draw, in ``[0, 2**64)``.

    Returns:
        Rows in 4 bytes (8 from 2**32 rows), shape ``(k,)``.
    """
    chosen = _first_clocks(weights, count, key, *_probe(weights, count, key))
    if chosen is None:  # the part was not like the whole
        chosen = _first_clocks(weights, count, key, 0.0, _LAST_TIME)
    assert chosen is not None
    return chosen


def _probe(weights: _Weights, count: int, key: int) -> tuple[float, float]:
    """Times between which the last drawn clock rings, almost surely."""
    size = len(weights)
    if size <= 2 * _PROBE_ROWS:
        return 0.0, _LAST_TIME
    rows = Permutation(size, seed=0, epoch=0).apply(np.arange(_PROBE_ROWS))
    times = np.sort(_times(rows.astype(np.uint64), weights[rows], key))
    share = count / size
    off = _PROBE_DEVIATIONS * (math.sqrt(_PROBE_ROWS * share * (1 - share)) + 1)
    first, last = math.floor(_PROBE_ROWS * share - off), math.ceil(_PROBE_ROWS * share + off)
    return (
        float(times[first]) if first >= 0 else 0.0,
        min(float(times[last]), _LAST_TIME) if last < _PROBE_ROWS else _LAST_TIME,
    )


def _first_clocks(
    weights: _Weights, count: int, key: int, low: float, high: float
) -> npt.NDArray[np.unsignedinteger[Any]] | None:
    """The first clocks; None if the last of them does not ring in ``[low, high]``."""
    size = len(weights)
    dtype = np.uint32 if size < 2**32 else np.uint64
    found: npt.NDArray[np.unsignedinteger[Any]] = np.empty(count, dtype)
    near, near_times, filled = [np.empty(0, np.int64)], [np.empty(0)], 0
    for start in range(0, size, _BLOCK_ROWS):
        of_block = weights[start : start + _BLOCK_ROWS]
        times = _times(np.arange(start, start + len(of_block), dtype=np.uint64), of_block, key)
        rows = np.flatnonzero((times >= low) & (times <= high))
        near.append(rows + start)
        near_times.append(times[rows])
        rows = np.flatnonzero(times < low)
        if filled + len(rows) > count:
            return None
        np.add(rows, start, out=found[filled : filled + len(rows)], casting="unsafe")
        filled += len(rows)
    rows, times, missing = np.concatenate(near), np.concatenate(near_times), count - filled
    if missing > len(rows):
        return None
    if missing:
        last = np.partition(times, missing - 1)[missing - 1]
        taken = times < last
        taken[np.flatnonzero(times == last)[: missing - np.count_nonzero(taken)]] = True
        found[filled:] = rows[taken]
    found.sort(kind="stable")  # merges two runs, in place
    return found


def _times(rows: npt.NDArray[np.uint64], weights: _Weights, key: int) -> _Floats:
    """When the clock of each row rings: infinite for a weight of 0.

    Args:
        rows: changed in place.
    """
    rows += np.uint64(1)
    times = exponential(splitmix64(rows, key))
    with np.errstate(divide="ignore"):
        times /= weights.astype(np.float64)
    return times


def exponential(words: npt.NDArray[np.uint64]) -> _Floats:
    """Random words as exponential times of rate 1, exact to 1 part in 10**11.

    A word is the probability ``v = word / 2**64`` of a shorter time, which is ``-log(1 - v)``. With
    ``1 - v = 2**e * f`` and f near 1, it is ``-e log(2)`` plus a series of ``(1 - f) / (1 + f)``.
    """
    v = words.astype(np.float64)
    v *= 2.0**-64
    np.clip(v, 2.0**-65, 1 - 2.0**-53, out=v)
    bits = (1.0 - v).view(np.int64)
    exponent = bits + (_ONE_BITS - _ROOT_BITS)
    exponent >>= 52
    exponent -= 1023
    bits -= exponent << 52
    rest = 1.0 - bits.view(np.float64)
    np.copyto(rest, v, where=exponent == 0)  # 1 - (1 - v) has lost the last bits of v
    rest /= 2.0 - rest
    square = rest * rest
    series = np.full(len(v), 1 / 13)
    for number in (11, 9, 7, 5, 3, 1):
        series *= square
        series += 1 / number
    rest *= 2.0
    series *= rest
    series -= exponent * _LOG_2
    return series
