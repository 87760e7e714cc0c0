"""What every benchmark shares: warm-up, repeats, median and spread, host facts, result files.

Ratios are taken inside one run, between things measured in turn, because machines differ and
drift. Nothing here knows what is measured.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
DATA = Path(__file__).resolve().parents[1] / ".data" / "benchmarks"
_PACKAGES = ("numpy", "pyarrow", "datafusion", "grpcio", "torch")


@dataclass(frozen=True)
class Timing:
    """Repeats of one thing that handles ``num_rows`` rows of ``num_bytes`` bytes in all.

    Attributes:
        seconds: of each counted repeat.
    """

    name: str
    num_rows: int
    num_bytes: int
    seconds: list[float] = field(default_factory=list)

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

    def summary(self) -> dict[str, Any]:
        """For a result file."""
        return {
            **asdict(self),
            "median_s": self.median_s,
            "rows_per_s": self.rows_per_s,
            "gigabytes_per_s": self.gigabytes_per_s,
            "spread": self.spread,
        }


def measure_in_turn(
    contenders: Mapping[str, Callable[[], int]],
    *,
    num_rows: int,
    num_bytes: int,
    repeats: int = 5,
    warm_ups: int = 1,
    settle: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times each contender ``repeats`` times, A B C A B C, after ``warm_ups`` rounds not counted.

    Args:
        contenders: name -> function that handles all rows once and returns how many it handled.
        settle: called after each run, not timed: cleans up so that nothing goes on meanwhile.

    Raises:
        AssertionError: a contender handled another number of rows.
    """
    timings = {name: Timing(name, num_rows, num_bytes) for name in contenders}
    for turn in range(warm_ups + repeats):
        for name, run in contenders.items():
            gc.collect()
            start = time.perf_counter()
            handled = run()
            seconds = time.perf_counter() - start
            settle()
            assert handled == num_rows, f"{name} handled {handled} rows instead of {num_rows}"
            if turn >= warm_ups:
                timings[name].seconds.append(seconds)
    return timings


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


def print_table(timings: Mapping[str, Timing]) -> None:
    """A line a contender."""
    print(f"{'':48} {'M rows/s':>9} {'GB/s':>7} {'spread':>7}")
    for timing in timings.values():
        print(
            f"{timing.name:48} {timing.rows_per_s / 1e6:9.2f} {timing.gigabytes_per_s:7.2f} "
            f"{timing.spread:7.0%}"
        )


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
