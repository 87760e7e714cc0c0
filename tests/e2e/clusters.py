"""The cluster of the end-to-end tests: a control plane on this machine, or one that you have.

- ``E2E_CONTROL_PLANE=DIR``: ``DIR/control_plane.py`` starts an API server with the controllers of
  Kubernetes, JobSet and Trainer, prints ``{"kubeconfig": PATH}`` and ends with its input. Pods run
  as processes of this machine (`tests.e2e.kubelet`).
- ``E2E_KUBECONFIG=FILE``: a cluster with Trainer, which has the images of this project. Set
  ``E2E_STORAGE_URI`` to where its pods find the files that ``python -m tests.e2e.rows DIR`` writes.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
from kubernetes import client, config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ForbiddenError, NotFoundError

from tests import forked_python
from tests.manifests import read
from tests.waiting import wait_until

Json = dict[str, Any]

REPOSITORY = Path(__file__).parents[2]
_T = TypeVar("_T")
_FIELD_MANAGER = "e2e"
_UNSEEN_RUNTIME = "must be created before the TrainJob"


def manifests(folder: str) -> list[Json]:
    """The objects of a folder of ``runtimes/`` without its overlays; Namespaces come first."""
    paths = sorted((REPOSITORY / "runtimes" / folder).rglob("*.yaml"))
    found = [read(path) for path in paths if path.name != "kustomization.yaml"]
    return sorted(found, key=lambda thing: thing["kind"] != "Namespace")


class Cluster:
    """A cluster, as its administrator sees it. Thread-safe."""

    def __init__(self, kubeconfig: Path, storage_uri: str, logs: Path | None) -> None:
        api = config.new_client_from_config(str(kubeconfig))  # not the one that all share
        self.kubeconfig = kubeconfig
        self.storage_uri = storage_uri
        self._logs = logs
        self.api = api
        self.core = client.CoreV1Api(api)
        self._dynamic = DynamicClient(api)

    def apply(self, *manifests: Json, namespace: str | None = None) -> None:
        """Server-side apply. A TrainJob waits until Trainer's cache has its new runtime."""
        for manifest in manifests:
            name = manifest["metadata"]["name"]
            applied = partial(self._applied, manifest, namespace)
            wait_until(applied, 10.0, f"Trainer knows the runtime of {name}")

    def _applied(self, manifest: Json, namespace: str | None) -> bool:
        api = self._dynamic.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
        try:
            self._dynamic.server_side_apply(
                api,
                body=manifest,
                name=manifest["metadata"]["name"],
                namespace=manifest["metadata"].get("namespace", namespace),
                field_manager=_FIELD_MANAGER,
                force_conflicts=True,
            )
        except ForbiddenError as error:
            if _UNSEEN_RUNTIME not in str(error):
                raise
            return False
        return True

    def get(self, kind: str, name: str, namespace: str) -> Json | None:
        """One object as the API server has it; None where it is absent."""
        try:
            found = self._resource(kind).get(name=name, namespace=namespace)
        except NotFoundError:
            return None
        return dict(found.to_dict())

    def list_of(self, kind: str, namespace: str) -> list[Json]:
        return list(self._resource(kind).get(namespace=namespace).to_dict()["items"])

    def patch(self, kind: str, name: str, namespace: str, body: Json) -> None:
        self._resource(kind).patch(
            name=name,
            namespace=namespace,
            body=body,
            content_type="application/merge-patch+json",
        )

    def delete(self, kind: str, name: str, namespace: str | None = None) -> None:
        self._resource(kind).delete(name=name, namespace=namespace)

    def _resource(self, kind: str) -> Any:
        return next(
            each for each in self._dynamic.resources.search(kind=kind) if "List" not in each.kind
        )

    def pods(self, namespace: str, part: str = "") -> list[Json]:
        """Pods whose name has ``part`` in it, the oldest first."""
        found = [pod for pod in self.list_of("Pod", namespace) if part in pod["metadata"]["name"]]
        return sorted(found, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def lines(self, namespace: str, part: str = "") -> list[str]:
        """The log lines of all pods whose name has ``part`` in it, those that are gone included."""
        if self._logs is None:
            names = [pod["metadata"]["name"] for pod in self.pods(namespace, part)]
            texts = [self.core.read_namespaced_pod_log(name, namespace) for name in names]
        else:
            files = sorted((self._logs / namespace).glob("*.log"))
            texts = [file.read_text() for file in files if part in file.name]
        return [line.partition(" | ")[2] or line for text in texts for line in text.splitlines()]

    def kill(self, namespace: str, part: str) -> None:
        """SIGKILL for the process of a pod, which has printed its pid in a line of JSON."""
        if self._logs is None:
            name = self.pods(namespace, part)[0]["metadata"]["name"]
            command = ["kubectl", "exec", "-n", namespace, name, "--", "kill", "-9", "1"]
            environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
            subprocess.run(command, check=True, env=environment)
            return
        lines = [line for line in self.lines(namespace, part) if '"pid"' in line]
        os.kill(json.loads(lines[-1])["pid"], signal.SIGKILL)

    def evict(self, namespace: str, pod: str, uid: str | None) -> None:
        """Asks for an eviction of the pod with this uid, as a drain does."""
        body = client.V1Eviction(
            metadata=client.V1ObjectMeta(name=pod, namespace=namespace),
            delete_options=client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=uid)),
        )
        self.core.create_namespaced_pod_eviction(pod, namespace, body)

    def condition(self, job: str, namespace: str) -> str | None:
        """``Complete``, ``Failed`` or ``Suspended`` where a TrainJob has such a condition."""
        found = self.get("TrainJob", job, namespace) or {}
        conditions = (found.get("status") or {}).get("conditions") or ()
        true = [item["type"] for item in conditions if item["status"] == "True"]
        return next((name for name in ("Complete", "Failed", "Suspended") if name in true), None)

    def wait(
        self, namespace: str, predicate: Callable[[], _T], what: str, timeout_s: float = 60.0
    ) -> _T:
        """Waits for a state of a namespace; its pods' lines are in the message of a failure."""
        try:
            return wait_until(predicate, timeout_s, what, poll_s=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.report(namespace)}") from None

    def report(self, namespace: str) -> str:
        """Pods, events and lines, for the message of an assertion."""
        pods = [
            f"{pod['metadata']['name']}: {(pod.get('status') or {}).get('phase')}"
            for pod in self.pods(namespace)
        ]
        events = [
            f"{item['reason']}: {item['message']}" for item in self.list_of("Event", namespace)
        ]
        return "\n".join([*pods, *events, *self.lines(namespace)[-60:]])


def unpack(folder: Path) -> Path:
    """The programs of a control plane, which stay unpacked for the next time."""
    unpacked = Path.home() / ".cache/trainer-data-cache/control-plane"
    unpacked.mkdir(parents=True, exist_ok=True)
    with (unpacked / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        archive = folder / "binaries.tar.xz"
        if archive.exists() and not (unpacked / "done").exists():
            with tarfile.open(archive) as programs:
                programs.extractall(unpacked, filter="data")
            (unpacked / "done").touch()
    return unpacked


@contextmanager
def control_plane(
    folder: Path, work: Path, storage_uri: str, programs: Path | None = None
) -> Iterator[Cluster]:
    """A control plane and a kubelet on this machine.

    Args:
        programs: in place of those of `unpack`.
    """
    (work / "plane").mkdir()
    (work / "plane/bin").symlink_to(programs or unpack(folder))
    command = [sys.executable, str(folder / "control_plane.py"), str(work / "plane")]
    with _program(command) as plane, _killed_at_the_end(plane.pid):
        kubeconfig = Path(json.loads(_first_line(plane))["kubeconfig"])
        logs = work / "logs"
        root_ca = work / "plane/pki/apiserver.crt"
        files = map(str, (kubeconfig, logs, root_ca))
        kubelet = [sys.executable, "-m", "tests.e2e.kubelet", *files]
        python = forked_python.executable()
        scripts = sysconfig.get_path("scripts")  # mpirun
        path = os.pathsep.join((str(Path(python).parent), os.environ["PATH"], scripts))
        with _program(kubelet, PATH=path) as running:
            assert _first_line(running) == "kubelet: ready\n"
            yield Cluster(kubeconfig, storage_uri, logs)


@contextmanager
def _killed_at_the_end(pid: int) -> Iterator[None]:
    """Kills what a process has started: an API server takes 17 s to end, and nothing is kept."""
    yield
    for child in psutil.Process(pid).children(recursive=True):
        child.kill()


@contextmanager
def _program(command: list[str], **env: str) -> Iterator[subprocess.Popen[str]]:
    """A program that ends with its input."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **env},
    )
    try:
        yield process
    finally:
        process.communicate(timeout=60)


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
