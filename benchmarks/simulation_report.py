"""Writes a result of `benchmarks.simulation` as a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cache_client.flight.connections import REQUEST_TIMEOUT_S
from cache_server.config import NodeConfig
from cache_server.rpc.stream_limits import MAX_CALLS_OF_PRINCIPAL

NODE_TIMEOUT_S = NodeConfig.model_fields["node_timeout_s"].default


def write_report(result_path: Path) -> Path:
    """Writes ``scale.md`` beside a result file, or ``simulation-quick.md`` beside a quick one."""
    result = json.loads(result_path.read_text())
    quick = result_path.stem.endswith("-quick")
    path = result_path.with_name("simulation-quick.md" if quick else "scale.md")
    path.write_text(report(result))
    return path


CHECKS = ("nodes", "what", "predicted", "measured", "error")
READS = (
    *("case", "steps/s of a rank: p1, p50, p99", "requests/s of a node", "streams of a node"),
    *("Gbit/s of a node: mean, max", "of 0.8 of 100 Gbit/s", "cores of a node", "longest wait, s"),
)
MOVES = (
    *("case", "read, GB", "held: max/mean, p99", "served: max/mean, p99"),
    *("moved from replicas, from the source, GB", "recovered after, s"),
)


def report(result: dict[str, Any]) -> str:
    """The page, in Markdown."""
    costs, machines, host = result["costs_ns"], result["machines"], result["host"]
    latency_us = machines["latency_s"] * 1e6
    stream_ms = costs["node_stream"] / 1e6
    cases = {case["case"]["name"]: case for case in result["cases"]}
    size = max(result["cases"], key=lambda case: case["case"]["num_nodes"])["case"]
    most_requests = 1e9 / (costs["node_request"] + costs["node_message"])
    fits = max(abs(error) for error in result["errors_of_fits"].values())
    checks = table(CHECKS, _checks(result))
    reads = table(READS, (_reads(name, case) for name, case in cases.items()))
    moves = table(MOVES, (_moves(name, case) for name, case in cases.items()))
    each = ((f"`{name}`", f"{ns:,.1f}") for name, ns in costs.items() if name != "row_bytes")
    return f"""# Scale

`python -m benchmarks.simulation` writes this page and `simulation.json`, `benchmarks/plot.py` the
plot. Machine: {host["processor"]}, {host["cores"]} cores, commit {host["commit"]}, load average
{result["load_average"]:.1f} when it began.

Placement, order, routing and window sizes are the code of this project. Clock, processors and
network are virtual. Costs are measured here; each fit is within {fits:.0%} of its points.

![Predicted beside measured, and steps per second of a rank](simulation.png)

## Predicted and measured

One reader on one core, all nodes on another one. To reach: {result["target_error"]:.0%}.

{checks}

## What was simulated

{size["num_nodes"]:,} nodes, {size["num_shards"]:,} shards of {size["rows_per_shard"]:,} rows of
{costs["row_bytes"]} bytes, {size["num_ranks"]:,} ranks; smaller clusters in proportion. Batches of
1024. A rank reads as fast as it can, or trains 10 steps/s together with all others.

{reads}

A window has rows of all nodes, so each rank has one stream to each node. Not bytes but requests and
streams are the limit:

- A node takes {most_requests:,.0f} requests/s at most, one after the other: Python has one lock.
- A reader uses a stream for {REQUEST_TIMEOUT_S:.0f} s. A node opens one in {stream_ms:.2f} ms.
- A node refuses more than {MAX_CALLS_OF_PRINCIPAL:,} streams of one principal, and fewer with less
  than 48 GiB of memory. A rank has two streams while it replaces one, so a job can have
  half as many ranks.

{moves}

Lost nodes are found by their timeout of {NODE_TIMEOUT_S:.0f} s. A rank that trains has windows
ahead. It does not notice a loss that is shorter than they last.

## Costs

Nanoseconds of processor time; `benchmarks.costs` says what each one is.

{table(("what", "ns"), each)}

## What is assumed

- A node has {machines["node_cores"]} cores and a network card of 100 Gbit/s. A rank has
  {machines["rank_cores"]} cores; {machines["ranks_per_host"]} ranks share such a card. A message
  takes {latency_us:.0f} µs.
- A network costs the processor what the loopback of this machine costs.
- A node handles requests, messages and new streams one by one, which is the worst case of a lock.
  It gathers rows on all of its cores.
- Killed nodes refuse connections at once. A frozen machine is found by the timeout of a request.
- {size["sample_windows"]} windows of each case have all of their real row ids. Other ranks ask each
  node for as many rows as one of those.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _checks(result: dict[str, Any]) -> Iterable[Sequence[str]]:
    for check in result["checked"]:
        for name, pair in check["pairs"].items():
            predicted, measured = f"{pair['predicted']:.3g}", f"{pair['measured']:.3g}"
            yield str(check["num_nodes"]), name, predicted, measured, f"{pair['error']:+.0%}"


def _reads(name: str, case: dict[str, Any]) -> Sequence[str]:
    steps, rate = case["steps_per_s_a_rank"], case["node_gigabits_per_s"]
    return (
        name,
        ", ".join(f"{steps[each]:,.0f}" for each in ("p1", "p50", "p99")),
        f"{case['requests_per_s_a_node']:,.0f}",
        f"{case['streams_of_a_node']:,.0f}",
        f"{rate['mean']:.2f}, {rate['max']:.2f}",
        f"{case['share_of_0.8_nic']:.1%}",
        f"{case['node_cores_used']:.2f}",
        f"{case['longest_wait_s']:.1f}",
    )


def _moves(name: str, case: dict[str, Any]) -> Sequence[str]:
    held, served, moved = case["held_over_mean"], case["served_over_mean"], case["moved_bytes"]
    return (
        name,
        f"{case['received_bytes'] / 1e9:,.0f}",
        f"{held['max']:.3f}, {held['p99']:.3f}",
        f"{served['max']:.3f}, {served['p99']:.3f}",
        f"{moved['from a replica'] / 1e9:.1f}, {moved['from the source'] / 1e9:.1f}",
        f"{case['recovery_s']:.1f}" if case["case"]["lost"] else "",
    )
