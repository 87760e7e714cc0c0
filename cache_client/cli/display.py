"""What ``cachectl`` shows: tables for people, JSON for programs. Calls no node."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cache_client.control.forecast import LoadForecast, TableForecast
from cache_client.control.infos import DatasetInfo
from cache_protocol.cli.output import size
from cache_protocol.storage.flat_columns import numpy_dtype

_MAX_NAMES = 6  # of columns on one line
_MOST_NULLS = 20  # columns whose nulls are listed
_FLOAT_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
_FLOATS = re.compile(rf"\b({'|'.join(_FLOAT_NAMES)})\b")
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
    if info.waits:
        console.print(Text(f"  waits        {printable(info.waits)}"), soft_wrap=True)
    for note in info.notes:
        console.print(Text(f"  note         {printable(note)}"), soft_wrap=True)
    console.print(f"  fingerprint  {info.fingerprint}", highlight=False)
    console.print(f"  rows         {info.num_rows:,}", highlight=False)
    console.print(f"  size         {size(info.num_bytes)}", highlight=False)
    fewer = sum(len(node_ids) < info.replicas for node_ids in info.placement.values())
    lacks = f"; {_count(fewer, 'shard')} of {info.num_shards:,} with fewer" if fewer else ""
    console.print(f"  replicas     {info.replicas}{lacks}", highlight=False)
    shards: dict[str, int] = {}
    for node_ids in info.placement.values():
        for node_id in node_ids:
            shards[node_id] = shards.get(node_id, 0) + 1
    held = ", ".join(f"{count} on {node}" for node, count in sorted(shards.items())) or "nowhere"
    console.print(f"  shards       {info.num_shards} ({held})", highlight=False, soft_wrap=True)
    if info.shards_reused:
        reused = f"{info.shards_reused:,} of {_count(info.num_shards, 'shard')}"
        read = _count(info.files_read, "file")
        console.print(f"  reused       {reused}; {read} read", highlight=False)
    if info.nulls:
        console.print(Text(f"  nulls        {_nulls(info.nulls)}"), soft_wrap=True)
    fields = [[field.name, type_name(field.type)] for field in info.schema]
    console.print(_indented(_plain_table(fields, header=["column", "type"])))


def _nulls(nulls: Mapping[str, int]) -> str:
    shown = [f"{printable(name)} {count:,}" for name, count in list(nulls.items())[:_MOST_NULLS]]
    return ", ".join([*shown, "..."] if len(nulls) > _MOST_NULLS else shown)


def query_facts(forecast: LoadForecast) -> list[tuple[str, str]]:
    """How a query runs, and what it reads."""
    order = "fixed" if forecast.ordered else "not fixed (allow_unordered)"
    facts = [("query", forecast.sql_goes), ("because", forecast.why), ("order of rows", order)]
    for table in forecast.tables:
        how = "split by split" if table.by_split else "whole"
        rows = "rows unknown" if table.num_rows is None else f"{table.num_rows:,} rows"
        files = f" in {_count(table.num_files, 'file')} of {size(table.source_bytes)}"
        facts.append(
            (
                f"reads {table.name}",
                f"{how}: {table.format}, {rows}{files if table.source_bytes else ''}, "
                f"{_bytes_of(table)}, {_column_names(table.columns)}",
            )
        )
    return facts


def _bytes_of(table: TableForecast) -> str:
    if not table.bytes_by:
        return f"{size(table.num_bytes)} decoded"
    return f"about {size(table.num_bytes)} decoded, estimated from {table.bytes_by}"


def forecast_facts(forecast: LoadForecast) -> list[tuple[str, str]]:
    """The facts of a forecast, as titles and texts."""
    facts = query_facts(forecast)
    if forecast.whole:
        facts.append(("result", "not known before the query runs"))
        facts.append(("disk to run it", f"{size(forecast.num_bytes)} on the node that runs it"))
        memory = size(forecast.load_memory_bytes)
        facts.append(
            ("memory to load", f"about {memory}, plus that of its sorts, joins and groups")
        )
        return facts
    exact = "" if forecast.rows_exact else " before the query"
    rows = "unknown" if forecast.num_rows is None else f"{forecast.num_rows:,}{exact}"
    facts.append(("rows", rows))
    if forecast.nulls:
        facts.append(("nulls", f"{_nulls(forecast.nulls)}{exact}"))
    in_shards = f"{size(forecast.num_bytes)} in {_count(forecast.num_shards, 'shard')}"
    if forecast.makes_rows:
        facts.append(("decoded", f"unknown; {in_shards}, if each row makes one"))
    else:
        sampled = any(table.bytes_by for table in forecast.tables if table.by_split)
        about = "about " if forecast.guessed_columns or sampled else ""
        facts.append(("decoded", f"{about}{in_shards}"))
    if forecast.guessed_columns:
        names = _column_names(forecast.guessed_columns)
        facts.append(("guessed", f"{names}: the query makes its values, whose length is unknown"))
    if forecast.shards_reused:
        shards = f"{forecast.shards_reused:,} of {_count(forecast.num_shards, 'shard')}"
        facts.append(("reused", f"{shards} that the cache has"))
    nodes = len(forecast.node_bytes)
    fewer = f"; only {nodes} on {_count(nodes, 'node')}" if 0 < nodes < forecast.replicas else ""
    facts.append(("replicas", f"{forecast.replicas}{fewer}"))
    if forecast.node_bytes:
        most = size(max(forecast.node_bytes))
        if_one = ", if each row makes one" if forecast.makes_rows else ""
        facts.append(("on each node", f"{most} at most, on {_count(nodes, 'node')}{if_one}"))
    if forecast.memory_limit_bytes is not None:
        facts.append(("nodes needed", _nodes_needed(forecast, size(forecast.memory_limit_bytes))))
    if forecast.load_memory_bytes:
        memory = size(forecast.load_memory_bytes)
        facts.append(
            ("memory to load", f"about {memory} for each running load, besides the shards")
        )
    if forecast.load_s is not None:
        facts.append(
            ("time to load", f"about {forecast.load_s:.1f} s, at the rate of the last load")
        )
    job = f"{_count(forecast.world_size, 'rank')} with batches of {forecast.batch_size:,}"
    if forecast.steps_per_epoch is not None and forecast.step_bytes is not None:
        facts.append(("steps", f"{forecast.steps_per_epoch:,} an epoch, for {job}"))
        facts.append(("a step", f"{size(forecast.step_bytes)} for each rank"))
    return facts


def _nodes_needed(forecast: LoadForecast, limit: str) -> str:
    if not forecast.bytes_known:
        return f"unknown; each has a limit of {limit}"
    if forecast.nodes_needed is None:
        return (
            f"no number is enough: one shard ({size(forecast.largest_shard_bytes)}) exceeds the "
            f"limit of {limit}; lower target_shard_bytes, or write smaller row groups"
        )
    fits = {True: "", False: "; it does not fit", None: "; it may fit after the query"}
    return f"{forecast.nodes_needed}, of {limit} each{fits[forecast.fits]}"


def _column_names(columns: Sequence[str]) -> str:
    if len(columns) > _MAX_NAMES:
        return f"{len(columns)} columns"
    return f"column{'' if len(columns) == 1 else 's'} {', '.join(columns)}"


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


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def type_name(dtype: pa.DataType | str) -> str:
    """The name of an Arrow type, with floats named as in torch and numpy."""
    return _FLOATS.sub(lambda found: _FLOAT_NAMES[found[0]], str(dtype))


def cell(value: object, dtype: pa.DataType) -> str:
    """A value for people: at most 40 characters, on one line."""
    text = printable(str(_shortest(value, dtype)))
    return text if len(text) <= 40 else text[:39] + "…"


def printable(text: str) -> str:
    """``text`` with control characters escaped as in Python, so that no terminal obeys them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


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
