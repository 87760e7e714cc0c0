"""Who holds a lease, and what a node does next about it. Pure.

A lease is a record that its holder renews. Nodes compare no clocks: a lease has expired when a node
has seen the same record for as long as the lease lasts, by its own monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

DURATION_S = 10.0
VALID_S = 9.0  # for its holder, since it began to renew it: clocks do not run alike
RENEW_S = 2.0
LOOK_S = 1.0  # between two looks at a lease of another holder


@dataclass(frozen=True)
class Lease:
    """A record of a lease.

    Attributes:
        holder: identity of the process that holds it; empty: none does.
        duration_s: for which it lasts.
        version: another one after each change.
        transitions: how often it went from one holder to another.
    """

    holder: str
    duration_s: float
    version: str
    transitions: int = 0


@dataclass(frozen=True)
class Seen:
    """A record, and when this node saw it first.

    Attributes:
        lease: None: there was none.
        at: monotonic seconds.
    """

    lease: Lease | None
    at: float

    def then(self, lease: Lease | None, now: float) -> Seen:
        """What is known after another look."""
        return self if lease == self.lease else Seen(lease, now)

    def expires_at(self) -> float:
        """When the lease expires, if it is not renewed."""
        if self.lease is None or not self.lease.holder:
            return self.at
        return self.at + self.lease.duration_s


class Step(Enum):
    """What a node does about a lease.

    Attributes:
        FOLLOW: another process holds it.
        TAKE: none does.
        RENEW: this one does.
    """

    FOLLOW = auto()
    TAKE = auto()
    RENEW = auto()


def next_step(seen: Seen, me: str, now: float) -> Step:
    """What a node does next.

    Args:
        me: identity of this process.
        now: monotonic seconds.
    """
    if seen.lease is not None and seen.lease.holder == me:
        return Step.RENEW
    return Step.TAKE if now >= seen.expires_at() else Step.FOLLOW


def identity(location: str, process: str) -> str:
    """The identity of a process that serves the control verbs at a location."""
    return f"{location}_{process}"


def location_of(holder: str) -> str:
    """Where a holder serves the control verbs."""
    return holder.rpartition("_")[0]
