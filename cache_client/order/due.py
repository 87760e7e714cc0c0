"""What an epoch owes: how often each row comes, and the words for it. Pure.

A view maps slots to rows, and an epoch gives each slot once. `Due` says what this means for rows.
Audit records carry it, so that a verdict needs neither the view nor the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from cache_client.order.permutation import MAX_ROWS, checked_integer

UNITS: Final = ("row", "draw", "sample", "group", "window", "sequence")
MOST_SHARES: Final = 16
"""Sources of a mixture that are named; of more, only the sum is."""
_MOST_NAME: Final = 64


@dataclass(frozen=True, kw_only=True)
class Due:
    """What the slots of an epoch are, in rows. Immutable.

    Attributes:
        unit: what a slot gives: one row for ``row``, ``draw`` and ``sample``; of a ``sequence``,
            parts of rows.
        rows: different rows that an epoch may have; None: one for each slot.
        of: rows of the version, of a mixture those of all sources; None: as many as ``rows``.
        least, most: how many slots of an epoch have each of these rows; None: any number.
        shares: the sources of a mixture, if they are not too many.
    """

    unit: str = "row"
    rows: int | None = None
    of: int | None = None
    least: int = 1
    most: int | None = 1
    shares: tuple[Share, ...] = ()

    def times(self, least: int, most: int | None, unit: str | None = None) -> Due:
        """What is due where each slot of this comes so many times."""
        return replace(
            self,
            unit=self.unit if unit is None else unit,
            least=self.least * least,
            most=None if most is None or self.most is None else self.most * most,
        )

    @property
    def is_distinct(self) -> bool:
        """Whether each slot has one row, and no other slot has it."""
        return self.most == 1 and self.unit in ("row", "draw", "sample") and not self.shares

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; without what is as in the plain read."""
        plain = Due()
        names = ("unit", "rows", "of", "least", "most")
        found = {name: getattr(self, name) for name in names}
        found = {name: value for name, value in found.items() if value != getattr(plain, name)}
        if self.shares:
            found["shares"] = [[each.name, each.slots, each.due.to_dict()] for each in self.shares]
        return found

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Due:
        """Reads what `to_dict` wrote.

        Raises:
            ValueError, TypeError, KeyError: it is nothing of that kind.
        """
        known = {name: value for name, value in mapping.items() if name != "shares"}
        shares = tuple(
            Share(str(name), checked_integer("slots", slots, 0, MAX_ROWS), cls.from_dict(due))
            for name, slots, due in mapping.get("shares", ())
        )
        found = cls(**known, shares=shares)
        if found.unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {found.unit!r}")
        for name in ("rows", "of", "least", "most"):
            if (number := getattr(found, name)) is not None:
                checked_integer(name, number, 0)
        return found


@dataclass(frozen=True)
class Share:
    """What an epoch of a mixture has of one source.

    Attributes:
        name: of the source.
        slots: of the epoch, that are of this source.
        due: by these slots.
    """

    name: str
    slots: int
    due: Due


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What records show of an epoch, in slots.

    Attributes:
        slots: of the epoch.
        given: that came once; all of them are different.
        again: that came once more, because the last step has fewer rows than places.
        dropped: left out by ``drop_last``.
        skipped: left out by ``skip_steps``.
    """

    slots: int
    given: int
    again: int = 0
    dropped: int = 0
    skipped: int = 0

    @property
    def missing(self) -> int:
        """Slots that are due and not shown."""
        return self.slots - self.given - self.dropped - self.skipped

    def stated(self, due: Due) -> str:
        """The sentence of a verdict, by what the epoch owes."""
        parts = [self._given(due)]
        counts = {
            "left out by drop_last": self.dropped,
            "left out by skip_steps": self.skipped,
            "not shown yet": self.missing,
            "given again to fill the last step": self.again,
        }
        parts += [f"{count:,} {what}" for what, count in counts.items() if count]
        return "; ".join(parts + self._rows(due))

    def _given(self, due: Due) -> str:
        unit, whole = due.unit, self.slots
        if due.is_distinct:
            unit, whole = "row", self.slots if due.of is None else due.of
        of = f" of {whole:,}" if whole != self.given else ""
        if not self.given:
            return f"none of {_counted(whole, unit)} was given"
        return f"each of {self.given:,} {unit}s{of} once"

    def _rows(self, due: Due) -> list[str]:
        """What was shown of rows, beside the slots."""
        rows, of = due.rows, due.of
        if due.is_distinct:
            not_due = 0 if of is None else of - self.slots
            return [f"{not_due:,} not due in this epoch"] if not_due else []
        if not self.given:
            return []
        is_whole = self.given == self.slots
        if due.shares:
            return [
                (f"{share.slots:,} of {share.name[:_MOST_NAME]!r}: " if is_whole
                 else f"of {share.name[:_MOST_NAME]!r} ")
                + _how_often(share.due, is_whole=is_whole)
                for share in due.shares
                if share.slots
            ]  # fmt: skip
        return [] if rows is None else [_how_often(due, is_whole=is_whole)]


def _how_often(due: Due, *, is_whole: bool) -> str:
    """How often each row came, without the slots that were given again."""
    rows = due.rows or 0
    of = f" of {due.of:,}" if due.of not in (None, rows) else ""
    what = "the tokens of each" if due.unit == "sequence" else "each"
    least = due.least if is_whole else 0
    return f"{what} of {_counted(rows, 'row')}{of} {_times(least, due.most)}"


def _times(least: int, most: int | None) -> str:
    if most is None:
        return f"at least {_count(least)}" if least else "any number of times"
    if least == most:
        return _count(least)
    return f"{least:,} to {most:,} times" if least else f"at most {_count(most)}"


def _count(times: int) -> str:
    return "once" if times == 1 else f"{times:,} times"


def _counted(count: int, unit: str) -> str:
    return f"{count:,} {unit}{'' if count == 1 else 's'}"
