"""`CacheClient`: load, list and drop datasets. The only importer of grpc in the client.

Each call opens a channel to the coordinator and closes it again: nothing is left open that a
later fork could break.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np
import pyarrow as pa

from cache_client.arguments import (
    function_problems,
    integer_or_problem,
    seconds_problems,
    switch_problems,
)
from cache_client.connections import Connection
from cache_client.forecast import LoadForecast
from cache_client.forecast import from_proto as forecast_from_proto
from cache_client.grpc_guard.call_threads import CallThreads
from cache_client.grpc_guard.forks import fork_gate
from cache_client.permutation import checked_integer
from cache_client.ranks import find_endpoint
from cache_client.reader import Reader
from cache_client.routing import ShardMap
from cache_client.rows import join
from cache_protocol.cli.load_bar import shown_progress
from cache_protocol.errors import ConfigError, LoadError, NotReadyError, checked
from cache_protocol.spec.dataset_spec import DatasetSpec
from cache_protocol.spec.values import is_text
from cache_protocol.storage.layout import schema_from_bytes
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_protocol.wire.dataset_states import state_name
from cache_protocol.wire.grpc_channel import from_rpc_error, open_channel
from cache_protocol.wire.load_progress import LoadReport
from cache_protocol.wire.load_watch import wait_until_settled

_LEAST_LOOK_UP_S = 1.0  # to find the coordinator: a tiny limit is one of its work
_MOST_S = 1e9  # of a call: gRPC takes more for none at all

_MOST_NODES = 100_000  # of a plan: the coordinator names each of them
MOST_MEMORY_BYTES = 2**64 - 1  # on the wire


@dataclass(frozen=True)
class DatasetInfo:
    """One version of a dataset, as the coordinator knows it.

    Attributes:
        num_rows: 0 until every shard is loaded.
        num_bytes: of the shards loaded so far, one replica.
        schema: logical columns in their storage types.
        state: ``loading``, ``ready`` or ``failed``.
        placement: shard -> ids of the nodes that hold it, in order of preference.
        error: why it failed; None unless it did.
        waits: why a part of its load cannot go on yet; None where it can.
        replicas: that were asked for; ``placement`` has fewer where there are not so many nodes.
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
        return "\n".join(lines)


@dataclass(frozen=True)
class NodeInfo:
    """One cache node. ``memory_limit_bytes`` is None without a limit."""

    id: str
    flight_location: str
    control_location: str
    cache_dir: str
    memory_limit_bytes: int | None
    stored_bytes: int
    stored_shards: int
    alive: bool


class CacheClient:
    """Talks to the coordinator of a cache. Thread-safe, holds no connection between calls.

    Args:
        endpoint: ``grpc://HOST:PORT``, the Flight endpoint of any node; default:
            ``CACHE_ENDPOINT``, else that of the TrainJob this runs in.
        timeout_s: of each call but `load` and `plan`.

    Raises:
        ConfigError: quoting every bad argument; so do all calls. They raise NodeUnavailableError
            where the node or its coordinator does not answer in time.
    """

    def __init__(self, endpoint: str | None = None, *, timeout_s: float = 30.0) -> None:
        problems = seconds_problems("timeout_s", timeout_s)
        where = checked(problems, lambda: find_endpoint(endpoint))
        if problems or where is None:
            raise ConfigError("; ".join(problems))
        self.endpoint = where
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
        """Loads a dataset; attaches at once when the same version is there already.

        A source that changed meanwhile makes a new version. Readers of the old one go on; it is
        dropped some time after the last of them has read a row.

        Args:
            spec: a spec, or the path of one in YAML.
            wait: until the dataset is ready.
            progress: show a progress bar on standard error, or a line a second where that is no
                terminal.
            on_progress: called in this thread with how far it is, a few times a second; every few
                seconds where very many callers wait.
            timeout_s: of the whole load; None for no limit. The load goes on after it.
            refresh: make a new version also of a source that cannot tell whether it changed, such
                as a database.

        Raises:
            LoadError: the source cannot be read or does not fit; names file, split and reason.
            RequestError: the query is wrong, or its rows have no order of their own.
            NotReadyError: not loaded within ``timeout_s``.
            NodeUnavailableError: the coordinator does not answer.
        """
        problems = [] if timeout_s is None else seconds_problems("timeout_s", timeout_s)
        for name, value in {"wait": wait, "progress": progress, "refresh": refresh}.items():
            problems += switch_problems(name, value)
        problems += function_problems("on_progress", on_progress)
        spec = _checked_spec(spec, problems)
        timeout_s = None if timeout_s is None else float(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._coordinator(deadline) as calls:
            info = _create(calls, spec, timeout_s, deadline, refresh)
            if wait:
                watch = pb.WatchDatasetRequest(name=spec.name, fingerprint=info.fingerprint)
                with ExitStack() as stack:
                    take = [on_progress] if on_progress is not None else []
                    if progress:
                        take.append(stack.enter_context(shown_progress(spec.name)))

                    def report(latest: LoadReport) -> None:
                        for function in take:
                            function(latest)

                    info = wait_until_settled(
                        lambda known: _watched(calls, watch, deadline, known),
                        info,
                        report,
                        deadline,
                    )
        if info.state == pb.DATASET_STATE_FAILED:
            raise LoadError(info.error.message)
        return _dataset_info(info)

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
        """What loading ``spec`` would come to, from metadata alone; loads nothing.

        Args:
            spec: a spec, or the path of one in YAML.
            num_nodes: over which it is spread; None for the nodes that are alive.
            memory_limit_bytes: of each node; None for the smallest of those alive.
            world_size: ranks of the job.
            batch_size: rows of a rank in a full step.
            timeout_s: of the whole call: there may be many footers to read.

        Raises:
            ConfigError: an argument is out of range. LoadError, RequestError: as for `load`.
        """
        problems = seconds_problems("timeout_s", timeout_s)
        of_cache = {
            "num_nodes": (num_nodes, _MOST_NODES),
            "memory_limit_bytes": (memory_limit_bytes, MOST_MEMORY_BYTES),
        }
        for name, (value, most) in of_cache.items():
            if value is not None:
                integer_or_problem(problems, name, value, 1, most)
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
        assert ranks is not None and rows is not None  # or there were problems
        return forecast_from_proto(response.forecast, ranks, rows)

    def datasets(self) -> list[DatasetInfo]:
        """One version of every dataset, by name: the newest that has not failed."""
        deadline = self._deadline()
        with self._coordinator(deadline) as calls:
            response = calls.call(calls.stub.ListDatasets, pb.ListDatasetsRequest(), deadline)
        return [_dataset_info(info) for info in response.datasets]

    def describe(self, name: str) -> DatasetInfo:
        """The newest version of one dataset that has not failed; where there is none, why.

        Raises:
            DatasetNotFoundError: listing the datasets there are.
        """
        request = pb.GetDatasetRequest(name=_checked_name(name))
        deadline = self._deadline()
        with self._coordinator(deadline) as calls:
            response = calls.call(calls.stub.GetDataset, request, deadline)
        return _dataset_info(response.dataset)

    def drop(self, name: str) -> None:
        """Forgets a dataset; its nodes remove it at their next heartbeat.

        Raises:
            DatasetNotFoundError: listing the datasets there are.
        """
        request = pb.DeleteDatasetRequest(name=_checked_name(name))
        deadline = self._deadline()
        with self._coordinator(deadline) as calls:
            calls.call(calls.stub.DeleteDataset, request, deadline)

    def nodes(self) -> list[NodeInfo]:
        """Every node that the coordinator has heard of, by id."""
        deadline = self._deadline()
        with self._coordinator(deadline) as calls:
            response = calls.call(calls.stub.ListNodes, pb.ListNodesRequest(), deadline)
        return [
            NodeInfo(
                node.id,
                node.flight_location,
                node.control_location,
                node.cache_dir,
                node.memory_limit_bytes or None,
                node.stored_bytes,
                node.stored_shards,
                node.alive,
            )
            for node in response.nodes
        ]

    def head(self, name: str, num_rows: int = 5) -> pa.RecordBatch:
        """The first rows of a dataset, in source order.

        Raises:
            DatasetNotFoundError, LoadError: there is no such dataset, or its load failed.
            NotReadyError: it is loading; says how far.
        """
        name = _checked_name(name)
        try:
            num_rows = checked_integer("num_rows", num_rows, 0)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        deadline = self._deadline()
        with CallThreads() as aside:
            shards = aside.call(self._read_plan, name)
            left = _left_s(deadline) or _LEAST_LOOK_UP_S
            with Reader(self.endpoint, shards, deadline_s=left) as reader:
                row_ids = np.arange(min(num_rows, shards.num_rows), dtype=np.int64)
                pieces = aside.call(reader.fetch, row_ids)
        return join(pieces).to_batch()

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _read_plan(self, name: str) -> ShardMap:
        with Connection(self.endpoint) as connection:
            return connection.read_plan(name, "", (), self._timeout_s)

    @contextmanager
    def _coordinator(self, deadline: float | None) -> Iterator[_Calls]:
        left = _left_s(deadline)
        look_up_s = self._timeout_s
        if left is not None:
            look_up_s = min(look_up_s, max(left, _LEAST_LOOK_UP_S))
        with CallThreads() as aside:
            location = aside.call(self._find_coordinator, look_up_s)
            fork_gate.use()
            channel = aside.call(open_channel, location)
            try:
                yield _Calls(aside, cache_pb2_grpc.CoordinatorStub(channel))
            except grpc.RpcError as error:
                raise from_rpc_error(error, location) from None
            finally:
                aside.call(channel.close)  # which ends the call that an interrupt left

    def _find_coordinator(self, timeout_s: float) -> str:
        with Connection(self.endpoint) as connection:
            return connection.coordinator(timeout_s).control_location


@dataclass(frozen=True)
class _Calls:
    """Calls of a coordinator, all of them made aside."""

    aside: CallThreads
    stub: cache_pb2_grpc.CoordinatorStub

    def call(self, method: Callable[..., Any], request: object, deadline: float | None) -> Any:
        """The answer to a request, by its deadline."""
        return self.aside.call(partial(method, request, timeout=_left_s(deadline)))

    def stream(self, method: Callable[..., Any], request: object, left_s: float | None) -> Any:
        """The answers to a request, one after the other."""
        responses = self.aside.call(partial(method, request, timeout=left_s))
        while (response := self.aside.call(next, responses, None)) is not None:
            yield response


def _checked_spec(spec: object, problems: list[str]) -> DatasetSpec:
    """The spec that a caller means, if nothing else is wrong with the arguments.

    Raises:
        ConfigError: of all problems, those of the spec among them. A mapping is not quoted: it may
            hold secrets.
    """
    found: DatasetSpec | None = None
    if isinstance(spec, DatasetSpec):
        found = spec
    elif isinstance(spec, str | os.PathLike) and spec != "":
        found = checked(problems, lambda: DatasetSpec.from_yaml(spec))
    elif isinstance(spec, Mapping):
        problems.append(
            "spec must be a DatasetSpec or the path of one in YAML, got a "
            f"{type(spec).__name__}: DatasetSpec.from_mapping makes a spec of it"
        )
    else:
        problems.append(f"spec must be a DatasetSpec or the path of one in YAML, got {spec!r}")
    if problems or found is None:
        raise ConfigError("; ".join(problems))
    return found


def _checked_name(name: object) -> str:
    if not is_text(name) or not name:
        raise ConfigError(f"name must be that of a dataset, got {name!r}")
    return name


def _create(
    calls: _Calls,
    spec: DatasetSpec,
    timeout_s: float | None,
    deadline: float | None,
    refresh: bool,
) -> pb.DatasetInfo:
    request = pb.CreateDatasetRequest(
        spec=spec.to_proto(), secrets=spec.secrets_to_proto(), refresh=refresh
    )
    try:
        info: pb.DatasetInfo = calls.call(calls.stub.CreateDataset, request, deadline).dataset
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        raise NotReadyError(
            f"dataset {spec.name!r} was not planned within {timeout_s:g} s: its files are still "
            "being listed; the load goes on"
        ) from None
    return info


def _watched(
    calls: _Calls,
    watch: pb.WatchDatasetRequest,
    deadline: float | None,
    info: pb.DatasetInfo,
) -> Iterator[pb.DatasetInfo]:
    """What one watch answers; ``info`` is what is known before.

    Raises:
        NotReadyError: the deadline is over; no watch is begun after it.
    """
    left_s = _left_s(deadline)
    if left_s == 0:
        raise _not_in_time(watch, info)
    try:
        for response in calls.stream(calls.stub.WatchDataset, watch, left_s):
            info = response.dataset
            yield info
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        raise _not_in_time(watch, info) from None


def _not_in_time(watch: pb.WatchDatasetRequest, info: pb.DatasetInfo) -> NotReadyError:
    done = info.progress
    return NotReadyError(
        f"dataset {watch.name!r} was not ready within the time given: {done.shards_done} of "
        f"{done.shards_total} shards, {done.rows_done} rows; the load goes on"
    )


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else min(max(0.0, deadline - time.monotonic()), _MOST_S)


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
    )
