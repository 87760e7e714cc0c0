"""The bytes of a shard file for another node: checked while they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from cache_protocol.errors import NotReadyError
from cache_protocol.storage.shard_files import MappedShard
from cache_server.shards.checksums import PieceDigests
from cache_server.shards.version_key import VersionKey

DropDamaged = Callable[[VersionKey, MappedShard], bool]


def file_bytes(
    key: VersionKey, shard: MappedShard, max_bytes: int, drop_damaged: DropDamaged
) -> Iterator[pa.Buffer]:
    """The bytes of a sealed shard's file, in order. The caller must compare the checksum.

    Args:
        max_bytes: of each piece.
        drop_damaged: called when the file was damaged or removed; returns whether it was still one
            of the node's.

    Raises:
        NotReadyError: the file was removed.
    """
    try:
        mapped = pa.memory_map(str(shard.path))
    except FileNotFoundError:
        if drop_damaged(key, shard):
            reason = "is made again: its file was removed"
        else:
            reason = "was just dropped"
        raise NotReadyError(f"shard {shard.sealed.index} of {key.dataset!r} {reason}") from None
    return _checked(key, shard, mapped, max_bytes, drop_damaged)


def _checked(
    key: VersionKey,
    shard: MappedShard,
    mapped: pa.MemoryMappedFile,
    max_bytes: int,
    drop_damaged: DropDamaged,
) -> Iterator[pa.Buffer]:
    digests = PieceDigests()
    with mapped:
        while len(chunk := mapped.read_buffer(max_bytes)):
            digests.add(mapped.tell() - len(chunk), chunk)
            yield chunk
        checksum = digests.checksum(mapped.fileno())
    if checksum != shard.sealed.checksum:
        drop_damaged(key, shard)
