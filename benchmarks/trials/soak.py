"""Readers check every row they are given while nodes die, freeze, rot and lie, and sources change.

    python -m benchmarks.trials.soak [--seconds 120] [--seed 0]

The suite does so for a moment; `make soak` for minutes, after a change to what is served, moved
or adopted. A seed draws the same actions again, though not at the same moments. Ends with 1 if a
row was wrong, missing or repeated, if an error was none of `cache_protocol.errors`, or if the cache
did not recover.

Bytes that change in a file while it is served are found within a second. Values of an epoch that
overlaps this second may be wrong; they are counted apart.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from cache_client import (
    CacheClient,
    CacheError,
    CacheIterableDataset,
    Connection,
    DatasetSpec,
    Reading,
)
from cache_server import LocalCluster
from cache_server.local import LocalNode
from tests.waiting import files_below, wait_until

NAME, NODES, READERS = "soak", 3, 4
ROWS, FILES, ROW_GROUP, SHARD_BYTES = 6_000, 6, 250, 20_000
BATCH_SIZES = {1: 100, 2: 37}  # by world size
LEASE_S, NODE_TIMEOUT_S, WAIT_S = 3.0, 2.0, 60.0
LIES = 20  # reports of a false node
ROTTEN_S = 3.0  # a node looks for changed files every second; readers have windows in flight


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


def flipped(data: bytes) -> bytes:
    """The file with 64 other bytes in the middle."""
    middle = len(data) // 2
    changed = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
    return data[:middle] + changed + data[middle + 64 :]


class Findings:
    """What the readers and the actions met."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.wrong: list[str] = []
        self.epochs = 0
        self.while_rotten = 0  # epochs with wrong values
        self.lies = self.read_back = 0  # reports of false nodes; after their files were asked for
        self.met: Counter[str] = Counter()
        self._rotten_until = 0.0

    def note_rot(self, seconds: float) -> None:
        """Says that values may be wrong from now on, for so long."""
        self._rotten_until = time.monotonic() + seconds

    def note_epoch(self) -> None:
        with self._lock:
            self.epochs += 1

    def note_values(self, what: str, begun: float) -> None:
        """Notes wrong values of an epoch, which may come from bytes that just changed."""
        if begun < self._rotten_until:
            with self._lock:
                self.while_rotten += 1
        else:
            self.note_wrong(what)

    def note_lie(self, line: str) -> None:
        """Takes what a false node prints after a report."""
        node, gathers, files = line.split()
        self.lies += 1
        self.read_back += int(files) > 0
        if int(gathers):
            self.note_wrong(f"readers asked {node} {gathers} times")

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


class WrongValuesError(Exception):
    """Rows have other values than those of their table."""


class Reader:
    """Reads epochs: a part by one rank, the rest, from its state, by two with other batches."""

    def __init__(self, number: int, endpoint: str, seed: int) -> None:
        self._number = number
        self._endpoint = endpoint
        self._random = random.Random(f"{seed} {number}")

    def read_until(self, over: threading.Event, findings: Findings) -> None:
        while not over.is_set():
            begun = time.monotonic()
            with findings.noting_errors():
                try:
                    if wrong := self.read_epoch():
                        findings.note_wrong(f"reader {self._number}: {wrong}")
                except WrongValuesError as error:
                    findings.note_values(f"reader {self._number}: {error}", begun)
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
        for batch in batches:
            right = derived(batch["row"].numpy(), int(versions[0]))
            if not np.array_equal(batch["number"].numpy(), right["number"]):
                raise WrongValuesError(f"numbers {batch['number'][:5]} of rows {batch['row'][:5]}")
            if batch["text"] != right["text"]:
                raise WrongValuesError(f"texts {batch['text'][:5]} of rows {batch['row'][:5]}")
        if len(np.unique(versions)) > 1:
            raise WrongValuesError(f"versions {np.unique(versions)} in one epoch")
        if not np.array_equal(np.sort(rows), np.arange(first.num_rows)):
            return f"{len(rows)} rows, {len(np.unique(rows))} different ones, of {first.num_rows}"
        return ""

    def _open(self, rank: int, world_size: int) -> CacheIterableDataset:
        return CacheIterableDataset(
            NAME,
            cache=Connection(self._endpoint, local=self._number % 2 == 0),
            batch_size=BATCH_SIZES[world_size],
            shuffle=True,
            seed=self._number,
            rank=rank,
            world_size=world_size,
            reading=Reading(message_bytes=self._random.choice([4096, 2**20])),
        )

    def _slowly(self, batches: CacheIterableDataset) -> Iterator[Any]:
        """With pauses, so that much happens meanwhile."""
        for batch in batches:
            time.sleep(self._random.random() * 0.004)
            yield batch


class Actions:
    """What happens to the cache meanwhile, drawn by chance."""

    def __init__(self, cluster: LocalCluster, table: Table, seed: int, findings: Findings) -> None:
        self._nodes = cluster.nodes
        self._findings = findings
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
            self.a_node_is_frozen,
            self.bytes_change_while_a_node_is_away,
            self.files_become_shorter_while_a_node_is_away,
            self.bytes_change_in_a_file_that_is_served,
            self.a_node_claims_what_it_does_not_hold,
            self.a_node_gives_changed_bytes,
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

    def a_node_is_frozen(self) -> None:
        node = psutil.Process(self._random.choice(self._nodes).pid)
        node.suspend()
        try:
            self._pause(3.0)
        finally:
            node.resume()

    def bytes_change_while_a_node_is_away(self) -> None:
        self._damage_while_away(flipped)

    def files_become_shorter_while_a_node_is_away(self) -> None:
        self._damage_while_away(lambda data: data[: len(data) // 2])

    def _damage_while_away(self, damaged: Callable[[bytes], bytes]) -> None:
        node = self._random.choice(self._nodes)
        node.kill()
        for path in self._shards(node)[:2]:
            # Another file: this process may have mapped the one before.
            draft = path.with_name("draft")
            draft.write_bytes(damaged(path.read_bytes()))
            draft.replace(path)
        self._pause(2.0)
        node.restart()

    def bytes_change_in_a_file_that_is_served(self) -> None:
        for path in self._shards(self._random.choice(self._nodes))[:1]:
            with suppress(FileNotFoundError):  # it is dropped meanwhile
                data = path.read_bytes()
                path.chmod(0o644)
                self._findings.note_rot(ROTTEN_S)
                with path.open("r+b") as file:
                    file.write(flipped(data))
        time.sleep(ROTTEN_S)

    def _shards(self, node: LocalNode) -> list[Path]:
        found = [p for p in files_below(node.cache_dir) if p.match(f"{NAME}/*/shard-*.arrow")]
        return self._random.sample(sorted(found), len(found))

    def a_node_claims_what_it_does_not_hold(self) -> None:
        self._lie("zeros")

    def a_node_gives_changed_bytes(self) -> None:
        self._lie("changes")

    def _lie(self, kind: str) -> None:
        """A process claims every shard with its checksum. No reader may be sent to it."""
        node, honest = self._nodes[0], self._random.choice(self._nodes)
        command = [sys.executable, "-m", "tests.false_nodes", kind, node.control_location]
        command += [honest.endpoint, str(honest.cache_dir), NAME]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as liar:
            assert liar.stdout is not None
            try:
                for line in islice(liar.stdout, LIES):
                    self._findings.note_lie(line)
            finally:
                liar.kill()

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
    with ExitStack() as stack:
        cluster = stack.enter_context(
            LocalCluster(NODES, directory / "cache", node_timeout_s=NODE_TIMEOUT_S, lease_s=LEASE_S)
        )
        actions = Actions(cluster, table, seed, findings)
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
    print(f"reports of false nodes: {findings.lies}, {findings.read_back} after a look at a file")
    print(f"wrong: {len(findings.wrong)}; while bytes had just changed: {findings.while_rotten}")
    sys.exit(bool(findings.wrong))


if __name__ == "__main__":
    main()
