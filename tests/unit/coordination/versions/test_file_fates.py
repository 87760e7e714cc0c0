"""Which files a node is told to remove: every state, holder and event."""

from __future__ import annotations

import itertools

import pytest

from cache_server.coordination.versions.file_fates import Event, Fate, Holder, fate_of
from cache_server.coordination.versions.states import State

KEPT, GONE, WANTED, ORPHANED = Fate.KEPT, Fate.GONE, Fate.WANTED, Fate.ORPHANED
OVER = {Event.DROPPED, Event.ENDED, Event.MOVED}

# On a node that is told what to hold, of written rows: by state, then without an event, after a
# drop, the end of a write, or a move, and with a damaged entry.
TABLE = {
    None: (ORPHANED, GONE, GONE, GONE, KEPT),
    State.LOADING: (WANTED, WANTED, WANTED, WANTED, KEPT),
    State.RESUMED: (WANTED, WANTED, WANTED, WANTED, KEPT),
    State.AWAITED: (WANTED, WANTED, WANTED, WANTED, KEPT),
    State.SERVED: (WANTED, WANTED, WANTED, WANTED, KEPT),
    State.UNAVAILABLE: (WANTED, WANTED, WANTED, WANTED, KEPT),
    State.EVICTED: (KEPT, KEPT, KEPT, KEPT, KEPT),
    State.FAILING: (KEPT, KEPT, KEPT, KEPT, KEPT),
    State.FAILED: (KEPT, KEPT, KEPT, KEPT, KEPT),
}
EVERY = [*itertools.product([None, *State], Holder, Event, [False, True])]


@pytest.mark.parametrize(("state", "holder", "event", "has_source"), EVERY)
def test_every_state_on_every_node_after_every_event(
    state: State | None, holder: Holder, event: Event, has_source: bool
) -> None:
    expected = TABLE[state][[*Event].index(event)] if holder is Holder.PLACED else KEPT
    goes = state is not None and (state.has_failed or state is State.EVICTED)
    if has_source and goes and event is not Event.DAMAGED:
        expected = GONE if holder is Holder.PLACED else KEPT

    assert fate_of(state, holder, event, has_source=has_source) is expected


def test_written_files_go_only_when_no_version_has_them_and_a_user_or_a_move_ended_them() -> None:
    for state, holder, event, has_source in EVERY:
        if not has_source and fate_of(state, holder, event, has_source=False) is GONE:
            assert state is None and holder is Holder.PLACED and event in OVER
