"""What pyarrow does not show of a Parquet footer. Pure.

These are the bytes of strings, encrypted columns, and bounds by old writers.

A footer may hold *size statistics*: for each column chunk the bytes of its values before any
encoding. pyarrow writes them but does not show them. So they are read here from the bytes of the
footer, a Thrift structure in the compact protocol.

Source: the Parquet format's parquet.thrift (FileMetaData, RowGroup, ColumnChunk, ColumnMetaData,
Statistics, SizeStatistics, ColumnCryptoMetaData) and Apache Thrift's compact protocol
specification.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_ROW_GROUPS, _COLUMNS, _META_DATA, _SIZE_STATISTICS, _UNENCODED_BYTES = 4, 1, 3, 16, 1
_STATISTICS, _OLD_MAX, _OLD_MIN, _MAX, _MIN = 12, 1, 2, 5, 6
_PATH_IN_SCHEMA, _CRYPTO_METADATA, _WITH_COLUMN_KEY, _PATH_OF_KEY = 3, 8, 2, 1
_TAIL_BYTES = 8  # the length of the footer and "PAR1"
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)


def unencoded_bytes(footer: pq.FileMetaData) -> list[list[int | None]]:
    """Bytes of strings for each row group and column chunk, without lengths or offsets.

    Returns:
        None for a chunk without strings or without size statistics.
    """
    sink = pa.BufferOutputStream()
    footer.write_metadata_file(sink)
    parsed = _parsed(sink.getvalue().to_pybytes())
    return [
        [
            chunk.get(_META_DATA, {}).get(_SIZE_STATISTICS, {}).get(_UNENCODED_BYTES)
            for chunk in group[_COLUMNS]
        ]
        for group in parsed[_ROW_GROUPS]
    ]


def encrypted_columns(tail: bytes) -> list[str]:
    """The columns of a file that are encrypted.

    Args:
        tail: the end of the file, with its footer; if it is damaged, the result is empty.
    """
    names: dict[str, None] = {}
    try:
        for group in _parsed(tail)[_ROW_GROUPS]:
            for chunk in group[_COLUMNS]:
                if (crypto := chunk.get(_CRYPTO_METADATA)) is not None:
                    by_key = crypto.get(_WITH_COLUMN_KEY, {}).get(_PATH_OF_KEY)
                    path = by_key or chunk[_META_DATA][_PATH_IN_SCHEMA]
                    names[b".".join(path).decode()] = None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return []
    return list(names)


def has_old_bounds(tail: bytes, names: Collection[str]) -> bool:
    """Whether a row group has bounds of one of these columns in the deprecated fields only.

    They are in the order of signed values or bytes, for every type. pyarrow hides them where the
    type has another order.

    Args:
        tail: the end of the file, with its footer.
        names: of columns at the top level.
    """
    for group in _parsed(tail)[_ROW_GROUPS]:
        for chunk in group[_COLUMNS]:
            column = chunk.get(_META_DATA, {})
            bounds = column.get(_STATISTICS, {}).keys()
            is_old = bounds & {_OLD_MIN, _OLD_MAX} and not bounds & {_MIN, _MAX}
            if is_old and b".".join(column[_PATH_IN_SCHEMA]).decode() in names:
                return True
    return False


def _parsed(tail: bytes) -> dict[int, Any]:
    """A footer, as field number -> value."""
    length = int.from_bytes(tail[-_TAIL_BYTES:-4], "little")
    fields: dict[int, Any] = _Reader(tail[-_TAIL_BYTES - length : -_TAIL_BYTES]).read(_STRUCT)
    return fields


class _Reader:
    """Reads values of the compact protocol, structures as field number -> value."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def read(self, kind: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _BYTE:
            return self._byte()
        if kind in _INTEGERS:
            return self._zigzag()
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind in (_LIST, _SET):
            return self._list()
        if kind == _STRUCT:
            return self._struct()
        raise ValueError(f"no type {kind} in the footer of a Parquet file")

    def _struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while header := self._byte():
            step = header >> 4
            number = number + step if step else self._zigzag()
            fields[number] = self.read(header & 15)
        return fields

    def _list(self) -> list[Any]:
        header = self._byte()
        kind, size = header & 15, header >> 4
        if size == 15:
            size = self._varint()
        if kind in (_TRUE, _FALSE):
            return [self._byte() == _TRUE for _ in range(size)]
        return [self.read(kind) for _ in range(size)]

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def _varint(self) -> int:
        result = 0
        for shift in range(0, 64, 7):
            byte = self._byte()
            result |= (byte & 127) << shift
            if byte < 128:
                return result
        raise ValueError("an integer of more than 64 bits in the footer of a Parquet file")

    def _zigzag(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)
