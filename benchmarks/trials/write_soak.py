"""Writers put and commit tables while writers, nodes and the coordinator are killed.

    python -m benchmarks.trials.write_soak [--seconds 300] [--kills 200] [--seed 0] [--json FILE]

Ends after so many seconds or kills. The first kill of each round is at the next step of a plan:
each victim, at each step of a write, with one and two replicas. Others follow at random steps. Each
write must be there wholly, every row once and in order, or not at all. Half of the writes are
appends: the rows before them must stay. A write whose commit was answered must be there once every
node is back. Ends with 1 if not. `write_chaos` does the same in one process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cache_client import (
    CacheClient,
    CacheError,
    Connection,
    DatasetNotFoundError,
    LostPartitionsError,
    NodeUnavailableError,
)
from cache_client.writing import writes
from cache_server import LocalCluster
from cache_server.local import LocalNode
from tests.waiting import wait_until

NODES, NODE_TIMEOUT_S, WAIT_S = 3, 1.5, 60.0
TTL_S = 30.0  # after which the rows of a killed writer are dropped
PARTITIONS, SHARD_BYTES = 6, 40_000
_LONGEST_PAUSE_S = 2.0  # without a step, before nodes that are down come back
_MOST_TRIES = 8
STEPS = ("begin", *(f"put {number}" for number in range(PARTITIONS)), "commit", "answered")
VICTIMS = ("node", "coordinator", "all", "writer")
PLAN = [*itertools.product(STEPS, VICTIMS, (1, 2))]


def table(seed: int) -> pa.Table:
    """The rows of one write, which know their number."""
    rows = np.arange(random.Random(seed).randint(1, 60_000), dtype=np.int64)
    return pa.table({"row": rows, "of": rows * 7 + seed})


def partitions(whole: pa.Table) -> list[pa.Table]:
    """Its partitions, some of them empty."""
    bounds = [whole.num_rows * index // PARTITIONS for index in range(PARTITIONS + 1)]
    return [whole.slice(start, stop - start) for start, stop in itertools.pairwise(bounds)]


def write(
    client: CacheClient,
    name: str,
    seed: int,
    append: bool,
    replicas: int,
    tell: Callable[[str], None],
) -> None:
    """Writes a table as an engine does: tasks that are tried again, lost answers, double tasks.

    Args:
        tell: called with the name of each step before it begins; see `STEPS`.
    """
    tell("begin")
    chance = random.Random(seed)
    whole = table(seed)
    begun = client.begin_write(
        name,
        whole.schema,
        append=append,
        target_shard_bytes=SHARD_BYTES,
        replicas=replicas,
        ttl_s=TTL_S,
    )
    acks: dict[int, writes.PartitionAck] = {}
    attempts = Counter[int]()

    def put(partition: int) -> None:
        for _ in range(_MOST_TRIES):
            with suppress(NodeUnavailableError):
                acks[partition] = _put(begun, partition, attempts, partitions(whole)[partition])
                if chance.random() < 0.2:
                    continue  # the answer was lost, or the task runs twice
                return
            time.sleep(chance.random())
        acks[partition] = _put(begun, partition, attempts, partitions(whole)[partition])

    for partition in range(PARTITIONS):
        tell(f"put {partition}")
        put(partition)
    tell("commit")
    for _ in range(_MOST_TRIES):
        try:
            begun.commit(acks, timeout_s=WAIT_S)
        except LostPartitionsError as error:
            for partition in error.partitions:
                put(partition)
        else:
            tell("answered")
            begun.commit({})  # repeated: the first one holds
            return


def _put(
    begun: writes.Write, partition: int, attempts: Counter[int], rows: pa.Table
) -> writes.PartitionAck:
    attempts[partition] += 1
    return begun.put(partition, attempts[partition], rows, timeout_s=20.0)


def writer(pipe: Pipe, endpoint: str) -> None:
    """A process that writes given rows; says whether they were acknowledged."""
    client = CacheClient(Connection(endpoint, deadline_s=20.0))
    pipe.send("ready")
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        try:
            write(client, *order, lambda step: pipe.send((step, None)))
        except CacheError as error:
            pipe.send(("end", f"{type(error).__name__}: {error}"))
        else:
            pipe.send(("end", ""))


class Writer:
    """A writer process, started again after it was killed."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=writer, args=(theirs, self._endpoint), daemon=True
        )
        self._process.start()
        theirs.close()
        self.pipe.recv()

    def kill(self) -> None:
        """Kills it, and starts another one."""
        self._process.kill()
        self._process.join()
        self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


class Soak:
    """Rounds of one write and some kills."""

    def __init__(self, cluster: LocalCluster, seed: int) -> None:
        self.cluster = cluster
        self.client = CacheClient(Connection(cluster.endpoint, deadline_s=20.0))
        self.writer = Writer(cluster.endpoint)
        self.chance = random.Random(seed)
        self.plan = self.chance.sample(PLAN, len(PLAN))  # a short run has steps of all kinds
        self.outcomes: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.answered = 0
        self.wrong: list[str] = []

    def round(self, number: int) -> None:
        """One write, with kills; then every node is back, and the rows are checked."""
        name, seed = f"write-{number}", self.chance.randrange(1 << 30)
        before = table(0).slice(0, 0)
        if append := self.chance.random() < 0.5:
            before = table(number)
            self.client.write(name, before, target_shard_bytes=SHARD_BYTES, replicas=2)
        kill_at, victim, replicas = self.plan[number % len(PLAN)]
        self.writer.pipe.send((name, seed, append, replicas))
        down: list[LocalNode] = []
        answer: str | None = None
        while answer is None:
            if not self.writer.pipe.poll(_LONGEST_PAUSE_S):  # it may wait for a node
                self._start(down)
                assert self.writer.pipe.poll(10 * WAIT_S), "the writer hangs"
            step, answer = self.writer.pipe.recv()
            if step != kill_at:
                continue
            self.steps[f"{victim} at {step}, replicas={replicas}"] += 1
            time.sleep(self.chance.choice([0.0, 0.0, 0.01, 0.05]))  # while the step runs
            if self._kill(victim, down):
                answer = "killed"
            elif self.chance.random() < 0.5:
                self._start(down)
            if self.chance.random() < 0.3:
                kill_at, victim = self.chance.choice(STEPS), self.chance.choice(VICTIMS)
        self._start(down)
        self.answered += answer == ""
        self.cluster.wait_for_nodes()
        self._check(name, before, table(seed), answer)

    def _kill(self, victim: str, down: list[LocalNode]) -> bool:
        """Kills a process; returns whether it was the writer."""
        if victim == "writer":
            self.kills[victim] += 1
            self.writer.kill()
            return True
        first, *others = self.cluster.nodes
        wanted = {"coordinator": [first], "node": others, "all": self.cluster.nodes}[victim]
        up = [node for node in wanted if node not in down]
        for node in up if victim == "all" else up and [self.chance.choice(up)]:
            node.kill()
            self.kills[victim] += 1
            down.append(node)
        return False

    def _start(self, down: list[LocalNode]) -> None:
        while down:
            down.pop(0).start()

    def _check(self, name: str, before: pa.Table, whole: pa.Table, answer: str) -> None:
        try:
            state = wait_until(
                lambda: self._state(name, answer), WAIT_S, f"{name} is there, failed or absent"
            )
        except AssertionError as error:
            self.wrong.append(f"{error} after {answer!r}")
            return
        if state == "there":
            both = pa.concat_tables([before, whole])
            found = self.client.read(name).read_all().cast(whole.schema)
            if before.num_rows and found.equals(before):
                state = "absent"
            elif not found.equals(both):
                self.wrong.append(f"{name}: {found.num_rows} of {both.num_rows} rows, or others")
        elif state == "absent" and before.num_rows:
            self.wrong.append(f"{name} has lost the rows before an append")
        if state != "there" and not answer:
            self.wrong.append(f"{name} was acknowledged and is {state}")
        state = f"{state} append" if before.num_rows else state
        self.outcomes[state] += 1
        with suppress(DatasetNotFoundError):
            self.client.drop(name)

    def _state(self, name: str, answer: str) -> str:
        try:
            state = self.client.describe(name).state
        except DatasetNotFoundError:
            return "absent"
        except CacheError:
            return ""
        return {"ready": "there", "failed": "failed"}.get(state, "")

    def empty(self) -> bool:
        """Whether the nodes gave back the room of every write."""
        return not any(node.stored_bytes for node in self.client.nodes())


def soak(seconds: float, kills: int, seed: int) -> Soak:
    """Runs rounds until the time is over or so many processes were killed."""
    ends_at = time.monotonic() + seconds
    arguments: dict[str, Any] = {"node_timeout_s": NODE_TIMEOUT_S}
    with LocalCluster(NODES, **arguments) as cluster:
        found = Soak(cluster, seed)
        number = 0
        while time.monotonic() < ends_at and sum(found.kills.values()) < kills:
            found.round(number)
            number += 1
        try:
            wait_until(found.empty, WAIT_S, "nodes are empty")
        except AssertionError as error:
            found.wrong.append(str(error))
        found.writer.close()
        return found


def main() -> None:
    """Runs, prints what came of it, exits with 1 if a row was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    found = soak(arguments.seconds, arguments.kills, arguments.seed)
    rounds = found.outcomes.total()
    print(f"writes: {dict(found.outcomes)}; kills: {dict(found.kills)}")
    print(f"{rounds} rounds, {found.answered} commits answered, {len(found.steps)} kinds of kills")
    if arguments.json is not None:
        result = {
            "rounds": rounds,
            "outcomes": dict(sorted(found.outcomes.items())),
            "commits_answered": found.answered,
            "kills": dict(sorted(found.kills.items())),
            "first_kills": dict(sorted(found.steps.items())),
            "wrong": found.wrong,
            "seed": arguments.seed,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    for problem in found.wrong:
        print(f"wrong: {problem}")
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main()
