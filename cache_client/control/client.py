"""`CacheClient`: load, list and drop datasets."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

import numpy as np
import pyarrow as pa

from cache_client.control.commits import Commits
from cache_client.control.coordinator import Calls, Coordinator
from cache_client.control.drains import wait_until_drained
from cache_client.control.forecast import LoadForecast
from cache_client.control.forecast import from_proto as forecast_from_proto
from cache_client.control.forgets import Forgets, known_erased
from cache_client.control.infos import (
    CacheStatus,
    DatasetInfo,
    JobInfo,
    NodeInfo,
    OrphanInfo,
    ShareInfo,
    dataset_info,
    job_info,
    node_info,
)
from cache_client.control.loads import checked_spec, create, listeners_of, wait_until_loaded
from cache_client.control.row_reads import checked_name, read_rows
from cache_client.job.argument_names import names_explained
from cache_client.job.arguments import (
    column_problems,
    flag_problems,
    function_problems,
    integer_or_problem,
    seconds_problems,
)
from cache_client.job.connection import Access, Connection, access_to
from cache_client.order.permutation import checked_integer
from cache_client.reading.table_reads import read_table
from cache_client.writing import writes
from cache_client.writing.arrow_sources import arrow_source
from cache_client.writing.write_through import Newest, write_through
from cache_protocol.datasets.dataset_spec import DEFAULT_TARGET_SHARD_BYTES, DatasetSpec
from cache_protocol.datasets.values import is_text
from cache_protocol.errors import (
    ConfigError,
    DatasetNotFoundError,
    LoadError,
    checked,
)
from cache_protocol.storage.layout import Layout, schema_from_bytes
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import LoadMeter, LoadReport
from cache_protocol.wire.records import record

MAX_NODES = 100_000  # of a plan, whose answer has an entry for each node
MAX_MEMORY_BYTES = 2**64 - 1  # uint64 on the wire
MOST_PRIORITY = 1000
_MOVED = {each.name: f"now cache=Connection({each.name}=...)" for each in fields(Connection)}


class CacheClient(Forgets):
    """Loads, lists and drops datasets. Thread-safe; holds no connection between calls.

    Args:
        cache: how to reach the cache: a `Connection`, or its endpoint ``grpc://HOST:PORT``;
            default: ``CACHE_ENDPOINT``, else the cache of this TrainJob. Its ``deadline_s`` is that
            of each call except `load` and `plan`.

    Raises:
        ConfigError: quotes every bad argument; calls raise it, too. Calls raise
            NodeUnavailableError if the node or its coordinator does not answer in time.
    """

    @names_explained(lambda: {**_MOVED, "timeout_s": "now cache=Connection(deadline_s=...)"})
    def __init__(self, cache: Connection | str | None = None) -> None:
        self._reach(access_to(cache))

    @classmethod
    def _of(cls, access: Access) -> CacheClient:
        """A client of a cache that this process reaches already."""
        client = cls.__new__(cls)
        client._reach(access)
        return client

    def _reach(self, access: Access) -> None:
        self._access, self._coordinator = access, Coordinator(access)

    @property
    def endpoint(self) -> str:
        """Of the node that is asked first."""
        return self._access.endpoint

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
            checked_spec(spec, problems), wait, progress, on_progress, timeout_s, refresh=refresh
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

        def load(calls: Calls) -> pb.DatasetInfo:
            info = create(calls, request, timeout_s, deadline)
            if wait:
                with listeners_of(spec.name, on_progress, progress) as report:
                    info = wait_until_loaded(calls, spec.name, info, report, deadline)
            return info

        info = self._coordinator.run(load, deadline)
        if info.state == pb.DATASET_STATE_FAILED:
            raise LoadError(info.error.message)
        return dataset_info(info)

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
        nulls: str = "keep",
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
                dataset, any object with ``__arrow_c_stream__``, or a generator of these. A stream
                is never held whole.
            append: after the rows of the dataset, if it exists; see `begin_write`.
            through: a folder that the nodes have too, or ``s3://BUCKET/PREFIX``. Each write makes
                the folder ``NAME/TIME-RANDOM`` there, and each append adds a file to it. You remove
                old folders.
            storage_options: of ``through``, as for `DatasetSpec`.
            replicas: nodes that hold each row.
            target_shard_bytes: of a shard, stored.
            nulls: ``keep``, or ``refuse`` to fail where a value is null.
            readers: other namespaces that may read it; ``*``: every namespace.
            progress: show a progress bar on standard error, as for `load`.
            on_progress: called in this thread with the progress.
            timeout_s: how long to wait for the replicas after the rows; None for no limit.

        Raises:
            ConfigError: an argument is wrong; quotes each.
            SchemaError: a column cannot be stored, has no Arrow type, or does not fit that of the
                dataset without a loss; names it, and the value with its row.
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
        with listeners_of(name, on_progress, progress) as report:
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
        nulls: str = "keep",
        readers: Sequence[str] = (),
        ttl_s: float = writes.DEFAULT_TTL_S,
        full_wait_s: float = writes.DEFAULT_FULL_WAIT_S,
    ) -> writes.Write:
        """Begins a write of a dataset by several processes; see `Write`.

        Args:
            name: of the dataset.
            schema: of the rows to put.
            append: the new version has the rows of the newest one at the commit, then these. They
                must have its columns, in any order, and take its types without a loss. Its replicas
                and readers stay, or become more. Without a dataset of this name, one is made.
            replicas, target_shard_bytes, nulls, readers: see `write`.
            ttl_s: the write ends if nothing was put and nothing committed for so long.
            full_wait_s: how long a full node may let a put wait, before it refuses it.

        Raises:
            ConfigError: an argument is wrong; quotes each.
            SchemaError: a column cannot be stored, or not be appended; names each.
            RequestError: ``append`` to a dataset that was loaded.
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
        begun = self._coordinator.ask("BeginWrite", request)
        stored = schema_from_bytes(begun.schema)
        return writes.Write(
            begun.dataset,
            begun.write_id,
            Layout(stored).logical if append else schema,
            stored,
            spec.target_shard_bytes,
            tuple(node.flight_location for node in begun.nodes),
            self._access.credentials,
            Commits(self._coordinator),
        )

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
            "num_nodes": (num_nodes, MAX_NODES),
            "memory_limit_bytes": (memory_limit_bytes, MAX_MEMORY_BYTES),
        }
        for name, (value, maximum) in limits.items():
            if value is not None:
                integer_or_problem(problems, name, value, 1, maximum)
        ranks = integer_or_problem(problems, "world_size", world_size, 1)
        rows = integer_or_problem(problems, "batch_size", batch_size, 1)
        spec = checked_spec(spec, problems)
        request = pb.PlanDatasetRequest(
            spec=spec.to_proto(),
            secrets=spec.secrets_to_proto(),
            num_nodes=num_nodes or 0,
            memory_limit_bytes=memory_limit_bytes or 0,
        )
        deadline = time.monotonic() + float(timeout_s)
        response = self._coordinator.ask("PlanDataset", request, deadline)
        assert ranks is not None and rows is not None  # checked above
        return forecast_from_proto(response.forecast, ranks, rows)

    def datasets(self) -> list[DatasetInfo]:
        """One version of every dataset, by name: the newest version that has not failed."""
        response = self._coordinator.ask("ListDatasets", pb.ListDatasetsRequest())
        return [dataset_info(info) for info in response.datasets]

    def describe(self, name: str) -> DatasetInfo:
        """The newest version of one dataset that has not failed, else the failed one.

        Raises:
            DatasetNotFoundError: lists the existing datasets.
        """
        return dataset_info(self._described(name))

    def _described(self, name: str) -> pb.DatasetInfo:
        request = pb.GetDatasetRequest(name=checked_name(name))
        response: pb.GetDatasetResponse = self._coordinator.ask("GetDataset", request)
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
        request = pb.DeleteDatasetRequest(name=checked_name(name))
        self._coordinator.ask("DeleteDataset", request)

    def keep(
        self, name: str, *, pinned: bool | None = None, priority: int | None = None
    ) -> DatasetInfo:
        """Sets how long a dataset is kept when others need room; also for its later versions.

        Args:
            pinned: never evict it.
            priority: those of lower priority are evicted first; 0 by default, from -1000 to 1000.

        Raises:
            ConfigError: quotes a bad argument. RequestError: the priority is out of range.
            DatasetNotFoundError: lists the existing datasets.
        """
        name = checked_name(name)
        problems = [] if pinned is None else flag_problems("pinned", pinned)
        if priority is not None:
            integer_or_problem(problems, "priority", priority, -MOST_PRIORITY, MOST_PRIORITY)
        if problems:
            raise ConfigError("; ".join(problems))
        request = pb.KeepDatasetRequest(name=name, pinned=pinned, priority=priority)
        return dataset_info(self._coordinator.ask("KeepDataset", request).dataset)

    def shares(self) -> list[ShareInfo]:
        """What each namespace holds and may hold, by name; other namespaces for admins only."""
        response = self._coordinator.ask("ListDatasets", pb.ListDatasetsRequest(shares=True))
        return [record(ShareInfo, share) for share in response.shares]

    def orphans(self) -> list[OrphanInfo]:
        """Files on nodes that belong to no dataset and no write, by dataset.

        They stay when a coordinator lost its disk. They become a version again when its spec is
        loaded again.
        """
        response = self._coordinator.ask("ListDatasets", pb.ListDatasetsRequest(orphans=True))
        return [record(OrphanInfo, orphan) for orphan in response.orphans]

    def drop_orphans(self, name: str = "") -> list[OrphanInfo]:
        """Drops `orphans`, also from nodes that are away now; returns those of live nodes.

        Args:
            name: of a dataset; empty: all of this namespace.
        """
        request = pb.DeleteDatasetRequest(name=checked_name(name) if name else "", orphans=True)
        response = self._coordinator.ask("DeleteDataset", request)
        return [record(OrphanInfo, orphan) for orphan in response.orphans]

    def nodes(self) -> list[NodeInfo]:
        """Every node that the coordinator knows, by id."""
        return list(self.cache_status().nodes)

    def cache_status(self) -> CacheStatus:
        """The nodes that the coordinator knows, and its clock."""
        response = self._coordinator.ask("ListNodes", pb.ListNodesRequest())
        return CacheStatus(tuple(map(node_info, response.nodes)), response.now_s)

    def drain(
        self,
        node: str,
        *,
        deadline_s: float | None = None,
        on_progress: Callable[[NodeInfo], None] | None = None,
    ) -> NodeInfo:
        """Moves the shards of a node to other nodes, and waits until these serve them.

        The node takes no new shards, and serves its own meanwhile. The drain lasts until `undrain`,
        or until the node starts again.

        Args:
            node: its id, endpoint or host, or the first label of its host, such as a pod's name.
            deadline_s: to wait; None: without a limit.
            on_progress: called with the node about twice a second.

        Raises:
            RequestError: no such node, or its shards do not fit on the others. Nothing is moved.
            NotReadyError: it is not done by the deadline. The drain continues.
            NodeUnavailableError: the node was lost, or the coordinator does not answer.
        """
        problems = [] if deadline_s is None else seconds_problems("deadline_s", deadline_s)
        if problems := problems + function_problems("on_progress", on_progress):
            raise ConfigError("; ".join(problems))
        request = pb.DrainNodeRequest(node=node)
        info = node_info(self._coordinator.ask("DrainNode", request).node)
        return wait_until_drained(info, self.nodes, deadline_s, on_progress)

    def undrain(self, node: str) -> NodeInfo:
        """Ends a drain: the node takes shards again. The arguments are those of `drain`."""
        return node_info(
            self._coordinator.ask("UndrainNode", pb.UndrainNodeRequest(node=node)).node
        )

    def jobs(self, name: str = "", *, audits: bool = False) -> list[JobInfo]:
        """The jobs that read from this cache, as their readers report; live ones first.

        Args:
            name: of a job; empty: every job.
            audits: with the audit records of its readers.

        Returns:
            One for each job and dataset.

        Raises:
            DatasetNotFoundError: no reader of such a job has reported; lists those that have.
        """
        request = pb.ListJobsRequest(name=name, audits=audits)
        response = self._coordinator.ask("ListJobs", request)
        return [job_info(job) for job in response.jobs]

    def read(
        self,
        name: str,
        *,
        columns: Sequence[str] | None = None,
        rows: range | None = None,
        fingerprint: str = "",
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

        Raises:
            ConfigError: quotes a bad argument.
            DatasetNotFoundError, LoadError: there is no such dataset, or its load failed.
            StaleVersionError: this version is gone.
            NotReadyError: it was still loading at the deadline.
        """
        name = checked_name(name)
        problems = column_problems(columns)
        if rows is not None and not isinstance(rows, range):
            problems.append(f"rows must be a range, got {rows!r}")
        if not is_text(fingerprint):
            problems.append(f"fingerprint must be a text, got {fingerprint!r}")
        if problems:
            raise ConfigError("; ".join(problems))
        return read_table(
            self._access.endpoint,
            name,
            columns=tuple(columns or ()),
            rows=rows,
            fingerprint=fingerprint,
            deadline_s=self._access.deadline_s,
            local=self._access.local,
            credentials=self._access.credentials,
            erased=lambda version: known_erased(self._coordinator, name, version),
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
        return read_rows(
            self._access, name, lambda rows: np.arange(min(num_rows, rows), dtype=np.int64)
        )
