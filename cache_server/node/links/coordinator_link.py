"""Calls a coordinator in another process over gRPC, with a deadline on every call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import (
    NodeUnavailableError,
    require_ready,
)
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_protocol.wire.channels import from_rpc_error, open_channel
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials
from cache_protocol.wire.load_progress import LoadReport, lengthen_shards, wait_for_load
from cache_protocol.wire.protocol_version import check_server
from cache_server.auth.principals import EVERYTHING, Viewer

_CALL_TIMEOUT_S = 10.0
_LONGEST_HEARTBEAT_S = 80.0  # to wait for an answer; of a process that hangs, pings tell sooner
_MOST_KNOWN = 8  # answers: that of 100,000 shards takes tens of megabytes
_RECONNECT_S = 5.0  # between new channels, while heartbeats fail
_PLAN_TIMEOUT_S = 600.0  # reads many footers


class RemoteCoordinator:
    """A `CoordinatorLink` over gRPC. Thread-safe; connects at the first call and after a loss.

    While heartbeats fail, a new channel is opened every few seconds. gRPC alone would look up the
    name of a coordinator that does not exist yet only every two minutes.

    Args:
        location: ``host:port`` of the coordinator's control port; ``grpc+tls://host:port`` for TLS.
        credentials: of this process.
    """

    def __init__(self, location: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._location = location
        self._credentials = credentials
        self._lock = threading.Lock()
        self._known: dict[bytes, pb.DatasetInfo] = {}  # the latest answers, by their requests
        self._heartbeat_s = _CALL_TIMEOUT_S
        self._connect()

    def _connect(self) -> None:
        self._channel = open_channel(
            self._location,
            self._credentials,
            initial_reconnect_backoff_ms=100,
            max_reconnect_backoff_ms=2_000,
            dns_min_time_between_resolutions_ms=2_000,
        )
        self._connected_at = time.monotonic()
        self._stub = cache_pb2_grpc.CoordinatorStub(self._channel)

    def __enter__(self) -> RemoteCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel."""
        with self._lock:
            self._channel.close()

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """Reports the actual shards; answers the desired ones. One thread at a time.

        A report whose sender has left is not taken. So after each one that timed out, the next
        waits twice as long: a coordinator that is late with all reports would take none of them.
        """
        begun = time.monotonic()
        try:
            response: pb.HeartbeatResponse = self._call(
                self._stub.Heartbeat, request, self._heartbeat_s
            )
        except NodeUnavailableError:
            if time.monotonic() - begun >= self._heartbeat_s:
                self._heartbeat_s = min(2 * self._heartbeat_s, _LONGEST_HEARTBEAT_S)
            with self._lock:
                if time.monotonic() - self._connected_at > _RECONNECT_S:
                    self._connect()  # the old channel lives until its last call ends
            raise
        self._heartbeat_s = max(self._heartbeat_s / 2, _CALL_TIMEOUT_S)
        check_server(response.coordinator.protocol, f"the coordinator {self._location}", "node")
        return response

    def get(
        self,
        name: str,
        fingerprint: str = "",
        *,
        lease: bool = False,
        viewer: Viewer = EVERYTHING,
        follow: pb.EpochOfJob | None = None,
    ) -> pb.DatasetInfo:
        """One dataset: the given version, that of an epoch, or the newest that has not failed.

        It is the same object as before while it does not change: do not change it.
        """
        request = pb.GetDatasetRequest(
            name=name,
            fingerprint=fingerprint,
            lease=lease,
            viewer=_viewer_to_proto(viewer),
            follow=follow,
            short_shards=True,
        )
        asked = request.SerializeToString(deterministic=True)
        known = self._known.get(asked)
        if known is not None:
            request.known_tag = known.tag
        response: pb.GetDatasetResponse = self._call(self._stub.GetDataset, request)
        if known is not None and not response.HasField("dataset"):
            return known
        lengthen_shards(response.dataset)
        with self._lock:
            self._known[asked] = response.dataset
            while len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return response.dataset

    def datasets(self, viewer: Viewer = EVERYTHING) -> list[pb.DatasetInfo]:
        """Every dataset that a viewer sees."""
        response: pb.ListDatasetsResponse = self._call(
            self._stub.ListDatasets, pb.ListDatasetsRequest(viewer=_viewer_to_proto(viewer))
        )
        return list(response.datasets)

    def write_schema(self, write_id: str) -> bytes:
        """The schema of an open write."""
        response: pb.GetWriteSchemaResponse = self._call(
            self._stub.GetWriteSchema, pb.GetWriteSchemaRequest(write_id=write_id)
        )
        return response.schema

    def tombstones(self, dataset: str) -> pb.GetTombstonesResponse:
        """The hashes of the rows of a dataset that were forgotten."""
        request = pb.GetTombstonesRequest(dataset=dataset)
        response: pb.GetTombstonesResponse = self._call(self._stub.GetTombstones, request)
        return response

    def nodes(self) -> list[pb.Node]:
        """Every node that the coordinator knows."""
        response: pb.ListNodesResponse = self._call(self._stub.ListNodes, pb.ListNodesRequest())
        return list(response.nodes)

    def load(
        self, spec: DatasetSpec, on_progress: Callable[[LoadReport], None] = lambda report: None
    ) -> pb.DatasetInfo:
        """Loads a dataset, or attaches to it, and waits until it is ready.

        Args:
            spec: of the dataset.
            on_progress: called in this thread with the progress, a few times a second.

        Raises:
            LoadError, RequestError: from the coordinator.
        """
        request = pb.CreateDatasetRequest(spec=spec.to_proto(), secrets=spec.secrets_to_proto())
        created = self._call(self._stub.CreateDataset, request, _PLAN_TIMEOUT_S)
        watch = pb.WatchDatasetRequest(name=spec.name, fingerprint=created.dataset.fingerprint)

        def watched(_: pb.DatasetInfo) -> Iterator[pb.DatasetInfo]:
            responses = self._stub.WatchDataset(watch, metadata=self._credentials.headers())
            return (response.dataset for response in responses)

        try:
            return require_ready(wait_for_load(watched, created.dataset, on_progress))
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._location) from None

    def _call(
        self, method: Callable[..., Any], request: object, timeout_s: float = _CALL_TIMEOUT_S
    ) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=self._credentials.headers())
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._location) from None


def _viewer_to_proto(viewer: Viewer) -> pb.Viewer:
    return pb.Viewer(namespace=viewer.namespace, sees_all=viewer.sees_all)
