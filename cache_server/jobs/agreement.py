"""Decides whether the ranks of a job read by the same terms. Pure.

Ranks that differ in seed, world size, batch size, version or view, and two processes that are one
rank, train on wrong rows and look healthy. Two claims contradict each other only if

- both processes were alive at once, by their own clocks: a report that was late proves nothing, so
  a restart is no contradiction;
- their launcher says nothing else: another attempt is another start of the job, and processes that
  it numbers apart may read the same rows, as those of a tensor parallel group do;
- neither process ever read by the terms of the other one: a job may read a dataset several times,
  for training and for validation, one after the other or at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

_MARGIN_S: Final = 0.5  # that two processes were alive at once; clocks are known to about a report
_MOST_TERMS: Final = 8  # that are compared with each other
_MOST_COMPARED: Final = 64  # claims of two terms
_MOST_OF_VALUE: Final = 60  # characters in a message
_MOST_OF_HOST: Final = 50
_CONTEXT: Final = 20  # characters before the first difference of long values


@dataclass(frozen=True)
class Terms:
    """What all ranks of a job must have in common.

    Attributes:
        version: fingerprint; empty where each epoch may have another one.
        order: further options of the order, such as "shuffle=True, drop_last=False".
        view: text for people; its digest counts.
    """

    world_size: int
    seed: str
    batch_size: int
    version: str
    order: str
    view_digest: str
    view: str = field(default="", compare=False)


@dataclass(eq=False)
class Claim:
    """One run of a rank, and when it was alive. It needs `note` for its first report, too.

    Times are those of the coordinator. A report comes later than it was made, so the least delay
    that was seen tells the reader's clock.

    Attributes:
        rank: of the data; ``process_rank`` of ``num_processes`` is the launcher's number, if known.
        process: name of the training process.
        is_over: its loop left the last pass, or the pass failed.
    """

    run: str
    rank: int
    terms: Terms
    process: str
    host: str
    pid: int
    process_rank: int = 0
    num_processes: int = 0
    attempt: str = ""
    is_over: bool = field(default=False, init=False)
    _clock: float = field(default=math.inf, init=False)  # the coordinator's, at 0 of the reader's
    _first_sent: float = field(default=0.0, init=False)
    _last_sent: float = field(default=0.0, init=False)

    def note(self, sent_s: float, now: float, *, is_over: bool = False) -> None:
        """Takes a report of the run.

        Args:
            sent_s: when it was made, by the clock of the reader.
            now: when it came, by that of the coordinator.
            is_over: it is a goodbye.
        """
        if math.isinf(self._clock):
            self._first_sent = self._last_sent = sent_s
        self._clock = min(self._clock, now - sent_s)
        self.is_over = is_over
        if not is_over:  # a goodbye may come long after the loop has stopped
            self._last_sent = max(self._last_sent, sent_s)

    @property
    def begun_at(self) -> float:
        """When it sent its first report."""
        return self._clock + self._first_sent

    @property
    def seen_at(self) -> float:
        """Until when it is known to have been alive."""
        return self._clock + self._last_sent

    @property
    def is_part(self) -> bool:
        """Whether several processes of the launcher read the rows of one rank."""
        readers, processes = self.terms.world_size, self.num_processes
        return readers < processes and processes % readers == 0

    @property
    def reader(self) -> str:
        """Which process it is, for people."""
        return f"{self.host[:_MOST_OF_HOST] or 'unknown host'} (process {self.pid})"


@dataclass(frozen=True)
class Disagreement:
    """Two runs that contradict each other; the late one began after the early one.

    Attributes:
        text: for people: both values, both hosts.
    """

    early: Claim
    late: Claim
    text: str


def find_disagreements(
    claims: Iterable[Claim], had: Mapping[str, Collection[Terms]] | None = None
) -> list[Disagreement]:
    """The late runs that contradict an earlier one, one entry each; empty if the ranks agree.

    Args:
        claims: of one job: of each run that has not ended or fallen silent.
        had: process -> all terms by which it has read so far; default: those of the claims.
    """
    attempts: defaultdict[str, list[Claim]] = defaultdict(list)
    own: defaultdict[str, set[Terms]] = defaultdict(set)
    for claim in claims:
        if not claim.is_over:
            attempts[claim.attempt].append(claim)
            own[claim.process].add(claim.terms)
    known: Mapping[str, Collection[Terms]] = own if had is None else had
    found: dict[str, Disagreement] = {}
    for of_attempt in attempts.values():
        for each in (*_other_terms(of_attempt, known), *_twins(of_attempt)):
            found.setdefault(each.late.run, each)
    return list(found.values())


def _other_terms(
    claims: Sequence[Claim], had: Mapping[str, Collection[Terms]]
) -> Iterator[Disagreement]:
    """Runs with different terms that the other process never had."""
    by_terms: defaultdict[Terms, list[Claim]] = defaultdict(list)
    for claim in claims:
        by_terms[claim.terms].append(claim)
    for terms, others in combinations(list(by_terms)[:_MOST_TERMS], 2):
        one = [each for each in by_terms[terms] if others not in had.get(each.process, ())]
        two = [each for each in by_terms[others] if terms not in had.get(each.process, ())]
        if terms.world_size != others.world_size:
            one, two = (
                [each for each in side if not each.is_part] for side in (one, two)
            )  # one reader of all rows in one process of several, as for a validation
        yield from _contradictions(one, two)
        yield from _contradictions(two, one)


def _contradictions(early: list[Claim], late: list[Claim]) -> Iterator[Disagreement]:
    """For each of the late runs, the first early one that it contradicts."""
    early = sorted(early, key=lambda each: -each.seen_at)[:_MOST_COMPARED]
    early.sort(key=lambda each: each.begun_at)
    late = sorted(late, key=lambda each: each.begun_at)[:_MOST_COMPARED]
    for second in late:
        for first in early:
            if _were_alive_at_once(first, second) and not _are_apart(first, second):
                yield Disagreement(first, second, _difference(first, second))
                break


def _twins(claims: Iterable[Claim]) -> Iterator[Disagreement]:
    """Runs of other processes that are the same rank by the same terms."""
    by_rank: defaultdict[tuple[int, Terms], list[Claim]] = defaultdict(list)
    for claim in claims:
        by_rank[claim.rank, claim.terms].append(claim)
    for (rank, terms), same in by_rank.items():
        same.sort(key=lambda each: each.begun_at)
        for place, second in enumerate(same):
            for first in same[max(0, place - _MOST_COMPARED) : place]:
                if _were_alive_at_once(first, second) and not _are_apart(first, second):
                    text = (
                        f"two processes are rank {rank} of {terms.world_size}: {first.reader} and "
                        f"{second.reader}"
                    )
                    yield Disagreement(first, second, text)
                    break


def _were_alive_at_once(early: Claim, late: Claim) -> bool:
    """Whether the early one reported after the late one had begun, from another process."""
    return (
        early.process != late.process
        and (early.begun_at, early.run) < (late.begun_at, late.run)
        and early.seen_at > late.begun_at + _MARGIN_S
    )


def _are_apart(one: Claim, other: Claim) -> bool:
    """Whether the launcher numbers apart two processes that are one rank of the data."""
    return (
        one.rank == other.rank
        and one.terms.world_size == other.terms.world_size
        and one.is_part
        and other.is_part
        and one.process_rank != other.process_rank
    )


def _difference(early: Claim, late: Claim) -> str:
    """What differs, with both values and both hosts."""
    pairs = list(_values(early.terms, late.terms))
    most = max(_MOST_OF_VALUE // max(1, len(pairs) - 1), _CONTEXT)
    ours, theirs = (", ".join(_cut(pair, at, most) for pair in pairs) for at in (0, 1))
    both = f"; both are rank {early.rank}" if early.rank == late.rank else ""
    return (
        f"rank {early.rank} on {early.reader} has {ours}, but "
        f"rank {late.rank} on {late.reader} has {theirs}{both}"
    )


def _values(one: Terms, other: Terms) -> Iterator[tuple[str, str]]:
    """Pairs of settings that differ, as text."""
    for name in ("world_size", "seed", "batch_size"):
        ours, theirs = getattr(one, name), getattr(other, name)
        if ours != theirs:
            yield f"{name}={ours}", f"{name}={theirs}"
    options = zip(one.order.split(", "), other.order.split(", "), strict=False)
    yield from (pair for pair in options if pair[0] != pair[1])
    if one.version != other.version:
        yield f"version={one.version or 'any'}", f"version={other.version or 'any'}"
    if one.view_digest != other.view_digest:
        ours, theirs = (each.view or "each row once" for each in (one, other))
        if ours == theirs:  # the texts are cut, the digests are not
            ours, theirs = one.view_digest, other.view_digest
        yield f"view {ours}", f"view {theirs}"


def _cut(pair: tuple[str, str], at: int, most: int) -> str:
    """One text of a pair, around the first difference."""
    text = pair[at]
    same = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), len(text))
    name = text.partition("=")[0].partition(" ")[0]
    start = same - _CONTEXT if same - _CONTEXT > len(name) + 1 and len(text) > most else 0
    shown = text[start : start + most]
    begin = f"{name} ..." if start else ""
    return f"{begin}{shown}{'...' if start + most < len(text) else ''}"
