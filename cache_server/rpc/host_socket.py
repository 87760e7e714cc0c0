"""Hands open shard files to processes of this machine that cannot open them by their paths.

Such processes are the containers of one pod without a common volume, pods and containers in the
network of the host, and users who may not read the cache directory. They read the mapped files as
those who see them do.

A caller proves who it is over Flight, by the action ``open_files``. It gets a key for this socket,
which is good for one answer, and the proof that the socket is that of the node. See
docs/decisions/0036.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from cache_protocol.errors import NotReadyError, PermissionDeniedError, RequestError
from cache_protocol.storage.shard_files import MappedShard
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.host_socket import (
    FILES_AT_ONCE,
    MAX_REASON_BYTES,
    SECRET_BYTES,
    host_identity,
    open_socket,
    socket_name,
)
from cache_server.auth.principals import Principal, Role
from cache_server.secrets import error_text
from cache_server.shards.stoppable_thread import StoppableThread

logger = logging.getLogger(__name__)

_KEY_S = 60.0  # how long a key is good, and a connection may be silent
_LOOK_EVERY_S = 1.0
_MAX_KEYS, _MAX_CONNECTIONS = 4096, 256
_PEER = struct.Struct("3i")  # process, user, group: SO_PEERCRED in unix(7)


class _Offer(NamedTuple):
    """What a key opens."""

    shards: Sequence[MappedShard]
    proof: bytes
    may_change_rows: bool
    until: float


class HostSocket(StoppableThread):
    """The socket, from construction to `close`; it answers from `start` on. Thread-safe.

    Args:
        node_id: of this node.
        clock: monotonic seconds.
    """

    def __init__(self, node_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("host-socket")
        self._clock = clock
        self._lock = threading.Lock()  # of the offers
        self._offers: dict[bytes, _Offer] = {}  # oldest first
        self._listener: socket.socket | None = None
        try:
            self._listener = open_socket()
            self._listener.bind(socket_name(node_id))
            self._listener.listen()
            self._listener.setblocking(False)
        except OSError as error:
            logger.info("no files are handed over: no host socket: %s", error)
            self._close_listener()

    def close(self) -> None:
        """Stops answering, and closes every connection."""
        self._stop.set()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        super().close()
        self._close_listener()

    def offer(
        self, shards: Sequence[MappedShard], host: str, principal: Principal
    ) -> Iterator[pb.OpenFilesAnswer]:
        """Keys for the files of shards that a caller may read.

        Args:
            host: of the caller, see `host_identity`.

        Raises:
            RequestError: this node has no socket, or the caller does not reach it.
        """
        if self._listener is None or host != host_identity():
            raise RequestError("this node hands files only to processes of its machine and network")
        trusted = not principal.roles.isdisjoint({Role.ADMIN, Role.NODE})
        for at in range(0, len(shards), FILES_AT_ONCE):
            part = shards[at : at + FILES_AT_ONCE]
            key, proof = secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SECRET_BYTES)
            with self._lock:
                while len(self._offers) >= _MAX_KEYS:
                    del self._offers[next(iter(self._offers))]
                self._offers[key] = _Offer(part, proof, trusted, self._clock() + _KEY_S)
            yield pb.OpenFilesAnswer(key=key, proof=proof, files=map(_sealed_file, part))

    def _run(self) -> None:
        if self._listener is None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stop.is_set():
                try:
                    self._serve(selector, self._listener)
                except error_text.EXITS:
                    raise
                except Exception:  # the next caller may be served
                    logger.exception("host socket failed, continues")
                    self._stop.wait(_LOOK_EVERY_S)
            for connection, _ in _connections(selector):
                connection.close()

    def _serve(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        """Waits a while, then answers those who have asked."""
        for found, _ in selector.select(_LOOK_EVERY_S):
            if found.fileobj is not listener:
                connection: socket.socket = found.fileobj  # type: ignore[assignment]
                selector.unregister(connection)
                if self._answer(connection):
                    selector.register(connection, selectors.EVENT_READ, self._clock() + _KEY_S)
                else:
                    connection.close()
            elif not self._stop.is_set():
                connection, _ = listener.accept()
                connection.setblocking(False)
                if len(selector.get_map()) > _MAX_CONNECTIONS:
                    connection.close()
                else:
                    selector.register(connection, selectors.EVENT_READ, self._clock() + _KEY_S)
        now = self._clock()
        for connection, until in _connections(selector):
            if until < now:
                selector.unregister(connection)
                connection.close()
        with self._lock:  # an offer keeps a dropped version in memory
            for key in [key for key, offer in self._offers.items() if offer.until < now]:
                del self._offers[key]

    def _answer(self, connection: socket.socket) -> bool:
        """Answers one message; returns whether the connection may be used again."""
        try:
            key = connection.recv(SECRET_BYTES + 1)
            with self._lock:
                offer = self._offers.pop(key, None)
            if offer is None or offer.until < self._clock():
                return False
            _, user, _ = _PEER.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            )
            with ExitStack() as opened:
                try:
                    files = [_open(shard, opened) for shard in offer.shards]
                    if not offer.may_change_rows:
                        for file in files:
                            _refuse_writers(user, os.fstat(file))
                except (NotReadyError, PermissionDeniedError) as error:
                    reason = str(error).encode()[:MAX_REASON_BYTES]
                    return connection.send(offer.proof + reason) > 0
                return socket.send_fds(connection, [offer.proof], files) > 0
        except OSError as error:  # of a caller that is gone, or of no more descriptors
            logger.debug("no files handed over: %s", error)
            return False

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _connections(selector: selectors.BaseSelector) -> list[tuple[socket.socket, float]]:
    """The connections of callers, each with the time until which it may be silent."""
    return [
        (found.fileobj, found.data)  # type: ignore[misc]
        for found in selector.get_map().values()
        if found.data is not None
    ]


def _open(shard: MappedShard, opened: ExitStack) -> int:
    """A descriptor of the file of a shard, for reading.

    Raises:
        NotReadyError: it was dropped, replaced or changed.
    """
    try:
        file = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotReadyError(f"shard {shard.sealed.index} was just dropped") from None
    opened.callback(os.close, file)
    found = os.fstat(file)
    if (found.st_dev, found.st_ino) != shard.inode or not shard.is_unchanged():
        raise NotReadyError(f"the file of shard {shard.sealed.index} was replaced or changed")
    return file


def _refuse_writers(user: int, file: os.stat_result) -> None:
    """Refuses a user who can open a file again for writing, by ``/proc/self/fd``.

    Raises:
        PermissionDeniedError: it is root or the owner of the file, or the file is not read-only.
    """
    if user in (0, file.st_uid) or file.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionDeniedError(
            f"user {user} could change the files of this node: as this user, only an admin or a "
            "node of the cache gets them"
        )


def _sealed_file(shard: MappedShard) -> pb.SealedFile:
    sealed = shard.sealed
    return pb.SealedFile(
        shard=sealed.index,
        num_rows=sealed.num_rows,
        num_bytes=sealed.num_bytes,
        checksum=sealed.checksum,
        digests=sealed.digests,
    )
