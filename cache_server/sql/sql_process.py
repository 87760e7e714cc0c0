"""Runs functions of this package in processes apart, with limits of memory and time.

SQL that takes too much ends such a process, and not the node. See `sql_program`, the program; and
`bounded`, which says for which queries of loads that is needed. Row expressions always run so.
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
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import IO, Any, TypeAlias

import pyarrow as pa

from cache_protocol.cli.output import size
from cache_protocol.errors import CacheError, RequestError, from_proto, to_proto
from cache_protocol.storage.machine import MACHINE_BYTES
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.sql.sql_frames import IDLE_S, Channel, Kind, Request, batch_of, call_of

_PROGRAM = Path(__file__).with_name("sql_program.py")
_SPARE, _MOST_IDLE = 2, 3  # see `Pool`
_SEND_S = 60.0  # for a request, or for rows that the process asked for
_PLAN_BYTES, _PLAN_S = 1 << 30, 30.0
_NO_MEMORY = b"memory allocation of "  # as Rust says it


class LimitError(Exception):
    """A process ended before its answer; the message is a verb and its object."""


def _always() -> None:
    pass


def _num_bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # the call reports it
        return 0


@dataclass(frozen=True)
class Limits:
    """What a call may take.

    Attributes:
        memory_bytes: of address space; more ends the process.
        time_s: until its end; None: any.
        check: called all the time; raises an error when the result is no longer needed.
    """

    memory_bytes: int = MACHINE_BYTES // 2
    time_s: float | None = None
    check: Callable[[], None] = _always

    def beside(self, files: Iterable[Path]) -> Limits:
        """The same for a call that may map files, or the files in folders, of this machine."""
        found = [file for path in files for file in ([path], path.glob("*"))[path.is_dir()]]
        return replace(self, memory_bytes=self.memory_bytes + sum(map(_num_bytes, found)))


ANY = Limits()
Compute: TypeAlias = Callable[[str, pa.RecordBatch], pa.Array]
PLANNING = Limits(_PLAN_BYTES, _PLAN_S)


class SqlProcess:
    """One process. Not thread-safe.

    Attributes:
        is_started: it has answered before.
        is_usable: false after its end, or if it should be replaced.
        known: what its user wrote down of what it keeps.
    """

    def __init__(self) -> None:
        connection, theirs = socket.socketpair()
        connection.settimeout(_SEND_S)
        self._errors: IO[bytes] = os.fdopen(os.memfd_create("sql-errors"), "r+b")
        with theirs:
            self._process = Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=theirs.fileno(),
                stdout=DEVNULL,
                stderr=self._errors,
                # No secrets; one thread of DataFusion, and few arenas, which take address space.
                env={
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "TOKIO_WORKER_THREADS": "1",
                    "MALLOC_ARENA_MAX": "2",
                    "RAYON_NUM_THREADS": "1",  # of functions: each process has one processor
                    "ARROW_DEFAULT_MEMORY_POOL": "system",
                },
                cwd="/",
                start_new_session=True,  # a terminal sends SIGINT to a session
            )
        self._socket = connection
        self._channel = Channel(connection)
        self._used_s = time.monotonic()
        self.is_started = False
        self.is_usable = True
        self.known: set[str] = set()

    @property
    def is_alive(self) -> bool:
        """Whether it waits for a call; it ends when none comes."""
        idle_s = time.monotonic() - self._used_s
        return self._process.poll() is None and idle_s < IDLE_S / 2

    def run(
        self,
        request: Request,
        limits: Limits,
        *,
        lots: Iterable[pa.RecordBatch] = (),
        note: Callable[[str], None] = lambda text: None,
        functions: Compute | None = None,
    ) -> Generator[pa.RecordBatch, None, Any]:
        """Yields the batches of a call; returns its value.

        Args:
            functions: computes a bound function for a batch of its arguments; None: no call may be.

        Raises:
            LimitError: it took more than the limits, or was killed.
            CacheError: of the function. What ``limits.check`` raises.
        """
        self.is_usable = False  # until its answer is complete
        self._channel.check = limits.check
        waiting, value = iter(lots), None
        try:
            if not self.is_started:
                self._channel.receive()
                self.is_started = True
            begun = time.monotonic()

            def check() -> None:
                limits.check()
                if limits.time_s is not None and time.monotonic() - begun > limits.time_s:
                    raise LimitError(f"took longer than {limits.time_s:g} s")

            self._channel.check = check
            self._channel.send(Kind.REQUEST, pickle.dumps(request))
            while True:
                kind, payload = self._channel.receive()
                if kind is Kind.BATCH:
                    yield batch_of(payload)
                    check()
                elif kind is Kind.NEXT:
                    if (lot := next(waiting, None)) is None:
                        self._channel.send(Kind.END)
                    else:
                        self._channel.send_batch(lot)
                elif kind is Kind.CALL:
                    self._answer_call(functions, payload)
                elif kind is Kind.NOTE:
                    note(payload.to_pybytes().decode())
                elif kind is Kind.VALUE:
                    value = pickle.loads(payload)
                elif kind is Kind.ERROR:
                    value = from_proto(pb.Error.FromString(payload.to_pybytes()))
                else:
                    self.is_usable = payload.to_pybytes() == b"\0"
                    self._used_s = time.monotonic()
                    break
        except EOFError:
            raise LimitError(self._end(limits)) from None
        if isinstance(value, CacheError):
            raise value
        return value

    def _answer_call(self, functions: Compute | None, payload: pa.Buffer) -> None:
        name, batch = call_of(payload)
        try:
            if functions is None:
                raise RequestError("installed functions are not computed here")
            values = functions(name, batch)
        except CacheError as error:
            self._channel.send(Kind.ERROR, to_proto(error).SerializeToString())
        else:
            self._channel.send_batch(pa.record_batch([values], ["value"]))

    def _end(self, limits: Limits) -> str:
        """How the process ended."""
        with suppress(Exception):
            self._process.wait(1)
        self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        if _NO_MEMORY in (said := self._errors.read()) or code == -signal.SIGABRT:
            return f"needed more than {size(limits.memory_bytes)} of memory"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        return " ".join([f"ended its process ({how})", *last])

    def close(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
        self._errors.close()

    def forget(self) -> None:
        """Closes the files of a process of the parent, after a fork."""
        self._socket.close()
        self._errors.close()
        self._process.returncode = 0  # it is no child of this process


class Pool:
    """Processes that wait for the next call. Thread-safe.

    A process needs half a second to start. So while several are in use, further ones start.

    Args:
        most_idle: processes that are kept for later.
        spare: that start while several are in use.
    """

    def __init__(self, most_idle: int = _MOST_IDLE, spare: int = _SPARE) -> None:
        self._most_idle, self._spare = most_idle, spare
        self._lock = threading.Lock()
        self._idle: list[SqlProcess] = []
        self._num_used = 0

    @contextmanager
    def lease(self) -> Iterator[SqlProcess]:
        """A process for one caller; it ends with an error or an incomplete call."""
        process = self._taken()
        try:
            yield process
        finally:
            with self._lock:
                self._num_used -= 1
                keeps = process.is_usable and len(self._idle) < self._most_idle
                if keeps:
                    self._idle.append(process)
            if not keeps:
                process.close()

    def _taken(self) -> SqlProcess:
        with self._lock:
            ended = [process for process in self._idle if not process.is_alive]
            self._idle = [process for process in self._idle if process.is_alive]
            self._idle.sort(key=lambda process: process.is_started)
            process = self._idle.pop() if self._idle else SqlProcess()
            self._num_used += 1
            while self._num_used > 1 and len(self._idle) < self._spare:
                self._idle.append(SqlProcess())
        for other in ended:
            other.close()
        return process

    def close(self) -> None:
        """Ends those that wait."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()

    def forget(self) -> None:
        """Leaves the processes to the parent, after a fork."""
        idle = self._idle
        self._idle, self._num_used, self._lock = [], 0, threading.Lock()
        for process in idle:
            process.forget()


_POOL = Pool()
atexit.register(_POOL.close)
os.register_at_fork(after_in_child=_POOL.forget)
lease = _POOL.lease


def stream(
    function: Callable[..., Iterator[pa.RecordBatch]],
    *arguments: Any,
    limits: Limits,
    failure: Callable[[str], CacheError],
    note: Callable[[str], None] | None = None,
    functions: Compute | None = None,
) -> Iterator[pa.RecordBatch]:
    """The batches of a function that another process runs.

    Args:
        failure: makes the error of a process that ended, from the reason: a verb and its object.
        note: given to the function, if it takes one.
        functions: see `SqlProcess.run`.

    Raises:
        CacheError: of the function, or of ``failure``. What ``limits.check`` raises.
    """
    request = Request(
        function, arguments, memory_bytes=limits.memory_bytes, takes_notes=note is not None
    )
    with lease() as process:
        try:
            yield from process.run(
                request, limits, note=note or (lambda text: None), functions=functions
            )
        except LimitError as error:
            raise failure(str(error)) from None


def call(
    function: Callable[..., Any],
    *arguments: Any,
    failure: Callable[[str], CacheError],
    limits: Limits = PLANNING,
    **options: Any,
) -> Any:
    """The value of a function that another process runs; see `stream`."""
    request = Request(function, arguments, options, limits.memory_bytes)
    with lease() as process:
        try:
            return value_of(process.run(request, limits))
        except LimitError as error:
            raise failure(str(error)) from None


def value_of(running: Generator[pa.RecordBatch, None, Any]) -> Any:
    """The value of a call that yields no batch."""
    try:
        next(running)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a call with a value has no batches")
