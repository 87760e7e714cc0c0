"""The disagreements of the ranks of one job, kept while they are of interest. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final, NamedTuple

from cache_server.jobs.agreement import Claim, Disagreement, Terms, find_disagreements

# A rank that was there before reports again within this time, or three times its interval.
_SETTLED_S: Final = 60.0
_RANKS_PER_S: Final = 50.0  # that report, of a large job
_COMPARED_PER_S: Final = 2000.0  # claims, so that a large job is compared seldom
_MOST_TERMS: Final = 64  # of a process, that are known
_WHAT_TO_DO: Final = (
    "Give all ranks of a job the same settings, and each its own rank; give independent runs "
    "another job name (job= or CACHE_JOB)"
)


class Told(NamedTuple):
    """What the reader of a run must know.

    Attributes:
        is_late: the run contradicts an earlier one, so it must stop.
    """

    is_late: bool
    text: str


class Disagreements:
    """Which runs of one job contradict others. One thread at a time.

    A late run raises an error and ends. Its contradiction is shown until another run begins, or
    the early one ends.
    """

    def __init__(self) -> None:
        self._found: dict[str, Disagreement] = {}  # by late run
        self._had: dict[str, dict[Terms, None]] = {}  # of each process; the newest is last
        self._runs: set[str] = set()
        self._num_begun = self._num_begun_when_found = 0
        self._due_at = 0.0
        self._settled_at = 0.0

    @property
    def text(self) -> str:
        """For people; empty: the ranks agree."""
        texts = [each.text for each in self._found.values()]
        more = f" ({len(texts) - 1} more processes disagree)" if len(texts) > 1 else ""
        return f"{texts[0]}{more}" if texts else ""

    def note(self, claim: Claim, now: float) -> None:
        """Takes a claim that has reported."""
        if claim.run in self._runs:
            return
        self._runs.add(claim.run)
        self._num_begun += 1
        had = self._had.setdefault(claim.process, {})
        had.pop(claim.terms, None)
        had[claim.terms] = None
        if len(had) > _MOST_TERMS:
            del had[next(iter(had))]
        self._settled_at = now + max(_SETTLED_S, 3 * claim.terms.world_size / _RANKS_PER_S)

    @property
    def num_processes(self) -> int:
        """Those whose terms are known, also of runs that have ended."""
        return len(self._had)

    def keep(self, processes: Set[str]) -> None:
        """Forgets all other processes."""
        self._had = {name: had for name, had in self._had.items() if name in processes}

    def is_due(self, now: float) -> bool:
        """Whether it is time to compare: a run is new, or one is contradicted."""
        return now >= self._due_at and (now <= self._settled_at or bool(self._found))

    def compare(self, live: Sequence[Claim], now: float) -> None:
        """Compares the claims of the runs that report.

        A run that was told that it is late stays the late one of its pair.
        """
        self._due_at = now + len(live) / _COMPARED_PER_S
        self._runs &= {claim.run for claim in live}
        running = {claim.run for claim in live if not claim.is_over}
        found = {each.late.run: each for each in find_disagreements(live, self._had)}
        pairs = {frozenset((each.early.run, each.late.run)) for each in found.values()}
        is_alone = self._num_begun == self._num_begun_when_found  # no other run has begun
        kept = {
            run: each
            for run, each in self._found.items()
            if each.early.run in running
            and (frozenset((each.early.run, run)) in pairs or (run not in running and is_alone))
        }
        told = {each.early.run for each in kept.values()}
        kept |= {run: each for run, each in found.items() if run not in kept and run not in told}
        if kept.keys() - self._found.keys():
            self._num_begun_when_found = self._num_begun
        self._found = kept

    def told(self, run: str) -> Told | None:
        """What the reader of a run must know; None: the ranks agree."""
        if not self._found:
            return None
        own = self._found.get(run)
        return Told(False, self.text) if own is None else Told(True, f"{own.text}. {_WHAT_TO_DO}")
