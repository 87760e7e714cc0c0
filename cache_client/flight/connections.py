"""Flight connections: the only importer of pyarrow.flight in the client.

Every call and stream has a deadline. A gather stream has a time limit and is used only in the first
half of it. So a node that hangs is noticed after one to two request timeouts, without a watchdog.

Before a fork of this process every stream and connection is closed: see
`cache_client.flight.forks`. Its user gets `ConnectionClosedError` and opens another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from cache_client.flight.forks import fork_gate
from cache_client.flight.routing import NodeRef, ShardFile, ShardMap
from cache_client.flight.shared_handle import SharedHandle, flight_call
from cache_client.flight.streams import GatherStream, PutStream, RowStream
from cache_client.order.load_log import GroupLog, LoggedGroup
from cache_protocol.errors import (
    ConfigError,
    RequestError,
)
from cache_protocol.storage.column_stats import STATS_SCHEMA
from cache_protocol.storage.layout import described_in
from cache_protocol.storage.row_index import RowRuns
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.channels import DIRECT
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials
from cache_protocol.wire.protocol_version import check_server

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
_ENDPOINTS_ACTION, _REPORT_ACTION, _ANNOUNCE_ACTION = "endpoints", "report", "announce"
_NUMBERS_SCHEMA = pa.schema([pa.field("row", pa.uint32())])
_LARGEST_FREED_BYTES = 31 * 1024 * 1024


class NodeConnection:
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
        with flight_call(location):
            try:
                self._client = SharedHandle(
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

    def __enter__(self) -> NodeConnection:
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

    def read_shard_map(
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
        return _shard_map(info, asked_at, f"the cache at {self.location}")

    def renew_lease(self, dataset: str, fingerprint: str, timeout_s: float) -> None:
        """Tells the cache that this version is in use; `read_shard_map` and reads of rows do, too.

        Raises:
            StaleVersionError, DatasetNotFoundError: the version is gone.
            NodeUnavailableError: the node did not answer.
        """
        self.read_schema(dataset, fingerprint, timeout_s)

    def read_schema(self, dataset: str, fingerprint: str, timeout_s: float) -> pa.Schema:
        """The described schema of a version, with all of its columns; also renews its lease.

        Raises:
            StaleVersionError, DatasetNotFoundError, NodeUnavailableError: as for `renew_lease`.
        """
        request = pb.ReadRequest(dataset=dataset, fingerprint=fingerprint)
        descriptor = flight.FlightDescriptor.for_command(request.SerializeToString())
        with self._in_use():
            try:
                found = self._client.value.get_schema(descriptor, self._options(timeout_s))
                return described_in(found.schema)
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
        *,
        stats: Sequence[str] = (),
    ) -> pa.ChunkedArray:
        """Values that the node computes from rows of one shard that it holds.

        Args:
            expression: SQL of one value a row; empty for the numbers of the rows that fulfil
                ``where``, uint32, counted from the first of ``rows``.
            where: SQL of conditions that a row must fulfil.
            stats: in place of both: columns, for the statistics of each; see `ColumnStats`.

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
                stats=stats,
            ),
        )
        with self._in_use():
            reader = self._client.value.do_get(
                flight.Ticket(ticket.SerializeToString()), self._options(timeout_s)
            )
            table = reader.read_all()
        if expression:
            is_answer = table.column_names == ["value"]
        else:
            is_answer = table.schema == (STATS_SCHEMA if stats else _NUMBERS_SCHEMA)
        if not is_answer:
            raise RequestError(
                f"the node at {self.location} cannot compute values of rows: it is of an older "
                "release; update the cache"
            )
        return table.column(0)

    def coordinator(self, timeout_s: float) -> pb.CoordinatorEndpoints:
        """Where the coordinator of this node is.

        Raises:
            RequestError: it speaks a protocol that is too old or too new.
            NodeUnavailableError: the node did not answer.
        """
        with self._in_use():
            results = list(
                self._client.value.do_action(_ENDPOINTS_ACTION, self._options(timeout_s))
            )
        found = pb.CoordinatorEndpoints.FromString(results[0].body.to_pybytes())
        check_server(found.protocol, f"the cache at {self.location}", "client")
        return found

    def report(self, report: pb.ReaderReport, timeout_s: float) -> pb.Disagreement | None:
        """Sends a report of a reader.

        Returns:
            What the reader must know: the ranks of its job disagree. None: as far as is known, they
            agree.

        Raises:
            RequestError: the node refused it, or does not know reports.
            NodeUnavailableError: the node did not answer.
        """
        action = flight.Action(_REPORT_ACTION, report.SerializeToString())
        with self._in_use():
            results = list(self._client.value.do_action(action, self._options(timeout_s)))
        return pb.Disagreement.FromString(results[0].body.to_pybytes()) if results else None

    def announce(self, part: pb.Announcement, timeout_s: float) -> pb.AnnouncementAnswer:
        """Sends a part of the order in which rows will be read; returns what to send next.

        Raises:
            RequestError: the node refused it, or is of a release that prepares no orders.
            NotReadyError, StaleVersionError, DatasetNotFoundError: the node does not hold the rows.
            NodeUnavailableError: the node did not answer.
        """
        action = flight.Action(_ANNOUNCE_ACTION, part.SerializeToString())
        with self._in_use():
            results = list(self._client.value.do_action(action, self._options(timeout_s)))
        return pb.AnnouncementAnswer.FromString(results[0].body.to_pybytes())

    def open_gather(
        self,
        dataset: str,
        fingerprint: str,
        columns: Sequence[str],
        timeout_s: float,
        *,
        rows_per_message: int = 0,
        by_shard: bool = False,
        null_names: Collection[str] = (),
        order: str = "",
    ) -> GatherStream:
        """Opens a stream that answers row ids with rows.

        Args:
            timeout_s: of each request.
            rows_per_message: the most rows in one message of an answer; 0: one message.
            by_shard: row ids are numbers by shard.
            null_names: the units of null bits to send: see `cache_protocol.storage.flat_columns`.
            order: that was announced, in which rows will be asked for.
        """
        request = pb.GatherRequest(
            dataset=dataset,
            fingerprint=fingerprint,
            columns=columns,
            rows_per_message=rows_per_message,
            by_shard=by_shard,
            null_names=null_names,
            order=order,
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
        null_names: Collection[str] = (),
    ) -> RowStream:
        """Opens a stream of the rows of ``runs`` before row ``stop``, which one node holds.

        Args:
            timeout_s: of each `RowStream.receive`.
            rows_per_message: the most rows in one message; 0: those of about 2 MiB.
            null_names: as for `open_gather`.

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
                rows_per_message=rows_per_message,
                run_rows=runs.length,
                stride=runs.stride,
                null_names=null_names,
            ),
        )
        usable_until = time.monotonic() + timeout_s
        with self._in_use():
            return RowStream(
                self.location,
                self._client.value.do_get(
                    flight.Ticket(ticket.SerializeToString()), self._options(2 * timeout_s)
                ),
                usable_until,
            )

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
        with flight_call(self.location), self._client.use(self._name):
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


def _shard_map(info: flight.FlightInfo, asked_at: float, of: str = "the cache") -> ShardMap:
    plan = pb.ReadPlan.FromString(bytes(info.app_metadata))
    check_server(plan.protocol, of, "client")
    nodes: dict[str, int] = {}
    refs: list[NodeRef] = []
    starts: list[int] = []
    replicas: list[tuple[int, ...]] = []
    files: list[tuple[ShardFile, ...]] = []
    checksums: list[str] = []
    num_bytes = 0
    for endpoint in info.endpoints:
        placement = pb.ShardPlacement.FromString(bytes(endpoint.app_metadata))
        uris = [location.uri.decode() for location in endpoint.locations]
        held = len(placement.node_ids)
        for node_id, uri in zip(placement.node_ids, uris[:held], strict=True):
            if node_id not in nodes:
                nodes[node_id] = len(refs)
                refs.append(NodeRef(node_id, uri, plan.zones.get(node_id, "")))
        starts.append(placement.rows.start)
        num_bytes += placement.num_bytes
        checksums.append(placement.checksum)
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
        described_in(info.schema),
        info.total_records,
        np.array(starts, np.int64),
        tuple(refs),
        tuple(replicas),
        tuple(files),
        plan.lease_s or math.inf,
        num_bytes,
        asked_at,
        _load_log(plan.log) if plan.HasField("log") else None,
        tuple(checksums),
        plan.full_name,
        plan.erasures,
        preparing=tuple(plan.preparing_nodes),
    )


def _load_log(log: pb.LoadLog) -> GroupLog:
    groups = tuple(LoggedGroup(tuple(each.shards), tuple(each.num_rows)) for each in log.groups)
    return GroupLog(log.id, groups, log.closed, log.num_rows if log.HasField("num_rows") else None)


def _path(uri: str) -> str:
    """The path of a ``file:///`` location; without a URI parser, as there is one per shard."""
    path = uri.removeprefix("file://")
    return unquote(path) if "%" in path else path
