"""Hands open shard files to processes of this machine that cannot open them by their paths.

Such processes are the containers of one pod without a common volume, pods and containers in the
network of the host, and users who may not read the cache directory. They read the mapped files as
those who see them do. They could also change them, so only admins and nodes of the cache get files.

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


class _Offer(NamedTuple):
    """What a key opens."""

    shards: Sequence[MappedShard]
    proof: bytes
    until: float


class _Caller(NamedTuple):
    """A connection, and how long it may be silent."""

    connection: socket.socket
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
            PermissionDeniedError: the caller is neither an admin nor a node of the cache.
            RequestError: this node has no socket, or the caller does not reach it.
        """
        if principal.roles.isdisjoint({Role.ADMIN, Role.NODE}):
            raise PermissionDeniedError(
                "this node hands files only to admins and nodes of the cache, because a receiver "
                f"can change them: {principal.name!r} is neither"
            )
        if self._listener is None or host != host_identity():
            raise RequestError("this node hands files only to processes of its machine and network")
        for at in range(0, len(shards), FILES_AT_ONCE):
            part = shards[at : at + FILES_AT_ONCE]
            key, proof = secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SECRET_BYTES)
            with self._lock:
                while len(self._offers) >= _MAX_KEYS:
                    del self._offers[next(iter(self._offers))]
                self._offers[key] = _Offer(part, proof, self._clock() + _KEY_S)
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
            for caller in _callers(selector):
                caller.connection.close()

    def _serve(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        """Forgets what is old, waits a while, and answers those who have asked."""
        now = self._clock()
        for caller in _callers(selector):
            if caller.until < now:
                selector.unregister(caller.connection)
                caller.connection.close()
        with self._lock:  # an offer keeps a dropped version in memory
            for key in [key for key, offer in self._offers.items() if offer.until < now]:
                del self._offers[key]
        for found, _ in selector.select(_LOOK_EVERY_S):
            if self._stop.is_set():
                return
            if found.data is None:
                connection, _ = listener.accept()
                connection.setblocking(False)
                stays = len(selector.get_map()) <= _MAX_CONNECTIONS
            else:
                connection = found.data.connection
                selector.unregister(connection)
                stays = self._answer(connection)
            if stays:
                caller = _Caller(connection, self._clock() + _KEY_S)
                selector.register(connection, selectors.EVENT_READ, caller)
            else:
                connection.close()

    def _answer(self, connection: socket.socket) -> bool:
        """Answers one message; returns whether the connection may be used again."""
        try:
            key = connection.recv(SECRET_BYTES + 1)
            with self._lock:
                offer = self._offers.pop(key, None)
            if offer is None or offer.until < self._clock():
                return False
            with ExitStack() as opened:
                try:
                    files = [_open(shard, opened) for shard in offer.shards]
                except NotReadyError as error:
                    reason = str(error).encode()[:MAX_REASON_BYTES]
                    return connection.send(offer.proof + reason) > 0
                return socket.send_fds(connection, [offer.proof], files) > 0
        except OSError as error:  # the caller is gone, or this process has too many open files
            logger.warning("no files handed over: %s", error)
            return False

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _callers(selector: selectors.BaseSelector) -> list[_Caller]:
    return [found.data for found in selector.get_map().values() if found.data is not None]


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


def _sealed_file(shard: MappedShard) -> pb.SealedFile:
    sealed = shard.sealed
    return pb.SealedFile(
        shard=sealed.index,
        num_rows=sealed.num_rows,
        num_bytes=sealed.num_bytes,
        checksum=sealed.checksum,
        digests=sealed.digests,
    )
