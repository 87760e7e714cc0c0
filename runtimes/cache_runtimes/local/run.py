"""``cachectl run-local``: runs a TrainJob with its runtime as processes of this machine.

A tool for development. It shows what a cluster would do with the same YAML: which job waits for
which, which container restarts, which exit code ends the job. It gives no isolation: containers
are processes of the user, without images, namespaces or limits.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from cache_protocol.errors import ConfigError
from cache_runtimes.local import ssh
from cache_runtimes.local.controller import Console, JobFailed, JobSetRun
from cache_runtimes.local.manifests import Manifests
from cache_runtimes.local.pods import (
    SSH_KEYS,
    Objects,
    Pod,
    Process,
    Surroundings,
    VolumeFile,
    pods,
    processes,
    token_files,
    volume_files,
    with_addresses,
)
from cache_runtimes.local.render import Json, render_objects
from cache_runtimes.local.supported import JOBSET, check_supported
from cache_runtimes.local.trainer.info import NODE, TRAINER_PORT

EXIT_FAILURE = 1
# They replace the environment of an image.
_KEPT_VARIABLES = (
    *("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
_MEMORY = "/dev/shm"
_LOCK_PORT = 50_050  # the run that is bound to it owns the subnet 127.x.y.0/24
_MAX_PODS = 250


def run_local(
    manifests: Manifests,
    *,
    environment: Mapping[str, str],
    extra_environment: Mapping[str, str],
    console: Console,
    hosts: Mapping[str, str] | None = None,
    backoff_s: float = 0.5,
) -> int:
    """Runs a TrainJob to its end; returns the exit code of the job.

    0 when it is complete, else the exit code of the container that failed it, or 128 + the signal
    that interrupted it. The last event gives the reason. When it returns, no process and no file of
    the job is left.

    Args:
        environment: of this process: PATH, and a few variables that images have too.
        extra_environment: set in every container.
        hosts: names outside the job -> their addresses on this machine.
        backoff_s: before the first restart; the pauses double.

    Raises:
        ConfigError: something that cannot run on one machine, named before anything runs.
    """
    objects = render_objects(manifests.train_job, manifests.runtime)
    jobset = next(each for each in objects if each["kind"] == "JobSet")
    check_supported(jobset["spec"], JOBSET, "spec")
    path = os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", "")))
    find_program = partial(shutil.which, path=path)
    kept = {name: environment[name] for name in _KEPT_VARIABLES if name in environment}
    with _subnet() as subnet, _free_ports(subnet) as ports:
        every_pod = pods(jobset, lambda number: f"{subnet}.{number + 2}")
        if len(every_pod) > _MAX_PODS:
            raise ConfigError(f"run-local runs {_MAX_PODS} pods at most, got {len(every_pod)}")
        token = secrets.token_urlsafe(32)
        around = Surroundings(
            secrets={**_made_secrets(objects, find_program), **manifests.secrets},
            environment={"PATH": path, **kept},
            extra_environment=extra_environment,
            ports=ports,
            hosts=hosts or {},
            find_program=find_program,
            token=token,
        )

        @contextmanager
        def plan(pod: Pod) -> Iterator[Mapping[str, Process]]:
            hosts_of_mpi = {
                name: with_addresses(data, pod, every_pod, around)
                for name, data in _made_config_maps(objects).items()
            }
            config_maps = {**hosts_of_mpi, **manifests.config_maps}
            with _volumes(pod, around.secrets, config_maps, token) as (volumes, home):
                found = processes(pod, every_pod, volumes, around, home=home)
                if SSH_KEYS in volumes:
                    ssh.write_files(pod, volumes, home, found[NODE], around.find_program("ssh"))
                yield found

        for pod in every_pod:
            with plan(pod):
                pass  # an error of any pod comes before anything runs
        deadline_s = manifests.train_job["spec"].get("activeDeadlineSeconds")
        code, last_words = asyncio.run(
            _until_ended(JobSetRun(jobset["spec"], every_pod, plan, console, backoff_s), deadline_s)
        )
        console.event(f"TrainJob {jobset['metadata']['name']} {last_words}")
        return code


def _made_secrets(
    objects: Iterable[Json], find_program: Callable[[str], str | None]
) -> dict[str, dict[str, str]]:
    """The Secrets that Trainer makes: the key of MPI."""
    return {
        each["metadata"]["name"]: ssh.new_key(find_program("ssh-keygen"))
        for each in objects
        if each["kind"] == "Secret" and each.get("type") == "kubernetes.io/ssh-auth"
    }


def _made_config_maps(objects: Iterable[Json]) -> dict[str, dict[str, str]]:
    """The ConfigMaps that Trainer makes: the hosts of MPI."""
    return {
        each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"
    }


@contextmanager
def _volumes(
    pod: Pod, secrets: Objects, config_maps: Objects, token: str
) -> Iterator[tuple[dict[str, Path], Path]]:
    """The directory of each volume of a pod, and one for its other files.

    They end with the pod: a container that restarts in place finds its files, a pod that replaces
    another starts with empty directories.
    """
    with ExitStack() as stack:

        def directory(root: str | None) -> Path:
            prefix = f"run-local-{pod.name}-"
            made = TemporaryDirectory(prefix=prefix, dir=root, ignore_cleanup_errors=True)
            return Path(stack.enter_context(made))

        found: dict[str, Path] = {}
        for volume in pod.spec.get("volumes") or ():
            in_memory = (volume.get("emptyDir") or {}).get("medium") == "Memory"
            found[volume["name"]] = path = directory(_MEMORY if in_memory else None)
            files = {
                **volume_files(volume, pod, secrets, config_maps),
                **token_files(volume, token),
            }
            write_files(path, files)
        yield found, directory(None)


def write_files(folder: Path, files: Mapping[str, VolumeFile]) -> None:
    """Writes the files of a volume to its folder."""
    for name, file in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.text)
        target.chmod(file.mode)


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


@contextmanager
def _subnet() -> Iterator[str]:
    """The start ``127.x.y`` of loopback addresses that no other run-local uses."""
    choose = random.Random()
    for _ in range(100):
        subnet = f"127.{choose.randint(1, 254)}.{choose.randint(0, 255)}"
        with socket.socket() as lock:
            try:
                lock.bind((f"{subnet}.1", _LOCK_PORT))
            except OSError:
                continue
            yield subnet
            return
    raise ConfigError("no free part of the loopback network 127.0.0.0/8 on this machine")


@contextmanager
def _free_ports(subnet: str) -> Iterator[dict[int, int]]:
    """A free port for the frameworks: torch binds it on every address, XGBoost on that of a pod.

    It is held on an address of this run that no pod has, so no other program gets it on every
    address before the framework. The socket does not listen.
    """
    with socket.socket() as found, socket.socket() as held:
        for each in (found, held):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("", 0))
        held.bind((f"{subnet}.1", found.getsockname()[1]))
        found.close()
        yield {TRAINER_PORT: held.getsockname()[1]}
