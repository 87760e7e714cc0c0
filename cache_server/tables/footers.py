"""Reads Parquet footers; one that would end the process is refused.

pyarrow aborts on some damaged and encrypted footers. So another process looks at each footer first
(`footer_check`). It is started at the first footer, and again when it has ended.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from cache_server.sql.formats.footer_bytes import encrypted_columns
from cache_server.tables import footer_check
from cache_server.tables.footer_check import LENGTH_BYTES

_MAGIC_BYTES = 8  # the length of the footer and "PAR1", at the very end of a file
_TAIL_BYTES = 64 * 1024  # read from the end of a file; most footers are shorter
_CHECK_S = 60.0  # for one footer
_KEEP_S = 3600.0
_ENCRYPTED = "encrypted, which is not read: write the file without encryption"


def of_path(path: str | os.PathLike[str]) -> pq.FileMetaData:
    """The footer of a file of this machine.

    Raises:
        pa.ArrowInvalid: the footer is not valid. OSError.
    """
    with open(path, "rb") as file:
        return of_file(file)


def of_file(file: BinaryIO | pa.NativeFile) -> pq.FileMetaData:
    """Like `of_path`, of a file that is open."""
    return checked(tail_of(file))


def tail_of(file: BinaryIO | pa.NativeFile) -> bytes:
    """The end of a file that is open: see `read_tail`."""

    def last(num_bytes: int) -> bytes:
        file.seek(size - num_bytes)
        return bytes(file.read(num_bytes))

    size = file.seek(0, os.SEEK_END)
    return read_tail(size, last)


def read_tail(size: int, last: Callable[[int], bytes]) -> bytes:
    """The end of a file, with all of its footer; read once if the footer has a usual size.

    Args:
        size: bytes of the file.
        last: returns the last bytes of the file, as many as given.
    """
    tail = last(min(size, _TAIL_BYTES))
    length = _footer_bytes(tail) + _MAGIC_BYTES
    if tail[-4:] == b"PAR1" and len(tail) < length <= size:
        tail = last(length)
    return tail


def checked(tail: bytes) -> pq.FileMetaData:
    """The footer in the end of a file.

    Raises:
        pa.ArrowInvalid: it is not valid.
    """
    if (fault := first_fault([tail])) is not None:
        raise pa.ArrowInvalid(fault[1])
    return parsed(tail)


def parsed(tail: bytes) -> pq.FileMetaData:
    """A footer that `first_fault` has checked, or checks before a column of it is looked at."""
    return pq.read_metadata(pa.BufferReader(tail))


def first_fault(tails: Sequence[bytes]) -> tuple[int, str] | None:
    """The index of the first footer that cannot be read, and the reason; None if all can."""
    for index, tail in enumerate(tails):
        if tail[-4:] == b"PARE":
            return index, f"it is {_ENCRYPTED}"
    # Only the footers themselves: a signature after the footer is a sign of encryption.
    if (fault := _CHECKER.first_fault(list(map(_end_of, tails)))) is None:
        return None
    if names := encrypted_columns(tails[fault[0]]):
        return fault[0], f"column {', '.join(map(repr, names))} is {_ENCRYPTED}"
    return fault


def _end_of(tail: bytes) -> bytes:
    """The footer alone, with its length."""
    return tail[-_footer_bytes(tail) - _MAGIC_BYTES :]


class KnownFooters:
    """Footers that were read and checked, by any key; keeps those of the last hour. Thread-safe.

    A table that grew is planned without reading the old footers again.

    Args:
        max_bytes: of all; then further ones are not kept.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[Hashable, tuple[bytes, float]] = OrderedDict()  # the oldest first
        self._num_bytes = 0

    def get(self, key: Hashable) -> bytes | None:
        """The footer that was added under this key."""
        with self._lock:
            if (found := self._known.pop(key, None)) is None:
                return None
            self._known[key] = found[0], self._clock()
            return found[0]

    def add(self, key: Hashable, footer: bytes) -> None:
        """Keeps a footer, if there is room beside those that were used lately."""
        with self._lock:
            while self._known and self._num_bytes + len(footer) > self._max_bytes:
                oldest, (old, used_s) = next(iter(self._known.items()))
                if self._clock() - used_s < _KEEP_S:
                    return
                del self._known[oldest]
                self._num_bytes -= len(old)
            if key not in self._known and len(footer) <= self._max_bytes:
                self._known[key] = footer, self._clock()
                self._num_bytes += len(footer)


def _footer_bytes(tail: bytes) -> int:
    return int.from_bytes(tail[-_MAGIC_BYTES:-4], "little")


class _Checker:
    """Asks the other process. Thread-safe; a fork of this process starts another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        self._owner = 0  # the process that started it
        self._socket: socket.socket

    def first_fault(self, tails: Sequence[bytes]) -> tuple[int, str] | None:
        """The index of the first footer that cannot be read, and the reason."""
        done = 0
        with self._lock:
            while True:
                is_new = self._process is None or self._owner != os.getpid()
                if is_new:
                    self._start()
                answers, ended = self._ask(tails[done:])
                for index, reason in enumerate(answers, done):
                    if reason:
                        return index, reason
                done += len(answers)
                if ended is None:
                    return None
                if is_new and not answers:  # an older process may have ended for another reason
                    how = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
                    return done, f"it is damaged: it ends the process that reads it ({how})"

    def _ask(self, tails: Sequence[bytes]) -> tuple[list[str], int | None]:
        """The answers, and the exit code of the process if it ended."""
        answers: list[str] = []
        with suppress(OSError):  # it ended; some answers may be there
            # All answers fit into the buffer of the socket.
            self._socket.sendall(
                b"".join(len(tail).to_bytes(LENGTH_BYTES, "little") + tail for tail in tails)
            )
        try:
            for _ in tails:
                length = int.from_bytes(self._receive(LENGTH_BYTES), "little")
                answers.append(self._receive(length).decode())
            return answers, None
        except (OSError, EOFError):
            assert self._process is not None
            process, self._process = self._process, None
            self._socket.close()
            process.kill()  # if it hangs
            return answers, process.wait()

    def _receive(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            if not (piece := self._socket.recv(num_bytes - len(received))):
                raise EOFError
            received += piece
        return bytes(received)

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_CHECK_S)
        with theirs:
            self._process = Popen(
                [sys.executable, "-I", str(Path(footer_check.__file__))],
                stdin=theirs.fileno(),
                stdout=DEVNULL,
                stderr=DEVNULL,  # Arrow writes the reason there when it aborts
                start_new_session=True,  # a terminal sends SIGINT to a session
            )
        self._owner = os.getpid()

    def close(self) -> None:
        """Ends the process, if this one started it."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._socket.close()
                self._process.wait()
                self._process = None


_CHECKER = _Checker()
atexit.register(_CHECKER.close)
