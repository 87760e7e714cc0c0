"""How fast is a table read that is larger than the memory of its readers and its node?

    python -m benchmarks.beyond_memory [--quick] [--rows 16000000] [--memory-mb 700] [--seconds 15]

A node has its shards on a disk. It and each reader are in one memory cgroup (version 1 or 2, which
needs root); pages of files count there, and are dropped before each reader. It reads one order for
some seconds: in order, by blocks, shuffled, from the files and over Flight. Beside them is a plain
read of the shard files by the same kind of process.

Bytes are those that a disk has read for the node and the reader: /proc/PID/io.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common import DATA, write_result
from cache_client import CacheClient, CacheIterableDataset, Connection
from cache_server import LocalCluster

BATCH_SIZE = 1024
BLOCK = 1024
NAME = "floats"
WIDTH = 34
ROW_BYTES = 4 * WIDTH
_BATCH_ROWS = 1 << 16
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Mode:
    """What a reader does.

    Attributes:
        order: arguments of the dataset; None: the shard files are read as bytes.
        local: from the files; else over Flight.
    """

    name: str
    order: Mapping[str, Any] | None
    local: bool


ORDERS: Mapping[str, Mapping[str, Any]] = {
    "source order": {"shuffle": False},
    "blocks": {"shuffle": True, "shuffle_block_size": BLOCK},
    "shuffled": {"shuffle": True},
}
MODES = (
    Mode("plain read of the files", None, local=True),
    *(
        Mode(f"{order}, {'local' if local else 'Flight'}", arguments, local)
        for order, arguments in ORDERS.items()
        for local in (True, False)
    ),
)


@dataclass
class Outcome:
    """What one reader saw.

    Attributes:
        first_s: until the first batch.
        seconds: from the first batch to the last one.
        rows: of the batches after the first one.
        read_bytes: by the disk, until the reader ended.
        warnings: that it logged.
        error: why it ended early.
    """

    name: str
    first_s: float | None = None
    seconds: float = 0.0
    rows: int = 0
    read_bytes: int = 0
    warnings: int = 0
    error: str = ""

    def __str__(self) -> str:
        rate = self.rows / self.seconds / 1e6 if self.seconds else 0.0
        first = "-" if self.first_s is None else f"{self.first_s:.2f}"
        per_row = f"{self.read_bytes / self.rows:.0f}" if self.rows else "-"
        return (
            f"{self.name:26} {rate:9.3f} {first:>8} {self.read_bytes / 1e9:7.2f} {per_row:>9}"
            f" {self.warnings:5}  {self.error[:80]}"
        )


HEAD = f"{'':26} {'M rows/s':>9} {'first s':>8} {'GB read':>7} {'bytes/row':>9} {'warn':>5}"


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small table, some seconds a mode")
    parser.add_argument("--rows", type=int, default=16_000_000)
    parser.add_argument("--memory-mb", type=int, default=700, help="of node and reader together")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each mode")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", default="", help="modes whose names have this in them")
    parser.add_argument(
        "--cache-dir", type=Path, default=DATA / "beyond-memory",
        help="on the disk to measure; the loaded table stays there for the next run",
    )  # fmt: skip
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reader:
        read(json.loads(arguments.reader))
        return
    rows = 1_000_000 if arguments.quick else arguments.rows
    seconds = 3.0 if arguments.quick else arguments.seconds
    outcomes: list[Outcome] = []
    cache_dir = arguments.cache_dir / str(rows)
    if not list(cache_dir.rglob("*.arrow")):
        with LocalCluster(1, cache_dir, insecure=True) as cluster:
            CacheClient(cluster.endpoint).write(NAME, table_of(rows))
    files = sorted(cache_dir.rglob("*.arrow"))
    size = sum(file.stat().st_size for file in files)
    print(
        f"{rows:,} rows of {ROW_BYTES} bytes, {size / 1e9:.2f} GB in {len(files)} files; "
        f"{arguments.memory_mb} MB of memory\n\n{HEAD}"
    )
    drop_pages(files)
    with memory_group(arguments.memory_mb << 20) as group, ExitStack() as stack:
        with inside(group):
            cluster = stack.enter_context(LocalCluster(1, cache_dir, insecure=True))
        modes = [mode for mode in MODES if arguments.only in mode.name]
        for mode in modes * arguments.turns:
            empty(group)
            outcome = run(mode, cluster, files, group, seconds)
            print(outcome, flush=True)
            outcomes.append(outcome)
        peak = peak_bytes(group)
    print(f"\npeak of the group: {peak / 1e6:.0f} MB")
    result = {
        "rows": rows, "num_bytes": size, "memory_bytes": arguments.memory_mb << 20,
        "peak_bytes": peak, "outcomes": [asdict(each) for each in outcomes],
    }  # fmt: skip
    name = "beyond_memory-quick" if arguments.quick else "beyond_memory"
    print(f"written to {write_result(name, result)}")


def table_of(rows: int) -> pa.RecordBatchReader:
    """Rows of float32, which begin with the number of the row, by its last 12 bits and the others.

    The rest is noise that repeats.
    """
    schema = pa.schema([("features", pa.list_(pa.float32(), WIDTH))])
    noise = np.random.default_rng(0).random((_BATCH_ROWS, WIDTH), np.float32)

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, rows, _BATCH_ROWS):
            ids = np.arange(start, min(start + _BATCH_ROWS, rows))
            values = noise[: len(ids)].copy()
            values[:, 0], values[:, 1] = ids & 0xFFF, ids >> 12
            lists = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), WIDTH)
            yield pa.RecordBatch.from_arrays([lists], schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def run(
    mode: Mode, cluster: LocalCluster, files: list[Path], group: Path, seconds: float
) -> Outcome:
    """Runs a reader in the group; what it saw."""
    node = cluster.nodes[0].pid
    task = {
        **asdict(mode),
        "endpoint": cluster.endpoint,
        "files": [*map(str, files)],
        "seconds": seconds,
    }
    command = [sys.executable, "-m", "benchmarks.beyond_memory", "--reader", json.dumps(task)]
    before = bytes_read(node)
    with inside(group):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[1]
        )
    limit_s = 4 * seconds + 60
    try:
        out, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        out = json.dumps({"name": mode.name, "error": f"no end after {limit_s:.0f} s"})
    outcome = Outcome(**json.loads(out.splitlines()[-1] if out else json.dumps(
        {"name": mode.name, "error": f"the reader ended with {process.returncode}"}
    )))  # fmt: skip
    outcome.read_bytes += bytes_read(node) - before
    return outcome


def read(task: Mapping[str, Any]) -> None:
    """A reader: reads for some seconds, and prints what it saw as JSON."""
    outcome = Outcome(task["name"])
    counter = _Counter()
    logging.getLogger().addHandler(counter)
    before, begun = bytes_read("self"), time.perf_counter()
    try:
        source = _bytes(task["files"]) if task["order"] is None else _batches(task)
        since = begun
        for rows in source:
            now = time.perf_counter()
            if outcome.first_s is None:
                outcome.first_s, since = now - begun, now
            else:
                outcome.rows += rows
                outcome.seconds = now - since
            if now - since > task["seconds"]:
                break
    except Exception as error:  # the point of some modes
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.warnings = counter.num
    outcome.read_bytes = bytes_read("self") - before
    print(json.dumps(asdict(outcome)))
    sys.stdout.flush()
    os._exit(0)


def _batches(task: Mapping[str, Any]) -> Iterator[int]:
    dataset = CacheIterableDataset(
        NAME,
        cache=Connection(task["endpoint"], local=task["local"]),
        batch_size=BATCH_SIZE,
        **task["order"],
    )
    for batch in dataset:
        yield len(batch["features"])


def _bytes(files: list[str]) -> Iterator[int]:
    """The rows of pieces of all files."""
    buffer = bytearray(1 << 20)
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                yield count // ROW_BYTES


class _Counter(logging.Handler):
    """Counts warnings, and shows them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.num = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num += 1
        if self.num <= 3:
            print(f"    {record.getMessage()[:300]}", file=sys.stderr)


def drop_pages(files: list[Path]) -> None:
    """Drops the cached pages of files that no process maps."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def empty(group: Path) -> None:
    """Drops the cached pages of a group, as far as the kernel does that."""
    name, text = ("memory.force_empty", "0")
    if not (group / name).exists():
        name, text = "memory.reclaim", (group / "memory.max").read_text()
    with suppress(OSError):  # some pages are left
        (group / name).write_text(text)


def bytes_read(pid: int | str) -> int:
    """That disks have read for a process."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def own_group() -> Path:
    """The control group of this process that may have a memory limit."""
    found = _CGROUP
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _CGROUP / "memory" / path.lstrip("/")
        if not controllers:
            found = _CGROUP / path.lstrip("/")
    return found


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group with a memory limit; its processes are moved out at the end."""
    above = own_group()
    group = above / f"beyond-memory-{os.getpid()}"
    group.mkdir()
    try:
        limits = (group / "memory.limit_in_bytes", group / "memory.max")
        next(file for file in limits if file.exists()).write_text(str(limit_bytes))
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            join(above, int(pid))
        group.rmdir()


@contextmanager
def inside(group: Path) -> Iterator[None]:
    """Processes that this one starts meanwhile are in a group."""
    before = own_group()
    join(group, os.getpid())
    try:
        yield
    finally:
        join(before, os.getpid())


def join(group: Path, pid: int) -> None:
    """Moves a process into a group, without the memory that it has."""
    (group / "cgroup.procs").write_text(str(pid))


def peak_bytes(group: Path) -> int:
    """The most memory that a group had."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).exists():
            return int((group / name).read_text())
    return 0


if __name__ == "__main__":
    main()
