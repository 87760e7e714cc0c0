"""Cuts the splits of a source into shards. Pure.

A shard is a run of consecutive splits. Its number does not depend on the number of nodes.
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
        """Rows before any filter; None where a format does not tell."""
        return max_rows(self.splits)


def max_rows(splits: Iterable[Split]) -> int | None:
    """Rows of all splits before any filter; None where a format does not tell."""
    total = 0
    for split in splits:
        if split.num_rows is None:
            return None
        total += split.num_rows
    return total


def cut_shards(splits: Iterable[Split], target_bytes: int) -> tuple[ShardPlan, ...]:
    """Consecutive splits joined up to ``target_bytes``; a larger split is a shard of its own."""
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


def load_memory_bytes(
    splits: Sequence[Split], whole: Sequence[Split], placed_row_bytes: int
) -> int:
    """What a load takes of the memory of its node besides the shards, as far as it is known.

    Not what is staged for it: that lies in files, in the runtimes on a disk.

    Args:
        splits: of the shard; none of a whole query.
        whole: of the tables that it reads whole.
        placed_row_bytes: what of each row is written to its place in the shard at once.
    """
    unsealed = sum(split.estimated_bytes for split in splits)
    unsealed = max(0, unsealed - (max_rows(splits) or 0) * placed_row_bytes)
    group_bytes = max((split.group_bytes for split in (*splits, *whole)), default=0)
    return load_bytes(group_bytes, unsealed)
