"""A container as a process of this machine, with everything that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Self

import psutil

from cache_runtimes.local.pods import Process

# In the environment of all processes of a container, so that none of them is left behind.
_MARK = "RUN_LOCAL_CONTAINER"
_MAX_MESSAGE_LENGTH = 2_048
_ERROR = re.compile(r"\w(Error|Exception): \S")
_PIPE_TIMEOUT_S = 5.0

Log = Callable[[str], None]


@dataclass(frozen=True)
class Output:
    """The reading end of a pipe for what a container says.

    Not asyncio's own: with that, its `wait` does not return while a child of the program, which may
    outlive it, holds the pipe.
    """

    lines: asyncio.StreamReader
    close: Callable[[], None]

    @classmethod
    async def open(cls) -> tuple[Self, BinaryIO]:
        """The pipe, and its other end."""
        reading, writing = os.pipe()
        source, sink = os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0)
        lines = asyncio.StreamReader()
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(lines), source
            )
        except BaseException:
            source.close()
            sink.close()
            raise
        return cls(lines, transport.close), sink


class RunningContainer:
    """A running process; its lines go to a log.

    Not for several threads: all of it runs in one event loop.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        plan: Process,
        mark: str,
        output: Output,
        log: Log,
    ) -> None:
        self._process = process
        self._plan = plan
        self._mark = mark
        self._output = output
        self._log = log
        self._log_error: Exception | None = None
        self._log_failed = asyncio.Event()
        self._pump = asyncio.create_task(self._pump_lines(output.lines))
        self._last_lines = {True: "", False: ""}  # of those that name an error, and of others

    @property
    def last_line(self) -> str:
        """The last line that names an error, else the last one: torchrun says more after it."""
        return self._last_lines[True] or self._last_lines[False]

    @classmethod
    async def start(cls, process: Process, log: Log) -> Self:
        """Starts it.

        Raises:
            OSError: the program or its directory cannot be used.
        """
        mark = uuid.uuid4().hex
        output, sink = await Output.open()
        with sink:
            try:
                started = await asyncio.create_subprocess_exec(
                    *process.argv,
                    env={**process.environment, _MARK: mark},
                    cwd=process.directory,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sink,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,  # a terminal's interrupt is for run-local alone
                )
            except BaseException:
                output.close()
                raise
        return cls(started, process, mark, output, log)

    @property
    def is_alive(self) -> bool:
        """Whether the process itself has not ended."""
        return self._process.returncode is None

    async def ends_within(self, seconds: float) -> bool:
        """Waits so long, or until the process itself has ended; whether it has."""
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def wait(self) -> int:
        """The exit code, once the process and everything that it started are gone.

        Raises:
            OSError: its lines cannot be logged; while it runs.
        """
        exited = asyncio.create_task(self._process.wait())
        failed = asyncio.create_task(self._log_failed.wait())
        try:
            await asyncio.wait((exited, failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
            failed.cancel()
        if self._log_error is not None:
            raise self._log_error
        return await self._end()

    async def execute(self, command: Sequence[str], timeout_s: float) -> int | None:
        """The exit code of a command in the container; None when it did not end in time.

        Raises:
            OSError: there is no such program.
        """
        nowhere = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**self._plan.environment, _MARK: self._mark},
            cwd=self._plan.directory,
            stdin=nowhere,
            stdout=nowhere,
            stderr=nowhere,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await process.wait()
        except TimeoutError:
            return None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, and after ``grace_s`` SIGKILL; the exit code.

        Raises:
            OSError: its lines could not be logged; not before it has ended.
        """
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            if not await self.ends_within(grace_s):
                _kill(self._marked())
        return await self._end()

    async def _end(self) -> int:
        code = await self._process.wait()
        _kill(self._marked())
        # Whoever escaped the kill may hold the pipe: its lines are not waited for.
        await asyncio.wait((self._pump,), timeout=_PIPE_TIMEOUT_S)
        self._pump.cancel()
        self._output.close()
        if self._log_error is not None:
            raise self._log_error
        return 128 - code if code < 0 else code

    def _marked(self) -> Iterator[psutil.Process]:
        """Every process of the container: also those whose parent is gone."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark:
                    yield process
            except (psutil.Error, OSError):
                continue

    async def _pump_lines(self, pipe: asyncio.StreamReader) -> None:
        rest = b""
        while data := await pipe.read(65_536):
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                self._say(line)
            if len(rest) > 65_536:
                self._say(rest)
                rest = b""
        self._say(rest)

    def _say(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._last_lines[bool(_ERROR.search(text))] = text[:_MAX_MESSAGE_LENGTH]
            self._pass_on(text)

    def _pass_on(self, text: str) -> None:
        """After a failure the pipe is read on: a process that is stopped may still say much."""
        if self._log_error is not None:
            return
        try:
            self._log(text)
        except Exception as error:  # raised where the container is waited for
            self._log_error = error
            self._log_failed.set()


def _kill(processes: Iterator[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
