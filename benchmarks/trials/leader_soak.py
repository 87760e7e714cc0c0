"""Nodes elect their coordinator by a Lease, and each coordinator is taken away again.

    python -m benchmarks.trials.leader_soak --kubeconfig FILE [--rounds 100] [--seed 0]
        [--json FILE]

In each round the coordinator is lost with its disk, killed, stopped, paused for longer than the
Lease and woken, or cut off from the API server. Meanwhile two jobs read, one process writes, and
one loads and drops. Each epoch must have every row once, a new reader must wait for less than 20
seconds, each write whose commit was answered must be there, each drop that was answered must last,
and no term may have two coordinators. Ends with 1 if not. The API server must be a real one.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import yaml

from cache_client import CacheClient, CacheError, DatasetNotFoundError, DatasetSpec
from cache_server.local import LocalNode
from tests.conftest import numbered_table, write_numbered
from tests.elected_nodes import WAIT_S, ElectedNodes, read_rows
from tests.reading_jobs import ReadingJob
from tests.waiting import wait_until

NUM_ROWS, NODES = 3_000, 3
PAUSE_S = 15.0  # longer than the Lease
LONGEST_WAIT_S = 20.0
FAULTS = ("lost", "killed", "stopped", "paused", "cut off")
_CHUNK, _LOOK_S = 1 << 16, 0.5


class Wire:
    """Forwards connections to the API server, until it is cut.

    Args:
        target: host and port of the API server.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[socket.socket] = []
        self._lock = threading.Lock()
        self.is_cut = False
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Breaks every connection, and lets no new one through."""
        with self._lock:
            self.is_cut = True
            pairs, self._pairs = self._pairs, []
        for each in pairs:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Lets connections through again."""
        self.is_cut = False

    def close(self) -> None:
        """Ends it."""
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with self._lock:
                    if self.is_cut:
                        near.close()
                        continue
                    far = socket.create_connection(self._target)
                    self._pairs += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=_copy, args=(one, other), daemon=True).start()


def _copy(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(_CHUNK):
            other.sendall(data)
    for each in (one, other):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def wires(kubeconfig: Path, folder: Path) -> Iterator[tuple[list[Wire], list[Path]]]:
    """A wire for each node, with a kubeconfig that goes over it."""
    config = yaml.safe_load(kubeconfig.read_text())
    (cluster,) = config["clusters"]
    server = urlsplit(cluster["cluster"]["server"])
    assert server.hostname is not None and server.port is not None
    with ExitStack() as stack:
        found, files = [], []
        for index in range(NODES):
            wire = stack.enter_context(closing(Wire((server.hostname, server.port))))
            cluster["cluster"]["server"] = f"{server.scheme}://127.0.0.1:{wire.port}"
            file = folder / f"kubeconfig-{index}"
            file.write_text(yaml.safe_dump(config))
            found.append(wire)
            files.append(file)
        yield found, files


class Work:
    """Does one thing after the other in a thread, again after an error, and counts.

    Args:
        step: does the thing with this number; its error counts by its class.
    """

    def __init__(self, name: str, step: Callable[[int], None]) -> None:
        self.counts: Counter[str] = Counter()
        self.defect: BaseException | None = None
        self._step = step
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Work:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it after the step that runs."""
        self._enough.set()
        self._thread.join(2 * WAIT_S)

    def _run(self) -> None:
        number = 0
        while not self._enough.is_set():
            try:
                self._step(number)
                self.counts["done"] += 1
                number += 1
            except CacheError as error:
                self.counts[type(error).__name__] += 1
                print(f"{self._thread.name}: {type(error).__name__}: {error}", flush=True)
            except BaseException as error:
                self.defect = error
                return
            self._enough.wait(0.5)


class Soak:
    """The nodes, and what must hold.

    Attributes:
        problems: what did not hold.
        waits_s: of a new reader, by fault.
        written: the tables whose commits were answered.
        dropped: the datasets whose drops were answered.
    """

    def __init__(self, cache: ElectedNodes, wires: list[Wire], source: Path) -> None:
        self.cache = cache
        self._wires = dict(zip(cache.nodes, wires, strict=True))
        self._source = source
        self.problems: list[str] = []
        self.waits_s: dict[str, list[float]] = {fault: [] for fault in FAULTS}
        self.written: dict[str, pa.Table] = {}
        self.dropped: set[str] = set()
        self._of_term: dict[int, str] = {}
        self._away: LocalNode | None = None

    def client(self) -> CacheClient:
        """Of a node that is not away."""
        return self.cache.client(random.choice([n for n in self.cache.nodes if n != self._away]))

    def write(self, number: int) -> None:
        """Writes a table of a random length, on two nodes."""
        name, rows = f"written-{number}", numbered_table(random.randint(1, 2 * NUM_ROWS))
        self.client().write(name, rows, replicas=2, target_shard_bytes=8192)
        self.written[name] = rows

    def load(self, number: int) -> None:
        """Loads a dataset, and drops the one before."""
        self.client().load(DatasetSpec(f"loaded-{number}", self._source, target_shard_bytes=1))
        if number:
            with suppress(DatasetNotFoundError):  # the answer to the first attempt was lost
                self.client().drop(f"loaded-{number - 1}")
            self.dropped.add(f"loaded-{number - 1}")

    def look(self, number: int) -> None:
        """Asks every node for the coordinator: a term has one."""
        for node in self.cache.nodes:
            if node.exit_code is None and node.endpoint and node is not self._away:
                found = self.cache.coordinator_of(node)
                if found is not None and found.term:
                    known = self._of_term.setdefault(found.term, found.control_location)
                    if known != found.control_location:
                        self.problems.append(
                            f"term {found.term} is of {known} and of {found.control_location}"
                        )

    def round(self, fault: str) -> None:
        """Takes the coordinator away, reads as a new reader, and brings it back."""
        victim = self._away = self.cache.leader()
        process = None
        if fault == "lost":
            self.cache.lose(victim)
        elif fault == "killed":
            victim.kill()
        elif fault == "stopped":
            victim.stop()
        elif fault == "paused":
            process = self.cache.pause(victim)
        else:
            self._wires[victim].cut()
        begun = time.monotonic()
        reader = random.choice([node for node in self.cache.nodes if node is not victim])
        rows, waited_s = read_rows(self.cache.connection(reader), "loaded")
        self.waits_s[fault].append(waited_s)
        if rows != list(range(NUM_ROWS)):
            self.problems.append(f"{fault}: a new reader got {len(rows)} rows, or in another order")
        if waited_s >= LONGEST_WAIT_S:
            self.problems.append(f"{fault}: a new reader waited for {waited_s:.1f} s")
        if process is not None:
            time.sleep(max(0.0, begun + PAUSE_S - time.monotonic()))
            process.resume()
        elif fault == "cut off":
            self.cache.leader(victim)
            self._wires[victim].mend()
        else:
            self.cache.begin(victim)
            victim.wait_until_listening()
        self._away = None
        wait_until(lambda: self._all_ready(), 2 * WAIT_S, "every node and dataset")

    def _all_ready(self) -> bool:
        with suppress(CacheError):
            client = self.client()
            nodes = sum(node.alive for node in client.nodes())
            infos = {info.name: info for info in client.datasets()}
            two = [infos.get(name) for name in ("loaded", "kept", *[*self.written])]
            return nodes == NODES and all(
                info is not None
                and info.state == "ready"
                and all(len(holders) == 2 for holders in info.placement.values())
                for info in two
            )
        return False

    def check(self) -> None:
        """Looks for every write whose commit was answered, and every drop."""
        client = self.client()
        names = {info.name for info in client.datasets()}
        for name, rows in self.written.items():
            if name not in names:
                self.problems.append(f"{name} is missing, and its commit was answered")
            elif not client.read(name).read_all().sort_by("row").equals(rows):
                self.problems.append(f"{name} has other rows")
        for name in sorted(self.dropped & names):
            self.problems.append(f"{name} is there, and its drop was answered")


def run(kubeconfig: Path, namespace: str, rounds: int, seed: int) -> dict[str, Any]:
    """The soak; its counts and problems."""
    random.seed(seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = write_numbered(folder / "source", NUM_ROWS, files=6)
        lines, files = stack.enter_context(wires(kubeconfig, folder))
        cache = stack.enter_context(ElectedNodes(files, namespace, folder / "nodes", NODES))
        soak = Soak(cache, lines, source)
        client = cache.client(cache.nodes[0])
        client.load(DatasetSpec("loaded", source, target_shard_bytes=1, replicas=2))
        client.write("kept", numbered_table(NUM_ROWS), replicas=2, target_shard_bytes=4096)
        jobs = [
            stack.enter_context(ReadingJob(cache.connection(node), name))
            for node, name in zip(cache.nodes, ("loaded", "kept"), strict=False)
        ]
        workers = {
            name: stack.enter_context(Work(name, step))
            for name, step in (("write", soak.write), ("load", soak.load), ("look", soak.look))
        }
        plan = [FAULTS[number % len(FAULTS)] for number in range(rounds)]
        random.shuffle(plan)
        for number, fault in enumerate(plan, 1):
            soak.round(fault)
            waited_s = soak.waits_s[fault][-1]
            print(f"round {number} {fault}: new reader after {waited_s:.1f} s", flush=True)
            if soak.problems or any(job.error for job in jobs):
                break
        for work in workers.values():
            work.close()
        for job in jobs:
            job.__exit__()
        soak.check()
        for job in jobs:
            try:
                job.assert_exact(NUM_ROWS)
            except AssertionError as error:
                soak.problems.append(f"{job.dataset}: {job.error or error}")
        soak.problems += [f"{n}: {w.defect!r}" for n, w in workers.items() if w.defect is not None]
        return {
            "rounds": sum(map(len, soak.waits_s.values())),
            "terms": len(soak._of_term),
            "epochs": sum(len(job.epochs) for job in jobs),
            "writes": len(soak.written),
            "drops": len(soak.dropped),
            "work": {name: dict(work.counts) for name, work in workers.items()},
            "new reader s": {
                fault: {"longest": round(max(waits), 1), "mean": round(sum(waits) / len(waits), 1)}
                for fault, waits in soak.waits_s.items()
                if waits
            },
            "problems": soak.problems,
        }


def main() -> int:
    """Runs the soak; 1 if something did not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = run(args.kubeconfig, args.namespace, args.rounds, args.seed)
    print(json.dumps(found, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
