"""Nodes on this machine that elect their coordinator, by a Lease of an API server or by etcd."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self
from unittest.mock import patch

import grpc
import psutil

from cache_client import CacheClient, CacheIterableDataset, Connection
from cache_client.flight.connections import NodeConnection
from cache_protocol.errors import CacheError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_protocol.wire.channels import from_rpc_error, open_channel
from cache_protocol.wire.credentials import Credentials
from cache_server.local import LocalNode
from cache_server.node.links.coordinator_link import RemoteCoordinator
from tests.conftest import rows_of
from tests.waiting import suspend, wait_until

WAIT_S = 90.0
_LOOK_S = 5.0
_QUICK = ("--heartbeat-interval-s", "0.2", "--node-timeout-s", "4")


class ElectedNodes:
    """Node processes with one Lease; a context manager.

    Args:
        store: kubeconfig of the API server; one for each node, or one for all. Or endpoints of
            etcd.
        namespace: of the Lease.
        directory: of the shards; kept.
        make: makes a node of its number, directory, options and token.
        timing: options of each node.
    """

    def __init__(
        self,
        store: Path | Sequence[Path] | str,
        namespace: str,
        directory: Path,
        count: int = 3,
        make: Callable[[int, Path, list[str], str], LocalNode] | None = None,
        timing: Sequence[str] = _QUICK,
    ) -> None:
        self.token = secrets.token_urlsafe(16)
        self.lease = f"cache-{secrets.token_hex(4)}"
        place = "etcd:" if isinstance(store, str) else f"kubernetes:{namespace}/"
        arguments = [
            *("--leader-election", f"{place}{self.lease}"),
            *("--allow-source", ""),
            *timing,
        ]
        make = make or _on_loopback
        self.nodes = [
            make(index, directory / f"node-{index}", arguments, self.token)
            for index in range(count)
        ]
        variable = "ETCDCTL_ENDPOINTS" if isinstance(store, str) else "KUBECONFIG"
        stores = [store] * count if isinstance(store, Path | str) else store
        self._environments = {
            node: {variable: str(each)} for node, each in zip(self.nodes, stores, strict=True)
        }

    def __enter__(self) -> Self:
        try:
            for node in self.nodes:
                self.begin(node)
            for node in self.nodes:
                node.wait_until_listening()
            wait_until(lambda: len(self.alive()) == len(self.nodes), WAIT_S, "all nodes join")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.close()

    def begin(self, node: LocalNode) -> None:
        """Starts a node; `LocalNode.wait_until_listening` must follow."""
        # The certificate of such a server is of no authority, and each call would say so.
        environment = {**self._environments[node], "PYTHONWARNINGS": "ignore"}
        with patch.dict(os.environ, environment):
            node.begin()

    def connection(self, node: LocalNode) -> Connection:
        """To one node, over the network."""
        return Connection(node.endpoint, token=self.token, local=False, deadline_s=WAIT_S)

    def client(self, node: LocalNode) -> CacheClient:
        return CacheClient(self.connection(node))

    def alive(self) -> set[str]:
        """The ids of the nodes that the coordinator counts as alive."""
        return {node.id for node in self.client(self.nodes[0]).nodes() if node.alive}

    def coordinator_of(self, node: LocalNode) -> pb.CoordinatorEndpoints | None:
        """Where a node says that the coordinator is; None: it does not know."""
        try:
            with NodeConnection(node.endpoint, Credentials(self.token)) as connection:
                return connection.coordinator(_LOOK_S)
        except CacheError:
            return None

    def leader(self, *apart: LocalNode) -> LocalNode:
        """The node that all nodes but some call the coordinator; it is none of those."""

        def agreed() -> LocalNode | None:
            asked = [node for node in self.nodes if node not in apart]
            found = map(self.coordinator_of, asked)
            places = {None if each is None else each.control_location for each in found}
            return next((node for node in asked if places == {node.control_location}), None)

        found = wait_until(agreed, WAIT_S, "a coordinator that all nodes name", poll_s=0.1)
        assert found is not None
        return found

    def datasets_at(self, node: LocalNode) -> list[str]:
        """What a node answers as a coordinator."""
        with RemoteCoordinator(node.control_location, Credentials(self.token)) as link:
            return sorted(info.spec.name for info in link.datasets())

    def drop_at(self, node: LocalNode, dataset: str) -> None:
        """Drops a dataset at a node, whether it is the coordinator or not."""
        credentials = Credentials(self.token)
        with open_channel(node.control_location, credentials) as channel:
            delete = cache_pb2_grpc.CoordinatorStub(channel).DeleteDataset
            try:
                request = pb.DeleteDatasetRequest(name=dataset)
                delete(request, timeout=WAIT_S, metadata=credentials.headers())
            except grpc.RpcError as error:
                raise from_rpc_error(error, node.control_location) from None

    def lose(self, node: LocalNode) -> None:
        """Kills a node and removes its disk."""
        node.kill()
        shutil.rmtree(node.cache_dir)

    def pause(self, node: LocalNode) -> psutil.Process:
        process = psutil.Process(node.pid)
        suspend(process)
        return process


def _on_loopback(_: int, directory: Path, arguments: list[str], token: str) -> LocalNode:
    return LocalNode(directory, [*arguments, "--advertise", "127.0.0.1"], token)


def read_rows(connection: Connection, dataset: str) -> tuple[list[int], float]:
    """The rows that a new reader gets, in order, and the seconds until its first batch."""
    begun = time.monotonic()
    waited_s = None
    rows: list[int] = []
    for batch in CacheIterableDataset(dataset, cache=connection, columns=["row"], batch_size=500):
        waited_s = time.monotonic() - begun if waited_s is None else waited_s
        rows += rows_of([batch])
    assert waited_s is not None
    return rows, waited_s
