"""Draws `results/shuffle.json`, `results/simulation.json` and `results/eviction.json`.

    python benchmarks/plot.py [RESULT.json ...]        # beside each: RESULT.png

Runs in the environment of the other libraries, which has matplotlib; needs nothing of this
project. Of `shuffle.json` it draws rows per second of ten contenders, on a logarithmic axis; behind
each name is what its order really is, and of each library only the fastest line is drawn. Of
`simulation.json` it draws what was predicted beside what was measured, and the rate of a rank; of
`eviction.json` what each policy loads again, beside LRU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib  # type: ignore[import-not-found]

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # type: ignore[import-not-found]
from matplotlib.patches import Patch  # type: ignore[import-not-found]
from matplotlib.ticker import (  # type: ignore[import-not-found]
    FuncFormatter,
    LogLocator,
    NullFormatter,
)

RESULTS = Path(__file__).resolve().parent / "results"
CACHE, PLAIN, PEER = "#2f6db5", "#8a8f98", "#d9822b"
WHO = {
    CACHE: "this cache",
    PLAIN: "plainly possible: in memory, bare Flight, pyarrow",
    PEER: "other libraries",
}
DRAWN = (  # begins of names
    *("cache, local, shuffled", "cache, Flight 1 node, shuffled"),
    *("torch index_select", "pyarrow.dataset"),
    *("Hugging Face", "Ray Data", "Lance", "LitData", "Grain", "MosaicML Streaming"),
)
TITLES = {
    "floats": "32 float32 and a label",
    "embeddings": "embeddings of 768 float32",
    "lineitem": "TPC-H lineitem, with strings",
}


def main() -> None:
    """Writes a PNG beside each result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="*", help="default: all")
    paths: list[Path] = parser.parse_args().results
    drawn = [RESULTS / f"{name}.json" for name in ("shuffle", "simulation", "eviction")]
    for path in paths or filter(Path.exists, drawn):
        result = json.loads(path.read_text())
        if "ratios_to_lru" in result:
            figure = draw_evictions(result)
        else:
            figure = draw_contenders(result) if "tables" in result else draw_simulation(result)
        target = path.with_suffix(".png")
        figure.savefig(target, dpi=110)
        print(f"written to {target}")


def draw_contenders(result: dict[str, Any]) -> Any:
    """A panel a table, a bar a contender."""
    tables = {name: chosen(timings) for name, timings in result["tables"].items()}
    heights = [len(timings) + 2 for timings in tables.values()]
    figure, axes = plt.subplots(
        len(tables),
        1,
        figsize=(11, 0.32 * sum(heights) + 1),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for (name, timings), axis in zip(tables.items(), axes[:, 0], strict=True):
        draw(axis, TITLES.get(name, name), timings)
    host = result["host"]
    figure.legend(
        handles=[Patch(color=color_, label=label) for color_, label in WHO.items()],
        title=f"Batches of {result['batch_size']}; {host['processor']}, {host['cores']} cores",
        loc="outside upper center",
        ncols=len(WHO),
        frameon=False,
    )
    return figure


def draw_simulation(result: dict[str, Any]) -> Any:
    """What was predicted beside what was measured, and steps per second by case."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    checked = result["checked"]
    places = range(len(checked))
    for shift, kind, color_ in ((-0.2, "predicted", PEER), (0.2, "measured", CACHE)):
        rates = [check["pairs"]["M rows/s"][kind] for check in checked]
        left.bar([place + shift for place in places], rates, 0.38, color=color_, label=kind)
    left.set_xticks(places, [f"{check['num_nodes']}" for check in checked])
    left.set_xlabel("nodes, on one core", fontsize=8)
    left.set_ylabel("million rows/s of one reader", fontsize=8)
    left.legend(frameon=False, fontsize=8)
    cases = result["cases"]
    medians = [case["steps_per_s_a_rank"]["p50"] for case in cases]
    right.barh(range(len(cases)), medians, color=CACHE, height=0.72)
    right.set_yticks(range(len(cases)), [case["case"]["name"] for case in cases], fontsize=8)
    right.invert_yaxis()
    right.set_xscale("log")
    right.set_xlim(min(medians) / 2, max(medians) * 4)
    for place, case in enumerate(cases):
        label = f"{medians[place]:,.0f}"
        if case["longest_wait_s"] > 1:
            label += f", waits up to {case['longest_wait_s']:.0f} s"
        right.text(medians[place] * 1.05, place, label, va="center", fontsize=8)
    right.set_xlabel("steps/s of a rank, batches of 1024", fontsize=8)
    for axis, title in ((left, "Predicted and measured here"), (right, "Simulated")):
        axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return figure


def draw_evictions(result: dict[str, Any]) -> Any:
    """Bytes and seconds that each policy loads again, beside LRU, by the size of the cache."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True, layout="constrained")
    rows = result["ratios_to_lru"]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    capacities = list(dict.fromkeys(row["capacity"] for row in rows))
    colors = dict(zip(policies, [CACHE, PLAIN, PEER, "#e8b27d", "#c9ccd1"], strict=True))
    for axis, what in zip(axes, ("num_bytes", "seconds"), strict=True):
        for place, policy in enumerate(policies):
            found = [row[what] for row in rows if row["policy"] == policy]
            middles, lows, highs = zip(*found, strict=True)
            at = [index + (place - 2) * 0.16 for index in range(len(capacities))]
            spread = [
                [middle - low for middle, low in zip(middles, lows, strict=True)],
                [high - middle for middle, high in zip(middles, highs, strict=True)],
            ]
            axis.bar(at, middles, 0.15, color=colors[policy], label=policy, yerr=spread,
                     error_kw={"elinewidth": 0.7})  # fmt: skip
        axis.set_xticks(range(len(capacities)), [f"{share:.0%}" for share in capacities])
        axis.set_xlabel("cache, of the bytes of all datasets", fontsize=8)
        title = f"{'Bytes' if what == 'num_bytes' else 'Seconds'} loaded again / LRU"
        axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axis.axhline(0.7, color="black", linewidth=0.6, linestyle=":")
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def chosen(timings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest line of each kind that is drawn, of one rank; fastest first."""
    of_one_rank = (timing for timing in timings if not timing["name"].endswith("ranks"))
    ordered = sorted(of_one_rank, key=lambda timing: -float(timing["rows_per_s"]))
    found = (
        next((timing for timing in ordered if timing["name"].startswith(kind)), None)
        for kind in DRAWN
    )
    return sorted(filter(None, found), key=ordered.index)


def draw(axis: Any, title: str, timings: list[dict[str, Any]]) -> None:
    """One panel: a bar a contender, with its rate and its order."""
    rates = [timing["rows_per_s"] for timing in timings]
    places = range(len(timings))
    axis.barh(places, rates, color=[color(timing["name"]) for timing in timings], height=0.72)
    labels = [f"{timing['name']}  ({timing['order']})" for timing in timings]
    axis.set_yticks(places, labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(min(rates) / 2, max(rates) * 3)
    axis.margins(y=0.01)
    for place, rate in zip(places, rates, strict=True):
        axis.text(rate * 1.05, place, readable(rate), va="center", fontsize=8)
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axis.set_xlabel("rows/s", fontsize=8)
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: readable(rate)))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def color(name: str) -> str:
    """By who it is."""
    if name.startswith("cache"):
        return CACHE
    return PLAIN if name.startswith(("bare", "torch", "pyarrow")) else PEER


def readable(rate: float) -> str:
    """Up to three digits and a unit."""
    return f"{rate / 1e6:.3g} M" if rate >= 1e6 else f"{rate / 1e3:.3g} k"


if __name__ == "__main__":
    main()
