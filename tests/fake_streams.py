"""Nodes as the parts of a reader see them: each call answers at once, or fails as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from cache_client.flight import routing
from cache_client.flight import streams as flight_streams
from cache_protocol.errors import CacheError
from cache_protocol.storage.row_index import Ids

ENDPOINT = "grpc://endpoint:1"
LEASE_S = 100.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def shard_map(nodes: int, *, leased_at: float = 0.0) -> routing.ShardMap:
    """A shard for each node, of ten rows."""
    return routing.ShardMap(
        "table", "f", pa.schema([("row", pa.int64())]), 10 * nodes,
        np.arange(nodes, dtype=np.int64) * 10,
        tuple(routing.NodeRef(f"node-{i}", location(i)) for i in range(nodes)),
        tuple((i,) for i in range(nodes)), lease_s=LEASE_S, leased_at=leased_at,
    )  # fmt: skip


def location(node: int) -> str:
    return f"grpc://node-{node}:1"


class FakeStream(flight_streams.GatherStream):
    """A stream that answers every request with as many rows as were asked for."""

    def __init__(self, error: CacheError | None = None) -> None:
        self.error = error

    def send(self, row_ids: Ids) -> None:
        pass

    def receive(self, num_rows: int) -> list[pa.RecordBatch]:
        if self.error is not None:
            raise self.error
        return [pa.record_batch({"row": pa.array(range(num_rows))})]


@dataclass
class FakeStreams:
    """Stands in for `NodeStreams` and for its connections.

    Attributes:
        errors: location -> what every call to it raises.
        shards: the shard map that nodes answer with.
        streams: location -> what opening a stream to it gives.
        calls: verb and location of each call, in order.
        on_call: called before each call.
    """

    shards: routing.ShardMap
    errors: dict[str, CacheError] = field(default_factory=dict)
    streams: dict[str, FakeStream | CacheError] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    timeouts_s: list[float] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    given_back: list[str] = field(default_factory=list)
    discarded: list[FakeStream] = field(default_factory=list)
    on_call: Callable[[], None] = lambda: None
    is_closed: bool = False

    def connection(self, location: str) -> _FakeConnection:
        return _FakeConnection(self, location)

    def drop(self, location: str) -> None:
        self.dropped.append(location)

    def take(self, locations: Sequence[str], patience_s: float) -> list[FakeStream | CacheError]:
        return [self.streams[location] for location in locations]

    def give_back(self, location: str, stream: FakeStream) -> None:
        self.given_back.append(location)

    def discard(self, stream: FakeStream) -> None:
        self.discarded.append(stream)

    def record(self, verb: str, location: str, timeout_s: float) -> None:
        self.on_call()
        self.calls.append((verb, location))
        self.timeouts_s.append(timeout_s)
        self.threads.append(threading.current_thread().name)
        if location in self.errors:
            raise self.errors[location]


@dataclass
class _FakeConnection:
    streams: FakeStreams
    location: str

    def renew_lease(self, dataset: str, fingerprint: str, timeout_s: float) -> None:
        assert (dataset, fingerprint) == ("table", "f")
        self.streams.record("renew", self.location, timeout_s)

    def read_shard_map(
        self,
        dataset: str,
        fingerprint: str,
        columns: tuple[str, ...],
        timeout_s: float,
        *,
        known_groups: int | None,
    ) -> routing.ShardMap:
        assert (dataset, fingerprint, known_groups) == ("table", "f", None)
        self.streams.record("map", self.location, timeout_s)
        return self.streams.shards
