"""Nodes elect their coordinator by a Lease, and each coordinator is taken away again.

    python -m benchmarks.trials.leader_soak (--control-plane DIR | --kubeconfig FILE)
        [--rounds 100] [--seconds 7200] [--seed 0] [--json FILE]

Each node has a network namespace. In each round the coordinator is lost with its disk, killed,
stopped, paused for longer than the Lease or for a minute and woken, cut off from the API server, or
cut off from half of the nodes: by a network in which all reach the API server, or only the others.
Meanwhile two jobs read, and three processes write, load and drop. One of them knows only the node
that was taken away.

Each epoch must have every row once, and a new reader must wait for less than 20 seconds. Each write
whose commit was answered must be there once, each drop that was answered must last. No term may
have two coordinators, and one that wakes or comes back must refuse to drop a dataset. Ends with 1
if not. The API server must be a real one. Needs Linux, root, `ip` and `nsenter`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import yaml

from benchmarks.trials.networks import Network, NodeInside, Wire
from cache_client import (
    CacheClient,
    CacheError,
    DatasetNotFoundError,
    DatasetSpec,
    NodeUnavailableError,
)
from cache_server.local import LocalNode
from tests.conftest import numbered_table, write_numbered
from tests.e2e.clusters import control_plane
from tests.elected_nodes import WAIT_S, ElectedNodes, read_rows
from tests.reading_jobs import ReadingJob
from tests.waiting import wait_until

NUM_ROWS, NODES = 3_000, 4
CUT_S = 15.0  # longer than the Lease
PAUSES_S = {"paused": 15.0, "paused for a minute": 60.0}
LONGEST_WAIT_S = 20.0
_LATE_S = 3.0  # before a paused coordinator wakes, it is asked to drop a dataset
FAULTS = (  # in this order, so that a short run has all of them
    *("lost", "paused", "parted, leads on", "parted, without the API server", "cut off"),
    *("lost", "paused", "stopped", "parted, without the API server", "killed"),
    "paused for a minute",
)
_MOST_WRITTEN = 30  # tables that are kept; the oldest is read, compared and dropped


@contextmanager
def wires(kubeconfig: Path, folder: Path, host: str) -> Iterator[tuple[list[Wire], list[Path]]]:
    """A wire for each node, with a kubeconfig that goes over it."""
    config = yaml.safe_load(kubeconfig.read_text())
    (cluster,) = config["clusters"]
    server = urlsplit(cluster["cluster"]["server"])
    assert server.hostname is not None and server.port is not None
    with ExitStack() as stack:
        found, files = [], []
        for index in range(NODES):
            wire = stack.enter_context(closing(Wire(host, (server.hostname, server.port))))
            cluster["cluster"]["server"] = f"{server.scheme}://{wire.location}"
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
        late: new readers that waited for too long.
        waits_s: of a new reader, by fault.
        pauses_s: the longest between two batches of a job, by fault.
        backs_s: from the end of the fault until all nodes and datasets were whole again, by fault.
        written: the tables whose commits were answered.
        dropped: the datasets whose drops were answered.
        counts: of what happened beside.
    """

    def __init__(self, cache: ElectedNodes, network: Network, wires: list[Wire], source: Path):
        self.cache = cache
        self._network = network
        self._wires = dict(zip(cache.nodes, wires, strict=True))
        self._source = source
        self.problems: list[str] = []
        self.late: list[str] = []
        self.waits_s: dict[str, list[float]] = {}
        self.pauses_s: dict[str, list[float]] = {}
        self.backs_s: dict[str, list[float]] = {}
        self.written: dict[str, pa.Table] = {}
        self.dropped: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._going = ""  # a written table that may be dropped by now
        self._of_term: dict[int, str] = {}
        self._away: set[LocalNode] = set()  # nodes that clients do not know
        self._asleep: LocalNode | None = None

    @property
    def num_terms(self) -> int:
        """How many terms were seen."""
        return len(self._of_term)

    def client(self) -> CacheClient:
        """Of a node that is not away."""
        return self.cache.client(self._one())

    def _one(self) -> LocalNode:
        return random.choice([node for node in self.cache.nodes if node not in self._away])

    # -- what goes on beside -------------------------------------------------------------------

    def write(self, number: int) -> None:
        """Writes a table of a random length, on two nodes; above some, drops the oldest."""
        if len(self.written) >= _MOST_WRITTEN:
            self._retire(next(iter(self.written)))
        self._write(f"written-{number}", self.client())

    def _write(self, name: str, client: CacheClient) -> None:
        rows = numbered_table(random.randint(1, 2 * NUM_ROWS))
        client.write(name, rows, replicas=2, target_shard_bytes=8192)
        self.written[name] = rows

    def _retire(self, name: str) -> None:
        client = self.client()
        if self._going != name:
            self._compare(client, name)
            self._going = name
        with suppress(DatasetNotFoundError):  # the answer to the first attempt was lost
            client.drop(name)
        del self.written[name]
        self.dropped.add(name)
        self.counts["tables compared and dropped"] += 1

    def _compare(self, client: CacheClient, name: str) -> None:
        try:
            found = client.read(name).read_all().sort_by("row")
        except DatasetNotFoundError:
            self.problems.append(f"{name} is missing, and its commit was answered")
        else:
            if not found.equals(self.written[name]):
                self.problems.append(f"{name} has other rows")

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
            if node.exit_code is None and node.endpoint and node is not self._asleep:
                found = self.cache.coordinator_of(node)
                if found is not None and found.term:
                    known = self._of_term.setdefault(found.term, found.control_location)
                    if known != found.control_location:
                        self.problems.append(
                            f"term {found.term} is of {known} and of {found.control_location}"
                        )

    def late_write(self, name: str, victim: LocalNode) -> None:
        """Writes by a client that knows only the coordinator that is taken away."""
        try:
            self._write(name, self.cache.client(victim))
            self.counts["late writes answered"] += 1
        except CacheError:
            self.counts["late writes refused"] += 1

    def late_drop(self, victim: LocalNode) -> None:
        """Asks a former coordinator to drop a dataset that is read."""
        try:
            self.cache.drop_at(victim, "kept")
            self.problems.append("a former coordinator dropped a dataset")
        except NodeUnavailableError:
            self.counts["late drops refused"] += 1

    # -- a round -------------------------------------------------------------------------------

    def round(self, number: int, fault: str) -> None:
        """Takes the coordinator away, reads as a new reader, and brings it back."""
        victim = self.cache.leader()
        with ThreadPoolExecutor(2) as threads:
            late = threads.submit(self.late_write, f"late-{number}", victim)
            if fault.startswith("parted"):
                self._part(victim, fault)
            elif fault in PAUSES_S:
                self._pause(victim, fault, threads)
            elif fault == "cut off":
                self._cut_off(victim, fault)
            else:
                self._end(victim, fault)
            self._away = set()
            begun = time.monotonic()
            wait_until(self._all_ready, 2 * WAIT_S, "every node and dataset")
            self.backs_s.setdefault(fault, []).append(time.monotonic() - begun)
            late.result()

    def _end(self, victim: LocalNode, fault: str) -> None:
        self._away = {victim}
        if fault == "lost":
            self.cache.lose(victim)
        elif fault == "killed":
            victim.kill()
        else:
            victim.stop()
        self._read(fault)
        self.cache.begin(victim)
        victim.wait_until_listening()

    def _pause(self, victim: LocalNode, fault: str, threads: ThreadPoolExecutor) -> None:
        self._away, self._asleep = {victim}, victim
        begun, process = time.monotonic(), self.cache.pause(victim)
        self._read(fault)
        _wait_for(begun + PAUSES_S[fault] - _LATE_S)
        drop: Future[None] = threads.submit(self.late_drop, victim)
        _wait_for(begun + PAUSES_S[fault])
        process.resume()
        drop.result()
        self._asleep = None

    def _cut_off(self, victim: LocalNode, fault: str) -> None:
        self._away = {victim}
        self._wires[victim].cut(silently=random.random() < 0.5)
        self._read(fault)
        self.cache.leader(victim)
        self.late_drop(victim)
        self._wires[victim].mend()

    def _part(self, victim: LocalNode, fault: str) -> None:
        """Cuts the coordinator and half of the nodes off from the other half."""
        index = self.cache.nodes.index(victim)
        rest = [other for other in range(NODES) if other != index]
        random.shuffle(rest)
        with_it, others = [index, *rest[: NODES // 2 - 1]], rest[NODES // 2 - 1 :]
        leads_on = fault == "parted, leads on"
        begun = time.monotonic()
        self._away = {self.cache.nodes[each] for each in (others if leads_on else with_it)}
        self._network.cut(with_it, others)
        lines = [] if leads_on else [self._wires[self.cache.nodes[each]] for each in with_it]
        silently = random.random() < 0.5
        for line in lines:
            line.cut(silently=silently)
        self._read(fault)
        if not leads_on:
            self.cache.leader(*self._away)
            self.late_drop(victim)
        _wait_for(begun + CUT_S)
        self._network.mend(with_it, others)
        for line in lines:
            line.mend()

    def _read(self, fault: str) -> None:
        """Reads as a new reader of a node that is not away."""
        rows, waited_s = read_rows(self.cache.connection(self._one()), "loaded")
        self.waits_s.setdefault(fault, []).append(waited_s)
        if rows != list(range(NUM_ROWS)):
            self.problems.append(f"{fault}: a new reader got {len(rows)} rows, or in another order")
        if waited_s >= LONGEST_WAIT_S:
            self.late.append(f"{fault}: a new reader waited for {waited_s:.1f} s")

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
        for name in self.written:
            if name != self._going or name in names:
                self._compare(client, name)
        for name in sorted(self.dropped & names):
            self.problems.append(f"{name} is there, and its drop was answered")


def _wait_for(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def run(kubeconfig: Path, namespace: str, rounds: int, seconds: float, seed: int) -> dict[str, Any]:
    """The soak; its counts and problems."""
    random.seed(seed)
    ends_at = time.monotonic() + seconds
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = write_numbered(folder / "source", NUM_ROWS, files=6)
        network = stack.enter_context(Network(NODES))
        lines, files = stack.enter_context(wires(kubeconfig, folder, network.address))
        make = partial(NodeInside, network)
        nodes = ElectedNodes(files, namespace, folder / "nodes", NODES, make, timing=())
        cache = stack.enter_context(nodes)
        soak = Soak(cache, network, lines, source)
        client = cache.client(cache.nodes[0])
        client.load(DatasetSpec("loaded", source, target_shard_bytes=1, replicas=2))
        client.write("kept", numbered_table(NUM_ROWS), replicas=2, target_shard_bytes=4096)
        jobs = [
            stack.enter_context(ReadingJob(cache.connection(node), name))
            for node, name in zip(cache.nodes, ("loaded", "kept"), strict=False)
        ]
        steps = {"write": soak.write, "load": soak.load, "look": soak.look}
        workers = {name: stack.enter_context(Work(name, step)) for name, step in steps.items()}
        for number in range(rounds):
            if time.monotonic() > ends_at or soak.problems or any(job.error for job in jobs):
                break
            fault = FAULTS[number % len(FAULTS)]
            try:
                soak.round(number, fault)
            except (AssertionError, CacheError) as error:
                soak.problems.append(f"{fault}: {type(error).__name__}: {error}")
                break
            soak.pauses_s.setdefault(fault, []).append(max(job.longest_pause_s for job in jobs))
            for job in jobs:
                job.longest_pause_s = 0.0
            waited_s, back_s = soak.waits_s[fault][-1], soak.backs_s[fault][-1]
            print(
                f"round {number + 1} {fault}: new reader after {waited_s:.1f} s, "
                f"jobs paused for {soak.pauses_s[fault][-1]:.1f} s, whole {back_s:.1f} s after it",
                flush=True,
            )
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
            "rounds": sum(map(len, soak.backs_s.values())),
            "faults": {fault: len(backs) for fault, backs in sorted(soak.backs_s.items())},
            "terms": soak.num_terms,
            "epochs": sum(len(job.epochs) for job in jobs),
            "writes": len(soak.written) + soak.counts["tables compared and dropped"],
            "drops": len(soak.dropped),
            "beside": dict(sorted(soak.counts.items())),
            "work": {name: dict(work.counts) for name, work in workers.items()},
            "new reader s": _summary(soak.waits_s),
            "pause of a job s": _summary(soak.pauses_s),
            "whole again s": _summary(soak.backs_s),
            "late": soak.late,
            "problems": soak.problems,
            "seed": seed,
            "date": date.today().isoformat(),
        }


def _summary(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        fault: {"longest": round(max(found), 1), "mean": round(sum(found) / len(found), 1)}
        for fault, found in sorted(seconds.items())
    }


def main() -> int:
    """Runs the soak; 1 if something did not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--kubeconfig", type=Path)
    where.add_argument("--control-plane", type=Path, help="see tests/e2e/clusters.py")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=7200.0, help="no round begins later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with ExitStack() as stack:
        kubeconfig = args.kubeconfig
        if kubeconfig is None:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            kubeconfig = stack.enter_context(control_plane(args.control_plane, work, "")).kubeconfig
        found = run(kubeconfig, args.namespace, args.rounds, args.seconds, args.seed)
    print(json.dumps(found, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if found["problems"] or found["late"] else 0


if __name__ == "__main__":
    sys.exit(main())
