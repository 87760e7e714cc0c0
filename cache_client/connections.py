"""Flight connections: the only importer of pyarrow.flight in the client.

Every call and every stream has a deadline. A gather stream is opened with a time limit and used
only in the first half of it, so a node that hangs is noticed after one to two request timeouts
without a watchdog.

Before a fork of this process every stream and connection is closed: see
`cache_client.grpc_guard.forks`. A caller that held one gets `ConnectionClosedError` and opens
another.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from cache_client.grpc_guard.forks import fork_gate
from cache_client.routing import NodeRef, ShardFile, ShardMap
from cache_protocol.errors import CacheError, ConfigError, NodeUnavailableError, from_proto
from cache_protocol.storage.layout import pool_array
from cache_protocol.storage.row_index import Ids
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.grpc_channel import DIRECT

REQUEST_TIMEOUT_S = 10.0
# Until a connection is made nothing can break off what waits for it: neither the end of the program
# nor a fork. gRPC's own limit is 20 s. A SYN that was lost is sent again after 1 s and after 3 s.
_CONNECT_TIMEOUT_S = 5.0
_MAX_MESSAGE_BYTES = -1  # Flight's own default: no limit
_ENDPOINTS_ACTION = "endpoints"
_ROW_SCHEMA = pa.schema([pa.field("row", pa.int64())])
_LARGEST_FREED_BYTES = 31 * 1024 * 1024


class ConnectionClosedError(NodeUnavailableError):
    """This process closed the connection, as it does before a fork: no fault of the node."""


class _Shared:
    """An object of Flight's that threads use and any may close, which Flight itself does not allow.

    Closing lets no use begin, breaks off those that run where that is possible, and leaves the
    object to the last of them to drop.

    Args:
        value: what is shared. Nobody may name it, not even by a local variable: the traceback of an
            error, which somebody may keep, would hold it, and gRPC with it.
        break_off: ends the running uses of ``value`` from another thread.
        drop: ends ``value`` when nobody uses it.
    """

    def __init__(
        self, value: Any, *, drop: Callable[[Any], None], break_off: Callable[[Any], None] | None
    ) -> None:
        self.value = value
        self._break_off = break_off
        self._drop = drop
        self._lock = threading.Lock()
        self._uses = 0
        self.is_closed = False

    @contextmanager
    def use(self, what: str) -> Iterator[None]:
        """Around every use of ``value``; ``what`` is named when it is closed already."""
        with self._lock:
            if self.is_closed:
                raise ConnectionClosedError(f"{what} was closed")
            self._uses += 1
        try:
            yield
        finally:
            with self._lock:
                self._uses -= 1
                last = self.is_closed and not self._uses
            if last:
                self._drop_value()

    def close(self) -> None:
        """Drops the value now, or when its last use ends."""
        with fork_gate.closing():
            with self._lock:
                if self.is_closed:
                    return
                self.is_closed = True
                unused = not self._uses
                if self._break_off is not None:
                    self._break_off(self.value)
            if unused:
                self._drop_value()

    def _drop_value(self) -> None:
        value, self.value = self.value, None
        with suppress(pa.ArrowException, OSError):  # it says that it was cancelled
            self._drop(value)


class Connection:
    """A Flight client of one node. Thread-safe."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._what = f"the connection to {location}"
        _keep_freed_memory()
        with _calling(location):
            try:
                self._client = _Shared(
                    flight.connect(
                        location,
                        generic_options=[
                            DIRECT,
                            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                            # Which is what gRPC takes this for.
                            ("grpc.min_reconnect_backoff_ms", int(1000 * _CONNECT_TIMEOUT_S)),
                        ],
                    ),
                    break_off=None,  # its calls have deadlines; its streams break off themselves
                    drop=lambda client: client.close(),
                )
            except (pa.ArrowException, TypeError) as error:
                raise ConfigError(
                    f"endpoint must be grpc://HOST:PORT, got {location!r}: {error}"
                ) from None
            fork_gate.add(self, last=True)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, by its holder or before a fork."""
        return self._client.is_closed

    def close(self) -> None:
        """Closes the client, at the end of the calls that run; waits for none of them."""
        self._client.close()

    def read_plan(
        self, dataset: str, fingerprint: str, columns: Sequence[str], timeout_s: float
    ) -> ShardMap:
        """Where the rows of a dataset are; the newest version when ``fingerprint`` is empty.

        Raises:
            DatasetNotFoundError, StaleVersionError, NotReadyError, LoadError, RequestError,
            NodeUnavailableError.
        """
        request = pb.ReadRequest(dataset=dataset, fingerprint=fingerprint, columns=columns)
        descriptor = flight.FlightDescriptor.for_command(request.SerializeToString())
        asked_at = time.monotonic()
        with self._running():
            info = self._client.value.get_flight_info(descriptor, _options(timeout_s))
        return _shard_map(info, asked_at)

    def renew_lease(self, dataset: str, fingerprint: str, timeout_s: float) -> None:
        """Tells the cache that somebody still reads this version; `read_plan` and reads do too.

        Raises:
            StaleVersionError, DatasetNotFoundError: it is gone. NodeUnavailableError.
        """
        self.read_schema(dataset, fingerprint, timeout_s)

    def read_schema(self, dataset: str, fingerprint: str, timeout_s: float) -> pa.Schema:
        """The logical schema of a version, with all of its columns.

        Raises:
            as `renew_lease`, which this does, too.
        """
        request = pb.ReadRequest(dataset=dataset, fingerprint=fingerprint)
        descriptor = flight.FlightDescriptor.for_command(request.SerializeToString())
        with self._running():
            try:
                return self._client.value.get_schema(descriptor, _options(timeout_s)).schema
            except flight.FlightError:
                raise
            except pa.ArrowException:
                # Of GetSchema alone pyarrow sends a handler's error without its code, and with a
                # traceback. The same request of another verb fails for the same reason.
                self._client.value.get_flight_info(descriptor, _options(timeout_s))
                raise

    def coordinator(self, timeout_s: float) -> pb.CoordinatorEndpoints:
        """Where the coordinator of this node is."""
        with self._running():
            results = list(self._client.value.do_action(_ENDPOINTS_ACTION, _options(timeout_s)))
        return pb.CoordinatorEndpoints.FromString(results[0].body.to_pybytes())

    def open_gather(
        self,
        dataset: str,
        fingerprint: str,
        columns: Sequence[str],
        timeout_s: float,
        *,
        rows_per_message: int = 0,
    ) -> GatherStream:
        """A stream that answers row ids with rows, each request within ``timeout_s``.

        Args:
            rows_per_message: into which a node cuts an answer; 0: one message.
        """
        request = pb.GatherRequest(
            dataset=dataset,
            fingerprint=fingerprint,
            columns=columns,
            rows_per_message=rows_per_message,
        )
        descriptor = flight.FlightDescriptor.for_command(request.SerializeToString())
        usable_until = time.monotonic() + timeout_s
        with self._running():
            stream = GatherStream(
                self.location,
                self._client.value.do_exchange(descriptor, _options(2 * timeout_s)),
                usable_until,
            )
        try:
            stream.begin()
        except BaseException:  # or Arrow complains on standard error when it is collected
            stream.close()
            raise
        return stream

    @contextmanager
    def _running(self) -> Iterator[None]:
        with _calling(self.location), self._client.use(self._what):
            yield


class GatherStream:
    """One DoExchange: requests and answers in turn. One thread at a time; `close` from any."""

    def __init__(self, location: str, ends: tuple[Any, Any], usable_until: float) -> None:
        self._location = location
        self._what = f"the stream from {location}"
        self._ends = _Shared(
            ends, break_off=lambda ends: ends[1].cancel(), drop=lambda ends: ends[0].close()
        )
        self._usable_until = usable_until
        fork_gate.add(self)

    @property
    def is_fresh(self) -> bool:
        """Whether a request may still be begun on this stream."""
        return not self._ends.is_closed and time.monotonic() < self._usable_until

    def begin(self) -> None:
        """Tells the node what requests look like."""
        with self._running():
            self._ends.value[0].begin(_ROW_SCHEMA)

    def send(self, row_ids: Ids) -> None:
        """Asks for rows; `receive` their answer before the next one is sent."""
        batch = pa.RecordBatch.from_arrays([pool_array(row_ids)], schema=_ROW_SCHEMA)
        try:
            with self._running():
                self._ends.value[0].write_batch(batch)
        except CacheError:
            self.receive(len(row_ids))  # the reason stands in the answer, if there is one
            raise

    def receive(self, num_rows: int) -> list[pa.RecordBatch]:
        """The rows of the last request, which asked for so many: stored batches."""
        batches: list[pa.RecordBatch] = []
        missing = num_rows
        while missing > 0:
            with self._running():
                batches.append(self._ends.value[1].read_chunk().data)
            missing -= batches[-1].num_rows
        if missing:
            raise CacheError(f"{self._what} brought {-missing} rows more than {num_rows}")
        return batches

    def close(self) -> None:
        """Breaks the stream off, and waits for no node; a running `send` or `receive` fails."""
        self._ends.close()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Around every call into Flight; tells a stream that was closed from one that broke."""
        try:
            with _calling(self._location), self._ends.use(self._what):
                yield
        except NodeUnavailableError:
            if self._ends.is_closed:
                raise ConnectionClosedError(f"{self._what} was closed") from None
            raise


def _keep_freed_memory() -> None:
    """Lets glibc use the memory of a message again, as it does in whatever freed much at once.

    Its limits are dynamic (mallopt(3), M_MMAP_THRESHOLD): until a program has freed a large block,
    some MiB that are freed go back to the kernel, and each message would be made of fresh pages,
    which cost as much as all else that is done with it. Afterwards up to twice the largest block
    so freed, but no more than 64 MiB, stays with each of glibc's arenas. Other allocators ignore
    it, and it does nothing where ``MALLOC_TRIM_THRESHOLD_`` is set.
    """
    np.empty(_LARGEST_FREED_BYTES, np.uint8)  # never touched: an address range, freed at once


@contextmanager
def _calling(location: str) -> Iterator[None]:
    """Around every call into Flight: keeps forks out, and turns what it raises into the tree."""
    with fork_gate.call():
        try:
            yield
        except flight.FlightError as error:
            raise _cache_error(error, location) from None
        except pa.ArrowNotImplementedError:
            raise ConfigError(
                f"what answers at {location} serves no Arrow Flight: give the Flight port of a "
                "node, which is 50051 by default"
            ) from None
        except (pa.ArrowException, StopIteration, OSError) as error:
            # Raised for a stream that broke, or a client that was closed.
            raise NodeUnavailableError(f"node at {location} did not answer: {error!r}") from None


def _cache_error(error: flight.FlightError, location: str) -> CacheError:
    if error.extra_info:
        return from_proto(pb.Error.FromString(bytes(error.extra_info)))
    first_line = str(error).splitlines()[0] if str(error) else repr(error)
    return NodeUnavailableError(f"node at {location} did not answer: {first_line}")


def _options(timeout_s: float) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(timeout=timeout_s)


def _shard_map(info: flight.FlightInfo, asked_at: float) -> ShardMap:
    plan = pb.ReadPlan.FromString(bytes(info.app_metadata))
    nodes: dict[str, int] = {}
    refs: list[NodeRef] = []
    starts: list[int] = []
    replicas: list[tuple[int, ...]] = []
    files: list[tuple[ShardFile, ...]] = []
    num_bytes = 0
    for endpoint in info.endpoints:
        placement = pb.ShardPlacement.FromString(bytes(endpoint.app_metadata))
        uris = [location.uri.decode() for location in endpoint.locations]
        held = len(placement.node_ids)
        for node_id, uri in zip(placement.node_ids, uris[:held], strict=True):
            if node_id not in nodes:
                nodes[node_id] = len(refs)
                refs.append(NodeRef(node_id, uri))
        starts.append(placement.rows.start)
        num_bytes += placement.num_bytes
        replicas.append(tuple(nodes[node_id] for node_id in placement.node_ids))
        files.append(
            tuple(
                ShardFile(node_id, _path(uri), placement.num_bytes, placement.checksum)
                for node_id, uri in zip(placement.node_ids, uris[held:], strict=False)
            )
        )
    return ShardMap(
        plan.dataset,
        plan.fingerprint,
        info.schema,
        info.total_records,
        np.array(starts, np.int64),
        tuple(refs),
        tuple(replicas),
        tuple(files),
        plan.lease_s or math.inf,
        num_bytes,
        asked_at,
    )


def _path(uri: str) -> str:
    """The path of a ``file:///`` location; there may be one a shard, so no parser is called."""
    path = uri.removeprefix("file://")
    return unquote(path) if "%" in path else path
