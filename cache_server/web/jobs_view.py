"""The jobs on the page: verdict and progress first, then charts, ranks and nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from cache_protocol.cli.output import with_labels
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.web.charts import (
    MOST_ROWS,
    bar,
    columns,
    duration,
    grouped,
    heat_map,
    line_chart,
)
from cache_server.web.html import Alert, Html, View, facts, section

_MOST_CHARTED, _MOST_RANKS, _MOST_NODES = 4, 16, 8
_MOST_ENDED, _MOST_FAILED = 20, 3  # of them are shown
_MIN_SPAN_S = 60.0  # of a chart
_BOUND = "compute bound"
_ENDS = {
    pb.PASS_END_FINISHED: "finished",
    pb.PASS_END_STOPPED: "stopped",
    pb.PASS_END_FAILED: "failed",
    pb.PASS_END_UNSPECIFIED: "crashed or hang",
}
_BAD_ENDS = (pb.PASS_END_UNSPECIFIED, pb.PASS_END_FAILED)


def jobs_view(
    jobs: Sequence[pb.JobInfo], asked: Sequence[pb.JobInfo], names: Mapping[str, str], view: View
) -> Iterator[str]:
    """Running jobs as cards, then ended ones: those that failed, and the others in a fold.

    Args:
        asked: those of them that are shown with their ranks.
        names: of nodes, by id.
    """
    whole = {(job.name, job.dataset): job for job in asked}
    if view.job and not any(job.name == view.job for job in asked):
        yield f'<p class="bad">no reader of a job {escape(view.job)} has reported lately</p>'
    live = [whole.get((job.name, job.dataset), job) for job in jobs if job.live]
    live.sort(key=lambda job: ((job.name, job.dataset) not in whole, _kind(job) == "good"))
    yield "<section><h2>Running jobs</h2>"
    if not live:
        yield "<p>No training job reads from this cache now.</p>"
    cards = []
    for number, job in enumerate(live):
        is_whole = (job.name, job.dataset) in whole
        cards.append(_card(job, names, view, is_whole, is_whole or number < _MOST_CHARTED))
    yield f'<div class="cards">{"".join(cards)}</div></section>'
    yield from _ended([job for job in jobs if not job.live], whole, names, view)


def _ended(
    jobs: Sequence[pb.JobInfo],
    whole: Mapping[tuple[str, str], pb.JobInfo],
    names: Mapping[str, str],
    view: View,
) -> Iterator[str]:
    """The newest first; all within the last hour, for which the coordinator knows them."""
    if not jobs:
        return
    jobs = sorted(jobs, key=lambda job: job.verdict_s)
    yield "<section><h2>Ended jobs</h2>"
    for job in jobs:
        if (job.name, job.dataset) in whole:
            yield _card(whole[job.name, job.dataset], names, view, True, True)
    failed = [job for job in jobs if job.end in _BAD_ENDS]
    is_open = "ended" in view.shown
    shown = jobs[:_MOST_ENDED] if is_open else failed[:_MOST_FAILED]
    items = (
        f"<li>{view.link(job.name, job=job.name, ranks=None)} "
        f'<span class="{_kind(job)}">{escape(with_labels(job.verdict, names))}</span></li>'
        for job in shown
    )
    yield f"<ul>{''.join(items)}</ul>" if shown else ""
    ends = Counter(_ENDS.get(job.end, "ended") for job in jobs)
    counts = ", ".join(f"{count} {end}" for end, count in ends.items())
    more = f"; the {_MOST_ENDED} newest are shown" * (is_open and len(jobs) > _MOST_ENDED)
    what = "1 ended job" if len(jobs) == 1 else f"all {len(jobs)} ended jobs"
    yield f"<p>{view.fold('ended', what)} ({counts}{more})</p></section>"


def _kind(job: pb.JobInfo) -> str:
    """The class of a verdict; empty: neither good nor bad."""
    if job.live:
        return "good" if job.verdict.startswith(_BOUND) else "bad"
    return "bad" if job.end in _BAD_ENDS else ""


def _card(
    job: pb.JobInfo, names: Mapping[str, str], view: View, is_whole: bool, has_charts: bool
) -> str:
    kind = _kind(job)
    since = f' <span class="mute">for {duration(job.verdict_s)}</span>' if job.live else ""
    parts = [
        f'<article class="{kind}{" whole" * is_whole}">'
        f'<div class="head"><h3>{view.link(job.name, job=job.name, ranks=None)}</h3>'
        f'<span class="mute">reads {escape(job.dataset)}</span></div>',
        f'<p class="verdict {kind}">{escape(with_labels(job.verdict, names))}{since}</p>',
        _progress(job),
        facts(_numbers(job)),
    ]
    if has_charts:
        parts.append(_charts(job))
    if is_whole:
        parts += _ranks(job, names, view)
    return "".join([*parts, "</article>"])


def _progress(job: pb.JobInfo) -> str:
    step = f"epoch {job.epoch:,}, step {job.step:,}"
    if not job.num_steps:
        return f'<div class="progress">{step}</div>'
    share = job.step / job.num_steps
    place = f"{step} of {job.num_steps:,} ({share:.0%})"
    return f'<div class="progress">{bar(share)}{place}</div>'


def _numbers(job: pb.JobInfo) -> Iterator[tuple[str, object]]:
    ranks = f"{job.num_ranks:,} of {job.world_size:,}"
    yield "ranks", Alert(ranks) if job.live and job.num_ranks < job.world_size else ranks
    if job.live:
        yield "rows/s", f"{job.rows_per_s:,.0f}"
        yield "waits for data", f"{job.wait_share:.0%}"
        yield "local rows", f"{job.local_share:.0%}"
    if job.view:
        yield "view", job.view


def _span_s(job: pb.JobInfo) -> float:
    return max((sample.age_s for sample in job.history), default=0.0) or _MIN_SPAN_S


def _charts(job: pb.JobInfo) -> str:
    history, span_s = job.history, max(_MIN_SPAN_S, _span_s(job))
    rates = [(sample.age_s, sample.rows_per_s) for sample in history]
    most = [(sample.age_s, sample.most_wait_share) for sample in history]
    mean = [(sample.age_s, sample.wait_share) for sample in history]
    waits = [("mean rank", mean), ("rank that waits most", most)]
    charts = (
        line_chart("rows/s", [("all ranks", rates)], span_s=span_s),
        line_chart("waits for data", waits, span_s=span_s, most=1.0, percent=True),
    )
    return f'<div class="charts">{"".join(charts)}</div>'


def _ranks(job: pb.JobInfo, names: Mapping[str, str], view: View) -> Iterator[str]:
    """The heat map, and tables of the ranks and nodes that are waited for most."""
    first, last = view.ranks or (0, max((rank.rank for rank in job.ranks), default=0))
    ranks = [rank for rank in job.ranks if first <= rank.rank <= last]
    worst = sorted(ranks, key=lambda rank: -rank.wait_share)[:_MOST_RANKS]
    of = f" {first} to {last}" if view.ranks else ""
    if ranks:
        span_s = max(_MIN_SPAN_S, _span_s(job))
        waits = (zip(rank.wait_ages_s, rank.wait_history, strict=False) for rank in ranks)
        lines = [columns(list(each), span_s) for each in waits]
        rows = grouped([(rank.rank, each) for rank, each in zip(ranks, lines, strict=True)])
        named = "; ".join(f"rank {each.rank}: {each.wait_share:.0%}" for each in worst[:4])
        title = f"waits for data, by rank{of}"
        yield heat_map(title, f"{title}; now most {named}", rows, span_s=span_s)
        yield _zoom(job, view)
    header = ["rank", "waits for data", "a step", "transform", "fetch", "rows/s", "step"]
    title = f"Ranks{of}"
    if len(worst) < len(ranks) or len(job.ranks) < job.num_ranks:
        title = f"The {len(worst)} of {job.num_ranks:,} ranks that wait most"
        if view.ranks:
            title = f"The {len(worst)} of ranks{of} that wait most"
    of_job = f"of {job.name} on {job.dataset}"
    rows_of_ranks = map(_rank_row, worst)
    tables = [section(title, header, rows_of_ranks, level=4, of=of_job)] if worst else []
    if len(job.nodes) > 1:
        most_waits = sorted(job.nodes, key=lambda node: -node.wait_share)[:_MOST_NODES]
        shares = [
            [
                names.get(node.node_id, node.node_id),
                f"{node.rows_share:.0%}",
                f"{node.wait_share:.0%}",
            ]
            for node in most_waits
        ]
        header = ["node", "share of rows", "share of waits"]
        tables.append(section("Nodes that it reads from", header, shares, level=4, of=of_job))
    yield f'<div class="pair">{"".join(tables)}</div>'


def _zoom(job: pb.JobInfo, view: View) -> str:
    """Links to parts of the heat map, if one row is not one rank."""
    ranks = [rank.rank for rank in job.ranks]
    if len(ranks) <= MOST_ROWS:
        return ""
    left_out = f"The {len(ranks):,} ranks that wait most. " * (len(ranks) < job.num_ranks)
    links = [view.link("all", ' aria-current="true"' * (not view.ranks), job=job.name, ranks=None)]
    for start in range(0, len(ranks), MOST_ROWS):
        part = ranks[start], ranks[min(start + MOST_ROWS, len(ranks)) - 1]
        is_it = ' aria-current="true"' * (view.ranks == part)
        name = f"{part[0]}-{part[1]}"
        links.append(view.link(name, is_it, job=job.name, ranks=part))
    return f'<p class="zoom">{left_out}<span>Show ranks</span> {" ".join(links)}</p>'


def _rank_row(rank: pb.RankInfo) -> list[object]:
    return [
        rank.rank,
        Html(bar(rank.wait_share, f"{rank.wait_share:.0%}")),
        f"{rank.step_s * 1000:.1f} ms",
        f"{rank.transform_s * 1000:.1f} ms",
        f"{rank.fetch_s * 1000:.1f} ms",
        f"{rank.rows_per_s:,.0f}",
        f"{rank.step:,}",
    ]
