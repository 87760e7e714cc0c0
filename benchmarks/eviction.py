"""How many bytes does a full cache load again, by what it evicts? Simulated by the real planner.

    python -m benchmarks.eviction [--seeds 16]

200 datasets of five teams are read for 90 days. Each team has tables that it reads all the time,
some that it reads each night or week, some that it reads a lot for one project and then never, and
some that it reads once. Each policy sees the same reads. Only what a version is worth differs, so
pins, leases and sizes are those of `cache_server.coordination.versions.eviction`. "optimal" knows
the next read of each dataset, and is no lower bound where sizes differ.

The seeds of the result are not those that `chance_of` was chosen with: see `CHOSEN_WITH`.
"""

from __future__ import annotations

import argparse
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.common import write_result
from cache_server.coordination.versions.eviction import (
    MOST_READS,
    Resident,
    Room,
    chance_of,
    plan_eviction,
    worth_of,
)
from cache_server.coordination.versions.keeping import SAME_READ_S
from cache_server.shards.version_key import VersionKey

CHOSEN_WITH = range(1000, 1010)
HOUR_S, DAY_S = 3600.0, 86_400.0
DAYS, TEAMS, DATASETS = 90, 5, 200
WARM_DAYS = 10  # that are not counted
LEASE_S = 600.0
CAPACITIES = (0.15, 0.3, 0.5)  # of the bytes of all datasets
NODE = "node"


@dataclass(frozen=True)
class Table:
    """A dataset: its bytes, and the seconds that its load takes."""

    number: int
    team: int
    num_bytes: int
    load_s: float


@dataclass(frozen=True, order=True)
class Read:
    """A job that reads a dataset from its first row on, in seconds since the start."""

    begins: float
    number: int
    ends: float


@dataclass(frozen=True)
class Trace:
    """What is read."""

    tables: Sequence[Table]
    reads: Sequence[Read]


def make_trace(seed: int) -> Trace:
    """The reads of all teams, by their begin."""
    chosen = np.random.default_rng(seed)
    sizes = np.minimum(chosen.lognormal(np.log(20e9), 1.3, DATASETS), 400e9).astype(np.int64)
    # Of plain copies, of decoded files far away, and of joins.
    rates = chosen.choice([400e6, 150e6, 40e6], DATASETS, p=[0.3, 0.5, 0.2])
    tables = [
        Table(number, number % TEAMS, int(size), 5.0 + float(size / rate))
        for number, (size, rate) in enumerate(zip(sizes, rates, strict=True))
    ]
    reads: list[Read] = []
    for table in tables:
        for begins in _begins(chosen):
            lasts = float(np.clip(chosen.lognormal(np.log(0.7 * HOUR_S), 1.0), 60, DAY_S))
            if begins < DAYS * DAY_S:
                reads.append(Read(begins, table.number, begins + lasts))
    return Trace(tables, sorted(reads))


def _begins(chosen: np.random.Generator) -> Iterable[float]:
    """When jobs begin to read one dataset."""
    kind = chosen.choice(["staple", "scheduled", "project", "once"], p=[0.15, 0.15, 0.4, 0.3])
    if kind == "once":  # at most twice
        return chosen.uniform(0, DAYS, int(chosen.integers(1, 3))) * DAY_S
    if kind == "scheduled":
        every = float(chosen.choice([1.0, 7.0], p=[0.6, 0.4]))
        first = chosen.uniform(0, every)
        times = np.arange(first, DAYS, every)
        return (times + chosen.normal(0, 0.01, len(times))) * DAY_S
    if kind == "staple":
        a_day = float(chosen.uniform(0.5, 3))
        return _by_day(chosen, range(DAYS), a_day)
    begins: list[float] = []
    for _ in range(int(chosen.integers(1, 3))):
        start, length = chosen.integers(0, DAYS), chosen.integers(3, 15)
        begins += _by_day(chosen, range(start, start + length), float(chosen.uniform(1, 6)))
    return begins


def _by_day(chosen: np.random.Generator, days: Iterable[int], a_day: float) -> list[float]:
    """Begins in working hours, few at weekends."""
    begins: list[float] = []
    for day in days:
        weight = 0.15 if day % 7 >= 5 else 1.0
        hours = chosen.uniform(8, 20, chosen.poisson(a_day * weight))
        begins += [(day + hour / 24) * DAY_S for hour in hours.tolist()]
    return begins


@dataclass
class Cached:
    """What a policy knows of a dataset."""

    table: Table
    reads: list[float] = field(default_factory=list)
    noted: list[float] = field(default_factory=list)  # as the coordinator does: `Keepings`
    busy_until: float = -DAY_S
    inflated: float = 0.0  # of GDSF: the value of what went last, when it was read


Policy = Callable[[Cached, float, float], float]  # of a dataset, the value of what went, the time


def ours(cached: Cached, gone: float, now: float) -> float:
    """What the coordinator uses."""
    chance = chance_of(cached.noted[-MOST_READS:], now)
    return worth_of(cached.table.load_s, cached.table.num_bytes, chance)


def lru(cached: Cached, gone: float, now: float) -> float:
    """Least recently used."""
    return cached.reads[-1]


def gdsf(cached: Cached, gone: float, now: float) -> float:
    """Greedy-Dual-Size-Frequency (Cherkasova, 1998), with seconds as cost."""
    return cached.inflated + len(cached.reads) * cached.table.load_s / cached.table.num_bytes


def gdsf_bytes(cached: Cached, gone: float, now: float) -> float:
    """The same, with bytes as cost."""
    return cached.inflated + len(cached.reads)


def optimal(reads: Sequence[Read]) -> Policy:
    """The one that is read next goes last."""
    begins: dict[int, list[float]] = {}
    for read in reads:
        begins.setdefault(read.number, []).append(read.begins)

    def worth(cached: Cached, gone: float, now: float) -> float:
        times = begins[cached.table.number]
        after = bisect_right(times, now)
        return -times[after] if after < len(times) else -1e12

    return worth


@dataclass
class Outcome:
    """What a policy loaded again, and what it could not."""

    num_bytes: int = 0
    seconds: float = 0.0
    refused: int = 0


def simulate(trace: Trace, capacity: int, policy: Policy) -> Outcome:
    """Reads a trace with one policy."""
    known = {table.number: Cached(table) for table in trace.tables}
    held: dict[int, Cached] = {}
    outcome, used, gone = Outcome(), 0, 0.0
    for read in trace.reads:
        now, cached = read.begins, known[read.number]
        size = cached.table.num_bytes
        if read.number not in held:
            if cached.reads and now > WARM_DAYS * DAY_S:
                outcome.num_bytes += size
                outcome.seconds += cached.table.load_s
            residents = {_key(number): _resident(each, gone, now, policy)
                         for number, each in held.items()}  # fmt: skip
            room = Room(_namespace(cached), {NODE: used + size - capacity})
            plan = plan_eviction(residents.values(), room)
            if not plan.is_enough:
                outcome.refused += 1
            else:
                for each in plan.goes:
                    used -= each.num_bytes
                    gone = max(gone, each.worth)
                    del held[int(each.key.dataset)]
                held[read.number] = cached
                used += size
        cached.reads.append(now)
        if now - cached.busy_until > SAME_READ_S:
            cached.noted.append(now)
        cached.busy_until = max(cached.busy_until, read.ends)
        cached.inflated = gone
    return outcome


def _key(number: int) -> VersionKey:
    return VersionKey(str(number), "f")


def _namespace(cached: Cached) -> str:
    return f"team-{cached.table.team}"


def _resident(cached: Cached, gone: float, now: float, policy: Policy) -> Resident:
    is_read = cached.busy_until + LEASE_S > now
    return Resident(
        _key(cached.table.number),
        _namespace(cached),
        {NODE: cached.table.num_bytes},
        cached.table.num_bytes,
        policy(cached, gone, now),
        kept_because="is read" if is_read else "",
    )


def run(seeds: Iterable[int], policies: Mapping[str, Policy]) -> list[dict[str, object]]:
    """The outcomes of every policy, for each capacity and seed."""
    rows: list[dict[str, object]] = []
    for seed in seeds:
        trace = make_trace(seed)
        total = sum(table.num_bytes for table in trace.tables)
        for share in CAPACITIES:
            for name, policy in {**policies, "optimal": optimal(trace.reads)}.items():
                found = simulate(trace, int(total * share), policy)
                rows.append({"seed": seed, "capacity": share, "policy": name, **vars(found)})
    return rows


POLICIES: Mapping[str, Policy] = {
    "this cache": ours,
    "LRU": lru,
    "GDSF, seconds": gdsf,
    "GDSF, bytes": gdsf_bytes,
}


def ratios(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """For each capacity and policy, what it loads again beside LRU: median, least and greatest."""
    lru_of = {(r["seed"], r["capacity"]): r for r in rows if r["policy"] == "LRU"}
    found = []
    for share in CAPACITIES:
        for policy in dict.fromkeys(str(r["policy"]) for r in rows):
            mine = [r for r in rows if (r["capacity"], r["policy"]) == (share, policy)]
            summary: dict[str, object] = {"capacity": share, "policy": policy}
            for what in ("num_bytes", "seconds"):
                each = [r[what] / lru_of[r["seed"], share][what] for r in mine]  # type: ignore[operator]
                summary[what] = [statistics.median(each), min(each), max(each)]
            summary["refused"] = sum(int(str(r["refused"])) for r in mine)
            found.append(summary)
    return found


def main() -> None:
    """Simulates, prints what each policy loads again, and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=16, help="traces")
    seeds = range(parser.parse_args().seeds)
    rows = run(seeds, POLICIES)
    summary = ratios(rows)
    print("loaded again, beside LRU: median (least, greatest)")
    for each in summary:
        cells = [
            "{:.2f} ({:.2f}, {:.2f})".format(*each[what])  # type: ignore[misc]
            for what in ("num_bytes", "seconds")
        ]
        print(f"{each['capacity']:>5} {each['policy']:<14} bytes {cells[0]:<20} seconds {cells[1]}"
              f"  refused {each['refused']}")  # fmt: skip
    reads = [len(make_trace(seed).reads) for seed in seeds]
    result = {
        "days": DAYS,
        "datasets": DATASETS,
        "teams": TEAMS,
        "reads_of_a_trace": statistics.median(reads),
        "seeds": list(seeds),
        "ratios_to_lru": summary,
    }
    print(f"\nwritten to {write_result('eviction', result)}")


if __name__ == "__main__":
    main()
