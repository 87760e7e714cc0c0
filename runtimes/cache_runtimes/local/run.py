"""``cachectl run-local``: a TrainJob with its runtime, as processes of this machine.

A development tool. It shows what a cluster would do with the same YAML: who waits for whom, who is
restarted, which exit code ends the job, and where the rows go. It is no isolation and no scheduler:
containers are processes of the user, without images, namespaces, limits or users of their own.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import psutil

from cache_protocol.errors import ConfigError
from cache_runtimes.local.controller import Console, JobFailed, JobSetRun
from cache_runtimes.local.documents import Manifests
from cache_runtimes.local.handlers import check_handlers
from cache_runtimes.local.kubelet import Backoff, Events, PodRun
from cache_runtimes.local.pods import Pod, Process, Surroundings, pods, processes
from cache_runtimes.local.policies import unknown_policies
from cache_runtimes.local.render import JAX_PORT, TORCH_PORT, Json, containers
from cache_runtimes.local.volumes import PodVolumes, pod_volumes

EXIT_FAILURE = 1
_FRAMEWORK_PORTS = (TORCH_PORT, JAX_PORT)
# What stands for the environment of an image.
_KEPT_VARIABLES = (
    *("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
# Of a subnet 127.x.y.0/24: whoever listens there has it.
_LOCK_PORT = 50_050
_MAX_PODS = 250
_BACKOFF = Backoff()


def run_local(
    manifests: Manifests,
    jobset: Json,
    *,
    environment: Mapping[str, str],
    extra_environment: Mapping[str, str],
    console: Console,
    hosts: Mapping[str, str] | None = None,
    backoff: Backoff = _BACKOFF,
) -> int:
    """Runs a JobSet to its end; returns the exit code of the job.

    0 when it is complete, else the exit code of the container that failed it; 128 + the signal when
    it was interrupted. The last event says why. When it returns, no process and no
    file of the job is left.

    Args:
        manifests: the TrainJob and what it is made of.
        jobset: rendered from them.
        environment: of this process: PATH, and a few variables that images have too.
        extra_environment: set in every container.
        console: gets the lines of all containers, and what happens to the job.
        hosts: names outside of the job -> where they are on this machine.
        backoff: before anything is started again.

    Raises:
        ConfigError: something that cannot be run on one machine, named.
    """
    if jobset["spec"].get("suspend"):
        raise ConfigError("spec.suspend is true: a cluster would start nothing until it is false")
    unknown = [*unknown_policies(jobset["spec"])]
    if unknown:
        raise ConfigError(f"run-local does not do {'; '.join(unknown)}")
    with _subnet() as address, _free_ports() as ports:
        every_pod = pods(jobset, address)
        if len(every_pod) > _MAX_PODS:
            raise ConfigError(f"run-local runs {_MAX_PODS} pods at most, got {len(every_pod)}")
        path = os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", "")))
        around = Surroundings(
            secrets=manifests.secrets,
            config_maps=manifests.config_maps,
            environment={
                "PATH": path,
                **{name: environment[name] for name in _KEPT_VARIABLES if name in environment},
            },
            extra_environment=extra_environment,
            memory_bytes=psutil.virtual_memory().total,
            cpu_count=os.cpu_count() or 1,
            ports=ports,
            hosts=hosts or {},
            find_program=lambda program: shutil.which(program, path=path),
        )
        start = _Starter(every_pod, around, backoff)
        start.check()
        run = JobSetRun(jobset, every_pod, start, console, backoff)
        deadline_s = manifests.train_job["spec"].get("activeDeadlineSeconds")
        code, last_words = asyncio.run(_until_ended(run, deadline_s))
        console.event(f"TrainJob {jobset['metadata']['name']} {last_words}")
        return code


async def _until_ended(run: JobSetRun, deadline_s: float | None) -> tuple[int, str]:
    """The exit code and the last words."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(run.run())
    received: list[int] = []

    def stop(number: int) -> None:
        if not received:
            task.cancel()
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            loop.add_signal_handler(number, stop, number)
    try:
        async with asyncio.timeout(deadline_s):
            await task
    except JobFailed as failed:
        return failed.exit.code, f"failed: {failed}"
    except TimeoutError:
        return EXIT_FAILURE, f"failed: DeadlineExceeded: it ran for {deadline_s} s"
    except asyncio.CancelledError:
        return 128 + received[0], f"was stopped by {signal.Signals(received[0]).name}"
    return 0, "is complete"


class _Starter:
    """Makes the volumes and processes of pods."""

    def __init__(self, every_pod: list[Pod], around: Surroundings, backoff: Backoff) -> None:
        self._pods = every_pod
        self._around = around
        self._backoff = backoff

    def check(self) -> None:
        """Plans every pod, so that what cannot be run is known before anything runs."""
        for pod in self._pods:
            for container in containers(pod.job):
                check_handlers(container, f"{pod.name}/{container['name']}")
            with self._volumes(pod) as volumes:
                self._processes(pod, volumes)

    @contextmanager
    def __call__(self, pod: Pod, events: Events) -> Iterator[PodRun]:
        """A pod that is ready to run, with volumes that end with it."""
        with self._volumes(pod) as volumes:
            yield PodRun(pod, self._processes(pod, volumes), events, self._backoff)

    def _volumes(self, pod: Pod) -> AbstractContextManager[PodVolumes]:
        return pod_volumes(
            pod.name,
            pod.spec,
            secrets=self._around.secrets,
            config_maps=self._around.config_maps,
        )

    def _processes(self, pod: Pod, volumes: PodVolumes) -> dict[str, Process]:
        return processes(
            pod,
            self._pods,
            volumes.directories,
            self._around,
            home=volumes.home,
        )


@contextmanager
def _subnet() -> Iterator[Callable[[int], str]]:
    """A part of the loopback network that no other run-local uses: pod number -> address."""
    choose = random.Random()
    for _ in range(100):
        subnet = f"127.{choose.randint(1, 254)}.{choose.randint(0, 255)}"
        with socket.socket() as lock:
            try:
                lock.bind((f"{subnet}.1", _LOCK_PORT))
            except OSError:
                continue
            yield partial(_address, subnet)
            return
    raise ConfigError("no free part of the loopback network 127.0.0.0/8 on this machine")


def _address(subnet: str, number: int) -> str:
    return f"{subnet}.{number + 2}"


@contextmanager
def _free_ports() -> Iterator[dict[int, int]]:
    """Free ports for the frameworks, which bind theirs on every address.

    They are held, bound and not listening: nobody else is given one before the framework starts.
    """
    with socket.socket() as torch, socket.socket() as jax:
        for held in (torch, jax):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", 0))
        ports = [held.getsockname()[1] for held in (torch, jax)]
        yield dict(zip(_FRAMEWORK_PORTS, ports, strict=True))
