"""What a client and the server of forks say to each other on a Unix socket."""

from __future__ import annotations

import array
import json
import socket
from typing import Any

_SIZE = 8
_MAX_FDS = 200


def send(server: socket.socket, request: list[Any], fds: list[int]) -> None:
    """Asks for a fork that has these file descriptors.

    The request is ``[arguments, cwd, environ, fd_numbers, new_session, tied]``: the fork runs
    ``python ARGUMENTS``, and one that is tied is killed when this end of the connection closes.
    """
    message = json.dumps(request).encode()
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    server.sendmsg([len(message).to_bytes(_SIZE, "big")], passed)
    server.sendall(message)


def receive(client: socket.socket) -> tuple[list[Any], list[int]]:
    """What `send` has sent.

    Raises:
        EOFError: the client ended before it had sent all.
    """
    size, fds, _, _ = socket.recv_fds(client, _SIZE, _MAX_FDS)
    if len(size) < _SIZE:
        raise EOFError(f"{len(size)} of {_SIZE} bytes")
    return json.loads(_read(client, int.from_bytes(size, "big"))), fds


def send_number(client: socket.socket, number: int) -> None:
    """The process id of a fork that has started, later its exit code as `subprocess` gives it."""
    client.sendall(number.to_bytes(_SIZE, "big", signed=True))


def read_number(server: socket.socket) -> int:
    """What `send_number` has sent."""
    return int.from_bytes(_read(server, _SIZE), "big", signed=True)


def _read(stream: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = stream.recv(size - len(data))
        if not more:
            raise EOFError(f"{len(data)} of {size} bytes")
        data += more
    return bytes(data)
