"""Reads Parquet footers; one that would end the process is refused.

pyarrow aborts on some damaged and encrypted footers. So another process looks at each footer first
(`footer_check`). It is started at the first footer, and again when it has ended.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from cache_protocol.datasets.dataset_spec import TableSpec
from cache_protocol.errors import LoadError, some_of
from cache_server import object_stores
from cache_server.source.pinned import SourceFile
from cache_server.sql.formats.first_bytes import FIRST_BYTES, objection
from cache_server.sql.formats.footer_bytes import encrypted_columns
from cache_server.tables import footer_check
from cache_server.tables.footer_check import LENGTH_BYTES

_MAGIC_BYTES = 8  # the length of the footer and "PAR1", at the very end of a file
_TAIL_BYTES = 64 * 1024  # read from the end of a file; most footers are shorter
_CHECK_S = 60.0  # for one footer
_KEEP_S = 3600.0
_THREADS = 32  # mostly waiting for stores
_FOOTERS_AT_ONCE = 256  # in memory as bytes
_ENCRYPTED = "encrypted, which is not read: write the file without encryption"


def read_footers(files: Sequence[SourceFile], table: TableSpec) -> tuple[pq.FileMetaData, ...]:
    """The Parquet footers of all files.

    Raises:
        LoadError: a footer cannot be read; names the file.
    """

    def tail(file: SourceFile) -> bytes:
        if object_stores.is_remote(file.path):
            return read_tail(
                file.size,
                lambda size: object_stores.read_tail(file, size, table.options, table.secrets),
            )
        try:
            with open(file.path, "rb") as opened:
                return tail_of(opened)
        except OSError as error:
            raise _no_footer(file, b"", error) from None

    def parsed_or_none(tail: bytes) -> pq.FileMetaData | None:
        with suppress(pa.ArrowInvalid, OSError):  # the check tells the reason
            return parsed(tail)
        return None

    store = hash((tuple(sorted(table.options.items())), tuple(sorted(table.secrets.items()))))
    known = {file: _KNOWN.get((file, store)) for file in files}
    # A pickle holds the bytes of the footer, and is parsed in half the time.
    found: dict[SourceFile, pq.FileMetaData] = {
        file: pickle.loads(pickled) for file, pickled in known.items() if pickled is not None
    }
    new = [file for file, pickled in known.items() if pickled is None]
    with ThreadPoolExecutor(min(_THREADS, len(files))) as pool:
        for start in range(0, len(new), _FOOTERS_AT_ONCE):
            some = new[start : start + _FOOTERS_AT_ONCE]
            tails = list(pool.map(tail, some))
            parsed_footers = pool.map(parsed_or_none, tails)  # meanwhile
            if (fault := first_fault(tails)) is not None:
                index, reason = fault
                raise _bad_footer(some[index], tails[index], reason)
            found.update(zip(some, parsed_footers, strict=True))
            for file in some:
                if file.mtime_ns or file.etag:
                    _KNOWN.add((file, store), pickle.dumps(found[file]))
    return tuple(found[file] for file in files)


def read_remote_footer(file: SourceFile, last: Callable[[int], bytes]) -> pq.FileMetaData:
    """The Parquet footer of an object; one request if it has a usual size.

    Args:
        last: returns the last bytes of the object, as many as given.

    Raises:
        LoadError: the footer is not valid; names the object.
    """
    tail = read_tail(file.size, last)
    try:
        return checked(tail)
    except pa.ArrowInvalid as error:
        raise _bad_footer(file, tail, str(error)) from None


def _bad_footer(file: SourceFile, tail: bytes, reason: str) -> LoadError:
    is_remote = object_stores.is_remote(file.path)
    whole = tail if len(tail) == file.size else b""
    return _no_footer(file, whole if is_remote else _first_bytes(file.path), reason)


def _no_footer(file: SourceFile, head: bytes, error: Exception | str) -> LoadError:
    if (reason := objection(head[:FIRST_BYTES], "parquet")) is not None:
        return LoadError(f"cannot read {file.path} as parquet: {reason}")
    return LoadError(f"cannot read the Parquet footer of {file.path}: {error}")


def _first_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as opened:
            return opened.read(FIRST_BYTES)
    except OSError:
        return b""  # the caller reports its own error


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
        return fault[0], f"column {some_of(map(repr, names))} is {_ENCRYPTED}"
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


_KNOWN = KnownFooters(64 * 1024 * 1024)
_CHECKER = _Checker()
atexit.register(_CHECKER.close)
