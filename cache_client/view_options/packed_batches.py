"""Batches of packed sequences: ``[B, L]`` tokens, and what a model needs to keep documents apart.

Tokens go from Arrow's list values into the batch in one copy. Everything else is computed from the
offsets of the documents, in a few numpy calls a batch. Knows neither nodes nor the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cache_client.job.arguments import BatchFormat
from cache_client.order.permutation import Int64Array
from cache_client.reading.rows import Rows
from cache_client.view_options.list_values import joined_lists
from cache_client.views.packing import PackOutput
from cache_client.views.view import Samples, joined_ranges
from cache_protocol.errors import RequestError
from cache_protocol.storage.layout import pool_matrix

IGNORED_LABEL: Final = -100
"""The label that `torch.nn.functional.cross_entropy` and transformers leave out of a loss."""


class Segments(NamedTuple):
    """The documents of some steps, as runs of the ``B * L`` places; padding makes runs, too.

    Attributes:
        starts: of each run, ascending from 0; int64, shape ``(runs,)``.
        lengths: of each run, at least 1; their sum is ``B * L``.
        numbers: of each run in its sequence, from 0; -1 for padding.
    """

    starts: Int64Array
    lengths: Int64Array
    numbers: Int64Array

    def positions(self) -> Int64Array:
        """For each place, how many places of its run are before it."""
        found = _uninitialised(int(self.lengths.sum()))
        found[:] = 1
        found[self.starts[1:]] = 1 - self.lengths[:-1]
        found[:1] = 0
        return np.cumsum(found, out=found)

    def seq_idx(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """The document of each of the places ``[start, stop)`` of one step, -1 for padding."""
        first, last = np.searchsorted(self.starts, (start, stop)).tolist()
        has_tokens = self.numbers[first:last] >= 0
        numbers = np.where(has_tokens, has_tokens.cumsum() - 1, -1).astype(np.int32)
        return numbers.repeat(self.lengths[first:last])

    def of_step(self, start: int, stop: int) -> dict[str, Any]:
        """``cu_seqlens`` and ``max_seqlen`` of the places ``[start, stop)`` of one step."""
        first, last = np.searchsorted(self.starts, (start, stop)).tolist()
        ends = np.append(self.starts[first:last], stop) - start
        longest = int(self.lengths[first:last].max(initial=0))
        return {"cu_seqlens": ends.astype(np.int32), "max_seqlen": longest}


class Sequences(NamedTuple):
    """Where the tokens of a batch come from.

    Attributes:
        offsets: of the rows among their joined tokens; int64, shape ``(rows + 1,)``.
        firsts: first row of each sequence; int64, shape ``(B,)``.
        num_rows: of each sequence.
        starts: of each sequence among the joined tokens.
        lengths: tokens of each sequence, at most L.
        sequence_length: L.
    """

    offsets: Int64Array
    firsts: Int64Array
    num_rows: Int64Array
    starts: Int64Array
    lengths: Int64Array
    sequence_length: int

    @classmethod
    def of(cls, offsets: Int64Array, samples: Samples, sequence_length: int) -> Sequences:
        """Those of a batch, whose samples have their skipped values."""
        assert samples.lengths is not None and samples.skipped is not None
        firsts = samples.firsts
        starts = offsets[firsts] + samples.skipped
        lengths = np.minimum(offsets[firsts + samples.lengths] - starts, sequence_length)
        return cls(offsets, firsts, samples.lengths, starts, lengths, sequence_length)

    def take(self, tokens: npt.NDArray[Any], padding: int) -> Int64Array:
        """Tokens of all rows -> those of each sequence; int64, shape ``[B, L]``."""
        count, length = len(self.starts), self.sequence_length
        taken = _uninitialised(count * length).reshape(count, length)
        flat = taken.reshape(-1)
        # Sequences that lie one after the other are copied at once.
        follows = self.starts[1:] == self.starts[:-1] + self.lengths[:-1]
        follows &= self.lengths[:-1] == length
        begins = [0, *((~follows).nonzero()[0] + 1).tolist()] if count else []
        for begin, end in zip(begins, [*begins[1:], count], strict=True):
            start, stop = int(self.starts[begin]), int(self.starts[end - 1] + self.lengths[end - 1])
            at = begin * length
            flat[at : at + stop - start] = tokens[start:stop]
            flat[at + stop - start : end * length] = padding
        return taken

    def segments(self) -> Segments:
        """The documents of the batch."""
        # One run for each row of a sequence, and one for its padding.
        runs = self.num_rows + 1
        row = joined_ranges(self.firsts, runs)
        slot = np.arange(len(runs)).repeat(runs)
        paddings = runs.cumsum() - 1
        starts = self.starts[slot]
        ends = self.offsets[np.minimum(row + 1, len(self.offsets) - 1)]
        begins, ends = (
            np.maximum(self.offsets[row], starts),
            np.minimum(ends, starts + self.lengths[slot]),
        )
        begins[paddings] = self.starts + self.lengths
        ends[paddings] = self.starts + self.sequence_length
        numbers = row - self.firsts[slot]
        numbers[paddings] = -1
        lengths = ends - begins
        kept = lengths > 0
        lengths = lengths[kept]
        return Segments(lengths.cumsum() - lengths, lengths, numbers[kept])


@dataclass(frozen=True)
class PackedAssembler:
    """Makes the batches of a `PackingView`. Immutable, any thread.

    Args:
        column: the list column of tokens.
        sequence_length: tokens L of a sequence.
        pad_token: in places without a token.
        outputs: what a batch has beside the tokens.
        batch_format: ``torch`` or ``numpy``.
        label_mask: list column of 0 and 1, beside the tokens: which of them are labels.
        label_column: list column of labels, beside the tokens; default: the tokens.
        end_token: follows each document that has tokens, as its last one; None: nothing does.
    """

    column: str
    sequence_length: int
    pad_token: int
    outputs: tuple[PackOutput, ...]
    batch_format: BatchFormat
    label_mask: str | None = None
    label_column: str | None = None
    end_token: int | None = None

    @property
    def added(self) -> tuple[str, ...]:
        """The names of what a batch has beside the tokens."""
        longest = ("max_seqlen",) if "cu_seqlens" in self.outputs else ()
        return *dict.fromkeys(self.outputs), *longest

    def __call__(
        self, rows: Rows, samples: Samples, sizes: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """The batches of some steps; they share memory.

        Raises:
            RequestError: a list has a null, or a list of labels has another length than its tokens.
        """
        tokens, stored = joined_lists(rows, self.column)
        offsets = stored
        if self.end_token is not None:
            tokens, offsets = _with_ends(tokens, stored, self.end_token)
        sequences = Sequences.of(offsets, samples, self.sequence_length)
        taken = sequences.take(tokens, self.pad_token)
        made: dict[str, npt.NDArray[Any]] = {self.column: taken}
        segments = sequences.segments() if self.outputs else None
        for output in self.outputs:
            assert segments is not None
            if output == "labels":
                made[output] = self._labels(rows, sequences, segments, taken, stored)
            elif output == "document_ids":
                numbers = segments.numbers.astype(np.int32)
                made[output] = numbers.repeat(segments.lengths).reshape(taken.shape)
            elif output == "position_ids":
                made[output] = segments.positions().reshape(taken.shape)
        stop = 0
        for size in sizes:
            start, stop = stop, stop + size
            batch: dict[str, Any] = {name: each[start:stop] for name, each in made.items()}
            places = start * taken.shape[1], stop * taken.shape[1]
            if segments is not None and "seq_idx" in self.outputs:
                batch["seq_idx"] = segments.seq_idx(*places).reshape(size, -1)
            if segments is not None and "cu_seqlens" in self.outputs:
                batch |= segments.of_step(*places)
            if self.batch_format == "torch":
                for name, value in batch.items():
                    if isinstance(value, np.ndarray):
                        batch[name] = torch.from_numpy(value)
            yield batch

    def _labels(
        self,
        rows: Rows,
        sequences: Sequences,
        segments: Segments,
        taken: Int64Array,
        stored: Int64Array,
    ) -> Int64Array:
        beside = self.label_column or self.label_mask
        if beside:
            labels = self._beside(rows, beside, sequences, stored)
        else:
            labels = _uninitialised(taken.size)
        labels = labels.reshape(taken.shape)
        if self.label_column is None:
            left_out = labels == 0 if beside else None
            np.copyto(labels, taken)
            if left_out is not None:
                labels[left_out] = IGNORED_LABEL
        # A model predicts the first token of a document from the document before it.
        labels.reshape(-1)[segments.starts] = IGNORED_LABEL
        for row, length in zip(labels, sequences.lengths.tolist(), strict=True):
            if length < len(row):
                row[length:] = IGNORED_LABEL
        return labels

    def _beside(
        self, rows: Rows, column: str, sequences: Sequences, offsets: Int64Array
    ) -> Int64Array:
        """The values of a column of lists that has one for each token.

        Args:
            offsets: of the tokens that are stored.
        """
        values, own = joined_lists(rows, column)
        if not np.array_equal(own, offsets):
            row = int(np.flatnonzero(np.diff(own) != np.diff(offsets))[0])
            raise RequestError(
                f"column {column!r} has {own[row + 1] - own[row]} values beside "
                f"{offsets[row + 1] - offsets[row]} tokens of {self.column!r} in a row: each "
                "token needs one"
            )
        if self.end_token is not None:
            # An end is learnt where the token before it is.
            last = values[own[1:][np.diff(own) > 0] - 1]
            if self.label_column is not None:
                last = np.where(last == IGNORED_LABEL, IGNORED_LABEL, self.end_token)
            values, _ = _with_ends(values, own, last)
        return sequences.take(values, 0)


def _with_ends(
    values: npt.NDArray[Any], offsets: Int64Array, ends: Any
) -> tuple[npt.NDArray[Any], Int64Array]:
    """The values of lists with one more at the end of each list that has any; and their offsets."""
    has_any = np.diff(offsets) > 0
    before = np.append(0, np.cumsum(has_any))
    longer = np.empty(len(values) + int(before[-1]), np.int64)
    longer[np.arange(len(values)) + before[:-1].repeat(np.diff(offsets))] = values
    moved = offsets + before
    longer[moved[1:][has_any] - 1] = ends
    return longer, moved


def _uninitialised(count: int) -> Int64Array:
    """Memory without page faults, see `pool_matrix`."""
    found: Int64Array = pool_matrix(1, count, np.dtype(np.int64))[0].view(np.int64)
    return found
