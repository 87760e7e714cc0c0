"""Draws `results/shuffle.json`: rows per second of ten contenders, on a logarithmic axis.

    python benchmarks/plot.py [RESULT.json]        # beside it: RESULT.png

Runs in the environment of the other libraries, which has matplotlib; needs nothing of this
project. Behind each name is what its order really is. Of each library only its fastest line is
drawn; the JSON file has all.
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

RESULT = Path(__file__).resolve().parent / "results" / "shuffle.json"
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
    """Writes a PNG beside the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, nargs="?", default=RESULT)
    path: Path = parser.parse_args().result
    result = json.loads(path.read_text())
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
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    print(f"written to {target}")


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
