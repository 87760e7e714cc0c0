"""The groups in which the shards of a load are sealed: the log that readers follow. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

_GROWTH = 4  # each group has at least a fourth as many shards as all groups before it


@dataclass(frozen=True)
class SealedGroups:
    """The log of one load of a version. Immutable.

    Groups grow with the load: the first is as small as possible, and a version of many shards has
    few groups.

    Args:
        log_id: random name: another load of the same rows has another log.
        groups: indices of shards, ascending in each group.

    Attributes:
        num_shards: in all groups.
    """

    log_id: str
    groups: tuple[tuple[int, ...], ...] = ()
    num_shards: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_shards", sum(map(len, self.groups)))

    def next_group(self, sealed: Set[int], num_shards: int) -> tuple[int, ...]:
        """The shards of the next group; empty while too few are sealed, or none is left.

        Args:
            sealed: every sealed shard of the version.
            num_shards: of the version.
        """
        new = len(sealed) - self.num_shards
        if new <= 0 or (new * _GROWTH < self.num_shards and len(sealed) < num_shards):
            return ()
        return tuple(sorted(set(sealed).difference(*self.groups)))

    def extended(self, group: tuple[int, ...]) -> SealedGroups:
        """The log with one more group."""
        return SealedGroups(self.log_id, (*self.groups, group))
