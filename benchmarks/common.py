"""What every benchmark shares: warm-up, repeats, median and spread, host facts, result files.

Ratios are taken inside one run, between things measured in turn, because machines differ and
drift. Nothing here knows what is measured.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

RESULTS = Path(__file__).resolve().parent / "results"
DATA = Path(__file__).resolve().parents[1] / ".data" / "benchmarks"
CONFIDENCE = 0.95  # of intervals, where there are enough repeats: six
_PACKAGES = ("numpy", "pyarrow", "datafusion", "grpcio", "torch")


class Interval(NamedTuple):
    """Holds a median with this confidence."""

    low: float
    high: float
    confidence: float


def median_interval(values: Sequence[float]) -> Interval:
    """The confidence interval of a median.

    Its ends are two of the values. It is exact for independent values of any distribution, by the
    binomial distribution: the narrowest with `CONFIDENCE`, else the least and the greatest value.
    """
    ordered, count = sorted(values), len(values)
    # Of those without the ``cut`` least and greatest values.
    confidences = [
        1 - sum(math.comb(count, each) for each in range(cut + 1)) / 2 ** (count - 1)
        for cut in range((count + 1) // 2)
    ]
    cut = max((at for at, each in enumerate(confidences) if each >= CONFIDENCE), default=0)
    return Interval(ordered[cut], ordered[count - 1 - cut], confidences[cut])


@dataclass(frozen=True)
class Timing:
    """Repeats of one thing that handles ``num_rows`` rows of ``num_bytes`` bytes in all.

    Attributes:
        seconds: of each counted repeat.
        cpu_seconds: processor time of each, of every process that took part.
        order: in which order the rows come, in words; empty where it does not matter.
        notes: more facts for the result file.
    """

    name: str
    num_rows: int
    num_bytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    order: str = ""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.seconds)

    @property
    def rows_per_s(self) -> float:
        """At the median."""
        return self.num_rows / self.median_s

    @property
    def gigabytes_per_s(self) -> float:
        """At the median; 1 GB is 1e9 bytes."""
        return self.num_bytes / self.median_s / 1e9

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median_s

    @property
    def cpu_s_per_gigabyte(self) -> float:
        """Processor seconds, of all processes together, for 1e9 bytes; at the median."""
        return statistics.median(self.cpu_seconds) / self.num_bytes * 1e9

    def interval_s(self) -> Interval:
        """Of the median of the repeats."""
        return median_interval(self.seconds)

    def summary(self) -> dict[str, Any]:
        """For a result file."""
        interval = self.interval_s()
        return {
            **asdict(self),
            "median_s": self.median_s,
            "rows_per_s": self.rows_per_s,
            "rows_per_s_interval": [self.num_rows / interval.high, self.num_rows / interval.low],
            "interval_confidence": interval.confidence,
            "gigabytes_per_s": self.gigabytes_per_s,
            "spread": self.spread,
            **({"cpu_s_per_gigabyte": self.cpu_s_per_gigabyte} if self.cpu_seconds else {}),
        }


@dataclass(frozen=True)
class Contender:
    """One thing to measure.

    Attributes:
        run: handles all rows once and returns how many it handled.
        order: in which order the rows come, in words.
    """

    name: str
    run: Callable[[], int]
    num_rows: int
    num_bytes: int
    order: str = ""


def measure_in_turn(
    contenders: Mapping[str, Callable[[], int]],
    *,
    num_rows: int,
    num_bytes: int,
    repeats: int = 5,
    warm_ups: int = 1,
    settle: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """`measure` for contenders that all handle the same rows.

    Args:
        contenders: name -> function that handles all rows once and returns how many it handled.
    """
    return measure(
        [Contender(name, run, num_rows, num_bytes) for name, run in contenders.items()],
        repeats=repeats,
        warm_ups=warm_ups,
        settle=settle,
    )


def measure(
    contenders: Sequence[Contender],
    *,
    repeats: int = 5,
    warm_ups: int = 1,
    settle: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times each contender ``repeats`` times, A B C A B C, after ``warm_ups`` rounds not counted.

    Args:
        settle: called after each run, not timed: cleans up before the next one.

    Raises:
        AssertionError: a contender handled another number of rows, or two have one name.
    """
    timings = {c.name: Timing(c.name, c.num_rows, c.num_bytes, order=c.order) for c in contenders}
    assert len(timings) == len(contenders), "two contenders have one name"
    for turn in range(warm_ups + repeats):
        for contender in contenders:
            gc.collect()
            cpu = cpu_seconds()
            start = time.perf_counter()
            handled = contender.run()
            seconds = time.perf_counter() - start
            cpu = cpu_seconds() - cpu
            settle()
            assert handled == contender.num_rows, (
                f"{contender.name} handled {handled} rows instead of {contender.num_rows}"
            )
            if turn >= warm_ups:
                timings[contender.name].seconds.append(seconds)
                timings[contender.name].cpu_seconds.append(cpu)
    return timings


def ratio(timings: Mapping[str, Timing], ours: str, theirs: str) -> float:
    """How many times as fast the contender ``ours`` handled the same rows as ``theirs`` did."""
    return timings[theirs].median_s / timings[ours].median_s


def cpu_seconds() -> float:
    """Processor time of this process and of its descendants, those that have ended too."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def process_cpu_s(pid: int) -> float:
    """Processor time of a process, in nanosecond steps; not of its children. Linux only."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock of a process: clock_getcpuclockid(3)


@contextmanager
def pin(cores: Mapping[int, int]) -> Iterator[None]:
    """Runs this process on its first core, and others on theirs; prints which, once.

    Args:
        cores: process id -> which of the cores of this process, as an index of a list.
    """
    allowed = sorted(os.sched_getaffinity(0))
    places = {os.getpid(): allowed[0], **{pid: allowed[at] for pid, at in cores.items()}}
    _say_once(f"this process and its threads run on core {allowed[0]}, "
              f"{len(cores)} others on {sorted({places[pid] for pid in cores})}")  # fmt: skip
    try:
        for pid, core in places.items():
            _set_affinity(pid, {core})
        yield
    finally:
        for pid in places:
            _set_affinity(pid, set(allowed))


@cache
def _say_once(line: str) -> None:
    print(line)


def pinned(cores: Mapping[int, int], run: Callable[[], int]) -> Callable[[], int]:
    """A contender that runs inside `pin`."""

    def run_pinned() -> int:
        with pin(cores):
            return run()

    return run_pinned


def _set_affinity(pid: int, cores: set[int]) -> None:
    """Of every thread; later threads inherit it."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # a thread that has ended
            os.sched_setaffinity(int(task.name), cores)


def host_facts() -> dict[str, Any]:
    """What the numbers depend on: processor, memory, versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def write_result(name: str, result: Mapping[str, Any]) -> Path:
    """Writes ``benchmarks/results/<name>.json``, with the host's facts."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"host": host_facts(), **result}, indent=2) + "\n")
    return path


def write_timings(
    name: str,
    timings: Mapping[str, Timing],
    ratios: Mapping[str, float | None],
    targets: Mapping[str, float],
    *,
    quick: bool,
    **facts: Any,
) -> None:
    """Writes a result file of timings, and prints its path.

    Args:
        quick: the file is ``<name>-quick.json``.
        facts: more entries of the file, such as the number of rows.
    """
    result = {
        **facts,
        "timings": [timing.summary() for timing in timings.values()],
        "ratios": ratios,
        "targets": targets,
    }
    print(f"\nwritten to {write_result(f'{name}-quick' if quick else name, result)}")


def print_table(timings: Mapping[str, Timing]) -> None:
    """A line a contender."""
    cpu = any(timing.cpu_seconds for timing in timings.values())
    order = any(timing.order for timing in timings.values())
    width = max(48, *(len(name) for name in timings))
    print(
        f"{'':{width}} {'M rows/s':>9} {interval_name(timings):>15} {'GB/s':>7} {'spread':>7}"
        + (f" {'CPU s/GB':>9}" if cpu else "")
        + ("  order" if order else "")
    )
    for timing in timings.values():
        rows = timing.rows_per_s / 1e6
        digits = 2 if rows >= 1 else 4
        low_s, high_s, _ = timing.interval_s()
        ends = (timing.num_rows / each / 1e6 for each in (high_s, low_s))
        interval = " - ".join(f"{end:.{digits}f}" for end in ends)
        line = (
            f"{timing.name:{width}} {rows:9.{digits}f} {interval:>15} "
            f"{timing.gigabytes_per_s:7.{2 if timing.gigabytes_per_s >= 0.1 else 4}f} "
            f"{timing.spread:7.0%}"
        )
        if cpu:
            line += f" {timing.cpu_s_per_gigabyte:9.2f}" if timing.cpu_seconds else f" {'':9}"
        print(f"{line}  {timing.order}" if order else line)


def interval_name(timings: Mapping[str, Timing]) -> str:
    """The least confidence of the intervals of a table, as the head of their column."""
    least = min((timing.interval_s().confidence for timing in timings.values()), default=0.0)
    return f"at {least:.0%}"


def print_ratios(ratios: Mapping[str, float | None], targets: Mapping[str, float]) -> None:
    """A line a ratio, with its target and whether it is met; None was not measured."""
    for name, value in ratios.items():
        target = targets.get(name)
        line = f"{name:64} {'-' if value is None else f'{value:.2f}':>8}"
        if target is not None:
            met = "not measured" if value is None else "met" if value >= target else "MISSED"
            line += f"  (to reach: {target:g}; {met})"
        print(line)


@contextmanager
def memory_directory(prefix: str) -> Iterator[Path]:
    """A temporary directory in memory, where the machine has one."""
    shm = Path("/dev/shm")
    parent = shm if os.access(shm, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as directory:
        yield Path(directory)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
