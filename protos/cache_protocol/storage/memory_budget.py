"""How the memory of a node is divided between its process and its shards. Pure.

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


# Of the machine, where nothing limits a node: its users have other programs.
_MACHINE_SHARE = 0.75


class NodeMemory(NamedTuple):
    """The memory of a node, in bytes.

    Attributes:
        all_bytes: of its processes, and of its shards if they are in memory.
        shard_limit_bytes: of all shards; None: no limit.
        most_shard_bytes: what shards may take of `all_bytes`; 0 if they are on a disk.
        is_limited: somebody, or the kernel, set `all_bytes`; else it is a share of the machine.
    """

    all_bytes: int
    shard_limit_bytes: int | None
    most_shard_bytes: int
    is_limited: bool

    @property
    def loading_bytes(self) -> int:
        """For all loads together, besides the shards."""
        return self.all_bytes - self.most_shard_bytes - _IDLE_BYTES

    @property
    def may_keep_freed(self) -> bool:
        """Whether the allocator may keep freed memory for a second; loads are 10 % faster then."""
        return not self.is_limited or self.loading_bytes >= _ROOMY_BYTES


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


def memory_of_container(container_bytes: int) -> NodeMemory:
    """The memory of a node whose container was stated."""
    shards = shard_bytes(container_bytes)
    return NodeMemory(container_bytes, shards, shards, is_limited=True)


def memory_of_machine(
    machine_bytes: int,
    limit_bytes: int | None,
    shard_limit_bytes: int | None,
    *,
    share: float,
    in_memory: bool,
) -> NodeMemory:
    """The memory of a node whose container was not stated.

    Args:
        machine_bytes: of the machine.
        limit_bytes: that the kernel sets for the process; None: none.
        shard_limit_bytes: that was stated; None: none. Shards in memory are limited in any case
            where the kernel limits the process.
        share: the part for this node, where several have it together.
        in_memory: the shards take memory, as on a tmpfs.
    """
    is_limited = limit_bytes is not None
    whole = machine_bytes * _MACHINE_SHARE if limit_bytes is None else limit_bytes
    all_bytes = int(whole * share)
    most = max(shard_bytes(all_bytes), all_bytes // 3) if in_memory else 0
    if shard_limit_bytes is not None:
        most = min(most, shard_limit_bytes)
    elif is_limited and in_memory:
        shard_limit_bytes = most
    return NodeMemory(all_bytes, shard_limit_bytes, most, is_limited)


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
