"""Decodes the Avro files of Iceberg within their bounds.

pyiceberg's decoder in C reads beyond the end of a damaged file, which can end the process. Its
decoder in Python takes a file that was cut for a shorter one, which would lose rows silently.
"""

from __future__ import annotations

import pyiceberg.avro.file
from pyiceberg.avro.decoder import BinaryDecoder

_MAX_SHIFT = 63  # of the last 7 bits of a 64-bit integer


class BoundedDecoder(BinaryDecoder):
    """Decodes bytes. One thread at a time.

    Raises:
        EOFError: the bytes end where an integer should begin; a valid file ends so.
        ValueError: a value ends beyond the bytes.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def tell(self) -> int:
        """The position of the next byte."""
        return self._at

    def read(self, n: int) -> bytes:
        """The next ``n`` bytes."""
        start = self._at
        self.skip(n)
        return self._data[start : self._at]

    def skip(self, n: int) -> None:
        """Passes over ``n`` bytes."""
        if not 0 <= n <= len(self._data) - self._at:
            raise ValueError(f"it is damaged: {n} bytes should follow byte {self._at}")
        self._at += n

    def read_bytes(self) -> bytes:
        """Bytes after their number."""
        try:
            return self.read(self.read_int())
        except EOFError as error:
            raise ValueError(str(error)) from None

    def read_int(self) -> int:
        """An integer of variable length, zigzag coded."""
        data, at = self._data, self._at
        value = shift = 0
        try:
            while (byte := data[at]) & 0x80:
                value |= (byte & 0x7F) << shift
                shift += 7
                at += 1
                if shift > _MAX_SHIFT:
                    raise ValueError(f"it is damaged: no 64-bit integer is at byte {self._at}")
        except IndexError:
            kind = EOFError if at == self._at else ValueError
            raise kind("it ends where an integer should follow") from None
        value |= byte << shift
        self._at = at + 1
        return (value >> 1) ^ -(value & 1)


def install() -> None:
    """Gives this decoder to pyiceberg."""
    pyiceberg.avro.file.new_decoder = BoundedDecoder  # type: ignore[attr-defined,assignment]
