"""One pod of the API server: its process tree, and its status at each change."""

from __future__ import annotations

import asyncio
import datetime
import re
import shlex
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from cache_runtimes.local import ssh
from cache_runtimes.local.kubelet import PodRun, probe_succeeds, to_the_end
from cache_runtimes.local.pods import (
    SSH_KEYS,
    Objects,
    Pod,
    Process,
    Surroundings,
    processes,
    with_addresses,
)
from cache_runtimes.local.policies import ContainerExit
from cache_runtimes.local.trainer.info import NODE
from tests.e2e.kubelet.objects import runner_pod
from tests.e2e.kubelet.status import PodState, pod_status, waiting_status
from tests.e2e.kubelet.volumes import Tokens, directories

Json = dict[str, Any]

NO_REGISTRY = "nowhere.example.com/"
_BACKOFF_S = 0.2
_TERMINATION_LOG = "CACHE_TERMINATION_LOG"
_STOPPED = 143  # what a container that was stopped counts as


def _with_termination_log(process: Process, path: Path) -> Process:
    """A process with a termination log, which Kubernetes makes before a container starts."""
    path.touch()
    return replace(process, environment={**process.environment, _TERMINATION_LOG: str(path)})


def _with_message(exit: ContainerExit, path: Path) -> ContainerExit:
    """The exit with what its container left, as for ``FallbackToLogsOnError``."""
    return replace(exit, message=path.read_text() or exit.message)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class ClusterPod:
    """Runs one pod, once, and shows its status.

    Attributes:
        pod: as the API server has it, bound to this node.
        report: gets each status.
    """

    pod: Json
    address: str
    around: Surroundings
    config_maps: Objects
    tokens: Tokens = field(repr=False)
    log: IO[str]
    report: Callable[[Json], Coroutine[Any, Any, None]]
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _showing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> None:
        """Runs it to its end, or until it is cancelled; the last status is shown either way.

        A pod with an image of `NO_REGISTRY` never starts.
        """
        for container in self.pod["spec"]["containers"]:
            if container["image"].startswith(NO_REGISTRY):
                status = waiting_status(self.pod["spec"], container["image"])
                await self.report({"status": status})
                return
        state = PodState(self.address, now())
        names = [container["name"] for container in self.pod["spec"]["containers"]]
        try:
            state.exits = await self._run(state)
        except asyncio.CancelledError:
            state.exits = [ContainerExit(name, _STOPPED, "stopped") for name in names]
            raise
        except Exception as error:
            message = f"the pod cannot run: {type(error).__name__}: {error}"
            print(message, file=self.log, flush=True)
            state.exits = [ContainerExit(name, 128, message) for name in names]
        finally:
            state.is_ready = False
            await self._show(state)

    async def _run(self, state: PodState) -> list[ContainerExit]:
        pod = runner_pod(self.pod, self.address)
        hosts_of_mpi = {
            name: with_addresses(data, pod, (), self.around)
            for name, data in self.config_maps.items()
            if name.endswith("-mpi-hostfile")
        }
        config_maps = {**self.config_maps, **hosts_of_mpi}
        mounted = directories(pod, self.around.secrets, config_maps, self.tokens)
        with mounted as volumes, TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            home = Path(folder)
            found = {
                name: _with_termination_log(process, home / f"termination-{name}")
                for name, process in processes(pod, (), volumes, self.around, home=home).items()
            }
            if SSH_KEYS in volumes:
                ssh.write_files(pod, volumes, home, found[NODE], self.around.find_program("ssh"))
            run = PodRun(
                pod,
                found,
                self._log_line,
                lambda ended: self._restarted(state, ended),
                self._changed.set,
                _BACKOFF_S,
                self._probe(volumes),
            )
            showing = asyncio.create_task(self._show_changes(state, run))
            try:
                exits = await run.run()
            finally:
                showing.cancel()
                await asyncio.wait((showing,))
            return [_with_message(exit, home / f"termination-{exit.container}") for exit in exits]

    def _log_line(self, container: str, line: str) -> None:
        print(f"{container} | {line}", file=self.log, flush=True)

    def _restarted(self, state: PodState, ended: ContainerExit) -> None:
        state.restarts[ended.container] = state.restarts.get(ended.container, 0) + 1
        self._changed.set()

    async def _show_changes(self, state: PodState, run: PodRun) -> None:
        shown = None
        while True:
            state.is_ready = run.is_ready
            if shown != (state.is_ready, dict(state.restarts)):
                shown = (state.is_ready, dict(state.restarts))
                await self._show(state)
            await self._changed.wait()
            self._changed.clear()

    async def _show(self, state: PodState) -> None:
        """Shows one status after the other: a slow one would come after that of the end."""
        async with self._showing:
            status = pod_status(self.pod["spec"], state, now())
            await to_the_end(self.report({"status": status}))

    def _probe(self, volumes: Mapping[str, Path]) -> Callable[[Pod, Json, Json], Awaitable[bool]]:
        async def succeeds(pod: Pod, container: Json, probe: Json) -> bool:
            if "exec" not in probe:
                return await probe_succeeds(pod, container, probe)
            command = shlex.join(probe["exec"]["command"])
            for mount in container.get("volumeMounts") or ():
                path = rf"(?<![\w./-]){re.escape(mount['mountPath'])}(?![\w.-])"
                command = re.sub(path, str(volumes[mount["name"]]), command)
            process = await asyncio.create_subprocess_shell(command)
            return await process.wait() == 0

        return succeeds
