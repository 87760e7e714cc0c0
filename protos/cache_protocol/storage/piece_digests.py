"""Digests of the pieces of a shard file, and the checksum that follows from them. Pure.

The checksum of a file is XXH3-128 of the digests of its pieces of 1 MiB, in order. So a part of a
file can be checked against the checksum of the whole.
"""

from __future__ import annotations

from typing import Any

import xxhash

PIECE_BYTES = 1024 * 1024
DIGEST_BYTES = 16


def digest(piece: Any) -> bytes:
    """The digest of a piece, a buffer of at most `PIECE_BYTES`."""
    return xxhash.xxh3_128_digest(piece)


def checksum(digests: bytes) -> str:
    """The checksum of a file, in hexadecimal digits.

    Args:
        digests: of its pieces, joined.
    """
    return xxhash.xxh3_128_hexdigest(digests)


def num_pieces(num_bytes: int) -> int:
    """How many pieces a file of ``num_bytes`` has."""
    return -(-num_bytes // PIECE_BYTES)
