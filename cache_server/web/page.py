"""A `NodeStatus` as one HTML page. Every string is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from cache_protocol.cli.sizes import size
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.dataset_states import state_name
from cache_server.node.status import CacheStatus, NodeStatus

_REFRESH_S = 5
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #8884; padding: .3rem 1rem .3rem 0; text-align: left }
div { overflow-x: auto }
.number { text-align: right; white-space: nowrap } .bad { color: #c22; overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) {
  :root { color-scheme: dark } body { background: #111; color: #ddd }
  a { color: #8bf } .bad { color: #f77 }
}
"""
# Columns of words; the other columns hold numbers.
_WORDS = {"dataset", "fingerprint", "verb", "error", "id", "Flight", "state"}


class _Alert(str):
    """Shown in red."""


def page(status: NodeStatus) -> str:
    """The page of one node. A coordinator's page begins with the whole cache."""
    node_id = escape(status.node.id)
    ready = "ready" if status.ready else '<span class="bad">not ready</span>'
    cache = _of_cache(status.cache) if status.cache is not None else []
    body = "".join([*cache, *_of_node(status)])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{_REFRESH_S}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Cache node {node_id}</title><style>{_STYLE}</style></head>"
        f"<body><h1>Cache node {node_id}: {ready}</h1>{body}"
        '<p><a href="metrics">metrics</a></p></body></html>\n'
    )


def _of_cache(cache: CacheStatus) -> list[str]:
    datasets = [
        [
            info.spec.name,
            _Alert(f"failed: {info.error.message}")
            if info.state == pb.DATASET_STATE_FAILED
            else state_name(info.state),
            f"{info.num_rows or info.progress.rows_done:,}",
            f"{info.progress.shards_done:,} of {info.progress.shards_total:,}",
            size(info.num_bytes),
        ]
        for info in cache.datasets
    ]
    nodes = [
        [
            node.id,
            node.flight_location,
            "alive" if node.alive else _Alert("lost"),
            f"{node.stored_shards:,}",
            _memory(node),
        ]
        for node in cache.nodes
    ]
    return [
        _section("Datasets", ["dataset", "state", "rows", "shards", "size"], datasets),
        _section("Nodes", ["id", "Flight", "state", "shards", "memory"], nodes),
    ]


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
    return f"<{tag}{kind}>{escape(str(value))}</{tag}>"


def _memory(node: pb.Node) -> str:
    limit = f" of {size(node.memory_limit_bytes)}" if node.memory_limit_bytes else ""
    return f"{size(node.stored_bytes)}{limit}"
