"""Networks that a trial cuts: namespaces, and wires to one server. Linux, as root."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from cache_server.local import LocalNode

_CHUNK = 1 << 16
_NOBODY = "02:00:00:00:00:01"  # an address on the link that no interface has


class Network:
    """Namespaces on one bridge, each with an address; a context manager.

    After a `cut`, what one sends to another one is lost without an error, as it is between
    machines. This machine has an address, too, and reaches all of them.

    Args:
        count: of namespaces.

    Attributes:
        address: of this machine.
        addresses: of the namespaces.
    """

    def __init__(self, count: int) -> None:
        self._bridge = f"dc{secrets.token_hex(3)}"
        prefix = f"10.213.{os.getpid() % 250}"
        self.address = f"{prefix}.254"
        self.addresses = [f"{prefix}.{number + 1}" for number in range(count)]

    def _name(self, index: int) -> str:
        return f"{self._bridge}-{index}"

    def __enter__(self) -> Self:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for index, address in enumerate(self.addresses):
            name = self._name(index)
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for index in range(len(self.addresses)):
            _ip("netns", "del", self._name(index))
        _ip("link", "del", self._bridge)

    def inside(self, index: int, command: Sequence[str]) -> list[str]:
        """A command in a namespace; it keeps its process id."""
        return ["nsenter", f"--net=/run/netns/{self._name(index)}", *command]

    def cut(self, some: Sequence[int], others: Sequence[int]) -> None:
        """Cuts some namespaces off from others, in both directions."""
        for index, address in self._between(some, others):
            entry = (address, "lladdr", _NOBODY, "nud", "permanent", "dev", "eth0")
            _ip("-n", self._name(index), "neigh", "replace", *entry)

    def mend(self, some: Sequence[int], others: Sequence[int]) -> None:
        """Lets them reach each other again."""
        for index, address in self._between(some, others):
            _ip("-n", self._name(index), "neigh", "del", address, "dev", "eth0")

    def _between(self, some: Sequence[int], others: Sequence[int]) -> list[tuple[int, str]]:
        pairs = [(one, other) for one in some for other in others]
        both = [*pairs, *((other, one) for one, other in pairs)]
        return [(index, self.addresses[other]) for index, other in both]


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class NodeInside(LocalNode):
    """A node in a namespace of a `Network`."""

    def __init__(
        self, network: Network, index: int, cache_dir: Path, arguments: Sequence[str], token: str
    ) -> None:
        self._network, self.index = network, index
        self._host = network.addresses[index]
        super().__init__(
            cache_dir, [*arguments, "--bind", self._host, "--advertise", self._host], token
        )

    def begin(self) -> None:
        """See `LocalNode`."""
        super().begin()
        self.control_location = f"{self._host}:{self.control_location.rpartition(':')[2]}"

    def _spawn(self, command: Sequence[str], log_file: IO[bytes]) -> None:
        super()._spawn(self._network.inside(self.index, command), log_file)


class Wire:
    """Forwards connections to a server, until it is cut or holds everything back.

    Args:
        host: where it listens.
        target: host and port of the server.
    """

    def __init__(self, host: str, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server((host, 0))
        self._pairs: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_cut = False
        self._flows = threading.Event()
        self._flows.set()
        self.location = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, *, silently: bool = False) -> None:
        """Breaks every connection, and lets no new one through.

        Args:
            silently: holds back what is sent instead, which comes late, once it is mended.
        """
        if silently:
            self._flows.clear()
            return
        with self._lock:
            self._is_cut = True
            pairs, self._pairs = self._pairs, []
        for each in pairs:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Lets everything through again."""
        self._is_cut = False
        self._flows.set()

    def close(self) -> None:
        """Ends it."""
        self._flows.set()
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with self._lock:
                    if self._is_cut:
                        near.close()
                        continue
                    far = socket.create_connection(self._target)
                    self._pairs += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(_CHUNK):
                self._flows.wait()
                other.sendall(data)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
