"""The Unix socket on which a node hands open shard files to processes of its machine.

Its name is abstract (unix(7)), so only processes in the network namespace of the node reach it. A
message is a key of the Flight action ``open_files``. The answer begins with the proof that the
action told, and brings descriptors.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from cache_protocol.errors import NodeUnavailableError

SECRET_BYTES = 32  # of a key and of a proof
MAX_REASON_BYTES = 512
FILES_AT_ONCE = 64  # Linux allows 253 in a message
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = "/proc/self/ns/net"


def open_socket() -> socket.socket:
    """A Unix socket that keeps the bounds of messages.

    Raises:
        OSError: this system has none.
    """
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def socket_name(node_id: str) -> str:
    """The abstract name of the socket of a node."""
    return f"\0trainer-data-cache/{node_id}"


def host_identity() -> str:
    """The machine, since it started, and the network namespace of this process.

    Two processes with the same identity reach the same abstract sockets.

    Raises:
        NodeUnavailableError: the system does not say.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()}/{os.stat(_NAMESPACE).st_ino}"
    except OSError as error:
        raise NodeUnavailableError(f"this machine has no identity: {error}") from None
