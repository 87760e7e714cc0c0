"""One pod: init containers, sidecars, containers, restarts in place, probes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from cache_runtimes.local.containers import RunningContainer
from cache_runtimes.local.pods import Pod, Process
from cache_runtimes.local.policies import ContainerExit, is_sidecar, restarts_in_place
from cache_runtimes.local.probes import probe

Json = dict[str, Any]

_DEFAULT_GRACE_S = 30.0
_MIN_GRACE_S = 2.0  # after a hook that took it all: minimumGracePeriodInSeconds
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

        Cancelled, it stops every container within terminationGracePeriodSeconds, and is not done
        before they have ended, however often it is cancelled.
        """
        sidecars: list[asyncio.Task[ContainerExit]] = []
        try:
            for container in self._pod.spec.get("initContainers") or ():
                started = asyncio.Event()
                if is_sidecar(container):
                    sidecars.append(asyncio.create_task(self._supervise(container, started)))
                    await _until_started(started, sidecars[-1])
                    continue
                ended = await self._supervise(container, started)
                if ended.code != 0:
                    return [ended]
            return await self._run_beside(sidecars)
        finally:
            await to_the_end(self._stop_sidecars(sidecars))

    async def _stop_sidecars(self, sidecars: list[asyncio.Task[ContainerExit]]) -> None:
        """Stops them one after the other, the last one first; then raises what one failed by."""
        for task in reversed(sidecars):
            task.cancel()
            await asyncio.wait((task,))
        self._ready.clear()
        for task in sidecars:
            if not task.cancelled():
                task.result()

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
        ended = asyncio.create_task(running.wait())
        probes = asyncio.create_task(self._probe(process.container, running, started))
        try:
            await asyncio.wait((ended, probes), return_when=asyncio.FIRST_COMPLETED)
            if probes.done():
                probes.result()
            code = await ended
        finally:
            await to_the_end(self._end(process.container, running, ended, probes))
        return ContainerExit(name, code, running.last_line)

    async def _end(
        self,
        container: Json,
        running: RunningContainer,
        ended: asyncio.Task[int],
        probes: asyncio.Task[None],
    ) -> None:
        """Leaves nothing of a container, whether it has ended or has to be stopped."""
        for task in (ended, probes):
            task.cancel()
        await asyncio.wait((ended, probes))
        try:
            if ended.cancelled() or ended.exception() is not None:
                await self._stop(container, running)
        finally:
            self._set_ready(container["name"], None)
        if not probes.cancelled():
            probes.result()

    async def _stop(self, container: Json, running: RunningContainer) -> None:
        """The hook before the stop, then the stop, within the pod's grace.

        ``killContainer`` of pkg/kubelet/kuberuntime/kuberuntime_container.go.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._grace_s
        hook = (container.get("lifecycle") or {}).get("preStop")
        if hook is not None and running.is_alive:
            await self._before_stop(hook, container["name"], running)
        await running.stop(max(_MIN_GRACE_S, deadline - loop.time()))

    async def _before_stop(self, hook: Json, name: str, running: RunningContainer) -> None:
        if "sleep" in hook:
            await running.ends_within(min(float(hook["sleep"]["seconds"]), self._grace_s))
            return
        try:
            code = await running.execute(hook["exec"]["command"], self._grace_s)
        except OSError as error:
            self._events.log(name, f"the preStop hook failed: {error}")
            return
        if code != 0:
            how = "did not end in time" if code is None else f"ended with exit code {code}"
            self._events.log(name, f"the preStop hook {how}")

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
                if not await self._startup(container, running):
                    self._events.log(name, "the startup probe failed: the container is stopped")
                    await self._stop(container, running)
                    return
            started.set()
            if "readinessProbe" not in container:
                self._set_ready(name, True)
            async with asyncio.TaskGroup() as group:
                if "readinessProbe" in container:
                    self._set_ready(name, False)
                    group.create_task(self._readiness(container, running))
                if "livenessProbe" in container:
                    group.create_task(self._liveness(container, running))
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from None

    async def _startup(self, container: Json, running: RunningContainer) -> bool:
        wanted = container["startupProbe"]
        period_s = float(wanted.get("periodSeconds", 10))
        loop = asyncio.get_running_loop()
        await asyncio.sleep(float(wanted.get("initialDelaySeconds", 0)))
        deadline = loop.time() + period_s * int(wanted.get("failureThreshold", 3))
        while not await self._ask(wanted, container, running):
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(min(period_s, _MAX_WAIT_FOR_READY_S))
        return True

    async def _readiness(self, container: Json, running: RunningContainer) -> None:
        wanted = container["readinessProbe"]
        period_s = float(wanted.get("periodSeconds", 10))
        failures = 0
        await asyncio.sleep(float(wanted.get("initialDelaySeconds", 0)))
        while True:
            is_ready = await self._ask(wanted, container, running)
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
            failures = 0 if await self._ask(wanted, container, running) else failures + 1
        self._events.log(container["name"], "the liveness probe failed: the container is stopped")
        await self._stop(container, running)

    async def _ask(self, wanted: Json, container: Json, running: RunningContainer) -> bool:
        return await probe(wanted, container, self._pod.address, running.execute)

    def _set_ready(self, name: str, ready: bool | None) -> None:
        if ready is None:
            self._ready.pop(name, None)
        else:
            self._ready[name] = ready
        self._events.changed()


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Waits until ``work`` is done; whoever is cancelled meanwhile, is so afterwards."""
    task = asyncio.create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


async def _until_started(started: asyncio.Event, task: asyncio.Task[ContainerExit]) -> None:
    waiting = asyncio.create_task(started.wait())
    try:
        await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if task.done():
        task.result()
