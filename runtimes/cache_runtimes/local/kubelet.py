"""One pod: sidecars, containers, restarts in place, probes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cache_runtimes.local.containers import RunningContainer
from cache_runtimes.local.pods import Pod, Process
from cache_runtimes.local.policies import ContainerExit, restarts_in_place

Json = dict[str, Any]
Task = asyncio.Task[Any]

_DEFAULT_GRACE_S = 30.0
_MIN_GRACE_S = 2.0  # after a hook that took all of it: minimumGracePeriodInSeconds
# The pause after a probe that failed; a kubelet waits periodSeconds.
_MAX_WAIT_FOR_READY_S = 0.5
_MAX_DELAY_S = 10.0
_DIRECT = (("grpc.enable_http_proxy", 0),)  # no proxy knows this machine's loopback addresses


Probe = Callable[[Pod, Json, Json], Awaitable[bool]]  # of a pod, a container and its probe


def delay_s(failures: int, first_s: float) -> float:
    """Seconds before the next start: they double. A cluster waits from 10 s up to 5 min."""
    return min(_MAX_DELAY_S, first_s * 2.0 ** min(failures - 1, 30))


@dataclass
class PodRun:
    """Runs one pod, once, in one event loop.

    Attributes:
        log: gets a container and one of its lines.
        restarted: called before a restart in place; may raise to give the pod up.
        changed: called when `is_ready` may have changed.
        probe: whether a probe succeeds.
    """

    pod: Pod
    processes: Mapping[str, Process] = field(repr=False)
    log: Callable[[str, str], None]
    restarted: Callable[[ContainerExit], None]
    changed: Callable[[], None]
    backoff_s: float
    probe: Probe = field(default_factory=lambda: probe_succeeds)
    _ready: set[str] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        """Whether all containers run and every readiness probe succeeds."""
        return self._ready == self.processes.keys()

    async def run(self) -> list[ContainerExit]:
        """Runs the pod to its end; how its containers ended.

        When cancelled, it stops every container within terminationGracePeriodSeconds. It returns
        after they have ended, however often it is cancelled.
        """
        sidecars = self.pod.spec.get("initContainers") or []
        tasks: list[asyncio.Task[ContainerExit]] = []
        try:
            for container in (*sidecars, *self.pod.spec["containers"]):
                started = asyncio.Event()
                tasks.append(asyncio.create_task(self._supervise(container, started)))
                if len(tasks) <= len(sidecars):
                    waiting = asyncio.create_task(started.wait())
                    try:
                        await first_done((waiting, tasks[-1]))
                    finally:
                        waiting.cancel()
            await all_done(tasks[len(sidecars) :], beside=tasks)
            return [task.result() for task in tasks[len(sidecars) :]]
        finally:
            await to_the_end(self._stop_all(tasks))

    async def _stop_all(self, tasks: list[asyncio.Task[ContainerExit]]) -> None:
        """Stops containers one by one, the last one first; then raises the error of one."""
        for task in reversed(tasks):
            task.cancel()
            await asyncio.wait((task,))
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def _supervise(self, container: Json, started: asyncio.Event) -> ContainerExit:
        """Runs a container, and restarts it in place as its policy says."""
        failures = 0
        while True:
            ended = await self._run_once(container, started)
            if not restarts_in_place(container, self.pod.spec, ended.code):
                return ended
            failures += 1
            self.restarted(ended)
            await asyncio.sleep(delay_s(failures, self.backoff_s))

    async def _run_once(self, container: Json, started: asyncio.Event) -> ContainerExit:
        name = container["name"]
        process = self.processes[name]
        try:
            running = await RunningContainer.start(process, partial(self.log, name))
        except OSError as error:
            return ContainerExit(name, 128, f"cannot start {process.argv[0]!r}: {error}")
        ended = asyncio.create_task(running.wait())
        probes = asyncio.create_task(self._probe(container, running, started))
        try:
            await first_done((ended, probes))
            code = await ended
        finally:
            await to_the_end(self._end(container, running, ended, probes))
        return ContainerExit(name, code, running.last_line)

    async def _end(
        self, container: Json, running: RunningContainer, ended: Task, probes: Task
    ) -> None:
        """Ends a container and its probes, whether it has ended or must be stopped."""
        for task in (ended, probes):
            task.cancel()
        await asyncio.wait((ended, probes))
        try:
            if ended.cancelled() or ended.exception() is not None:
                await self._stop(container, running)
        finally:
            self._set_ready(container, False)
        if not probes.cancelled():
            probes.result()

    async def _stop(self, container: Json, running: RunningContainer) -> None:
        """The preStop hook, then the stop, within the pod's grace.

        ``killContainer`` of pkg/kubelet/kuberuntime/kuberuntime_container.go.
        """
        grace_s = float(self.pod.spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S))
        hook = (container.get("lifecycle") or {}).get("preStop")
        pause_s = min(float(hook["sleep"]["seconds"]), grace_s) if hook else 0.0
        if pause_s:
            await running.ends_within(pause_s)
        await running.stop(max(_MIN_GRACE_S, grace_s - pause_s))

    async def _probe(
        self, container: Json, running: RunningContainer, started: asyncio.Event
    ) -> None:
        async def give_up(probe: str) -> None:
            self.log(container["name"], f"the {probe} failed: the container is stopped")
            await self._stop(container, running)

        async def watch_readiness() -> None:
            async for succeeds in self._results(container, "readinessProbe"):
                self._set_ready(container, succeeds)

        async def watch_liveness() -> None:
            results = self._results(container, "livenessProbe")
            while await anext(results):
                pass
            await give_up("livenessProbe")

        startup = container.get("startupProbe")
        if startup and not await anext(self._results(container, "startupProbe")):
            await give_up("startupProbe")
            return
        started.set()
        self._set_ready(container, not container.get("readinessProbe"))
        async with asyncio.TaskGroup() as group:
            if container.get("readinessProbe"):
                group.create_task(watch_readiness())
            if container.get("livenessProbe"):
                group.create_task(watch_liveness())

    async def _results(self, container: Json, name: str) -> AsyncIterator[bool]:
        """Asks again and again: True at a success, False after failureThreshold periods."""
        probe = container[name]
        period_s = float(probe.get("periodSeconds", 10))
        patience_s = period_s * (int(probe.get("failureThreshold", 3)) - 1)
        now = asyncio.get_running_loop().time
        failing_since: float | None = None
        while True:
            if await self.probe(self.pod, container, probe):
                failing_since = None
                yield True
                await asyncio.sleep(period_s)
                continue
            failing_since = now() if failing_since is None else failing_since
            if now() - failing_since >= patience_s:
                yield False
            await asyncio.sleep(min(period_s, _MAX_WAIT_FOR_READY_S))

    def _set_ready(self, container: Json, ready: bool) -> None:
        (self._ready.add if ready else self._ready.discard)(container["name"])
        self.changed()


async def probe_succeeds(pod: Pod, container: Json, probe: Json) -> bool:
    """Whether a probe of a container succeeds, by gRPC or by TCP."""
    timeout_s = float(probe.get("timeoutSeconds", 1))
    if "tcpSocket" in probe:
        return await is_listening(pod.address, int(probe["tcpSocket"]["port"]), timeout_s)
    address = f"{pod.address}:{probe['grpc']['port']}"
    return await is_serving(address, probe["grpc"].get("service") or "", timeout_s)


async def is_listening(address: str, port: int, timeout_s: float) -> bool:
    """Whether a TCP connection to ``address`` can be made."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(address, port)
    except OSError:  # TimeoutError included
        return False
    writer.close()
    return True


async def is_serving(address: str, service: str, timeout_s: float) -> bool:
    """Whether the gRPC health service at ``address`` calls a service healthy."""
    async with grpc.aio.insecure_channel(address, _DIRECT) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(request, timeout=timeout_s)  # type: ignore[attr-defined]
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def first_done(tasks: Iterable[Task]) -> set[Task]:
    """Waits until one of the tasks is done, and raises its error; the others."""
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return pending


async def all_done(tasks: Iterable[Task], *, beside: Iterable[Task]) -> None:
    """Waits until ``tasks`` are done; raises an error of any task, also ``beside`` them."""
    tasks = tuple(tasks)
    pending = {*tasks, *beside}
    while not all(task.done() for task in tasks):
        pending = await first_done(pending)


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Waits until ``work`` is done; raises a cancellation only after that."""
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
