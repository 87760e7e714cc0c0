"""How the memory of a container is shared between the process of a cache node and its shards. Pure.

Both sides of a container must agree on it: the node, which keeps to it, and whoever makes the
volume that the shards lie in.
"""

from __future__ import annotations

LEAST_SHARD_BYTES = 64 << 20
_LEAST_PROCESS_BYTES = 1 << 30
_IDLE_BYTES = 128 << 20  # of a process that loads nothing, and answers readers
_FEWEST_LOADS, _MOST_LOADS = 2, 8  # two: while one waits for its source, the other decodes
# Measured with DataFusion 55, with row groups of 20 to 460 MB, of 1 to 8 loads at once: a row group
# as it is stored, a fraction of it again for the pages that are unpacked, and what was freed by
# other threads than those that had asked for it, which the allocator keeps for them.
_LOAD_BYTES = 256 << 20
_GROUP_TIMES = 4.5
_LEAST_GROUP_TIMES = 3
_ROOMY_BYTES = 4 << 30


def shard_bytes(container_bytes: int) -> int:
    """What the shards may take of a container's memory limit, in bytes.

    The rest, at least 1 GiB and at least a quarter, is for the process: decoding, staging, serving.
    Less than `LEAST_SHARD_BYTES`, also below zero, where the container is too small.
    """
    return container_bytes - max(_LEAST_PROCESS_BYTES, container_bytes // 4)


def loading_bytes(container_bytes: int, taken_bytes: int | None = None) -> int:
    """What all loads of a node may take together besides the shards, in bytes.

    Args:
        taken_bytes: by the shards, once all are loaded; None for as much as they may.
    """
    taken = shard_bytes(container_bytes) if taken_bytes is None else taken_bytes
    return container_bytes - taken - _IDLE_BYTES


def may_keep_freed(container_bytes: int | None) -> bool:
    """Whether a process may keep for a second what a load has freed: loads are faster by a tenth.

    Args:
        container_bytes: None where it is not known.
    """
    return container_bytes is None or loading_bytes(container_bytes) >= _ROOMY_BYTES


def loads_at_once(num_processors: int) -> int:
    """How many shards a node loads at the same time: one a processor, from 2 to 8.

    Fewer where their memory would not do: see `load_bytes`.
    """
    return max(_FEWEST_LOADS, min(num_processors, _MOST_LOADS))


def load_bytes(group_bytes: int, unsealed_bytes: int = 0) -> int:
    """What the load of a shard takes besides the shard, in bytes.

    Args:
        group_bytes: of the largest row group of Parquet that it reads, as it is stored.
        unsealed_bytes: of the rows that it holds until it writes the shard.
    """
    return _LOAD_BYTES + int(_GROUP_TIMES * group_bytes) + unsealed_bytes


def least_load_bytes(group_bytes: int) -> int:
    """What a load takes at the very least: with less, the kernel would end the process."""
    return _LEAST_GROUP_TIMES * group_bytes
