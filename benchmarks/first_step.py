"""How long is it from the start of the cache pods of a TrainJob to the first step of its trainers?

    python -m benchmarks.first_step [--tree NAME=DIR ...] [--quick]

Two cache nodes and two trainers run as processes of this machine, as the runtime
``torch-distributed-data-cache`` starts them. The probes look as often as those of its manifest, and
the trainers start when both nodes are ready. What a cluster adds is not here: images, scheduling,
volumes, and the controllers between. Trees of other commits run in turn with this one.

Phases: ``listen`` (start, imports, ports), ``load`` (nodes join, rows load, the dataset is ready),
``probe`` (until the probes have seen it), ``python`` (the interpreter and torch, which are not
ours), ``client`` (imports of the client), ``batch`` (connects, and reads the first one).
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.common import Timing, memory_directory, write_timings
from benchmarks.tables import ROW_BYTES, floats
from tests.free_ports import free_ports

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = "runtimes/torch-distributed-data-cache/runtime.yaml"
PHASES = ("listen", "load", "probe", "python", "client", "batch")
NOT_OURS = ("python",)
RANKS = 2
BATCH_SIZE = 1024
_POLL_S, _LONGEST_S = 0.005, 120.0
_PHASES_OF_PROBES = 20
_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 20)]
TRAIN = """
import time
import torch
print(time.monotonic(), flush=True)
from cache_client import CacheIterableDataset, Connection
print(time.monotonic(), flush=True)
rows = CacheIterableDataset("rows", batch_size=%d, shuffle=True, cache=Connection(local=False))
next(iter(rows))
print(time.monotonic(), flush=True)
"""


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a look in seconds")
    arguments = parser.parse_args()
    rows: int = 50_000 if arguments.quick else arguments.rows
    repeats: int = 3 if arguments.quick else arguments.repeats
    trees = {"this": ROOT}
    trees |= {name: Path(at) for name, _, at in (each.partition("=") for each in arguments.tree)}
    timings = {name: Timing(name, rows, rows * ROW_BYTES) for name in trees}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    with memory_directory("cache-bench-") as directory:
        source = directory / "rows"
        shutil.copytree(floats(rows), source)
        for repeat in range(repeats + 1):
            for name in sorted(trees, reverse=bool(repeat % 2)):
                phases = start(trees[name], source)
                if repeat:  # the first one warms the files up
                    found[name].append(phases)
                    timings[name].seconds.append(ours(phases))
    for name, timing in timings.items():
        medians = {each: statistics.median(one[each] for one in found[name]) for each in PHASES}
        timing.notes.update({f"{each}_s": round(value, 3) for each, value in medians.items()})
        told = "  ".join(f"{each} {value:.2f}" for each, value in medians.items())
        print(f"{name:12} ours {timing.median_s:.2f} s; {told}")
    ratios = {
        f"this over {name}": statistics.median(
            mine / theirs
            for mine, theirs in zip(timings["this"].seconds, timings[name].seconds, strict=True)
        )
        for name in trees
        if name != "this"
    }
    for name, value in ratios.items():
        print(f"{name:40} {value:.2f}")
    write_timings(
        "first_step", timings, ratios, {}, quick=arguments.quick, rows=rows, row_bytes=ROW_BYTES
    )


def ours(phases: Mapping[str, float]) -> float:
    """The seconds that are not those of others."""
    return sum(seconds for name, seconds in phases.items() if name not in NOT_OURS)


def start(tree: Path, source: Path) -> dict[str, float]:
    """Starts a cache and trainers of a tree; the seconds of each phase, of the slowest process."""
    control, other, flight = free_ports(3, ("127.0.0.1",))
    environ = {**os.environ, **_path(tree), "STORAGE_URI": source.as_uri()}
    environ |= {
        "CACHE_DATASET": "rows",
        "CACHE_JOB": "first",
        "CACHE_ENDPOINT": f"grpc://127.0.0.1:{flight}",
    }
    serve = ["-m", "cache_server", "serve", "--load-from-env", "--num-nodes=2", "--http-port=0"]
    serve += ["--insecure", f"--coordinator=127.0.0.1:{control}", "--log-level=warning"]
    with tempfile.TemporaryDirectory(dir=source.parent) as folder, ExitStack() as stack:
        begun = time.monotonic()
        for number, ports in enumerate(((control, flight), (other, 0))):
            control_port, flight_port = ports
            of_node = [f"--cache-dir={folder}/{number}", f"--control-port={control_port}"]
            stack.enter_context(
                _program([*serve, *of_node, f"--flight-port={flight_port}"], environ)
            )
        live = _until(control, "live"), _until(other, "live")
        ready = _until(control, "ready"), _until(other, "ready")
        probe_s = probe_delay_s([at - begun for at in live], [at - begun for at in ready], tree)
        started = time.monotonic()
        code = ["-c", TRAIN % BATCH_SIZE]
        ranks = [
            stack.enter_context(_program(code, {**environ, "RANK": str(r), "WORLD_SIZE": "2"}))
            for r in range(RANKS)
        ]
        told = [[float(line) for line in _lines(rank, 3)] for rank in ranks]
    python, client, batch = (max(each) for each in zip(*told, strict=True))
    return {
        "listen": max(live) - begun,
        "load": max(ready) - max(live),
        "probe": probe_s,
        "python": python - started,
        "client": client - python,
        "batch": batch - client,
    }


def probe_delay_s(live: Sequence[float], ready: Sequence[float], tree: Path) -> float:
    """How much later than it happened the probes of a kubelet see the last pod ready, on average.

    The startup probe looks every second from the start of a pod on, the readiness probe at its
    success and then in its own period.

    Args:
        live, ready: of each pod, in seconds since its start.
    """
    runtime = yaml.safe_load((tree / RUNTIME).read_text())
    job = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]["template"]["spec"]
    period_s: float = pod["containers"][0]["readinessProbe"]["periodSeconds"]
    delays: list[float] = []
    for phase in range(_PHASES_OF_PROBES):
        first_s = phase / _PHASES_OF_PROBES
        seen = []
        for live_s, ready_s in zip(live, ready, strict=True):
            up_s = first_s + math.ceil(max(0.0, live_s - first_s))
            seen.append(up_s + period_s * math.ceil(max(0.0, ready_s - up_s) / period_s))
        delays.append(max(seen) - max(ready))
    return statistics.mean(delays)


def _path(tree: Path) -> dict[str, str]:
    folders = (tree, tree / "protos", tree / "runtimes")
    return {"PYTHONPATH": os.pathsep.join(map(str, folders))}


@contextmanager
def _program(arguments: Sequence[str], environ: Mapping[str, str]) -> Iterator[IO[str]]:
    """What a Python program prints, which is killed at the end."""
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, env={**environ}, stdout=subprocess.PIPE, text=True, cwd="/"
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout
        finally:
            process.kill()


def _lines(program: IO[str], count: int) -> Iterator[str]:
    for _ in range(count):
        line = program.readline()
        if not line:
            raise RuntimeError("a trainer ended early; its error is above")
        yield line


def _until(port: int, service: str) -> float:
    """When a health service of a node answered first that it serves; monotonic seconds."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        deadline = time.monotonic() + _LONGEST_S
        while time.monotonic() < deadline:
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return time.monotonic()
            except grpc.RpcError:
                pass
            time.sleep(_POLL_S)
    raise RuntimeError(f"{service} of port {port} did not come within {_LONGEST_S:g} s")


if __name__ == "__main__":
    main()
