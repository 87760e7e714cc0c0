"""A container as a process of this machine, with everything that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from typing import Self

import psutil

from runtimes.local.pods import Process

# In the environment of all processes of a container, so that none of them is left behind.
_MARK = "RUN_LOCAL_CONTAINER"
_MAX_MESSAGE_LENGTH = 2_048
_PIPE_TIMEOUT_S = 5.0

Log = Callable[[str], None]


class RunningContainer:
    """A running process; its lines go to a log.

    Not for several threads: all of it runs in one event loop.
    """

    def __init__(self, process: asyncio.subprocess.Process, mark: str, log: Log) -> None:
        self._process = process
        self._mark = mark
        self._log = log
        self._pump = asyncio.create_task(self._pump_lines())
        self.last_line = ""

    @classmethod
    async def start(cls, process: Process, log: Log) -> Self:
        """Starts it.

        Raises:
            OSError: the program or its directory cannot be used.
        """
        mark = uuid.uuid4().hex
        started = await asyncio.create_subprocess_exec(
            *process.argv,
            env={**process.environment, _MARK: mark},
            cwd=process.directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # a terminal's interrupt is for run-local alone
        )
        return cls(started, mark, log)

    async def wait(self) -> int:
        """The exit code, once the process and everything that it started are gone."""
        code = await self._process.wait()
        _kill(self._marked())
        # Whoever escaped the kill may hold the pipe: its lines are not waited for.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PIPE_TIMEOUT_S):
                await self._pump
        return 128 - code if code < 0 else code

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, and after ``grace_s`` SIGKILL; the exit code."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                _kill(self._marked())
        return await self.wait()

    def _marked(self) -> Iterator[psutil.Process]:
        """Every process of the container: also those whose parent is gone."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark:
                    yield process
            except (psutil.Error, OSError):
                continue

    async def _pump_lines(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
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
            self.last_line = text[:_MAX_MESSAGE_LENGTH]
            self._log(text)


def _kill(processes: Iterator[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            os.kill(process.pid, signal.SIGKILL)
