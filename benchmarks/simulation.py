"""What do 1,000 nodes with 100,000 shards do for 10,000 ranks? Simulated by the real planners.

    python -m benchmarks.simulation [--quick]

The simulation is `benchmarks.simulated_cluster`; what a row, a message and a request cost is
measured on this machine by `benchmarks.costs`. The same simulation is compared with one reader and
1, 2, 4 and 8 real nodes of this machine, whose cores it knows.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import memory_directory, pin, process_cpu_s, write_result
from benchmarks.costs import SHARD_BYTES, Costs, measure_costs
from benchmarks.scale import BATCH_SIZE
from benchmarks.simulated_cluster import Case, Machines, Plans, Simulation
from benchmarks.simulation_report import write_report
from benchmarks.tables import FEATURES, floats
from cache_client import CacheClient, CacheIterableDataset, DatasetSpec
from cache_server import LocalCluster

LOCAL_NODES = (1, 2, 4, 8)
TARGET_ERROR = 0.15


def main() -> None:
    """Measures the costs, checks the simulation, runs it, and writes the result files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the cluster")
    parser.add_argument("--repeats", type=int, default=9, help="epochs of each local cluster")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    part = 10 if arguments.quick else 1
    load_average = os.getloadavg()[0]
    table = floats(400_000 if arguments.quick else 4_000_000)
    costs, errors = measure_costs(table)
    print("ns: " + ", ".join(f"{name} {value:,.4g}" for name, value in asdict(costs).items()))
    repeats: int = 3 if arguments.quick else arguments.repeats
    local_nodes = LOCAL_NODES[:2] if arguments.quick else LOCAL_NODES
    checked = [check(nodes, table, costs, repeats) for nodes in local_nodes]
    results = []
    for case in cases(part):
        begun = time.perf_counter()
        results.append(Simulation(case, costs).run())
        print(f"{case.name}: simulated in {time.perf_counter() - begun:.0f} s")
    result = {
        "load_average": load_average,
        "costs_ns": asdict(costs),
        "errors_of_fits": errors,
        "machines": asdict(Machines()),
        "checked": checked,
        "cases": results,
        "target_error": TARGET_ERROR,
    }
    name = "simulation-quick" if arguments.quick else "simulation"
    path = write_result(name, result)
    print(f"\nwritten to {path} and {write_report(path)}")


def cases(part: int) -> list[Case]:
    """What is simulated; a cluster of full size is divided by ``part``."""
    full = Case("", 1_000 // part, 100_000 // part, 10_000 // part)
    one, two = replace(full, replicas=1), replace(full, replicas=2)
    training = replace(two, step_s=0.1, windows=6, lost_at_s=15.0)
    return [
        *(
            replace(full, name=f"{num:,} nodes", num_nodes=num, num_shards=num * 100,
                    num_ranks=num * 10)
            for num in (10 // part, 100 // part) if num
        ),
        replace(one, name="replicas 1"),
        replace(two, name="replicas 2"),
        replace(two, name="replicas 2, 1% of nodes 4 times as slow", slow=10 // part),
        replace(one, name="replicas 1, a node lost", lost=1),
        replace(two, name="replicas 2, a node lost", lost=1),
        replace(two, name="replicas 2, 1% of nodes lost", lost=10 // part),
        replace(training, name="replicas 2, 10 steps/s"),
        replace(training, name="replicas 2, 10 steps/s, a node lost", lost=1),
        replace(training, name="replicas 1, 10 steps/s, a node lost", lost=1, replicas=1),
    ]  # fmt: skip


def check(num_nodes: int, table: Path, costs: Costs, repeats: int) -> dict[str, Any]:
    """Reads epochs from nodes of this machine, and predicts how long that takes.

    The reader runs on one core, all nodes share another one.
    """
    with (
        memory_directory("cache-bench-") as directory,
        LocalCluster(num_nodes, directory) as cluster,
    ):
        client = CacheClient(cluster.endpoint)
        info = client.load(DatasetSpec("table", table, target_shard_bytes=SHARD_BYTES))
        pids = [node.pid for node in cluster.nodes]
        dataset = CacheIterableDataset(
            "table", endpoint=cluster.endpoint, batch_size=BATCH_SIZE,
            stack={"features": FEATURES}, shuffle=True, local=False,
        )  # fmt: skip
        measured: dict[str, list[float]] = {"seconds": [], "client_s": [], "node_s": []}
        with pin(dict.fromkeys(pids, -1)):
            for epoch in range(1 + repeats):
                dataset.set_epoch(epoch)
                begun = time.perf_counter(), time.process_time(), sum(map(process_cpu_s, pids))
                assert sum(len(batch["label"]) for batch in dataset) == info.num_rows
                ended = time.perf_counter(), time.process_time(), sum(map(process_cpu_s, pids))
                if epoch:
                    for values, start, stop in zip(measured.values(), begun, ended, strict=True):
                        values.append(stop - start)
    idle = num_nodes * costs.node_idle / 1e9  # of the core
    one = Machines(max(0.1, 1 - idle), 1, True, 1, math.inf, 0.0)
    case = Case(
        f"{num_nodes} local", num_nodes, info.num_shards, 1, machines=one,
        rows_per_shard=info.num_rows // info.num_shards,
    )  # fmt: skip
    steps = Plans(replace(case, windows=1), costs).steps_per_window
    windows = info.num_rows // BATCH_SIZE // steps
    predicted = Simulation(replace(case, windows=windows), costs).run()
    rows, rate = info.num_rows, windows * steps * BATCH_SIZE / predicted["took_virtual_s"]
    found = {name: min(values) for name, values in measured.items()}  # as costs are the least
    idle_ns = idle * found["seconds"] * 1e9  # of the time that really passed
    pairs = {
        "M rows/s": (rate / 1e6, rows / found["seconds"] / 1e6),
        "client, ns a row": (predicted["client_cpu_ns_a_row"], found["client_s"] / rows * 1e9),
        "nodes, ns a row": (predicted["node_cpu_ns_a_row"] + idle_ns / rows,
                            found["node_s"] / rows * 1e9),
    }  # fmt: skip
    for what, (guess, truth) in pairs.items():
        print(f"{num_nodes} nodes, {what}: predicted {guess:.2f}, measured {truth:.2f}, "
              f"{guess / truth - 1:+.0%}")  # fmt: skip
    return {
        "num_nodes": num_nodes,
        "seconds": measured["seconds"],
        "pairs": {name: {"predicted": a, "measured": b, "error": a / b - 1}
                  for name, (a, b) in pairs.items()},
    }  # fmt: skip


if __name__ == "__main__":
    main()
