"""Who may use a cache on Kubernetes: tokens of a real API server, verified by its keys."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.conftest import MakeJob
from tests.e2e.jobs import assert_complete, wait_for_step
from tests.e2e.rows import NUM_ROWS
from tests.manifests import container_named, env_of, job_named, pod_of
from tests.train_jobs import env

Json = dict[str, Any]

# What a caller gets for each of these calls, or the name of the error.
ASK = """
import json, os
from cache_client import CacheClient, CacheDataset, CacheError, Connection

def outcome(call):
    try:
        return call()
    except CacheError as error:
        return type(error).__name__

client = CacheClient()
print(json.dumps({
    "names": outcome(lambda: [info.name for info in client.datasets()]),
    "rows": outcome(lambda: len(CacheDataset(os.environ["ASKED"], cache=Connection(local=False)))),
    "drop": outcome(lambda: client.drop(os.environ["ASKED"])),
}), flush=True)
"""


def asking(endpoint: str, asked: str, trainer: Json) -> Json:
    """A pod that asks once, with the token that a trainer has.

    Args:
        trainer: its pod template.
    """
    node = container_named(trainer, "node")
    file = env_of(node)["CACHE_TOKEN_FILE"]
    container = {
        **{name: node[name] for name in ("name", "image", "securityContext")},
        "command": ["python", "-c", ASK],
        "env": env(CACHE_ENDPOINT=endpoint, CACHE_TOKEN_FILE=file, ASKED=asked),
        "volumeMounts": [each for each in node["volumeMounts"] if each["name"] == "cache-token"],
    }
    spec = {
        **{name: trainer["spec"][name] for name in ("serviceAccountName", "securityContext")},
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [each for each in trainer["spec"]["volumes"] if each["name"] == "cache-token"],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "with-token"}, "spec": spec}


def without_token(pod: Json) -> Json:
    made = copy.deepcopy(pod)
    made["metadata"]["name"] = "without"
    (container,) = made["spec"]["containers"]
    del made["spec"]["volumes"], container["volumeMounts"]
    container["env"] = [each for each in container["env"] if each["name"] != "CACHE_TOKEN_FILE"]
    return made


def for_the_api_server(pod: Json) -> Json:
    """Its token has the audience of the API server, as the one that pods get by default."""
    made = copy.deepcopy(pod)
    made["metadata"]["name"] = "for-the-api"
    (source,) = made["spec"]["volumes"][0]["projected"]["sources"]
    del source["serviceAccountToken"]["audience"]
    return made


def answers(cluster: Cluster, namespace: str, *pods: Json) -> list[Json]:
    """What each pod was answered."""
    cluster.apply(*pods, namespace=namespace)
    names = [pod["metadata"]["name"] for pod in pods]

    def lines_of(name: str) -> list[str]:
        return [line for line in cluster.lines(namespace, name) if '"names"' in line]

    cluster.wait(namespace, lambda: all(map(lines_of, names)), f"the answers to {names}")
    return [json.loads(lines_of(name)[0]) for name in names]


def trainer_of(cluster: Cluster, runtime: str) -> Json:
    found = cluster.get("ClusterTrainingRuntime", runtime, "")
    assert found is not None
    return pod_of(job_named(found, "node"))


def test_the_cache_of_a_job_serves_its_namespace_and_changes_for_its_own_pods_only(
    cluster: Cluster, namespace: str, other_namespace: str, make_job: MakeJob
) -> None:
    cluster.apply(make_job(hook="time.sleep(600)"), namespace=namespace)
    wait_for_step(cluster, namespace, 0)
    endpoint = f"grpc://job-dataset-initializer-0-0.job.{namespace}.svc:50051"
    pod = asking(endpoint, "rows", trainer_of(cluster, "torch-distributed-data-cache"))
    neighbour, nobody, default = answers(
        cluster, namespace, pod, without_token(pod), for_the_api_server(pod)
    )
    (stranger,) = answers(cluster, other_namespace, pod)
    refused = dict.fromkeys(("names", "rows", "drop"), "UnauthenticatedError")
    assert neighbour == {"names": ["rows"], "rows": NUM_ROWS, "drop": "PermissionDeniedError"}
    assert (nobody, default, stranger) == (refused, refused, refused)


@pytest.mark.usefixtures("shared_cache")
def test_each_namespace_has_its_own_datasets_in_the_shared_cache(
    cluster: Cluster, namespace: str, other_namespace: str, make_job: MakeJob
) -> None:
    name = "torch-distributed-shared-data-cache"
    for each in (namespace, other_namespace):
        cluster.apply(make_job(runtime=name), namespace=each)
    for each in (namespace, other_namespace):
        assert_complete(cluster, each)
    asked = f"{other_namespace}/rows"
    pod = asking("grpc://data-cache.data-cache-system:50051", asked, trainer_of(cluster, name))
    found, nobody = answers(cluster, namespace, pod, without_token(pod))
    assert found == {
        "names": ["rows"],
        "rows": "DatasetNotFoundError",
        "drop": "PermissionDeniedError",
    }
    assert set(nobody.values()) == {"UnauthenticatedError"}
    sealed = [line for line in cluster.lines("data-cache-system") if "shard sealed" in line]
    owners = {line.partition("dataset=")[2].partition("/")[0] for line in sealed}
    assert owners >= {namespace, other_namespace}
