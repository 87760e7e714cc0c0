"""How the memory of a container is shared between the process of a cache node and its shards. Pure.

Both sides of a container must agree on it: the node, which keeps to it, and whoever makes the
volume that the shards lie in.
"""

LEAST_SHARD_BYTES = 64 << 20
_LEAST_PROCESS_BYTES = 1 << 30


def shard_bytes(container_bytes: int) -> int:
    """What the shards may take of a container's memory limit, in bytes.

    The rest, at least 1 GiB and at least a quarter, is for the process: decoding, staging, serving.
    Less than `LEAST_SHARD_BYTES`, also below zero, where the container is too small.
    """
    return container_bytes - max(_LEAST_PROCESS_BYTES, container_bytes // 4)
