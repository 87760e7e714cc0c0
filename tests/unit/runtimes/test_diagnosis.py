"""What ``cachectl diagnose`` says of the objects of a TrainJob."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cache_runtimes.diagnosis import diagnose
from cache_runtimes.diagnosis.findings import Objects

Json = dict[str, Any]

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


@pytest.mark.parametrize(
    ("status", "what", "remedy"),
    [
        (
            {"containerStatuses": [container(waiting={"reason": "ImagePullBackOff"})]},
            "ImagePullBackOff",
            "imagePullSecrets",
        ),
        (
            {"containerStatuses": [container(terminated={"exitCode": 137, "reason": "OOMKilled"})]},
            "exited with 137: OOMKilled",
            "more memory than its limit",
        ),
        (
            {"containerStatuses": [container(terminated={"exitCode": 65, "message": "bad file"})]},
            "exited with 65: bad file",
            "source or the SQL",
        ),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu",
                    }
                ]
            },
            "Insufficient nvidia.com/gpu",
            "No machine has room",
        ),
    ],
    ids=["image", "memory", "data", "room"],
)
def test_a_pod_that_does_not_run_is_named_with_a_remedy(
    status: Json, what: str, remedy: str
) -> None:
    found = diagnose("job", "a", dataclasses.replace(BASE, pods=[pod(**status)]))
    (finding,) = found.findings
    assert finding.where == f"Pod/{NAME}"
    assert what in finding.what
    assert remedy in finding.remedy


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
