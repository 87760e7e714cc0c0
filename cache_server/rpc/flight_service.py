"""The Flight verbs. Each parses, calls one function, encodes.

Any Flight client can read logical columns through GetFlightInfo and DoGet. Training uses
DoExchange, which answers row ids with packed rows. Every request is checked before its first batch,
because an error inside a running DoGet stream loses its code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
from google.protobuf.message import DecodeError, Message

from cache_protocol.errors import (
    CacheError,
    InvalidRowsError,
    InvalidTicketError,
    NotReadyError,
    PermissionDeniedError,
    RequestError,
    require_ready,
    some_of,
)
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.machine import MACHINE_BYTES
from cache_protocol.storage.nested_values import without_codes
from cache_protocol.storage.row_index import RowRuns
from cache_protocol.storage.shard_files import Selection
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire import tracing
from cache_protocol.wire.credentials import Credentials
from cache_server.auth.authenticator import Authenticator
from cache_server.auth.principals import Role, Viewer
from cache_server.auth.verbs import FIND_ROWS, HELD_SHARDS, SHARD_FILE
from cache_server.node.node import Node
from cache_server.node.peer_files import FIND_ROWS_ACTION, HELD_SHARDS_ACTION
from cache_server.node.puts import PutMessage
from cache_server.node.row_values import Caller
from cache_server.node.traffic import Read, Traffic
from cache_server.rpc.flight_calls import Call, CallerMiddleware, UnformattedError, flight_error
from cache_server.rpc.flight_infos import flight_info, layout_of, sealed_info
from cache_server.rpc.flight_messages import header_size, padding
from cache_server.rpc.stream_limits import SlowReaders, StreamLimits, calls_of_principal
from cache_server.secrets import error_text
from cache_server.shards.resident_rows import ResidentRows
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

ENDPOINTS_ACTION, REPORT_ACTION, ANNOUNCE_ACTION = "endpoints", "report", "announce"
MAX_ROW_IDS = 4 * 1024 * 1024  # of a request
MAX_ANSWER_BYTES = 2**30  # of a message; Flight sends less than 2 GiB
_MESSAGE_BYTES = 2 * 1024 * 1024  # the best message size of Flight over loopback
_M = TypeVar("_M", bound=Message)
_FILE_SCHEMA = pa.schema([pa.field("chunk", pa.large_binary())])
_REQUEST_SCHEMA = pa.schema([pa.field("row", pa.int64())])


class FlightService(flight.FlightServerBase):
    """The Flight server of a node. Serves from construction, in threads of gRPC.

    Args:
        bind: host to listen on.
        port: 0 picks a free one; see ``.port``.
        traffic: counts rows, bytes and errors.
        authenticator: of callers; default: every caller may do everything.
        tls: certificate and key to serve TLS with, read once; None: plain text.
        require_client_cert: refuse callers without a certificate of ``tls.tls_ca``.
        slow_reader_timeout_s: how long a message may wait for its reader.
        memory_bytes: of the node; None: that of the machine.
    """

    def __init__(
        self,
        bind: str,
        port: int,
        traffic: Traffic,
        authenticator: Authenticator | None = None,
        *,
        tls: Credentials | None = None,
        require_client_cert: bool = False,
        slow_reader_timeout_s: float = 60.0,
        memory_bytes: int | None = None,
    ) -> None:
        limits = StreamLimits(
            slow_reader_timeout_s,
            max_calls_of_principal=calls_of_principal(memory_bytes or MACHINE_BYTES),
        )
        self._callers = CallerMiddleware(authenticator or Authenticator(), traffic, limits)
        options: dict[str, Any] = {"middleware": self._callers.by_name}
        if tls is not None:
            files = tls.tls_files()
            options["tls_certificates"] = [(files.cert, files.key)]
            if require_client_cert:
                options |= {"verify_client": True, "root_certificates": files.ca}
        scheme = "grpc" if tls is None else "grpc+tls"
        super().__init__(f"{scheme}://{bind}:{port}", **options)
        self._slow_readers = SlowReaders(limits, self.port)
        self._traffic = traffic
        self._node: Node | None = None

    def attach(self, node: Node) -> None:
        """Sets the node. Calls before that get a `NotReadyError`."""
        self._node = node
        self._slow_readers.start()

    def shutdown(self) -> None:
        """Stops, and waits for running calls."""
        super().shutdown()
        self._slow_readers.close()

    # -- verbs -----------------------------------------------------------------------------------

    def get_flight_info(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor
    ) -> flight.FlightInfo:
        """One endpoint per shard, in row order."""
        with self._call(context) as call:
            viewer = call.principal.viewer
            request, info, part = self._resolve(descriptor, viewer)
            call.note_read(viewer.resolve(info.spec.name), info.fingerprint)
            if request.HasField("known_groups"):
                return sealed_info(descriptor, info, request, viewer)
            return flight_info(descriptor, require_ready(info), request.columns, part, viewer)

    def get_schema(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor
    ) -> flight.SchemaResult:
        """The logical schema; known before the dataset is ready."""
        try:
            with self._call(context) as call:
                request, info, _ = self._resolve(descriptor, call.principal.viewer)
                return flight.SchemaResult(layout_of(info).select(request.columns).announced)
        except flight.FlightError as error:
            reason = f"{type(error).__name__}: {error}"
        raise UnformattedError(reason)

    def list_flights(
        self, context: flight.ServerCallContext, criteria: bytes
    ) -> Iterator[flight.FlightInfo]:
        """Every ready dataset; ``criteria`` is a prefix of their names."""
        with self._call(context) as call:
            viewer = call.principal.viewer
            prefix = criteria.decode("utf-8", "replace")
            infos = [
                flight_info(
                    flight.FlightDescriptor.for_path(info.spec.name), info, [], None, viewer
                )
                for info in self._ready_node().datasets(viewer)
                if info.state == pb.DATASET_STATE_READY and info.spec.name.startswith(prefix)
            ]
        return iter(infos)

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        """Logical columns of a row range that this node holds, or values computed from it."""
        with self._call(context) as call:
            request = _parse(pb.ReadTicket, ticket.ticket, "ticket")
            viewer = call.principal.viewer
            if request.HasField("shard_file"):
                call.principal.require(Role.NODE, SHARD_FILE)
                key = VersionKey(request.dataset, request.fingerprint)
                chunks = self._ready_node().shard_file(key, request.shard_file, _MESSAGE_BYTES)
                copied = self._counted(call, Read(key.dataset, "file"), map(_file_chunk, chunks))
                return flight.GeneratorStream(_FILE_SCHEMA, copied)
            rows = self._ready_node().rows(request.dataset, request.fingerprint, viewer)
            call.note_read(rows.key.dataset, rows.key.fingerprint)
            call.trace(rows.key.dataset)
            if request.HasField("expression"):
                return self._values(context, call, rows, request.expression)
            if request.HasField("stored"):
                return self._stored(call, rows, request)
            start, stop = request.rows.start, request.rows.stop
            selection = Selection(rows.layout, list(request.columns))
            rows.check_range(start, stop)
            # Flight sends dictionaries with the first batch only, so their values are sent.
            values = without_codes(selection.layout.logical)
            layout = Layout(values, selection.layout.nulls.units)
            batches = rows.messages(start, stop, _MESSAGE_BYTES, selection)
            unpacked = (layout.unpack(batch) for batch in batches)
            return flight.GeneratorStream(
                layout.logical, self._counted(call, Read(rows.key.dataset, "get"), unpacked)
            )

    def _stored(
        self, call: Call, rows: ResidentRows, request: pb.ReadTicket
    ) -> flight.FlightDataStream:
        """Rows of a range, or runs of them, in packed columns: views of the mapped files."""
        start, stop, wanted = request.rows.start, request.rows.stop, request.stored
        if bool(wanted.run_rows) != bool(wanted.stride) or wanted.run_rows > wanted.stride:
            raise InvalidRowsError(
                f"runs must be as long as their stride at most, got {wanted.run_rows} rows of "
                f"every {wanted.stride}"
            )
        selection = Selection(rows.layout, list(request.columns), wanted.null_names)
        rows.check_range(start, stop)
        row_bytes = rows.mean_row_bytes(selection)
        max_rows = wanted.rows_per_message or max(1, _MESSAGE_BYTES // max(1, row_bytes))
        num_bytes = _message_bytes(stop - start, max_rows, row_bytes)
        runs = RowRuns(start, wanted.run_rows, wanted.stride)
        batches = rows.runs(runs, stop, max_rows, selection)
        node, principal = self._ready_node(), call.principal

        def messages() -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
            header = 0
            read = Read(rows.key.dataset, "get")
            paced = call.paced(batches, num_bytes)
            while True:
                try:
                    viewer = call.still_allowed().viewer
                    node.rows(request.dataset, request.fingerprint, viewer)  # they are in use
                    batch = next(paced, None)
                except CacheError as error:  # its code would be lost: the next call gets it
                    logger.info("stream ended caller=%s reason=%s", principal.name, error)
                    return
                if batch is None:
                    return
                header = header or header_size(batch)
                size = batch.nbytes
                yield batch, pa.py_buffer(padding(header, size))
                self._traffic.count(read, rows=batch.num_rows, num_bytes=size, to_zone=call.zone)

        return flight.GeneratorStream(selection.layout.schema, messages())

    def _values(
        self,
        context: flight.ServerCallContext,
        call: Call,
        rows: ResidentRows,
        wanted: pb.RowExpression,
    ) -> flight.FlightDataStream:
        """Values or statistics computed from rows of a shard."""
        principal, values = call.principal, self._ready_node().row_values
        caller = Caller(principal.viewer.namespace, principal.name, context.is_cancelled)
        start, stop = wanted.rows.start, wanted.rows.stop
        if wanted.stats:
            if wanted.expression or wanted.where:
                raise RequestError("statistics take no expression and no condition")
            schema, pieces = values.column_stats(rows, start, stop, tuple(wanted.stats), caller)
        else:
            where = tuple(wanted.where)
            schema, pieces = values.answer(rows, start, stop, wanted.expression, where, caller)
        batches = (
            pa.RecordBatch.from_arrays([piece.slice(at, step)], schema=schema)
            for piece in pieces
            for step in [max(1, len(piece) * _MESSAGE_BYTES // max(1, piece.nbytes))]
            for at in range(0, len(piece), step)
        )
        counted = self._counted(call, Read(rows.key.dataset, "get"), batches)
        return flight.GeneratorStream(schema, counted)

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        """Seals the rows of one attempt at a partition of a write that was begun."""
        with self._call(context) as call:
            if descriptor.descriptor_type != flight.DescriptorType.CMD:
                raise InvalidTicketError(
                    "DoPut takes a PutRequest as its command: begin a write before (BeginWrite)"
                )
            request = _parse(pb.PutRequest, descriptor.command, "put request")
            principal = call.principal
            request.dataset = principal.viewer.resolve(request.dataset)
            result = self._ready_node().put(
                request, reader.schema, _received(call, reader, self._traffic), principal
            )
            writer.write(result.SerializeToString())

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Answers each batch of row ids with those rows, in that order, in packed columns."""
        with self._call(context) as call:
            if descriptor.descriptor_type != flight.DescriptorType.CMD:
                raise InvalidTicketError("DoExchange takes a GatherRequest as its command")
            request = _parse(pb.GatherRequest, descriptor.command, "gather request")
            node = self._ready_node()
            selection: Selection | None = None
            header = row_bytes = 0
            for chunk in _messages(reader):
                row_ids = _row_ids(chunk.data)
                # Looked up for each request: the shards of a node change during a stream.
                viewer = call.still_allowed().viewer
                rows = node.rows(
                    request.dataset, request.fingerprint, viewer, by_shard=request.by_shard
                )
                if selection is None:
                    call.note_read(rows.key.dataset, rows.key.fingerprint)
                    selection = Selection(rows.layout, list(request.columns), request.null_names)
                    row_bytes = rows.mean_row_bytes(selection)
                    writer.begin(selection.layout.schema)
                num_bytes = _message_bytes(len(row_ids), request.rows_per_message, row_bytes)
                order = node.scratch.find(rows, request.order) if request.order else None
                batches = rows.gather(row_ids, selection, request.rows_per_message, order)
                read = Read(rows.key.dataset, "exchange")
                with tracing.ending(_span_of(chunk, read.dataset, len(row_ids))):
                    for batch in call.paced(batches, num_bytes, row_ids.nbytes):
                        if batch.num_rows and not header:
                            header = header_size(batch)
                        num_bytes = batch.nbytes
                        writer.write_with_metadata(batch, padding(header, num_bytes))
                        self._traffic.count(
                            read, rows=batch.num_rows, num_bytes=num_bytes, to_zone=call.zone
                        )

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        """The actions."""
        with self._call(context):
            return [
                (ENDPOINTS_ACTION, "where the coordinator is: a cache.v1.CoordinatorEndpoints"),
                (
                    REPORT_ACTION,
                    "takes what a reader has done: a cache.v1.ReaderReport; "
                    "a cache.v1.Disagreement follows where its ranks disagree",
                ),
                (
                    ANNOUNCE_ACTION,
                    "takes a part of the order in which rows will be read: a "
                    "cache.v1.Announcement, answers a cache.v1.AnnouncementAnswer",
                ),
                (
                    HELD_SHARDS_ACTION,
                    "for the coordinator: takes a cache.v1.HeldShardsRequest, answers a "
                    "cache.v1.HeldShardsResponse",
                ),
                (
                    FIND_ROWS_ACTION,
                    "for the coordinator: takes a cache.v1.FindRowsRequest, answers a "
                    "cache.v1.FindRowsResponse",
                ),
            ]

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> Iterator[flight.Result]:
        """The actions of `list_actions`."""
        with self._call(context) as call:
            if action.type == REPORT_ACTION:
                report = _parse(pb.ReaderReport, action.body, "report")
                told = self._ready_node().take_report(report, call.principal)
                return iter([] if told is None else [flight.Result(told.SerializeToString())])
            if action.type == ANNOUNCE_ACTION:
                part = _parse(pb.Announcement, action.body, "announcement")
                node, viewer = self._ready_node(), call.principal.viewer
                rows = node.rows(part.dataset, part.fingerprint, viewer)
                said = node.scratch.announce(rows, part)
                return iter([flight.Result(said.SerializeToString())])
            if action.type == HELD_SHARDS_ACTION:
                call.principal.require(Role.NODE, HELD_SHARDS)
                asked = _parse(pb.HeldShardsRequest, action.body, "request for held shards")
                keys = [VersionKey(asked.dataset, name) for name in asked.fingerprints]
                held = pb.HeldShardsResponse(datasets=self._ready_node().held(keys))
                return iter([flight.Result(held.SerializeToString())])
            if action.type == FIND_ROWS_ACTION:
                call.principal.require(Role.NODE, FIND_ROWS)
                wanted = _parse(pb.FindRowsRequest, action.body, "request for rows")
                found = self._ready_node().find_rows(wanted)
                return iter([flight.Result(found.SerializeToString())])
            if action.type != ENDPOINTS_ACTION:
                raise RequestError(
                    f"no action {action.type!r}; actions: {ENDPOINTS_ACTION}, {REPORT_ACTION}, "
                    f"{ANNOUNCE_ACTION}, {HELD_SHARDS_ACTION}"
                )
            endpoints = self._ready_node().coordinator
            if not endpoints.control_location:
                raise NotReadyError("this node has not reached its coordinator yet")
            return iter([flight.Result(endpoints.SerializeToString())])

    def _counted(
        self, call: Call, read: Read, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        paced = call.paced(batches, _MESSAGE_BYTES)
        while True:
            with self._named_errors():
                call.still_allowed()
                batch = next(paced, None)
            if batch is None:
                return
            yield batch
            rows = batch.num_rows if read.verb != "file" else 0
            self._traffic.count(read, rows=rows, num_bytes=batch.nbytes, to_zone=call.zone)

    @contextmanager
    def _call(self, context: flight.ServerCallContext) -> Iterator[Call]:
        """Surrounds a handler: its caller, and its errors."""
        with self._named_errors():
            call = self._callers.begin(context)
            try:
                yield call
            except PermissionDeniedError as error:
                assert call.caller is not None
                call.caller.note(error)
                raise

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Turns errors into Flight errors with a code and without a traceback."""
        try:
            yield
        except CacheError as error:
            self._traffic.count_error(type(error).__name__)
            raise flight_error(error) from None
        except (flight.FlightError, *error_text.EXITS):
            raise
        except pa.ArrowException as error:  # pyarrow would send its traceback, and leak it
            self._traffic.count_error(type(error).__name__)
            raise flight_error(RequestError(f"{type(error).__name__}: {error}")) from None
        except BaseException as error:
            self._traffic.count_error("defect")
            secrets = pb.Secrets()  # no Flight verb gets secrets
            logger.error("defect in a Flight verb\n%s", error_text.trace(error, secrets))
            reason = error_text.reason(error, secrets)
            raise flight_error(CacheError(f"defect in the cache node: {reason}")) from None

    # -- parsing -----------------------------------------------------------------------------------

    def _ready_node(self) -> Node:
        if self._node is None:
            raise NotReadyError("this node is starting")
        return self._node

    def _resolve(
        self, descriptor: flight.FlightDescriptor, viewer: Viewer
    ) -> tuple[pb.ReadRequest, pb.DatasetInfo, tuple[int, int] | None]:
        """The request, dataset and part (index, total) of a descriptor."""
        node = self._ready_node()
        if descriptor.descriptor_type == flight.DescriptorType.CMD:
            request = _parse(pb.ReadRequest, descriptor.command, "read request")
            follow = request.follow if request.HasField("follow") else None
            info = node.describe(request.dataset, request.fingerprint, viewer, follow)
            return request, info, None
        whole = pb.ReadRequest()
        if descriptor.descriptor_type != flight.DescriptorType.PATH:
            raise InvalidTicketError("the descriptor has neither a command nor a path")
        path = [part.decode("utf-8", "replace") for part in descriptor.path]
        if len(path) == 1:
            return whole, node.describe(path[0], viewer=viewer), None
        if len(path) == 2:
            part = _part(path[0], path[1])
            only = self._only_dataset(viewer)
            return whole, node.describe(only.spec.name, only.fingerprint, viewer), part
        if len(path) == 3:
            return whole, node.describe(path[0], viewer=viewer), _part(path[1], path[2])
        raise InvalidTicketError(
            f"the path must be [dataset], [index, total] or [dataset, index, total], got {path!r}"
        )

    def _only_dataset(self, viewer: Viewer) -> pb.DatasetInfo:
        datasets = self._ready_node().datasets(viewer)
        if len(datasets) == 1:
            return datasets[0]
        names = some_of(info.spec.name for info in datasets)
        raise RequestError(
            f"a path of [index, total] needs exactly one dataset, got datasets: {names}; "
            "use [dataset, index, total]"
        )


def _parse(message: type[_M], data: bytes, what: str) -> _M:
    try:
        parsed = message.FromString(bytes(data))
    except DecodeError:
        raise InvalidTicketError(f"not a {what} of this cache: {bytes(data)[:64]!r}") from None
    if not parsed.dataset:  # type: ignore[attr-defined]  # every request has one
        raise InvalidTicketError(f"the {what} names no dataset: {bytes(data)[:64]!r}")
    return parsed


def _received(
    call: Call, reader: flight.MetadataRecordBatchReader, traffic: Traffic
) -> Iterator[PutMessage]:
    """The messages of a writer, counted.

    Raises:
        RequestError: the buffers of one do not fit each other, which would end this process.
    """
    for chunk in reader:
        call.still_allowed()
        if chunk.data is not None:
            _check_buffers(chunk.data, RequestError, "the rows are no valid Arrow batch")
            traffic.count_received(chunk.data.nbytes, call.zone)
        yield PutMessage(chunk.data, bytes(chunk.app_metadata or b""))


def _part(index_text: str, total_text: str) -> tuple[int, int]:
    try:
        index, total = int(index_text), int(total_text)
    except ValueError:
        raise InvalidTicketError(
            f"index and total must be numbers, got {index_text[:64]!r} and {total_text[:64]!r}"
        ) from None
    if total < 1 or not 0 <= index < total:
        raise InvalidTicketError(f"index must be in [0, total), got {index} of {total}")
    return index, total


def _messages(reader: flight.MetadataRecordBatchReader) -> Iterator[Any]:
    """The messages of a caller.

    Raises:
        InvalidRowsError: one is no message of Arrow.
    """
    try:
        yield from reader
    except flight.FlightError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise InvalidRowsError(f"the request is no Arrow stream: {error}") from None


def _check_buffers(batch: pa.RecordBatch, kind: type[RequestError], what: str) -> None:
    """Checks sizes, offsets and texts of a received batch: Arrow trusts them.

    Raises:
        RequestError: one is wrong; of this kind.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise kind(f"{what}: {error}") from None


def _row_ids(batch: pa.RecordBatch | None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if batch is None:
        raise _bad_row_ids("no data")
    if not batch.schema.equals(_REQUEST_SCHEMA):
        raise _bad_row_ids(str(batch.schema).replace("\n", ", "))
    _check_buffers(batch, InvalidRowsError, "the row ids are no valid Arrow batch")
    if batch.num_rows > MAX_ROW_IDS:
        raise InvalidRowsError(f"a request has at most {MAX_ROW_IDS} row ids, got {batch.num_rows}")
    if nulls := batch.column(0).null_count:
        raise _bad_row_ids(f"{nulls} {'null' if nulls == 1 else 'nulls'}")
    ids: np.ndarray[tuple[int], np.dtype[np.int64]] = batch.column(0).to_numpy()
    return ids


def _span_of(chunk: Any, dataset: str, num_rows: int) -> Any:
    """The span of a request for rows, below that of its window; None: it is not traced."""
    if chunk.app_metadata is None:
        return None
    traceparent = bytes(chunk.app_metadata).decode("ascii", "replace")
    return tracing.begin_below(traceparent, "cache.node", dataset=dataset, rows=num_rows)


def _message_bytes(num_ids: int, rows_per_message: int, row_bytes: int) -> int:
    """About the bytes of the longest message of an answer.

    Raises:
        InvalidRowsError: they are too many; names the limit.
    """
    rows = min(num_ids, rows_per_message or num_ids)
    if rows > 1 and rows * row_bytes > MAX_ANSWER_BYTES:
        raise InvalidRowsError(
            f"a message of an answer has at most {MAX_ANSWER_BYTES} bytes, got {rows} rows of "
            f"about {row_bytes} bytes: ask for fewer rows, or set rows_per_message"
        )
    return rows * row_bytes


def _bad_row_ids(found: str) -> InvalidRowsError:
    return InvalidRowsError(f"row ids must be one int64 column 'row' without nulls, got {found}")


def _file_chunk(chunk: pa.Buffer) -> pa.RecordBatch:
    """A batch with one chunk of a file."""
    offsets = pa.py_buffer(np.array([0, len(chunk)], np.int64))
    values = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, chunk])
    return pa.RecordBatch.from_arrays([values], schema=_FILE_SCHEMA)
