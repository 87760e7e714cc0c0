"""Which values of a row are null: one bit for each column that has nulls. Pure.

The bits of a row are some bytes in one stored column, which is there only if a column has nulls. A
column of lists of n numbers has one bit for the list, and n bits if a number in a list is null: see
`flat_columns`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cache_protocol.storage.flat_columns import Bits, FlatTree, nodes

BitMatrix: TypeAlias = npt.NDArray[Any]  # of uint8
_ROWS_A_TIME = 16_384  # of unpacked bits
_ALIGNMENT = 16


class NullBits:
    """The bits of a row. Immutable, any thread.

    Args:
        tree: of all columns.
        names: the units with nulls, in any order.

    Attributes:
        units: unit -> its bits a row, in the order of the columns.
        width: bytes a row; 0 if there is no unit.

    Raises:
        ValueError: there is no such unit.
    """

    def __init__(self, tree: FlatTree, names: Collection[str]) -> None:
        wanted = set(names)
        self.units = {
            name: bits
            for node in nodes(tree)
            for name, bits in node.null_units.items()
            if name in wanted
        }
        if unknown := wanted - self.units.keys():
            raise ValueError(f"no column has null bits named {sorted(unknown)[0]!r}")
        width = -(-sum(self.units.values()) // 8)
        # Not a multiple of 16: in a file it follows columns of any size, see `mapped_table`.
        self.width = width + 1 if width and width % _ALIGNMENT == 0 else width
        self._starts: dict[str, int] = {}
        start = 0
        for name, bits in self.units.items():
            self._starts[name] = start
            start += bits

    def pack(self, nulls: Mapping[str, Bits], num_rows: int) -> BitMatrix:
        """The bits of rows, ``[num_rows, width]``.

        Args:
            nulls: unit -> ``[num_rows, bits]``; none of a unit that is not there.
        """
        packed = np.zeros((num_rows, self.width), np.uint8)
        for start in range(0, num_rows if nulls else 0, _ROWS_A_TIME):
            rows = slice(start, min(start + _ROWS_A_TIME, num_rows))
            bits = np.zeros((rows.stop - start, self.width * 8), np.bool_)
            for name, mask in nulls.items():
                first = self._starts[name]
                bits[:, first : first + self.units[name]] = mask[rows]
            packed[rows] = np.packbits(bits, axis=1, bitorder="little")
        return packed

    def unpack(self, name: str, packed: BitMatrix) -> Bits:
        """The bits of one unit, ``[rows, bits]``, true for a null."""
        start, count = self._starts[name], self.units[name]
        if count == 1:
            return (packed[:, start // 8] >> start % 8 & 1).view(np.bool_)[:, None]
        first, stop = start // 8, -(-(start + count) // 8)
        bits = np.unpackbits(packed[:, first:stop], axis=1, bitorder="little").view(np.bool_)
        return bits[:, start - first * 8 :][:, :count]

    def unpack_all(self, packed: BitMatrix) -> dict[str, Bits]:
        """The bits of each unit that has a null in these rows."""
        found = {name: self.unpack(name, packed) for name in self.units}
        return {name: bits for name, bits in found.items() if bits.any()}

    def of(self, other: NullBits, packed: BitMatrix) -> BitMatrix:
        """The bits of these units, from the bits of ``other``; 0 for a unit that it lacks."""
        if list(other.units) == list(self.units):
            return packed
        shared = [name for name in self.units if name in other.units]
        return self.pack({name: other.unpack(name, packed) for name in shared}, len(packed))
