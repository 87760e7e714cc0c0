"""The commands of `cachectl` for training jobs: which there are, and what they read."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Final

import typer
import typer.core

from cache_client.cli.app import (
    EXIT_FAILURE,
    EXIT_NOT_SHOWN,
    AsJson,
    Endpoint,
    IntervalS,
    TimeoutS,
    client_of,
    connection_of,
)
from cache_client.cli.audit_files import evidence_of, read_records, read_states
from cache_client.cli.display import (
    cell,
    console,
    json_value,
    print_json,
    show_line,
    show_live,
    show_rows,
)
from cache_client.cli.jobs_display import JOB_COLUMNS, audit_lines, job_json, job_row, top_view
from cache_client.cli.seen import (
    Sighting,
    Wanted,
    last_clean,
    seen_by_record,
    seen_by_state,
    sighting_json,
)
from cache_client.cli.step_rows import (
    NotShownError,
    Question,
    StepRow,
    question_of,
    record_of,
    step_rows,
    view_of_argument,
)
from cache_client.control.client import CacheClient
from cache_client.control.infos import JobInfo
from cache_client.job.connection import access_to
from cache_client.order.audit import audit
from cache_client.order.states import OrderState
from cache_client.views.view import Shuffle
from cache_protocol.cli.facts import printable
from cache_protocol.errors import CacheError, ConfigError, DatasetNotFoundError, some_of

_LOOK_S: Final = 0.5  # between two looks for a job that has not reported


def jobs(endpoint: Endpoint = None, timeout_s: TimeoutS = 30.0, as_json: AsJson = False) -> None:
    """List training jobs, and what each waits for."""
    found = client_of(endpoint, timeout_s=timeout_s).jobs()
    if as_json:
        print_json([job_json(job) for job in found])
        return
    show_rows(JOB_COLUMNS, [job_row(job) for job in found])


def top(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Only this job.")] = None,
    interval_s: IntervalS = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once.")] = False,
    endpoint: Endpoint = None,
    timeout_s: TimeoutS = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show live which rank waits for what.

    Waits for the first report of JOB: with --once or --json, and where the output is no terminal,
    for --timeout-s seconds.
    """
    client = client_of(endpoint, timeout_s=timeout_s)
    is_live = not once and not as_json and console.is_terminal
    deadline = time.monotonic() + timeout_s

    def found() -> list[JobInfo]:
        """The jobs; none before the first report of the one that was asked for."""
        while True:
            try:
                return [each for each in client.jobs(job or "") if each.live or job or as_json]
            except DatasetNotFoundError:
                if is_live:
                    return []
                if time.monotonic() + _LOOK_S > deadline:
                    raise
            time.sleep(_LOOK_S)

    if as_json:
        print_json([job_json(each) for each in found()])
        return
    show_live(lambda: top_view(found(), client.nodes(), job or ""), interval_s if is_live else None)


def audit_job(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Name of a job.")] = None,
    state: Annotated[
        list[Path] | None,
        typer.Option(help="Instead of JOB: state file of one rank (JSON or torch); repeat it."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed that the job should have used.")] = None,
    endpoint: Endpoint = None,
    timeout_s: TimeoutS = 30.0,
    as_json: AsJson = False,
) -> None:
    """Prove which rows a job was given, and how often.

    Else names the first wrong step of each epoch.

    Ends with 0 if everything is proven, with 1 if something is wrong, and with 4 if it cannot be
    shown.
    """
    if (job is None) == (not state):
        raise ConfigError("give either a JOB or --state FILE")
    if state:
        by_dataset = {"": [evidence for path in state for evidence in read_records(path)]}
    else:
        found = client_of(endpoint, timeout_s=timeout_s).jobs(job or "", audits=True)
        by_dataset = {info.dataset: evidence_of(info) for info in found}
    results = {name: audit(evidence, seed=seed) for name, evidence in by_dataset.items()}
    if as_json:
        print_json(
            [{"dataset": name, **asdict(one)} for name, every in results.items() for one in every]
        )
    else:
        for name, every in results.items():
            if name:
                show_line(f"dataset {printable(name)}")
            for line in [line for one in every for line in audit_lines(one)]:
                show_line(line)
            if not every:
                show_line(
                    "cannot be shown: there is no record: the job has audit='off', its readers "
                    "have workers of another DataLoader, or they are new"
                )
    outcomes = {one.outcome for every in results.values() for one in every}
    if "wrong" in outcomes:
        raise typer.Exit(EXIT_FAILURE)
    if "open" in outcomes or not all(results.values()):
        raise typer.Exit(EXIT_NOT_SHOWN)


def rows(
    step: Annotated[int, typer.Option(min=0, help="Step of the epoch.")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Name of a dataset.")] = None,
    job: Annotated[
        str | None,
        typer.Option(
            help="What this job read: its view and, with audit, its seed, batch size and others."
        ),
    ] = None,
    view: Annotated[
        str | None,
        typer.Option(
            help="Options of the View of the job: a file, or JSON such as "
            '\'{"where": "price > 100"}\'.'
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows per rank and step.")] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the job.  [default: 1]")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="One rank.  [default: all]")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the order.  [default: 0]")] = None,
    epoch: Annotated[int, typer.Option(min=0, help="Epoch.")] = 0,
    shuffle: Annotated[
        bool | None,
        typer.Option(
            "--shuffle/--no-shuffle", help="Whether the job shuffles.  [default: shuffle]"
        ),
    ] = None,
    shuffle_block_size: Annotated[
        int | None, typer.Option(min=1, help="As the job has it.")
    ] = None,
    drop_last: Annotated[
        bool, typer.Option("--drop-last", help="The job leaves out a short last step.")
    ] = False,
    pad: Annotated[
        bool, typer.Option("--pad", help="The job fills its last step: it has a pad_mask.")
    ] = False,
    skip_step: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Step of this epoch that the job leaves out; repeat it."),
    ] = None,
    rows_consumed: Annotated[
        int | None,
        typer.Option(
            min=0, help="Where the job resumed the epoch; steps count from there.  [default: 0]"
        ),
    ] = None,
    endpoint: Endpoint = None,
    timeout_s: TimeoutS = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show the rows of one training step.

    Ends with 4 if they cannot be shown.
    """
    access, found, record = access_to(connection_of(endpoint, timeout_s)), None, None
    client = client_of(endpoint, timeout_s=timeout_s)
    if job is not None:
        found = _job(client, job, name)
        record = record_of(found, epoch, rows_consumed)
    if record is not None:
        _refuse(
            f"the audit record of job {job!r} has them",
            batch_size=batch_size,
            world_size=world_size,
            seed=seed,
            shuffle=shuffle,
            shuffle_block_size=shuffle_block_size,
            drop_last=drop_last or None,
            pad=pad or None,
            skip_step=skip_step,
        )
        question = question_of(record, step=step, rank=rank)
    elif found is None and name is None:
        raise ConfigError("give the NAME of a dataset, or --job")
    elif batch_size is None:
        raise ConfigError("give --batch-size")
    elif found is not None and (seed is None or shuffle is None):
        raise ConfigError(
            f"job {job!r} has no audit record of epoch {epoch}: give --seed and --shuffle or "
            "--no-shuffle, as the job has them"
        )
    else:
        if found is None and view is None:
            _note_views(client, name or "")
        world_size = world_size or (found.world_size if found else 1)
        question = Question(
            dataset=found.dataset if found else name or "",
            fingerprint=found.fingerprint if found else "",
            view=found.view if found else "",
            shuffle=Shuffle(shuffle is not False, shuffle_block_size, seed or 0),
            epoch=epoch,
            step=step,
            ranks=range(world_size) if rank is None else (rank,),
            world_size=world_size,
            batch_size=batch_size,
            drop_last=drop_last,
            pad=pad,
            rows_consumed=rows_consumed or 0,
            skip_steps=skip_step or (),
        )
    if view is not None:
        question = replace(question, view=view_of_argument(view))
    schema, step_of = step_rows(access, question)
    has_sources = any(each.source for each in step_of)
    if as_json:
        print_json([_row_json(each) for each in step_of])
        return
    show_rows(
        ["rank", *(["source"] if has_sources else []), "row id", *schema.names],
        [
            [
                str(each.rank),
                *([printable(each.source)] if has_sources else []),
                str(each.row_id),
                *map(cell, each.values.values(), schema.types),
            ]
            for each in step_of
        ],
    )


def seen(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a dataset.")],
    where: Annotated[
        str | None, typer.Option(help="SQL of the rows, such as 'user_id = 7'.")
    ] = None,
    forgotten: Annotated[
        int | None, typer.Option(help="Instead of --where: the act that forgot them.")
    ] = None,
    state: Annotated[
        list[Path] | None,
        typer.Option(help="State or checkpoint of a job (JSON or torch); repeat it."),
    ] = None,
    job: Annotated[
        str | None, typer.Option(help="Instead of --state: a job that has audit='reports'.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows per rank and step, to tell the steps of states.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the job.  [default: 1]")
    ] = None,
    endpoint: Endpoint = None,
    timeout_s: TimeoutS = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show when rows were given to a job, and how often.

    No log of the training is needed: the order of a job is a function of its state. A state tells
    of all epochs up to it, as if all had its version; it knows the amendments of the job. The last
    line names the last clean state: none of the rows was given before it.

    Ends with 4 if it cannot be shown.
    """
    if (job is None) == (not state):
        raise ConfigError("give either --state FILE or --job JOB")
    if (where is None) == (forgotten is None):
        raise ConfigError("give either --where SQL or --forgotten ACT: see cachectl forgotten")
    access = access_to(connection_of(endpoint, timeout_s))
    wanted = Wanted(access, name, where, forgotten or 0)
    states: list[tuple[str, OrderState, list[Sighting]]] = []
    found: dict[str, list[Sighting]] = {}
    if job is not None:
        info = _job(client_of(endpoint, timeout_s=timeout_s), job, None)
        records = sorted((e.record for e in evidence_of(info)), key=lambda each: each.steps)
        # The last one of each pass of a rank.
        passes = {(each.run, each.number, each.rank): each for each in records}
        if not passes:
            raise NotShownError(f"job {job!r} has no record of its rows: it needs audit='reports'")
        found[job] = [seen_by_record(access, record, wanted) for record in passes.values()]
    for path in state or ():
        sizes = {"batch_size": batch_size or 0, "world_size": world_size or 1}
        for one in read_states(path):
            every = list(seen_by_state(access, one, wanted, **sizes))
            states.append((str(path), one, every))
            found.setdefault(str(path), []).extend(every)
    clean = last_clean(states)
    if as_json:
        print_json(
            [
                {
                    "of": of,
                    "rows": wanted.count,
                    "last_clean": of == clean,
                    "epochs": [sighting_json(one) for one in every],
                }
                for of, every in found.items()
            ]
        )
        return
    show_rows(
        ["of", "epoch", "rows", "given", "first", "last"],
        [
            [printable(of), str(one.epoch), f"{len({*one.rows.tolist()}):,}", f"{len(one.rows):,}",
             one.place(0), one.place(-1)]
            for of, every in found.items()
            for one in every
        ],
    )  # fmt: skip
    for of, every in found.items():
        rows_given = {row for one in every for row in one.rows.tolist()}
        times = sum(len(one.rows) for one in every)
        show_line(
            f"{printable(of)}: {len(rows_given):,} of {wanted.count:,} rows were given, "
            f"{times:,} times in all"
        )
    if states:
        show_line(f"last clean: {printable(clean)}" if clean else "no state is clean")


def _row_json(row: StepRow) -> dict[str, object]:
    values = {name: json_value(value) for name, value in row.values.items()}
    source = {"source": row.source} if row.source else {}
    return {"rank": row.rank, **source, "row": row.row_id, "values": values}


def _job(client: CacheClient, job: str, dataset: str | None) -> JobInfo:
    """The job of this name that reads a dataset.

    Raises:
        ConfigError: it reads several; names them.
    """
    found = client.jobs(job, audits=True)
    chosen = [each for each in found if dataset in (None, each.dataset)]
    if len(chosen) != 1:
        names = some_of(repr(each.dataset) for each in found)
        raise ConfigError(f"give the NAME of what job {job!r} reads: {names}, got {dataset!r}")
    return chosen[0]


def _refuse(why: str, **given: object) -> None:
    """Raises ConfigError where options are given that are known."""
    names = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if names:
        raise ConfigError(f"leave out {', '.join(names)}: {why}")


def _note_views(client: CacheClient, dataset: str) -> None:
    """Says which jobs read the dataset other than each row once."""
    with suppress(CacheError):
        found = [each for each in client.jobs() if each.dataset == dataset]
        names = sorted({each.name for each in found if each.view or "-" in each.fingerprint})
        if names:
            typer.echo(
                "these are rows of each row once; other rows have the jobs "
                f"{', '.join(map(printable, names))}: give --job",
                err=True,
            )
