"""The arguments of `CacheIterableDataset` that choose a view, and the view that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from cache_client.rows import Rows
from cache_client.views.columns import VersionNodes
from cache_client.views.view import PlainView, Samples, View

Assemble = Callable[[Rows, Samples], Any]
"""Makes the batch of one step from its rows; the samples have no row ids."""


class ViewOptions(TypedDict, total=False):
    """What a job reads of a dataset, other than each row once."""


@dataclass(frozen=True)
class JobView:
    """The view of a job.

    Attributes:
        view: slots -> rows.
        assembler: converter of plain rows -> what makes batches; None: the converter itself.
    """

    view: View
    assembler: Callable[[Callable[[Rows], Any]], Assemble] | None = None


def make_view(options: ViewOptions, version: VersionNodes) -> JobView:
    """The view that the options ask for.

    Args:
        version: to read; nodes compute what a view needs of the values of rows.

    Raises:
        ConfigError: quotes every bad option.
    """
    return JobView(PlainView(version.shards.num_rows))
