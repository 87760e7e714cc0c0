"""Cuts the splits of a source into shards. Pure.

A shard is a run of consecutive splits. The number of shards does not depend on the number of nodes.
A version keeps the cuts of the version before it, so that both share the shards that did not
change: see docs/decisions/0032.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cache_protocol.storage.memory_budget import load_bytes
from cache_server.source.pinned import Split


@dataclass(frozen=True)
class ShardPlan:
    """The consecutive splits whose rows make shard ``index``.

    Attributes:
        content: hash of all that decides the rows, see `with_contents`; empty: unknown.
    """

    index: int
    splits: tuple[Split, ...]
    content: str = ""

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


def cut_shards(
    splits: Iterable[Split], target_bytes: int, before: Iterable[ShardPlan] = ()
) -> tuple[ShardPlan, ...]:
    """Joins consecutive splits up to ``target_bytes``; a larger split becomes one shard.

    Args:
        before: shards of an earlier version. Those whose splits are still there, one after the
            other, stay as they are.
    """
    runs = {_rows_of(shard.splits[0]): shard.splits for shard in before}
    rest = list(splits)
    cut: list[list[Split]] = []
    size, position = 0, 0
    is_open = False  # the last shard takes further splits
    while position < len(rest):
        run = runs.get(_rows_of(rest[position]), ())
        there = rest[position : position + len(run)]
        if run and list(map(_rows_of, there)) == list(map(_rows_of, run)):
            cut.append(there)
            is_open = False
            position += len(run)
            continue
        split = rest[position]
        if not is_open or size + split.estimated_bytes > target_bytes:
            cut.append([])
            is_open, size = True, 0
        cut[-1].append(split)
        size += split.estimated_bytes
        position += 1
    return tuple(ShardPlan(index, tuple(shard)) for index, shard in enumerate(cut))


def _rows_of(split: Split) -> tuple[object, ...]:
    """What decides which rows a split has, apart from the table."""
    file = split.file
    rows = split.part, split.parts, split.piece
    return (file.path, file.size, file.mtime_ns, file.etag, *rows)


def with_contents(shards: Iterable[ShardPlan], table_content: bytes) -> tuple[ShardPlan, ...]:
    """The shards with the `ShardPlan.content` of each.

    Args:
        table_content: all that decides the rows besides the splits.
    """
    return tuple(
        replace(shard, content=_hash(table_content, list(map(_rows_of, shard.splits))))
        for shard in shards
    )


def cuts_hash(shards: Iterable[ShardPlan]) -> str:
    """A hash of where the shards begin, for the fingerprint."""
    return _hash(b"", [len(shard.splits) for shard in shards])


def _hash(prefix: bytes, values: object) -> str:
    text = json.dumps(values, separators=(",", ":"))
    return hashlib.sha256(prefix + text.encode()).hexdigest()[:32]


def same_shards(shards: Iterable[ShardPlan], before: Iterable[ShardPlan]) -> dict[int, int]:
    """The shards with the same content: index -> index in ``before``."""
    known = {shard.content: shard.index for shard in before if shard.content}
    return {shard.index: known[shard.content] for shard in shards if shard.content in known}


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
