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


class Places(NamedTuple):
    """Where the tokens of a batch come from.

    Attributes:
        starts: of each sequence, among the joined tokens of all rows; int64, shape ``(B,)``.
        lengths: tokens of each sequence, at most L.
        segments: of the batch.
    """

    starts: Int64Array
    lengths: Int64Array
    segments: Segments

    def take(self, tokens: npt.NDArray[Any], sequence_length: int, padding: int) -> Int64Array:
        """Tokens of all rows -> those of each sequence; int64, shape ``[B, L]``."""
        count = len(self.starts)
        whole = int(self.lengths.sum()) == count * sequence_length
        if whole and (np.diff(self.starts) == sequence_length).all():
            start = int(self.starts[0]) if count else 0
            run = tokens[start : start + count * sequence_length]
            return run.reshape(count, sequence_length).astype(np.int64)
        taken = np.empty((count, sequence_length), np.int64)
        for row, start, length in zip(
            taken, self.starts.tolist(), self.lengths.tolist(), strict=True
        ):
            row[:length] = tokens[start : start + length]
            row[length:] = padding
        return taken


def places(offsets: Int64Array, samples: Samples, sequence_length: int) -> Places:
    """The places of a batch.

    Args:
        offsets: of the rows among their joined tokens, shape ``(rows + 1,)``.
        samples: of the sequences of the batch.
        sequence_length: tokens L of a sequence.
    """
    assert samples.lengths is not None and samples.skipped is not None
    firsts, count = samples.firsts, len(samples.lengths)
    starts = offsets[firsts] + samples.skipped
    stops = np.minimum(offsets[firsts + samples.lengths], starts + sequence_length)
    # One run for each row of a sequence, and one for its padding.
    row = joined_ranges(firsts, samples.lengths + 1)
    slot = np.repeat(np.arange(count), samples.lengths + 1)
    is_padding = np.zeros(len(row), np.bool_)
    is_padding[np.cumsum(samples.lengths + 1) - 1] = True
    begin = np.maximum(offsets[row], starts[slot])
    begin[is_padding] = stops[slot[is_padding]]
    end = np.minimum(offsets[np.minimum(row + 1, len(offsets) - 1)], stops[slot])
    end[is_padding] = starts[slot[is_padding]] + sequence_length
    lengths = end - begin
    kept = lengths > 0
    numbers = row - firsts[slot]
    numbers[is_padding] = -1
    runs = lengths[kept]
    return Places(starts, stops - starts, Segments(np.cumsum(runs) - runs, runs, numbers[kept]))


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
        length = self.sequence_length
        tokens, offsets = joined_lists(rows, self.column)
        found = places(offsets, samples, length)
        taken = found.take(tokens, length, self.pad_token)
        batch: dict[str, Any] = {self.column: taken}
        for output in self.outputs:
            batch |= self._make(output, rows, offsets, found, taken)
        if self.batch_format == "torch":
            return {
                name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in batch.items()
            }
        return batch

    def _make(
        self, output: PackOutput, rows: Rows, offsets: Int64Array, found: Places, taken: Int64Array
    ) -> dict[str, Any]:
        segments = found.segments
        if output == "cu_seqlens":
            ends = np.append(segments.starts, taken.size).astype(np.int32)
            return {output: ends, "max_seqlen": int(segments.lengths.max(initial=0))}
        if output == "labels":
            return {output: self._labels(rows, offsets, found, taken)}
        if output == "document_ids":
            return {
                output: np.repeat(segments.numbers.astype(np.int32), segments.lengths).reshape(
                    taken.shape
                )
            }
        positions = np.arange(taken.size)
        positions -= np.repeat(segments.starts, segments.lengths)
        return {output: positions.reshape(taken.shape)}

    def _labels(
        self, rows: Rows, offsets: Int64Array, found: Places, taken: Int64Array
    ) -> Int64Array:
        labels = taken.copy()
        beside = self.label_column or self.label_mask
        if beside is not None:
            values, own = joined_lists(rows, beside)
            if not np.array_equal(own, offsets):
                row = int(np.flatnonzero(np.diff(own) != np.diff(offsets))[0])
                raise RequestError(
                    f"column {beside!r} has {own[row + 1] - own[row]} values beside "
                    f"{offsets[row + 1] - offsets[row]} tokens of {self.column!r} in a row: each "
                    "token needs one"
                )
            values = found.take(values, self.sequence_length, 0)
            if self.label_column is not None:
                labels = values
            else:
                labels[values == 0] = IGNORED_LABEL
        flat = labels.reshape(-1)
        segments = found.segments
        # A model predicts the first token of a document from the document before it.
        flat[segments.starts] = IGNORED_LABEL
        for start, length in zip(
            *(each[segments.numbers < 0].tolist() for each in segments[:2]), strict=True
        ):
            flat[start : start + length] = IGNORED_LABEL
        return labels
