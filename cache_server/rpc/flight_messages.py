"""What makes a Flight message begin its body at a multiple of a word, where it is received.

gRPC hands a long message over in one piece of memory that begins at a multiple of 16 bytes. In it
the body follows the header at once, wherever that ends; Arrow makes columns of it without a copy,
but whoever computes with numbers at odd addresses has to copy them first. Application metadata
stands between header and body, and nobody reads it here: so it is made as long as it takes.

The lengths are those of protobuf's encoding of ``FlightData`` in Flight.proto.
"""

from __future__ import annotations

import pyarrow as pa

_WORD = 16
_SHORT_TAG, _BODY_TAG = 1, 2  # bytes of the tags of fields 2 and 3, and of field 1000


def header_size(batch: pa.RecordBatch) -> int:
    """Bytes of the header of a message with such a batch, of which there is at least one row."""
    return int(pa.ipc.read_message(batch.slice(0, 1).serialize()).metadata.size)


def padding(header: int, body: int) -> bytes:
    """Application metadata after which the body begins at a multiple of 16 bytes.

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
    """Bytes that a length takes: seven bits in each."""
    return max(1, -(-length.bit_length() // 7))
