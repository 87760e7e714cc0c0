"""The arguments of `CacheIterableDataset` that choose a view, and the view that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cache_client.rows import Rows
from cache_client.views.columns import VersionNodes
from cache_client.views.selection import SelectionOptions, make_selection, selection_problems
from cache_client.views.view import Samples, View

Assemble = Callable[[Rows, Samples], Any]
"""Makes the batch of one step from its rows; the samples have no row ids."""


class ViewOptions(SelectionOptions, total=False):
    """What a job reads of a dataset, other than each row once; see `SelectionOptions`."""


@dataclass(frozen=True)
class JobView:
    """The view of a job.

    Attributes:
        view: slots -> rows.
        assembler: converter of plain rows -> what makes batches; None: the converter itself.
    """

    view: View
    assembler: Callable[[Callable[[Rows], Any]], Assemble] | None = None


def view_problems(options: Mapping[str, Any]) -> list[str]:
    """The problems of the options that need no node; each is quoted."""
    problems = [
        f"there is no argument {name}"
        for name in options
        if name not in ViewOptions.__annotations__
    ]
    return problems + selection_problems(options)


def make_view(options: ViewOptions, version: VersionNodes) -> JobView:
    """The view that the options ask for.

    Args:
        options: without problems.
        version: to read; nodes compute what a view needs of the values of rows.

    Raises:
        ConfigError: quotes every bad option.
    """
    return JobView(make_selection(options, version))
