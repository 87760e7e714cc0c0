"""Ports for programs that must be told theirs before they bind them."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack

# Below those that the kernel gives to whoever asks for any: other tests do, at the same time.
_CANDIDATES = range(20_000, 32_000)


def free_port(*addresses: str) -> int:
    """One that nobody has on any of these; default: 127.0.0.1."""
    return free_ports(1, addresses or ("127.0.0.1",))[0]


def free_ports(count: int, addresses: Sequence[str]) -> list[int]:
    """So many different ones that nobody has on any of these addresses."""
    found: list[int] = []
    # Not of `random` itself, which a test may have seeded as another one does.
    for port in random.SystemRandom().sample(_CANDIDATES, len(_CANDIDATES)):
        if len(found) == count:
            return found
        with ExitStack() as stack:
            try:
                for address in addresses:
                    stack.enter_context(socket.create_server((address, port)))
            except OSError:
                continue
            found.append(port)
    raise OSError(f"no {count} ports are free in {_CANDIDATES}")
