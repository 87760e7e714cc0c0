"""Shard files that nodes of this machine open for this process, which cannot see their paths.

Containers of one pod, and pods and containers in the network of the host, reach the Unix sockets of
each other, but not each other's files. See `cache_protocol.wire.host_socket`.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from cache_client.flight.call_threads import CallThreads
from cache_client.flight.connections import Connection
from cache_client.flight.routing import NodeRef, ShardFile, ShardMap
from cache_client.reading.local_shards import LocalShards
from cache_protocol.errors import CacheError, NodeUnavailableError
from cache_protocol.storage.shard_files import MappedShard, SealedShard
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.credentials import Credentials
from cache_protocol.wire.host_socket import (
    MAX_REASON_BYTES,
    SECRET_BYTES,
    host_identity,
    open_socket,
    socket_name,
)

logger = logging.getLogger(__name__)

_DEADLINE_S = 10.0  # for all nodes: rows can be read over Flight instead


def local_shards(
    shards: ShardMap,
    columns: Sequence[str],
    credentials: Credentials,
    rows: range | None = None,
) -> LocalShards:
    """The shards whose files this process can open, or gets from their nodes.

    Args:
        columns: see `LocalShards`.
        credentials: of this process.
        rows: that will be read; None: all.
    """

    def open_some(wanted: Sequence[int]) -> dict[int, MappedShard]:
        if rows is not None:
            first = int(np.searchsorted(shards.starts, rows.start, side="right")) - 1
            stop = int(np.searchsorted(shards.starts, rows.stop))
            wanted = [index for index in wanted if first <= index < stop]
        return open_files(shards, credentials, wanted)

    return LocalShards(shards, columns, open_some)


def open_files(
    shards: ShardMap, credentials: Credentials, wanted: Sequence[int]
) -> dict[int, MappedShard]:
    """Maps the shard files that nodes of this machine hand over.

    Nodes elsewhere are not asked. A node that does not answer, or that refuses, is logged: its rows
    are read over Flight.

    Args:
        credentials: of this process.
        wanted: indices of shards in the map.

    Returns:
        Index in the map -> file. Each is the one in the shard map, by its checksum.
    """
    by_node: dict[str, dict[int, tuple[int, ShardFile]]] = {}  # by shard of the version, with index
    for index in wanted:
        for file in shards.files[index]:
            by_node.setdefault(file.node_id, {})[file.shard] = index, file
    found: dict[int, MappedShard] = {}
    deadline = time.monotonic() + _DEADLINE_S
    for node in shards.nodes:
        files = by_node.get(node.id, {})
        missing = {shard: told for shard, told in files.items() if told[0] not in found}
        if not missing:
            continue
        try:
            with open_socket() as connection:
                connection.settimeout(_left_s(deadline))
                connection.connect(socket_name(node.id))
                for mapped in _receive(connection, node, shards, credentials, missing, deadline):
                    found[missing[mapped.sealed.index][0]] = mapped
        except ConnectionRefusedError:
            continue  # it is elsewhere
        except (CacheError, OSError, ValueError, pa.ArrowException) as error:
            logger.info("no more files from node %s: read over Flight: %s", node, error)
    return found


def _receive(
    connection: socket.socket,
    node: NodeRef,
    shards: ShardMap,
    credentials: Credentials,
    missing: Mapping[int, tuple[int, ShardFile]],
    deadline: float,
) -> Iterator[MappedShard]:
    """The files of a node, each mapped before the next one is taken.

    Raises:
        NodeUnavailableError: the socket is not that of the node, or it refuses.
        CacheError, OSError, ValueError, pa.ArrowException: the node does not answer, or a file
            cannot be mapped.
    """
    told = {shard: file for shard, (_, file) in missing.items()}
    with CallThreads() as threads:
        answers = threads.call(_ask, node, credentials, shards, [*missing], _left_s(deadline))
    for answer in answers:
        if not all(_is_told(file, told.get(file.shard)) for file in answer.files):
            raise NodeUnavailableError("its files are not those of the shard map")
        connection.settimeout(_left_s(deadline))
        connection.send(answer.key)
        reply, handles, _, _ = socket.recv_fds(
            connection,
            SECRET_BYTES + MAX_REASON_BYTES,
            len(answer.files),
            socket.MSG_CMSG_CLOEXEC,
        )
        try:
            if not reply:
                raise NodeUnavailableError("it closed the socket")
            if reply[:SECRET_BYTES] != answer.proof:
                raise NodeUnavailableError("the socket of its name is not its own")
            if len(handles) != len(answer.files):
                reason = reply[SECRET_BYTES:].decode("utf-8", "replace")
                raise NodeUnavailableError(reason or "the system passed too few descriptors on")
            for file, handle in zip(answer.files, handles, strict=True):
                sealed = SealedShard(
                    file.shard, file.num_rows, file.num_bytes, file.checksum, {}, file.digests
                )
                path = Path(told[file.shard].path)
                yield MappedShard(sealed, path, handle)
        finally:
            for handle in handles:
                os.close(handle)


def _left_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the nodes of this machine took more than {_DEADLINE_S} s")
    return left


def _ask(
    node: NodeRef,
    credentials: Credentials,
    shards: ShardMap,
    wanted: Sequence[int],
    timeout_s: float,
) -> list[pb.OpenFilesAnswer]:
    request = pb.OpenFilesRequest(
        dataset=shards.dataset,
        fingerprint=shards.fingerprint,
        shards=wanted,
        host=host_identity(),
    )
    with Connection(node.location, credentials) as connection:
        return connection.open_files(request, timeout_s)


def _is_told(file: pb.SealedFile, told: ShardFile | None) -> bool:
    return told is not None and (file.num_bytes, file.checksum) == (told.num_bytes, told.checksum)
