"""How the memory of a container is shared between the process of a cache node and its shards. Pure.

Both sides of a container must agree on it: the node, which keeps to it, and whoever makes the
volume that the shards lie in.
"""

from __future__ import annotations

LEAST_SHARD_BYTES = 64 << 20
_LEAST_PROCESS_BYTES = 1 << 30
_LOAD_BYTES = 256 << 20
_FEWEST_LOADS, _MOST_LOADS = 2, 8  # two: while one waits for its source, the other decodes


def shard_bytes(container_bytes: int) -> int:
    """What the shards may take of a container's memory limit, in bytes.

    The rest, at least 1 GiB and at least a quarter, is for the process: decoding, staging, serving.
    Less than `LEAST_SHARD_BYTES`, also below zero, where the container is too small.
    """
    return container_bytes - max(_LEAST_PROCESS_BYTES, container_bytes // 4)


def loads_at_once(num_processors: int, container_bytes: int | None) -> int:
    """How many shards a node loads at the same time: one a processor, from 2 to 8.

    Fewer where the process would not have 256 MiB for each: about four times a shard of the default
    size, as DataFusion holds a row group while it decodes it.

    Args:
        container_bytes: memory limit of the container; None where it is not known.
    """
    wanted = min(num_processors, _MOST_LOADS)
    if container_bytes is not None:
        wanted = min(wanted, (container_bytes - shard_bytes(container_bytes)) // _LOAD_BYTES)
    return max(wanted, _FEWEST_LOADS)
