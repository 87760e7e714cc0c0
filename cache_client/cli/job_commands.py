"""The commands of `cachectl` for training jobs: which there are, and what they read."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
import typer.core

from cache_client.cli.app import (
    EXIT_FAILURE,
    AsJson,
    Endpoint,
    IntervalS,
    Name,
    TimeoutS,
    client_of,
    connection_of,
)
from cache_client.cli.audit_files import evidence_of, read_records
from cache_client.cli.display import (
    cell,
    console,
    json_value,
    print_json,
    printable,
    show_line,
    show_live,
    show_rows,
)
from cache_client.cli.jobs_display import JOB_COLUMNS, audit_lines, job_json, job_row, top_view
from cache_client.control.infos import JobInfo
from cache_client.control.row_reads import read_rows
from cache_client.job.connection import access_to
from cache_client.order.audit import Evidence, audit
from cache_client.order.order import rows_of_step
from cache_protocol.errors import (
    ConfigError,
    DatasetNotFoundError,
)
from cache_protocol.storage.row_index import Ids

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
    """Prove that a job read each row once.

    Else names the first wrong step of each epoch.

    Ends with 0 if everything is proven, else with 1.
    """
    if (job is None) == (not state):
        raise ConfigError("give either a JOB or --state FILE")
    if state:
        by_dataset = {"": [Evidence(record) for path in state for record in read_records(path)]}
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
                show_line("no record: its readers have workers of another DataLoader, or are new")
    is_proven = all(every and all(one.outcome == "proven" for one in every)
                    for every in results.values())  # fmt: skip
    raise typer.Exit(0 if is_proven else EXIT_FAILURE)


def rows(
    name: Name,
    step: Annotated[int, typer.Option(min=0, help="Step of the epoch.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per rank and step.")],
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the job.")] = 1,
    rank: Annotated[int | None, typer.Option(min=0, help="One rank.  [default: all]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 0,
    epoch: Annotated[int, typer.Option(min=0, help="Epoch.")] = 0,
    shuffle: Annotated[bool, typer.Option(help="Whether the job shuffles.")] = True,
    shuffle_block_size: Annotated[
        int | None, typer.Option(min=1, help="As the job has it.")
    ] = None,
    rows_consumed: Annotated[
        int, typer.Option(min=0, help="Where the job resumed the epoch; steps count from there.")
    ] = 0,
    endpoint: Endpoint = None,
    timeout_s: TimeoutS = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show the rows of one training step."""
    step_rows: list[tuple[int, int]] = []

    def row_ids(num_rows: int) -> Ids:
        try:
            found = rows_of_step(
                num_rows, step,
                batch_size=batch_size, world_size=world_size, rank=rank, seed=seed, epoch=epoch,
                shuffle=shuffle, shuffle_block_size=shuffle_block_size,
                rows_consumed=rows_consumed,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(str(error)) from None
        step_rows.extend(found)
        return np.array([row_id for _, row_id in found], np.int64)

    batch = read_rows(access_to(connection_of(endpoint, timeout_s)), name, row_ids)
    values = batch.to_pylist()
    if as_json:
        print_json(
            [
                {"rank": of, "row": row_id, "values": {k: json_value(v) for k, v in row.items()}}
                for (of, row_id), row in zip(step_rows, values, strict=True)
            ]
        )
        return
    types = batch.schema.types
    show_rows(
        ["rank", "row id", *batch.schema.names],
        [
            [str(of), str(row_id), *map(cell, row.values(), types)]
            for (of, row_id), row in zip(step_rows, values, strict=True)
        ],
    )
