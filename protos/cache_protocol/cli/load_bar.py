"""Shows the progress of a load: a bar on a terminal, else one line a second.

Used by ``cachectl`` and ``cache-server local``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from cache_protocol.wire.load_progress import LoadReport, OncePerSecond

if TYPE_CHECKING:
    from rich.console import Console


def print_line(line: str) -> None:
    """Prints a line on standard error; ignores errors."""
    if sys.stderr is None:  # the parent process closed it
        return
    with suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


@contextmanager
def progress_bar(
    name: str, write: Callable[[str], None] = print_line, console: Console | None = None
) -> Iterator[Callable[[LoadReport], None]]:
    """Yields a function that shows a report.

    Args:
        name: of the dataset.
        write: called with one line a second if there is no terminal.
        console: default: standard error.
    """
    # Imported here, because most trainers and nodes show no bar.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield OncePerSecond(lambda report: write(str(report)))
        return
    columns = (
        TextColumn("load {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("shards, {task.fields[rows]:,} rows"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=None, rows=0)
        was_waiting = False

        def show(report: LoadReport) -> None:
            nonlocal was_waiting
            if report.waits and not was_waiting:
                bar.console.print(report.waits, markup=False, highlight=False)
            was_waiting = bool(report.waits)
            # Without a total, as for a whole query that runs, the bar pulses.
            bar.update(
                task,
                completed=report.shards_done,
                total=report.shards_total or None,
                rows=report.num_rows,
            )

        yield show
