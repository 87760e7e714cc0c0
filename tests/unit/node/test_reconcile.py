"""What a node decides to do, from what it should hold and what it holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from cache_server.node.desired import (
    DesiredShard,
    DesiredState,
    DesiredVersion,
    LoadPlan,
    ShardCopy,
)
from cache_server.node.reconcile import (
    Action,
    ActualVersion,
    Cancel,
    CloseTables,
    DropShards,
    Forget,
    Publish,
    Reconciliation,
    Remove,
    Retire,
    StartLoads,
    StartWholeQuery,
    Update,
    reconcile,
)
from cache_server.shards.version_key import VersionKey
from cache_server.source.pinned import SourceFile, Split

KEY, OTHER = VersionKey("table", "f00"), VersionKey("other", "f00")
GONE = frozenset({KEY})
SPLIT = Split(SourceFile("/data/a.parquet", 1, 1), 0, 1, 10, 80)
COPY = ShardCopy(("grpc://another:1",), 10, 80, "sum")


def plan(key: VersionKey = KEY, attempt: int = 1) -> LoadPlan:
    schema = pa.schema([("row", pa.int64())])
    return LoadPlan(key, attempt, "SELECT row FROM source", (), schema, 1, True, False)


def held(index: int) -> DesiredShard:
    """A shard that the node has, or cannot get yet."""
    return DesiredShard(index, row_start=10 * index)


def readable(index: int) -> DesiredShard:
    return replace(held(index), splits=(SPLIT,))


def copyable(index: int) -> DesiredShard:
    return replace(held(index), copy=COPY)


def wanted(*shards: DesiredShard, key: VersionKey = KEY, **changes: Any) -> DesiredVersion:
    by_index = {shard.index: shard for shard in shards}
    return replace(DesiredVersion(plan(key), by_index), **changes)


def fixed(*shards: DesiredShard, **changes: Any) -> DesiredVersion:
    """A version with every shard sealed somewhere."""
    return wanted(*shards, rows_fixed=True, num_rows=30, **changes)


def decide(
    desired: DesiredVersion | None, actual: ActualVersion | None, **changes: Any
) -> Reconciliation:
    versions = {} if desired is None else {KEY: desired}
    return reconcile(DesiredState(versions, **changes), {} if actual is None else {KEY: actual})


def actions(
    desired: DesiredVersion | None, actual: ActualVersion | None, **changes: Any
) -> list[Action]:
    return list(decide(desired, actual, **changes).actions)


def known(desired: DesiredVersion, **changes: Any) -> ActualVersion:
    """A version that the node should hold exactly so."""
    return ActualVersion(desired, **changes)


# -- loads and copies ------------------------------------------------------------------------------


def test_a_new_version_is_noted_and_its_shards_are_loaded_or_copied() -> None:
    desired = wanted(readable(0), copyable(1))

    assert actions(desired, None) == [
        Update(desired),
        StartLoads(KEY, (readable(0), copyable(1))),
    ]


def test_a_shard_without_splits_or_copy_waits_for_another_node() -> None:
    desired = wanted(held(0))

    assert actions(desired, None) == [Update(desired)]


@pytest.mark.parametrize(
    "state",
    [
        {"sealed": {0}},
        {"loading": {0: 5}},
        {"failures": {0: "corrupt"}},
        {"failures": {0: "corrupt"}, "may_copy_again": True},  # the source would fail again
    ],
)
def test_a_shard_that_is_sealed_or_loading_or_failed_is_not_loaded(state: dict[str, Any]) -> None:
    desired = wanted(readable(0))

    assert actions(desired, known(desired, **state)) == []


def test_shards_that_lie_on_the_disk_of_a_node_that_starts_are_adopted() -> None:
    desired = wanted(readable(0), readable(1))

    assert actions(desired, ActualVersion(sealed={0})) == [
        Update(desired),
        StartLoads(KEY, (readable(1),)),
    ]


def test_a_failed_copy_is_tried_again_after_a_while() -> None:
    desired = wanted(copyable(0), readable(1))
    failed = known(desired, failures={0: "no room", 1: "corrupt"})

    assert actions(desired, failed) == []
    assert actions(desired, replace(failed, may_copy_again=True)) == [
        Forget(KEY, frozenset({0})),
        StartLoads(KEY, (copyable(0),)),
    ]


def test_only_a_change_of_what_is_desired_is_noted() -> None:
    before, after = wanted(held(0)), wanted(held(0))

    assert actions(before, known(before)) == []
    assert actions(after, known(before)) == [Update(after)]


# -- what is no longer desired ---------------------------------------------------------------------


def test_loads_and_failures_of_undesired_shards_are_cancelled_and_forgotten() -> None:
    desired = wanted(readable(0))
    actual = known(
        desired, loading={0: 5, 1: 5}, failures={2: "corrupt"}, waits={0: "room", 3: "room"}
    )

    assert actions(desired, actual) == [
        Forget(KEY, frozenset({2, 3})),
        Cancel(KEY, frozenset({1})),
    ]


def test_surplus_shards_are_dropped_once_they_were_reported() -> None:
    desired = wanted(held(0))
    sealed = known(desired, sealed={0, 1, 2})

    assert actions(desired, sealed) == []
    assert actions(desired, replace(sealed, reported={0, 2})) == [DropShards(KEY, frozenset({2}))]


def test_no_shard_is_dropped_before_a_whole_query_has_run() -> None:
    desired = wanted(run_whole=True)
    actual = known(desired, sealed={1}, reported={1}, loading={None: 5})

    assert actions(desired, actual) == []


@pytest.mark.parametrize("actual", [ActualVersion(sealed={0}), known(wanted(held(0)))])
def test_only_a_version_that_is_named_as_gone_is_removed(actual: ActualVersion) -> None:
    assert actions(None, actual) == []
    assert actions(None, actual, gone=GONE) == [Remove(KEY)]


def test_a_version_is_retired_until_its_last_load_has_ended() -> None:
    loading = known(wanted(readable(0)), loading={0: 5})

    assert actions(None, loading, gone=GONE) == [Retire(KEY)]
    assert actions(None, replace(loading, is_retired=True)) == [Retire(KEY)]
    assert actions(None, replace(loading, is_retired=True, loading={})) == [Remove(KEY)]


def test_a_version_that_the_coordinator_does_not_know_stays_as_it_is() -> None:
    actual = known(wanted(held(0)), sealed={0, 1}, reported={0, 1}, loading={2: 5})

    desired = DesiredState(orphans=GONE)
    assert reconcile(desired, {KEY: actual}).actions == ()
    assert reconcile(desired, {KEY: replace(actual, loading={})}, GONE).actions == (Remove(KEY),)
    assert reconcile(desired, {KEY: ActualVersion()}).actions == (Remove(KEY),)


def test_spooled_tables_are_closed_when_nothing_is_loaded() -> None:
    desired = wanted(readable(0), readable(1))
    actual = known(desired, sealed={0}, has_spooled_tables=True)

    assert CloseTables(KEY) not in actions(desired, actual)
    assert CloseTables(KEY) not in actions(desired, replace(actual, loading={1: 5}))
    assert actions(desired, replace(actual, sealed={0, 1})) == [CloseTables(KEY)]


# -- attempts --------------------------------------------------------------------------------------


def test_another_attempt_starts_without_the_shards_and_failures_of_the_former() -> None:
    desired = wanted(readable(0), plan=plan(attempt=2))
    former = known(wanted(readable(0)), sealed={0}, failures={0: "corrupt"}, row_starts={0: 0})

    assert actions(desired, former) == [
        Remove(KEY),
        Update(desired),
        StartLoads(KEY, (readable(0),)),
    ]


@pytest.mark.parametrize("attempt", [1, 2])
def test_another_attempt_waits_for_the_loads_of_the_former(attempt: int) -> None:
    desired = wanted(readable(0), plan=plan(attempt=attempt))
    former = known(wanted(readable(0)), loading={0: 5}, is_retired=attempt == 1)

    decided = decide(desired, former)

    assert list(decided.actions) == [Retire(KEY)]
    assert decided.is_ready


# -- whole queries ---------------------------------------------------------------------------------


def test_a_whole_query_is_run_and_keeps_what_is_missing() -> None:
    first = wanted(run_whole=True)
    again = wanted(held(0), run_whole=True, num_shards=3, missing=frozenset({1, 2}))

    assert actions(first, None) == [Update(first), StartWholeQuery(KEY, frozenset())]
    assert actions(again, known(again, sealed={0, 1})) == [StartWholeQuery(KEY, frozenset({1, 2}))]


@pytest.mark.parametrize(
    "state",
    [
        {"loading": {None: 5}},
        {"failures": {None: "no such column"}},
        {"num_shards": 0},
        {"num_shards": 1, "sealed": {0}},
    ],
)
def test_a_whole_query_that_runs_or_failed_or_has_run_is_not_run(state: dict[str, Any]) -> None:
    desired = wanted(run_whole=True, missing=frozenset(state.get("sealed", ())))

    assert actions(desired, known(desired, **state)) == []


def test_an_undesired_whole_query_is_cancelled_and_its_failure_forgotten() -> None:
    desired = wanted()

    assert actions(desired, known(desired, loading={None: 5})) == [Cancel(KEY, frozenset({None}))]
    assert actions(desired, known(desired, failures={None: "no such column"})) == [
        Forget(KEY, frozenset({None}))
    ]


# -- what is served --------------------------------------------------------------------------------


def test_sealed_shards_are_published_once_row_ids_are_known() -> None:
    loading, desired = wanted(held(0), held(2)), fixed(held(0), held(2))

    assert actions(loading, known(loading, sealed={0, 2})) == []
    assert actions(desired, known(desired, sealed={0, 2})) == [Publish(KEY, {0: 0, 2: 20})]


def test_what_is_served_is_published_again_only_when_it_changes() -> None:
    desired = fixed(held(0), held(1))
    served = known(desired, sealed={0}, row_starts={0: 0})

    assert actions(desired, served) == []
    assert actions(desired, replace(served, sealed={0, 1})) == [Publish(KEY, {0: 0, 1: 10})]
    assert actions(desired, replace(served, sealed=frozenset())) == [Publish(KEY, {})]


def test_a_shard_is_served_no_more_before_its_file_is_dropped() -> None:
    desired = fixed(held(0))
    actual = known(desired, sealed={0, 1}, reported={0, 1}, row_starts={0: 0, 1: 10})

    assert actions(desired, actual) == [
        Publish(KEY, {0: 0}),
        DropShards(KEY, frozenset({1})),
    ]


# -- readiness -------------------------------------------------------------------------------------


def test_a_node_is_ready_when_every_loaded_shard_is_served_or_failed() -> None:
    desired = fixed(held(0), readable(1))
    actual = known(desired, sealed={0}, loading={1: 5})

    assert decide(None, None).is_ready
    assert decide(wanted(), None).is_ready  # a load that runs
    assert not decide(desired, actual).is_ready
    assert decide(desired, replace(actual, sealed={0, 1})).is_ready
    assert decide(desired, replace(actual, failures={1: "corrupt"})).is_ready


def test_a_copy_that_is_tried_again_is_waited_for() -> None:
    desired = fixed(copyable(0))
    failed = known(desired, failures={0: "no room"})

    assert decide(desired, failed).is_ready
    assert not decide(desired, replace(failed, may_copy_again=True)).is_ready


def test_versions_are_decided_one_by_one() -> None:
    table, other = fixed(held(0)), fixed(readable(0), key=OTHER)
    gone = VersionKey("gone", "f00")
    actual = {KEY: known(table, sealed={0}, row_starts={0: 0}), gone: ActualVersion(sealed={0})}

    decided = reconcile(DesiredState({KEY: table, OTHER: other}, frozenset({gone})), actual)

    assert list(decided.actions) == [
        Remove(gone),
        Update(other),
        Publish(OTHER, {}),
        StartLoads(OTHER, (readable(0),)),
    ]
    assert not decided.is_ready
