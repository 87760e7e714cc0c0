"""Who holds how much of something that is bounded, and whose oldest part must go. Pure.

A principal that floods loses its own parts first, and its namespace before others. See ADR 0042.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

_K = TypeVar("_K", bound=Hashable)


class Owner(NamedTuple):
    """The principal that something counts for."""

    namespace: str
    principal: str


@dataclass(frozen=True)
class Bounds:
    """The most that a principal, a namespace and all of them may hold."""

    principal: int
    namespace: int
    total: int


class Shares(Generic[_K]):
    """Counts what owners hold, by key. One thread at a time.

    Args:
        bounds: of the amounts.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._owner: dict[_K, Owner] = {}
        self._held: dict[Owner, dict[_K, int]] = {}  # the oldest first
        self._of_owner: Counter[Owner] = Counter()
        self._of_namespace: Counter[str] = Counter()
        self._owners: defaultdict[str, set[Owner]] = defaultdict(set)
        self._total = 0

    def put(self, key: _K, owner: Owner, amount: int = 1) -> list[_K]:
        """Adds a key, or makes it the newest of its first owner; returns the keys that went.

        The oldest key of the same principal goes first. Above the bound of a namespace, or of all,
        it is the oldest key of the principal that holds most there.
        """
        owner = self._owner.get(key, owner)
        self.drop(key)
        self._owner[key] = owner
        self._held.setdefault(owner, {})[key] = amount
        self._owners[owner.namespace].add(owner)
        self._add(owner, amount)
        gone = []
        while (loser := self._above_bounds(owner)) is not None:
            oldest = next(iter(self._held[loser]))
            self.drop(oldest)
            gone.append(oldest)
        return gone

    def drop(self, key: _K) -> None:
        """Counts a key no more; unknown ones are ignored."""
        if (owner := self._owner.pop(key, None)) is None:
            return
        held = self._held[owner]
        self._add(owner, -held.pop(key))
        if not held:
            del self._held[owner], self._of_owner[owner]
            self._owners[owner.namespace].discard(owner)
        if not self._owners[owner.namespace]:
            del self._owners[owner.namespace], self._of_namespace[owner.namespace]

    def _add(self, owner: Owner, amount: int) -> None:
        self._of_owner[owner] += amount
        self._of_namespace[owner.namespace] += amount
        self._total += amount

    def _above_bounds(self, owner: Owner) -> Owner | None:
        """Who must lose a key; None: the bounds hold."""
        if self._of_owner[owner] > self._bounds.principal:
            return owner
        namespace = owner.namespace
        if self._total > self._bounds.total:
            namespace = max(self._of_namespace, key=self._of_namespace.__getitem__)
        elif self._of_namespace[namespace] <= self._bounds.namespace:
            return None
        return max(self._owners[namespace], key=lambda each: (self._of_owner[each], each != owner))


class Rates:
    """Counts events of owners in time: a bucket of tokens for each. One thread at a time.

    Args:
        per_s: events that an owner may have in the long run.
        burst: events that it may have at once.
    """

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._buckets: dict[Owner, tuple[float, float]] = {}  # tokens and their time, oldest first

    def take(self, owner: Owner, now: float) -> bool:
        """Whether an event may happen now; if so, it is counted."""
        tokens, at = self._buckets.pop(owner, (float(self._burst), now))
        tokens = min(self._burst, tokens + (now - at) * self._per_s)
        is_allowed = tokens >= 1
        self._buckets[owner] = tokens - is_allowed, now
        full_after_s = self._burst / self._per_s
        while self._buckets:  # an owner that was silent for so long has a full bucket
            oldest = next(iter(self._buckets))
            if now - self._buckets[oldest][1] < full_after_s:
                break
            del self._buckets[oldest]
        return is_allowed
