"""The states of a version, and the steps from one to the next. Pure."""

from __future__ import annotations

from enum import Enum, auto


class State(Enum):
    """What became of a version so far.

    Attributes:
        LOADING: nodes load it, or move the rows of its write.
        RESUMED: as `LOADING`, but begun before a restart, which lost the pins of its source.
        AWAITED: as `LOADING`, but rows of its write lie only on nodes that are away.
        SERVED: every replica was there once, so readers may depend on its rows.
        UNAVAILABLE: as `SERVED`, but written rows lie only on nodes that are away.
        EVICTED: as `SERVED`, but its shards made room for others; it loads again when it is read.
        FAILING: it failed, and the catalogue does not say so yet.
        FAILED: it failed, also for a coordinator that starts again.
    """

    LOADING = auto()
    RESUMED = auto()
    AWAITED = auto()
    SERVED = auto()
    UNAVAILABLE = auto()
    EVICTED = auto()
    FAILING = auto()
    FAILED = auto()

    @property
    def is_loading(self) -> bool:
        """Whether it may still become ready for the first time."""
        return self in (State.LOADING, State.RESUMED, State.AWAITED)

    @property
    def was_served(self) -> bool:
        """Whether readers may depend on its rows."""
        return self in (State.SERVED, State.UNAVAILABLE, State.EVICTED)

    @property
    def is_held(self) -> bool:
        """Whether nodes are to hold its shards."""
        return not (self.has_failed or self.is_evicted)

    @property
    def is_evicted(self) -> bool:
        """Whether no node should have any of it."""
        return self is State.EVICTED

    @property
    def is_away(self) -> bool:
        """Whether it waits for nodes that have its rows."""
        return self in (State.AWAITED, State.UNAVAILABLE)

    @property
    def has_failed(self) -> bool:
        """Whether it must be loaded again."""
        return self in (State.FAILING, State.FAILED)


class Step(Enum):
    """What happens to a version.

    Attributes:
        COMPLETE: every replica of every shard is served.
        FAIL: its load cannot succeed, or its entry cannot be written.
        SAVE: the catalogue says that it failed.
        LOSE: the last live node with some of its written rows is gone.
        RETURN: live nodes have all of its written rows again.
        EVICT: its shards go, to make room.
        RECALL: it is read again, and there is room.
    """

    COMPLETE = auto()
    FAIL = auto()
    SAVE = auto()
    LOSE = auto()
    RETURN = auto()
    EVICT = auto()
    RECALL = auto()


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.LOADING, Step.COMPLETE): State.SERVED,
    (State.LOADING, Step.FAIL): State.FAILING,
    (State.LOADING, Step.LOSE): State.AWAITED,
    (State.RESUMED, Step.COMPLETE): State.SERVED,
    (State.RESUMED, Step.FAIL): State.FAILING,
    (State.RESUMED, Step.LOSE): State.AWAITED,
    (State.AWAITED, Step.FAIL): State.FAILING,
    (State.AWAITED, Step.RETURN): State.LOADING,
    (State.SERVED, Step.FAIL): State.FAILING,
    (State.SERVED, Step.LOSE): State.UNAVAILABLE,
    (State.SERVED, Step.EVICT): State.EVICTED,
    (State.EVICTED, Step.RECALL): State.SERVED,
    (State.UNAVAILABLE, Step.FAIL): State.FAILING,
    (State.UNAVAILABLE, Step.RETURN): State.SERVED,
    (State.FAILING, Step.FAIL): State.FAILING,
    (State.FAILING, Step.SAVE): State.FAILED,
    (State.FAILED, Step.FAIL): State.FAILED,
}
