"""A load for a person who watches it: a bar on a terminal, a line a second elsewhere.

Both ``cachectl`` and ``cache-server local`` show it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from cache_protocol.wire.load_progress import EachSecond, LoadReport

if TYPE_CHECKING:
    from rich.console import Console


def print_line(line: str) -> None:
    """Prints a line on standard error; where it cannot be written, nobody watches."""
    if sys.stderr is None:  # it was closed by whoever started the program
        return
    with suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


@contextmanager
def shown_progress(
    name: str, say: Callable[[str], None] = print_line, console: Console | None = None
) -> Iterator[Callable[[LoadReport], None]]:
    """Shows the reports that what it yields is given, until it ends.

    Args:
        name: of the dataset.
        say: given a line a second where there is no terminal.
        console: default: standard error.
    """
    # Not above: every trainer and every node would import what few of them show.
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
        yield EachSecond(lambda report: say(str(report)))
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
        waited = False

        def show(report: LoadReport) -> None:
            nonlocal waited
            if report.waits and not waited:
                bar.console.print(report.waits, markup=False, highlight=False)
            waited = bool(report.waits)
            # The shards of a whole query are not known while it runs: the bar says that it does.
            bar.update(
                task,
                completed=report.shards_done,
                total=report.shards_total or None,
                rows=report.num_rows,
            )

        yield show
