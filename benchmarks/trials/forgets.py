"""Forgets rows while nodes are killed and readers read; then looks for them everywhere.

    python -m benchmarks.trials.forgets --runs 200 --seed 1

Each run has two nodes, two replicas and two versions: one that was loaded, and one with more rows.
A process is killed at a random moment. Once `forget` has returned and every node is back, no file
of a node has a canary, every other row is read exactly once, and a new load brings none back.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cache_client import CacheClient, Connection, DatasetSpec
from cache_protocol.errors import CacheError, ErasedRowsError
from cache_server.local import LocalCluster

_CANARY = b"canary-of-user-7"
_TIMEOUT_S = 120.0


def _table(num_rows: int) -> pa.Table:
    ids = np.arange(num_rows)
    is_theirs = ids % 500 == 7
    texts = [_CANARY.decode() if i % 500 == 7 else f"row {i:012}" for i in ids]
    number = np.where(is_theirs, np.frombuffer(_CANARY, np.int64)[0], ids)
    return pa.table({"id": ids, "user": ids % 500, "number": number, "text": texts})


class _Reader(threading.Thread):
    """Reads all rows again and again; notes what is wrong."""

    def __init__(self, endpoint: str, *, local: bool) -> None:
        super().__init__(daemon=True)
        self.problems: list[str] = []
        self.passes = 0
        self.stop = threading.Event()
        self._client = CacheClient(Connection(endpoint, local=local, deadline_s=60.0))

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                ids, numbers = [], []
                for batch in self._client.read("people", columns=["id", "number"]):
                    ids.append(batch["id"].to_numpy())
                    numbers.append(batch["number"].to_numpy())
            except (ErasedRowsError, CacheError):
                continue  # of a plan of before, or while no node has a shard
            found, number = np.concatenate(ids), np.concatenate(numbers)
            theirs = found % 500 == 7
            if len(np.unique(found)) != len(found) or (number[~theirs] != found[~theirs]).any():
                self.problems.append("a row is missing, twice or zeros")
            self.passes += 1


def _has_canary(folder: Path) -> list[Path]:
    found = []
    for path in folder.rglob("*"):
        try:
            if path.is_file() and _CANARY[:8] in path.read_bytes():
                found.append(path)
        except OSError:
            continue
    return found


def _run(seed: int, num_rows: int) -> tuple[list[str], int]:
    """One run; returns what is wrong, and how many passes readers made."""
    rng = random.Random(seed)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as base:
        source = Path(base, "source")
        source.mkdir()
        pq.write_table(_table(num_rows), source / "a.parquet")
        folder = Path(base, "nodes")
        with LocalCluster(2, folder, node_timeout_s=2.0) as cluster:
            client = CacheClient(Connection(cluster.endpoint, deadline_s=60.0))
            spec = DatasetSpec("people", str(source), replicas=2, target_shard_bytes=1 << 18)
            client.load(spec)
            readers = [_Reader(cluster.endpoint, local=local) for local in (True, False)]
            for reader in readers:
                reader.start()
            more = _table(num_rows + 1_000).slice(num_rows)
            pq.write_table(more, source / "b.parquet")
            client.load(spec)  # a second version, which shares files
            victim = rng.choice(cluster.nodes)

            def kill() -> None:
                time.sleep(rng.uniform(0.0, 0.4))
                victim.kill()
                time.sleep(rng.uniform(0.0, 3.0))
                victim.start()

            killer = threading.Thread(target=kill)
            killer.start()
            act, until = None, time.monotonic() + _TIMEOUT_S
            while act is None:
                try:
                    act = client.forget("people", "user = 7", reason="trial", timeout_s=60)
                except CacheError:
                    if time.monotonic() > until:
                        raise
            killer.join()
            if act.num_rows == 0 and not client.forgotten("people"):
                problems.append("nothing was forgotten")
            while len([n for n in client.nodes() if n.alive]) < 2 and time.monotonic() < until:
                time.sleep(0.1)
            while (left := _has_canary(folder)) and time.monotonic() < until:
                if not act_is_away(client):
                    problems.append(f"canaries after the act in {left}")
                    break
                time.sleep(0.1)  # of a node that was away
            for reader in readers:
                reader.stop.set()
            for reader in readers:
                reader.join(60)
                problems += reader.problems
            wanted = [i for i in range(num_rows + 1_000) if i % 500 != 7]
            if sorted(client.read("people").read_all()["id"].to_pylist()) != wanted:
                problems.append("other rows are missing")
            client.drop("people")
            client.load(spec)
            if client.read("people").read_all().num_rows != len(wanted) or _has_canary(folder):
                problems.append("a load brought them back")
            return problems, sum(reader.passes for reader in readers)


def act_is_away(client: CacheClient) -> bool:
    """Whether an attestation names a node that was away."""
    return any('"away": []' not in act.attestation for act in client.forgotten("people"))


def main() -> int:
    """Runs the program and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    begun, failed, done, passes = time.monotonic(), 0, 0, 0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        if time.monotonic() - begun > arguments.seconds:
            break
        problems, read = _run(seed, arguments.rows)
        done, failed, passes = done + 1, failed + bool(problems), passes + read
        for problem in problems:
            print(f"seed {seed}: {problem}", flush=True)
    print(f"{done} runs, {failed} failed, {passes} passes of readers", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
