"""``cachectl``: its commands for datasets and TrainJobs, and its exit codes. Reads argv."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import yaml

from cache_client.cli.app import (
    EXIT_FAILURE,
    EXIT_NOT_SHOWN,
    AsJson,
    Endpoint,
    IntervalS,
    Name,
    SpecFile,
    TimeoutS,
    app,
    client_of,
)
from cache_client.cli.display import (
    cell,
    console,
    dataset_json,
    forecast_json,
    json_value,
    print_json,
    show_dataset,
    show_facts,
    show_line,
    show_live,
    show_rows,
    table,
    time_text,
)
from cache_client.cli.doctor import examine
from cache_client.cli.forget_commands import forget, forgotten, verify_attestation
from cache_client.cli.job_commands import audit_job, jobs, rows, seen, top
from cache_client.cli.node_commands import drain, functions, nodes, undrain
from cache_client.cli.stats_command import stats
from cache_client.cli.step_rows import NotShownError
from cache_client.control.client import MAX_MEMORY_BYTES, MAX_NODES, CacheClient
from cache_client.control.forecast import forecast_facts, query_facts
from cache_client.control.infos import DatasetInfo, OrphanInfo, ShareInfo
from cache_client.job.arguments import seconds_problems
from cache_protocol.cli.exits import tell
from cache_protocol.cli.facts import printable
from cache_protocol.cli.output import checked_output, size
from cache_protocol.datasets.dataset_spec import DatasetSpec, parse_bytes
from cache_protocol.datasets.job_options import with_annotations
from cache_protocol.datasets.job_settings import asks_for_dataset, spec_from_env
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    LoadError,
    checked,
    exit_code,
    missing_package,
    some_of,
)


@app.command()
def load(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="SPEC|NAME", help="YAML file that describes the dataset, or its name."
        ),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SOURCE]...", help="With a name: paths, globs or URIs to load."),
    ] = None,
    sql: Annotated[
        str | None, typer.Option(help="With SOURCE: a query over the table source.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="With SOURCE: nodes that hold each shard.")
    ] = None,
    from_env: Annotated[
        bool,
        typer.Option(
            "--from-env",
            help="Instead of SPEC, use STORAGE_URI and the other variables of a TrainJob.",
        ),
    ] = False,
    allow_empty: Annotated[
        bool,
        typer.Option("--allow-empty", help="With --from-env: do nothing if no dataset is set."),
    ] = False,
    endpoint: Endpoint = None,
    wait: Annotated[bool, typer.Option(help="Wait until the dataset is ready.")] = True,
    timeout_s: Annotated[
        float | None, typer.Option(help="Seconds to wait for the load.  [default: no limit]")
    ] = None,
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh",
            help="Load a source again that cannot tell whether it changed, such as a database. "
            "Of files and lakes, every load reads only what is new.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Load a dataset. Attaches at once if the same version is already loaded."""
    environ, of_job = with_annotations(os.environ if from_env else {})
    of_job.refuse_size()
    if from_env and allow_empty and not asks_for_dataset(environ):
        print("nothing to load: no dataset in the environment", file=sys.stderr)
        return
    options = {"sql": sql, "replicas": replicas}
    given = {name: value for name, value in options.items() if value is not None}
    client, wanted = _load_arguments(
        spec, source or [], given, environ if from_env else None, endpoint, timeout_s
    )
    try:
        info = client.load(
            wanted, wait=wait, progress=not as_json, timeout_s=timeout_s, refresh=refresh
        )
    except KeyboardInterrupt:
        name = printable(wanted.name)
        print(f"the load goes on; to cancel it: cachectl drop {name}", file=sys.stderr)
        raise
    show_dataset(info, as_json)


def _load_arguments(
    name: str | None,
    source: list[str],
    options: dict[str, Any],
    environ: Mapping[str, str] | None,
    endpoint: str | None,
    timeout_s: float | None,
) -> tuple[CacheClient, DatasetSpec]:
    """The cache and the spec; one error names every bad setting."""
    if (name is None) != (environ is not None):
        raise ConfigError("give either a SPEC file or --from-env, or a NAME and a SOURCE")
    if options and not source:
        raise ConfigError(f"{', '.join(f'--{option}' for option in options)} needs a SOURCE")
    problems = [] if timeout_s is None else seconds_problems("--timeout-s", timeout_s)

    def spec() -> DatasetSpec:
        if name is None:
            return spec_from_env(environ or {})
        return DatasetSpec(name, source, **options) if source else DatasetSpec.from_yaml(name)

    return _cache_and_spec(problems, endpoint, spec)


def _cache_and_spec(
    problems: list[str], endpoint: str | None, make_spec: Callable[[], DatasetSpec]
) -> tuple[CacheClient, DatasetSpec]:
    spec = checked(problems, make_spec)
    client = checked(problems, lambda: client_of(endpoint))
    if problems or client is None or spec is None:
        raise ConfigError("; ".join(problems))
    return client, spec


@app.command()
def plan(
    spec: SpecFile,
    endpoint: Endpoint = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_NODES,
            help="Nodes of the cache.  [default: the nodes that are alive]",
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(help="Memory limit of each node, such as 8GiB.  [default: its own limit]"),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Trainer processes of the job.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per rank and step.")] = 1024,
    timeout_s: TimeoutS = 600.0,
    as_json: AsJson = False,
) -> None:
    """Show rows, memory, nodes and steps of a load. Loads nothing.

    Ends with 65, and with the error of the load, where the load is certain to fail.
    """
    problems = seconds_problems("--timeout-s", timeout_s)
    limit = checked(problems, lambda: _memory_limit(memory_limit))
    client, wanted = _cache_and_spec(problems, endpoint, lambda: DatasetSpec.from_yaml(spec))
    forecast = client.plan(
        wanted,
        num_nodes=nodes,
        memory_limit_bytes=limit,
        world_size=ranks,
        batch_size=batch_size,
        timeout_s=timeout_s,
    )
    if as_json:
        print_json(forecast_json(forecast))
    else:
        show_facts(forecast.name, forecast_facts(forecast))
    if forecast.refusal:
        raise LoadError(forecast.refusal)


def _memory_limit(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        limit = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--memory-limit {error}") from None
    if not 1 <= limit <= MAX_MEMORY_BYTES:
        raise ConfigError(f"--memory-limit must be at least 1 byte, below 16EiB, got {text!r}")
    return limit


@app.command()
def explain(
    spec: SpecFile, endpoint: Endpoint = None, timeout_s: TimeoutS = 600.0, as_json: AsJson = False
) -> None:
    """Show how the query of a spec runs, and why. It runs split by split, or whole on one node."""
    problems = seconds_problems("--timeout-s", timeout_s)
    client, wanted = _cache_and_spec(problems, endpoint, lambda: DatasetSpec.from_yaml(spec))
    forecast = client.plan(wanted, timeout_s=timeout_s)
    if as_json:
        print_json(forecast_json(forecast))
    else:
        show_facts(forecast.name, query_facts(forecast))


@app.command("ls")
def list_datasets(
    watch: Annotated[
        bool, typer.Option("-w", "--watch", help="Show it again and again, until Ctrl-C.")
    ] = False,
    interval_s: IntervalS = 1.0,
    orphans: Annotated[
        bool,
        typer.Option(
            "--orphans", help="List files on nodes instead that belong to no dataset and no write."
        ),
    ] = False,
    endpoint: Endpoint = None,
    timeout_s: TimeoutS = 30.0,
    as_json: AsJson = False,
) -> None:
    """List the datasets."""
    client = client_of(endpoint, timeout_s=timeout_s)
    if orphans:
        if watch:
            raise ConfigError("--orphans and --watch do not go together")
        _show_orphans(client.orphans(), as_json)
        return
    if as_json and watch:
        raise ConfigError("--watch shows tables: leave out --json")
    if watch:
        show_live(lambda: table(_DATASET_COLUMNS, _dataset_rows(client.datasets())), interval_s)
        return
    datasets = client.datasets()
    if as_json:
        print_json([dataset_json(info) for info in datasets])
        return
    show_rows(_DATASET_COLUMNS, _dataset_rows(datasets))
    for info in datasets:
        if info.state == "failed":
            show_line(f"{info.name} failed; for the reason: cachectl describe {info.name}")
        if info.awaited:
            show_line(f"{info.name} waits for node {some_of(info.awaited, ', node ')}")
    for share in client.shares():
        if share.guaranteed_bytes or share.largest_bytes is not None:
            show_line(_share_text(share))


def _share_text(share: ShareInfo) -> str:
    sizes = [f"{size(share.guaranteed_bytes)} guaranteed"] if share.guaranteed_bytes else []
    if share.largest_bytes is not None:
        sizes.append(f"{size(share.largest_bytes)} at most")
    return f"namespace {share.namespace} holds {size(share.num_bytes)}: {', '.join(sizes)}"


def _show_orphans(orphans: list[OrphanInfo], as_json: bool) -> None:
    if as_json:
        print_json([asdict(orphan) for orphan in orphans])
        return
    show_rows(
        ["dataset", "fingerprint", "shards", "size", "nodes"],
        [
            [
                orphan.dataset,
                orphan.fingerprint,
                str(orphan.num_shards),
                size(orphan.num_bytes),
                some_of(orphan.node_ids),
            ]
            for orphan in orphans
        ],
    )


_DATASET_COLUMNS = ["name", "state", "rows", "size", "shards", "kept", "last read", "fingerprint"]


def _dataset_rows(datasets: list[DatasetInfo]) -> list[list[str]]:
    return [
        [
            info.name,
            info.state,
            f"{info.num_rows:,}",
            size(info.num_bytes),
            str(info.num_shards)
            if info.state != "loading"
            else f"{sum(map(bool, info.placement.values()))} of {info.num_shards}",
            _kept(info),
            "" if info.last_read_s is None else time_text(info.last_read_s),
            info.fingerprint[:12],
        ]
        for info in datasets
    ]


def _kept(info: DatasetInfo) -> str:
    priority = f"priority {info.priority}" if info.priority else ""
    return ", ".join(filter(None, ["pinned" * info.pinned, priority]))


app.command()(nodes)
app.command()(drain)
app.command()(functions)
app.command()(undrain)
app.command()(jobs)
app.command()(top)
app.command("audit")(audit_job)
app.command()(rows)
app.command()(seen)
app.command()(forget)
app.command()(forgotten)
app.command("verify-attestation")(verify_attestation)
app.command()(stats)


@app.command()
def doctor(endpoint: Endpoint = None, timeout_s: TimeoutS = 10.0, as_json: AsJson = False) -> None:
    """Check this machine and the cache.

    Says what is wrong, and how to mend it.
    """
    checks = examine(client_of(endpoint, timeout_s=timeout_s), version("trainer-data-cache"))
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        show_rows(
            ["check", "outcome", "found", "what to do"],
            [[check.name, check.outcome, check.found, check.advice] for check in checks],
        )
    raise typer.Exit(EXIT_FAILURE if any(check.outcome == "bad" for check in checks) else 0)


@app.command()
def describe(
    name: Name, endpoint: Endpoint = None, timeout_s: TimeoutS = 30.0, as_json: AsJson = False
) -> None:
    """Show the columns, size and shards of a dataset."""
    show_dataset(client_of(endpoint, timeout_s=timeout_s).describe(name), as_json)


@app.command()
def drop(
    name: Name, endpoint: Endpoint = None, timeout_s: TimeoutS = 30.0, as_json: AsJson = False
) -> None:
    """Drop a dataset from every node."""
    client_of(endpoint, timeout_s=timeout_s).drop(name)
    if as_json:
        print_json({"dropped": name})
    else:
        console.print(f"dropped {name}")


@app.command()
def keep(
    name: Name,
    pinned: Annotated[
        bool | None,
        typer.Option("--pinned/--not-pinned", help="Never evict it.", show_default=False),
    ] = None,
    priority: Annotated[
        int | None, typer.Option(help="Those of lower priority are evicted first.")
    ] = None,
    endpoint: Endpoint = None,
    timeout_s: TimeoutS = 30.0,
    as_json: AsJson = False,
) -> None:
    """Pin a dataset, or set its priority."""
    if pinned is None and priority is None:
        raise ConfigError("give --pinned, --not-pinned or --priority")
    client = client_of(endpoint, timeout_s=timeout_s)
    show_dataset(client.keep(name, pinned=pinned, priority=priority), as_json)


@app.command()
def drop_orphans(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Only those of this dataset.")] = "",
    endpoint: Endpoint = None,
    timeout_s: TimeoutS = 30.0,
    as_json: AsJson = False,
) -> None:
    """Drop what `ls --orphans` lists, and print it."""
    _show_orphans(client_of(endpoint, timeout_s=timeout_s).drop_orphans(name), as_json)


@app.command()
def head(
    name: Name,
    num_rows: Annotated[int, typer.Option("-n", "--num-rows", min=0, help="How many rows.")] = 5,
    endpoint: Endpoint = None,
    timeout_s: TimeoutS = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show the first rows of a dataset, in source order."""
    batch = client_of(endpoint, timeout_s=timeout_s).head(name, num_rows)
    rows = batch.to_pylist()
    if as_json:
        print_json([{key: json_value(value) for key, value in row.items()} for row in rows])
        return
    types = batch.schema.types
    show_rows(batch.schema.names, [[*map(cell, row.values(), types)] for row in rows])


@app.command("run-local")
def run_local(
    train_job: Annotated[
        Path,
        typer.Argument(metavar="TRAIN_JOB", help="YAML file with a TrainJob and its Secrets."),
    ],
    runtimes: Annotated[
        Path | None,
        typer.Option(help="Folder or file of training runtimes.  [default: the shipped ones]"),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Set in every container; may be repeated."),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=ADDRESS", help="Service outside of the job; may be repeated."),
    ] = None,
    render: Annotated[
        bool, typer.Option("--render", help="Only print the JobSet that a cluster would create.")
    ] = False,
) -> None:
    """Run a TrainJob as processes of this machine."""
    try:
        import cache_runtimes as shipped
        from cache_runtimes import local
    except ImportError as error:
        raise ConfigError(missing_package(error, "run-local", "server,kubernetes")) from None
    manifests = local.read_manifests(train_job, runtimes or shipped.MANIFESTS)
    if render:
        jobset = local.render(manifests.train_job, manifests.runtime)
        print(yaml.safe_dump(jobset, sort_keys=False), end="")
        return
    given = dict(_pair("--env must be NAME=VALUE", text) for text in env or ())
    hosts = dict(_pair("--host must be NAME=ADDRESS", text) for text in host or ())
    print("run-local: for development only: no images, no isolation", file=sys.stderr)

    def event(text: str) -> None:
        print(f"run-local: {text}", file=sys.stderr, flush=True)

    def line(pod: str, container: str, text: str) -> None:
        print(f"{pod}/{container} | {text}", flush=True)

    code = local.run_local(
        manifests,
        environment=os.environ,
        extra_environment=given,
        console=local.Console(event=event, line=line),
        hosts=hosts,
    )
    raise typer.Exit(code)


@app.command()
def diagnose(
    train_job: Annotated[str, typer.Argument(metavar="TRAIN_JOB", help="Name of a TrainJob.")],
    namespace: Annotated[
        str | None, typer.Option("-n", "--namespace", help="[default: that of the kubeconfig]")
    ] = None,
    kubeconfig: Annotated[
        str | None, typer.Option(help="[default: $KUBECONFIG or ~/.kube/config]")
    ] = None,
    timeout_s: TimeoutS = 20.0,
    as_json: AsJson = False,
) -> None:
    """Say why a TrainJob does not train, and what to do.

    Ends with 1 where the TrainJob failed, is absent or has a finding, else with 0.
    """
    try:
        from cache_runtimes import diagnosis
    except ImportError as error:
        raise ConfigError(missing_package(error, "diagnose", "server,kubernetes")) from None
    place, objects = diagnosis.read_objects(
        train_job, namespace, kubeconfig=kubeconfig, timeout_s=timeout_s
    )
    found = diagnosis.diagnose(train_job, place, objects)
    if as_json:
        print_json(asdict(found))
    else:
        print(found.state)
        for finding in found.findings:
            print(f"\n{finding.where}: {finding.what}")
            if finding.remedy:
                print(f"  {finding.remedy}")
    if not found.is_well:
        raise typer.Exit(EXIT_FAILURE)


def _pair(rule: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"{rule}, got {text!r}")
    return name, value


def main() -> None:
    """Runs the command; turns a CacheError into one line and an exit code.

    Exit codes: 2 for a command line that cannot be parsed, 78 (EX_CONFIG) for other bad arguments
    and specs, 65 (EX_DATAERR) for data and queries, 75 (EX_TEMPFAIL) for sources that do not
    answer, 1 for other errors.
    ``audit``, ``rows`` and ``seen`` end with 4 for what cannot be shown.
    """
    try:
        with checked_output():
            app()
    except CacheError as error:
        tell("cachectl", printable(f"{type(error).__name__}: {error}"), os.environ)
        sys.exit(EXIT_NOT_SHOWN if isinstance(error, NotShownError) else exit_code(error))


if __name__ == "__main__":
    main()
