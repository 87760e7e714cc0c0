"""Does a training loop wait for its data?

    python -m benchmarks.device [--device cuda] [--quick]

A small MLP trains on batches of 32 float32 columns and a label, shuffled, from one node of this
machine. A step waits for data when asking for the next batch takes longer than a twentieth of a
step whose batch lies on the device already; that step is measured first, with one batch that stays.
The ways to the device, in turn:

- ``device=`` of the dataset: copied ahead on a second stream from two pinned slots;
- a DataLoader with ``pin_memory`` and ``to(device, non_blocking=True)``, as one usually writes it;
- ``to(device)`` in the loop.

Without a CUDA device it runs on the CPU, which needs no copy: that shows that it
works, and nothing about a GPU; the result file says which device it was.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.common import median_interval, memory_directory, write_result
from benchmarks.tables import FEATURES, floats
from cache_client import CacheClient, CacheIterableDataset, DatasetSpec
from cache_server import LocalCluster

NO_DATA = "no data: one batch that stays"  # what the others are compared with
WIDTH = 512
WAITS = 0.05  # of a step's time
_WARM_UP_STEPS = 20


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--quick", action="store_true", help="a look in seconds")
    arguments = parser.parse_args()
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(arguments.device or found)
    steps = 30 if arguments.quick else 300
    rows = arguments.batch_size * (steps + _WARM_UP_STEPS)
    with memory_directory("cache-bench-") as directory, LocalCluster(1, directory) as cluster:
        CacheClient(cluster.endpoint).load(DatasetSpec("table", floats(rows)))
        results = measure(cluster.endpoint, device, arguments.batch_size, steps)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, no GPU"
    print(f"\n{name}, batches of {arguments.batch_size:,} rows, {steps} steps\n")
    print(f"{'':52} {'steps/s':>8} {'of the most':>12} {'steps that waited':>18}")
    for way, result in results.items():
        print(
            f"{way:52} {result['steps_per_s']:8.1f} {result['of_the_most']:12.2f} "
            f"{result['share_that_waited']:18.1%}"
        )
    path = write_result(
        "device-quick" if arguments.quick else "device",
        {
            "device": name,
            "batch_size": arguments.batch_size,
            "steps": steps,
            "a_step_waits_from": WAITS,
            "results": results,
        },
    )
    print(f"\nwritten to {path}")


def measure(
    endpoint: str, device: torch.device, batch_size: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Each way to the device by the same loop, beside the loop that needs no data."""

    def dataset(**arguments: Any) -> CacheIterableDataset:
        return CacheIterableDataset(
            "table",
            cache=endpoint,
            batch_size=batch_size,
            shuffle=True,
            stack={"features": FEATURES},
            **arguments,
        )

    def ahead() -> Iterator[dict[str, Tensor]]:
        return iter(dataset(device=str(device)))

    def pinned() -> Iterator[dict[str, Tensor]]:
        pin = device.type == "cuda"
        loader = DataLoader(dataset(), batch_size=None, pin_memory=pin)
        return moved(loader, device, non_blocking=True)

    def plainly() -> Iterator[dict[str, Tensor]]:
        return moved(dataset(), device, non_blocking=False)

    kept = next(ahead())
    ways: dict[str, Callable[[], Iterator[dict[str, Tensor]]]] = {
        "device=, copied ahead": ahead,
        "DataLoader, pin_memory, non_blocking": pinned,
        "to(device) in the loop": plainly,
    }
    trained = {NO_DATA: train(itertools.repeat(kept), device, steps)}
    trained |= {name: train(batches(), device, steps) for name, batches in ways.items()}
    _, best = trained[NO_DATA]
    return {
        name: {
            "step_s": step_s,
            "steps_per_s": 1 / step_s,
            "of_the_most": best / step_s,
            "share_that_waited": sum(wait > WAITS * best for wait in waits_s) / len(waits_s),
            "median_wait_s": statistics.median(waits_s),
            "median_wait_s_interval": list(median_interval(waits_s)[:2]),
        }
        for name, (waits_s, step_s) in trained.items()
    }


def moved(
    batches: Iterable[dict[str, Tensor]], device: torch.device, *, non_blocking: bool
) -> Iterator[dict[str, Tensor]]:
    """Batches whose tensors are copied when they are asked for."""
    for batch in batches:
        yield {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in batch.items()}


def train(
    batches: Iterator[dict[str, Tensor]], device: torch.device, steps: int
) -> tuple[list[float], float]:
    """Seconds that each step waited for its batch, and of a step, all in all."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(len(FEATURES), WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    waits_s: list[float] = []
    started = 0.0
    for step in range(_WARM_UP_STEPS + steps):
        if step == _WARM_UP_STEPS:
            waits_s.clear()
            _finish(device)
            started = time.perf_counter()
        asked = time.perf_counter()
        batch = next(batches)
        waits_s.append(time.perf_counter() - asked)
        loss = nn.functional.mse_loss(
            model(batch["features"]).squeeze(1), batch["label"].to(torch.float32)
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    _finish(device)
    return waits_s, (time.perf_counter() - started) / steps


def _finish(device: torch.device) -> None:
    """Waits for what the device has still to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
