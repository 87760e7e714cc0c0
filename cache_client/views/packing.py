"""Documents of tokens -> sequences of one length, by random access. Pure.

An epoch has an order of documents. Their tokens, joined, are a stream. Sequences are pieces of the
stream: cut every ``sequence_length`` tokens, or before the document that does not fit.

Once an epoch, one pass over the lengths notes where every 16th sequence begins. A sequence is then
found from the mark before it. So it costs the same at the end of an epoch as at its begin, and a
state needs no more than a number of sequences.

Knows neither tokens nor nodes: `packed_batches` makes the batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

from cache_client.order.permutation import Int64Array
from cache_client.views.view import Epochs, Numbers, Samples, Shuffle, SlotView, joined_ranges

PackOutput = Literal["position_ids", "document_ids", "seq_idx", "cu_seqlens", "labels"]
PACK_OUTPUTS: Final[tuple[PackOutput, ...]] = get_args(PackOutput)
LongDocuments = Literal["split", "drop", "truncate"]
LONG_DOCUMENTS: Final[tuple[LongDocuments, ...]] = get_args(LongDocuments)

_APART: Final = 16  # sequences between two marks
_DOCUMENTS_A_TIME: Final = 2**18  # of the pass over an epoch
_EPOCHS_KEPT: Final = 2


class _Pieces(NamedTuple):
    """Documents that have tokens, in order; long ones cut into pieces if documents stay whole.

    Attributes:
        place: of the document in the order of the epoch.
        row_id: of the document.
        skipped: tokens of the document before the piece.
        length: tokens of the piece.
    """

    place: Int64Array
    row_id: Int64Array
    skipped: Int64Array
    length: Int64Array

    def of(self, which: Any) -> _Pieces:
        return _Pieces(*(array[which] for array in self))

    def then(self, other: _Pieces) -> _Pieces:
        return _Pieces(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


class _Marks(NamedTuple):
    """Where every 16th sequence of an epoch begins.

    Attributes:
        place: of its first document; the last entry is the last document of the epoch.
        skipped: tokens of that document before it.
        num_sequences, num_tokens: of the epoch.
    """

    place: Int64Array
    skipped: Int64Array
    num_sequences: int
    num_tokens: int


@dataclass(frozen=True)
class PackingView:
    """Slot s has the documents of sequence s of the epoch.

    With ``cut``, sequence s has tokens ``[s * L, (s + 1) * L)`` of the stream; only the last one of
    an epoch may be shorter. Without, a sequence takes documents in order while they fit (next-fit).
    A document of more than L tokens is cut into pieces of L and a rest, which count as documents;
    or ``long`` says otherwise. Documents without tokens are in no sequence.

    Its memory is that of ``lengths``, and 1 byte for each sequence of the last two epochs.

    Args:
        inner: its slots are the documents; each must have one row.
        lengths: tokens of each row of the version, shape ``(num_rows,)``.
        sequence_length: tokens L of a sequence, at least 1.
        cut: whether documents are cut.
        shuffle: of the documents.
        column: name of the list column, for the identity.
        long: whether documents of more than L tokens are split, dropped, or truncated to L tokens,
            where documents are not cut.
        ends: a token more follows each document that has tokens.

    Thread-safety: immutable, but for a cache. Threads may make the same marks twice.
    """

    inner: SlotView
    lengths: Numbers
    sequence_length: int
    cut: bool
    shuffle: Shuffle
    column: str = ""
    long: LongDocuments = "split"
    ends: bool = False
    orders_rows: bool = field(init=False, default=True)
    _marks: dict[int, _Marks] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_marks": {}}

    @property
    def identity(self) -> str:
        """The inner view, the column, the length of a sequence, and how documents are cut."""
        how = "cut" if self.cut else "whole"
        how += "" if self.long == "split" else f",{self.long}"
        how += ",ends" if self.ends else ""
        return f"{self.inner.identity}pack({self.column!r},{self.sequence_length},{how})"

    @property
    def epochs(self) -> Epochs:
        """Only the same documents have the same number of tokens, and fill as many sequences."""
        is_shuffled = self.shuffle.shuffle or self.inner.orders_rows
        has_same = self.inner.epochs == "same rows" and (self.cut or not is_shuffled)
        return "same size" if has_same else "any size"

    @property
    def num_bytes(self) -> int:
        """Bytes of the lengths, of the marks that are kept, and of the inner view."""
        marks = sum(each.place.nbytes + each.skipped.nbytes for each in self._marks.values())
        return self.inner.num_bytes + self.lengths.values.nbytes + marks

    @property
    def rows_per_slot(self) -> float:
        """About how many documents a sequence has, with those that it shares with the next."""
        mean = float(self.lengths.values.mean()) if len(self.lengths) else 1.0
        return 1 + self.sequence_length / max(1.0, mean)

    def num_slots(self, epoch: int) -> int:
        """Sequences of an epoch. The first call for an epoch takes a pass over all lengths."""
        return self._marks_of(epoch).num_sequences

    def num_tokens(self, epoch: int) -> int:
        """Tokens of an epoch, without padding."""
        return self._marks_of(epoch).num_tokens

    def num_padding(self, epoch: int) -> int:
        """Places in the sequences of an epoch that have no token."""
        marks = self._marks_of(epoch)
        return marks.num_sequences * self.sequence_length - marks.num_tokens

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The documents of each sequence, and how many tokens of the first one precede it."""
        marks = self._marks_of(epoch)
        runs, run_of_slot = np.unique(slots // _APART, return_inverse=True)
        # A run of 16 sequences may end in the document in which the next one begins.
        num_places = marks.place[runs + 1] + 1 - marks.place[runs]
        pieces, pieces_of = self._pieces(joined_ranges(marks.place[runs], num_places), epoch)
        run_begins = np.cumsum(num_places) - num_places
        first = (np.cumsum(pieces_of) - pieces_of)[run_begins] if len(runs) else runs
        in_run = slots % _APART
        if self.cut:
            ends = np.cumsum(pieces.length)
            begins = ends - pieces.length
            start = (begins[first] + marks.skipped[runs])[run_of_slot]
            start += in_run * self.sequence_length
            left = marks.num_tokens - slots * self.sequence_length
            stop = start + np.minimum(left, self.sequence_length)
            firsts = np.searchsorted(ends, start, side="right")
            lengths = np.searchsorted(ends, stop - 1, side="right") + 1 - firsts
            skipped = start - begins[firsts]
        else:
            following = self._following(pieces)
            at = first + marks.skipped[runs] // self.sequence_length
            chain = [at]
            for _ in range(_APART):
                at = following[np.minimum(at, len(following) - 1)]
                chain.append(at)
            begins_of = np.stack(chain)
            firsts = begins_of[in_run, run_of_slot]
            lengths = begins_of[in_run + 1, run_of_slot] - firsts
            skipped = pieces.skipped[firsts]
        return Samples(pieces.row_id[joined_ranges(firsts, lengths)], lengths, skipped)

    def _pieces(self, places: Int64Array, epoch: int) -> tuple[_Pieces, Int64Array]:
        """The pieces of the documents at these places, and how many each has."""
        slots = self.shuffle.order(self.inner, epoch).row_ids(places)
        row_ids = self.inner.samples(slots, epoch).row_ids
        lengths = self._lengths_of(row_ids)
        if self.cut:
            counts = (lengths > 0).astype(np.int64)
            pieces = _Pieces(places, row_ids, np.zeros_like(lengths), lengths).of(lengths > 0)
            return pieces, counts
        counts = -(-lengths // self.sequence_length)
        which = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(which)) - (np.cumsum(counts) - counts)[which]
        skipped = number * self.sequence_length
        length = np.minimum(lengths[which] - skipped, self.sequence_length)
        return _Pieces(places[which], row_ids[which], skipped, length), counts

    def _lengths_of(self, row_ids: Int64Array) -> Int64Array:
        """The tokens that each document gives to the sequences."""
        lengths: Int64Array = self.lengths.values[row_ids].astype(np.int64)
        if self.ends:
            lengths += lengths > 0
        if self.long == "drop":
            lengths[lengths > self.sequence_length] = 0
        elif self.long == "truncate":
            np.minimum(lengths, self.sequence_length, out=lengths)
        return lengths

    def _following(self, pieces: _Pieces) -> Int64Array:
        """For each piece: the first one that does not fit into a sequence that begins with it."""
        ends = np.cumsum(pieces.length)
        return np.searchsorted(ends, ends - pieces.length + self.sequence_length, side="right")

    def _marks_of(self, epoch: int) -> _Marks:
        marks = self._marks.get(epoch)
        if marks is None:
            marks = self._cut_marks(epoch) if self.cut else self._whole_marks(epoch)
            self._marks[epoch] = marks
            for old in list(self._marks)[:-_EPOCHS_KEPT]:
                self._marks.pop(old, None)
        return marks

    def _epoch(self, epoch: int) -> Iterator[_Pieces]:
        """The pieces of an epoch, some documents at a time."""
        num_documents = self.inner.num_slots(epoch)
        for start in range(0, num_documents, _DOCUMENTS_A_TIME):
            stop = min(start + _DOCUMENTS_A_TIME, num_documents)
            yield self._pieces(np.arange(start, stop), epoch)[0]

    def _cut_marks(self, epoch: int) -> _Marks:
        found: list[tuple[Int64Array, Int64Array]] = []
        apart, num_tokens, last = _APART * self.sequence_length, 0, 0
        for pieces in self._epoch(epoch):
            ends = num_tokens + np.cumsum(pieces.length)
            if not len(ends):
                continue
            due = np.arange(-(-num_tokens // apart) * apart, ends[-1], apart)
            at = np.searchsorted(ends, due, side="right")
            found.append((pieces.place[at], due - (ends - pieces.length)[at]))
            num_tokens, last = int(ends[-1]), int(pieces.place[-1])
        return _marks(found, last, -(-num_tokens // self.sequence_length), num_tokens)

    def _whole_marks(self, epoch: int) -> _Marks:
        found: list[tuple[Int64Array, Int64Array]] = []
        num_sequences, num_tokens, last = 0, 0, 0
        rest: _Pieces | None = None  # those of the sequence that is not yet full
        for new in self._epoch(epoch):
            num_tokens += int(new.length.sum())
            pieces = new if rest is None else rest.then(new)
            following, begins, at = self._following(pieces).tolist(), [], 0
            while at < len(following) and following[at] < len(following):
                begins.append(at)
                at = following[at]
            marked = np.array(begins[-num_sequences % _APART :: _APART], np.int64)
            found.append((pieces.place[marked], pieces.skipped[marked]))
            num_sequences += len(begins)
            rest = pieces.of(slice(at, None))
        if rest is not None and len(rest.place):
            if num_sequences % _APART == 0:
                found.append((rest.place[:1], rest.skipped[:1]))
            num_sequences, last = num_sequences + 1, int(rest.place[-1])
        return _marks(found, last, num_sequences, num_tokens)


def _marks(
    found: list[tuple[Int64Array, Int64Array]], last: int, num_sequences: int, num_tokens: int
) -> _Marks:
    places = np.concatenate([*(place for place, _ in found), np.array([last])])
    skipped = np.concatenate([*(skip for _, skip in found), np.zeros(1, np.int64)])
    return _Marks(places.astype(np.int64), skipped, num_sequences, num_tokens)
