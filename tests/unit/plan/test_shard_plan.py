import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cache_server.plan.shard_plan import ShardPlan, cut_shards, same_shards, with_contents
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


# -- the cuts of an earlier version ----------------------------------------------------------------

files = st.lists(st.integers(0, 30), max_size=25, unique=True)


def of_files(names: list[int]) -> list[Split]:
    return [Split(SourceFile(f"/data/{name}", 9, 0), 0, 1, 1, 10 + name) for name in names]


@quick
@given(files, files, st.integers(1, 120))
def test_a_version_keeps_the_shards_whose_splits_are_still_side_by_side(
    old: list[int], new: list[int], target: int
) -> None:
    before = cut_shards(of_files(old), target)
    splits = of_files(new)

    after = cut_shards(splits, target, before)

    assert [s for shard in after for s in shard.splits] == splits
    runs = {shard.splits for shard in after}
    where = {split: index for index, split in enumerate(splits)}
    for shard in before:
        places = [where.get(split) for split in shard.splits]
        stays = None not in places and places == list(range(places[0], places[0] + len(places)))
        assert (shard.splits in runs) or not stays
    known = {split for shard in before if shard.splits in runs for split in shard.splits}
    for shard in after:  # what is cut anew obeys the target
        if not known.issuperset(shard.splits):
            assert shard.estimated_bytes <= target or len(shard.splits) == 1
    assert cut_shards(splits, target, after) == after


@quick
@given(files.filter(bool), st.integers(1, 120), st.data())
def test_shards_have_the_same_content_if_their_splits_are_of_the_same_files(
    names: list[int], target: int, data: st.DataObject
) -> None:
    before = with_contents(cut_shards(of_files(names), target), b"query")
    splits = of_files(names)
    changed = data.draw(st.integers(0, len(splits) - 1))
    field = data.draw(st.sampled_from(["path", "size", "mtime_ns", "etag", "part", "piece"]))
    split = splits[changed]
    other = {"path": "/else", "size": 8, "mtime_ns": 1, "etag": "e", "part": 1, "piece": "p"}[field]
    if field in ("part", "piece"):
        splits[changed] = replace(split, **{field: other})
    else:
        splits[changed] = replace(split, file=replace(split.file, **{field: other}))

    after = with_contents(cut_shards(splits, target), b"query")

    holds = [i for i, shard in enumerate(after) if splits[changed] in shard.splits]
    assert same_shards(after, before) == {
        index: index for index in range(len(after)) if index not in holds
    }
    assert same_shards(with_contents(after, b"another query"), before) == {}
