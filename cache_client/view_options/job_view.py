"""The view of a job, with what makes batches of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cache_client.reading.rows import Rows
from cache_client.view_options.lookups import CodesLookup, Lookups, Vocabulary
from cache_client.views.view import Samples, SlotView
from cache_protocol.errors import ConfigError

Assemble = Callable[[Rows, Samples, Sequence[int]], Iterable[Any]]
"""Makes the batches of some steps from their rows, samples without row ids, and slots a step."""


@dataclass(frozen=True)
class JobView:
    """The view of a job.

    Attributes:
        view: slots -> rows.
        assembler: converter of plain rows -> what makes batches; None: the converter itself.
        lookups: columns that are added to the rows; None: none.
        slots_at_once: about how many slots the assembler takes at once; at least one step.
        kept: the columns of the converter that batches have; None: all.
        added: other columns of batches, each with the argument that adds it.
    """

    view: SlotView
    assembler: Callable[[Callable[[Rows], Any]], Assemble] | None = None
    lookups: Lookups | None = None
    slots_at_once: int = 1
    kept: tuple[str, ...] | None = None
    added: tuple[tuple[str, str], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Memory of all tables."""
        return self.view.num_bytes + (0 if self.lookups is None else self.lookups.num_bytes)

    @property
    def identity(self) -> str:
        """What tells the batches of two jobs of one version apart; "" for the plain read."""
        return self.view.identity + ("" if self.lookups is None else self.lookups.identity)

    def column_names(self, converted: Sequence[str], **added: str | None) -> list[str]:
        """The names of the columns of a batch.

        Args:
            converted: names that the converter makes.
            added: argument -> the name of a column that it adds to each batch; None: none.

        Raises:
            ConfigError: two columns have one name; quotes it.
        """
        names = list(converted if self.kept is None else self.kept)
        for name, argument in (*self.added, *((name, key) for key, name in added.items() if name)):
            if name in names:
                raise ConfigError(
                    f"{argument} adds a column {name!r}, and batches have one: rename one of them, "
                    "or leave yours out by columns"
                )
            names.append(name)
        return names

    def vocabulary(self, column: str) -> Vocabulary:
        """The vocabulary of a column that becomes codes.

        Raises:
            ConfigError: it does not, or is hashed to buckets.
        """
        for each in () if self.lookups is None else self.lookups.lookups:
            if isinstance(each, CodesLookup) and each.column == column and each.vocabulary:
                return each.vocabulary
        raise ConfigError(f"there are no codes of {column!r} with a vocabulary: name it in codes")
