"""What ``cachectl`` shows of jobs and audits: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cache_client.control.infos import JobInfo, NodeInfo
from cache_client.order.audit import EpochAudit
from cache_protocol.cli.facts import printable
from cache_protocol.cli.output import node_label, size, with_labels

_MOST_RANKS = 12  # in the live view; those that wait most
_BAR = 20  # characters
_MOST_VIEW = 30
_SPARKS = "▁▂▃▄▅▆▇█"

JOB_COLUMNS = [
    *("job", "dataset", "view", "ranks", "epoch", "step", "rows/s", "waits", "local", "verdict"),
]


def _steps(job: JobInfo) -> str:
    return f"{job.num_steps:,}" if job.num_steps or not job.step else "?"


def _short_view(job: JobInfo) -> str:
    text = printable(job.view)
    return text if len(text) <= _MOST_VIEW else f"{text[: _MOST_VIEW - 1]}…"


def job_row(job: JobInfo) -> list[str]:
    """One line for a job."""
    return [
        job.name,
        job.dataset,
        _short_view(job),
        f"{job.num_ranks} of {job.world_size}",
        str(job.epoch),
        f"{job.step:,} of {_steps(job)}",
        f"{job.rows_per_s:,.0f}",
        f"{job.wait_share:.0%}",
        f"{job.local_share:.0%}",
        job.verdict,
    ]


def job_json(job: JobInfo) -> dict[str, Any]:
    """A job for programs, with every number."""
    return asdict(job)


def top_view(
    jobs: Sequence[JobInfo], nodes: Sequence[NodeInfo], waits_for: str = ""
) -> RenderableType:
    """The live view: each job with the ranks that wait most, and the memory of the nodes.

    Args:
        waits_for: the job that was asked for; empty: all.
    """
    parts: list[RenderableType] = []
    labels = {node.id: node_label(node.name, node.id) for node in nodes}
    for job in jobs:
        parts += [_headline(job, labels), _ranks_table(job), Text()]
    if not jobs:
        missing = "no reader has reported lately"
        if waits_for:
            missing = f"waiting for the first report of job {printable(waits_for)}"
        parts += [Text(missing, style="dim"), Text()]
    parts.append(_nodes_table(nodes))
    return Group(*parts)


def _headline(job: JobInfo, labels: Mapping[str, str]) -> Text:
    is_bad_end = job.end in ("", "failed") and not job.live
    bad = is_bad_end or (job.live and not job.verdict.startswith("compute bound"))
    text = Text()
    text.append(printable(job.name), style="bold")
    text.append(f"  reads {printable(job.dataset)}  epoch {job.epoch}, step {job.step:,}")
    text.append(f" of {_steps(job)}  {job.rows_per_s:,.0f} rows/s  ")
    text.append(_sparkline([sample.rows_per_s for sample in job.history]), style="cyan")
    text.append("\n")
    verdict = with_labels(job.verdict, labels)
    text.append(printable(verdict), style="red" if bad else "green")
    text.append(f"  for {_duration(job.verdict_s)}", style="dim")
    if job.view:
        text.append(f"\nview {printable(job.view)}", style="dim")
    return text


def _ranks_table(job: JobInfo) -> Table:
    worst = sorted(job.ranks, key=lambda rank: -rank.wait_share)[:_MOST_RANKS]
    table = Table(box=None, pad_edge=False)
    names = ["rank", "waits for data", "", "a step", "transform", "fetch", "rows/s", "step"]
    for name in names:
        table.add_column(name, justify="left" if name in ("waits for data", "") else "right")
    for rank in worst:
        table.add_row(
            str(rank.rank),
            Text("█" * round(_BAR * rank.wait_share), style="yellow"),
            f"{rank.wait_share:.0%}",
            f"{rank.step_s * 1000:.1f} ms",
            f"{rank.transform_s * 1000:.1f} ms",
            f"{rank.fetch_s * 1000:.1f} ms",
            f"{rank.rows_per_s:,.0f}",
            f"{rank.step:,}",
        )
    if job.num_ranks > len(worst):
        table.add_row("", Text(f"and {job.num_ranks - len(worst)} ranks that wait less", "dim"))
    return table


def _nodes_table(nodes: Sequence[NodeInfo]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("node", "", "memory", "shards"):
        table.add_column(name, justify="right" if name == "shards" else "left")
    for node in nodes:
        limit = node.memory_limit_bytes
        share = node.stored_bytes / limit if limit else 0.0
        table.add_row(
            printable(node_label(node.name, node.id)),
            "alive" if node.alive else Text("lost", style="red"),
            f"{size(node.stored_bytes)}{f' of {size(limit)} ({share:.0%})' if limit else ''}",
            str(node.stored_shards),
        )
    return table


def _sparkline(values: Sequence[float], width: int = 30) -> str:
    shown = list(values)[-width:]
    most = max(shown, default=0.0)
    if not most:
        return ""
    return "".join(_SPARKS[round(value / most * (len(_SPARKS) - 1))] for value in shown)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def audit_lines(found: EpochAudit) -> list[str]:
    """What an audit found of one reading of an epoch, for people."""
    so_far = "" if found.rows == found.num_rows else " so far"
    shown = [f"view {printable(found.view)}"] if found.view else []
    if found.outcome == "wrong":
        head = "WRONG"
    elif found.outcome == "proven":
        head = f"proven{so_far}: {found.statement}"
    else:
        head = "cannot be shown"
        shown += [f"shown{so_far}: {found.statement}"] if found.rows else []
    lines = (*shown, *found.findings)
    return [f"epoch {found.epoch}: {head}", *(f"  {line}" for line in lines)]
