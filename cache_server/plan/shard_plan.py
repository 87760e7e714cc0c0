"""Cuts the splits of a source into shards. Pure.

A shard is a run of consecutive splits. The number of shards does not depend on the number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cache_protocol.storage.memory_budget import load_bytes
from cache_server.source.pinned import Split


@dataclass(frozen=True)
class ShardPlan:
    """The consecutive splits whose rows make shard ``index``."""

    index: int
    splits: tuple[Split, ...]

    @property
    def estimated_bytes(self) -> int:
        """Decoded bytes before any filter."""
        return sum(split.estimated_bytes for split in self.splits)

    @property
    def max_rows(self) -> int | None:
        """Rows before any filter; None if the format does not tell them."""
        return max_rows(self.splits)


def max_rows(splits: Iterable[Split]) -> int | None:
    """Rows of all splits before any filter; None if a format does not tell them."""
    total = 0
    for split in splits:
        if split.num_rows is None:
            return None
        total += split.num_rows
    return total


def cut_shards(splits: Iterable[Split], target_bytes: int) -> tuple[ShardPlan, ...]:
    """Joins consecutive splits up to ``target_bytes``; a larger split becomes one shard."""
    shards: list[ShardPlan] = []
    current: list[Split] = []
    size = 0
    for split in splits:
        if current and size + split.estimated_bytes > target_bytes:
            shards.append(ShardPlan(len(shards), tuple(current)))
            current, size = [], 0
        current.append(split)
        size += split.estimated_bytes
    if current:
        shards.append(ShardPlan(len(shards), tuple(current)))
    return tuple(shards)


def varying_bytes(shards: Iterable[ShardPlan], fixed_row_bytes: int) -> int:
    """Estimated bytes of strings and lists in the shard that has most of them.

    Args:
        fixed_row_bytes: of the other columns.
    """
    return max(
        (shard.estimated_bytes - (shard.max_rows or 0) * fixed_row_bytes for shard in shards),
        default=0,
    )


def load_memory_bytes(
    splits: Sequence[Split], whole: Sequence[Split], placed_row_bytes: int
) -> int:
    """Estimated memory of a load, besides the shards. Staged files do not count.

    Args:
        splits: of the shard; empty for a whole query.
        whole: splits of the tables that are read whole.
        placed_row_bytes: bytes of each row that are written to the shard file at once.
    """
    unsealed = sum(split.estimated_bytes for split in splits)
    unsealed = max(0, unsealed - (max_rows(splits) or 0) * placed_row_bytes)
    group_bytes = max((split.group_bytes for split in (*splits, *whole)), default=0)
    return load_bytes(group_bytes, unsealed)
