"""Other processes: children of a benchmark, and the other libraries in their own environment."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import DATA, Timing
from benchmarks.tables import Table, files_of

HERE = Path(__file__).resolve().parent
DEFAULT_PEERS = HERE.parent / ".venv-peers" / "bin" / "python"


@contextmanager
def child_process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process that says something once it is ready; it ends when the pipe is closed.

    Yields:
        The pipe, its first message still in it when ``arguments`` are given, else taken.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not arguments:
            ours.recv()
        yield ours
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()


def read_by_peer(
    task: str, peer: str, table: Table, python: Path, *, seconds: float, repeats: int = 3
) -> tuple[list[Timing], dict[str, str]]:
    """Times a library that reads its part of a table: `peers/readers.py`.

    Returns:
        The timings, and what was left out -> why.
    """
    assert table.peer_paths is not None and table.peer_packed is not None
    lines, why = run_reader(
        python,
        [
            task, "--peer", peer, "--table", table.name,
            "--paths", *files_of(table.peer_paths), "--packed", *files_of(table.peer_packed),
            "--seconds", str(seconds), "--repeats", str(repeats),
        ],
    )  # fmt: skip
    timings = [per_million_rows(line, table.row_bytes) for line in lines if "skipped" not in line]
    left_out = {line["name"]: line["skipped"] for line in lines if "skipped" in line}
    return timings, left_out if lines else {peer: why}


def per_million_rows(line: Mapping[str, Any], row_bytes: float) -> Timing:
    """A result of `peers/readers.py`, whose passes may stop early, scaled to 1,000,000 rows."""
    million = 1_000_000

    def scaled(values: Iterable[float]) -> list[float]:
        return [value / rows * million for value, rows in zip(values, line["rows"], strict=True)]

    return Timing(
        line["name"],
        million,
        round(million * row_bytes),
        scaled(line["seconds"]),
        scaled(line["cpu_seconds"]),
        line.get("order", ""),
        {
            "version": line["version"],
            "setting": line.get("setting"),
            "measured_rows": line["rows"],
            "tried_rows_per_s": line.get("tried_rows_per_s"),
            "scaled_to_1_million_rows": True,
        },
    )


def run_reader(python: Path, arguments: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """The JSON lines of `peers/readers.py`; where there are none, why."""
    if not python.exists():
        return [], f"no environment of peers at {python.name} (see benchmarks/peers)"
    command = [str(python), str(HERE / "peers" / "readers.py"), *arguments]
    command += ["--work", str(DATA / "peers")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return [], "did not end within 300 s"
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    last = done.stderr.strip().splitlines()[-1:] or [""]
    return lines, f"exit code {done.returncode}: {last[0][:200]}"
