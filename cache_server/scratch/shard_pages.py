"""Reads parts of shard files in their order, and keeps their pages out of the page cache.

A shard is mapped: its pages would be read one by one, in any order, and would push out those of
rows that are served.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from cache_protocol.storage.shard_files import MappedShard
from cache_protocol.storage.virtual_memory import forget_pages

_READ_BYTES = 1 << 20


@contextmanager
def streamed(shard: MappedShard, first: int, num_rows: int) -> Iterator[None]:
    """Reads some rows of a shard ahead; afterwards, their pages are dropped.

    Args:
        first: of the rows, counted in the shard.
    """
    parts = list(_parts(shard, first, num_rows))
    try:
        handle = os.open(shard.path, os.O_RDONLY)
    except OSError:  # it was removed; its map stays
        yield
        return
    try:
        same = (found := os.fstat(handle)) and (found.st_dev, found.st_ino) == shard.inode
        if same:
            _read(handle, parts)
        yield
        if same:
            for at, size in parts:
                forget_pages(shard.address + at, size)
                os.posix_fadvise(handle, at, size, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _parts(shard: MappedShard, first: int, num_rows: int) -> Iterator[tuple[int, int]]:
    """Offset and size of the parts of a file with some rows; of strings and lists about those."""
    every = max(1, shard.sealed.num_rows)
    for column in shard.batch.columns:
        for buffer in column.buffers():
            if buffer is None:
                continue
            start = buffer.size * first // every
            stop = -(-buffer.size * (first + num_rows) // every)
            yield buffer.address - shard.address + start, stop - start


def _read(handle: int, parts: list[tuple[int, int]]) -> None:
    kept = memoryview(bytearray(_READ_BYTES))
    for at, size in parts:
        stop = at + size
        while at < stop and (count := os.preadv(handle, [kept[: stop - at]], at)):
            at += count
