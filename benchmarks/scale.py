"""What does a batch cost the client as shards and nodes grow? Simulated in process, no sockets.

    python -m benchmarks.scale [--quick]

A table of 32 float32 and one int64 grows by shards of the default size, dealt out at random to the
nodes. Timed are shuffled windows as `CacheIterableDataset` cuts them by default: the permutation
and the routing, which is the client's time before it asks, and a whole `Reader.fetch` from nodes
that answer at once, which adds what every request and answer costs in Python and putting the rows
in order, but no wire. Beside it the shard map: its size on the wire, what reading it takes, the
memory that it and the router hold.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from benchmarks.common import Timing, measure_in_turn, write_result
from cache_client.flight.connections import _shard_map
from cache_client.flight.routing import Router, ShardMap
from cache_client.flight.streams import GatherStream
from cache_client.order.order import EpochOrder
from cache_client.reading.reader import Reader
from cache_client.reading.window_sizes import MESSAGE_BYTES
from cache_protocol.datasets.dataset_spec import DEFAULT_TARGET_SHARD_BYTES
from cache_protocol.storage.layout import Layout, from_matrix, pool_array
from cache_protocol.storage.row_index import Ids
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.rpc.flight_infos import flight_info

SCHEMA = pa.schema([(f"f{i}", pa.float32()) for i in range(32)] + [("label", pa.int64())])
ROW_BYTES = 32 * 4 + 8
BATCH_SIZE = 1024
BATCHES = 4 * MESSAGE_BYTES // (BATCH_SIZE * ROW_BYTES)  # of a window, which has 4 messages or more
WINDOW_ROWS = BATCHES * BATCH_SIZE
ROWS_PER_SHARD = DEFAULT_TARGET_SHARD_BYTES // ROW_BYTES
SHARDS = (10, 1_000, 100_000)
NODES = (1, 10, 1_000)
TARGET = 1.5


@dataclass(frozen=True)
class Case:
    """A table of so many shards on so many nodes, and what its map costs.

    Attributes:
        windows, row_ids: positions of the windows that are read, and the rows there.
        info_bytes: of the FlightInfo on the wire.
        encode_s, decode_s: a node makes it and writes it; the client reads it and makes the map.
        map_bytes, router_bytes: memory that they hold; the router without the map.
    """

    num_shards: int
    num_nodes: int
    shards: ShardMap
    router: Router
    order: EpochOrder
    windows: list[Ids]
    row_ids: list[Ids]
    info_bytes: int
    encode_s: float
    decode_s: float
    map_bytes: int
    router_bytes: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.num_shards:,} shards on {self.num_nodes:,} nodes"

    def permute(self) -> int:
        """Row ids of every window; returns how many."""
        return sum(len(self.order.row_ids(window)) for window in self.windows)

    def route(self) -> int:
        """The requests for every window; returns how many rows they ask for."""
        parts = [part for row_ids in self.row_ids for part in self.router.route(row_ids)]
        return sum(len(part.row_ids) for part in parts)

    def requests_per_window(self) -> float:
        """On average."""
        return float(np.mean([len(self.router.route(row_ids)) for row_ids in self.row_ids]))


class InstantStream(GatherStream):
    """Stands in for a stream from a node: answers at once, with rows prepared."""

    is_fresh = True
    _answer = pa.RecordBatch.from_arrays(
        [
            from_matrix(np.ones((WINDOW_ROWS, column.width), column.dtype), column.field)
            for column in Layout(SCHEMA).columns
        ],
        schema=Layout(SCHEMA).schema,
    )

    def __init__(self) -> None:
        """Without a node."""

    def send(self, row_ids: Ids) -> None:
        """Makes the message that would be sent."""
        pa.RecordBatch.from_arrays([pool_array(row_ids)], names=["row"])

    def receive(self, num_rows: int) -> list[pa.RecordBatch]:
        """As many rows as were asked for."""
        return [self._answer.slice(0, num_rows)]

    def close(self) -> None:
        """Nothing is open."""


class InstantNode:
    """Stands in for a `Connection` to a node."""

    is_closed = False

    def __init__(self, location: str, credentials: object) -> None:
        """As a `Connection` is made."""

    def open_gather(self, *_: object, **__: object) -> InstantStream:
        """A stream: one for each running request."""
        return InstantStream()

    def close(self) -> None:
        """Nothing is open."""


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=20, help="of each case, in each repeat")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a look in seconds")
    arguments = parser.parse_args()
    windows: int = 5 if arguments.quick else arguments.windows
    repeats: int = 5 if arguments.quick else arguments.repeats
    cases = [
        make_case(num_shards, num_nodes, windows)
        for num_nodes in (NODES[1:2] if arguments.quick else NODES)
        for num_shards in SHARDS
        if num_shards >= num_nodes  # else nodes hold nothing
    ]
    gc.freeze()  # the maps are many objects, which would be looked through before each repeat
    rows = windows * WINDOW_ROWS
    permuting = measure({case.name: case.permute for case in cases}, rows, repeats)
    routing = measure({case.name: case.route for case in cases}, rows, repeats)
    with mock.patch("cache_client.reading.node_streams.NodeConnection", InstantNode):
        # A fetch from 1,000 nodes takes so long that fewer tell as much.
        fetching = measure({case.name: fetcher(case) for case in cases}, rows, -(-repeats // 5))
    results = [
        describe(case, permuting[case.name], routing[case.name], fetching[case.name])
        for case in cases
    ]
    print_results(results)
    ratios = shard_ratios(results)
    print()
    for name, value in ratios.items():
        print(f"{name:56} {value:6.2f}  (to reach: {TARGET:g})")
    path = write_result(
        "scale-quick" if arguments.quick else "scale",
        {
            "row_bytes": ROW_BYTES,
            "rows_per_shard": ROWS_PER_SHARD,
            "batch_size": BATCH_SIZE,
            "batches_per_window": BATCHES,
            "replicas": 1,
            "cases": results,
            "ratios": ratios,
            "targets": dict.fromkeys(ratios, TARGET),
        },
    )
    print(f"\nwritten to {path}")


def make_case(num_shards: int, num_nodes: int, num_windows: int) -> Case:
    """The map, made as a node and a client make it, and windows from all over the epoch."""
    info = dataset_info(num_shards, num_nodes)
    descriptor = flight.FlightDescriptor.for_path("table")
    start = time.perf_counter()
    wire = flight_info(descriptor, info, [], None).serialize()
    encode_s = time.perf_counter() - start
    start = time.perf_counter()
    shards = _shard_map(flight.FlightInfo.deserialize(wire), time.monotonic())
    decode_s = time.perf_counter() - start
    router = Router(shards)
    map_bytes = held_bytes(shards)
    rng = np.random.default_rng(num_shards)
    starts = rng.integers(0, shards.num_rows - WINDOW_ROWS, num_windows)
    windows = [np.arange(start, start + WINDOW_ROWS, dtype=np.int64) for start in starts]
    order = EpochOrder(shards.num_rows, shuffle=True, seed=1)
    return Case(
        num_shards=num_shards,
        num_nodes=num_nodes,
        shards=shards,
        router=router,
        order=order,
        windows=windows,
        row_ids=[order.row_ids(window) for window in windows],
        info_bytes=len(wire),
        encode_s=encode_s,
        decode_s=decode_s,
        map_bytes=map_bytes,
        router_bytes=held_bytes(router) - map_bytes,
    )


def dataset_info(num_shards: int, num_nodes: int) -> pb.DatasetInfo:
    """What a coordinator would say; shards are dealt out evenly, at random, one replica each."""
    dealt = np.random.default_rng(0).permutation(num_shards) % num_nodes
    nodes = [
        pb.Node(
            id=f"node-{index}",
            flight_location=f"grpc://node-{index}:50051",
            cache_dir="/dev/shm/cache",
            alive=True,
        )
        for index in range(num_nodes)
    ]
    shards = [
        pb.Shard(
            index=index,
            rows=pb.RowRange(start=index * ROWS_PER_SHARD, stop=(index + 1) * ROWS_PER_SHARD),
            num_bytes=ROWS_PER_SHARD * ROW_BYTES,
            checksum=f"{index:032x}",  # as long as an XXH3-128
            node_ids=[nodes[dealt[index]].id],
        )
        for index in range(num_shards)
    ]
    return pb.DatasetInfo(
        spec=pb.DatasetSpec(name="table"),
        fingerprint=f"{0:032x}",
        state=pb.DATASET_STATE_READY,
        num_rows=num_shards * ROWS_PER_SHARD,
        num_bytes=num_shards * ROWS_PER_SHARD * ROW_BYTES,
        schema=SCHEMA.serialize().to_pybytes(),
        shards=shards,
        nodes=nodes,
    )


def held_bytes(root: object) -> int:
    """Bytes of ``root`` and of every object that it refers to, each once; not of its classes."""
    seen: dict[int, object] = {}
    todo: list[Any] = [root]
    while todo:
        each = todo.pop()
        if id(each) not in seen and not isinstance(each, type | ModuleType):
            seen[id(each)] = each
            todo += gc.get_referents(each)
    return sum(map(sys.getsizeof, seen.values()))


def fetcher(case: Case) -> Callable[[], int]:
    """A function that fetches every window through one `Reader`, as an epoch does."""
    reader = Reader("grpc://node-0:50051", case.shards)

    def fetch() -> int:
        return sum(
            piece.num_rows
            for window in case.windows
            for piece in reader.fetch(case.order.row_ids(window))
        )

    return fetch


def measure(
    contenders: Mapping[str, Callable[[], int]], rows: int, repeats: int
) -> dict[str, Timing]:
    """The cases in turn."""
    return measure_in_turn(contenders, num_rows=rows, num_bytes=rows * ROW_BYTES, repeats=repeats)


def describe(case: Case, permuting: Timing, routing: Timing, fetching: Timing) -> dict[str, Any]:
    """For the result file; times are of one batch, at the median."""
    batches = routing.num_rows / BATCH_SIZE
    permute_s, route_s = permuting.median_s / batches, routing.median_s / batches
    return {
        "name": case.name,
        "num_shards": case.num_shards,
        "num_nodes": case.num_nodes,
        "requests_per_window": case.requests_per_window(),
        "permute_s": permute_s,
        "permute_s_interval": [each / batches for each in permuting.interval_s()[:2]],
        "route_s": route_s,
        "route_s_interval": [each / batches for each in routing.interval_s()[:2]],
        "interval_confidence": routing.interval_s().confidence,
        "permute_and_route_s": permute_s + route_s,
        "fetch_without_wire_s": fetching.median_s / batches,
        "info_bytes": case.info_bytes,
        "encode_info_s": case.encode_s,
        "decode_info_s": case.decode_s,
        "map_bytes": case.map_bytes,
        "router_bytes": case.router_bytes,
    }


def print_results(results: list[dict[str, Any]]) -> None:
    """A line a case."""
    print(f"\nwindows of {BATCHES} batches of {BATCH_SIZE} rows; microseconds a batch\n")
    print(
        f"{'':30} {'permute':>8} {'route':>7} {'both':>7} {'route at 95%':>15} {'fetch':>9} "
        f"{'requests':>9} {'wire KB':>9} {'make ms':>8} {'read ms':>8} "
        f"{'map KB':>8} {'router KB':>9}"
    )
    for each in results:
        low, high = (end * 1e6 for end in each["route_s_interval"])
        print(
            f"{each['name']:30} {each['permute_s'] * 1e6:8.1f} {each['route_s'] * 1e6:7.1f} "
            f"{each['permute_and_route_s'] * 1e6:7.1f} {f'{low:.1f} - {high:.1f}':>15} "
            f"{each['fetch_without_wire_s'] * 1e6:9.1f} {each['requests_per_window']:9.1f} "
            f"{each['info_bytes'] / 1e3:9.1f} {each['encode_info_s'] * 1e3:8.1f} "
            f"{each['decode_info_s'] * 1e3:8.1f} "
            f"{each['map_bytes'] / 1e3:8.1f} {each['router_bytes'] / 1e3:9.1f}"
        )
    print(
        "\nfetch: the whole of Reader.fetch from nodes that answer at once; requests: of a window; "
        "wire, make, read: the FlightInfo"
    )


def shard_ratios(results: list[dict[str, Any]]) -> dict[str, float]:
    """Time per batch with the most shards over that with the fewest, on as many nodes."""
    ratios = {}
    for num_nodes in NODES:
        by_shards = {
            each["num_shards"]: each["permute_and_route_s"]
            for each in results
            if each["num_nodes"] == num_nodes
        }
        if min(SHARDS) in by_shards:
            name = f"{max(SHARDS):,} shards over {min(SHARDS):,}, {num_nodes:,} nodes"
            ratios[name] = by_shards[max(SHARDS)] / by_shards[min(SHARDS)]
    return ratios


if __name__ == "__main__":
    main()
