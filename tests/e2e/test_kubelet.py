"""The pure parts of the kubelet, without a cluster."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_runtimes.local.pods import Surroundings
from cache_runtimes.local.policies import ContainerExit
from tests.e2e.kubelet.names import Addresses, PodName, dns, labels, pod_names
from tests.e2e.kubelet.objects import UnsupportedPodError, runner_pod
from tests.e2e.kubelet.pod import ClusterPod
from tests.e2e.kubelet.status import PodState, pod_status

Json = dict[str, Any]

JOBSET = {
    "metadata": {"name": "job", "namespace": "a"},
    "spec": {
        "replicatedJobs": [
            {"name": "node", "replicas": 1, "template": {"spec": {"completions": 2}}}
        ]
    },
}
STATEFUL_SET = {
    "metadata": {"name": "cache", "namespace": "b"},
    "spec": {
        "serviceName": "nodes",
        "replicas": 2,
        "template": {"metadata": {"labels": {"app": "cache"}}},
    },
}
SERVICE = {
    "metadata": {"name": "front", "namespace": "b"},
    "spec": {"selector": {"app": "cache", "statefulset.kubernetes.io/pod-name": "cache-1"}},
}


def pod(**spec: Any) -> Json:
    metadata = {
        "name": "job-node-0-1-x7k2p",
        "namespace": "a",
        "labels": {"jobset.sigs.k8s.io/jobset-name": "job"},
        "annotations": {"batch.kubernetes.io/job-completion-index": "1"},
    }
    containers = [{"name": "node", "image": "some"}]
    return {"metadata": metadata, "spec": {"containers": containers, **spec}}


def test_names_mean_pods_of_the_own_namespace_and_full_names_those_of_others() -> None:
    addresses = Addresses("127.9")
    pods = list(pod_names([JOBSET], [STATEFUL_SET]))
    found = dns("a", pods, [SERVICE], labels([STATEFUL_SET]), addresses)
    node = addresses.of(PodName("a", "job", "job-node-0-1"))
    cache = addresses.of(PodName("b", "nodes", "cache-1"))
    assert node != cache
    assert found["job-node-0-1.job"] == found["job-node-0-1.job.a.svc.cluster.local"] == node
    assert found["cache-1.nodes.b"] == found["front.b"] == found["front.b.svc"] == cache
    assert "front" not in found
    assert "cache-1.nodes" not in found


def test_variables_of_the_downward_api_are_resolved() -> None:
    paths = {
        "NAME": "metadata.name",
        "JOB": "metadata.labels['jobset.sigs.k8s.io/jobset-name']",
        "INDEX": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        "IP": "status.podIP",
    }
    given = pod(hostname="job-node-0-1", subdomain="job")
    given["spec"]["containers"][0]["env"] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in paths.items()
    ]
    made = runner_pod(given, "127.9.0.2")
    (container,) = made.spec["containers"]
    values = {each["name"]: each["value"] for each in container["env"]}
    expected = {"NAME": "job-node-0-1-x7k2p", "JOB": "job", "INDEX": "1", "IP": "127.9.0.2"}
    assert values == expected
    assert (made.host, made.index) == ("job-node-0-1.job", 1)


def test_an_init_container_that_is_no_sidecar_is_refused() -> None:
    with pytest.raises(UnsupportedPodError, match="'copy'"):
        runner_pod(pod(initContainers=[{"name": "copy"}]), "127.9.0.2")


@pytest.mark.parametrize(
    ("codes", "phase", "reason"),
    [({"node": 0}, "Succeeded", "Completed"), ({"node": 3}, "Failed", "Error")],
)
def test_the_status_of_an_ended_pod_has_its_exit_codes(
    codes: dict[str, int], phase: str, reason: str
) -> None:
    exits = [ContainerExit(name, code, "last line") for name, code in codes.items()]
    state = PodState("127.9.0.2", "t0", restarts={"node": 2}, exits=exits)
    status = pod_status(pod()["spec"], state, "t1")
    (container,) = status["containerStatuses"]
    assert status["phase"] == phase
    assert container["state"]["terminated"]["exitCode"] == codes["node"]
    assert container["state"]["terminated"]["reason"] == reason
    assert container["restartCount"] == 2
    assert {each["type"]: each["status"] for each in status["conditions"]}["Ready"] == "False"


async def ended_pod(patch: Callable[[Json], None], folder: Path) -> None:
    """Runs a pod that fails at once; each status is patched in a thread."""
    container = {"name": "node", "image": "some", "command": ["bash"], "args": ["-c", "exit 3"]}
    made = pod(containers=[container], restartPolicy="Never", hostname="job-node-0-1")
    around = Surroundings({}, {"PATH": os.environ["PATH"]}, {}, {}, {}, shutil.which)

    async def report(status: Json) -> None:
        await asyncio.to_thread(patch, status["status"])

    with (folder / "log").open("w") as log:
        await ClusterPod(made, "127.9.0.2", around, {}, {}, log, report).run()


def test_a_slow_patch_of_a_running_pod_does_not_follow_that_of_its_end(tmp_path: Path) -> None:
    seen: list[str] = []
    has_ended = threading.Event()

    def patch(status: Json) -> None:
        if status["phase"] == "Running":
            has_ended.wait(0.5)  # slow, unless the end overtakes it
        seen.append(status["phase"])
        has_ended.set()

    asyncio.run(ended_pod(patch, tmp_path))
    assert seen[-1] == "Failed"
    assert "Running" in seen[:-1]


def test_the_status_of_a_running_pod_says_whether_it_is_ready() -> None:
    status = pod_status(pod()["spec"], PodState("127.9.0.2", "t0", is_ready=True), "t1")
    assert status["phase"] == "Running"
    assert {each["type"]: each["status"] for each in status["conditions"]}["Ready"] == "True"
