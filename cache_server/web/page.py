"""A `NodeStatus` as one HTML page. Every string is escaped.

It has no script: what is open and what is asked for is in the address, so it lasts when the page
loads anew. See ADR 0058.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from html import escape

from cache_protocol.cli.output import node_label, size
from cache_protocol.errors import short, some_of
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import state_name
from cache_server.node.status import CacheStatus, NodeStatus
from cache_server.web.charts import bar, duration
from cache_server.web.html import Alert, Html, View, facts, section, text
from cache_server.web.jobs_view import jobs_view
from cache_server.web.style import STYLE

REFRESH_S = 5
_BAD_STATES = (pb.DATASET_STATE_FAILED, pb.DATASET_STATE_UNAVAILABLE)
_CALM_STATES = (pb.DATASET_STATE_READY, pb.DATASET_STATE_EVICTED)
_MOST_FAILURES = 3  # datasets whose errors are shown


def page(status: NodeStatus, view: View | None = None, now: datetime | None = None) -> str:
    """The page of one node. A coordinator's page begins with the whole cache.

    Args:
        view: what was asked for.
        now: time to show; None: none.
    """
    view = view or View()
    title = escape(_label(status.node))
    body = _of_other(status, view) if status.cache is None else _of_cache(status.cache, view)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Data cache: {title}</title><style>{STYLE}</style></head>"
        f"<body>{_header(status, view, now)}<main>{''.join(body)}{''.join(_of_node(status))}</main>"
        '<footer><p><a href="metrics">metrics</a></p></footer></body></html>\n'
    )


def _label(node: pb.Node) -> str:
    return node_label(node.name, node.id)


def _header(status: NodeStatus, view: View, now: datetime | None) -> str:
    ready = '<span class="good">ready</span>' if status.ready else text(Alert("not ready"))
    role = "coordinator" if status.cache is not None else "node"
    at = f"{now:%H:%M:%S} UTC" if now else ""
    again = (
        f"Paused. {view.link('Resume updates', paused=False)}"
        if view.paused
        else f"Updates every {REFRESH_S} s. {view.link('Pause', paused=True)}"
    )
    return (
        f"<header><h1>Data cache: {ready}</h1>"
        f'<p class="mute">{role} {escape(_label(status.node))}</p>'
        f'<p class="mute">{at} {again}</p></header>'
    )


def _of_other(status: NodeStatus, view: View) -> Iterator[str]:
    """The way to the coordinator, which alone knows jobs, datasets and the other nodes."""
    address = status.coordinator_page
    if not address.startswith(("http://", "https://")):
        where = "which this node has not reached yet"
    else:
        to = escape(address + view.query.rstrip("?"))
        where = f'<a href="{to}">{escape(address)}</a>'
    yield (
        "<section><h2>Jobs, datasets and nodes</h2><p>This node knows only its own shards. All the "
        f"rest is on the page of the coordinator: {where}</p></section>"
    )


def _of_cache(cache: CacheStatus, view: View) -> Iterator[str]:
    names = {node.id: _label(node) for node in cache.nodes}
    yield from _problems(cache, view)
    yield from jobs_view(cache.jobs, cache.job, names, view)
    datasets = [
        [
            info.spec.name,
            Alert(state_name(info.state)) if info.state in _BAD_STATES else state_name(info.state),
            _loaded(info),
            f"{info.num_rows or info.progress.rows_done:,}",
            size(info.num_bytes),
            _shards(info.progress),
        ]
        for info in sorted(cache.datasets, key=lambda info: info.state in _CALM_STATES)
    ]
    zoned = any(node.zone for node in cache.nodes)
    nodes = [
        [
            _label(node),
            _state(node),
            _memory_bar(node),
            f"{node.stored_shards:,}",
            node.flight_location,
            *[node.zone or "none"] * zoned,
        ]
        for node in sorted(cache.nodes, key=lambda node: node.alive)
    ]
    yield '<div class="pair">'
    yield section("Datasets", ["dataset", "state", "loaded", "rows", "size", "shards"], datasets)
    titles = ["node", "state", "memory", "shards", "Flight", *["zone"] * zoned]
    yield section("Nodes", titles, nodes)
    yield "</div>"


def _state(node: pb.Node) -> str:
    """Of a node, in a few words."""
    if not node.alive:
        return Alert("untrusted" if node.untrusted else "lost")
    if not node.HasField("drain"):
        return "alive"
    if node.drain.done:
        return "drained"
    waits = f"; waits: {node.drain.waits}" if node.drain.waits else ""
    return f"draining: {node.drain.shards_left:,} shards left, {size(node.drain.bytes_left)}{waits}"


def _problems(cache: CacheStatus, view: View) -> Iterator[str]:
    """What someone must look at; empty: nothing."""
    found = []
    untrusted = [node for node in cache.nodes if node.untrusted]
    lost = [node for node in cache.nodes if not node.alive and not node.untrusted]
    for what, nodes in (("lost", lost), ("untrusted", untrusted)):
        if nodes:
            some = some_of(map(_label, nodes))
            found.append(f"{len(nodes)} of {len(cache.nodes)} nodes {what}: {some}")
    if cache.damaged_entries:
        found.append(f"{cache.damaged_entries} damaged entries of the catalogue are set aside")
    failed = [info for info in cache.datasets if info.state in _BAD_STATES]
    items = [f"<li>{text(Alert(each))}</li>" for each in found]
    is_cut = False
    for info in failed[:_MOST_FAILURES]:
        message = info.error.message
        first = short(message.partition("\n")[0])
        is_cut |= first != message
        head = f"dataset {info.spec.name} {state_name(info.state)}"
        if "errors" in view.shown and first != message:
            items.append(f"<li>{text(Alert(head))}{_whole(info)}</li>")
        else:
            items.append(f"<li>{text(Alert(f'{head}: {first}'))}</li>")
    if len(failed) > _MOST_FAILURES:
        more = f"{len(failed) - _MOST_FAILURES} more datasets failed or are unavailable"
        items.append(f"<li>{text(Alert(more))}</li>")
    if items:
        fold = f"<p>{view.fold('errors', 'whole errors')}</p>" if is_cut else ""
        yield f"<section><h2>Problems</h2><ul>{''.join(items)}</ul>{fold}</section>"


def _whole(info: pb.DatasetInfo) -> str:
    """A long error, which scrolls."""
    label = escape(f"error of {info.spec.name}")
    return (
        f'<pre tabindex="0" role="region" aria-label="{label}">{escape(info.error.message)}</pre>'
    )


def _shards(progress: pb.LoadProgress) -> str:
    reused = f" ({progress.shards_reused:,} reused)" if progress.shards_reused else ""
    return f"{progress.shards_done:,} of {progress.shards_total:,}{reused}"


def _loaded(info: pb.DatasetInfo) -> object:
    """The progress of a load, its rate, the time left, and what it waits for."""
    progress = info.progress
    if info.state != pb.DATASET_STATE_LOADING:
        return ""
    share = progress.shards_done / progress.shards_total if progress.shards_total else 0.0
    if progress.estimated_rows:
        share = max(share, min(1.0, progress.rows_done / progress.estimated_rows))
    said = f"{share:.0%}"
    if progress.elapsed_s > 0:
        said += f", {progress.rows_done / progress.elapsed_s:,.0f} rows/s"
        if share > 0:
            said += f", {duration(progress.elapsed_s * (1 - share) / share)} left"
    if progress.waits:
        said += f"; waits: {short(progress.waits)}"
    return Html(bar(share, said))


def _memory_bar(node: pb.Node) -> object:
    if not node.memory_limit_bytes:
        return _memory(node)
    return Html(bar(node.stored_bytes / node.memory_limit_bytes, _memory(node)))


def _memory(node: pb.Node) -> str:
    limit = f" of {size(node.memory_limit_bytes)}" if node.memory_limit_bytes else ""
    return f"{size(node.stored_bytes)}{limit}"


def _of_node(status: NodeStatus) -> Iterator[str]:
    node = status.node
    versions = [
        [
            version.key.dataset,
            version.key.fingerprint,
            version.served,
            version.sealed,
            version.loading,
            Alert(version.failed) if version.failed else 0,
            size(version.num_bytes),
        ]
        for version in status.versions
    ]
    sent = [
        [read.dataset, read.verb, f"{served.rows:,}", size(served.num_bytes)]
        for read, served in sorted(status.counts.served.items())
    ]
    shards = ["dataset", "fingerprint", "served", "sealed", "loading", "failed", "size"]
    yield "<section><h2>This node</h2>"
    yield facts(
        [
            ("memory", _memory(node)),
            ("Flight", node.flight_location),
            ("control", node.control_location),
            *[("zone", node.zone)] * bool(node.zone),
            ("coordinator", status.coordinator or Alert("not reached yet")),
            ("directory", node.cache_dir),
        ]
    )
    yield '<div class="pair">'
    yield section("Shards on this node", shards, versions, level=3)
    yield section("Sent by this node", ["dataset", "verb", "rows", "size"], sent, level=3)
    errors = sorted(status.counts.errors.items())
    yield section("Failed calls", ["error", "count"], errors, level=3)
    yield "</div></section>"
