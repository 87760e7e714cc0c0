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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.common import memory_directory, pin, process_cpu_s, write_result
from benchmarks.costs import SHARD_BYTES, Costs, measure_costs
from benchmarks.scale import BATCH_SIZE
from benchmarks.simulated_cluster import Case, Machines, Plans, Simulation
from benchmarks.simulation_report import write_report
from benchmarks.tables import FEATURES, floats
from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
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
                    num_ranks=num * 10, windows=full.windows * full.num_nodes // num)
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
    """Reads epochs from nodes of this machine, and predicts how long each takes.

    The reader runs on one core, all nodes share another one. What other processes use of these
    cores meanwhile is measured, and is not there for the prediction.
    """
    with (
        memory_directory("cache-bench-") as directory,
        LocalCluster(num_nodes, directory) as cluster,
    ):
        client = CacheClient(cluster.endpoint)
        info = client.load(DatasetSpec("table", table, target_shard_bytes=SHARD_BYTES))
        pids = [node.pid for node in cluster.nodes]
        dataset = CacheIterableDataset(
            "table", cache=Connection(cluster.endpoint, local=False), batch_size=BATCH_SIZE,
            stack={"features": FEATURES}, shuffle=True)  # fmt: skip
        measured: list[Epoch] = []
        cores = sorted(os.sched_getaffinity(0))
        with pin(dict.fromkeys(pids, -1)):
            for epoch in range(1 + repeats):
                dataset.set_epoch(epoch)
                begun = _spent(pids, cores[0], cores[-1])
                assert sum(len(batch["label"]) for batch in dataset) == info.num_rows
                ended = _spent(pids, cores[0], cores[-1])
                measured.append(
                    Epoch(*(stop - start for start, stop in zip(begun, ended, strict=True)))
                )
        del measured[0]  # warms up
    case = Case(
        f"{num_nodes} local", num_nodes, info.num_shards, 1,
        rows_per_shard=info.num_rows // info.num_shards,
    )  # fmt: skip
    steps = Plans(replace(case, windows=1), costs).steps_per_window
    windows = info.num_rows // BATCH_SIZE // steps
    rows, idle = info.num_rows, num_nodes * costs.node_idle / 1e9  # of the core
    rates = []
    for found in measured:
        machines = Machines(
            max(0.05, 1 - idle - found.others_of_nodes),
            max(0.05, 1 - found.others_of_client),
            True, 1, math.inf, 0.0,
        )  # fmt: skip
        predicted = Simulation(replace(case, windows=windows, machines=machines), costs).run()
        rates.append((
            windows * steps * BATCH_SIZE / predicted["took_virtual_s"] / 1e6,
            rows / found.seconds / 1e6,
        ))  # fmt: skip
    rates.sort(key=lambda pair: pair[0] / pair[1])
    idle_ns = [idle * found.seconds * 1e9 for found in measured]  # of the time that really passed
    pairs = {
        "M rows/s": rates[len(rates) // 2],
        # The least, as costs are the least.
        "client, ns a row": (predicted["client_cpu_ns_a_row"],
                             min(found.client_s for found in measured) / rows * 1e9),
        "nodes, ns a row": (predicted["node_cpu_ns_a_row"] + min(idle_ns) / rows,
                            min(found.node_s for found in measured) / rows * 1e9),
    }  # fmt: skip
    for what, (guess, truth) in pairs.items():
        print(f"{num_nodes} nodes, {what}: predicted {guess:.2f}, measured {truth:.2f}, "
              f"{guess / truth - 1:+.0%}")  # fmt: skip
    return {
        "num_nodes": num_nodes,
        "epochs": [asdict(found) for found in measured],
        "pairs": {name: {"predicted": a, "measured": b, "error": a / b - 1}
                  for name, (a, b) in pairs.items()},
    }  # fmt: skip


@dataclass(frozen=True)
class Epoch:
    """Seconds that passed, and processor seconds.

    Attributes:
        client_core_s, node_core_s: that these cores were not idle.
    """

    seconds: float
    client_s: float
    node_s: float
    client_core_s: float
    node_core_s: float

    @property
    def others_of_client(self) -> float:
        """Share of the client's core that other processes used."""
        return max(0.0, self.client_core_s - self.client_s) / self.seconds

    @property
    def others_of_nodes(self) -> float:
        """Share of the nodes' core that other processes used."""
        return max(0.0, self.node_core_s - self.node_s) / self.seconds


def _spent(pids: list[int], client_core: int, node_core: int) -> tuple[float, ...]:
    """The fields of an `Epoch`, since any moment."""
    cores = psutil.cpu_times(percpu=True)
    return (
        time.perf_counter(),
        time.process_time(),
        sum(map(process_cpu_s, pids)),
        *(_busy_s(cores[at]) for at in (client_core, node_core)),
    )


def _busy_s(core: Any) -> float:
    """Seconds that a core was not idle, of `psutil.cpu_times`; guests count as users."""
    return float(sum(core) - core.idle - core.iowait - core.guest - core.guest_nice)


if __name__ == "__main__":
    main()
