"""How an order is cut into buckets, and what preparing it may take. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_MIN_BYTES, _LARGEST_BUCKET_BYTES = 64 << 10, 64 << 20
_LARGEST_BUFFER_BYTES = 512 << 20
_LARGEST_CHUNK_BYTES = 32 << 20
_LEAST_WRITE_BYTES = 4 << 10  # of a bucket at once, while the buffer is written
_MOST_BUCKETS = 2**16 - 2  # numbers have 16 bits, and 0 is no bucket


@dataclass(frozen=True)
class Sizes:
    """The memory of all preparing on a node: a quarter of its memory.

    Args:
        memory_bytes: of the node.

    Attributes:
        loaded_bytes: of the buckets in memory.
        bucket_bytes: of one of them, about.
        buffer_bytes: of rows that wait to be written to their buckets.
        chunk_bytes: of the rows that are read from a shard at once.
    """

    memory_bytes: int

    @property
    def loaded_bytes(self) -> int:
        """An eighth of the memory."""
        return max(4 * _MIN_BYTES, self.memory_bytes // 8)

    @property
    def bucket_bytes(self) -> int:
        """So small that eight are in memory: the windows of several ranks lie in a few of them."""
        return max(_MIN_BYTES, min(self.loaded_bytes // 8, _LARGEST_BUCKET_BYTES))

    @property
    def buffer_bytes(self) -> int:
        """A sixteenth of the memory: the larger it is, the longer are the writes of a bucket."""
        return max(_MIN_BYTES, min(self.memory_bytes // 16, _LARGEST_BUFFER_BYTES))

    @property
    def chunk_bytes(self) -> int:
        """A sixty-fourth of the memory: a chunk is there twice while it is ordered."""
        return max(_MIN_BYTES, min(self.memory_bytes // 64, _LARGEST_CHUNK_BYTES))

    @property
    def above_bytes(self) -> int:
        """What a node holds of a version in more than this does not stay in its page cache."""
        return self.memory_bytes * 3 // 4

    def num_buckets(self, num_bytes: int) -> int | None:
        """How many buckets an order of so many bytes has; None: they would not fit in memory."""
        wanted = -(-num_bytes // self.bucket_bytes)
        most = min(_MOST_BUCKETS, self.buffer_bytes // _LEAST_WRITE_BYTES)
        count = max(1, min(wanted, most))
        return count if num_bytes // count <= self.loaded_bytes // 4 else None
