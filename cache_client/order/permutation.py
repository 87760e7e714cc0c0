"""The keyed permutation of row numbers behind the shuffle, computed value by value.

Pure. Knows neither steps nor ranks.
"""

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_protocol.datasets.values import as_integer

Int64Array = NDArray[np.int64]
_UInt32Array = NDArray[np.uint32]

ALGORITHM_VERSION: Final = 1
"""Version of the map from position to row id; a state records it as ``format``. Any change to the
map needs the next number."""

MAX_ROWS: Final = 2**62

_ROUNDS: Final = 8
_ROUNDS_SMALL: Final = 16  # below _SMALL_SIZE a round has few functions to choose from
_SMALL_SIZE: Final = 256
_CHUNK_ROWS: Final = 65_536  # few calls a row; the scratch arrays of one chunk are 1.5 MB

# 0-d arrays: numpy starts an operation with one a third faster than with a scalar, and short calls
# mostly consist of such starts.
_MIX_A: Final = np.array(0x7FEB352D, np.uint32)
_MIX_B: Final = np.array(0x846CA68B, np.uint32)
_MIX_SHIFT: Final = np.array(15, np.uint32)
_HIGH_HALF: Final = np.array(32, np.uint64)


class Permutation:
    """A keyed bijection on ``[0, size)``; computes any value alone, in constant memory.

    An alternating Feistel network (Luby and Rackoff, 1988) over ``Z_m x {0,1}^b``, where ``b`` is
    half the bits of ``size - 1`` and ``m = ceil(size / 2**b)``: the generalised Feistel cipher of
    Black and Rogaway, "Ciphers with arbitrary finite domains" (2002). A value ``x`` splits into
    ``high = x >> b`` and ``low = x & (2**b - 1)``; rounds alternate
    ``high = (high + F(low)) mod m`` and ``low = low ^ F(high)``, and each can be undone. The values
    that land in ``[size, m * 2**b)`` are enciphered again until they fall inside (cycle-walking,
    same paper).

    Two halves of whole bits would make a domain of up to ``2 * size`` values, and every other row
    would walk. This domain exceeds ``size`` by less than ``size / (m - 1)``, so walks are rare.
    ``F`` is the high bits of a 32-bit multiply and xor-shift mix (constants of C. Wellons,
    hash-prospector). The result is good for shuffling, but not for cryptography.

    Args:
        size: number of values n, ``0 <= n <= 2**62``.
        seed: any integer.
        epoch: any integer, at least 0.
        stream: gives independent permutations for one seed and epoch.

    Raises:
        ValueError: an argument is out of range; quotes it.

    Thread-safety: immutable; calls allocate their own scratch memory.
    """

    __slots__ = ("_keys", "_low_bits", "_modulus", "_size")

    def __init__(self, size: int, *, seed: int, epoch: int, stream: int = 0) -> None:
        self._size = checked_integer("size", size, 0, MAX_ROWS)
        seed = checked_integer("seed", seed)
        epoch = checked_integer("epoch", epoch, 0)
        stream = checked_integer("stream", stream, 0)
        self._low_bits = max(1, (self._size - 1).bit_length() // 2)
        self._modulus = -(-self._size >> self._low_bits)
        rounds = _ROUNDS_SMALL if self._size < _SMALL_SIZE else _ROUNDS
        self._keys = _round_keys(seed, epoch, stream, rounds)

    @property
    def size(self) -> int:
        """Number of values n; the permutation maps ``[0, n)`` to itself."""
        return self._size

    def apply(self, positions: Int64Array, tweaks: Int64Array | None = None) -> Int64Array:
        """Return the image of every position.

        Args:
            positions: integers in ``[0, size)``, shape ``(k,)``; not modified.
            tweaks: int64, shape ``(k,)``, or None. Values with equal tweaks share one permutation
                of ``[0, size)``, values with different tweaks use different ones (a tweakable
                cipher: Liskov, Rivest and Wagner, 2002).

        Returns:
            A new int64 array of shape ``(k,)``.

        Raises:
            ValueError: wrong dtype or shape, or a position outside ``[0, size)``; quotes it.
        """
        return self._transform(positions, tweaks, inverse=False)

    def invert(self, images: Int64Array, tweaks: Int64Array | None = None) -> Int64Array:
        """Return the position of every image: ``invert(apply(x, t), t) == x``.

        Arguments and errors are those of `apply`.
        """
        return self._transform(images, tweaks, inverse=True)

    def _transform(
        self, values: Int64Array, tweaks: Int64Array | None, *, inverse: bool
    ) -> Int64Array:
        values = checked_positions(values, self._size)
        words = None if tweaks is None else _tweak_words(tweaks, values.shape)
        out = np.empty(values.shape, np.int64)
        self._encipher(values, words, inverse, out)
        if self._modulus << self._low_bits == self._size:
            return out
        lanes = np.flatnonzero(out >= self._size)
        while lanes.size:
            walking = out[lanes]
            walking_words = None if words is None else (words[0][lanes], words[1][lanes])
            self._encipher(walking, walking_words, inverse, walking)
            out[lanes] = walking
            lanes = lanes[walking >= self._size]
        return out

    def _encipher(
        self,
        values: Int64Array,
        words: tuple[_UInt32Array, _UInt32Array] | None,
        inverse: bool,
        out: Int64Array,
    ) -> None:
        """Run one pass over ``[0, m * 2**b)``, without walking; ``out`` may be ``values``."""
        narrow = np.empty((4, min(values.size, _CHUNK_ROWS)), np.uint32)
        wide = np.empty(narrow.shape[1], np.uint64)
        for start in range(0, values.size, _CHUNK_ROWS):
            chunk = values[start : start + _CHUNK_ROWS]
            rows = slice(start, start + chunk.size)
            scratch, product = narrow[:, : chunk.size], wide[: chunk.size]
            high, low = scratch[:2]
            np.right_shift(chunk, self._low_bits, out=product.view(np.int64))
            np.copyto(high, product, casting="unsafe")
            np.copyto(low, chunk, casting="unsafe")
            low &= np.uint32((1 << self._low_bits) - 1)
            chunk_words = None if words is None else (words[0][rows], words[1][rows])
            self._run_rounds(scratch, product, chunk_words, inverse)
            target = out[rows]
            np.copyto(target, high)
            target <<= self._low_bits
            target |= low

    def _run_rounds(
        self,
        scratch: _UInt32Array,
        product: NDArray[np.uint64],
        words: tuple[_UInt32Array, _UInt32Array] | None,
        inverse: bool,
    ) -> None:
        """Change rows 0 and 1 of ``scratch``, high (below m) and low (below 2**b), in place."""
        high, low, mixed, spare = scratch
        modulus = np.array(self._modulus, np.uint32)
        modulus_wide = np.array(self._modulus, np.uint64)
        low_shift = np.array(32 - self._low_bits, np.uint32)
        numbered_keys = tuple(enumerate(self._keys))
        for number, key in reversed(numbered_keys) if inverse else numbered_keys:
            # Even rounds change high; so the first reads low, the half in which neighbours differ.
            changes_high = number % 2 == 0
            np.bitwise_xor(low if changes_high else high, key, out=mixed)
            mixed *= _MIX_A
            if words is not None:
                mixed += words[number % 2]
            np.right_shift(mixed, _MIX_SHIFT, out=spare)
            mixed ^= spare
            mixed *= _MIX_B
            if not changes_high:
                mixed >>= low_shift
                low ^= mixed
                continue
            # Scale 32 bits to [0, m): the high half of their product with m.
            np.copyto(product, mixed)
            product *= modulus_wide
            product >>= _HIGH_HALF
            np.copyto(mixed, product, casting="unsafe")
            if inverse:
                high -= mixed
                np.add(high, modulus, out=spare)
            else:
                high += mixed
                np.subtract(high, modulus, out=spare)
            # Of two candidates m apart, the one outside [0, m) is the larger uint32: 2m <= 2**32.
            np.minimum(high, spare, out=high)


def _round_keys(seed: int, epoch: int, stream: int, rounds: int) -> tuple[_UInt32Array, ...]:
    """Hash a canonical string to one 0-d uint32 array a round; the same on every platform."""
    text = f"order format={ALGORITHM_VERSION} seed={seed} epoch={epoch} stream={stream}"
    digest = hashlib.blake2b(text.encode("ascii"), digest_size=4 * rounds).digest()
    return tuple(np.array(word, np.uint32) for word in np.frombuffer(digest, "<u4"))


def _tweak_words(tweaks: Int64Array, shape: tuple[int, ...]) -> tuple[_UInt32Array, _UInt32Array]:
    """Mix each tweak into two uint32."""
    if tweaks.shape != shape:
        raise ValueError(f"tweaks must have the shape of the positions {shape}, got {tweaks.shape}")
    words = splitmix64((tweaks + np.int64(1)).astype(np.uint64))
    return (words >> _HIGH_HALF).astype(np.uint32), words.astype(np.uint32)


def splitmix64(numbers: NDArray[np.uint64], key: int = 0) -> NDArray[np.uint64]:
    """Return the words of the splitmix64 generator at these places of its run.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).

    Args:
        numbers: uint64, any shape; changed in place.
        key: where the run begins, in ``[0, 2**64)``.
    """
    numbers *= np.uint64(0x9E3779B97F4A7C15)
    numbers += np.uint64(key)
    numbers ^= numbers >> np.uint64(30)
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    numbers ^= numbers >> np.uint64(27)
    numbers *= np.uint64(0x94D049BB133111EB)
    numbers ^= numbers >> np.uint64(31)
    return numbers


def checked_positions(values: Int64Array, size: int) -> Int64Array:
    """Check that values are integers in ``[0, size)``, shape ``(k,)``; return them as int64."""
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"positions must be a 1-D array of integers, got shape {array.shape}, {array.dtype}"
        )
    checked = array.astype(np.int64, copy=False)
    # One pass for both bounds: as uint64, a negative value is above 2**63.
    if checked.size and int(checked.view(np.uint64).max()) >= size:
        bad = array[(checked < 0) | (checked >= size)][0]
        raise ValueError(f"positions must be in [0, {size}), got {bad}")
    return checked


def checked_integer(
    name: str, value: object, minimum: int | None = None, maximum: int | None = None
) -> int:
    """Return an integer of any type, also NumPy's, as an int; bounds are inclusive.

    Raises:
        ValueError: it is no integer (a bool is none), or out of bounds; quotes it.
    """
    number = as_integer(value)
    if number is None:
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {number}")
    return number
