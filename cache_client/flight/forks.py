"""Shuts gRPC down before this process forks.

gRPC does not survive a fork: if the parent used it, a child that uses it hangs or aborts. So before
a fork this module closes every stream and connection, down to the last reference that keeps gRPC
alive, and waits for its threads. docs/decisions/0003 has the evidence. Knows nothing of Flight.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from cache_protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_GRPC_THREADS = {"event_engine", "grpc_global_tim", "lifeguard", "grpc_shutdown"}
_NAMELESS_S = 0.1  # a thread has its name before that
_ENDED = -1  # stands for a thread that ended during a look
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
# How long a fork waits for calls, whose deadlines are shorter, and then for gRPC's threads.
_CALLS_WAIT_S, _THREADS_WAIT_S = 60.0, 2.0
_PROBE_S = 8.0  # less than `connections.REQUEST_TIMEOUT_S`, after which other nodes are asked


class Closable(Protocol):
    """Something that keeps gRPC alive until it is closed."""

    def close(self) -> None:
        """Releases gRPC; a second call does nothing."""


class ForkGate:
    """Keeps gRPC out of forks. Thread-safe.

    Before a fork it blocks new calls, closes what is open, and waits for running calls, then for
    gRPC's threads. After the fork, calls go on.
    """

    def __init__(self) -> None:
        # Always enter the lock, never the condition. The condition's `__enter__` is Python: an
        # interrupt just after it takes the lock would leave it taken, and block every later call.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._open: tuple[weakref.WeakSet[Closable], ...] = (weakref.WeakSet(), weakref.WeakSet())
        # By thread: if an interrupt skips a countdown, the thread must still be able to fork.
        self._running: Counter[int] = Counter()
        self._forking = 0
        # gRPC threads that were there before this package used gRPC: of other libraries.
        self._of_others: set[int] | None = None
        self._grpc_at_fork = False  # some gRPC is alive while this process forks
        self._in_doubt = False  # some gRPC was alive when this process was forked
        self._probing = threading.Lock()

    def use(self) -> None:
        """Notes that this package uses gRPC from now on, so that the next fork waits for it."""
        with self._lock:
            if self._of_others is None:
                self._of_others = _grpc_threads() - {_ENDED}

    def require_answers(self, probe: Callable[[], None]) -> None:
        """Raises an error if gRPC answers nothing in this process, because of a fork.

        Most libraries that use gRPC have a copy of it. Their forks do no harm to Arrow's copy, but
        one beside another user of Arrow Flight does. Only a call can tell. It may hang or abort its
        process, so a child of this process makes it. Costs nothing in a process that was not forked
        beside any gRPC.

        Args:
            probe: makes a call that ends in milliseconds where gRPC works.

        Raises:
            ConfigError: the call did not end, or ended its process; says what to do.
        """
        if not self._in_doubt:
            return
        with self._probing:
            if not self._in_doubt:
                return
            self._in_doubt = not _ends_in_a_child(probe, _PROBE_S)
            if self._in_doubt:
                raise ConfigError(
                    f"process {os.getpid()} was forked from one that used Arrow Flight elsewhere, "
                    "too, and gRPC does not survive that: Flight answers nothing here. Start "
                    "DataLoader workers with multiprocessing_context='spawn', as in "
                    "dataset.loader(num_workers=2, multiprocessing_context='spawn'), or close the "
                    "other Flight client or server before workers start"
                )

    def add(self, user: Closable, *, last: bool = False) -> None:
        """Registers what to close before a fork; ``last``: after everything that uses it."""
        with self._lock:
            self._open[last].add(user)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Surrounds a call into Flight; waits while the process forks."""
        with self._lock:
            while self._forking > 0:
                self._changed.wait()
            thread = self._enter()
        try:
            yield
        finally:
            self._leave(thread)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Surrounds the closing of a connection or stream; never waits for a fork."""
        with self._lock:
            thread = self._enter()
        try:
            yield
        finally:
            self._leave(thread)

    def _enter(self) -> int:
        self.use()
        thread = threading.get_ident()
        self._running[thread] += 1
        return thread

    def _leave(self, thread: int) -> None:
        """Counts down ``thread``; another thread may do it when it collects an iterator."""
        with self._lock:
            self._running[thread] -= 1
            self._running = +self._running  # without zero counts
            self._changed.notify_all()

    def before_fork(self) -> None:
        """Closes everything and waits until gRPC is gone, for a bounded time.

        It does not wait for threads that were there before this package used gRPC. Libraries such
        as Ray and JAX have another gRPC, which may live as long as the process.
        """
        here = {threading.get_ident()}
        with self._lock:
            self._forking += 1
        self._close_all()  # cancels running streams
        with self._lock:
            self._changed.wait_for(lambda: self._running.keys() <= here, _CALLS_WAIT_S)
        self._close_all()  # and what they were opening meanwhile
        with self._lock:
            of_others, self._of_others = self._of_others, None
        if of_others is not None:
            self._wait_for_threads(of_others)
        self._grpc_at_fork = bool(_grpc_threads(young=False))

    @staticmethod
    def _wait_for_threads(of_others: set[int]) -> None:
        deadline = time.monotonic() + _THREADS_WAIT_S
        while _grpc_threads() - of_others:
            if time.monotonic() > deadline:
                logger.warning(
                    "threads of gRPC still run %g s after its connections were closed: if they "
                    "belong to no other library, a child of this fork may hang when it reads",
                    _THREADS_WAIT_S,
                )
                return
            time.sleep(0.001)

    def _close_all(self) -> None:
        with self._lock:
            users = [user for users in self._open for user in users]
        for user in users:
            user.close()

    def after_fork_in_parent(self) -> None:
        """Lets calls start again."""
        with self._lock:
            self._forking = max(0, self._forking - 1)
            self._changed.notify_all()

    def after_fork_in_child(self) -> None:
        """Starts anew: the calling threads of the parent do not exist here."""
        in_doubt = self._in_doubt or self._grpc_at_fork
        self.__init__()  # type: ignore[misc]  # as new
        self._in_doubt = in_doubt


def _ends_in_a_child(call: Callable[[], None], timeout_s: float) -> bool:
    """Whether ``call`` ends within ``timeout_s`` in a child of this process."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
        finally:
            os.write(write_end, b"1")
            os._exit(0)
    try:
        os.close(write_end)
        poll = select.poll()
        poll.register(read_end, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000) and os.read(read_end, 1))
    finally:
        os.close(read_end)
        with suppress(ProcessLookupError, ChildProcessError):  # SIGCHLD may be ignored here
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _grpc_threads(*, young: bool = True) -> set[int]:
    """The threads of gRPC in this process, by their ids; Linux only, elsewhere none.

    A thread that gRPC has just started, for example to shut down, has no name yet: so every young
    thread that is not Python's counts, if ``young``. A thread that ends during this call counts
    then, too: it may have started another one that this call does not see.
    """
    python, found = {thread.native_id for thread in threading.enumerate()}, set()
    for task in Path("/proc/self/task").glob("*"):
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            if young:
                found.add(_ENDED)
            continue
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(rest.split()[19]) / _TICKS_A_SECOND
        nameless = young and int(task.name) not in python and age_s < _NAMELESS_S
        if name in _GRPC_THREADS or nameless:
            found.add(int(task.name))
    return found


fork_gate = ForkGate()
os.register_at_fork(
    before=fork_gate.before_fork,
    after_in_parent=fork_gate.after_fork_in_parent,
    after_in_child=fork_gate.after_fork_in_child,
)
