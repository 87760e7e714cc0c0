"""How the memory of a container is divided between a node's process and its shards. Pure.

The node and the creator of the volume for its shards must use the same division.
"""

from __future__ import annotations

from typing import NamedTuple

MIN_SHARD_BYTES = 64 << 20
_MIN_PROCESS_BYTES = 1 << 30
_IDLE_BYTES = 128 << 20  # of a process that only answers readers
_MIN_LOADS, _MAX_LOADS = 2, 8  # at least two: one waits for its source, the other decodes
# Measured with DataFusion 55, row groups of 20 to 460 MB, 1 to 8 parallel loads. A load needs the
# stored row group, a part of it again for decompressed pages, and memory that the allocator keeps
# because another thread freed it than allocated it.
_LOAD_BYTES = 256 << 20
_GROUP_TIMES = 4.5
_MIN_GROUP_TIMES = 3
_ROOMY_BYTES = 4 << 30
_MIN_EXPRESSION_BYTES, _MAX_EXPRESSION_BYTES = 128 << 20, 512 << 20


class ExpressionMemory(NamedTuple):
    """Limits of the computations of row expressions.

    Attributes:
        at_once: computations at the same time.
        of_namespace: how many of them are of one namespace.
        num_bytes: of one computation.
    """

    at_once: int
    of_namespace: int
    num_bytes: int


def shard_bytes(container_bytes: int) -> int:
    """The part of a container's memory limit for shards, in bytes.

    The rest, at least 1 GiB and at least a quarter, is for the process: decoding, staging, serving.
    Less than `MIN_SHARD_BYTES`, or negative, if the container is too small.
    """
    return container_bytes - max(_MIN_PROCESS_BYTES, container_bytes // 4)


def loading_bytes(container_bytes: int, taken_bytes: int | None = None) -> int:
    """Memory for all loads of a node together, besides the shards, in bytes.

    Args:
        taken_bytes: of the shards once all are loaded; None for the most they may take.
    """
    taken = shard_bytes(container_bytes) if taken_bytes is None else taken_bytes
    return container_bytes - taken - _IDLE_BYTES


def may_keep_freed_memory(container_bytes: int | None) -> bool:
    """Whether the allocator may keep freed memory for a second, which makes loads 10 % faster.

    Args:
        container_bytes: None if unknown.
    """
    return container_bytes is None or loading_bytes(container_bytes) >= _ROOMY_BYTES


def loads_at_once(num_processors: int) -> int:
    """How many shards a node loads at the same time: one a processor, from 2 to 8.

    The node loads fewer if they need too much memory: see `load_bytes`.
    """
    return max(_MIN_LOADS, min(num_processors, _MAX_LOADS))


def expression_memory(container_bytes: int, loads_at_once: int) -> ExpressionMemory:
    """What computations of row expressions may take together: a quarter of the memory at most.

    Args:
        container_bytes: memory limit of the container, or of the machine.
    """
    share = container_bytes // 4
    at_once = max(2, min(2 * loads_at_once, share // _MIN_EXPRESSION_BYTES))
    num_bytes = min(_MAX_EXPRESSION_BYTES, max(_MIN_EXPRESSION_BYTES, share // at_once))
    return ExpressionMemory(at_once, at_once // 2, num_bytes)


def load_bytes(group_bytes: int, unsealed_bytes: int = 0) -> int:
    """Memory of one load besides the shard, in bytes.

    Args:
        group_bytes: stored size of the largest Parquet row group that it reads.
        unsealed_bytes: of the rows in memory before they are written to the shard.
    """
    return _LOAD_BYTES + int(_GROUP_TIMES * group_bytes) + unsealed_bytes


def min_load_bytes(group_bytes: int) -> int:
    """The least memory of a load; with less, the kernel would kill the process."""
    return _MIN_GROUP_TIMES * group_bytes
