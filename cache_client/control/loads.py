"""Asks for a load, and waits until it is ready or failed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import grpc

from cache_client.control.coordinator import Calls, remaining_time_s
from cache_protocol.cli.load_bar import progress_bar
from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import ConfigError, NotReadyError, checked
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import LoadReport, wait_for_load


def create(
    calls: Calls,
    request: pb.CreateDatasetRequest,
    timeout_s: float | None,
    deadline: float | None,
) -> pb.DatasetInfo:
    """Asks for a load.

    Raises:
        NotReadyError: the deadline is over before the files of the dataset are listed.
    """
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
def listeners_of(
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


def wait_until_loaded(
    calls: Calls,
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
    calls: Calls,
    watch: pb.WatchDatasetRequest,
    deadline: float | None,
    info: pb.DatasetInfo,
) -> Iterator[pb.DatasetInfo]:
    """Yields the dataset at every change; ``info`` is its last known state.

    Raises:
        NotReadyError: the deadline is over.
    """
    remaining_s = remaining_time_s(deadline)
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


def checked_spec(spec: object, problems: list[str]) -> DatasetSpec:
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
