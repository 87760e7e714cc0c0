"""Batches of packed sequences: ``[B, L]`` tokens, and what a model needs to keep documents apart.

Tokens go from Arrow's list values into the batch in one copy. Everything else is computed from the
offsets of the documents, in a few numpy calls a batch. Knows neither nodes nor the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

from cache_client.arguments import BatchFormat
from cache_client.permutation import Int64Array
from cache_client.rows import Rows
from cache_client.views.list_values import joined_lists
from cache_client.views.view import Samples, joined_ranges
from cache_protocol.errors import RequestError

PackOutput = Literal["position_ids", "document_ids", "cu_seqlens", "labels"]
PACK_OUTPUTS: tuple[PackOutput, ...] = get_args(PackOutput)

IGNORED_LABEL: Final = -100
"""The label that `torch.nn.functional.cross_entropy` and transformers leave out of a loss."""


class Segments(NamedTuple):
    """The documents of a batch, as runs of the ``B * L`` places; padding makes runs, too.

    Attributes:
        starts: of each run, ascending from 0; int64, shape ``(runs,)``.
        lengths: of each run, at least 1; their sum is ``B * L``.
        numbers: of each run in its sequence, from 0; -1 for padding.
    """

    starts: Int64Array
    lengths: Int64Array
    numbers: Int64Array


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
        size = count * length
        if self.lengths.sum() == size and (self.starts[1:] - self.starts[:-1] == length).all():
            run = tokens[self.starts[0] :][:size]
            return run.reshape(count, length).astype(np.int64)
        taken = np.empty((count, length), np.int64)
        for row, start, size in zip(
            taken, self.starts.tolist(), self.lengths.tolist(), strict=True
        ):
            row[:size] = tokens[start : start + size]
            row[size:] = padding
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
    """

    column: str
    sequence_length: int
    pad_token: int
    outputs: tuple[PackOutput, ...]
    batch_format: BatchFormat
    label_mask: str | None = None
    label_column: str | None = None

    def __call__(self, rows: Rows, samples: Samples) -> dict[str, Any]:
        """The batch of one step.

        Raises:
            RequestError: a list has a null, or a list of labels has another length than its tokens.
        """
        tokens, offsets = joined_lists(rows, self.column)
        sequences = Sequences.of(offsets, samples, self.sequence_length)
        taken = sequences.take(tokens, self.pad_token)
        batch: dict[str, Any] = {self.column: taken}
        segments = sequences.segments() if self.outputs else None
        for output in self.outputs:
            assert segments is not None
            if output == "labels":
                batch[output] = self._labels(rows, sequences, segments, taken)
            elif output == "cu_seqlens":
                batch[output] = np.append(segments.starts, taken.size).astype(np.int32)
                batch["max_seqlen"] = int(segments.lengths.max(initial=0))
            elif output == "document_ids":
                numbers = segments.numbers.astype(np.int32)
                batch[output] = numbers.repeat(segments.lengths).reshape(taken.shape)
            else:
                positions = np.arange(taken.size)
                positions -= segments.starts.repeat(segments.lengths)
                batch[output] = positions.reshape(taken.shape)
        if self.batch_format == "torch":
            return {
                name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in batch.items()
            }
        return batch

    def _labels(
        self, rows: Rows, sequences: Sequences, segments: Segments, taken: Int64Array
    ) -> Int64Array:
        labels = taken
        beside = self.label_column or self.label_mask
        if beside is not None:
            values, own = joined_lists(rows, beside)
            offsets = sequences.offsets
            if not np.array_equal(own, offsets):
                row = int(np.flatnonzero(np.diff(own) != np.diff(offsets))[0])
                raise RequestError(
                    f"column {beside!r} has {own[row + 1] - own[row]} values beside "
                    f"{offsets[row + 1] - offsets[row]} tokens of {self.column!r} in a row: each "
                    "token needs one"
                )
            labels = sequences.take(values, 0)
        if self.label_column is None:
            labels = taken.copy() if beside is None else np.where(labels, taken, IGNORED_LABEL)
        # A model predicts the first token of a document from the document before it.
        labels.reshape(-1)[segments.starts] = IGNORED_LABEL
        for row, length in zip(labels, sequences.lengths.tolist(), strict=True):
            if length < len(row):
                row[length:] = IGNORED_LABEL
        return labels
