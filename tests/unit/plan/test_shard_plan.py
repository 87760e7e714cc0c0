import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from cache_server.plan.shard_plan import ShardPlan, cut_shards
from cache_server.source.pinned import SourceFile, Split

quick = settings(max_examples=100)


def split(index: int, size: int, rows: int | None = 1) -> Split:
    return Split(SourceFile("/data/a.parquet", 1000, 0), index, 1000, rows, size)


# -- splits -> shards ----------------------------------------------------------------------------


@quick
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 120))
def test_shards_hold_every_split_once_in_order(sizes: list[int], target: int) -> None:
    splits = [split(index, size) for index, size in enumerate(sizes)]

    shards = cut_shards(iter(splits), target)

    assert [s for shard in shards for s in shard.splits] == splits
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert all(shard.splits for shard in shards)


@quick
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 120))
def test_a_shard_passes_the_target_only_with_a_single_large_split(
    sizes: list[int], target: int
) -> None:
    shards = cut_shards([split(index, size) for index, size in enumerate(sizes)], target)

    for shard in shards:
        assert shard.estimated_bytes <= target or len(shard.splits) == 1
    for left, right in itertools.pairwise(shards):
        assert left.estimated_bytes + right.splits[0].estimated_bytes > target


def test_no_splits_make_no_shards() -> None:
    assert cut_shards([], 100) == ()


def test_a_shard_knows_its_rows_only_when_every_split_does() -> None:
    known, unknown = split(0, 10, rows=3), split(1, 10, rows=None)

    assert ShardPlan(0, (known, known)).max_rows == 6
    assert ShardPlan(0, (known, unknown)).max_rows is None
    assert ShardPlan(0, (split(0, 1, rows=0),)).max_rows == 0


def test_a_split_is_named_by_its_file_and_its_part() -> None:
    file = SourceFile("/data/a.parquet", 10, 0)

    assert str(Split(file, 0, 1, 5, 100)) == "/data/a.parquet"
    assert str(Split(file, 1, 3, 5, 100)) == "/data/a.parquet (split 2 of 3)"
