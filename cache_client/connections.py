"""Flight connections: the only importer of pyarrow.flight in the client.

Every call and stream has a deadline. A gather stream has a time limit and is used only in the first
half of it. So a node that hangs is noticed after one to two request timeouts, without a watchdog.

Before a fork of this process every stream and connection is closed: see
`cache_client.grpc_guard.forks`. Its user gets `ConnectionClosedError` and opens another.
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
from cache_client.load_log import LoadLog, LoggedGroup
from cache_client.routing import NodeRef, ShardFile, ShardMap
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    NodeUnavailableError,
    RequestError,
    from_proto,
)
from cache_protocol.storage.layout import LOGICAL_SCHEMA_KEY, pool_array
from cache_protocol.storage.row_index import Ids, RowRuns
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials
from cache_protocol.wire.grpc_channel import DIRECT

REQUEST_TIMEOUT_S = 10.0
# Nothing can cancel a wait for a connection, neither the end of the program nor a fork. gRPC's
# default is 20 s. TCP repeats a lost SYN after 1 s and after 3 s.
_CONNECT_TIMEOUT_S = 5.0
_PING_AFTER_MS, _PING_TIMEOUT_MS = 700, 1000  # together below 2 s
_MAX_MESSAGE_BYTES = -1  # no limit, as is Flight's default
_GRPC_OPTIONS = [
    DIRECT,
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # gRPC takes this as the time limit for connecting.
    ("grpc.min_reconnect_backoff_ms", int(1000 * _CONNECT_TIMEOUT_S)),
    # A stopped process acknowledges no ping; a busy one does, in a thread of gRPC. A server accepts
    # two pings without data. gRPC sends one of them to measure the network, so one is left.
    ("grpc.keepalive_time_ms", _PING_AFTER_MS),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 1),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
]
_NOBODY = "grpc://127.0.0.1:1"
_ENDPOINTS_ACTION, _REPORT_ACTION, _OPEN_FILES_ACTION = "endpoints", "report", "open_files"
_ROW_SCHEMA = pa.schema([pa.field("row", pa.int64())])
_NUMBERS_SCHEMA = pa.schema([pa.field("row", pa.uint32())])
_LARGEST_FREED_BYTES = 31 * 1024 * 1024


class ConnectionClosedError(NodeUnavailableError):
    """This process closed the connection, for example before a fork; the node did not fail."""


class StreamEndedError(ConnectionClosedError):
    """The node ended a stream of rows early. The next request gets the reason."""


class _SharedHandle:
    """A Flight object that any thread may use or close; Flight itself does not allow that.

    Closing blocks new uses and cancels running ones where that is possible. The last use releases
    the object.

    Args:
        value: the object. Do not assign it to a variable, not even to a local one: the traceback of
            an error that is kept would keep the object, and gRPC, alive.
        release: ends ``value`` when nothing uses it any more.
        cancel: ends the running uses of ``value`` from another thread.
    """

    def __init__(
        self, value: Any, *, release: Callable[[Any], None], cancel: Callable[[Any], None] | None
    ) -> None:
        self.value: Any = value
        self._cancel = cancel
        self._release = release
        self._lock = threading.Lock()
        self._uses = 0
        self.is_closed = False

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Surrounds every use of ``value``; the error names it when it is closed already."""
        with self._lock:
            if self.is_closed:
                raise ConnectionClosedError(f"{name} was closed")
            self._uses += 1
        try:
            yield
        finally:
            with self._lock:
                self._uses -= 1
                last = self.is_closed and not self._uses
            if last:
                self._release_value()

    def close(self) -> None:
        """Releases the value now, or when its last use ends."""
        with fork_gate.closing():
            with self._lock:
                if self.is_closed:
                    return
                self.is_closed = True
                unused = not self._uses
                if self._cancel is not None:
                    self._cancel(self.value)
            if unused:
                self._release_value()

    def _release_value(self) -> None:
        value, self.value = self.value, None
        with suppress(pa.ArrowException, OSError):  # Flight reports the cancellation
            self._release(value)


class Connection:
    """A Flight client of one node. Thread-safe.

    Args:
        location: of the node.
        credentials: shown with every call.
    """

    def __init__(self, location: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self.location = location
        self._credentials = credentials
        self._name = f"the connection to {location}"
        _keep_freed_memory()
        fork_gate.require_answers(_ask_nobody)
        files = credentials.tls_files()
        with _flight_call(location):
            try:
                self._client = _SharedHandle(
                    flight.connect(
                        location,
                        tls_root_certs=files.ca,
                        cert_chain=files.cert,
                        private_key=files.key,
                        generic_options=_GRPC_OPTIONS,
                    ),
                    cancel=None,  # calls have deadlines, and streams cancel themselves
                    release=lambda client: client.close(),
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
        """Whether it was closed, by its user or before a fork."""
        return self._client.is_closed

    def close(self) -> None:
        """Closes the client when its running calls have ended; waits for none of them."""
        self._client.close()

    def read_plan(
        self,
        dataset: str,
        fingerprint: str,
        columns: Sequence[str],
        timeout_s: float,
        *,
        follow: pb.EpochOfJob | None = None,
        known_groups: int | None = None,
    ) -> ShardMap:
        """Reads the shard map of a version; an empty ``fingerprint`` means the newest version.

        Args:
            follow: the version that a job reads in an epoch, instead of a fingerprint.
            known_groups: read the map of the shards that are sealed so far, if their log has more
                groups than these, or is closed; None: of the ready version.

        Raises:
            DatasetNotFoundError, StaleVersionError, NotReadyError, LoadError, RequestError,
            NodeUnavailableError.
        """
        request = pb.ReadRequest(
            dataset=dataset,
            fingerprint=fingerprint,
            columns=columns,
            follow=follow,
            known_groups=known_groups,
        )
        descriptor = flight.FlightDescriptor.for_command(request.SerializeToString())
        asked_at = time.monotonic()
        with self._in_use():
            info = self._client.value.get_flight_info(descriptor, self._options(timeout_s))
        shards = _shard_map(info, asked_at)
        if known_groups is not None and shards.log is None:
            raise RequestError(
                f"the node at {self.location} does not tell which shards are sealed: it is of an "
                "older release; update the cache"
            )
        return shards

    def renew_lease(self, dataset: str, fingerprint: str, timeout_s: float) -> None:
        """Tells the cache that this version is in use; `read_plan` and reads of rows do, too.

        Raises:
            StaleVersionError, DatasetNotFoundError: the version is gone.
            NodeUnavailableError: the node did not answer.
        """
        self.read_schema(dataset, fingerprint, timeout_s)

    def read_schema(self, dataset: str, fingerprint: str, timeout_s: float) -> pa.Schema:
        """The logical schema of a version, with all of its columns; also renews its lease.

        Raises:
            StaleVersionError, DatasetNotFoundError, NodeUnavailableError: as for `renew_lease`.
        """
        request = pb.ReadRequest(dataset=dataset, fingerprint=fingerprint)
        descriptor = flight.FlightDescriptor.for_command(request.SerializeToString())
        with self._in_use():
            try:
                return self._client.value.get_schema(descriptor, self._options(timeout_s)).schema
            except flight.FlightError:
                raise
            except (pa.ArrowException, OSError):
                # For GetSchema, pyarrow sends an error without its code and with a traceback
                # (apache/arrow#43556). GetFlightInfo fails for the same reason, with the code.
                self._client.value.get_flight_info(descriptor, self._options(timeout_s))
                raise

    def row_values(
        self,
        dataset: str,
        fingerprint: str,
        rows: range,
        expression: str,
        where: Sequence[str],
        timeout_s: float,
    ) -> pa.ChunkedArray:
        """Values that the node computes from rows of one shard that it holds.

        Args:
            expression: SQL of one value a row; empty for the numbers of the rows that fulfil
                ``where``, uint32, counted from the first of ``rows``.
            where: SQL of conditions that a row must fulfil.

        Raises:
            RequestError: the node cannot compute it, or is of a release that does not.
            NotReadyError, StaleVersionError, DatasetNotFoundError: the node does not hold the rows.
            NodeUnavailableError: the node did not answer.
        """
        ticket = pb.ReadTicket(
            dataset=dataset,
            fingerprint=fingerprint,
            expression=pb.RowExpression(
                rows=pb.RowRange(start=rows.start, stop=rows.stop),
                expression=expression,
                where=where,
            ),
        )
        with self._in_use():
            reader = self._client.value.do_get(
                flight.Ticket(ticket.SerializeToString()), self._options(timeout_s)
            )
            table = reader.read_all()
        is_answer = (
            table.column_names == ["value"] if expression else table.schema == _NUMBERS_SCHEMA
        )
        if not is_answer:
            raise RequestError(
                f"the node at {self.location} cannot compute values of rows: it is of an older "
                "release; update the cache"
            )
        return table.column(0)

    def coordinator(self, timeout_s: float) -> pb.CoordinatorEndpoints:
        """Where the coordinator of this node is."""
        with self._in_use():
            results = list(
                self._client.value.do_action(_ENDPOINTS_ACTION, self._options(timeout_s))
            )
        return pb.CoordinatorEndpoints.FromString(results[0].body.to_pybytes())

    def report(self, report: pb.ReaderReport, timeout_s: float) -> None:
        """Sends a report of a reader.

        Raises:
            RequestError: the node refused it, or does not know reports.
            NodeUnavailableError: the node did not answer.
        """
        action = flight.Action(_REPORT_ACTION, report.SerializeToString())
        with self._in_use():
            list(self._client.value.do_action(action, self._options(timeout_s)))

    def open_files(
        self, request: pb.OpenFilesRequest, timeout_s: float
    ) -> list[pb.OpenFilesAnswer]:
        """Keys for the shard files of a node on this machine; see `cache_client.host_socket`.

        Raises:
            RequestError: the node hands no files over, or not to this machine.
            NotReadyError, StaleVersionError, DatasetNotFoundError, NodeUnavailableError: as for
                reads.
        """
        action = flight.Action(_OPEN_FILES_ACTION, request.SerializeToString())
        with self._in_use():
            results = list(self._client.value.do_action(action, self._options(timeout_s)))
        return [pb.OpenFilesAnswer.FromString(result.body.to_pybytes()) for result in results]

    def open_gather(
        self,
        dataset: str,
        fingerprint: str,
        columns: Sequence[str],
        timeout_s: float,
        *,
        rows_per_message: int = 0,
        by_shard: bool = False,
    ) -> GatherStream:
        """Opens a stream that answers row ids with rows.

        Args:
            timeout_s: of each request.
            rows_per_message: the most rows in one message of an answer; 0: one message.
            by_shard: row ids are numbers by shard.
        """
        request = pb.GatherRequest(
            dataset=dataset,
            fingerprint=fingerprint,
            columns=columns,
            rows_per_message=rows_per_message,
            by_shard=by_shard,
        )
        descriptor = flight.FlightDescriptor.for_command(request.SerializeToString())
        opened_at = time.monotonic()
        with self._in_use():
            stream = GatherStream(
                self.location,
                self._client.value.do_exchange(descriptor, self._options(2 * timeout_s)),
                usable_until=opened_at + timeout_s,
                ends_at=opened_at + 2 * timeout_s,
            )
        try:
            stream.begin()
        except BaseException:  # unclosed, Arrow would print an error when it is collected
            stream.close()
            raise
        return stream

    def open_rows(
        self,
        dataset: str,
        fingerprint: str,
        columns: Sequence[str],
        timeout_s: float,
        runs: RowRuns,
        stop: int,
        *,
        rows_per_message: int = 0,
    ) -> RowStream:
        """Opens a stream of the rows of ``runs`` before row ``stop``, which one node holds.

        Args:
            timeout_s: of each `RowStream.receive`.
            rows_per_message: the most rows in one message; 0: those of about 2 MiB.

        Raises:
            RequestError: the node is of a release that has no such streams.
            NotReadyError, StaleVersionError, DatasetNotFoundError: the node does not hold the rows.
            NodeUnavailableError: the node did not answer.
        """
        ticket = pb.ReadTicket(
            dataset=dataset,
            fingerprint=fingerprint,
            columns=columns,
            rows=pb.RowRange(start=runs.start, stop=stop),
            stored=pb.StoredRows(
                rows_per_message=rows_per_message, run_rows=runs.length, stride=runs.stride
            ),
        )
        usable_until = time.monotonic() + timeout_s
        with self._in_use():
            stream = RowStream(
                self.location,
                self._client.value.do_get(
                    flight.Ticket(ticket.SerializeToString()), self._options(2 * timeout_s)
                ),
                usable_until,
            )
        if not stream.is_stored:
            stream.close()
            raise RequestError(
                f"the node at {self.location} cannot stream stored rows: it is of an older release"
            )
        return stream

    def open_put(self, request: pb.PutRequest, schema: pa.Schema, timeout_s: float) -> PutStream:
        """Opens a stream that takes rows of one attempt at a partition of a write.

        Args:
            schema: of the batches.
            timeout_s: of the whole stream.
        """
        descriptor = flight.FlightDescriptor.for_command(request.SerializeToString())
        with self._in_use():
            return PutStream(
                self.location,
                self._client.value.do_put(descriptor, schema, self._options(timeout_s)),
            )

    def _options(self, timeout_s: float) -> flight.FlightCallOptions:
        headers = self._credentials.headers()
        return flight.FlightCallOptions(
            timeout=timeout_s, headers=[(name.encode(), value.encode()) for name, value in headers]
        )

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with _flight_call(self.location), self._client.use(self._name):
            yield


class GatherStream:
    """One DoExchange call: requests, and their answers in the same order.

    Thread-safety: one thread sends and one receives; `close` may be called from any.
    """

    def __init__(
        self, location: str, ends: tuple[Any, Any], usable_until: float, ends_at: float
    ) -> None:
        self._location = location
        self._name = f"the stream from {location}"
        self._ends = _SharedHandle(
            ends, cancel=lambda ends: ends[1].cancel(), release=lambda ends: ends[0].close()
        )
        self._usable_until, self._ends_at = usable_until, ends_at
        fork_gate.add(self)

    @property
    def is_fresh(self) -> bool:
        """Whether a new request may be sent on this stream."""
        return not self._ends.is_closed and time.monotonic() < self._usable_until

    def begin(self) -> None:
        """Sends the schema of requests to the node."""
        with self._in_use():
            self._ends.value[0].begin(_ROW_SCHEMA)

    def send(self, row_ids: Ids) -> None:
        """Asks for rows. Where that fails, `receive` says why: a node may have told the reason."""
        batch = pa.RecordBatch.from_arrays([pool_array(row_ids)], schema=_ROW_SCHEMA)
        with suppress(CacheError), self._in_use():
            self._ends.value[0].write_batch(batch)

    def receive(self, num_rows: int) -> list[pa.RecordBatch]:
        """The answer to the oldest request, which asked for ``num_rows`` rows: stored batches.

        Raises:
            ConnectionClosedError: the stream was closed, or ended before this call.
            CacheError: the reason of the node, or what broke the stream.
        """
        if time.monotonic() >= self._ends_at:
            raise ConnectionClosedError(f"{self._name} ended before its answer was taken")
        batches: list[pa.RecordBatch] = []
        missing = num_rows
        while missing > 0:
            with self._in_use():
                batches.append(self._ends.value[1].read_chunk().data)
            missing -= batches[-1].num_rows
        if missing:
            raise CacheError(f"{self._name} brought {-missing} rows more than {num_rows}")
        return batches

    def close(self) -> None:
        """Cancels the stream without waiting; a running `send` or `receive` fails."""
        self._ends.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Surrounds every call into Flight; tells a closed stream from a broken one."""
        try:
            with _flight_call(self._location), self._ends.use(self._name):
                yield
        except NodeUnavailableError:
            if self._ends.is_closed:
                raise ConnectionClosedError(f"{self._name} was closed") from None
            raise


class RowStream:
    """One DoGet call: rows in their order, in packed columns. Used by one thread.

    Thread-safety: only `close` may be called from other threads.
    """

    def __init__(self, location: str, reader: Any, usable_until: float) -> None:
        self._location = location
        self._name = f"the stream of rows from {location}"
        self.is_stored = LOGICAL_SCHEMA_KEY in (reader.schema.metadata or {})
        self._reader = _SharedHandle(
            reader, cancel=lambda reader: reader.cancel(), release=lambda reader: None
        )
        self._usable_until = usable_until
        self._left: pa.RecordBatch | None = None  # received, not yet asked for
        fork_gate.add(self)

    @property
    def is_fresh(self) -> bool:
        """Whether more rows may be received from this stream."""
        return not self._reader.is_closed and time.monotonic() < self._usable_until

    def receive(self, num_rows: int) -> list[pa.RecordBatch]:
        """The next rows: stored batches.

        Raises:
            StreamEndedError: the stream has fewer rows.
        """
        batches: list[pa.RecordBatch] = []
        missing = num_rows
        while missing > 0:
            batch = self._left if self._left is not None else self._next()
            self._left = batch.slice(missing) if batch.num_rows > missing else None
            batches.append(batch if self._left is None else batch.slice(0, missing))
            missing -= batches[-1].num_rows
        return batches

    def close(self) -> None:
        """Cancels the stream without waiting; a running `receive` fails."""
        self._reader.close()

    def _next(self) -> pa.RecordBatch:
        try:
            with (
                _flight_call(self._location),
                self._reader.use(self._name),
                suppress(StopIteration),
            ):
                return self._reader.value.read_chunk().data
        except NodeUnavailableError:
            if self._reader.is_closed:
                raise ConnectionClosedError(f"{self._name} was closed") from None
            raise
        raise StreamEndedError(f"{self._name} ended early")


class PutStream:
    """One DoPut call: batches of rows, then their end. Used by one thread."""

    def __init__(self, location: str, ends: tuple[Any, Any]) -> None:
        self._location = location
        self._name = f"the put to {location}"
        # Closing an unfinished stream ends it without a `PutEnd`, so the node drops its rows.
        self._ends = _SharedHandle(ends, cancel=None, release=lambda ends: ends[0].close())
        fork_gate.add(self)

    def send(self, batch: pa.RecordBatch, shard_rows: int = 0) -> None:
        """Sends rows.

        Args:
            shard_rows: of the shard that begins with this batch; 0: the batch begins none.

        Raises:
            CacheError: the reason of the node, if it refused the put.
            NodeUnavailableError: the stream broke.
        """
        try:
            with self._in_use():
                if shard_rows:
                    metadata = pb.PutShard(num_rows=shard_rows).SerializeToString()
                    self._ends.value[0].write_with_metadata(batch, pa.py_buffer(metadata))
                else:
                    self._ends.value[0].write_batch(batch)
        except CacheError:
            with self._in_use():  # raises the reason of the node, if there is one
                self._ends.value[0].close()
            raise

    def finish(self, num_rows: int) -> pb.PutResult:
        """Ends the rows, and returns what the node stored of them.

        Args:
            num_rows: that were sent.

        Raises:
            CacheError, NodeUnavailableError: as `send`.
        """
        end = pb.PutEnd(num_rows=num_rows).SerializeToString()
        answer = None
        try:
            with self._in_use():
                self._ends.value[0].write_metadata(pa.py_buffer(end))
                self._ends.value[0].done_writing()
                answer = self._ends.value[1].read()
        finally:
            with self._in_use():  # raises the reason of the node, if there is one
                self._ends.value[0].close()
        if answer is None:
            raise NodeUnavailableError(f"{self._name} was not acknowledged")
        return pb.PutResult.FromString(answer.to_pybytes())

    def close(self) -> None:
        """Ends the call; what was sent is dropped, unless `finish` returned."""
        self._ends.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with _flight_call(self._location), self._ends.use(self._name):
            yield


def _keep_freed_memory() -> None:
    """Makes glibc keep the freed memory of messages for the next ones.

    Its limits are dynamic (mallopt(3), M_MMAP_THRESHOLD). At first glibc returns a few freed MiB to
    the kernel, so each message would need fresh pages; they cost as much as all other work on the
    message. Once a program has freed a large block, each arena of glibc keeps up to twice the size
    of that block, at most 64 MiB. Has no effect on other allocators, or where
    ``MALLOC_TRIM_THRESHOLD_`` is set.
    """
    np.empty(_LARGEST_FREED_BYTES, np.uint8)  # untouched, so it takes addresses but no memory


def _ask_nobody() -> None:
    """Calls an address where nothing listens: fails at once where gRPC works."""
    with suppress(pa.ArrowException), flight.connect(_NOBODY, generic_options=_GRPC_OPTIONS) as own:
        list(own.list_actions(flight.FlightCallOptions(timeout=1.0)))


@contextmanager
def _flight_call(location: str) -> Iterator[None]:
    """Surrounds every call into Flight: keeps forks out, and translates errors."""
    with fork_gate.call():
        try:
            yield
        except flight.FlightError as error:
            raise _cache_error(error, location) from None
        except pa.ArrowNotImplementedError:
            raise ConfigError(
                f"the server at {location} does not serve Arrow Flight: give the Flight port of a "
                "node, by default 50051"
            ) from None
        except (pa.ArrowException, StopIteration, OSError) as error:
            # A broken stream, or a closed client.
            raise NodeUnavailableError(f"node at {location} did not answer: {error!r}") from None


def _cache_error(error: flight.FlightError, location: str) -> CacheError:
    if error.extra_info:
        return from_proto(pb.Error.FromString(bytes(error.extra_info)))
    first_line = str(error).splitlines()[0] if str(error) else repr(error)
    return NodeUnavailableError(f"node at {location} did not answer: {first_line}")


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
                ShardFile(
                    node_id, placement.index, _path(uri), placement.num_bytes, placement.checksum
                )
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
        _load_log(plan.log) if plan.HasField("log") else None,
    )


def _load_log(log: pb.LoadLog) -> LoadLog:
    groups = tuple(LoggedGroup(tuple(each.shards), tuple(each.num_rows)) for each in log.groups)
    return LoadLog(log.id, groups, log.closed, log.num_rows if log.HasField("num_rows") else None)


def _path(uri: str) -> str:
    """The path of a ``file:///`` location; without a URI parser, as there is one per shard."""
    path = uri.removeprefix("file://")
    return unquote(path) if "%" in path else path
