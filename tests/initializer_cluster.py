"""A TrainJob on an API server, and the runs of its initializer.

Runs are threads of this process; real programs, for signals and crashes, are in
`integration/initializer/test_program.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_protocol.errors import CacheError
from cache_runtimes.initializer.cluster import Cluster, connect
from cache_runtimes.initializer.plan import Planned, plan_objects
from cache_runtimes.initializer.program import Ending, run
from cache_runtimes.initializer.settings import from_env
from tests.api_server import ApiServer
from tests.stateful_sets import StatefulSets
from tests.waiting import wait_until

WAIT_S = 60.0
JOB, NAMESPACE = "train-1", "team-a"
URI = "s3://bucket/tpch/lineitem/"
# Exactly the rights of the shipped role.
PERMISSIONS = {
    ("get", "trainjobs"),
    *(
        (verb, resource)
        for verb in ("get", "create", "delete")
        for resource in ("serviceaccounts", "services", "statefulsets")
    ),
    *(("list", resource) for resource in ("statefulsets", "pods", "events")),
    *(("watch", resource) for resource in ("statefulsets", "pods")),
    ("get", "pods"),
}
OBJECTS = [
    ("serviceaccounts", "train-1-cache"),
    ("services", "train-1-cache"),
    ("services", "train-1-cache-service"),
    ("statefulsets", "train-1-cache"),
]
each_object = pytest.mark.parametrize(
    ("plural", "name"), OBJECTS, ids=[f"{plural}-{name}" for plural, name in OBJECTS]
)
Json = dict[str, Any]


class InitializerCluster:
    """An API server with a TrainJob, and the environment of its initializer."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self.server = server
        self.store = server.store
        self.folder = folder
        self.kubeconfig = server.write_kubeconfig(folder / "kubeconfig", NAMESPACE)
        self.ready_file = folder / "ready"
        self.job = self.make_job()
        server.permissions = set(PERMISSIONS)

    def make_job(self) -> Json:
        dataset = {"storageUri": URI, "env": [{"name": "CLUSTER_SIZE", "value": "3"}]}
        body = {"metadata": {"name": JOB}, "spec": {"initializer": {"dataset": dataset}}}
        return self.store.create("trainjobs", body, NAMESPACE)

    def environ(self, **changes: str) -> dict[str, str]:
        return {
            "TRAIN_JOB_NAME": JOB,
            "POD_NAMESPACE": NAMESPACE,
            "CACHE_IMAGE": "server:1",
            "STORAGE_URI": URI,
            "CLUSTER_SIZE": "3",
            "CACHE_READY_FILE": str(self.ready_file),
            "CACHE_READY_DEADLINE_S": "30",
            "CACHE_FAILURE_GRACE_S": "0",
            "CACHE_PROGRESS_S": "0.2",
            **changes,
        }

    def planned(self, **changes: str) -> dict[tuple[str, str], Planned]:
        plan = plan_objects(from_env(self.environ(**changes)), self.job)
        return {(one.kind.plural, one.name): one for one in plan}

    def make_planned(self, plural: str, name: str, **changes: str) -> Json:
        """Creates an object as an earlier run of the TrainJob does."""
        return self.store.create(plural, self.planned(**changes)[plural, name].body)

    def objects(self) -> dict[tuple[str, str], Json]:
        plurals = ("serviceaccounts", "services", "statefulsets", "pods")
        return {
            (plural, one["metadata"]["name"]): one
            for plural in plurals
            for one in self.store.find(plural, NAMESPACE)
        }

    def uids(self) -> dict[tuple[str, str], str]:
        return {key: one["metadata"]["uid"] for key, one in self.objects().items()}

    def count(self, verb: str, resource: str) -> int:
        """The number of such calls so far."""
        calls = [(call.verb, call.resource) for call in list(self.server.calls)]
        return calls.count((verb, resource))

    def wait_for_calls(self, verb: str, resource: str, times: int = 1) -> None:
        """Waits until there were so many."""
        wait_until(
            lambda: self.count(verb, resource) >= times, WAIT_S, f"{times} x {verb} {resource}"
        )

    def fail(self, **changes: str) -> CacheError:
        """The error of a run, which left nothing behind."""
        error = self.begin(**changes).error()
        assert not self.ready_file.exists()
        return error

    def begin(self, **changes: str) -> Run:
        return Run(self, changes)


class Run:
    """A run in a thread of this process."""

    def __init__(self, cluster: InitializerCluster, changes: dict[str, str]) -> None:
        self.cluster = cluster
        self.stop = threading.Event()
        self._changes = changes
        self._ending: Ending | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            settings = from_env(self.cluster.environ(**self._changes))
            api = connect(str(self.cluster.kubeconfig))
            cluster = Cluster(api, settings.namespace, watch_timeout_s=1)
            self._ending = run(settings, cluster, self.stop)
        except Exception as error:
            self._error = error

    def until_ready(self) -> Run:
        wait_until(
            lambda: self.cluster.ready_file.exists() or not self._thread.is_alive(), WAIT_S, "ready"
        )
        if self._error is not None:
            raise self._error
        return self

    def end(self) -> Ending:
        """Tells it to end; how it ended."""
        self.stop.set()
        self._join()
        if self._error is not None:
            raise self._error
        assert self._ending is not None
        assert not self.cluster.ready_file.exists()
        return self._ending

    def error(self) -> CacheError:
        """The error of a run that has ended."""
        self._join()
        assert isinstance(self._error, CacheError), (self._error, self._ending)
        return self._error

    def _join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[InitializerCluster]:
    with ApiServer() as server:
        yield InitializerCluster(server, tmp_path)


@pytest.fixture
def pods(cluster: InitializerCluster) -> Iterator[StatefulSets]:
    """A controller that brings every pod up."""
    with StatefulSets(cluster.store) as controller:
        yield controller
