"""One pod: init containers, sidecars, containers, restarts in place, probes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runtimes.local.containers import RunningContainer
from runtimes.local.pods import Pod, Process
from runtimes.local.policies import ContainerExit, is_sidecar, restarts_in_place
from runtimes.local.probes import probe

Json = dict[str, Any]

_DEFAULT_GRACE_S = 30.0
# Until a container is ready it is asked so often; a kubelet waits periodSeconds.
_MAX_WAIT_FOR_READY_S = 0.5


@dataclass(frozen=True)
class Backoff:
    """Seconds before something is started again: they double up to a limit.

    A cluster waits longer (10 s up to 5 min): on one machine nobody else is disturbed.
    """

    first_s: float = 0.5
    limit_s: float = 10.0

    def delay_s(self, failures: int) -> float:
        """Before the next start after ``failures`` of them."""
        return float(min(self.limit_s, self.first_s * 2 ** max(0, min(failures - 1, 30))))


@dataclass(frozen=True)
class Events:
    """Whom a pod tells what happens in it.

    Attributes:
        log: the container and a line of it.
        restarted: a container was started again in place; it may raise to give the pod up.
        changed: the pod may have become ready, or no longer be it.
    """

    log: Callable[[str, str], None]
    restarted: Callable[[ContainerExit], None]
    changed: Callable[[], None]


class PodRun:
    """Runs one pod, once. All in one event loop."""

    def __init__(
        self, pod: Pod, processes: Mapping[str, Process], events: Events, backoff: Backoff
    ) -> None:
        self._pod = pod
        self._processes = processes
        self._events = events
        self._backoff = backoff
        self._ready: dict[str, bool] = {}

    @property
    def is_ready(self) -> bool:
        """Whether all containers run and every readiness probe succeeds."""
        sidecars = filter(is_sidecar, self._pod.spec.get("initContainers") or ())
        wanted = [*sidecars, *self._pod.spec["containers"]]
        return all(self._ready.get(container["name"], False) for container in wanted)

    async def run(self) -> list[ContainerExit]:
        """Runs the pod to its end; how its containers ended, or the init container that failed.

        Cancelled, it stops every container within terminationGracePeriodSeconds.
        """
        sidecars: list[asyncio.Task[ContainerExit]] = []
        try:
            for container in self._pod.spec.get("initContainers") or ():
                started = asyncio.Event()
                task = asyncio.create_task(self._supervise(container, started))
                if is_sidecar(container):
                    sidecars.append(task)
                    await self._until_started(started, task)
                    continue
                async with _cancelled_with(task):
                    ended = await task
                if ended.code != 0:
                    return [ended]
            return await self._run_beside(sidecars)
        finally:
            for task in reversed(sidecars):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            self._ready.clear()

    async def _run_beside(self, sidecars: list[asyncio.Task[ContainerExit]]) -> list[ContainerExit]:
        """Runs the containers to their end; a sidecar that is given up is the end of all."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._supervise(container, asyncio.Event()))
                for container in self._pod.spec["containers"]
            ]
            pending = {*tasks, *sidecars}
            while not all(task.done() for task in tasks):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        return [task.result() for task in tasks]

    async def _until_started(
        self, started: asyncio.Event, task: asyncio.Task[ContainerExit]
    ) -> None:
        waiting = asyncio.create_task(started.wait())
        async with _cancelled_with(waiting):
            await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()

    async def _supervise(self, container: Json, started: asyncio.Event) -> ContainerExit:
        """Runs a container, again and again where its policy says so."""
        failures = 0
        while True:
            ended = await self._run_once(container, started)
            if not restarts_in_place(container, self._pod.spec, ended.code):
                return ended
            failures += 1
            self._events.restarted(ended)
            await asyncio.sleep(self._backoff.delay_s(failures))

    async def _run_once(self, container: Json, started: asyncio.Event) -> ContainerExit:
        name = container["name"]
        process = self._processes[name]

        def log(line: str) -> None:
            self._events.log(name, line)

        try:
            running = await RunningContainer.start(process, log)
        except OSError as error:
            return ContainerExit(name, 128, f"cannot start {process.argv[0]!r}: {error}")
        probes = asyncio.create_task(self._probe(container, running, started))
        try:
            code = await running.wait()
            if probes.done() and not probes.cancelled():
                probes.result()  # a probe that cannot be made is an error of the manifest
        except asyncio.CancelledError:
            await running.stop(self._grace_s)
            raise
        finally:
            probes.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probes
            self._set_ready(name, None)
        return ContainerExit(name, code, running.last_line)

    @property
    def _grace_s(self) -> float:
        return float(self._pod.spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S))

    async def _probe(
        self, container: Json, running: RunningContainer, started: asyncio.Event
    ) -> None:
        name = container["name"]
        try:
            if "startupProbe" in container:
                self._set_ready(name, False)
                if not await self._startup(container):
                    self._events.log(name, "the startup probe failed: the container is stopped")
                    await running.stop(self._grace_s)
                    return
            started.set()
            if "readinessProbe" not in container:
                self._set_ready(name, True)
            async with asyncio.TaskGroup() as group:
                if "readinessProbe" in container:
                    self._set_ready(name, False)
                    group.create_task(self._readiness(container))
                if "livenessProbe" in container:
                    group.create_task(self._liveness(container, running))
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from None

    async def _startup(self, container: Json) -> bool:
        wanted = container["startupProbe"]
        period_s = float(wanted.get("periodSeconds", 10))
        loop = asyncio.get_running_loop()
        await asyncio.sleep(float(wanted.get("initialDelaySeconds", 0)))
        deadline = loop.time() + period_s * int(wanted.get("failureThreshold", 3))
        while not await self._ask(wanted, container):
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(min(period_s, _MAX_WAIT_FOR_READY_S))
        return True

    async def _readiness(self, container: Json) -> None:
        wanted = container["readinessProbe"]
        period_s = float(wanted.get("periodSeconds", 10))
        failures = 0
        await asyncio.sleep(float(wanted.get("initialDelaySeconds", 0)))
        while True:
            is_ready = await self._ask(wanted, container)
            failures = 0 if is_ready else failures + 1
            if is_ready or failures >= int(wanted.get("failureThreshold", 3)):
                self._set_ready(container["name"], is_ready)
            await asyncio.sleep(period_s if is_ready else min(period_s, _MAX_WAIT_FOR_READY_S))

    async def _liveness(self, container: Json, running: RunningContainer) -> None:
        wanted = container["livenessProbe"]
        failures = 0
        await asyncio.sleep(float(wanted.get("initialDelaySeconds", 0)))
        while failures < int(wanted.get("failureThreshold", 3)):
            await asyncio.sleep(float(wanted.get("periodSeconds", 10)))
            failures = 0 if await self._ask(wanted, container) else failures + 1
        self._events.log(container["name"], "the liveness probe failed: the container is stopped")
        await running.stop(self._grace_s)

    async def _ask(self, wanted: Json, container: Json) -> bool:
        environment = dict(self._processes[container["name"]].environment)
        return await probe(wanted, container, self._pod.address, environment)

    def _set_ready(self, name: str, ready: bool | None) -> None:
        if ready is None:
            self._ready.pop(name, None)
        else:
            self._ready[name] = ready
        self._events.changed()


@contextlib.asynccontextmanager
async def _cancelled_with(task: asyncio.Task[Any]) -> AsyncIterator[None]:
    """Ends a task with the block that waits for it, and waits until it has ended."""
    try:
        yield
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
