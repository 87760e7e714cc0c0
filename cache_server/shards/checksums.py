"""The digests of a shard file, from which its checksum follows: see `shard_files`.

A shard is written at several places at once. Each piece is hashed while its bytes are still in the
processor's caches, so the file is not read again.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from cache_protocol.storage.shard_files import (
    PIECE_BYTES,
    checksum_of,
    piece_digest,
)


class _Piece(NamedTuple):
    """The bytes of a piece up to ``stop`` in the file, from its beginning."""

    digest: xxhash.xxh3_128
    stop: int


class PieceDigests:
    """Digests of the pieces of a file that is being written. One thread at a time."""

    def __init__(self) -> None:
        self._pieces: dict[int, _Piece] = {}

    def add(self, start: int, data: Any) -> None:
        """A buffer that is written to the file at ``start``."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            index, offset = divmod(start, PIECE_BYTES)
            part = view[: PIECE_BYTES - offset]
            known = _Piece(xxhash.xxh3_128(), start) if not offset else self._pieces.get(index)
            if known is None or known.stop != start:
                self._pieces.pop(index, None)  # written out of order: read at the end
            else:
                known.digest.update(part)
                self._pieces[index] = _Piece(known.digest, start + part.nbytes)
            view, start = view[part.nbytes :], start + part.nbytes

    def in_order(self) -> bytes:
        """The digests of the pieces, joined, of a file that was added from start to end."""
        return b"".join(piece.digest.digest() for _, piece in sorted(self._pieces.items()))

    def joined(self, handle: int) -> bytes:
        """The digests of the open file, joined; reads the pieces that were written out of order.

        Raises:
            OSError: it cannot be read, or it became shorter.
        """
        size = os.fstat(handle).st_size
        found: list[bytes] = []
        buffer = bytearray(min(size, PIECE_BYTES))
        for start in range(0, size, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, size)
            known = self._pieces.get(start // PIECE_BYTES)
            if known is not None and known.stop == stop:
                found.append(known.digest.digest())
            else:
                piece = memoryview(buffer)[: stop - start]
                _read_at(handle, piece, start)
                found.append(piece_digest(piece))
        return b"".join(found)

    def checksum(self, handle: int) -> str:
        """The checksum of the open file; see `joined`."""
        return checksum_of(self.joined(handle))


def file_digests(path: Path) -> bytes:
    """The digests of the pieces of a file, joined.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        return PieceDigests().joined(file.fileno())


def file_checksum(path: Path) -> str:
    """The checksum of a file, in hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    return checksum_of(file_digests(path))


def _read_at(handle: int, target: memoryview, at: int) -> None:
    """Fills ``target``; one read may return less."""
    while target.nbytes:
        num_bytes = os.preadv(handle, [target], at)
        if not num_bytes:
            raise OSError(errno.EIO, f"the file ends at byte {at}, {target.nbytes} too early")
        target, at = target[num_bytes:], at + num_bytes
