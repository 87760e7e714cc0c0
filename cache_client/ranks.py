"""Who am I: the rank of this process and the number of ranks.

In this order: explicit arguments, an initialised `torch.distributed`, ``RANK``/``WORLD_SIZE`` as
torchrun sets them, else rank 0 of 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from protos.errors import ConfigError


@dataclass(frozen=True)
class Rank:
    """Rank ``rank`` of ``world_size``; ``0 <= rank < world_size``.

    Raises:
        ConfigError: quoting both when they do not fit together.
    """

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank must be in [0, world_size), got rank={self.rank} "
                f"world_size={self.world_size}"
            )


def find_rank(
    rank: int | None = None,
    world_size: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Rank:
    """The rank of this process.

    Args:
        rank, world_size: both or neither.
        environ: default: the environment of this process.

    Raises:
        ConfigError: quoting a pair of which one is missing or no number, or that does not fit.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f"rank and world_size go together, got rank={rank} world_size={world_size}"
        )
    if rank is not None and world_size is not None:
        return Rank(rank, world_size)
    if dist.is_available() and dist.is_initialized():
        return Rank(dist.get_rank(), dist.get_world_size())
    values = os.environ if environ is None else environ
    return _from_environment(values, "RANK", "WORLD_SIZE") or Rank(0, 1)


def _from_environment(
    values: Mapping[str, str], rank_name: str, world_size_name: str
) -> Rank | None:
    rank, world_size = values.get(rank_name), values.get(world_size_name)
    if rank is None and world_size is None:
        return None
    try:
        return Rank(int(rank or ""), int(world_size or ""))
    except ValueError:
        raise ConfigError(
            f"{rank_name} and {world_size_name} must be two numbers with "
            f"0 <= {rank_name} < {world_size_name}, got {rank_name}={rank!r} "
            f"{world_size_name}={world_size!r}"
        ) from None


def find_endpoint(endpoint: str | None, environ: Mapping[str, str] | None = None) -> str:
    """The Flight endpoint of the cache: the argument, else ``CACHE_ENDPOINT``.

    Raises:
        ConfigError: when neither is there.
    """
    values = os.environ if environ is None else environ
    found = endpoint or values.get("CACHE_ENDPOINT")
    if not found:
        raise ConfigError(
            "no endpoint: pass endpoint='grpc://HOST:PORT' or set the environment variable "
            "CACHE_ENDPOINT"
        )
    return found
