"""Readers check every row they are given while nodes die, sources change and datasets are dropped.

    python -m tests.soak [--seconds 120] [--seed 0]

The suite does so for a moment; `make soak` for minutes, after a change to what is served, moved
or adopted. A seed draws the same actions again, though not at the same moments. Ends with 1 if a
row was wrong, missing or repeated, if an error was none of `cache_protocol.errors`, or if the cache
did not recover.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cache_client import CacheClient, CacheError, CacheIterableDataset, DatasetSpec
from cache_server import LocalCluster
from cache_server.local import LocalNode
from tests.waiting import files_below, wait_until

NAME, NODES, READERS = "soak", 3, 4
ROWS, FILES, ROW_GROUP, SHARD_BYTES = 6_000, 6, 250, 20_000
BATCH_SIZES = {1: 100, 2: 37}  # by world size
LEASE_S, NODE_TIMEOUT_S, WAIT_S = 3.0, 2.0, 60.0


class Table:
    """Parquet files, each of whose rows says its number, its version and what follows from both."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._version = 0
        directory.mkdir()
        self.rewrite(ROWS)

    def rewrite(self, num_rows: int) -> None:
        """Replaces it by another version, file by file."""
        self._version += 1
        for index, rows in enumerate(np.split(np.arange(num_rows), FILES)):
            values = {"row": rows, "version": np.full(len(rows), self._version)}
            made = pa.table({**values, **derived(rows, self._version)})
            draft = self.directory / f".{index}"
            pq.write_table(made, draft, row_group_size=ROW_GROUP)
            draft.replace(self.directory / f"{index}.parquet")


def derived(rows: Any, version: int) -> dict[str, Any]:
    return {
        "number": (7 * rows + version).astype(np.float32),
        "text": [f"{version}-{row}" for row in rows.tolist()],
    }


class Findings:
    """What the readers and the actions met."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.wrong: list[str] = []
        self.epochs = 0
        self.met: Counter[str] = Counter()

    def note_epoch(self) -> None:
        with self._lock:
            self.epochs += 1

    def note_wrong(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)
        with self._lock:
            self.wrong.append(what)

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Errors of the tree may happen here, and are counted; others may not."""
        try:
            yield
        except CacheError as error:
            with self._lock:
                self.met[type(error).__name__] += 1
        except Exception:
            self.note_wrong(traceback.format_exc())


class Reader:
    """Reads epochs: a part by one rank, the rest, from its state, by two with other batches."""

    def __init__(self, number: int, endpoint: str, seed: int) -> None:
        self._number = number
        self._endpoint = endpoint
        self._random = random.Random(f"{seed} {number}")

    def read_until(self, over: threading.Event, findings: Findings) -> None:
        while not over.is_set():
            with findings.noting_errors():
                if wrong := self.read_epoch():
                    findings.note_wrong(f"reader {self._number}: {wrong}")
                findings.note_epoch()
            over.wait(self._random.random() * 0.2)

    def read_epoch(self) -> str:
        """What was wrong with it; empty if nothing was."""
        first = self._open(0, 1)
        batches = list(islice(self._slowly(first), self._random.randrange(len(first))))
        rest = [self._open(rank, 2) for rank in range(2)]
        for rank in rest:
            rank.load_state_dict(first.state_dict())
            batches += self._slowly(rank)
        rows, versions = (
            np.concatenate([batch[name].numpy() for batch in batches])
            for name in ("row", "version")
        )
        if not np.array_equal(np.sort(rows), np.arange(first.num_rows)):
            return f"{len(rows)} rows, {len(np.unique(rows))} different ones, of {first.num_rows}"
        if len(np.unique(versions)) > 1:
            return f"versions {np.unique(versions)} in one epoch"
        for batch in batches:
            right = derived(batch["row"].numpy(), int(versions[0]))
            if not np.array_equal(batch["number"].numpy(), right["number"]):
                return f"numbers {batch['number'][:5]} of rows {batch['row'][:5]}"
            if batch["text"] != right["text"]:
                return f"texts {batch['text'][:5]} of rows {batch['row'][:5]}"
        return ""

    def _open(self, rank: int, world_size: int) -> CacheIterableDataset:
        return CacheIterableDataset(
            NAME,
            endpoint=self._endpoint,
            batch_size=BATCH_SIZES[world_size],
            shuffle=True,
            seed=self._number,
            rank=rank,
            world_size=world_size,
            local=self._number % 2 == 0,
            message_bytes=self._random.choice([4096, 2**20]),
        )

    def _slowly(self, batches: CacheIterableDataset) -> Iterator[Any]:
        """With pauses, so that much happens meanwhile."""
        for batch in batches:
            time.sleep(self._random.random() * 0.004)
            yield batch


class Actions:
    """What happens to the cache meanwhile, drawn by chance."""

    def __init__(self, cluster: LocalCluster, table: Table, seed: int) -> None:
        self._nodes = cluster.nodes
        self._client = CacheClient(cluster.endpoint)
        self._table = table
        self._random = random.Random(seed)
        self._all: list[Callable[[], None]] = [
            self.a_node_is_away,
            self.the_coordinator_is_away,
            self.all_other_nodes_are_away,
            self.the_source_changes,
            self.the_source_changes_and_a_node_is_away,
            self.the_dataset_is_dropped,
        ]

    def act(self) -> None:
        action = self._random.choice(self._all)
        print(action.__name__.replace("_", " "), flush=True)
        action()
        self._pause(2.0)

    def load(self) -> None:
        spec = DatasetSpec(
            NAME,
            self._table.directory,
            replicas=self._random.choice([1, 2, 2]),
            target_shard_bytes=SHARD_BYTES,
        )
        self._client.load(spec, timeout_s=WAIT_S)

    def a_node_is_away(self) -> None:
        self._send_away(self._random.choice(self._nodes[1:]))

    def the_coordinator_is_away(self) -> None:
        self._send_away(self._nodes[0])

    def all_other_nodes_are_away(self) -> None:
        self._send_away(*self._nodes[1:])

    def the_source_changes(self) -> None:
        self._table.rewrite(self._random.choice([ROWS, ROWS, ROWS // 2]))
        self.load()

    def the_source_changes_and_a_node_is_away(self) -> None:
        loading = threading.Thread(target=self.a_node_is_away)
        loading.start()
        try:
            self.the_source_changes()
        finally:
            loading.join()

    def the_dataset_is_dropped(self) -> None:
        self._client.drop(NAME)
        self._pause(1.0)
        self.load()

    def _send_away(self, *nodes: LocalNode) -> None:
        for node in nodes:
            node.kill()
        self._pause(4.0)
        for node in nodes:
            node.restart()

    def _pause(self, most_s: float) -> None:
        time.sleep(self._random.random() * most_s)


def soak(directory: Path, seconds: float, seed: int) -> Findings:
    """What was met in so many seconds, and after the last of them."""
    findings, over = Findings(), threading.Event()
    table = Table(directory / "source")
    with LocalCluster(
        NODES, directory / "cache", node_timeout_s=NODE_TIMEOUT_S, lease_s=LEASE_S
    ) as cluster:
        actions = Actions(cluster, table, seed)
        actions.load()
        readers = [Reader(number, cluster.endpoint, seed) for number in range(READERS)]
        threads = [
            threading.Thread(target=reader.read_until, args=(over, findings)) for reader in readers
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with findings.noting_errors():
                actions.act()
        over.set()
        for thread in threads:
            thread.join()
        check_recovery(actions, readers, directory, findings)
    return findings


def check_recovery(
    actions: Actions, readers: list[Reader], directory: Path, findings: Findings
) -> None:
    """Left alone, the cache serves the table as it is now, and nothing else is kept."""
    actions.load()
    findings.wrong += filter(None, (reader.read_epoch() for reader in readers))

    def versions() -> set[str]:
        shards = files_below(*(directory / "cache").glob(f"node-*/{NAME}"))
        return {shard.parent.name for shard in shards}

    wait_until(lambda: len(versions()) == 1, WAIT_S, "shards of one version alone")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        findings = soak(Path(directory), arguments.seconds, arguments.seed)
    print(f"{findings.epochs} epochs; errors by name: {dict(findings.met)}")
    print(f"wrong: {len(findings.wrong)}")
    sys.exit(bool(findings.wrong))


if __name__ == "__main__":
    main()
