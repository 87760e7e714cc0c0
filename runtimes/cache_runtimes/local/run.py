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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from cache_protocol.errors import ConfigError
from cache_runtimes.local.controller import Console, JobFailed, JobSetRun
from cache_runtimes.local.manifests import Manifests
from cache_runtimes.local.pods import Pod, Process, Surroundings, pods, processes, token_files
from cache_runtimes.local.render import Json
from cache_runtimes.local.supported import JOBSET, check_supported
from cache_runtimes.local.trainer.info import TRAINER_PORT

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
    jobset: Json,
    *,
    environment: Mapping[str, str],
    extra_environment: Mapping[str, str],
    console: Console,
    hosts: Mapping[str, str] | None = None,
    backoff_s: float = 0.5,
) -> int:
    """Runs a JobSet to its end; returns the exit code of the job.

    0 when it is complete, else the exit code of the container that failed it, or 128 + the signal
    that interrupted it. The last event gives the reason. When it returns, no process and no file of
    the job is left.

    Args:
        manifests, jobset: as read and as rendered.
        environment: of this process: PATH, and a few variables that images have too.
        extra_environment: set in every container.
        hosts: names outside the job -> their addresses on this machine.
        backoff_s: before the first restart; the pauses double.

    Raises:
        ConfigError: something that cannot run on one machine, named before anything runs.
    """
    check_supported(jobset["spec"], JOBSET, "spec")
    path = os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", "")))
    kept = {name: environment[name] for name in _KEPT_VARIABLES if name in environment}
    with _subnet() as subnet, _free_ports() as ports:
        every_pod = pods(jobset, lambda number: f"{subnet}.{number + 2}")
        if len(every_pod) > _MAX_PODS:
            raise ConfigError(f"run-local runs {_MAX_PODS} pods at most, got {len(every_pod)}")
        token = secrets.token_urlsafe(32)
        around = Surroundings(
            secrets=manifests.secrets,
            environment={"PATH": path, **kept},
            extra_environment=extra_environment,
            ports=ports,
            hosts=hosts or {},
            find_program=lambda program: shutil.which(program, path=path),
            token=token,
        )

        @contextmanager
        def plan(pod: Pod) -> Iterator[Mapping[str, Process]]:
            with _volumes(pod, token) as (volumes, home):
                yield processes(pod, every_pod, volumes, around, home=home)

        for pod in every_pod:
            with plan(pod):
                pass  # an error of any pod comes before anything runs
        deadline_s = manifests.train_job["spec"].get("activeDeadlineSeconds")
        code, last_words = asyncio.run(
            _until_ended(JobSetRun(jobset["spec"], every_pod, plan, console, backoff_s), deadline_s)
        )
        console.event(f"TrainJob {jobset['metadata']['name']} {last_words}")
        return code


@contextmanager
def _volumes(pod: Pod, token: str) -> Iterator[tuple[dict[str, Path], Path]]:
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
            for name, content in token_files(volume, token).items():
                (path / name).write_text(content)
        yield found, directory(None)


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
def _free_ports() -> Iterator[dict[int, int]]:
    """A free port for the frameworks, which bind their port on every address.

    The port is bound and does not listen, so no other program gets it before the framework.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield {TRAINER_PORT: held.getsockname()[1]}
