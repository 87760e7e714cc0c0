"""The socket on which a node hands over open files: to whom, once, and open for reading."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from cache_protocol.errors import PermissionDeniedError, RequestError
from cache_protocol.storage.shard_files import MappedShard
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.host_socket import (
    FILES_AT_ONCE,
    SECRET_BYTES,
    host_identity,
    open_socket,
    socket_name,
)
from cache_server.auth.principals import Principal, Role
from cache_server.rpc import host_socket
from cache_server.rpc.host_socket import HostSocket
from tests.stored_rows import mapped
from tests.waiting import wait_until

NODE = f"node-of-{os.getpid()}"
NODE_OF_CACHE = Principal("trainer", roles=frozenset({Role.NODE}))
WAIT_S = 30.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def node(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostSocket]:
    monkeypatch.setattr(host_socket, "_LOOK_EVERY_S", 0.01)
    with HostSocket(NODE, clock) as running:
        running.start()
        yield running


@pytest.fixture
def shard(tmp_path: Path) -> MappedShard:
    found = mapped(tmp_path, 0, range(100))
    found.path.chmod(0o444)
    return MappedShard(found.sealed, found.path)


@pytest.fixture
def caller() -> Iterator[socket.socket]:
    with open_socket() as connection:
        connection.settimeout(WAIT_S)
        connection.connect(socket_name(NODE))
        yield connection


def offered(
    node: HostSocket, shard: MappedShard, principal: Principal = NODE_OF_CACHE
) -> pb.OpenFilesAnswer:
    (answer,) = node.offer([shard], host_identity(), principal)
    return answer


def received(connection: socket.socket, key: bytes) -> tuple[bytes, list[int]]:
    """What comes back: b"" if the node closed the connection."""
    connection.send(key)
    reply, files, _, _ = socket.recv_fds(connection, 1024, FILES_AT_ONCE)
    return reply, files


def test_a_key_brings_the_proof_and_files_that_can_only_be_read(
    node: HostSocket, shard: MappedShard, caller: socket.socket
) -> None:
    answer = offered(node, shard)
    reply, (file,) = received(caller, answer.key)

    assert reply == answer.proof
    assert os.read(file, 2**20) == shard.path.read_bytes()
    assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert os.fstat(file).st_ino == shard.inode[1]
    again, more = received(caller, offered(node, shard).key)  # on the same connection
    assert len(again) == SECRET_BYTES
    for each in (file, *more):
        os.close(each)


def test_a_key_is_good_once_and_soon_and_others_close_the_connection(
    node: HostSocket, shard: MappedShard, clock: Clock
) -> None:
    def ask(key: bytes) -> bytes:
        with open_socket() as connection:
            connection.settimeout(WAIT_S)
            connection.connect(socket_name(NODE))
            try:
                reply, files = received(connection, key)
            except ConnectionResetError:  # closed with a part of the message unread
                return b""
            for file in files:
                os.close(file)
            return reply

    once, late = offered(node, shard), offered(node, shard)
    assert ask(once.key) == once.proof
    for wrong in (once.key, os.urandom(SECRET_BYTES), once.key[:-1], once.key * 9, once.proof):
        assert ask(wrong) == b""
    clock.now += host_socket._KEY_S + 1
    assert ask(late.key) == b""


@pytest.mark.parametrize("role", Role)
def test_only_admins_and_nodes_get_files(node: HostSocket, shard: MappedShard, role: Role) -> None:
    caller = Principal("caller", roles=frozenset({role}))
    if role in {Role.ADMIN, Role.NODE}:
        assert offered(node, shard, caller).key
        return
    with pytest.raises(PermissionDeniedError, match="'caller' is neither"):
        offered(node, shard, caller)


def test_files_that_cannot_be_opened_are_a_warning(
    node: HostSocket,
    shard: MappedShard,
    caller: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(shard: MappedShard, opened: ExitStack) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(host_socket, "_open", fail)
    assert received(caller, offered(node, shard).key) == (b"", [])
    ((_, level, message),) = caplog.record_tuples
    assert (level, "Too many open files" in message) == (logging.WARNING, True)


def test_a_file_that_was_dropped_or_replaced_is_not_handed_over(
    node: HostSocket, shard: MappedShard, caller: socket.socket
) -> None:
    gone, replaced = offered(node, shard), offered(node, shard)
    content = shard.path.read_bytes()
    shard.path.unlink()
    assert received(caller, gone.key) == (gone.proof + b"shard 0 was just dropped", [])
    shard.path.write_bytes(content)
    reply, files = received(caller, replaced.key)
    assert b"was replaced or changed" in reply
    assert files == []


def test_callers_elsewhere_and_a_node_without_a_socket_are_refused(
    node: HostSocket, shard: MappedShard
) -> None:
    with HostSocket(NODE) as second:  # the name is taken
        second.start()
        for offering, host in ((node, "another machine"), (node, ""), (second, host_identity())):
            with pytest.raises(RequestError, match="processes of its machine and network"):
                list(offering.offer([shard], host, NODE_OF_CACHE))


def test_silent_callers_are_closed_and_many_are_bounded(
    node: HostSocket, shard: MappedShard, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_socket, "_MAX_CONNECTIONS", 2)
    silent = []
    for _ in range(3):
        silent.append(open_socket())
        silent[-1].settimeout(WAIT_S)
        silent[-1].connect(socket_name(NODE))
    assert silent[2].recv(1) == b""
    clock.now += host_socket._KEY_S + 1
    assert [each.recv(1) for each in silent[:2]] == [b"", b""]
    for each in silent:
        each.close()


def test_many_shards_are_several_answers_and_keys_are_bounded(
    node: HostSocket, shard: MappedShard, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = list(node.offer([shard] * (FILES_AT_ONCE + 1), host_identity(), NODE_OF_CACHE))
    assert [len(answer.files) for answer in answers] == [FILES_AT_ONCE, 1]
    monkeypatch.setattr(host_socket, "_MAX_KEYS", 2)
    list(node.offer([shard] * FILES_AT_ONCE * 3, host_identity(), NODE_OF_CACHE))
    assert len(node._offers) == 2
    full = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    monkeypatch.setattr(socket.socket, "accept", full)
    with open_socket() as connection:
        connection.connect(socket_name(NODE))
        clock.now += host_socket._KEY_S + 1
        wait_until(lambda: full.called and not node._offers, WAIT_S, "old keys to be forgotten")


def test_it_ends_with_its_thread_and_frees_its_name(shard: MappedShard) -> None:
    name = f"{NODE}-ends"
    with HostSocket(name) as first:
        first.start()
        threads = [thread for thread in threading.enumerate() if thread.name == "host-socket"]
        assert threads
    assert not any(thread.is_alive() for thread in threads)
    with HostSocket(name) as second:
        assert list(second.offer([shard], host_identity(), NODE_OF_CACHE))
