"""Filters, splits, folds and subsets against a reference in a few lines."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from multiprocessing import context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_client.flight import routing
from cache_client.order import order as ordering
from cache_client.view_options import columns, selection
from cache_client.view_options import options as view_options
from cache_client.views import rows_view, shared_array, splits
from cache_client.views import view as views_view
from cache_protocol.errors import ConfigError

SCHEMA = pa.schema([("a", pa.int64())])
ONE_BLOCK = rows_view._MOST_ROWS_OF_ONE_BLOCK


def version_of(sizes: Sequence[int]) -> columns.VersionNodes:
    """A version of shards of these sizes, none of them empty."""
    starts = np.cumsum([0, *sizes])[:-1].astype(np.int64)
    shards = routing.ShardMap("t", "f", SCHEMA, sum(sizes), starts, (), ((),) * len(sizes))
    return columns.VersionNodes("grpc://nowhere:1", shards)


def made(options: dict[str, Any], version: columns.VersionNodes) -> views_view.SlotView:
    return selection.make_selection(view_options.View(**options), version)


def rows_of(view: views_view.SlotView) -> list[int]:
    """The row ids of all slots, by random access in another order."""
    slots = np.arange(view.num_slots(3), dtype=np.int64)[::-1]
    found: list[int] = view.samples(slots, 3).row_ids[::-1].tolist()
    return found


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conditions are ``row % N = M`` here, and nodes are not asked."""

    def rows(version: columns.VersionNodes, where: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        bounds = [*version.shards.starts.tolist(), version.shards.num_rows]
        return [
            np.array([row - a for row in range(a, b) if all(is_kept(w, row) for w in where)], "u4")
            for a, b in itertools.pairwise(bounds)
        ]

    monkeypatch.setattr(selection, "selected_rows", rows)


def is_kept(where: str, row: int) -> bool:
    _, _, divisor, _, rest = where.split()
    return row % int(divisor) == int(rest)


def reference(options: dict[str, Any], num_rows: int) -> list[int]:
    """The rows of a view, one after the other."""
    rows = range(num_rows) if options.get("subset") is None else options["subset"]
    kept = []
    for row in rows:
        split = int(splits.row_hashes(np.array([row]), "split")[0])
        fold = int(splits.row_hashes(np.array([row]), "fold")[0])
        if (where := options.get("where")) and not is_kept(where, row):
            continue
        if (share := options.get("split")) and not split < share["train"] * 2**64:
            continue
        if (wanted := options.get("fold")) and fold * wanted[1] >> 64 != wanted[0]:
            continue
        if (wanted := options.get("except_fold")) and fold * wanted[1] >> 64 == wanted[0]:
            continue
        kept.append(row)
    return kept


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    sizes = draw(st.lists(st.integers(1, 40), max_size=6))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        divisor = draw(st.integers(1, 6))
        options["where"] = f"row % {divisor} = {draw(st.integers(0, divisor))}"
    if draw(st.booleans()):
        options["split"] = {"train": draw(st.sampled_from([0.1, 0.5, 0.8]))}
        options["part"] = "train"
    if (kind := draw(st.sampled_from(["", "fold", "except_fold"]))) != "":
        options[kind] = draw(st.sampled_from([(0, 2), (1, 2), (2, 7)]))
    if sizes and draw(st.booleans()):
        options["subset"] = draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=30))
    return sizes, options


@settings(max_examples=80)
@given(cases(), st.sampled_from([ONE_BLOCK, 0]))
@pytest.mark.usefixtures("divided")
def test_a_view_has_the_rows_of_the_reference_in_its_order(
    case: tuple[list[int], dict[str, Any]], one_block: int
) -> None:
    sizes, options = case
    with pytest.MonkeyPatch.context() as patch:
        defaults = rows_view.rows_of_shards.__kwdefaults__
        patch.setitem(defaults, "most_rows_of_one_block", one_block)

        view = made(options, version_of(sizes))

    expected = reference(options, sum(sizes))
    assert rows_of(view) == expected
    assert view.num_slots(0) == len(expected)
    assert view.num_bytes in (0, 4 * len(expected))
    assert (view.identity == "") == (not options)
    assert rows_of(pickle.loads(pickle.dumps(view))) == expected


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
    st.data(),
)
@pytest.mark.usefixtures("divided")
def test_ranks_of_any_size_read_a_filtered_epoch_once_also_after_a_resume(
    sizes: list[int],
    world: int,
    new_world: int,
    batch: int,
    new_batch: int,
    shuffle: bool,
    data: st.DataObject,
) -> None:
    view = made({"where": "row % 3 = 1"}, version_of(sizes))
    slots = view.num_slots(0)
    order = ordering.EpochOrder(slots, shuffle=shuffle, seed=7)

    def read(plan: ordering.StepPlan, steps: int) -> list[int]:
        found: list[int] = []
        for step in range(steps):
            for rank in range(plan.world_size):
                positions, _ = plan.window(range(step, step + 1), rank)
                found += view.samples(order.row_ids(positions), 0).row_ids.tolist()
        return found

    plan = ordering.StepPlan(slots, world, batch)
    steps = data.draw(st.integers(0, plan.num_steps))
    consumed = min(slots, steps * world * batch)
    rest = ordering.StepPlan(slots, new_world, new_batch, rows_consumed=consumed)
    before, after = read(plan, steps), read(rest, rest.num_steps)

    # Only a rank that the last step leaves without a row repeats one.
    assert len({*before}) == consumed and len({*after}) == slots - consumed
    assert sorted({*before, *after}) == [row for row in range(sum(sizes)) if row % 3 == 1]


def test_a_split_is_stable_when_rows_are_appended() -> None:
    options = {"split": {"train": 0.6}, "part": "train", "except_fold": (0, 3)}
    before = rows_of(made(options, version_of([100, 57])))
    after = rows_of(made(options, version_of([300, 1, 40])))

    assert [row for row in after if row < 157] == before


def test_the_parts_of_a_split_are_all_rows_once_and_of_the_sizes_that_they_say() -> None:
    version = version_of([40_000, 60_000])
    thirds = {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}
    for split in ({"train": 0.8, "val": 0.1, "test": 0.1}, thirds):
        parts = [rows_of(made({"split": split, "part": p}, version)) for p in split]

        assert sorted(itertools.chain(*parts)) == list(range(100_000))
        for part, share in zip(parts, split.values(), strict=True):
            assert abs(len(part) - share * 100_000) < 500  # more than three deviations
    folds = [
        rows_of(made({"split": thirds, "part": "a", "fold": (i, 4)}, version)) for i in range(4)
    ]
    assert [abs(len(fold) - 100_000 / 12) < 300 for fold in folds] == [True] * 4


def test_floats_that_sql_groups_together_are_in_one_part() -> None:
    datafusion = pytest.importorskip("datafusion")
    values = [0.0, -0.0, float("nan"), -float("nan"), None, None, 1.5]
    for kind in (pa.float64(), pa.float32(), pa.float16()):
        session = datafusion.SessionContext()
        session.from_arrow(pa.table({"x": pa.array(values, pa.float64()).cast(kind)}), "t")
        for at in range(8):  # zeros, NaN and nulls fall into one part each
            sql = splits.fold_of(at, 8).condition(["x"])
            (found,) = session.sql(f"SELECT array_agg({sql}) AS found FROM t").to_pylist()
            zero, minus, nan, other, null, again, _ = found["found"]
            assert (zero, nan, null) == (minus, other, again)


def test_the_conditions_of_keys_are_their_hash_ranges() -> None:
    assert splits.part_of({"a": 0.5, "b": 0.5}, "b").condition(["user"]) == (
        "left(md5(concat('split:', CASE WHEN \"user\" IS NULL THEN '-' "
        "WHEN CAST(\"user\" AS VARCHAR) = '-0.0' THEN '3:0.0,' "
        "WHEN CAST(\"user\" AS VARCHAR) = '-0' THEN '1:0,' ELSE "
        "concat(CAST(character_length(CAST(\"user\" AS VARCHAR)) AS VARCHAR), ':', "
        "CAST(\"user\" AS VARCHAR), ',') END)), 16) "
        "BETWEEN '8000000000000000' AND 'ffffffffffffffff'"
    )
    other = splits.fold_of(1, 4, inside=False).condition(["a"])
    assert other.endswith("NOT BETWEEN '4000000000000000' AND '7fffffffffffffff'")
    assert splits.HashRange("split", 0, 2**64).holds(np.arange(5)).all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"where": " "}, "where must be SQL"),
        ({"where": 7}, "got 7"),
        (
            {"split": ("train", 0.8), "part": "train"},
            "0.9, 'val': 0.1}, got ('train'",
        ),
        ({"split": {"train": 0}, "part": "train"}, "got {'train': 0}"),
        ({"split": {"train": True}, "part": "train"}, "got {'train': True}"),
        ({"split": "train", "part": "train"}, "got 'train'"),
        ({"split": {"a": 0.7, "b": 0.4}, "part": "a"}, "at most 1 together"),
        ({"split": {"a": 0.7, "b": 0.1}}, "part must be one of a, b, got None"),
        ({"split": {"a": 0.7}, "part": "b"}, "got 'b'"),
        ({"split": {"a": float("nan")}, "part": "a"}, "fractions between 0 and 1"),
        ({"part": "a"}, "part needs split"),
        ({"split_by": ["user"]}, "split_by needs split or fold or except_fold"),
        ({"split_by": "user", "fold": (0, 2)}, "split_by must be a list of columns, got 'user'"),
        ({"split_by": [], "fold": (0, 2)}, "split_by must be a list"),
        ({"fold": (2, 2)}, "fold must be (i, k)"),
        ({"fold": (0, 1)}, "got (0, 1)"),
        ({"except_fold": 3}, "except_fold must be (i, k)"),
        ({"fold": (0, 2), "except_fold": (0, 2)}, "exclude each other"),
    ],
)
def test_bad_options_are_quoted(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        view_options.View(**options)
    assert named in str(caught.value)


@pytest.mark.parametrize("subset", [[3, 10], [-1], [0.5], [[1]], 4, ["a"]])
def test_a_subset_has_row_ids_of_the_version(subset: object) -> None:
    with pytest.raises(ConfigError, match="subset must"):
        made({"subset": subset}, version_of([10]))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (" a  >\n 1 ", "a > 1"),
        ("a = 'x  y' AND  b", "a = 'x  y' AND b"),
        ("a = 'it''s  x'  AND b", "a = 'it''s  x' AND b"),
        ('"a  b"  > 1', '"a  b" > 1'),
        ("a -- x  y\n > 1 ", "a -- x  y\n > 1"),
        ("a = $$x  y$$", "a = $$x  y$$"),
    ],
)
def test_only_spaces_without_a_meaning_are_left_out_of_a_condition(
    where: str, expected: str
) -> None:
    assert selection.normalised(where) == expected


@pytest.mark.usefixtures("divided")
def test_each_option_changes_the_identity_and_spaces_do_not() -> None:
    version = version_of([50])
    options: list[dict[str, Any]] = [
        {"where": "row % 2 = 1"},
        {"where": "row % 2 = 0"},
        {"where": "row % 2 = 1", "split": {"train": 0.5}, "part": "train"},
        {"split": {"train": 0.5}, "part": "train"},
        {"split": {"train": 0.8, "val": 0.1}, "part": "val"},
        {"fold": (0, 2)},
        {"except_fold": (0, 2)},
        {"subset": [1, 2]},
        {"subset": [2, 1]},
        {"subset": []},
    ]
    identities = [made(each, version).identity for each in options]

    assert len(set(identities)) == len(options)
    assert made({"where": "row  % 2 = 1"}, version).identity == identities[0]
    assert made({"split": {"a": 0.5}, "part": "a"}, version).identity == identities[3]
    assert made({}, version).identity == ""


def test_spawned_processes_map_one_file_that_is_removed_with_the_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    array = shared_array.SharedArray(np.arange(1000, dtype=np.uint32))
    popen = object()
    monkeypatch.setattr(context._tls, "spawning_popen", popen, raising=False)
    pickles = [pickle.dumps(array) for _ in range(2)]
    monkeypatch.undo()

    assert pickles[0] == pickles[1] and len(pickles[0]) < 300
    path = array._file()
    copies = [pickle.loads(each) for each in pickles]
    del array
    assert not Path(path).exists()
    assert [each.values.tolist() for each in copies] == [list(range(1000))] * 2
