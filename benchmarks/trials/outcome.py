"""What became of generated queries."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """How many queries ended how, and the disagreements.

    Attributes:
        prints: show each disagreement at once.
    """

    counts: Counter[str] = field(default_factory=Counter)
    disagreements: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    prints: bool = False

    def disagree(self, what: str) -> None:
        """Counts and keeps a disagreement."""
        self.counts["disagree"] += 1
        self.disagreements.append(what)
        if self.prints:
            print(what, flush=True)

    def refuse(self, who: str, reason: str) -> None:
        """Counts a query that an engine refused."""
        self.counts[f"refused by {who}"] += 1
        self.errors[reason[:110]] += 1
