"""The commands of `cachectl` for the nodes of a cache."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer

from cache_client.cli.app import AsJson, Endpoint, TimeoutS, client_of
from cache_client.cli.display import print_json, show_line, show_rows
from cache_client.control.drains import what_is_left
from cache_client.control.infos import FunctionInfo, NodeInfo
from cache_protocol.cli.output import size
from cache_protocol.errors import ConfigError

NodeName = Annotated[
    str,
    typer.Argument(metavar="NODE", help="Id, endpoint or host of a node; the name of its pod."),
]
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)?")
_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600}


def nodes(endpoint: Endpoint = None, timeout_s: TimeoutS = 30.0, as_json: AsJson = False) -> None:
    """List the cache nodes."""
    found = client_of(endpoint, timeout_s=timeout_s).nodes()
    if as_json:
        print_json([asdict(node) for node in found])
        return
    zoned = any(node.zone for node in found)
    show_rows(
        ["node", "alive", "flight", *["zone"] * zoned, "shards", "stored", "limit", "cache dir"],
        [
            [
                node.id,
                _alive(node),
                node.flight_location,
                *[node.zone or "none"] * zoned,
                str(node.stored_shards),
                size(node.stored_bytes),
                size(node.memory_limit_bytes) if node.memory_limit_bytes else "none",
                node.cache_dir,
            ]
            for node in found
        ],
    )


def functions(
    endpoint: Endpoint = None, timeout_s: TimeoutS = 30.0, as_json: AsJson = False
) -> None:
    """List the functions that SQL may call on the nodes."""
    nodes = [node for node in client_of(endpoint, timeout_s=timeout_s).nodes() if node.alive]
    found: dict[FunctionInfo, list[str]] = {}
    for node in nodes:
        for function in node.functions:
            found.setdefault(function, []).append(node.id)
    ordered = sorted(found, key=lambda each: (each.name, each.version))
    if as_json:
        print_json([{**asdict(each), "nodes": found[each]} for each in ordered])
        return
    for each in ordered:
        where = "all nodes" if len(found[each]) == len(nodes) else ", ".join(found[each])
        show_line(f"{each.signature}")
        show_line(f"    version {each.version} on {where}: {each.text}")


def drain(
    node: NodeName,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Time to wait, such as 90s or 10m.  [default: no limit]"
        ),
    ] = None,
    endpoint: Endpoint = None,
    timeout_s: TimeoutS = 30.0,
    as_json: AsJson = False,
) -> None:
    """Move the shards of a node to others, to stop it."""
    deadline_s = None if deadline is None else seconds_of(deadline)
    told = ""

    def tell(info: NodeInfo) -> None:
        nonlocal told
        if info.drain and not info.drain.done and told != (left := what_is_left(info)):
            told = left
            show_line(f"node {info.id}: {left}")

    info = client_of(endpoint, timeout_s=timeout_s).drain(
        node, deadline_s=deadline_s, on_progress=None if as_json else tell
    )
    if as_json:
        print_json(asdict(info))
    else:
        show_line(f"node {info.id}: done")


def undrain(
    node: NodeName, endpoint: Endpoint = None, timeout_s: TimeoutS = 30.0, as_json: AsJson = False
) -> None:
    """Let a drained node take shards again."""
    info = client_of(endpoint, timeout_s=timeout_s).undrain(node)
    if as_json:
        print_json(asdict(info))
    else:
        show_line(f"node {info.id} takes shards")


def _alive(node: NodeInfo) -> str:
    """Whether a node answers, and how far it is drained."""
    if not node.alive:
        return "untrusted" if node.untrusted else "no"
    if node.drain is None:
        return "yes"
    return "drained" if node.drain.done else f"draining: {node.drain.shards_left} left"


def seconds_of(text: str) -> float:
    """The seconds of a text such as ``90s``, ``10m``, ``2h`` or ``90``.

    Raises:
        ConfigError: it is no duration; quotes it.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ConfigError(f"--deadline must be a duration such as 90s or 10m, got {text!r}")
    return float(found[1]) * _SECONDS[found[2]]
