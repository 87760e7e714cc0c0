"""Which claims of nodes count, and which file is read back next."""

from __future__ import annotations

import pytest

from cache_server.coordination.holder_checks import (
    Holder,
    HolderChecks,
    Outcome,
    Said,
    ShardCheck,
)
from cache_server.shards.version_key import VersionKey

KEY = VersionKey("table", "f00")
NODES = frozenset({"a", "b", "c"})
HOLDERS = {node: Holder(node, "cache", f"grpc://{node}:1") for node in NODES}
AGAIN_S = 100.0


def said(*indices: int, is_known: bool = True, is_first: bool = False) -> dict[int, Said]:
    return {index: Said(10, f"sum-{index}", is_known, is_first) for index in indices}


@pytest.fixture
def checks() -> HolderChecks:
    made = HolderChecks(AGAIN_S)
    for holder in HOLDERS.values():
        made.meet(holder)
    return made


def proven(checks: HolderChecks, node: str) -> set[int]:
    return {index for index in range(10) if checks.is_proven(KEY, index, node)}


def next_check(checks: HolderChecks, now: float = 0.0) -> ShardCheck:
    found = checks.next(NODES, now)
    assert found is not None
    return found


def test_a_node_is_believed_about_what_it_was_told_to_load_and_others_are_read_first(
    checks: HolderChecks,
) -> None:
    checks.note_told(KEY, "a", {1, 2})
    checks.apply_report(KEY, "a", said(1, 2, is_first=True), 0.0)
    checks.apply_report(KEY, "b", said(1, 2), 0.0)
    assert proven(checks, "a") == {1, 2} and not proven(checks, "b")

    check = next_check(checks)
    assert check == ShardCheck(check.claim, HOLDERS["b"], 10, "sum-1", is_first=True)
    assert checks.next(NODES, 0.0) is None  # one file of a node at a time
    assert not checks.apply_outcome(check, Outcome.MATCHES, 0.0)
    assert proven(checks, "b") == {1}

    checks.apply_report(KEY, "b", said(2), 0.0)  # dropped, and copied again
    checks.apply_report(KEY, "b", said(1, 2), 0.0)
    assert not proven(checks, "b")
    checks.note_told(KEY, "c", {None})  # the whole query
    checks.apply_report(KEY, "c", said(7, is_first=True), 0.0)
    assert proven(checks, "c") == {7}


def test_a_node_lies_if_it_still_claims_a_file_that_was_found_wrong_before(
    checks: HolderChecks,
) -> None:
    checks.apply_report(KEY, "a", said(1), 0.0)
    assert not checks.apply_outcome(next_check(checks), Outcome.DIFFERS, 0.0)
    assert checks.next(NODES, 0.1) is None and checks.is_doubtful(KEY, 1, "a")
    checks.apply_report(KEY, "a", {}, 0.2)  # an honest node has found the damage
    checks.apply_report(KEY, "a", said(1), 0.3)
    assert not checks.is_doubtful(KEY, 1, "a")
    assert not checks.apply_outcome(next_check(checks, 0.3), Outcome.DIFFERS, 0.3)
    assert checks.apply_outcome(next_check(checks, 1.0), Outcome.DIFFERS, 1.0)
    assert not proven(checks, "a")


def test_a_node_that_gives_no_file_is_asked_less_often_and_hides_no_other(
    checks: HolderChecks,
) -> None:
    checks.apply_report(KEY, "a", said(*range(100)), 0.0)
    reads, now = [], 0.0
    while now < 20.0:
        if (check := checks.next(NODES, now)) is not None:
            reads.append(check.claim.shard)
            assert not checks.apply_outcome(check, Outcome.UNREAD, now)
        now += 0.1
    assert set(reads) == set(range(100))
    assert checks.is_doubtful(KEY, 1, "a") and not proven(checks, "a")
    checks.apply_report(KEY, "b", said(3), now)
    while (check := next_check(checks, now)).claim.node_id == "a":
        checks.apply_outcome(check, Outcome.UNREAD, now)
    checks.apply_outcome(check, Outcome.MATCHES, now)
    assert proven(checks, "b") == {3}


def test_shards_that_no_node_serves_come_first_and_old_proofs_last(checks: HolderChecks) -> None:
    checks.apply_report(KEY, "a", said(1), 0.0, believed=True)
    checks.apply_report(KEY, "b", said(1), 0.0)
    checks.apply_report(KEY, "c", said(2), 0.0)
    order = [next_check(checks) for _ in range(2)]
    assert [check.claim.shard for check in order] == [2, 1]
    for check in order:
        checks.apply_outcome(check, Outcome.MATCHES, 10.0)
    assert checks.next(NODES, AGAIN_S - 1) is None
    again = next_check(checks, AGAIN_S)
    assert (again.claim.node_id, again.is_first) == ("a", False)
    checks.apply_outcome(again, Outcome.UNREAD, AGAIN_S)  # it may be frozen
    assert proven(checks, "a") == {1}
    lied = next_check(checks, AGAIN_S + 10)
    checks.apply_outcome(lied, Outcome.DIFFERS, AGAIN_S + 10)
    assert not checks.is_proven(KEY, lied.claim.shard, lied.claim.node_id)


def test_a_node_at_another_place_or_of_another_principal_has_nothing_proven(
    checks: HolderChecks,
) -> None:
    for changed in (Holder("a", "cache", "grpc://z:1"), Holder("a", "eve", "grpc://a:1")):
        checks.apply_report(KEY, "a", said(1), 0.0)
        before = next_check(checks)
        assert before.holder == HOLDERS["a"]
        checks.meet(changed)
        checks.note_told(KEY, "b", {1})
        checks.apply_report(KEY, "a", said(1), 0.0)
        checks.apply_outcome(before, Outcome.MATCHES, 0.0)
        assert not proven(checks, "a")
        after = next_check(checks)
        assert after.holder == changed
        checks.apply_outcome(after, Outcome.MATCHES, 0.0)
        assert proven(checks, "a") == {1}
        checks.meet(HOLDERS["a"])
        assert not proven(checks, "a")


def test_a_node_that_loads_a_lost_shard_again_is_read_first(checks: HolderChecks) -> None:
    checks.note_told(KEY, "a", {1, 2})
    again = {1: Said(10, "sum-1", is_known=True), 2: Said(10, "another", is_known=False)}
    checks.apply_report(KEY, "a", again, 0.0)
    assert not proven(checks, "a")
    for index, checksum in ((1, "sum-1"), (2, "another")):
        check = next_check(checks)
        assert (check.claim.shard, check.checksum) == (index, checksum)
        checks.apply_outcome(check, Outcome.MATCHES, 0.0)
    assert proven(checks, "a") == {1, 2}


def test_a_checksum_that_the_version_does_not_have_cannot_be_proven(checks: HolderChecks) -> None:
    checks.apply_report(KEY, "a", said(1, is_known=False), 0.0)
    assert checks.next(NODES, 0.0) is None and not proven(checks, "a")
    assert checks.hopeless(KEY, "a") == {1}  # it must be dropped
    checks.forget(KEY)
    assert not checks.is_doubtful(KEY, 1, "a")


def test_an_outcome_that_comes_late_does_not_count(checks: HolderChecks) -> None:
    checks.apply_report(KEY, "a", said(1), 0.0)
    check = next_check(checks)
    checks.apply_report(KEY, "a", {1: Said(10, "another", is_known=True)}, 0.0)
    assert not checks.apply_outcome(check, Outcome.MATCHES, 0.0)
    assert not proven(checks, "a")
