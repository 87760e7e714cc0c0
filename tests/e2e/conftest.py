"""The cluster, a namespace for each test, and the TrainJobs that tests send."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import rows
from tests.e2e.clusters import Cluster, control_plane, manifests, unpack
from tests.train_jobs import env, train_job

Json = dict[str, Any]
MakeJob = Callable[..., Json]

pytest.register_assert_rewrite("tests.e2e.jobs")

_number = itertools.count()
_RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
SHARED = "data-cache-system"
FLAGSHIP = "torch-distributed-data-cache"
_RUNTIMES = (
    *(FLAGSHIP, "torch-distributed-data-cache-colocated"),
    *("jax-distributed-data-cache", "torch-distributed-shared-data-cache"),
    *("torch-distributed-with-cache", "deepspeed-data-cache", "torchtune-qwen2.5-1.5b"),
)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Unpacks the control plane before the first test, whose time it would count in."""
    plane = os.environ.get("E2E_CONTROL_PLANE")
    if plane and any("cluster" in getattr(item, "fixturenames", ()) for item in session.items):
        unpack(Path(plane))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with the runtimes of this project."""
    plane, kubeconfig = os.environ.get("E2E_CONTROL_PLANE"), os.environ.get("E2E_KUBECONFIG")
    if not plane and not kubeconfig:
        pytest.skip("needs E2E_CONTROL_PLANE or E2E_KUBECONFIG (tests/e2e/clusters.py)")
    if kubeconfig:
        uri = os.environ["E2E_STORAGE_URI"]
        yield _prepared(Cluster(Path(kubeconfig), uri, logs=None))
        return
    work = tmp_path_factory.mktemp("e2e")
    rows.write(work / "rows")
    with control_plane(Path(str(plane)), work, f"file://{work / 'rows'}") as cluster:
        yield _prepared(cluster)


def _prepared(cluster: Cluster) -> Cluster:
    for folder in _RUNTIMES:
        runtimes = manifests(folder)
        cluster.apply(*(each for each in runtimes if each["kind"].startswith("Cluster")))
    return cluster


def _namespace(cluster: Cluster) -> Iterator[str]:
    name = f"e2e-{os.getpid()}-{next(_number)}"
    metadata = {"name": name, "labels": _RESTRICTED}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}},
        namespace=name,
    )
    yield name
    cluster.delete("Namespace", name)


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of this test, which enforces Pod Security *restricted*."""
    yield from _namespace(cluster)


@pytest.fixture
def other_namespace(cluster: Cluster) -> Iterator[str]:
    """Another such namespace."""
    yield from _namespace(cluster)


@pytest.fixture
def no_shared_cache_afterwards(cluster: Cluster) -> Iterator[None]:
    """Deletes the shared cache after a test that made one."""
    yield
    # First the pods: a namespace with them looks again after half of their long grace period.
    cluster.delete("StatefulSet", "data-cache", SHARED)
    cluster.wait(
        SHARED,
        lambda: not [pod for pod in cluster.pods(SHARED) if "-test" not in pod["metadata"]["name"]],
        "the end of the nodes of the shared cache",
    )
    cluster.delete("Namespace", SHARED)
    cluster.wait(  # the next test makes it again
        SHARED,
        lambda: cluster.get("Namespace", SHARED, "") is None,
        "the end of the shared cache",
    )


def ready_nodes(cluster: Cluster) -> int:
    """How many nodes of the shared cache are ready."""
    found = cluster.get("StatefulSet", "data-cache", SHARED) or {}
    return int(found.get("status", {}).get("readyReplicas") or 0)


@pytest.fixture
def shared_cache(cluster: Cluster, no_shared_cache_afterwards: None) -> None:
    """The shared cache, which is deleted afterwards."""
    objects = manifests("shared")
    (cache,) = (each for each in objects if each["kind"] == "StatefulSet")
    # The source is a folder here, which a shared cache does not read by default.
    cache["spec"]["template"]["spec"]["containers"][0]["args"].append("--allow-source=")
    cluster.apply(*objects)
    cluster.wait(SHARED, lambda: ready_nodes(cluster) == 2, "the shared cache")


@pytest.fixture
def make_job(cluster: Cluster) -> MakeJob:
    """Makes a TrainJob of two trainers, which print the ids of the rows that they read."""

    def make(
        name: str = "job", *, hook: str = "pass", runtime: str = _RUNTIMES[0], **spec: Any
    ) -> Json:
        trainer = {
            "numNodes": 2,
            "numProcPerNode": 1,
            "command": ["python", "-c"],
            "args": [TRAIN.replace("{hook}", hook)],
        }
        dataset = {
            "storageUri": cluster.storage_uri,
            "env": env(CACHE_TARGET_SHARD_BYTES="4KiB"),
        }
        return train_job(
            name,
            **{
                "runtimeRef": {"name": runtime},
                "initializer": {"dataset": dataset},
                "trainer": trainer,
                **spec,
            },
        )

    return make


# Reads one epoch over the network, as trainers on other machines do.
TRAIN = """
import json, os, pathlib, time
from cache_client import CacheIterableDataset, Connection, Reading
from cache_client.job.ranks import find_rank

rank = find_rank()
print(json.dumps({"pid": os.getpid()}), flush=True)
dataset = CacheIterableDataset(
    "rows", cache=Connection(local=False), batch_size=50, shuffle=True,
    reading=Reading(prefetch_batches=1),
)
ids = []
for step, batch in enumerate(dataset):
    ids.extend(batch["id"].tolist())
    print("step", step, flush=True)
    {hook}
print(json.dumps({"rank": rank.rank, "world_size": rank.world_size, "ids": ids}), flush=True)
"""
