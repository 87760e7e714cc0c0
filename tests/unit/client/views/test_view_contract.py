"""What holds for every view; what one alone does is in the file of its name."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cache_client import views
from cache_client.order.due import UNITS, Due
from cache_client.order.erased import Rest
from cache_client.views import amended as amended_views
from cache_client.views import (
    best_fit,
    filled,
    groups,
    length_buckets,
    mixing,
    mixture_view,
    packing,
    rows_view,
    sampling,
    shared_array,
    view,
)
from cache_client.views.due import due_of

Shared = shared_array.SharedArray
PICKLED_BYTES = 4000  # of a view of 100,000 rows: names, and the places of its tables


def numbers(size: int, most: int = 40) -> np.ndarray[Any, Any]:
    """Lengths, labels or weights of rows."""
    return np.random.default_rng(size).integers(0, most, size)


def shuffled(is_shuffled: bool = True) -> view.Shuffle:
    return view.Shuffle(is_shuffled, None, 3)


def of_shards(size: int, identity: str = "rows") -> view.SlotView:
    """Every second row of two shards, with numbers that begin anew in each."""
    shards = [np.arange(0, count, 2, np.uint32) for count in (size, size // 2)]
    firsts = np.array([0, size], np.int64)
    rows = size + size // 2
    return rows_view.rows_of_shards(identity, shards, firsts, rows, most_rows_of_one_block=1)


def listed(size: int, identity: str = "rows") -> view.SlotView:
    return rows_view.rows_in_order(identity, numbers(size, max(size, 1)), size)


def epoch_rows(size: int, rows: int | None = None) -> view.SlotView:
    return sampling.EpochRowsView(view.PlainView(size), rows or size + size // 3 + 1, shuffled())


def balanced(size: int, column: str = "label") -> view.SlotView:
    codes = np.unique(numbers(size, 5), return_inverse=True)[1]
    slots, starts = sampling.class_table(codes.astype(np.int32))
    plain, epoch = view.PlainView(size), 2 * size
    return sampling.BalancedView(plain, Shared(slots), Shared(starts), column, epoch, shuffled())


def weighted(size: int, replacement: bool = True, column: str = "w") -> view.SlotView:
    table, even, _ = sampling.weight_table(numbers(size) / 8.0, replacement=replacement)
    rows = size if replacement else even
    return sampling.WeightedView(view.PlainView(size), Shared(table), column, replacement, rows, 3)


def set_later(size: int, digest: str = "d") -> view.SlotView:
    base = weighted(size, replacement=False)
    table, even, _ = sampling.weight_table(numbers(size) % 5 + 1.0, replacement=False)
    later = sampling.SetTable(1, digest, Shared(table), even)
    return replace(base, later=(later,), epochs="any size")  # type: ignore[type-var]


def buckets(size: int, bucket_rows: int = 4, column: str = "n") -> view.SlotView:
    lengths = Shared(numbers(size).astype(np.uint16))
    plain = view.PlainView(size)
    return length_buckets.LengthBucketsView(plain, lengths, bucket_rows, shuffled(), column)


def packed(
    size: int, cut: bool = True, length: int = 16, column: str = "n", **options: Any
) -> view.SlotView:
    lengths = Shared(numbers(size).astype(np.uint16))
    plain = view.PlainView(size)
    return packing.PackingView(plain, lengths, length, cut, shuffled(), column, **options)


def best_fitted(size: int, long: Any = "drop", length: int = 16) -> view.SlotView:
    lengths = Shared(numbers(size).astype(np.uint16))
    plain = view.PlainView(size)
    return best_fit.BestFitView(plain, lengths, length, False, shuffled(), "n", long)


def grouped(
    size: int, window: tuple[int, int] | None = None, identity: str = "groups"
) -> view.SlotView:
    keys = pa.array(numbers(size, max(1, size // 4)))
    rows, offsets = groups.group_table(np.arange(size), keys, None)
    ends = None if window is None else Shared(groups.window_ends(offsets, window))
    return groups.GroupsView(Shared(rows), Shared(offsets), identity, window, ends)


def amended(size: int, at: int = 2, epoch: int = 0, shuffle: bool = True) -> view.SlotView:
    part = size // 3
    parts = [
        amended_views.Part(0, part, view.PlainView(part)),
        amended_views.Part(min(at, part), part + part // 2, of_shards(part, "half")),
        amended_views.Part(min(at + 1, part), size, view.PlainView(size)),
    ]
    return amended_views.amended_view(epoch, shuffled(shuffle), parts)


def rest_of(size: int, out: range | None = None, until: int = 1) -> view.SlotView:
    gone = np.asarray(range(1, size, 3) if out is None else out, np.int64)
    rest = Rest(range(size), Shared(gone), Shared)
    return rows_view.RestView(rest, f"erased={until}")


def replayed(size: int, until: int = 1) -> view.SlotView:
    gone = Shared(np.arange(0, size, 4, dtype=np.int64))
    return filled.FilledView(amended(size), shuffled(), gone, until)


def mixed(size: int, draw: Any = "stratified", prints: str = "print") -> view.SlotView:
    sizes = (size, size // 2 + 1)
    found = mixing.mixing(sizes, [(0, (2, 1))], stop="all_exhausted", draw=draw, seed=1)
    sources = tuple(
        mixture_view.MixedSource(name, prints, rows, view.PlainView(rows), shuffled())
        for name, rows in zip("ab", sizes, strict=True)
    )
    return mixture_view.MixtureView(sources, found)


# Views, and others of which each must have another identity.
Make = Callable[[int], view.SlotView]
CASES: dict[str, tuple[Make, tuple[Make, ...]]] = {
    "plain": (view.PlainView, ()),
    "rows of shards": (of_shards, (partial(of_shards, identity="others"),)),
    "rows in any order": (listed, (partial(listed, identity="others"),)),
    "epochs of another length": (epoch_rows, (partial(epoch_rows, rows=3),)),
    "balanced": (balanced, (partial(balanced, column="other"),)),
    "weighted": (weighted, (partial(weighted, column="other"),)),
    "weighted once": (partial(weighted, replacement=False), (weighted,)),
    "weighted by training": (
        set_later,
        (partial(set_later, digest="e"), partial(weighted, replacement=False)),
    ),
    "length buckets": (buckets, (partial(buckets, bucket_rows=5), partial(buckets, column="m"))),
    "packed and cut": (packed, (partial(packed, length=15), partial(packed, column="m"))),
    "packed whole": (partial(packed, cut=False), (packed,)),
    "packed, long ones dropped": (
        partial(packed, cut=False, long="drop"),
        (partial(packed, cut=False), partial(packed, cut=False, long="truncate")),
    ),
    "packed by best fit": (
        best_fitted,
        (partial(best_fitted, long="truncate"), partial(packed, cut=False, long="drop")),
    ),
    "packed with ends": (partial(packed, ends=True), (packed,)),
    "groups": (grouped, (partial(grouped, identity="others"),)),
    "windows": (partial(grouped, window=(2, 1)), ()),
    "not erased": (rest_of, (partial(rest_of, until=2), view.PlainView)),
    "filled": (replayed, (partial(replayed, until=2), amended)),
    "amended": (amended, (partial(amended, at=1), partial(amended, epoch=1))),
    "amended in order": (partial(amended, shuffle=False), (amended,)),
    "mixture": (mixed, (partial(mixed, draw="random"), partial(mixed, prints="other"))),
    "random mixture": (partial(mixed, draw="random"), (mixed,)),
}
every_view = pytest.mark.parametrize("make", [make for make, _ in CASES.values()], ids=[*CASES])


def slots_of(found: view.SlotView, epoch: int, slots: Any) -> list[tuple[Any, ...]]:
    """What each slot is: its source, the tokens that it leaves out, its rows."""
    samples = found.samples(np.asarray(slots, np.int64), epoch)
    count = len(slots)
    lengths = np.ones(count, np.int64) if samples.lengths is None else samples.lengths
    rows = np.split(samples.row_ids, np.cumsum(lengths)[:-1]) if count else []
    skipped = np.zeros(count) if samples.skipped is None else samples.skipped
    sources = np.zeros(count) if samples.sources is None else samples.sources
    return [
        (source, left_out, *of_slot)
        for source, left_out, of_slot in zip(
            sources.tolist(), skipped.tolist(), (each.tolist() for each in rows), strict=True
        )
    ]


def in_order(found: view.SlotView, epoch: int) -> list[tuple[Any, ...]]:
    return slots_of(found, epoch, range(found.num_slots(epoch)))


def tables(found: Any) -> list[shared_array.SharedArray]:
    """All that a view shares with other processes, also by other views in it."""
    if isinstance(found, shared_array.SharedArray):
        return [found]
    parts = found if isinstance(found, tuple) else vars(found).values()
    nested = [part for part in parts if isinstance(part, tuple) or hasattr(part, "__dict__")]
    return [table for part in nested for table in tables(part)]


def test_the_table_has_every_view() -> None:
    modules = [
        importlib.import_module(f"{views.__name__}.{module.name}")
        for module in pkgutil.iter_modules(views.__path__)
    ]
    there = {
        kind
        for module in modules
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if hasattr(kind, "samples") and hasattr(kind, "num_slots")
    } - {view.SlotView, view.LoggedView}  # a log knows its rows when they have come
    assert {type(make(20)) for make, _ in CASES.values()} == there


@every_view
@pytest.mark.parametrize("size", [1, 2, 3, 50, 700])
def test_random_access_is_reading_in_order(make: Make, size: int) -> None:
    found = make(size)
    for epoch in (0, 1, 7):
        expected = in_order(found, epoch)
        some = np.random.default_rng(epoch).permutation(len(expected))
        for slots in (some, some[:9], np.repeat(some[:5], 2), some[:1], some[:0]):
            assert slots_of(found, epoch, slots) == [expected[slot] for slot in slots]


@every_view
def test_a_new_view_with_the_same_identity_has_the_same_slots_in_any_order_of_epochs(
    make: Make,
) -> None:
    one, other = make(60), make(60)
    assert one.identity == other.identity
    forwards = [in_order(one, epoch) for epoch in (0, 1, 2)]
    assert forwards == [in_order(other, epoch) for epoch in (2, 1, 0)][::-1]


@pytest.mark.parametrize("name", CASES)
def test_views_with_other_slots_have_other_identities(name: str) -> None:
    make, others = CASES[name]
    found = [make(60).identity, *(other(60).identity for other in others)]
    assert len({*found}) == len(found)


@every_view
def test_a_copy_in_another_process_is_the_same_view_and_its_tables_do_not_travel(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_array, "get_spawning_popen", lambda: object())
    found = make(60)
    expected = in_order(found, 1)
    copy = pickle.loads(pickle.dumps(found))
    assert (copy.identity, copy.epochs, copy.rows_per_slot) == (
        found.identity, found.epochs, found.rows_per_slot
    )  # fmt: skip
    assert in_order(copy, 1) == expected
    large = make(100_000)
    large.samples(np.arange(min(10, large.num_slots(0))), 0)
    assert len(pickle.dumps(large)) < PICKLED_BYTES


@every_view
def test_the_memory_of_a_view_is_that_of_its_tables(make: Make) -> None:
    found = make(100_000)
    shared = sum({id(table): table.values.nbytes for table in tables(found)}.values())
    assert shared <= found.num_bytes <= shared + 2000
    before = found.num_bytes
    for epoch in range(5):
        found.samples(np.arange(min(100, found.num_slots(epoch))), epoch)
    # Marks or windows of the last epochs are kept: at most as much as a row id of each row.
    assert found.num_bytes <= before + 8 * 100_000


@every_view
def test_epochs_have_in_common_what_the_view_says(make: Make) -> None:
    found = make(60)
    epochs = [in_order(found, epoch) for epoch in range(4)]
    if found.epochs != "any size":
        assert len({len(slots) for slots in epochs}) == 1
    if found.epochs == "same rows":
        assert all(Counter(slots) == Counter(epochs[0]) for slots in epochs)


@every_view
def test_the_rows_of_a_slot_are_about_as_many_as_the_view_says(make: Make) -> None:
    found = make(700)
    slots = in_order(found, 0)
    mean = sum(len(slot) - 2 for slot in slots) / len(slots)
    assert found.rows_per_slot / 2 <= mean <= 2 * found.rows_per_slot


@every_view
@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_rows_come_as_often_as_is_due(make: Make, size: int) -> None:
    found = make(size)
    for epoch in (0, 1, 5):
        slots = in_order(found, epoch)
        due = due_of(found, epoch, size)
        assert Due.from_dict(due.to_dict()) == due and due.unit in UNITS
        parts = [(due, slots)]
        if due.shares:
            parts = [
                (share.due, [slot for slot in slots if slot[0] == source])
                for source, share in enumerate(due.shares)
            ]
            assert [share.slots for share in due.shares] == [len(own) for _, own in parts]
        for part, own in parts:
            times = Counter(row for slot in own for row in {*slot[2:]})
            if part.unit != "sequence":
                assert part.most is None or max(times.values(), default=0) <= part.most
                assert min(times.values(), default=part.least) >= part.least
            assert part.rows is None or len(times) <= part.rows
            if part.is_distinct:
                assert len(times) == len(own)
