"""Whether the files of a version or a put may go from a node: the only place that says so. Pure.

Files go when a user dropped, replaced or aborted them, or when they are a second name of rows that
are safe. What is unknown or failed stays; but what a failed or evicted load made of a source goes,
because the source has the rows.
"""

from __future__ import annotations

from enum import Enum, auto

from cache_server.coordination.versions.states import State


class Fate(Enum):
    """What becomes of files on a node.

    Attributes:
        WANTED: it should hold them, as its answer says in full.
        KEPT: they stay as they are.
        ORPHANED: they stay; the coordinator does not know them.
        GONE: it removes them.
    """

    WANTED = auto()
    KEPT = auto()
    ORPHANED = auto()
    GONE = auto()


class Holder(Enum):
    """The node that holds the files.

    Attributes:
        PLACED: its answers say what to hold.
        JOINING: it is not placed yet.
        UNTRUSTED: it said what is not true. Its files are evidence.
    """

    PLACED = auto()
    JOINING = auto()
    UNTRUSTED = auto()


class Event(Enum):
    """What happened last to the files, beside what became of their version.

    Attributes:
        NONE: nothing.
        DROPPED: a user dropped or replaced them.
        ENDED: the write of a put was aborted or idle for too long, or its commit chose another put.
        MOVED: the version of a put is served: its rows have another name, on every replica.
        DAMAGED: the catalogue entry of their dataset cannot be read.
    """

    NONE = auto()
    DROPPED = auto()
    ENDED = auto()
    MOVED = auto()
    DAMAGED = auto()


_OVER = (Event.DROPPED, Event.ENDED, Event.MOVED)


def fate_of(state: State | None, holder: Holder, event: Event, *, has_source: bool) -> Fate:
    """What becomes of files on a node.

    Args:
        state: of the version that they are of, or that a put was chosen for. An open write counts
            as `State.LOADING`. None: of none that is known.
        has_source: the rows can be loaded again.
    """
    if holder is not Holder.PLACED or event is Event.DAMAGED:
        return Fate.KEPT
    if state is None:
        return Fate.GONE if event in _OVER else Fate.ORPHANED
    if not state.is_held:
        return Fate.GONE if has_source else Fate.KEPT
    return Fate.WANTED
