"""Packed batches are those of a loop over sequences, documents and tokens."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cache_client.reading import rows as reading_rows
from cache_client.view_options import list_values, packed_batches
from cache_client.views import best_fit, packing, shared_array
from cache_client.views import view as views_view
from cache_protocol.errors import RequestError
from cache_protocol.storage.layout import Layout


def rows_of(*columns, row_ids, tokens_type=None):
    """Rows with list columns: name, list of lists."""
    chosen = [
        (name, pa.array([lists[row] for row in row_ids], type_ or pa.list_(pa.int32())))
        for name, lists, type_ in columns
    ]
    layout = Layout(pa.schema([pa.field(name, array.type) for name, array in chosen]))
    arrays = {layout.place(name)[0]: array for name, array in chosen}
    return reading_rows.Rows(layout, {}, arrays, len(row_ids))


def in_order(documents, *, length, cut, order):
    """Sequences of (row, place), by loops; `documents` by row, `order` of rows."""
    stream, sequences = [(row, i) for row in order for i in range(len(documents[row]))], [[]]
    if cut:
        return [stream[at : at + length] for at in range(0, len(stream), length)]
    for row in order:
        places = [(row, i) for i in range(len(documents[row]))]
        for at in range(0, len(places), length):
            if len(sequences[-1]) + len(places[at : at + length]) > length:
                sequences.append([])
            sequences[-1] += places[at : at + length]
    return sequences


def by_policy(documents, *, length, long, ends):
    """What each document gives: with its end, and no more than it may have."""
    ended = [[*each, ends] if each and ends is not None else each for each in documents]
    if long == "drop":
        return [each if len(each) <= length else [] for each in ended]
    return [each[:length] if long == "truncate" else each for each in ended]


def reference(documents, masks, sequences, slots, *, length, pad):
    """The batch by loops."""
    names = ("tokens", "position_ids", "document_ids", "seq_idx", "labels")
    batch, num_documents = {name: [] for name in names}, 0
    cu_seqlens = []
    for number, slot in enumerate(slots):
        tokens, positions, numbers, labels, last = [], [], [], [], None
        for row, i in sequences[slot]:
            begins = row != last
            last = row
            if begins:
                cu_seqlens.append(number * length + len(tokens))
            numbers.append(0 if not numbers else numbers[-1] + begins)
            positions.append(0 if begins else positions[-1] + 1)
            tokens.append(documents[row][i])
            labels.append(documents[row][i] if masks[row][i] and not begins else -100)
        missing = length - len(tokens)
        if missing:
            cu_seqlens.append(number * length + len(tokens))
        batch["tokens"].append(tokens + [pad] * missing)
        batch["position_ids"].append(positions + list(range(missing)))
        batch["document_ids"].append(numbers + [-1] * missing)
        batch["seq_idx"].append([num_documents + each for each in numbers] + [-1] * missing)
        num_documents += len({*numbers})
        batch["labels"].append(labels + [-100] * missing)
    return batch, [*cu_seqlens, len(slots) * length]


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=25).filter(any),
    length=st.integers(1, 12),
    cut=st.booleans(),
    long=st.sampled_from(packing.LONG_DOCUMENTS),
    fits_best=st.booleans(),
    end=st.one_of(st.none(), st.just(70_000)),
    large=st.booleans(),
    seed=st.integers(0, 9),
    data=st.data(),
)
@settings(max_examples=500)
def test_a_batch_is_that_of_loops(lengths, length, cut, long, fits_best, end, large, seed, data):
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, 999, n).tolist() for n in lengths]
    masks = [rng.integers(0, 2, n).tolist() for n in lengths]
    shuffle = views_view.Shuffle(True, None, seed)
    fits_best = fits_best and not cut and long != "split"
    make = best_fit.BestFitView if fits_best else packing.PackingView
    view = make(
        views_view.PlainView(len(lengths)),
        shared_array.SharedArray(np.array(lengths, np.uint8)),
        length,
        cut,
        shuffle,
        "tokens",
        "split" if cut else long,
        end is not None,
    )
    num_slots = view.num_slots(0)
    assume(num_slots)
    start = data.draw(st.integers(0, num_slots - 1))
    slots = list(range(start, data.draw(st.integers(start + 1, num_slots))))
    if data.draw(st.booleans()):
        slots += [0]  # as `pad_mask` repeats it
    samples = view.samples(np.array(slots), 0).shared([len(slots)])
    kind = pa.large_list(pa.uint16()) if large else pa.list_(pa.int32())
    rows = rows_of(
        ("tokens", documents, kind),
        ("mask", masks, pa.list_(pa.uint8())),  # as booleans are stored, too
        row_ids=samples.row_ids.tolist(),
    )
    assemble = packed_batches.PackedAssembler(
        "tokens", length, 7, packing.PACK_OUTPUTS, "torch", label_mask="mask", end_token=end
    )
    (batch,) = assemble(rows, samples.slots(0, len(slots)), [len(slots)])
    order = shuffle.order(view.inner, 0).row_ids(np.arange(len(lengths))).tolist()
    policy = {"length": length, "long": "split" if cut else long}
    given_documents = by_policy(documents, ends=end, **policy)
    masks = by_policy([[*mask, *mask[-1:]] if end else mask for mask in masks], ends=None, **policy)
    sequences = in_order(given_documents, length=length, cut=cut, order=order)
    if fits_best:
        sequences = of_best_fit(view, given_documents)
    assert view.num_tokens(0) == sum(map(len, given_documents)) == sum(map(len, sequences))
    assert view.num_padding(0) == len(sequences) * length - view.num_tokens(0)
    expected, cu_seqlens = reference(given_documents, masks, sequences, slots, length=length, pad=7)
    assert set(batch) == {"tokens", *packing.PACK_OUTPUTS, "max_seqlen"}
    for name, values in expected.items():
        assert batch[name].tolist() == values, name
    assert batch["cu_seqlens"].tolist() == cu_seqlens
    assert batch["max_seqlen"] == max(np.diff(cu_seqlens))
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    assert batch["cu_seqlens"].dtype == batch["seq_idx"].dtype == torch.int32


def of_best_fit(view, documents):
    """The sequences of a view, if they are as full as those of a loop: longest document first."""
    size, bins = view.sequence_length, []
    for document in sorted(filter(None, documents), key=len, reverse=True):
        fitting = [each for each in bins if size - sum(each) >= len(document)]
        if not fitting:
            bins.append(fitting := [])
        else:
            fitting = min(fitting, key=lambda each: size - sum(each))
        fitting.append(len(document))
    samples = view.samples(np.arange(view.num_slots(0)), 0)
    rows = np.split(samples.row_ids, np.cumsum(samples.lengths)[:-1])
    assert sorted(row for each in rows for row in each) == [
        row for row, document in enumerate(documents) if document
    ]
    # Which of two sequences with the same room takes a document is open: what fills them is not.
    filled = sorted(sum(len(documents[row]) for row in each) for each in rows)
    assert filled == sorted(map(sum, bins))
    return [[(row, i) for row in each for i in range(len(documents[row]))] for each in rows]


def assembled(*columns, **options):
    view = packing.PackingView(
        views_view.PlainView(3),
        shared_array.SharedArray(np.array([3, 0, 2], np.uint16)),
        4,
        True,
        views_view.Shuffle(False),
    )
    samples = view.samples(np.arange(view.num_slots(0)), 0).shared([2])
    rows = rows_of(*columns, row_ids=samples.row_ids.tolist())
    make = packed_batches.PackedAssembler("tokens", 4, 0, ("labels",), "numpy", **options)
    (batch,) = make(rows, samples, [2])
    return batch


def test_labels_may_be_a_column():
    batch = assembled(
        ("tokens", [[1, 2, 3], None, [4, 5]], None),
        ("labels_of", [[-100, 8, 9], None, [7, 6]], None),
        label_column="labels_of",
    )
    assert batch["tokens"].tolist() == [[1, 2, 3, 4], [5, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 8, 9, -100], [-100] * 4]


def test_labels_of_another_length_are_refused():
    with pytest.raises(RequestError, match=r"column 'mask' has 1 values beside 2 tokens"):
        assembled(
            ("tokens", [[1, 2, 3], None, [4, 5]], None),
            ("mask", [[1, 0, 1], None, [1]], None),
            label_mask="mask",
        )


def test_what_lies_in_a_null_struct_is_no_document():
    masked = pa.array([False, True, False])
    tokens = pa.array([[1, 2, 3], [9, 9], [4, 5]], pa.list_(pa.int32()))
    chats = pa.StructArray.from_arrays([tokens], ["tokens"], mask=masked)
    layout = Layout(pa.schema([("chat", chats.type)]), ["chat"])
    bits = np.array([[0], [1], [0]], np.uint8)
    rows = reading_rows.Rows(layout, {layout.null_index: bits}, {0: tokens}, 3)
    values, offsets = list_values.joined_lists(rows, "chat.tokens")
    assert (values.tolist(), offsets.tolist()) == ([1, 2, 3, 4, 5], [0, 3, 3, 5])


def test_a_null_token_is_refused():
    with pytest.raises(RequestError, match=r"column 'tokens' has a null in a list"):
        assembled(("tokens", [[1, None, 3], None, [4, 5]], None))


def test_fixed_size_lists_are_documents_of_one_length():
    layout = Layout(pa.schema([("tokens", pa.list_(pa.int32(), 3))]))
    view = packing.PackingView(
        views_view.PlainView(4),
        shared_array.SharedArray(np.array([3] * 4, np.uint16)),
        4,
        True,
        views_view.Shuffle(False),
    )
    samples = view.samples(np.arange(3), 0).shared([3])
    matrix = np.arange(12, dtype=np.int32).reshape(4, 3)
    rows = reading_rows.Rows(layout, {0: matrix}, {}, 4)
    batches = packed_batches.PackedAssembler("tokens", 4, 0, (), "numpy")(rows, samples, [1, 2])
    assert (
        np.concatenate([batch["tokens"] for batch in batches]).tolist()
        == np.arange(12).reshape(3, 4).tolist()
    )


def test_steps_that_are_made_at_once_are_those_made_alone():
    lengths = [5, 0, 9, 3, 14, 2]
    documents = [list(range(10 * row, 10 * row + n)) for row, n in enumerate(lengths)]
    numbers = shared_array.SharedArray(np.array(lengths, np.uint16))
    view = packing.PackingView(
        views_view.PlainView(6), numbers, 4, True, views_view.Shuffle(True, None, 1)
    )
    sizes = [2, 2, 2, 2, 1]
    samples = view.samples(np.arange(9), 0).shared(sizes)
    rows = rows_of(("tokens", documents, None), row_ids=samples.row_ids.tolist())
    assemble = packed_batches.PackedAssembler("tokens", 4, 0, packing.PACK_OUTPUTS, "numpy")
    together = assemble(rows, samples.slots(0, 9), sizes)
    at = slot = 0
    for batch, size, count in zip(together, sizes, samples.rows_of_steps(sizes), strict=True):
        own = rows.slice(at, at + count), samples.slots(slot, slot + size)
        (alone,) = assemble(*own, [size])
        for name, values in alone.items():
            assert np.array_equal(batch[name], values), name
        at, slot = at + count, slot + size
