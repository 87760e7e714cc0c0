"""The calls of a node to the coordinator that is elected, in this process or in another."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from cache_protocol.errors import NodeUnavailableError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.credentials import Credentials
from cache_server.auth.principals import EVERYTHING, Viewer
from cache_server.coordinating import Coordinating
from cache_server.coordination.catalogue_store import CatalogueLostError
from cache_server.node.links.coordinator_link import RemoteCoordinator
from cache_server.node.links.link import CoordinatorLink

_T = TypeVar("_T")
_HEARD_INTERVALS, _HEARD_S = 2, 1.0  # after an answer; then the lease is looked at


class ElectedLink:
    """A `CoordinatorLink`. Thread-safe.

    Args:
        own: the coordinator of this process, while it leads.
        credentials: of this node.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        own: Coordinating,
        credentials: Credentials,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = own
        self._credentials = credentials
        self._clock = clock
        self._lock = threading.Lock()
        self._location = ""
        self._remote: RemoteCoordinator | None = None
        self._term = 0
        self._heard_until = -math.inf

    def follow(self, location: str) -> None:
        """Calls the coordinator at a location from now on; "": none is known.

        Calls that wait for another one end.
        """
        with self._lock:
            if location == self._location:
                return
            before, self._location = self._remote, location
            self._remote = RemoteCoordinator(location, self._credentials) if location else None
        if before is not None:
            before.close()

    def is_heard(self) -> bool:
        """Whether the coordinator answered a moment ago."""
        return self._clock() < self._heard_until

    def __enter__(self) -> ElectedLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.follow("")

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """See `CoordinatorLink`; the answer of a coordinator before the last one is refused."""
        try:
            answer = self._ask(lambda link: link.heartbeat(request))
        except NodeUnavailableError:
            self._heard_until = -math.inf
            raise
        if answer.coordinator.term < self._term:
            self._heard_until = -math.inf
            raise CatalogueLostError
        self._term = answer.coordinator.term
        self._heard_until = self._clock() + _HEARD_INTERVALS * answer.interval_s + _HEARD_S
        return answer

    def get(
        self,
        name: str,
        fingerprint: str = "",
        *,
        lease: bool = False,
        viewer: Viewer = EVERYTHING,
        follow: pb.EpochOfJob | None = None,
    ) -> pb.DatasetInfo:
        """See `CoordinatorLink`."""
        return self._ask(
            lambda link: link.get(name, fingerprint, lease=lease, viewer=viewer, follow=follow)
        )

    def datasets(self, viewer: Viewer = EVERYTHING) -> list[pb.DatasetInfo]:
        """See `CoordinatorLink`."""
        return self._ask(lambda link: link.datasets(viewer))

    def write_schema(self, write_id: str) -> bytes:
        """See `CoordinatorLink`."""
        return self._ask(lambda link: link.write_schema(write_id))

    def tombstones(self, dataset: str) -> pb.GetTombstonesResponse:
        """See `CoordinatorLink`."""
        return self._ask(lambda link: link.tombstones(dataset))

    def _ask(self, call: Callable[[CoordinatorLink], _T]) -> _T:
        own: Any = self._own.coordinator
        if own is not None:
            answer = call(own)
            if self._own.coordinator is not own:
                raise CatalogueLostError
            return answer
        with self._lock:
            remote = self._remote
        if remote is None:
            raise NodeUnavailableError("the nodes elect a coordinator")
        try:
            return call(remote)
        except ValueError:  # of gRPC: `follow` has closed the channel
            if remote is self._remote:
                raise
            raise NodeUnavailableError("the nodes have elected another coordinator") from None
