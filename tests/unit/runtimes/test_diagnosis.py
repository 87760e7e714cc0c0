"""What ``cachectl diagnose`` says of the objects of a TrainJob."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cache_runtimes.diagnosis import diagnose
from cache_runtimes.diagnosis.findings import Objects

Json = dict[str, Any]

GUIDE = Path(__file__).parents[3] / "docs/kubernetes.md"
JOB = {"metadata": {"name": "job", "uid": "1"}, "spec": {}}
JOBSET = {
    "kind": "JobSet",
    "metadata": {"name": "job"},
    "spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"parallelism": 2}}}]},
}
NAME = "job-node-0-0-x7k2p"


def pod(**status: Any) -> Json:
    labels = {"jobset.sigs.k8s.io/replicatedjob-name": "node"}
    return {"metadata": {"name": NAME, "uid": "2", "labels": labels}, "status": status}


def container(**state: Any) -> Json:
    return {"name": "node", "ready": False, "restartCount": 1, "state": state}


def event(kind: str, name: str, reason: str, message: str, at: str = "1") -> Json:
    of = {"kind": kind, "name": name}
    return {"involvedObject": of, "reason": reason, "message": message, "lastTimestamp": at}


def conditions(**true: str) -> Json:
    listed = [{"type": name, "status": "True", "message": text} for name, text in true.items()]
    return {"conditions": listed}


BASE = Objects(train_job=JOB, jobset=JOBSET)


def waiting(reason: str, message: str = "") -> Objects:
    state = {"reason": reason, "message": message}
    listed = [pod(containerStatuses=[container(waiting=state)])]
    return dataclasses.replace(BASE, pods=listed)


def ended(code: int, reason: str = "Error", message: str = "") -> Objects:
    state = {"exitCode": code, "reason": reason, "message": message}
    listed = [pod(containerStatuses=[container(terminated=state)])]
    return dataclasses.replace(BASE, pods=listed)


def unschedulable(message: str) -> Objects:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    listed = [pod(conditions=[{**condition, "message": message}])]
    return dataclasses.replace(BASE, pods=listed)


def refused(kind: str, name: str, reason: str, message: str) -> Objects:
    return dataclasses.replace(BASE, events=[event(kind, name, reason, message)])


# Words of a row of docs/kubernetes.md -> what the cluster has, in its own words, and what the
# remedy says.
ROWS: dict[str, tuple[Objects, str]] = {
    "`must be less than or equal to`": (
        refused(
            *("JobSet", "job", "JobCreationFailed"),
            'resources.requests: Invalid value: "16": must be less than or equal to cpu limit of 2',
        ),
        "`limits` and `requests`",
    ),
    "`Limit must be set`": (
        refused(
            *("JobSet", "job", "JobCreationFailed"),
            "resources.limits: Required value: Limit must be set for non overcommitable resources",
        ),
        "nvidia.com/gpu",
    ),
    "`TrainJobResourcesCreationFailed`": (
        refused(
            *("TrainJob", "job", "TrainJobResourcesCreationFailed"),
            'no matches for kind "PodGroup" in version "scheduling.x-k8s.io/v1alpha1"',
        ),
        "gang scheduler",
    ),
    "`exceeded quota`": (
        refused(
            *("Job", "job-node-0", "FailedCreate"),
            'pods "job-node-0-0-x" is forbidden: exceeded quota: team, requested: pods=1, used: '
            "pods=4, limited: pods=4",
        ),
        "no quota left",
    ),
    "`violates PodSecurity`": (
        refused(
            *("Job", "job-node-0", "FailedCreate"),
            'pods "job-node-0-0-x" is forbidden: violates PodSecurity "restricted:latest": '
            "runAsNonRoot != true",
        ),
        "Pod Security level",
    ),
    "`security context constraint`": (
        refused(
            *("Job", "job-node-0", "FailedCreate"),
            'pods "job-node-0-0-" is forbidden: unable to validate against any security context '
            "constraint: [.spec.securityContext.fsGroup: Invalid value: [1000]]",
        ),
        "components/openshift",
    ),
    "`serviceaccount ... not found`": (
        refused(
            *("Job", "job-dataset-initializer-0", "FailedCreate"),
            'pods "a" is forbidden: error looking up service account a/data-cache-initializer: '
            'serviceaccount "data-cache-initializer" not found',
        ),
        "namespace-access/",
    ),
    "`Insufficient`": (
        unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu"),
        "No machine has room",
    ),
    "`untolerated taint`": (
        unschedulable("0/3 nodes are available: 3 node(s) had untolerated taint {gpu: yes}"),
        "`nodeSelector`",
    ),
    "`ImagePullBackOff`": (waiting("ImagePullBackOff"), "imagePullSecrets"),
    "`CreateContainerConfigError`": (
        waiting("CreateContainerConfigError", 'secret "warehouse-keys" not found'),
        "Secret or ConfigMap",
    ),
    "`FailedMount`": (
        refused(
            *("Pod", NAME, "FailedMount"),
            'MountVolume.SetUp failed for volume "keys" : secret "warehouse-keys" not found',
        ),
        "Secret or ConfigMap",
    ),
    "`OOMKilled`": (ended(137, "OOMKilled"), "more memory than its limit"),
    "`needs the package`": (
        ended(
            65,
            message="RequestError: format delta needs the package 'deltalake': "
            "pip install 'trainer-data-cache[delta]' on every node",
        ),
        "images.serverFull",
    ),
    "exit code 65": (ended(65, message="bad file"), "source or the SQL"),
    "exit code 78": (ended(78, message="CACHE_REPLICAS must be a number"), "A setting is bad"),
    "`Suspended`": (
        Objects(train_job={**JOB, "spec": {"suspend": True}}, jobset=JOBSET),
        "kubectl patch",
    ),
    "`403 Forbidden`": (dataclasses.replace(BASE, refused={"events": "403"}), "get and list"),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_a_platform_engineer_sees_has_a_remedy(row: str) -> None:
    objects, remedy = ROWS[row]
    (finding,) = diagnose("job", "a", objects).findings
    assert remedy in finding.remedy, finding


def test_the_guide_has_a_row_for_each_of_them() -> None:
    table = GUIDE.read_text("utf-8").partition("| you see |")[2].partition("\n\n")[0]
    seen = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    assert [line for line in seen if not any(row in line for row in ROWS)] == []
    assert [row for row in ROWS if not any(row in line for line in seen)] == []


def test_the_last_refusal_of_each_object_counts_and_other_jobs_do_not() -> None:
    events = [
        event("Job", "job-node-0", "FailedCreate", "exceeded quota: first", "1"),
        event("Job", "job-node-0", "FailedCreate", "exceeded quota: last", "2"),
        event("Job", "other-node-0", "FailedCreate", "exceeded quota", "3"),
        event("Job", "job-node-0", "SuccessfulCreate", "Created pod", "4"),
    ]
    found = diagnose("job", "a", dataclasses.replace(BASE, events=events))
    (finding,) = found.findings
    assert (finding.where, finding.what) == (
        "Job/job-node-0",
        "FailedCreate: exceeded quota: last",
    )


def test_past_refusals_of_a_job_that_is_complete_are_not_told() -> None:
    job = {**JOB, "status": conditions(Complete="all is done")}
    events = [event("JobSet", "job", "JobCreationFailed", "exceeded quota")]
    found = diagnose("job", "a", Objects(train_job=job, jobset=JOBSET, events=events))
    assert found.state == "TrainJob job is complete: all is done"
    assert found.findings == ()


def test_a_running_job_says_how_many_pods_are_ready() -> None:
    ready = pod(conditions=[{"type": "Ready", "status": "True"}])
    found = diagnose("job", "a", dataclasses.replace(BASE, pods=[ready]))
    assert found.state == "TrainJob job runs; ready pods: node 1 of 2"
    assert found.findings == ()


@pytest.mark.parametrize(
    ("labels", "remedy"), [({}, "kubectl patch"), ({"kueue.x-k8s.io/queue-name": "q"}, "Kueue")]
)
def test_a_suspended_job_says_who_resumes_it(labels: Json, remedy: str) -> None:
    job = {"metadata": {"name": "job", "labels": labels}, "spec": {"suspend": True}}
    (finding,) = diagnose("job", "a", Objects(train_job=job, jobset=JOBSET)).findings
    assert remedy in finding.remedy


def test_what_the_caller_may_not_read_is_named() -> None:
    refused = dataclasses.replace(BASE, refused={"events": "403 Forbidden"})
    (finding,) = diagnose("job", "a", refused).findings
    assert finding.where == "events"
    assert "get and list" in finding.remedy


def test_a_job_that_is_not_there_lists_those_that_are() -> None:
    found = diagnose("jbo", "a", Objects(train_job=None, train_jobs=["job", "other"]))
    assert found.state == (
        "TrainJob jbo does not exist in namespace a; TrainJobs there: job, other"
    )
