"""Aligns the body of a Flight message, so that its receiver need not copy it. Pure.

gRPC delivers a long message in memory that begins at a multiple of 16 bytes. The body follows the
header directly, so its address can be odd, and computing with such numbers needs a copy.
Application metadata lies between header and body and is not used here, so it serves as padding.

The lengths follow protobuf's encoding of ``FlightData`` in Flight.proto.
"""

from __future__ import annotations

import pyarrow as pa

_WORD = 16
_SHORT_TAG, _BODY_TAG = 1, 2  # bytes of the tags of fields 2 and 3, and of field 1000


def header_size(batch: pa.RecordBatch) -> int:
    """Bytes of the header of a message with such a batch, of at least one row."""
    return int(pa.ipc.read_message(batch.slice(0, 1).serialize()).metadata.size)


def padding(header: int, body: int) -> bytes:
    """Application metadata that aligns the body to 16 bytes.

    Args:
        header, body: their sizes.
    """
    before = _SHORT_TAG + _length_size(header) + header + _BODY_TAG + _length_size(body)
    excess = before % _WORD
    if not excess:
        return b""
    missing = (_WORD - excess - _SHORT_TAG - _length_size(_WORD)) % _WORD
    return bytes(missing or _WORD)


def _length_size(length: int) -> int:
    """Bytes of an encoded length: seven bits in each."""
    return max(1, -(-length.bit_length() // 7))
