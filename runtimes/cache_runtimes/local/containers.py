"""A container as a process of this machine, with every process that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Self

import psutil

from cache_runtimes.local.pods import MARK, Process

_MAX_LINE_BYTES = 65_536
_MAX_MESSAGE_LENGTH = 2_048
_ERROR = re.compile(r"\w(Error|Exception): \S")
_PIPE_TIMEOUT_S = 5.0

Log = Callable[[str], None]


class RunningContainer:
    """A running process; its lines go to a log. For one event loop, not for several threads."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        mark: str,
        output: asyncio.StreamReader,
        close: Callable[[], None],
        log: Log,
    ) -> None:
        self._process = process
        self._mark = mark
        self._close = close
        self._log = log
        self._last_lines = {True: "", False: ""}  # one that names an error, and any other
        self._pump = asyncio.create_task(self._pump_lines(output))

    @property
    def last_line(self) -> str:
        """The last line that names an error, else the last one: torchrun prints more after it."""
        return self._last_lines[True] or self._last_lines[False]

    @classmethod
    async def start(cls, process: Process, log: Log) -> Self:
        """Starts it.

        Raises:
            OSError: the program or its directory cannot be used.
        """
        reading, writing = os.pipe()
        # Not asyncio's pipe: its `wait` does not return while a child of the program, which may
        # outlive it, holds that pipe.
        output = asyncio.StreamReader()
        with os.fdopen(writing, "wb", 0) as sink:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading, "rb", 0)
            )
            try:
                started = await asyncio.create_subprocess_exec(
                    *process.argv,
                    env=process.environment,
                    cwd=process.directory,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sink,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,  # a terminal's interrupt is for run-local alone
                )
            except BaseException:
                transport.close()
                raise
        return cls(started, process.environment[MARK], output, transport.close, log)

    async def ends_within(self, seconds: float) -> bool:
        """Waits until the process has ended, at most ``seconds``; whether it has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()
        return self._process.returncode is not None

    async def wait(self) -> int:
        """The exit code, once the process and everything that it started are gone.

        Raises:
            OSError: its lines cannot be logged; while it runs.
        """
        exited = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait((exited, self._pump), return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
        self._raise_log_error()
        return await self._end()

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, and after ``grace_s`` SIGKILL; the exit code.

        Raises:
            OSError: its lines could not be logged; after it has ended.
        """
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            if not await self.ends_within(grace_s):
                _kill(self._marked())
        return await self._end()

    async def _end(self) -> int:
        code = await self._process.wait()
        _kill(self._marked())
        # A process that escaped the kill may hold the pipe: its lines are not waited for.
        await asyncio.wait((self._pump,), timeout=_PIPE_TIMEOUT_S)
        self._close()
        self._raise_log_error()
        self._pump.cancel()
        return 128 - code if code < 0 else code

    def _raise_log_error(self) -> None:
        if self._pump.done() and not self._pump.cancelled():
            self._pump.result()

    def _marked(self) -> Iterator[psutil.Process]:
        """Every process of the container, orphans included; sshd overwrites its environment."""
        session = self._process.pid
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                in_session = os.getsid(process.pid) == session
                if in_session or process.environ().get(MARK) == self._mark:
                    yield process

    async def _pump_lines(self, output: asyncio.StreamReader) -> None:
        """Logs every line; after a failure of the log, the process writes into a closed pipe."""
        rest = b""
        try:
            while data := await output.read(_MAX_LINE_BYTES):
                *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._pass_on(line)
            self._pass_on(rest)
        finally:
            self._close()

    def _pass_on(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._last_lines[bool(_ERROR.search(text))] = text[:_MAX_MESSAGE_LENGTH]
            self._log(text)


def _kill(processes: Iterator[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
