"""`CacheClient`: load, list and drop datasets. The only importer of grpc in the client.

Each call opens a channel to the coordinator and closes it again, so that a later fork finds nothing
open.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    stop_never,
    wait_exponential,
)

from cache_client import writes
from cache_client.arguments import (
    column_problems,
    flag_problems,
    function_problems,
    integer_or_problem,
    seconds_problems,
)
from cache_client.arrow_sources import arrow_source
from cache_client.connections import Connection
from cache_client.forecast import LoadForecast
from cache_client.forecast import from_proto as forecast_from_proto
from cache_client.grpc_guard.call_threads import CallThreads
from cache_client.grpc_guard.forks import fork_gate
from cache_client.permutation import checked_integer
from cache_client.ranks import find_credentials, find_endpoint
from cache_client.reader import Reader
from cache_client.routing import ShardMap
from cache_client.rows import join
from cache_client.table_reads import read_table
from cache_client.write_through import Newest, write_through
from cache_protocol.cli.load_bar import progress_bar
from cache_protocol.errors import (
    ConfigError,
    DatasetNotFoundError,
    LoadError,
    LostPartitionsError,
    NodeUnavailableError,
    NotReadyError,
    RequestError,
    StaleVersionError,
    checked,
)
from cache_protocol.spec.dataset_spec import DEFAULT_TARGET_SHARD_BYTES, DatasetSpec
from cache_protocol.spec.values import is_text
from cache_protocol.storage.layout import schema_from_bytes
from cache_protocol.storage.row_index import Ids
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_protocol.wire.backoff import backoff
from cache_protocol.wire.credentials import Credentials
from cache_protocol.wire.dataset_states import state_name
from cache_protocol.wire.grpc_channel import from_rpc_error, open_channel
from cache_protocol.wire.load_progress import LoadMeter, LoadReport
from cache_protocol.wire.load_watch import wait_for_load

_MIN_LOOKUP_S = 1.0  # to find the coordinator, even if the limit of the call is shorter
_MAX_TIMEOUT_S = 1e9  # of a call: gRPC takes a longer one as no limit
_MAX_NODES = 100_000  # of a plan, whose answer has an entry for each node
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0  # until an append before is ready
MAX_MEMORY_BYTES = 2**64 - 1  # uint64 on the wire


@dataclass(frozen=True)
class DatasetInfo:
    """One version of a dataset, as the coordinator reports it.

    Attributes:
        num_rows: 0 until every shard is loaded.
        num_bytes: of the shards loaded so far, one replica.
        schema: logical columns in their storage types.
        state: ``loading``, ``ready`` or ``failed``.
        placement: shard -> ids of the nodes that hold it, in order of preference.
        error: why the load failed; None unless it did.
        waits: why a part of the load has to wait; None if none has to.
        replicas: the requested number; ``placement`` has fewer if there are fewer nodes.
        nulls: column of floats -> nulls that became NaN, of the shards loaded so far.
        notes: what the load changed, such as leading zeros; one for each column.
        shards_reused: shards that the version before had too.
        files_read: by the loads; a file counts once for each shard that is made of it.
    """

    name: str
    fingerprint: str
    num_rows: int
    num_bytes: int
    num_shards: int
    schema: pa.Schema
    state: str
    placement: Mapping[int, tuple[str, ...]]
    error: str | None = None
    waits: str | None = None
    replicas: int = 1
    nulls: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    shards_reused: int = field(default=0, compare=False)  # not known after a restart
    files_read: int = field(default=0, compare=False)

    def __repr__(self) -> str:
        """The facts in a few lines; `schema` and `placement` are there in full."""
        columns = self.schema.names[:8] + ["..."] * (len(self.schema.names) > 8)
        nodes = sorted({node for nodes in self.placement.values() for node in nodes})
        lines = [
            f"DatasetInfo({self.name!r}, {self.state}, fingerprint={self.fingerprint})",
            f"  {self.num_rows:,} rows, {self.num_bytes:,} bytes, {self.num_shards} shards, "
            f"{self.replicas} replicas on {len(nodes)} nodes",
            f"  {len(self.schema.names)} columns: {', '.join(columns)}",
        ]
        lines += [
            f"  {name}: {value}" for name in ("error", "waits") if (value := getattr(self, name))
        ]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class NodeInfo:
    """One cache node.

    Attributes:
        memory_limit_bytes: None if there is no limit.
        version: of its package; empty if it is of an earlier release.
        untrusted: why the coordinator ignores the node; empty: it does not.
    """

    id: str
    flight_location: str
    control_location: str
    cache_dir: str
    memory_limit_bytes: int | None
    stored_bytes: int
    stored_shards: int
    alive: bool
    version: str = ""
    untrusted: str = ""


@dataclass(frozen=True)
class CacheStatus:
    """The nodes of a cache.

    Attributes:
        nodes: by id.
        now_s: clock of the coordinator, in seconds since 1970; 0 if it is of an earlier release.
    """

    nodes: tuple[NodeInfo, ...]
    now_s: float


class CacheClient:
    """Loads, lists and drops datasets. Thread-safe; holds no connection between calls.

    Args:
        endpoint: ``grpc://HOST:PORT``, the Flight endpoint of any node; default:
            ``CACHE_ENDPOINT``, else the cache of this TrainJob.
        timeout_s: of each call except `load` and `plan`.
        token, token_file: show the cache who you are; default: ``CACHE_TOKEN`` or
            ``CACHE_TOKEN_FILE``.
        tls_ca: file of the certificates that sign those of the nodes; default: ``CACHE_TLS_CA``.

    Raises:
        ConfigError: quotes every bad argument; calls raise it, too. Calls raise
            NodeUnavailableError if the node or its coordinator does not answer in time.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout_s: float = 30.0,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
    ) -> None:
        problems = seconds_problems("timeout_s", timeout_s)
        where = checked(problems, lambda: find_endpoint(endpoint))
        credentials = checked(
            problems, lambda: find_credentials(where or "", token, token_file, tls_ca)
        )
        if problems or where is None or credentials is None:
            raise ConfigError("; ".join(problems))
        self.endpoint = where
        self._credentials = credentials
        self._timeout_s = float(timeout_s)

    def __repr__(self) -> str:
        return f"CacheClient({self.endpoint!r})"

    def load(
        self,
        spec: DatasetSpec | str | os.PathLike[str],
        *,
        wait: bool = True,
        progress: bool = False,
        on_progress: Callable[[LoadReport], None] | None = None,
        timeout_s: float | None = None,
        refresh: bool = False,
    ) -> DatasetInfo:
        """Loads a dataset; attaches at once if the same version is already loaded.

        If the source has changed, this makes a new version. Readers of the old version go on; it is
        dropped some time after its last row was read.

        Args:
            spec: a spec, or the path of a YAML file with one.
            wait: until the dataset is ready.
            progress: show a progress bar on standard error, or one line a second if that is no
                terminal.
            on_progress: called in this thread with the progress, a few times a second; every few
                seconds if very many callers wait.
            timeout_s: how long to wait; None for no limit. The load continues afterwards.
            refresh: load a new version even if the source cannot tell whether it changed, such as
                a database.

        Raises:
            LoadError: the source cannot be read or does not fit; names file, split and reason.
            RequestError: the query is wrong, or its rows have no fixed order.
            NotReadyError: not loaded within ``timeout_s``.
            NodeUnavailableError: the coordinator does not answer.
        """
        problems = [] if timeout_s is None else seconds_problems("timeout_s", timeout_s)
        for name, value in {"wait": wait, "progress": progress, "refresh": refresh}.items():
            problems += flag_problems(name, value)
        problems += function_problems("on_progress", on_progress)
        return self._load(
            _checked_spec(spec, problems), wait, progress, on_progress, timeout_s, refresh=refresh
        )

    def _load(
        self,
        spec: DatasetSpec,
        wait: bool,
        progress: bool,
        on_progress: Callable[[LoadReport], None] | None,
        timeout_s: float | None,
        **options: bool,  # of the request
    ) -> DatasetInfo:
        timeout_s = None if timeout_s is None else float(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        request = pb.CreateDatasetRequest(
            spec=spec.to_proto(), secrets=spec.secrets_to_proto(), **options
        )
        with self._coordinator(deadline) as calls:
            info = _create(calls, request, timeout_s, deadline)
            if wait:
                with _listeners(spec.name, on_progress, progress) as report:
                    info = _wait_until_loaded(calls, spec.name, info, report, deadline)
        if info.state == pb.DATASET_STATE_FAILED:
            raise LoadError(info.error.message)
        return _dataset_info(info)

    def write(
        self,
        name: str,
        data: object,
        *,
        append: bool = False,
        through: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, object] | None = None,
        replicas: int = 1,
        target_shard_bytes: int | str = DEFAULT_TARGET_SHARD_BYTES,
        nulls: str = "nan",
        readers: Sequence[str] = (),
        progress: bool = False,
        on_progress: Callable[[LoadReport], None] | None = None,
        timeout_s: float | None = None,
    ) -> DatasetInfo:
        """Writes rows of this process as a dataset; all of them, or none.

        A dataset of this name gets a new version; the same rows are the same version again. The
        rows have no other source: without replicas, they are lost with their node. With
        ``through`` they become a Parquet file first, from which the cache loads them, and loads
        them again if a node is lost.

        Args:
            name: of the dataset.
            data: a pyarrow Table, RecordBatch or RecordBatchReader, a pandas or Polars frame (also
                lazy), a DuckDB relation, a dict of NumPy arrays or torch tensors, a Hugging Face
                dataset, or any object with ``__arrow_c_stream__``. A stream is never held whole.
            append: after the rows of the dataset, if it exists; see `begin_write`.
            through: a folder that the nodes have too, or ``s3://BUCKET/PREFIX``. Each write makes
                the folder ``NAME/TIME-RANDOM`` there, and each append adds a file to it. You remove
                old folders.
            storage_options: of ``through``, as for `DatasetSpec`.
            replicas: nodes that hold each row.
            target_shard_bytes: of a shard, stored.
            nulls: of columns of floats: ``nan`` or ``refuse``.
            readers: other namespaces that may read it; ``*``: every namespace.
            progress: show a progress bar on standard error, as for `load`.
            on_progress: called in this thread with the progress.
            timeout_s: how long to wait for the replicas after the rows; None for no limit.

        Raises:
            ConfigError: an argument is wrong; quotes each.
            RequestError: a column cannot be stored; names each.
            LoadError: a value cannot be stored, the rows do not fit, or the file cannot be written.
            NodeUnavailableError: no node took the rows.
        """
        problems = function_problems("on_progress", on_progress)
        problems += flag_problems("progress", progress) + flag_problems("append", append)
        problems += [] if timeout_s is None else seconds_problems("timeout_s", timeout_s)
        if not isinstance(through, str | os.PathLike | None):
            problems.append(f"through must be a folder or s3://BUCKET/PREFIX, got {through!r}")
        if through is None and storage_options is not None:
            problems.append("storage_options are those of through: give both")
        source = checked(problems, lambda: arrow_source(data))
        if problems or source is None:
            raise ConfigError("; ".join(problems))
        if through is not None:
            spec = DatasetSpec(
                name,
                through,
                format="parquet",
                storage_options=storage_options,
                replicas=replicas,
                target_shard_bytes=target_shard_bytes,
                nulls=nulls,
                readers=readers,
            )

            def load(spec: DatasetSpec) -> DatasetInfo:
                return self._load(spec, True, progress, on_progress, timeout_s, append=append)

            return write_through(spec, source, self._newest(name) if append else None, load)
        write = self.begin_write(
            name,
            source.schema,
            append=append,
            replicas=replicas,
            target_shard_bytes=target_shard_bytes,
            nulls=nulls,
            readers=readers,
            ttl_s=writes.OWN_TTL_S,
        )
        meter = LoadMeter(name)
        with _listeners(name, on_progress, progress) as report:
            info: DatasetInfo = writes.write_rows(
                write,
                source,
                lambda latest: report(meter.read(latest)),
                lambda acks: write.commit(acks, timeout_s=timeout_s, on_progress=report),
            )
        return info

    def begin_write(
        self,
        name: str,
        schema: pa.Schema,
        *,
        append: bool = False,
        replicas: int = 1,
        target_shard_bytes: int | str = DEFAULT_TARGET_SHARD_BYTES,
        nulls: str = "nan",
        readers: Sequence[str] = (),
        ttl_s: float = writes.DEFAULT_TTL_S,
        full_wait_s: float = writes.DEFAULT_FULL_WAIT_S,
    ) -> writes.Write:
        """Begins a write of a dataset by several processes; see `Write`.

        Args:
            name: of the dataset.
            schema: of the rows to put.
            append: the new version has the rows of the newest one at the commit, then these. They
                must have its columns. Its replicas and readers stay, or become more. Without a
                dataset of this name, one is made.
            replicas, target_shard_bytes, nulls, readers: see `write`.
            ttl_s: the write ends if nothing was put and nothing committed for so long.
            full_wait_s: how long a full node may let a put wait, before it refuses it.

        Raises:
            ConfigError: an argument is wrong; quotes each.
            RequestError: a column cannot be stored, or not be appended; names each. Or ``append``
                to a dataset that was loaded.
            LoadError: ``append``, and rows of the dataset are lost.
            NotReadyError: no node has joined the cache yet.
        """
        problems = seconds_problems("ttl_s", ttl_s) + seconds_problems("full_wait_s", full_wait_s)
        problems += flag_problems("append", append)
        if not isinstance(schema, pa.Schema):
            problems.append(f"schema must be a pyarrow.Schema, got {schema!r}")
        spec = checked(
            problems,
            lambda: DatasetSpec(
                name,
                "write://",
                replicas=replicas,
                target_shard_bytes=target_shard_bytes,
                nulls=nulls,
                readers=readers,
            ),
        )
        if problems or spec is None:
            raise ConfigError("; ".join(problems))
        content = spec.to_proto()
        content.ClearField("tables")
        request = pb.BeginWriteRequest(
            spec=content,
            schema=schema.serialize().to_pybytes(),
            ttl_s=ttl_s,
            full_wait_s=full_wait_s,
            append=append,
        )
        deadline = self._deadline()
        with self._coordinator(deadline) as calls:
            begun = calls.call(calls.stub.BeginWrite, request, deadline)
        return writes.Write(
            begun.dataset,
            begun.write_id,
            schema,
            schema_from_bytes(begun.schema),
            spec.target_shard_bytes,
            tuple(node.flight_location for node in begun.nodes),
            self._credentials,
            self,
        )

    def commit_write(
        self,
        write: writes.Write,
        chosen: Sequence[pb.ChosenAttempt],
        *,
        wait: bool,
        timeout_s: float | None,
        on_progress: Callable[[LoadReport], None] | None,
    ) -> DatasetInfo:
        """Commits a write; see `Write.commit`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        request = pb.CommitWriteRequest(write_id=write.write_id, partitions=chosen)
        # A repeated commit answers with the version of the first one, or one that has its rows.
        commit = partial(self._commit, request, write.name, timeout_s)
        info = commit()
        while wait:
            try:
                with (
                    self._coordinator(deadline) as calls,
                    _listeners(write.name, on_progress, show=False) as report,
                ):
                    info = _wait_until_loaded(calls, write.name, info, report, deadline)
                break
            except StaleVersionError as replaced:  # by an append, or by other rows
                try:
                    info = commit()
                except RequestError:
                    raise replaced from None
        if info.state == pb.DATASET_STATE_FAILED:
            raise LoadError(info.error.message)
        return _dataset_info(info)

    def _commit(
        self, request: pb.CommitWriteRequest, name: str, timeout_s: float | None
    ) -> pb.DatasetInfo:
        """Asks for a commit, again while the version to append to is not ready."""

        def ask() -> pb.CommitWriteResponse:
            with self._coordinator(self._deadline()) as calls:
                found: pb.CommitWriteResponse = calls.call(
                    calls.stub.CommitWrite, request, self._deadline()
                )
                return found

        reachable = Retrying(
            retry=retry_if_exception_type(NodeUnavailableError),
            stop=stop_after_delay(self._timeout_s),
            wait=wait_exponential(multiplier=0.25, max=2.0),
            reraise=True,
        )
        ready = Retrying(
            retry=retry_if_exception_type(NotReadyError),
            stop=stop_never if timeout_s is None else stop_after_delay(timeout_s),
            wait=backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S),
            reraise=True,
        )
        answer: pb.CommitWriteResponse = ready(reachable, ask)
        if answer.lost:
            raise LostPartitionsError(
                f"dataset {name!r} was not committed: no live node has partitions "
                f"{', '.join(map(str, answer.lost))}, as they were chosen. Put them again, by "
                "other attempts",
                answer.lost,
            )
        return answer.dataset

    def abort_write(self, write: writes.Write) -> None:
        """Aborts a write; see `Write.abort`."""
        request = pb.AbortWriteRequest(write_id=write.write_id)
        deadline = self._deadline()
        with self._coordinator(deadline) as calls:
            calls.call(calls.stub.AbortWrite, request, deadline)

    def plan(
        self,
        spec: DatasetSpec | str | os.PathLike[str],
        *,
        num_nodes: int | None = None,
        memory_limit_bytes: int | None = None,
        world_size: int = 1,
        batch_size: int = 1024,
        timeout_s: float = 600.0,
    ) -> LoadForecast:
        """Forecasts a load from metadata; loads nothing.

        Args:
            spec: a spec, or the path of a YAML file with one.
            num_nodes: of the cache; None for the nodes that are alive.
            memory_limit_bytes: of each node; None for the smallest limit of the nodes alive.
            world_size: ranks of the job.
            batch_size: rows of a rank in a full step.
            timeout_s: of the whole call, which may read many footers.

        Raises:
            ConfigError: an argument is out of range.
            LoadError, RequestError: as for `load`.
        """
        problems = seconds_problems("timeout_s", timeout_s)
        limits = {
            "num_nodes": (num_nodes, _MAX_NODES),
            "memory_limit_bytes": (memory_limit_bytes, MAX_MEMORY_BYTES),
        }
        for name, (value, maximum) in limits.items():
            if value is not None:
                integer_or_problem(problems, name, value, 1, maximum)
        ranks = integer_or_problem(problems, "world_size", world_size, 1)
        rows = integer_or_problem(problems, "batch_size", batch_size, 1)
        spec = _checked_spec(spec, problems)
        request = pb.PlanDatasetRequest(
            spec=spec.to_proto(),
            secrets=spec.secrets_to_proto(),
            num_nodes=num_nodes or 0,
            memory_limit_bytes=memory_limit_bytes or 0,
        )
        deadline = time.monotonic() + float(timeout_s)
        with self._coordinator(deadline) as calls:
            response = calls.call(calls.stub.PlanDataset, request, deadline)
        assert ranks is not None and rows is not None  # checked above
        return forecast_from_proto(response.forecast, ranks, rows)

    def datasets(self) -> list[DatasetInfo]:
        """One version of every dataset, by name: the newest version that has not failed."""
        deadline = self._deadline()
        with self._coordinator(deadline) as calls:
            response = calls.call(calls.stub.ListDatasets, pb.ListDatasetsRequest(), deadline)
        return [_dataset_info(info) for info in response.datasets]

    def describe(self, name: str) -> DatasetInfo:
        """The newest version of one dataset that has not failed, else the failed one.

        Raises:
            DatasetNotFoundError: lists the existing datasets.
        """
        return _dataset_info(self._described(name))

    def _described(self, name: str) -> pb.DatasetInfo:
        request = pb.GetDatasetRequest(name=_checked_name(name))
        deadline = self._deadline()
        with self._coordinator(deadline) as calls:
            response: pb.GetDatasetResponse = calls.call(calls.stub.GetDataset, request, deadline)
        return response.dataset

    def _newest(self, name: str) -> Newest | None:
        """The newest version that has not failed, else the failed one; None: no such dataset."""
        try:
            info = self._described(name)
        except DatasetNotFoundError:
            return None
        spec = DatasetSpec.from_proto(info.spec)
        return Newest(spec, info.state == pb.DATASET_STATE_FAILED)

    def drop(self, name: str) -> None:
        """Drops a dataset; its nodes remove it at their next heartbeat.

        Raises:
            DatasetNotFoundError: lists the existing datasets.
        """
        request = pb.DeleteDatasetRequest(name=_checked_name(name))
        deadline = self._deadline()
        with self._coordinator(deadline) as calls:
            calls.call(calls.stub.DeleteDataset, request, deadline)

    def nodes(self) -> list[NodeInfo]:
        """Every node that the coordinator knows, by id."""
        return list(self.cache_status().nodes)

    def cache_status(self) -> CacheStatus:
        """The nodes that the coordinator knows, and its clock."""
        deadline = self._deadline()
        with self._coordinator(deadline) as calls:
            response = calls.call(calls.stub.ListNodes, pb.ListNodesRequest(), deadline)
        nodes = tuple(
            NodeInfo(
                node.id,
                node.flight_location,
                node.control_location,
                node.cache_dir,
                node.memory_limit_bytes or None,
                node.stored_bytes,
                node.stored_shards,
                node.alive,
                node.version,
                node.untrusted,
            )
            for node in response.nodes
        )
        return CacheStatus(nodes, response.now_s)

    def jobs(self, name: str = "", *, audits: bool = False) -> list[pb.JobInfo]:
        """The jobs that read from this cache, as their readers report; live ones first.

        Args:
            name: of a job; empty: every job.
            audits: with the audit records of its readers.

        Returns:
            `JobInfo` messages of the wire, one for each job and dataset.

        Raises:
            DatasetNotFoundError: no reader of such a job has reported; lists those that have.
        """
        request = pb.ListJobsRequest(name=name, audits=audits)
        deadline = self._deadline()
        with self._coordinator(deadline) as calls:
            response = calls.call(calls.stub.ListJobs, request, deadline)
        return list(response.jobs)

    def read(
        self,
        name: str,
        *,
        columns: Sequence[str] | None = None,
        rows: range | None = None,
        fingerprint: str = "",
        local: bool = True,
    ) -> pa.RecordBatchReader:
        """Reads a dataset as a stream of Arrow batches, in source order.

        pandas, Polars and DuckDB take the stream as it is. Engines with several workers give each
        one a range of `rows`, and all of them the same `fingerprint`::

            duckdb.sql("SELECT label, count(*) FROM reader GROUP BY label")

        The stream fetches about 64 MiB ahead and keeps connections until its end, or until nothing
        refers to it. Reading it may raise NodeUnavailableError or StaleVersionError, as training
        does; engines may wrap them in their errors.

        Args:
            columns: to read, in this order; default: all.
            rows: consecutive row numbers; default: all.
            fingerprint: of the version to read; default: the newest one.
            local: read shards of nodes on this machine from their files, in this process.

        Raises:
            ConfigError: quotes a bad argument.
            DatasetNotFoundError, LoadError: there is no such dataset, or its load failed.
            StaleVersionError: this version is gone.
            NotReadyError: it was still loading after ``timeout_s``.
        """
        name = _checked_name(name)
        problems = column_problems(columns) + flag_problems("local", local)
        if rows is not None and not isinstance(rows, range):
            problems.append(f"rows must be a range, got {rows!r}")
        if not is_text(fingerprint):
            problems.append(f"fingerprint must be a text, got {fingerprint!r}")
        if problems:
            raise ConfigError("; ".join(problems))
        return read_table(
            self.endpoint,
            name,
            columns=tuple(columns or ()),
            rows=rows,
            fingerprint=fingerprint,
            deadline_s=self._timeout_s,
            local=local,
            credentials=self._credentials,
        )

    def head(self, name: str, num_rows: int = 5) -> pa.RecordBatch:
        """The first rows of a dataset, in source order.

        Raises:
            DatasetNotFoundError, LoadError: there is no such dataset, or its load failed.
            NotReadyError: it is loading; has the progress.
        """
        try:
            num_rows = checked_integer("num_rows", num_rows, 0)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return self.rows(name, lambda rows: np.arange(min(num_rows, rows), dtype=np.int64))

    def rows(self, name: str, row_ids: Callable[[int], Ids]) -> pa.RecordBatch:
        """Rows of a dataset by number, in the order of the numbers.

        Args:
            row_ids: called with the number of rows of the dataset; returns int64 numbers below it.

        Raises:
            As `head`.
        """
        name = _checked_name(name)
        deadline = self._deadline()
        with CallThreads() as threads:
            shards = threads.call(self._read_plan, name)
            remaining_s = _remaining_s(deadline) or _MIN_LOOKUP_S
            with Reader(
                self.endpoint, shards, deadline_s=remaining_s, credentials=self._credentials
            ) as reader:
                pieces = threads.call(reader.fetch, row_ids(shards.num_rows))
        return join(pieces).to_batch()

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _read_plan(self, name: str) -> ShardMap:
        with Connection(self.endpoint, self._credentials) as connection:
            return connection.read_plan(name, "", (), self._timeout_s)

    @contextmanager
    def _coordinator(self, deadline: float | None) -> Iterator[_Calls]:
        remaining_s = _remaining_s(deadline)
        lookup_s = self._timeout_s
        if remaining_s is not None:
            lookup_s = min(lookup_s, max(remaining_s, _MIN_LOOKUP_S))
        with CallThreads() as threads:
            location = threads.call(self._find_coordinator, lookup_s)
            fork_gate.use()
            channel = threads.call(open_channel, location, self._credentials)
            try:
                yield _Calls(threads, cache_pb2_grpc.CoordinatorStub(channel), self._credentials)
            except grpc.RpcError as error:
                raise from_rpc_error(error, location) from None
            finally:
                threads.call(channel.close)  # also ends a call that an interrupt left

    def _find_coordinator(self, timeout_s: float) -> str:
        with Connection(self.endpoint, self._credentials) as connection:
            return connection.coordinator(timeout_s).control_location


@dataclass(frozen=True)
class _Calls:
    """Calls to a coordinator, made in other threads."""

    threads: CallThreads
    stub: cache_pb2_grpc.CoordinatorStub
    credentials: Credentials

    def call(self, method: Callable[..., Any], request: object, deadline: float | None) -> Any:
        """The answer to a request, before the deadline."""
        headers, timeout_s = self.credentials.headers(), _remaining_s(deadline)
        return self.threads.call(partial(method, request, timeout=timeout_s, metadata=headers))

    def stream(self, method: Callable[..., Any], request: object, timeout_s: float | None) -> Any:
        """The answers to a request, one after the other."""
        headers = self.credentials.headers()
        responses = self.threads.call(partial(method, request, timeout=timeout_s, metadata=headers))
        while (response := self.threads.call(next, responses, None)) is not None:
            yield response


def _checked_spec(spec: object, problems: list[str]) -> DatasetSpec:
    """The spec of an argument.

    Raises:
        ConfigError: there are problems, with the spec or before. A mapping is not quoted, because
            it may hold secrets.
    """
    found: DatasetSpec | None = None
    if isinstance(spec, DatasetSpec):
        found = spec
    elif isinstance(spec, str | os.PathLike) and spec != "":
        found = checked(problems, lambda: DatasetSpec.from_yaml(spec))
    elif isinstance(spec, Mapping):
        problems.append(
            "spec must be a DatasetSpec or the path of a YAML file, got a "
            f"{type(spec).__name__}: convert it with DatasetSpec.from_mapping"
        )
    else:
        problems.append(f"spec must be a DatasetSpec or the path of a YAML file, got {spec!r}")
    if problems or found is None:
        raise ConfigError("; ".join(problems))
    return found


def _checked_name(name: object) -> str:
    if not is_text(name) or not name:
        raise ConfigError(f"name must be the name of a dataset, got {name!r}")
    return name


def _create(
    calls: _Calls,
    request: pb.CreateDatasetRequest,
    timeout_s: float | None,
    deadline: float | None,
) -> pb.DatasetInfo:
    try:
        info: pb.DatasetInfo = calls.call(calls.stub.CreateDataset, request, deadline).dataset
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        raise NotReadyError(
            f"dataset {request.spec.name!r} was not planned within {timeout_s:g} s: its files are "
            "still being listed; the load goes on"
        ) from None
    return info


@contextmanager
def _listeners(
    name: str, on_progress: Callable[[LoadReport], None] | None, show: bool
) -> Iterator[Callable[[LoadReport], None]]:
    """Yields a function that tells the progress to a caller, and shows it if ``show``."""
    with ExitStack() as stack:
        listeners = [on_progress] if on_progress is not None else []
        if show:
            listeners.append(stack.enter_context(progress_bar(name)))

        def report(latest: LoadReport) -> None:
            for listener in listeners:
                listener(latest)

        yield report


def _wait_until_loaded(
    calls: _Calls,
    name: str,
    info: pb.DatasetInfo,
    report: Callable[[LoadReport], None],
    deadline: float | None,
) -> pb.DatasetInfo:
    """The dataset once it is ready or failed."""
    watch = pb.WatchDatasetRequest(name=name, fingerprint=info.fingerprint)
    return wait_for_load(
        lambda known: _watch_once(calls, watch, deadline, known), info, report, deadline
    )


def _watch_once(
    calls: _Calls,
    watch: pb.WatchDatasetRequest,
    deadline: float | None,
    info: pb.DatasetInfo,
) -> Iterator[pb.DatasetInfo]:
    """Yields the dataset at every change; ``info`` is its last known state.

    Raises:
        NotReadyError: the deadline is over.
    """
    remaining_s = _remaining_s(deadline)
    if remaining_s == 0:
        raise _timeout_error(watch, info)
    try:
        for response in calls.stream(calls.stub.WatchDataset, watch, remaining_s):
            info = response.dataset
            yield info
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        raise _timeout_error(watch, info) from None


def _timeout_error(watch: pb.WatchDatasetRequest, info: pb.DatasetInfo) -> NotReadyError:
    done = info.progress
    return NotReadyError(
        f"dataset {watch.name!r} was not ready within the time given: {done.shards_done} of "
        f"{done.shards_total} shards, {done.rows_done} rows; the load goes on"
    )


def _remaining_s(deadline: float | None) -> float | None:
    return None if deadline is None else min(max(0.0, deadline - time.monotonic()), _MAX_TIMEOUT_S)


def _dataset_info(info: pb.DatasetInfo) -> DatasetInfo:
    return DatasetInfo(
        info.spec.name,
        info.fingerprint,
        info.num_rows,
        info.num_bytes,
        len(info.shards),
        schema_from_bytes(info.schema),
        state_name(info.state),
        {shard.index: tuple(shard.node_ids) for shard in info.shards},
        info.error.message or None,
        info.progress.waits or None,
        info.spec.replicas,
        dict(info.nulls),
        tuple(info.notes),
        info.progress.shards_reused,
        info.progress.files_read,
    )
