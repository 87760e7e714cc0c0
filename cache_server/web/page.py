"""A `NodeStatus` as one HTML page. Every string is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from urllib.parse import quote

from cache_protocol.cli.output import size
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import state_name
from cache_server.node.status import CacheStatus, NodeStatus
from cache_server.web.charts import bar, grouped, heat_map, line_chart

_REFRESH_S = 5
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #8884; padding: .3rem 1rem .3rem 0; text-align: left }
div { overflow-x: auto } .charts { display: flex; flex-wrap: wrap; gap: 1rem 2rem }
figure { flex: 1 1 20rem; margin: .5rem 0; max-width: 34rem }
figcaption { font-size: .85rem } figure svg { width: 100% } svg text { fill: #777; font-size: 10px }
.end { text-anchor: end } .grid { fill: none; stroke: #8884 }
polyline { fill: none; stroke-width: 1.5 } .line0 { stroke: #06c } .line1 { stroke: #d60 }
.key0 { color: #06c; margin-left: 1ch } .key1 { color: #d60; margin-left: 1ch }
.bar { height: .7rem; vertical-align: middle; width: 7rem }
.all { fill: #8883 } .part { fill: #06c }
.heat0 { fill: #8882 } .heat1 { fill: #fc9 } .heat2 { fill: #f93 } .heat3 { fill: #d50 }
.heat4 { fill: #a10 } .good { color: #171 }
.number { text-align: right; white-space: nowrap } .bad { color: #c22; overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) {
  :root { color-scheme: dark } body { background: #111; color: #ddd }
  a { color: #8bf } .bad { color: #f77 } .good { color: #7d7 } .part { fill: #5af }
  .line0 { stroke: #5af } .line1 { stroke: #fa5 } .key0 { color: #5af } .key1 { color: #fa5 }
}
"""
# Columns of words; the other columns hold numbers.
_WORDS = {
    *("dataset", "fingerprint", "verb", "error", "id", "Flight", "state"),
    *("job", "verdict", "memory", "loaded", "waits for data", "node"),
}
_MOST_CHARTED, _MOST_RANKS, _MOST_NODES = 4, 16, 8
_BOUND = "compute bound"
_BAD_ENDS = (pb.PASS_END_UNSPECIFIED, pb.PASS_END_FAILED)


class _Alert(str):
    """Shown in red."""


class _Html(str):
    """Shown as it is: its maker has escaped it."""


def page(status: NodeStatus, job: str = "") -> str:
    """The page of one node. A coordinator's page begins with the whole cache.

    Args:
        job: whose ranks were asked for.
    """
    node_id = escape(status.node.id)
    ready = "ready" if status.ready else '<span class="bad">not ready</span>'
    cache = _of_cache(status.cache, job) if status.cache is not None else []
    body = "".join([*cache, *_of_node(status)])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{_REFRESH_S}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Cache node {node_id}</title><style>{_STYLE}</style></head>"
        f"<body><h1>Cache node {node_id}: {ready}</h1>{body}"
        '<p><a href="metrics">metrics</a></p></body></html>\n'
    )


def _of_cache(cache: CacheStatus, job: str) -> list[str]:
    datasets = [
        [
            info.spec.name,
            _Alert(f"{state_name(info.state)}: {info.error.message}")
            if info.state in (pb.DATASET_STATE_FAILED, pb.DATASET_STATE_UNAVAILABLE)
            else state_name(info.state),
            f"{info.num_rows or info.progress.rows_done:,}",
            _shards(info.progress),
            size(info.num_bytes),
            _loaded(info),
        ]
        for info in cache.datasets
    ]
    nodes = [
        [
            node.id,
            node.flight_location,
            "alive" if node.alive else _Alert("untrusted" if node.untrusted else "lost"),
            f"{node.stored_shards:,}",
            _memory_bar(node),
        ]
        for node in cache.nodes
    ]
    return [
        *_of_jobs(cache, job),
        _section("Datasets", ["dataset", "state", "rows", "shards", "size", "loaded"], datasets),
        _section("Nodes", ["id", "Flight", "state", "shards", "memory"], nodes),
    ]


def _of_jobs(cache: CacheStatus, name: str) -> list[str]:
    """Every job in a table; charts of those that run; ranks of the one that was asked for."""
    rows = [
        [
            _Html(f'<a href="?job={quote(job.name)}">{escape(job.name)}</a>'),
            job.dataset,
            f"{job.num_ranks:,} of {job.world_size:,}",
            job.epoch,
            f"{job.step:,} of {job.num_steps:,}" if job.num_steps else f"{job.step:,}",
            f"{job.rows_per_s:,.0f}",
            f"{job.wait_share:.0%}",
            _Alert(job.verdict) if _kind(job) == "bad" else job.verdict,
        ]
        for job in cache.jobs
    ]
    header = ["job", "dataset", "ranks", "epoch", "step", "rows/s", "waits", "verdict"]
    found = list(cache.job) or [job for job in cache.jobs if job.live][:_MOST_CHARTED]
    parts = [_section("Jobs", header, rows)]
    if name and not cache.job:
        parts.append(f'<p class="bad">no reader of a job {escape(name)} has reported</p>')
    return [*parts, *(part for job in found for part in _of_job(job))]


def _kind(job: pb.JobInfo) -> str:
    """The class of a verdict; empty: neither good nor bad."""
    if job.live:
        return "good" if job.verdict.startswith(_BOUND) else "bad"
    return "bad" if job.end in _BAD_ENDS else ""


def _of_job(job: pb.JobInfo) -> Iterator[str]:
    yield (
        f"<h2>{escape(job.name)} reads {escape(job.dataset)}: "
        f'<span class="{_kind(job)}">{escape(job.verdict)}</span></h2>'
    )
    history = job.history
    span_s = max((sample.age_s for sample in history), default=0.0)
    rates = [(sample.age_s, sample.rows_per_s) for sample in history]
    most = [(sample.age_s, sample.most_wait_share) for sample in history]
    mean = [(sample.age_s, sample.wait_share) for sample in history]
    charts = [
        line_chart("rows/s", [("all ranks", rates)], span_s=span_s),
        line_chart(
            "waits for data",
            [("all ranks", mean), ("most", most)],
            span_s=span_s,
            most=1.0,
            percent=True,
        ),
    ]
    yield f'<div class="charts">{"".join(charts)}</div>'
    if job.ranks:
        groups = grouped([(rank.rank, rank.wait_history) for rank in job.ranks])
        left_out = f" (the {len(job.ranks)} that wait most)" * (len(job.ranks) < job.num_ranks)
        yield heat_map(f"waits for data, by rank{left_out}", groups)
    if len(job.nodes) > 1:
        most_waits = sorted(job.nodes, key=lambda node: -node.wait_share)[:_MOST_NODES]
        shares = [
            [node.node_id, f"{node.rows_share:.0%}", f"{node.wait_share:.0%}"]
            for node in most_waits
        ]
        yield _section("Nodes that it reads from", ["node", "rows", "waits"], shares)
    worst = sorted(job.ranks, key=lambda rank: -rank.wait_share)[:_MOST_RANKS]
    if worst:
        header = ["rank", "waits for data", "a step", "transform", "fetch", "rows/s", "step"]
        title = f"The {len(worst)} of {job.num_ranks} ranks that wait most"
        if len(worst) >= job.num_ranks:
            title = "Ranks"
        yield _section(title, header, [_rank_row(rank) for rank in worst])


def _rank_row(rank: pb.RankInfo) -> list[object]:
    return [
        rank.rank,
        _Html(bar(rank.wait_share, f"{rank.wait_share:.0%}")),
        f"{rank.step_s * 1000:.1f} ms",
        f"{rank.transform_s * 1000:.1f} ms",
        f"{rank.fetch_s * 1000:.1f} ms",
        f"{rank.rows_per_s:,.0f}",
        f"{rank.step:,}",
    ]


def _shards(progress: pb.LoadProgress) -> str:
    reused = f" ({progress.shards_reused:,} reused)" if progress.shards_reused else ""
    return f"{progress.shards_done:,} of {progress.shards_total:,}{reused}"


def _loaded(info: pb.DatasetInfo) -> object:
    """The progress of a load, its rate and the time left."""
    progress = info.progress
    if info.state != pb.DATASET_STATE_LOADING:
        return ""
    share = progress.shards_done / progress.shards_total if progress.shards_total else 0.0
    if progress.estimated_rows:
        share = max(share, min(1.0, progress.rows_done / progress.estimated_rows))
    text = f"{share:.0%}"
    if progress.elapsed_s > 0:
        text += f", {progress.rows_done / progress.elapsed_s:,.0f} rows/s"
        if share > 0:
            text += f", {progress.elapsed_s * (1 - share) / share:.0f} s left"
    return _Html(bar(share, text))


def _memory_bar(node: pb.Node) -> object:
    if not node.memory_limit_bytes:
        return _memory(node)
    return _Html(bar(node.stored_bytes / node.memory_limit_bytes, _memory(node)))


def _of_node(status: NodeStatus) -> list[str]:
    node = status.node
    facts = [
        ("Flight", node.flight_location),
        ("control", node.control_location),
        ("coordinator", status.coordinator or _Alert("not reached yet")),
        ("directory", node.cache_dir),
        ("memory", _memory(node)),
    ]
    versions = [
        [
            version.key.dataset,
            version.key.fingerprint,
            version.served,
            version.sealed,
            version.loading,
            _Alert(version.failed) if version.failed else 0,
            size(version.num_bytes),
        ]
        for version in status.versions
    ]
    sent = [
        [read.dataset, read.verb, f"{served.rows:,}", size(served.num_bytes)]
        for read, served in sorted(status.counts.served.items())
    ]
    shards = ["dataset", "fingerprint", "served", "sealed", "loading", "failed", "size"]
    errors = sorted(status.counts.errors.items())
    return [
        "<h2>This node</h2>",
        _table([_cell(name, "th") + _cell(text) for name, text in facts]),
        _section("Shards on this node", shards, versions),
        _section("Sent by this node", ["dataset", "verb", "rows", "size"], sent),
        _section("Failed calls", ["error", "count"], errors),
    ]


def _section(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [
        "".join(
            _cell(value, number=name not in _WORDS) for name, value in zip(header, row, strict=True)
        )
        for row in rows
    ]
    if not lines:
        return f"<h2>{title}</h2><p>none</p>"
    names = "".join(_cell(name, "th", number=name not in _WORDS) for name in header)
    return f"<h2>{title}</h2>{_table([names, *lines])}"


def _table(lines: Iterable[str]) -> str:
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div><table>{rows}</table></div>"  # scrolls if it is too wide


def _cell(value: object, tag: str = "td", *, number: bool = False) -> str:
    kinds = ["number"] * number + ["bad"] * isinstance(value, _Alert)
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    text = value if isinstance(value, _Html) else escape(str(value))
    return f"<{tag}{kind}>{text}</{tag}>"


def _memory(node: pb.Node) -> str:
    limit = f" of {size(node.memory_limit_bytes)}" if node.memory_limit_bytes else ""
    return f"{size(node.stored_bytes)}{limit}"
