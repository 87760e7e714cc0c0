"""``cachectl diagnose`` names what keeps a job from training, as real controllers report it."""

from __future__ import annotations

import copy
from typing import Any

from kubernetes import client

from tests.e2e.clusters import Cluster, manifests
from tests.e2e.conftest import MakeJob
from tests.e2e.jobs import diagnosis_of, job_of, wait_for_end, wait_for_finding
from tests.e2e.kubelet.pod import NO_REGISTRY
from tests.train_jobs import container, replicated_job, runtime, train_job

Json = dict[str, Any]


def fill_quota(cluster: Cluster, namespace: str) -> None:
    """Leaves no room for pods; no controller of this cluster counts, so the test says so."""
    hard = {"pods": "0"}
    body = {"metadata": {"name": "full"}, "spec": {"hard": hard}}
    cluster.core.create_namespaced_resource_quota(namespace, body)
    status = {"status": {"hard": hard, "used": hard}}
    cluster.core.patch_namespaced_resource_quota_status("full", namespace, status)
    spec = job_of("pod", "")["template"]["spec"]["template"]["spec"]
    pod = {"metadata": {"name": "pod"}, "spec": spec}

    def is_enforced() -> bool:
        try:
            cluster.core.create_namespaced_pod(namespace, pod, dry_run="All")
        except client.ApiException as error:
            return "exceeded quota" in str(error.body)
        return False

    cluster.wait(namespace, is_enforced, "the quota")


def with_limits(made: Json) -> Json:
    limited = copy.deepcopy(made)
    pod = limited["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    pod["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "2"}, "requests": {"cpu": "1"}}
    return limited


# Name -> the runtime, the trainer of the job, and patterns of what a finding and its remedy say.
HANGING: dict[str, tuple[Json, Json, str, str]] = {
    "no-image": (
        runtime(job_of("node", "exit 0")),
        {"image": f"{NO_REGISTRY}trainer:1"},
        f"ImagePullBackOff.*{NO_REGISTRY}trainer:1",
        "imagePullSecrets",
    ),
    "above-limits": (
        with_limits(runtime(job_of("node", "exit 0"))),
        {"resourcesPerNode": {"requests": {"cpu": "16"}}},
        "JobCreationFailed.*must be less than or equal to cpu limit",
        "`limits` and `requests`",
    ),
    "insecure": (
        runtime(replicated_job("node", container("node", "exit 0"), ancestor="trainer")),
        {},
        "violates PodSecurity",
        "Pod Security level",
    ),
}


def test_what_keeps_a_job_from_starting_is_named_with_its_remedy(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    for name, (made, trainer, _, _) in HANGING.items():
        made["metadata"]["name"] = f"e2e-{name}"
        cluster.apply(made)
        job = train_job(name, runtimeRef={"name": f"e2e-{name}"}, trainer=trainer)
        cluster.apply(job, namespace=namespace)
    for name, (_, _, what, remedy) in HANGING.items():
        wait_for_finding(cluster, namespace, name, what, remedy)


def test_a_gang_without_its_scheduler_and_a_full_quota_are_named(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    fill_quota(cluster, namespace)
    cluster.apply(make_job("full"), namespace=namespace)
    colocated = "torch-distributed-data-cache-colocated"
    cluster.apply(*manifests(colocated))
    gang = make_job("gang", runtime=colocated)
    del gang["spec"]["initializer"]
    cluster.apply(gang, namespace=namespace)
    wait_for_finding(cluster, namespace, "full", "FailedCreate.*exceeded quota", "no quota left")
    failed = "TrainJobResourcesCreationFailed.*PodGroup"
    wait_for_finding(cluster, namespace, "gang", failed, "gang scheduler")


def test_a_bad_source_a_suspended_job_and_an_unknown_one_are_named(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    cluster.apply(make_job("waiting", suspend=True), namespace=namespace)
    bad = make_job("bad")
    bad["spec"]["initializer"]["dataset"]["storageUri"] = "file:///nowhere/rows"
    cluster.apply(bad, namespace=namespace)
    wait_for_finding(cluster, namespace, "waiting", "suspended", "kubectl patch")
    wait_for_finding(cluster, namespace, "bad", "/nowhere/rows", "source or the SQL")
    unknown = diagnosis_of(cluster, namespace, "lineitem")
    assert unknown.state.endswith("TrainJobs there: bad, waiting")


def test_a_name_that_is_too_long_is_named_and_the_longest_is_not(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    longest, longer = "j" * 33, "j" * 34
    for name in (longest, longer):
        cluster.apply(make_job(name, suspend=True), namespace=namespace)
    wait_for_finding(cluster, namespace, longer, "name is too long", "at most 33")
    found = diagnosis_of(cluster, namespace, longest).findings
    assert [finding.what for finding in found] == ["it is suspended"]


def test_a_failed_job_says_the_same_in_its_pod_and_a_longer_name_is_no_part_of_it(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    failed, other = make_job("run-2"), make_job("run", suspend=True)
    failed["spec"]["initializer"]["dataset"]["storageUri"] = "file:///nowhere/rows"
    cluster.apply(failed, other, namespace=namespace)
    assert wait_for_end(cluster, namespace, "run-2") == "Failed"
    found = diagnosis_of(cluster, namespace, "run-2")
    (finding,) = found.findings
    (pod,) = (
        pod
        for pod in cluster.pods(namespace, "run-2-dataset")
        if pod["metadata"]["name"] == finding.where.removeprefix("Pod/")
    )
    (container,) = pod["status"]["containerStatuses"]
    message = container["state"]["terminated"]["message"]
    assert finding.what == f"exited with 65: {message}"
    assert "/nowhere/rows" in message and len(message) <= 500
    assert [each.what for each in diagnosis_of(cluster, namespace, "run").findings] == [
        "it is suspended"
    ]
    # The corrected job of this name is not the failed one.
    cluster.delete("TrainJob", "run-2", namespace)
    # Trainer takes the objects of a job of the same name that is deleted for those of the new one.
    left = [("JobSet", "run-2"), ("ConfigMap", "run-2-runtime-snapshot")]
    cluster.wait(
        namespace,
        lambda: not any(cluster.get(kind, name, namespace) for kind, name in left),
        "the end of what the job had",
    )
    cluster.apply(make_job("run-2"), namespace=namespace)
    assert wait_for_end(cluster, namespace, "run-2") == "Complete"
    assert diagnosis_of(cluster, namespace, "run-2").findings == ()


def test_a_source_that_does_not_answer_is_asked_again_and_an_absent_dataset_is_named(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    silent, absent = make_job("silent"), make_job("absent")
    dataset = silent["spec"]["initializer"]["dataset"]
    dataset["storageUri"] = "http://127.0.0.1:9/rows.parquet"
    absent["spec"]["trainer"]["args"][0] = absent["spec"]["trainer"]["args"][0].replace(
        '"rows", cache', '"row", cache'
    )
    cluster.apply(silent, absent, namespace=namespace)
    wait_for_finding(cluster, namespace, "absent", "exited with 1: DatasetNotFoundError", "CACHE_")
    wait_for_finding(cluster, namespace, "silent", "exited with 75: Transient", "tries again")
    assert cluster.condition("silent", namespace) is None
