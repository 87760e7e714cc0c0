"""Which claims of nodes count, and which file is read back next."""

from __future__ import annotations

import pytest

from cache_server.coordination.holdings import holder_checks
from cache_server.shards.version_key import VersionKey

KEY = VersionKey("table", "f00")
NODES = frozenset({"a", "b", "c"})
HOLDERS = {node: holder_checks.Holder(node, "cache", f"grpc://{node}:1") for node in NODES}
AGAIN_S = 100.0


def said(*indices: int, is_known: bool = True) -> dict[int, holder_checks.Said]:
    return {index: holder_checks.Said(10, f"sum-{index}", is_known) for index in indices}


@pytest.fixture
def checks() -> holder_checks.HolderChecks:
    made = holder_checks.HolderChecks(AGAIN_S)
    for holder in HOLDERS.values():
        made.meet(holder)
    return made


def proven(checks: holder_checks.HolderChecks, node: str) -> set[int]:
    return {index for index, nodes in checks.holders(KEY).items() if node in nodes}


def next_check(checks: holder_checks.HolderChecks, now: float = 0.0) -> holder_checks.ShardCheck:
    found = checks.next(NODES, now)
    assert found is not None
    return found


def test_a_node_is_believed_about_what_makes_the_record_and_others_are_read_first(
    checks: holder_checks.HolderChecks,
) -> None:
    checks.apply_report(KEY, "a", said(1, 2), 0.0, believed={1, 2})
    checks.apply_report(KEY, "b", said(1, 2), 0.0)
    assert proven(checks, "a") == {1, 2} and not proven(checks, "b")

    check = next_check(checks)
    assert check == holder_checks.ShardCheck(check.claim, HOLDERS["b"], 10, "sum-1", is_first=True)
    assert checks.next(NODES, 0.0) is None  # one file of a node at a time
    assert not checks.apply_outcome(check, holder_checks.Outcome.MATCHES, 0.0)
    assert proven(checks, "b") == {1}

    checks.apply_report(KEY, "b", said(2), 0.0)  # dropped, and copied again
    checks.apply_report(KEY, "b", said(1, 2), 0.0)
    assert not proven(checks, "b")


def test_what_a_node_was_asked_to_load_is_asked_once(checks: holder_checks.HolderChecks) -> None:
    checks.assign(KEY, "a", {1})
    checks.assign(KEY, "c", {None})  # the whole query
    assert checks.is_assigned(KEY, "a", 1) and not checks.is_assigned(KEY, "a", 2)
    assert checks.is_assigned(KEY, "c", 7) and checks.is_assigned(KEY, "c", None)
    checks.apply_report(KEY, "a", said(1), 0.0, believed={1})
    checks.apply_report(KEY, "a", {1: holder_checks.Said(10, "another", is_known=False)}, 0.0)
    assert checks.unprovable(KEY, "a") == {1} and checks.next(NODES, 0.0) is None


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("is_proven", [False, True])
def test_a_node_lies_if_it_claims_a_file_again_that_was_wrong_before(
    checks: holder_checks.HolderChecks, drops: bool, is_proven: bool
) -> None:
    checks.apply_report(KEY, "a", said(1), 0.0, believed={1} if is_proven else ())
    now = AGAIN_S if is_proven else 0.0
    assert not checks.apply_outcome(next_check(checks, now), holder_checks.Outcome.DIFFERS, now)
    assert checks.next(NODES, now + 0.1) is None
    assert checks.is_doubtful(KEY, 1, "a") and not proven(checks, "a")
    if drops:
        checks.apply_report(KEY, "a", {}, now)
        checks.apply_report(KEY, "a", said(1), now)
        assert not proven(checks, "a")
    assert checks.apply_outcome(
        next_check(checks, now + 1.0), holder_checks.Outcome.DIFFERS, now + 1.0
    )
    assert not proven(checks, "a")


def test_a_node_that_made_a_damaged_file_again_is_believed_after_a_read(
    checks: holder_checks.HolderChecks,
) -> None:
    now = 0.0
    for index in (1, 2):  # its disk rots, but not twice at one place
        checks.apply_report(KEY, "a", said(index), now, believed={index})
        now += AGAIN_S
        assert not checks.apply_outcome(next_check(checks, now), holder_checks.Outcome.DIFFERS, now)
        checks.apply_report(KEY, "a", {}, now)
        checks.apply_report(KEY, "a", said(index), now)
        now += 1.0
        assert not checks.apply_outcome(next_check(checks, now), holder_checks.Outcome.MATCHES, now)
        assert proven(checks, "a") == {index} and not checks.is_doubtful(KEY, index, "a")


def test_a_node_that_gives_no_file_is_asked_less_often_and_delays_no_other(
    checks: holder_checks.HolderChecks,
) -> None:
    checks.apply_report(KEY, "a", said(*range(100)), 0.0)
    reads, now = [], 0.0
    while now < 60.0:
        if (check := checks.next(NODES, now)) is not None:
            reads.append(check.claim.shard)
            assert not checks.apply_outcome(check, holder_checks.Outcome.UNREAD, now)
        now += 0.1
    assert reads == list(range(len(reads))) and 5 < len(reads) < 10
    assert checks.is_doubtful(KEY, 1, "a") and not proven(checks, "a")
    checks.apply_report(KEY, "b", said(3), now)
    check = next_check(checks, now)
    assert check.claim.node_id == "b"
    checks.apply_outcome(check, holder_checks.Outcome.MATCHES, now)
    assert proven(checks, "b") == {3}


def test_lost_nodes_delay_no_read(checks: holder_checks.HolderChecks) -> None:
    checks.apply_report(KEY, "a", said(*range(1000)), 0.0)
    checks.apply_report(KEY, "b", said(*range(1000, 2000)), 0.0, believed=range(1000, 2000))
    checks.apply_report(KEY, "c", said(1), 0.0)
    check = checks.next({"c"}, 0.0)
    assert check is not None and check.claim.node_id == "c"
    checks.apply_outcome(check, holder_checks.Outcome.MATCHES, 0.0)
    again = checks.next({"c"}, AGAIN_S)
    assert again is not None and again.claim.node_id == "c"
    checks.keep_nodes({"c"})  # the others are no members any more
    assert not proven(checks, "b") and checks.proven_nodes() == {"c"}


def test_a_proven_file_that_is_not_given_for_a_minute_is_proven_no_more(
    checks: holder_checks.HolderChecks,
) -> None:
    checks.apply_report(KEY, "a", said(1), 0.0, believed={1})
    now, reads = AGAIN_S, 0
    while proven(checks, "a"):
        if (check := checks.next(NODES, now)) is not None:
            assert not checks.apply_outcome(check, holder_checks.Outcome.UNREAD, now)
            reads += 1
        now += 0.5
    assert reads == 8 and now - AGAIN_S > 60.0
    checks.apply_outcome(next_check(checks, now + 60.0), holder_checks.Outcome.MATCHES, now)
    assert proven(checks, "a") == {1}


def test_shards_that_no_node_serves_come_first_and_old_proofs_last(
    checks: holder_checks.HolderChecks,
) -> None:
    checks.apply_report(KEY, "a", said(1), 0.0, believed={1})
    checks.apply_report(KEY, "b", said(1), 0.0)
    checks.apply_report(KEY, "c", said(2), 0.0)
    order = [next_check(checks) for _ in range(2)]
    assert [check.claim.shard for check in order] == [2, 1]
    for check in order:
        checks.apply_outcome(check, holder_checks.Outcome.MATCHES, 10.0)
    assert checks.next(NODES, AGAIN_S - 1) is None
    again = next_check(checks, AGAIN_S)
    assert (again.claim.node_id, again.is_first) == ("a", False)
    checks.apply_outcome(again, holder_checks.Outcome.UNREAD, AGAIN_S)  # it may be frozen
    assert proven(checks, "a") == {1}
    lied = next_check(checks, AGAIN_S + 10)
    checks.apply_outcome(lied, holder_checks.Outcome.DIFFERS, AGAIN_S + 10)
    assert lied.claim.shard not in proven(checks, lied.claim.node_id)


def test_a_node_at_another_place_or_of_another_principal_has_nothing_proven(
    checks: holder_checks.HolderChecks,
) -> None:
    for changed in (
        holder_checks.Holder("a", "cache", "grpc://z:1"),
        holder_checks.Holder("a", "eve", "grpc://a:1"),
    ):
        checks.apply_report(KEY, "a", said(1), 0.0)
        before = next_check(checks)
        assert before.holder == HOLDERS["a"]
        checks.meet(changed)
        checks.apply_report(KEY, "a", said(1), 0.0)
        checks.apply_outcome(before, holder_checks.Outcome.MATCHES, 0.0)
        assert not proven(checks, "a")
        after = next_check(checks)
        assert after.holder == changed
        checks.apply_outcome(after, holder_checks.Outcome.MATCHES, 0.0)
        assert proven(checks, "a") == {1}
        checks.meet(HOLDERS["a"])
        assert not proven(checks, "a")


def test_a_node_that_loads_a_lost_shard_again_is_read_first(
    checks: holder_checks.HolderChecks,
) -> None:
    checks.assign(KEY, "a", {1, 2})
    again = {
        1: holder_checks.Said(10, "sum-1", is_known=True),
        2: holder_checks.Said(10, "another", is_known=False),
    }
    checks.apply_report(KEY, "a", again, 0.0)
    assert not proven(checks, "a")
    for index, checksum in ((1, "sum-1"), (2, "another")):
        check = next_check(checks)
        assert (check.claim.shard, check.checksum) == (index, checksum)
        checks.apply_outcome(check, holder_checks.Outcome.MATCHES, 0.0)
    assert proven(checks, "a") == {1, 2}


def test_a_checksum_that_the_version_does_not_have_cannot_be_proven(
    checks: holder_checks.HolderChecks,
) -> None:
    checks.apply_report(KEY, "a", said(1, is_known=False), 0.0)
    assert checks.next(NODES, 0.0) is None and not proven(checks, "a")
    assert checks.unprovable(KEY, "a") == {1}  # it must be dropped
    checks.forget(KEY)
    assert not checks.is_doubtful(KEY, 1, "a")


def test_an_outcome_that_comes_late_does_not_count(checks: holder_checks.HolderChecks) -> None:
    checks.apply_report(KEY, "a", said(1), 0.0)
    check = next_check(checks)
    checks.apply_report(KEY, "a", {1: holder_checks.Said(10, "another", is_known=True)}, 0.0)
    assert not checks.apply_outcome(check, holder_checks.Outcome.MATCHES, 0.0)
    assert not proven(checks, "a")
