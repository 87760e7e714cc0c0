"""The calls of a node to its coordinator, whether in this process or another."""

from __future__ import annotations

from typing import Protocol

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import EVERYTHING, Viewer


class CoordinatorLink(Protocol):
    """The calls of a node to its coordinator, in this process or another."""

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """Reports the actual shards; answers the desired ones."""

    def get(
        self,
        name: str,
        fingerprint: str = "",
        *,
        lease: bool = False,
        viewer: Viewer = EVERYTHING,
        follow: pb.EpochOfJob | None = None,
    ) -> pb.DatasetInfo:
        """One dataset: the given version, that of an epoch, or the newest that has not failed."""

    def datasets(self, viewer: Viewer = EVERYTHING) -> list[pb.DatasetInfo]:
        """Every dataset that a viewer sees."""

    def write_schema(self, write_id: str) -> bytes:
        """The schema of an open write."""

    def tombstones(self, dataset: str) -> pb.GetTombstonesResponse:
        """The hashes of the rows of a dataset that were forgotten."""
