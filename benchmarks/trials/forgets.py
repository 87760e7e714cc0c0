"""Forgets rows while nodes are killed and jobs read; then looks for them everywhere.

    python -m benchmarks.trials.forgets --runs 200 --seed 1 --json FILE

Two nodes hold six million rows twice, in three versions or more. Each user has rows with a canary:
16 bytes of text, and the same bytes in two packed numbers. A run forgets one user, and kills nodes
at random moments. Once `forget` has returned, no file of a node that answers has a part of the
canary, no process has mapped one, and no answer has a row of the user. Jobs that read meanwhile,
and after it, get every other row once. A node that was away erases before it serves, and a refresh
of the source brings nothing back. A cluster has some runs, so its later ones look for all users
before, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_client.control.row_reads import open_version
from cache_client.job.connection import access_to
from cache_protocol.errors import (
    CacheError,
    ErasedRowsError,
    NodeUnavailableError,
    NotReadyError,
    StaleVersionError,
)
from cache_server.local import LocalCluster, LocalNode

NAME, FILES, USERS, RUNS_OF_A_CLUSTER = "people", 12, 60, 10
WAIT_S = 120.0
_MARK = b"C@n"  # each half of a canary begins with it
_KILLS = "coordinator", "node", "both", "away"

Ids = npt.NDArray[np.int64]
_T = TypeVar("_T")


def canary(user: int) -> bytes:
    """The 16 bytes of a user; each half can be found."""
    return b"%b0%04d%b1%04d" % (_MARK, user, _MARK, user)


def has_canary(data: bytes, users: set[int]) -> bool:
    """Whether there is a half of a canary of some users."""
    at = data.find(_MARK)
    while at >= 0:
        number = data[at + 4 : at + 8]
        if number.isdigit() and int(number) in users:
            return True
        at = data.find(_MARK, at + 1)
    return False


class Table:
    """The source: files of rows. Some belong to users.

    Attributes:
        users: of each row, by id; -1: none.
    """

    def __init__(self, num_rows: int, rng: random.Random) -> None:
        self.rows_of_file = num_rows // FILES
        self.users = np.full(self.rows_of_file * FILES, -1)
        for file in range(FILES):
            first = file * self.rows_of_file
            chosen = rng.sample(range(self.rows_of_file), 2 * USERS)
            self.users[first + np.array(chosen)] = np.arange(2 * USERS) % USERS

    def write(self, folder: Path, file: int) -> None:
        """Writes one file."""
        ids = np.arange(file * self.rows_of_file, (file + 1) * self.rows_of_file)
        users = self.users[ids]
        halves = np.array([np.frombuffer(canary(u), np.int64) for u in range(USERS)])
        theirs = users >= 0
        numbers = np.stack([ids, ~ids])
        numbers[:, theirs] = halves[users[theirs]].T
        words = pa.array([canary(u).decode() for u in range(USERS)] + ["of no user at all"])
        text = words.take(pa.array(np.where(theirs, users, USERS)))
        names = {"id": ids, "first": numbers[0], "second": numbers[1], "text": text}
        pq.write_table(
            pa.table(names), folder / f"{file:02}.parquet", row_group_size=self.rows_of_file // 5
        )


@dataclass
class Found:
    """What the runs were, and what was wrong."""

    runs: int = 0
    faults: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    did: Counter[str] = field(default_factory=Counter)
    versions: Counter[int] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    def fault(self, what: str) -> None:
        """Notes and prints a fault."""
        self.faults.append(what)
        print(what, flush=True)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds to the seconds of a part."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] += time.monotonic() - begun  # type: ignore[assignment]


class Reader(threading.Thread):
    """Reads all rows when asked, and notes what is wrong."""

    def __init__(self, trial: Trial, name: str, read: Callable[[], Iterator[Ids]]) -> None:
        super().__init__(daemon=True, name=name)
        self._trial, self._read = trial, read
        self.passes = self._rows_of_pass = 0

    def run(self) -> None:
        while not self._trial.ended:
            if self.passes >= self._trial.wanted_passes:
                time.sleep(0.05)
                continue
            try:
                self._pass()
            except ErasedRowsError:
                if self.name != "stream":
                    self._trial.fault(f"{self.name}: {traceback.format_exc()}")
            except NodeUnavailableError:  # it began while the coordinator was away
                if self._rows_of_pass:
                    self._trial.fault(f"{self.name}: {traceback.format_exc()}")
            except Exception:
                self._trial.fault(f"{self.name}: {traceback.format_exc()}")
                time.sleep(1.0)
            self.passes += 1

    def _pass(self) -> None:
        trial = self._trial
        gone, counts = set(trial.gone), np.zeros(len(trial.table.users), np.uint8)
        self._rows_of_pass = 0
        for ids in self._read():
            self._rows_of_pass += len(ids)
            np.add.at(counts, ids, 1)
            if trial.ended:
                return
        users = trial.table.users
        if (counts > 1).any():
            trial.fault(f"{self.name}: {(counts > 1).sum()} rows came twice")
        may_lack = np.isin(users, [*trial.gone, *trial.leaving])
        if (lacks := (counts == 0) & ~may_lack).any():
            trial.fault(f"{self.name}: {lacks.sum()} rows are missing")
        if (counts[np.isin(users, [*gone])]).any():
            trial.fault(f"{self.name}: rows came that were forgotten before it began")
        trial.found.did["passes"] += 1


class Trial:
    """One cluster, and its runs.

    Attributes:
        wanted_passes: of each reader, from the begin on.
        gone: users that were forgotten.
        leaving: users that are being forgotten.
    """

    def __init__(self, table: Table, source: Path, base: Path, found: Found, seed: int) -> None:
        self.table, self.found, self._source, self._base = table, found, source, base
        self._rng, self._seed = random.Random(seed), seed
        self.gone: set[int] = set()
        self.leaving: set[int] = set()
        self.ended = False
        self.wanted_passes = 0
        self._versions: list[str] = []  # the last three
        self._spec = DatasetSpec(NAME, str(source), replicas=2, target_shard_bytes=8 << 20)

    def fault(self, what: str) -> None:
        """Notes a fault of this cluster."""
        self.found.fault(f"seed {self._seed}, after {len(self.gone)} users: {what}")

    def run(self, runs: int, until: float) -> None:
        """Makes the cluster, forgets some users, and loads all anew at last."""
        self._nodes_dir = self._base / "nodes"
        hidden = [self._source / f"{file:02}.parquet" for file in (FILES - 2, FILES - 1)]
        for path in hidden:
            path.rename(path.with_suffix(".later"))
        with LocalCluster(2, self._nodes_dir, node_timeout_s=2.0, lease_s=120.0) as cluster:
            self._cluster = cluster
            self._client = CacheClient(Connection(cluster.endpoint, deadline_s=60.0))
            self._access = access_to(Connection(cluster.endpoint))
            with self.found.timed("three versions"):
                self._load()
                for path in hidden:
                    path.with_suffix(".later").rename(path)
                    self._load()
            readers = self._readers()
            for reader in readers:
                reader.start()
            users = self._rng.sample(range(USERS), min(runs, RUNS_OF_A_CLUSTER))
            for user in users:
                if time.monotonic() < until:
                    self._forget_one(user, readers)
                    self.found.runs += 1
                    spent = {name: round(value) for name, value in self.found.seconds.items()}
                    print(f"seed {self._seed}: run {self.found.runs}, {spent}", flush=True)
            self.ended = True
            for reader in readers:
                reader.join(WAIT_S)
            with self.found.timed("load anew"):
                self._client.drop(NAME)
                self._client.load(self._spec)
                self._look("after a drop and a load")

    def _load(self) -> None:
        """Loads a version of the files as they are, and keeps two before it by reading them."""
        info = self._until_done(lambda: self._client.load(self._spec))
        self._versions = [*self._versions[-2:], info.fingerprint]
        for version in list(self._versions):
            try:
                self._until_done(partial(open_version, self._access, NAME, version))
            except StaleVersionError:  # the nodes were away for longer than its lease
                self._versions.remove(version)

    def _readers(self) -> list[Reader]:
        here = Connection(self._cluster.endpoint, local=True, deadline_s=WAIT_S)
        far = Connection(self._cluster.endpoint, local=False, deadline_s=WAIT_S)

        def job(name: str, cache: Connection, world: int) -> Iterator[Ids]:
            def begun() -> list[CacheIterableDataset]:
                return [
                    CacheIterableDataset(
                        NAME, columns=["id", "first", "second"], pad_mask="real", cache=cache,
                        job=name, rank=rank, world_size=world, seed=self.found.runs,
                        batch_size=16_384, shuffle=True, batch_format="numpy",
                    )
                    for rank in range(world)
                ]  # fmt: skip

            made = begun()
            while any(each.state_dict() != made[0].state_dict() for each in made):
                made = begun()  # a version was ready, or an act done, between the ranks
            ranks = [iter(each) for each in made]
            while batches := [batch for rank in ranks if (batch := next(rank, None)) is not None]:
                for batch in batches:
                    real = batch["real"]
                    columns = (batch[each][real] for each in ("id", "first", "second"))
                    yield self._checked(*columns)

        def stream() -> Iterator[Ids]:
            for batch in self._client.read(NAME):
                self._check_text(batch)
                yield self._checked(*(batch[each].to_numpy() for each in ("id", "first", "second")))

        return [
            Reader(self, "local job", lambda: job("here", here, 1)),
            Reader(self, "job of two ranks", lambda: job("far", far, 2)),
            Reader(self, "stream", stream),
        ]

    def _checked(self, ids: Ids, first: Ids, second: Ids) -> Ids:
        """The ids of rows whose values are right."""
        is_other = self.table.users[ids] < 0
        if (first[is_other] != ids[is_other]).any() or (second[is_other] != ~ids[is_other]).any():
            self.fault("rows of no user have other values")
        for user, *halves in zip(
            self.table.users[ids[~is_other]], first[~is_other], second[~is_other], strict=True
        ):
            if np.array(halves).tobytes() != canary(user):
                self.fault(f"a row of user {user} has {halves}")
        return ids

    def _check_text(self, batch: pa.RecordBatch) -> None:
        """Texts of users that are forgotten may be zeros: see docs/forget.md."""
        text = batch["text"].dictionary_encode()
        allowed = {"of no user at all", *(canary(user).decode() for user in range(USERS))}
        others = {each for each in text.dictionary.to_pylist() if each.strip("\0")} - allowed
        if others:
            self.fault(f"rows have the texts {sorted(others)[:3]}")

    def _forget_one(self, user: int, readers: list[Reader]) -> None:
        kind = self._rng.choice(_KILLS)
        by_text = f"text = '{canary(user).decode()}'"
        by_number = f"first = {int.from_bytes(canary(user)[:8], 'little')}"
        where = self._rng.choice([by_text, by_number])
        self.wanted_passes += 1
        time.sleep(self._rng.uniform(0.0, 1.0))
        self.leaving.add(user)
        killer = self._kill(kind)
        with self.found.timed("forget"):
            act = self._until_done(
                lambda: self._client.forget(NAME, where, reason=f"trial {user}", timeout_s=WAIT_S)
            )
        self.gone.add(user)
        self.wanted_passes += 1  # one more, while nodes return
        if not act.attestation:
            self.fault(f"user {user}: no act")
            return
        away = set(json.loads(act.attestation)["attestation"]["away"])
        self.found.versions[len(act.versions)] += 1
        self.found.did["acts with a node away"] += bool(away)
        self._look(f"{kind}: when forget returned", away)
        with self.found.timed("nodes return"):
            killer()
            self._settle(away, f"{kind}: as nodes return")
        with self.found.timed("passes end"):
            self._until(
                lambda: all(reader.passes >= self.wanted_passes for reader in readers),
                "passes end",
            )
        with self.found.timed("refresh"):
            self._refresh()
        self._look(f"{kind}: after a refresh")

    def _kill(self, kind: str) -> Callable[[], None]:
        """Kills nodes at a random moment from now on; returns what waits until they run again."""
        nodes = self._cluster.nodes
        victims = {"coordinator": nodes[:1], "both": nodes}.get(kind, nodes[1:])
        self.found.kills[kind] += 1
        if kind == "away":
            victims[0].kill()
            away = self._rng.random() < 0.5
            if away:
                self._until(lambda: self._alive() == 1, "the loss of a node")
            return victims[0].start if away else self._restarting(victims, 0.0)
        return self._restarting(victims, self._rng.uniform(0.0, 1.0))

    def _restarting(self, victims: list[LocalNode], after_s: float) -> Callable[[], None]:
        pauses = [self._rng.uniform(0.0, 0.3) for _ in victims]
        back = self._rng.uniform(0.0, 2.5)

        def kill() -> None:
            time.sleep(after_s)
            for node, pause in zip(victims, pauses, strict=True):
                time.sleep(pause)
                node.kill()
            time.sleep(back)
            for node in victims:
                node.start()

        thread = threading.Thread(target=kill)
        thread.start()
        return thread.join

    def _refresh(self) -> None:
        """Loads a version for which a file is read again; a node may be killed meanwhile."""
        path = self._rng.choice(sorted(self._source.iterdir()))
        now = time.time()
        os.utime(path, (now, now))
        wait = None
        if self._rng.random() < 0.3:
            victim = self._rng.choice(self._cluster.nodes)
            wait = self._restarting([victim], self._rng.uniform(0.0, 1.0))
            self.found.kills["refresh"] += 1
        self._load()
        if wait is not None:
            wait()
        self._until(lambda: self._alive() == 2, "both nodes are there")
        info = self._until_done(lambda: self._client.describe(NAME))
        rows = int((~np.isin(self.table.users, [*self.gone])).sum())
        if info.num_rows - info.erased_rows != rows:
            self.fault(
                f"after a refresh {info.num_rows} rows less {info.erased_rows}, wanted {rows}"
            )

    def _settle(self, away: set[str], when: str) -> None:
        """Waits until both nodes serve all shards; none may serve one with a canary."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            try:
                shards = open_version(self._access, NAME)
            except CacheError:
                time.sleep(0.1)
                continue
            for number, (nodes, files) in enumerate(
                zip(shards.replicas, shards.files, strict=True)
            ):
                serving = {shards.nodes[each].id for each in nodes}
                for file in files:
                    if away and file.node_id in serving & away and self._has(Path(file.path)):
                        self.fault(f"{when}: shard {number} is served with a canary")
            if all(len(nodes) == 2 for nodes in shards.replicas) and self._alive() == 2:
                break
            time.sleep(0.1)
        else:
            self.fault(f"{when}: a node does not serve all shards again")
        if away:
            self._until(lambda: not self._files(), "a node that was away has erased")

    def _look(self, when: str, away: set[str] | frozenset[str] = frozenset()) -> None:
        """Looks for canaries in files, in mapped files that were removed, and in pages."""
        folders = [node.cache_dir for node in self._cluster.nodes if node.node_id in away]
        with self.found.timed("look at files"):
            found = self._files()
        kept = [path for path in found if not any(path.is_relative_to(f) for f in folders)]
        if kept:
            self.fault(f"{when}: canaries in {kept}")
        with self.found.timed("look at answers"):
            for answer in self._answers():
                if has_canary(answer, self.gone):
                    self.fault(f"{when}: canary in the answer {answer[:60]!r}")
        with self.found.timed("look at memory"):
            for process in (psutil.Process(), *psutil.Process().children()):
                self._look_at_mapped(process, when)

    def _answers(self) -> Iterator[bytes]:
        for node in self._cluster.nodes:
            for path in ("", "/metrics"):
                try:
                    with urllib.request.urlopen(node.page.rstrip("/") + path, timeout=5) as found:
                        yield found.read()
                except OSError:  # it is down
                    break
        with suppress(CacheError):  # likewise
            client = CacheClient(Connection(self._cluster.endpoint, deadline_s=3.0))
            yield repr((client.forgotten(), client.describe(NAME))).encode()

    def _look_at_mapped(self, process: psutil.Process, when: str) -> None:
        """Looks at files that a process has mapped and no folder has any more."""
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            with Path(f"/proc/{process.pid}/mem").open("rb", 0) as memory:
                for line in maps:
                    if str(self._base) not in line or not line.endswith("(deleted)"):
                        continue
                    first, last = (int(each, 16) for each in line.split()[0].split("-"))
                    memory.seek(first)
                    self.found.did["removed files that were mapped"] += 1
                    if has_canary(memory.read(last - first), self.gone):
                        self.fault(f"{when}: process {process.pid} has mapped {line.split()[5]}")
        except (OSError, psutil.Error):
            return  # it ended

    def _files(self) -> list[Path]:
        """Files of nodes, of their scratch and logs, with a canary of users that are gone."""
        found, looked = [], dict[int, bool]()  # versions have files in common
        for folder, _, names in os.walk(self._base):
            for path in (Path(folder, name) for name in names):
                with suppress(OSError):  # it was removed
                    inode = path.stat().st_ino
                    if inode not in looked:
                        looked[inode] = self._has(path)
                    found += [path] if looked[inode] else []
        return found

    def _has(self, path: Path) -> bool:
        try:
            return path.is_file() and has_canary(path.read_bytes(), self.gone)
        except OSError:
            return False  # it was removed

    def _alive(self) -> int:
        try:
            return len([node for node in self._client.nodes() if node.alive])
        except CacheError:
            return 0

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > until:
                self.fault(f"not within {WAIT_S:g} s: {what}")
                return
            time.sleep(0.1)

    def _until_done(self, call: Callable[[], _T]) -> _T:
        """What a call returns once the nodes answer."""
        until = time.monotonic() + WAIT_S
        while True:
            try:
                return call()
            except StaleVersionError:
                raise
            except CacheError as error:
                self.found.did[f"calls again after {type(error).__name__}"] += 1
                if not isinstance(error, NodeUnavailableError | NotReadyError):
                    self.fault(f"{type(error).__name__}: {error}")
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)


def soak(runs: int, seed: int, num_rows: int, seconds: float) -> Found:
    """Runs, on as many clusters as they need."""
    found, until = Found(), time.monotonic() + seconds
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="forgets-") as folder:
        source = Path(folder, "source")
        source.mkdir()
        table = Table(num_rows, random.Random(seed))
        for file in range(FILES):
            table.write(source, file)
        while found.runs < runs and time.monotonic() < until:
            base = Path(folder, f"cluster-{seed}")
            (base / "scratch").mkdir(parents=True)
            os.environ["TMPDIR"] = str(base / "scratch")
            begun = time.monotonic()
            Trial(table, source, base, found, seed).run(runs - found.runs, until)
            print(
                f"seed {seed}: {found.runs} runs, {len(found.faults)} faults, "
                f"{time.monotonic() - begun:.0f} s {dict(found.seconds)}",
                flush=True,
            )
            seed += 1
    return found


def main() -> int:
    """Runs the program and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=6_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path, help="file to which the result is added")
    arguments = parser.parse_args()
    begun = time.monotonic()
    found = soak(arguments.runs, arguments.seed, arguments.rows, arguments.seconds)
    result = {
        "seed": arguments.seed,
        "rows": arguments.rows,
        "runs": found.runs,
        "faults": found.faults,
        "kills": dict(found.kills),
        "did": dict(found.did),
        "versions_of_acts": {str(n): count for n, count in sorted(found.versions.items())},
        "seconds": {name: round(value) for name, value in found.seconds.items()},
        "wall_s": round(time.monotonic() - begun),
    }
    print(json.dumps(result, indent=2))
    if arguments.json is not None:
        earlier = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        arguments.json.write_text(json.dumps([*earlier, result], indent=2) + "\n")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
