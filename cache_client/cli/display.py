"""What ``cachectl`` shows: tables for people, JSON for programs. Calls no node."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

import pyarrow as pa
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cache_client.control.forecast import LoadForecast, nulls_text
from cache_client.control.infos import DatasetInfo
from cache_protocol.cli.facts import counted, printable, type_name
from cache_protocol.cli.output import size
from cache_protocol.errors import some_of
from cache_protocol.storage.flat_columns import numpy_dtype

# A pipe has no width.
console = Console(width=None if sys.stdout is not None and sys.stdout.isatty() else 250)


def show_dataset(info: DatasetInfo, as_json: bool) -> None:
    """Prints a dataset with its columns."""
    if as_json:
        print_json(dataset_json(info))
        return
    console.print(f"[bold]{info.name}[/bold]  {info.state}", highlight=False)
    if info.error:
        console.print(Text(f"  error        {printable(info.error)}"), soft_wrap=True)
    if info.awaited:
        console.print(
            Text(f"  awaits       node {some_of(info.awaited, ', node ')}"), soft_wrap=True
        )
    if info.pinned or info.priority:
        kept = f"{'pinned, ' * info.pinned}priority {info.priority}"
        console.print(f"  kept         {kept}", highlight=False)
    if info.last_read_s is not None:
        console.print(f"  last read    {time_text(info.last_read_s)}", highlight=False)
    if info.load_s:
        console.print(f"  loads in     {info.load_s:.1f} s", highlight=False)
    if info.waits:
        console.print(Text(f"  waits        {printable(info.waits)}"), soft_wrap=True)
    for note in info.notes:
        console.print(Text(f"  note         {printable(note)}"), soft_wrap=True)
    console.print(f"  fingerprint  {info.fingerprint}", highlight=False)
    console.print(f"  rows         {info.num_rows:,}", highlight=False)
    console.print(f"  size         {size(info.num_bytes)}", highlight=False)
    fewer = sum(len(node_ids) < info.replicas for node_ids in info.placement.values())
    lacks = f"; {counted(fewer, 'shard')} of {info.num_shards:,} with fewer" if fewer else ""
    console.print(f"  replicas     {info.replicas}{lacks}", highlight=False)
    shards: dict[str, int] = {}
    for node_ids in info.placement.values():
        for node_id in node_ids:
            shards[node_id] = shards.get(node_id, 0) + 1
    held = ", ".join(f"{count} on {node}" for node, count in sorted(shards.items())) or "nowhere"
    console.print(f"  shards       {info.num_shards} ({held})", highlight=False, soft_wrap=True)
    if zones := info.shards_of_zones():
        one = info.shards_in_one_zone()
        spread = ", ".join(f"{count} in {zone}" for zone, count in zones.items())
        lacks = f"; {counted(one, 'shard')} with all replicas in one" if one else ""
        console.print(f"  zones        {spread}{lacks}", highlight=False, soft_wrap=True)
    if info.shards_reused:
        reused = f"{info.shards_reused:,} of {counted(info.num_shards, 'shard')}"
        read = counted(info.files_read, "file")
        console.print(f"  reused       {reused}; {read} read", highlight=False)
    if info.nulls:
        console.print(Text(f"  nulls        {nulls_text(info.nulls)}"), soft_wrap=True)
    fields = [[field.name, type_name(field.type)] for field in info.schema]
    console.print(_indented(_plain_table(fields, header=["column", "type"])))


def time_text(seconds: float) -> str:
    """A time since 1970, of this machine's time zone."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def forecast_json(forecast: LoadForecast) -> dict[str, Any]:
    """A forecast for programs."""
    columns = {field.name: type_name(field.type) for field in forecast.schema}
    return {
        **asdict(replace(forecast, schema=None)),
        "sql_goes": forecast.sql_goes,
        "schema": columns,
        "fits": forecast.fits,
    }


def show_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Prints a title, and one line for each fact."""
    console.print(Text(title, style="bold"))
    console.print(_indented(_plain_table(facts)))


def show_line(text: str) -> None:
    """Prints a line unchanged; the terminal may wrap it."""
    console.print(Text(text), soft_wrap=True)


def dataset_json(info: DatasetInfo) -> dict[str, Any]:
    """A dataset for programs."""
    facts = asdict(replace(info, schema=None))
    del facts["schema"]
    return {**facts, "columns": {field.name: type_name(field.type) for field in info.schema}}


def show_rows(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; transposes one that is wider than the terminal."""
    columns = [list(column) for column in zip(names, *rows, strict=True)]
    if sum(map(_width, columns)) <= console.width:
        console.print(_plain_table(rows, header=names))
        return
    for index, chunk in enumerate(_side_by_side(rows, console.width - _width(names))):
        if index:
            console.print()
        console.print(_plain_table(list(zip(names, *chunk, strict=True))))


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table with a header."""
    return _plain_table(rows, header=names)


def show_live(view: Callable[[], RenderableType], interval_s: float | None) -> None:
    """Shows a view again and again until Ctrl-C; once where the output is no terminal.

    Args:
        interval_s: None: once.
    """
    if interval_s is None or not console.is_terminal:
        console.print(view())
        return
    with (
        Live(view(), console=console, screen=True, auto_refresh=False) as live,
        suppress(KeyboardInterrupt),
    ):
        while True:
            time.sleep(interval_s)
            live.update(view(), refresh=True)


def _side_by_side(rows: Sequence[Sequence[str]], width: int) -> Iterator[list[Sequence[str]]]:
    """Runs of rows that fit side by side, at least one in each; one empty run for no rows."""
    run: list[Sequence[str]] = []
    used = 0
    for row in rows:
        if run and used + _width(row) > width:
            yield run
            run, used = [], 0
        run.append(row)
        used += _width(row)
    yield run


def _plain_table(rows: Iterable[Sequence[str]], header: Sequence[str] | None = None) -> Table:
    """A table of `printable` cells; without markup, and wide cells are folded."""
    rows = list(rows)
    table = Table(box=None, show_header=header is not None)
    for title in header or [""] * len(rows[0]):
        table.add_column(Text(printable(title)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _indented(table: Table) -> Padding:
    """``table``, indented; not padded to the width of the console."""
    return Padding(table, (0, 1), expand=False)


def _width(cells: Iterable[str]) -> int:
    """Width of a column of these cells, with the space around it."""
    return max(map(cell_len, cells)) + 2


def print_json(value: object) -> None:
    """Prints ``value`` for programs."""
    if sys.stdout is not None:
        sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def json_value(value: object) -> object:
    """``value`` as JSON, which has neither NaN nor bytes."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, dict):
        return {name: json_value(each) for name, each in value.items()}
    return value


def cell(value: object, dtype: pa.DataType) -> str:
    """A value for people: at most 40 characters, on one line."""
    text = printable(str(_shortest(value, dtype)))
    return text if len(text) <= 40 else text[:39] + "…"


def _shortest(value: object, dtype: pa.DataType) -> object:
    """``value`` with float16 and float32 in their shortest form.

    As float64, Python would show 0.1 as 0.10000000149011612.
    """
    lists = pa.ListType | pa.LargeListType | pa.FixedSizeListType
    if isinstance(value, list) and isinstance(dtype, lists):
        return [_shortest(item, dtype.value_type) for item in value]
    if isinstance(value, dict) and isinstance(dtype, pa.StructType):
        return {name: _shortest(each, dtype.field(name).type) for name, each in value.items()}
    if isinstance(value, float) and dtype in (pa.float16(), pa.float32()):
        return float(str(numpy_dtype(dtype).type(value)))
    return value
