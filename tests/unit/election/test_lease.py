"""When a node follows, takes or renews a lease, by its own clock."""

from __future__ import annotations

import pytest

from cache_server.election.lease import (
    DURATION_S,
    VALID_S,
    Lease,
    Seen,
    Step,
    identity,
    location_of,
    next_step,
)

HELD = Lease("other", DURATION_S, "7")


@pytest.mark.parametrize(
    ("lease", "age_s", "expected"),
    [
        (None, 0.0, Step.TAKE),
        (Lease("", DURATION_S, "7"), 0.0, Step.TAKE),
        (HELD, 0.0, Step.FOLLOW),
        (HELD, DURATION_S - 0.1, Step.FOLLOW),
        (HELD, DURATION_S, Step.TAKE),
        (Lease("me", DURATION_S, "7"), 0.0, Step.RENEW),
        (Lease("me", DURATION_S, "7"), 1000.0, Step.RENEW),
    ],
)
def test_a_lease_is_taken_once_it_was_seen_unchanged_for_as_long_as_it_lasts(
    lease: Lease | None, age_s: float, expected: Step
) -> None:
    assert next_step(Seen(lease, 50.0), "me", 50.0 + age_s) is expected


def test_a_renewal_begins_the_time_again() -> None:
    seen = Seen(HELD, 50.0)
    assert seen.then(HELD, 58.0) == seen
    renewed = seen.then(Lease("other", DURATION_S, "8"), 58.0)
    assert renewed.expires_at() == 58.0 + DURATION_S


def test_a_holder_stops_before_another_node_may_begin() -> None:
    # A follower sees a renewal after its holder began it.
    assert VALID_S < DURATION_S


def test_an_identity_tells_where_its_process_is() -> None:
    assert location_of(identity("grpc+tls://a_b:50052", "f00")) == "grpc+tls://a_b:50052"
