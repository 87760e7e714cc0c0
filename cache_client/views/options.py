"""The arguments of `CacheIterableDataset` that choose a view, and the view that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cache_client.arguments import BatchFormat
from cache_client.rows import Rows
from cache_client.views.columns import VersionNodes, row_values
from cache_client.views.selection import SelectionOptions, make_selection, selection_problems
from cache_client.views.sequences import (
    SequenceOptions,
    make_sequences,
    sequence_columns,
    sequence_problems,
    sequences_at_once,
)
from cache_client.views.view import NO_SHUFFLE, Samples, Shuffle, View

Assemble = Callable[[Rows, Samples, Sequence[int]], Iterable[Any]]
"""Makes the batches of some steps from their rows, samples without row ids, and slots a step."""


class ViewOptions(SelectionOptions, SequenceOptions, total=False):
    """What a job reads of a dataset, other than each row once.

    See `SelectionOptions` and `SequenceOptions`; sequences are made of the rows of a selection.
    """


@dataclass(frozen=True)
class JobView:
    """The view of a job.

    Attributes:
        view: slots -> rows.
        assembler: converter of plain rows -> what makes batches; None: the converter itself.
        slots_at_once: about how many slots it takes at once; at least one step.
    """

    view: View
    assembler: Callable[[Callable[[Rows], Any]], Assemble] | None = None
    slots_at_once: int = 1


def view_problems(
    options: Mapping[str, Any], *, batch_format: object = "torch", stacks: bool = False
) -> list[str]:
    """The problems of the options that need no node; each is quoted.

    Args:
        options: as the caller gave them.
        batch_format: of the job.
        stacks: whether the job has a ``stack``.
    """
    problems = [
        f"there is no argument {name}"
        for name in options
        if name not in ViewOptions.__annotations__
    ]
    problems += selection_problems(options)
    return problems + sequence_problems(options, batch_format=batch_format, stacks=stacks)


def read_columns(options: Mapping[str, Any], columns: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that a job reads, of those that it asks for; empty: all.

    Raises:
        ConfigError: the view has other columns than those asked for.
    """
    return sequence_columns(options, columns)


def make_view(
    options: ViewOptions,
    version: VersionNodes,
    shuffle: Shuffle = NO_SHUFFLE,
    batch_format: BatchFormat = "torch",
) -> JobView:
    """The view that the options ask for.

    Args:
        options: without problems.
        version: to read; nodes compute what a view needs of the values of rows.
        shuffle: of the job.
        batch_format: of the job.

    Raises:
        ConfigError: quotes every bad option.
    """
    view, assembler = make_sequences(
        options,
        make_selection(options, version),
        version.shards.layout,
        shuffle=shuffle,
        batch_format=batch_format,
        values=partial(row_values, version),
    )
    return JobView(view, assembler, sequences_at_once(options))
