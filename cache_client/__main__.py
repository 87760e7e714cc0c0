"""``cachectl``: the only place of this package that reads argv."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cache_client.client import CacheClient, DatasetInfo
from cache_client.forecast import LoadForecast
from protos.errors import CacheError, ConfigError, LoadError, RequestError
from protos.job_settings import asks_for_dataset, spec_from_env
from protos.spec import DatasetSpec, parse_bytes
from protos.trainjob_status import TrainJobStatus

EXIT_FAILURE = 1
EXIT_DATA = 65  # EX_DATAERR
EXIT_CONFIG = 78  # EX_CONFIG

app = typer.Typer(
    name="cachectl",
    help="Load, list and drop the datasets of a cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Endpoint = Annotated[
    str | None,
    typer.Option(envvar="CACHE_ENDPOINT", help="grpc://HOST:PORT of any cache node."),
]
TimeoutS = Annotated[float, typer.Option(help="Seconds to wait for an answer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
SpecFile = Annotated[Path, typer.Argument(help="YAML file: name, source and so on.")]
Name = Annotated[str, typer.Argument(help="Name of a dataset.")]

_MOST_NAMES = 6  # of columns in one line
# In a pipe there is no width to keep to.
_console = Console(width=None if sys.stdout.isatty() else 250)


@app.command()
def load(
    spec: Annotated[Path | None, typer.Argument(help="YAML file: name, source and so on.")] = None,
    from_env: Annotated[
        bool,
        typer.Option(
            "--from-env", help="Instead: what STORAGE_URI and the settings beside it mean."
        ),
    ] = False,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="With --from-env: it may name no dataset at all.")
    ] = False,
    endpoint: Endpoint = None,
    wait: Annotated[bool, typer.Option(help="Until the dataset is ready.")] = True,
    timeout_s: Annotated[
        float | None, typer.Option(help="Seconds to wait for the load; default: no limit.")
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="A new version, also of a database.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Load a dataset; attaches at once when this version of it is there already."""
    if from_env and allow_empty and not asks_for_dataset(os.environ):
        print("nothing to load: no dataset in the environment", file=sys.stderr)
        return
    client, wanted = _what_to_load(spec, from_env, endpoint)
    with ExitStack() as stack:
        status = TrainJobStatus.from_env(os.environ) if from_env else None
        info = client.load(
            wanted,
            wait=wait,
            progress=not as_json,
            on_progress=None if status is None else stack.enter_context(status).show,
            timeout_s=timeout_s,
            refresh=refresh,
        )
    _show_dataset(info, as_json)


def _what_to_load(
    path: Path | None, from_env: bool, endpoint: str | None
) -> tuple[CacheClient, DatasetSpec]:
    """The cache and the spec; every bad setting of both is named at once."""
    if (path is None) != from_env:
        raise ConfigError("give either a SPEC file or --from-env")
    problems: list[str] = []
    spec: DatasetSpec | None = None
    client: CacheClient | None = None
    try:
        spec = spec_from_env(os.environ) if path is None else DatasetSpec.from_yaml(path)
    except ConfigError as error:
        problems.append(str(error))
    try:
        client = CacheClient(endpoint)
    except ConfigError as error:
        problems.append(str(error))
    if client is None or spec is None:
        raise ConfigError("; ".join(problems))
    return client, spec


@app.command()
def plan(
    spec: SpecFile,
    endpoint: Endpoint = None,
    nodes: Annotated[int | None, typer.Option(help="Default: those that are alive.")] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Of each node, such as 8GiB; default: theirs.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Trainer processes.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Rows of a rank in a step.")] = 1024,
    timeout_s: TimeoutS = 600.0,
    as_json: AsJson = False,
) -> None:
    """Say what a load would come to: rows, bytes, nodes, steps. Loads nothing."""
    try:
        limit = parse_bytes(memory_limit) if memory_limit is not None else None
    except ValueError as error:
        raise ConfigError(f"--memory-limit {error}") from None
    forecast = CacheClient(endpoint).plan(
        spec,
        num_nodes=nodes,
        memory_limit_bytes=limit,
        world_size=ranks,
        batch_size=batch_size,
        timeout_s=timeout_s,
    )
    if as_json:
        _print_json(_forecast_json(forecast))
    else:
        _show_facts(forecast.name, _forecast_facts(forecast))


@app.command()
def explain(
    spec: SpecFile, endpoint: Endpoint = None, timeout_s: TimeoutS = 600.0, as_json: AsJson = False
) -> None:
    """Say which way the query of a spec goes, and why: split by split, or whole on one node."""
    forecast = CacheClient(endpoint).plan(spec, timeout_s=timeout_s)
    if as_json:
        _print_json(_forecast_json(forecast))
    else:
        _show_facts(forecast.name, _way_facts(forecast))


@app.command("ls")
def list_datasets(
    endpoint: Endpoint = None, timeout_s: TimeoutS = 30.0, as_json: AsJson = False
) -> None:
    """List the datasets."""
    datasets = CacheClient(endpoint, timeout_s=timeout_s).datasets()
    if as_json:
        _print_json([_dataset_json(info) for info in datasets])
        return
    _show_rows(
        ["name", "state", "rows", "size", "shards", "fingerprint"],
        [
            [
                info.name,
                info.state,
                f"{info.num_rows:,}",
                _size(info.num_bytes),
                str(info.num_shards),
                info.fingerprint[:12],
            ]
            for info in datasets
        ],
    )


@app.command()
def describe(
    name: Name, endpoint: Endpoint = None, timeout_s: TimeoutS = 30.0, as_json: AsJson = False
) -> None:
    """Show one dataset: columns, size and where its shards are."""
    _show_dataset(CacheClient(endpoint, timeout_s=timeout_s).describe(name), as_json)


@app.command()
def drop(
    name: Name, endpoint: Endpoint = None, timeout_s: TimeoutS = 30.0, as_json: AsJson = False
) -> None:
    """Drop a dataset from every node."""
    CacheClient(endpoint, timeout_s=timeout_s).drop(name)
    if as_json:
        _print_json({"dropped": name})
    else:
        _console.print(f"dropped {name}")


@app.command()
def nodes(endpoint: Endpoint = None, timeout_s: TimeoutS = 30.0, as_json: AsJson = False) -> None:
    """List the cache nodes."""
    found = CacheClient(endpoint, timeout_s=timeout_s).nodes()
    if as_json:
        _print_json([asdict(node) for node in found])
        return
    _show_rows(
        ["node", "alive", "flight", "shards", "stored", "limit", "cache dir"],
        [
            [
                node.id,
                "yes" if node.alive else "no",
                node.flight_location,
                str(node.stored_shards),
                _size(node.stored_bytes),
                _size(node.memory_limit_bytes) if node.memory_limit_bytes else "none",
                node.cache_dir,
            ]
            for node in found
        ],
    )


@app.command()
def head(
    name: Name,
    num_rows: Annotated[int, typer.Option("-n", "--num-rows", min=0)] = 5,
    endpoint: Endpoint = None,
    timeout_s: TimeoutS = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show the first rows of a dataset, in source order."""
    batch = CacheClient(endpoint, timeout_s=timeout_s).head(name, num_rows)
    rows = batch.to_pylist()
    if as_json:
        _print_json([{key: _json_value(value) for key, value in row.items()} for row in rows])
        return
    _show_rows(batch.schema.names, [[_cell(value) for value in row.values()] for row in rows])


@app.command("run-local")
def run_local(
    train_job: Annotated[
        Path, typer.Argument(help="YAML file with a TrainJob, and its Secrets if it has any.")
    ],
    runtimes: Annotated[
        Path | None,
        typer.Option(help="Folder or file of training runtimes; default: those of this package."),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for every container; may be repeated.")
    ] = None,
    render: Annotated[
        bool, typer.Option("--render", help="Print the JobSet that a cluster would make of it.")
    ] = False,
) -> None:
    """Run a TrainJob with its runtime as processes of this machine: a tool for development."""
    try:
        import runtimes as shipped
        from runtimes import local
    except ImportError as error:
        raise ConfigError(
            f"run-local needs {error.name}: pip install 'trainer-data-cache[server,kubernetes]'"
        ) from None
    manifests = local.read_manifests(train_job, runtimes or shipped.MANIFESTS)
    jobset = local.render(manifests.train_job, manifests.runtime)
    if render:
        print(yaml.safe_dump(jobset, sort_keys=False), end="")
        return
    given = dict(_variable(text) for text in env or ())
    print("run-local: a tool for development: no images, no isolation", file=sys.stderr)

    def event(text: str) -> None:
        print(f"run-local: {text}", file=sys.stderr, flush=True)

    def line(pod: str, container: str, text: str) -> None:
        print(f"{pod}/{container} | {text}", flush=True)

    code = local.run_local(
        manifests,
        jobset,
        environment=os.environ,
        extra_environment=given,
        console=local.Console(event=event, line=line),
    )
    raise typer.Exit(code)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"--env must be NAME=VALUE, got {text!r}")
    return name, value


def main() -> None:
    """Entry point: errors of the tree become one line and an exit code.

    78 (EX_CONFIG) for arguments and specs, 65 (EX_DATAERR) for data and queries, 1 for the rest.
    """
    try:
        app()
    except CacheError as error:
        message = " ".join(str(error).split("\n"))
        print(f"cachectl: {type(error).__name__}: {message}", file=sys.stderr)
        if isinstance(error, ConfigError):
            sys.exit(EXIT_CONFIG)
        sys.exit(EXIT_DATA if isinstance(error, LoadError | RequestError) else EXIT_FAILURE)


def _show_dataset(info: DatasetInfo, as_json: bool) -> None:
    if as_json:
        _print_json(_dataset_json(info))
        return
    _console.print(f"[bold]{info.name}[/bold]  {info.state}", highlight=False)
    if info.error:
        _console.print(Text(f"  error        {info.error}"), soft_wrap=True)
    _console.print(f"  fingerprint  {info.fingerprint}", highlight=False)
    _console.print(f"  rows         {info.num_rows:,}", highlight=False)
    _console.print(f"  size         {_size(info.num_bytes)}", highlight=False)
    shards: dict[str, int] = {}
    for node_ids in info.placement.values():
        for node_id in node_ids:
            shards[node_id] = shards.get(node_id, 0) + 1
    held = ", ".join(f"{count} on {node}" for node, count in sorted(shards.items())) or "nowhere"
    _console.print(f"  shards       {info.num_shards} ({held})", highlight=False, soft_wrap=True)
    fields = [
        [
            field.name,
            str(field.type),
            (field.metadata or {}).get(b"cache.source_type", b"").decode(),
        ]
        for field in info.schema
    ]
    _console.print(Padding(_table(fields, header=["column", "type", "made from"]), (0, 1)))


def _way_facts(forecast: LoadForecast) -> list[tuple[str, str]]:
    order = "their own" if forecast.ordered else "none: allow_unordered"
    facts = [("query", forecast.sql_goes), ("because", forecast.why), ("order of rows", order)]
    for table in forecast.tables:
        how = "split by split" if table.by_split else "whole"
        rows = "rows unknown" if table.num_rows is None else f"{table.num_rows:,} rows"
        files = f" in {_count(table.num_files, 'file')} of {_size(table.source_bytes)}"
        facts.append(
            (
                f"reads {table.name}",
                f"{how}: {table.format}, {rows}{files if table.source_bytes else ''}, "
                f"{_size(table.num_bytes)} decoded, {_column_names(table.columns)}",
            )
        )
    return facts


def _forecast_facts(forecast: LoadForecast) -> list[tuple[str, str]]:
    facts = _way_facts(forecast)
    if forecast.whole:
        facts.append(("result", "not known before the query has run"))
        facts.append(("memory to run it", _size(forecast.num_bytes)))
        return facts
    exact = "" if forecast.rows_exact else " before the query"
    rows = "unknown" if forecast.num_rows is None else f"{forecast.num_rows:,}{exact}"
    facts.append(("rows", rows))
    if forecast.filtered_rows is not None:
        share = forecast.filtered_rows / forecast.num_rows if forecast.num_rows else 0.0
        facts.append(
            (
                "after the filter",
                f"about {forecast.filtered_rows:,} rows, "
                f"{_size(round(forecast.num_bytes * share))}, by statistics",
            )
        )
    facts.append(
        ("decoded", f"{_size(forecast.num_bytes)} in {_count(forecast.num_shards, 'shard')}")
    )
    facts.append(("replicas", str(forecast.replicas)))
    if forecast.node_bytes:
        nodes = _count(len(forecast.node_bytes), "node")
        facts.append(("on each node", f"{_size(max(forecast.node_bytes))} at most, on {nodes}"))
    if forecast.memory_limit_bytes is not None:
        needed = forecast.nodes_needed or "no number of nodes is enough: a shard is larger"
        fits = "" if forecast.fits else "; it does not fit"
        facts.append(
            ("nodes needed", f"{needed}, of {_size(forecast.memory_limit_bytes)} each{fits}")
        )
    if forecast.load_s is not None:
        facts.append(("time to load", f"about {forecast.load_s:.1f} s, as the last load went"))
    job = f"{_count(forecast.world_size, 'rank')} with batches of {forecast.batch_size:,}"
    if forecast.steps_per_epoch is not None and forecast.step_bytes is not None:
        about = "" if forecast.rows_exact else "about "
        facts.append(("steps", f"{about}{forecast.steps_per_epoch:,} an epoch, for {job}"))
        facts.append(("a step", f"{_size(forecast.step_bytes)} for each rank"))
    return facts


def _column_names(columns: Sequence[str]) -> str:
    if len(columns) > _MOST_NAMES:
        return f"{len(columns)} columns"
    return f"columns {', '.join(columns)}"


def _forecast_json(forecast: LoadForecast) -> dict[str, Any]:
    columns = {field.name: str(field.type) for field in forecast.schema}
    return {
        **asdict(replace(forecast, schema=None)),
        "sql_goes": forecast.sql_goes,
        "schema": columns,
        "fits": forecast.fits,
    }


def _show_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    _console.print(Text(title, style="bold"))
    _console.print(Padding(_table(facts), (0, 1)))


def _dataset_json(info: DatasetInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "state": info.state,
        "error": info.error,
        "fingerprint": info.fingerprint,
        "num_rows": info.num_rows,
        "num_bytes": info.num_bytes,
        "num_shards": info.num_shards,
        "columns": {field.name: str(field.type) for field in info.schema},
        "placement": {str(shard): list(nodes) for shard, nodes in info.placement.items()},
    }


def _show_rows(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; one that is wider than the terminal with its columns below each other instead."""
    columns = [list(column) for column in zip(names, *rows, strict=True)]
    if sum(map(_width, columns)) <= _console.width:
        _console.print(_table(rows, header=names))
        return
    for index, chunk in enumerate(_side_by_side(rows, _console.width - _width(names))):
        if index:
            _console.print()
        _console.print(_table(list(zip(names, *chunk, strict=True))))


def _side_by_side(rows: Sequence[Sequence[str]], width: int) -> Iterator[list[Sequence[str]]]:
    """Runs of rows that fit beside each other, at least one a run; one empty run of no rows."""
    run: list[Sequence[str]] = []
    used = 0
    for row in rows:
        if run and used + _width(row) > width:
            yield run
            run, used = [], 0
        run.append(row)
        used += _width(row)
    yield run


def _table(rows: Iterable[Sequence[str]], header: Sequence[str] | None = None) -> Table:
    """``rows`` as they are: no word of theirs is markup, and what is too wide is folded."""
    rows = list(rows)
    table = Table(box=None, show_header=header is not None)
    for title in header or [""] * len(rows[0]):
        table.add_column(Text(title), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _width(cells: Iterable[str]) -> int:
    """Width of a column of these cells, with the space around it."""
    return max(map(cell_len, cells)) + 2


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, default=str))


def _json_value(value: object) -> object:
    """``value`` in what JSON knows: it has neither NaN nor bytes."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return value


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{num_bytes} B"
        size /= 1024
    return f"{size:.1f} TiB"


def _cell(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:39] + "…"


if __name__ == "__main__":
    main()
