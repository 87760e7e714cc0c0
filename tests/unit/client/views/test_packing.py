"""Packing: sequences by random access are those of a loop over the documents."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_client.order import order as ordering
from cache_client.views import packing, sampling, shared_array
from cache_client.views import view as views_view

lengths_of_documents = st.lists(st.integers(0, 40), max_size=60)


def reference(lengths, sequence_length, *, cut, order):
    """Sequences as lists of (row, token)."""
    stream = [[(row, token) for token in range(lengths[row])] for row in order]
    if cut:
        tokens = [token for document in stream for token in document]
        return [tokens[at : at + sequence_length] for at in range(0, len(tokens), sequence_length)]
    sequences = [[]]
    for document in stream:
        for at in range(0, len(document), sequence_length):
            piece = document[at : at + sequence_length]
            if len(sequences[-1]) + len(piece) > sequence_length:
                sequences.append([])
            sequences[-1] += piece
    return [sequence for sequence in sequences if sequence]


def view_of(lengths, sequence_length, *, cut, shuffle=True, seed=3):
    return packing.PackingView(
        views_view.PlainView(len(lengths)),
        shared_array.SharedArray(np.array(lengths, np.uint16)),
        sequence_length,
        cut,
        views_view.Shuffle(shuffle, None, seed),
    )


def tokens_of(samples, lengths, sequence_length):
    """The tokens that the rows of each slot have, as lists of (row, token)."""
    found = []
    for first, count, skipped in zip(samples.firsts, samples.lengths, samples.skipped, strict=True):
        rows = samples.row_ids[first : first + count].tolist()
        tokens = [(row, token) for row in rows for token in range(lengths[row])]
        found.append(tokens[skipped : skipped + sequence_length])
    return found


@given(
    lengths=lengths_of_documents,
    sequence_length=st.integers(1, 12),
    cut=st.booleans(),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
    at_once=st.integers(1, 9),
    data=st.data(),
)
@settings(max_examples=60)
def test_sequences_are_those_of_a_loop_over_the_documents(
    lengths, sequence_length, cut, shuffle, epoch, at_once, data
):
    order = ordering.EpochOrder(len(lengths), shuffle=shuffle, seed=3, epoch=epoch)
    order = order.row_ids(np.arange(len(lengths)))
    expected = reference(lengths, sequence_length, cut=cut, order=order.tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_DOCUMENTS_A_TIME", at_once)
        view = view_of(lengths, sequence_length, cut=cut, shuffle=shuffle)
        assert view.num_slots(epoch) == len(expected)
    assert view.num_tokens(epoch) == sum(lengths)
    assert view.num_padding(epoch) == len(expected) * sequence_length - sum(lengths)
    slots = data.draw(st.permutations(range(len(expected))))[:20]
    slots = np.array(slots, np.int64)
    view = pickle.loads(pickle.dumps(view))
    samples = view.samples(slots, epoch)
    assert tokens_of(samples, lengths, sequence_length) == [expected[slot] for slot in slots]


@given(lengths=lengths_of_documents, sequence_length=st.integers(1, 12), cut=st.booleans())
@settings(max_examples=40)
def test_a_document_of_two_sequences_is_read_once_a_step(lengths, sequence_length, cut):
    view = view_of(lengths, sequence_length, cut=cut)
    samples = view.samples(np.arange(view.num_slots(0)), 0)
    count = len(samples.lengths)
    steps = [size for size in (count // 3, count - count // 3) if size]
    shared = samples.shared(steps)
    assert tokens_of(shared, lengths, sequence_length) == tokens_of(
        samples, lengths, sequence_length
    )
    at = 0
    for rows in shared.rows_of_steps(steps):
        step = shared.row_ids[at : at + rows].tolist()
        assert len(step) == len(set(step))
        at += rows
    assert at == len(shared.row_ids)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    cut=st.booleans(),
    shuffle=st.booleans(),
    epoch_rows=st.one_of(st.none(), st.integers(1, 40)),
)
def test_a_view_says_whether_all_epochs_have_as_many_sequences(lengths, cut, shuffle, epoch_rows):
    view = view_of(lengths, 8, cut=cut, shuffle=shuffle)
    if epoch_rows is not None:
        view = replace(view, inner=sampling.EpochRowsView(view.inner, epoch_rows, view.shuffle))
    is_told = (cut or not shuffle) and epoch_rows is None
    assert view.epochs == ("same size" if is_told else "any size")
    if is_told:
        assert len({view.num_slots(epoch) for epoch in range(6)}) == 1


def test_sequences_of_shuffled_whole_documents_may_be_more_in_a_late_epoch():
    lengths = np.random.default_rng(0).integers(1, 9, 30).tolist()
    view = view_of(lengths, 8, cut=False)
    assert len({view.num_slots(epoch) for epoch in range(20)}) > 1


def test_samples_of_single_rows_share_nothing():
    plain = views_view.Samples(np.array([1, 1, 2]))
    assert plain.shared([2, 1]) is plain
    assert plain.rows_of_steps([2, 1]) == [2, 1]


def test_memory_is_the_lengths_and_a_byte_a_sequence():
    view = view_of([50] * 10_000, 100, cut=True)
    assert view.num_slots(0) == 5000
    assert view.num_bytes <= 2 * 10_000 + 5000 + 100
    assert view.rows_per_slot == 3
