"""What ``cachectl diagnose`` says of the objects of a TrainJob."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cache_runtimes.diagnosis import Objects, diagnose
from tests.broken_jobs import CACHE, NODE, NOW, BrokenJob, at, conditions, refused

Json = dict[str, Any]

GUIDE = Path(__file__).parents[3] / "docs/kubernetes.md"
_NO_PODGROUP = 'no matches for kind "PodGroup" in version "scheduling.x-k8s.io/v1alpha1"'
_ABOVE = 'resources.requests: Invalid value: "16": must be less than or equal to cpu limit of 2'
_DEVICE = "resources.limits: Required value: Limit must be set for non overcommitable resources"
_SECURITY = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
_OPENSHIFT = (
    'pods "x" is forbidden: unable to validate against any security context constraint: '
    "[.spec.securityContext.fsGroup: Invalid value: [1000]]"
)
_ACCOUNT = (
    'pods "x" is forbidden: error looking up service account a/b: serviceaccount "b" not found'
)
_ABSENT = "DatasetNotFoundError: dataset 'lineitems' does not exist; datasets: lineitem"
_NO_PACKAGE = (
    "RequestError: format delta needs the package 'deltalake': pip install it on every node"
)
_TORCHRUN = (
    "[rank0]: Traceback (most recent call last):\n"
    f"[rank0]: cache_protocol.errors.{_ABSENT}\n"
    'File "run.py", line 1\n'
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    "======\ntrain.py FAILED\n------\n"
)


def quota(made: BrokenJob) -> BrokenJob:
    """Both Jobs, whose pods have other names and other requests."""
    for used, (part, job) in enumerate(made.jobs.items()):
        pod = f"{made.name}-{part}-0-{used}-x7k2p"
        message = (
            f'pods "{pod}" is forbidden: exceeded quota: team, requested: pods=1, used: {used}'
        )
        made.on("Job", job, "FailedCreate", message)
    return made


def jobset_refuses(made: BrokenJob, message: str) -> BrokenJob:
    assert made.jobset is not None
    return made.on("JobSet", made.jobset, "JobCreationFailed", message)


def trainer_refuses(made: BrokenJob, message: str) -> BrokenJob:
    return made.on("TrainJob", made.job, "TrainJobResourcesCreationFailed", message)


def job_refuses(made: BrokenJob, message: str) -> BrokenJob:
    made.on("Job", made.jobs[NODE], "FailedCreate", "exceeded quota: an earlier one", 60)
    return made.on("Job", made.jobs[NODE], "FailedCreate", message)


def unmounted(made: BrokenJob) -> BrokenJob:
    """A kubelet names the reason once, and then only that it waits."""
    made.waits("ContainerCreating")
    for pod in made.pods:
        why = 'MountVolume.SetUp failed for volume "keys" : secret "warehouse-keys" not found'
        made.on("Pod", pod, "FailedMount", why, 30)
        late = "Unable to attach or mount volumes: timed out waiting for the condition"
        made.on("Pod", pod, "FailedMount", late)
    return made


def unclaimed(made: BrokenJob) -> BrokenJob:
    made.waits("ContainerCreating")
    for pod in made.pods:
        made.on("Pod", pod, "FailedAttachVolume", "Multi-Attach error for volume pvc-1")
    return made


def terminating(made: BrokenJob) -> BrokenJob:
    for pod in made.ready(CACHE).pods:
        pod["metadata"]["deletionTimestamp"] = at(300)
    return made


def unseen(made: BrokenJob) -> BrokenJob:
    for _ in range(2):
        made.pod()["spec"] = {"schedulerName": "volcano"}
    return made


def evicted(made: BrokenJob) -> BrokenJob:
    made.pod(
        CACHE, phase="Failed", reason="Evicted", message="The node was low on resource: memory"
    )
    return made


def hung(made: BrokenJob) -> BrokenJob:
    made.waits("CrashLoopBackOff", part=CACHE)
    for pod in made.pods:
        message = f"Container {CACHE} failed liveness probe, will be restarted"
        made.on("Pod", pod, "Killing", message)
        made.on("Pod", pod, "Unhealthy", "Readiness probe failed: NOT_SERVING")
    return made


def lost_cache(made: BrokenJob) -> BrokenJob:
    """The trainers fail because the cache did."""
    made.exits(1, "NodeUnavailableError: node grpc://10.0.0.1:50051 does not answer")
    return made.exits(137, reason="OOMKilled", part=CACHE)


def ranks(made: BrokenJob) -> BrokenJob:
    """One rank runs out of memory, and the others lose it."""
    made.exits(1, "RuntimeError: [gloo] Connection closed by peer [10.0.0.7]:4711")
    return made.exits(137, reason="OOMKilled")


VOLCANO, KAI = "scheduling.k8s.io/group-name", "pod-group-name"
_GANG = "2/2 tasks in gang unschedulable: pod group is not ready, 2 Pending, 2 minAvailable"
_OVER = "team-a quota has reached the allowable limit of GPUs. Limit is 8 GPUs"


def volcano(made: BrokenJob, message: str, *events: str, reason: str = "NotEnoughResources") -> Any:
    """As Volcano reports a gang: conditions and events of its PodGroup."""
    condition = {"type": "Unschedulable", "status": "True", "reason": reason, "message": message}
    made.in_gang(VOLCANO, message=_GANG, phase="Pending", conditions=[condition])
    for event in events:
        made.on("PodGroup", made.pod_groups[0], "Unschedulable", event)
    return made


def kai(made: BrokenJob, reason: str, message: str) -> BrokenJob:
    """As KAI reports a gang, whose pods it has not looked at."""
    condition = {
        "type": "UnschedulableOnNodePool",
        "status": "True",
        "reasons": [{"reason": reason, "message": message}],
    }
    return made.in_gang(KAI, phase="Pending", schedulingConditions=[condition])


class Case(NamedTuple):
    """A broken job.

    Attributes:
        row: words of the row of docs/kubernetes.md that describes it; empty: it has none.
        breaks: breaks a job of the given parts.
        what, remedy: parts of the one finding.
    """

    row: str
    breaks: Callable[[BrokenJob], BrokenJob]
    what: str
    remedy: str
    parts: tuple[str, ...] | None = (CACHE, NODE)


CASES = {
    "above the limits": Case(
        "`must be less than or equal to`",
        lambda made: jobset_refuses(made, _ABOVE),
        "JobCreationFailed: resources.requests",
        "`limits` and `requests`",
        (CACHE,),
    ),
    "a device without a limit": Case(
        "`Limit must be set`",
        lambda made: jobset_refuses(made, _DEVICE),
        "Limit must be set",
        "nvidia.com/gpu",
        (CACHE,),
    ),
    "no gang scheduler": Case(
        "`TrainJobResourcesCreationFailed` that names `PodGroup`",
        lambda made: trainer_refuses(made, _NO_PODGROUP),
        "PodGroup",
        "gang scheduler",
        None,
    ),
    "a long name": Case(
        "`JobSet name is too long`",
        lambda made: trainer_refuses(
            made, "JobSet name is too long, pod names generated for this JobSet will exceed 63"
        ),
        "name is too long",
        "at most 33",
        None,
    ),
    "a name that was just used": Case(
        "`owned by another object`",
        lambda made: trainer_refuses(
            made,
            "TrainJob resources reconciliation failed: getting runtime snapshot: invalid runtime "
            "snapshot: a snapshot configmap exists but is owned by another object",
        ),
        "owned by another object",
        "was deleted just before",
        None,
    ),
    "a full quota": Case("`exceeded quota`", quota, "exceeded quota: team", "no quota left"),
    "an insecure pod": Case(
        "`violates PodSecurity`",
        lambda made: job_refuses(made, _SECURITY),
        "violates PodSecurity",
        "Pod Security level",
    ),
    "OpenShift": Case(
        "`security context constraint`",
        lambda made: job_refuses(made, _OPENSHIFT),
        "security context constraint",
        "components/openshift",
    ),
    "no account": Case(
        "`serviceaccount ... not found`",
        lambda made: job_refuses(made, _ACCOUNT),
        'serviceaccount "b" not found',
        "namespace-access/",
    ),
    "no machine": Case(
        "`Insufficient`",
        lambda made: made.unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu"),
        "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu",
        "No machine has room",
    ),
    "a taint": Case(
        "`untolerated taint`",
        lambda made: made.unscheduled("0/3 nodes: 3 node(s) had untolerated taint {gpu: yes}"),
        "untolerated taint",
        "`nodeSelector`",
    ),
    "a gang without room": Case(
        "`pod group is not ready`",
        lambda made: made.unscheduled("3/3 tasks in gang unschedulable: pod group is not ready"),
        "pod group is not ready",
        "gang has no room",
    ),
    "a full queue of Volcano": Case(
        "`queue resource quota insufficient`",
        lambda made: volcano(made, _GANG, "queue resource quota insufficient", _GANG),
        "Unschedulable: queue resource quota insufficient",
        "`kubectl describe queue`",
    ),
    "a full queue of KAI": Case(
        "", lambda made: kai(made, "OverLimit", _OVER), f"OverLimit: {_OVER}", "describe queue"
    ),
    "a gang that only waits": Case(
        "", lambda made: volcano(made, _GANG), "pod group is not ready", "gang has no room"
    ),
    "a gang whose pods say why": Case(
        "",
        lambda made: volcano(made, "queue resource quota insufficient").unscheduled(
            "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
        ),
        "Insufficient nvidia.com/gpu",
        "No machine has room",
    ),
    "a gang of coscheduling": Case(
        "",
        lambda made: made.in_gang(
            "scheduling.x-k8s.io/pod-group",
            message='pod "x" rejected while waiting on permit: rejected due to timeout at plugin '
            "Coscheduling",
            phase="Scheduling",
        ),
        "at plugin Coscheduling",
        "gang has no room",
    ),
    "no scheduler": Case("`has not looked at it`", unseen, "scheduler volcano", "`schedulerName`"),
    "no image": Case(
        "`ImagePullBackOff`",
        lambda made: made.waits("ImagePullBackOff").waits("ErrImagePull", "no such host"),
        "ImagePullBackOff",
        "imagePullSecrets",
    ),
    "no secret": Case(
        "`CreateContainerConfigError`",
        lambda made: made.waits("CreateContainerConfigError", 'secret "warehouse-keys" not found'),
        'secret "warehouse-keys" not found',
        "Secret or ConfigMap",
    ),
    "no secret to mount": Case("`FailedMount`", unmounted, "warehouse-keys", "Secret or ConfigMap"),
    "a volume elsewhere": Case(
        "`FailedAttachVolume`", unclaimed, "Multi-Attach", "kubectl describe pvc"
    ),
    "no program": Case(
        "`executable file not found`",
        lambda made: made.exits(
            128, 'exec: "trian": executable file not found in $PATH', reason="StartError"
        ),
        "exited with 128",
        "spec.trainer.command",
    ),
    "a pod that stays": Case(
        "`Terminating`", terminating, "Terminating for 300 s", "kubectl get node"
    ),
    "an evicted pod": Case("`Evicted`", evicted, "low on resource", "out of memory or disk"),
    "a hung cache": Case(
        "`failed liveness probe`", hung, "liveness probe", "kubectl logs --previous"
    ),
    "too little memory": Case(
        "`OOMKilled`", lost_cache, "exited with 137: OOMKilled", "more memory than its limit"
    ),
    "one rank without memory": Case(
        "", ranks, "exited with 137: OOMKilled", "more memory than its limit"
    ),
    "no package": Case(
        "`needs the package`",
        lambda made: made.exits(65, _NO_PACKAGE, CACHE).fails("FailedJobs", "jobset failed"),
        "needs the package",
        "images.serverFull",
    ),
    "bad data": Case(
        "exit code 65",
        lambda made: made.exits(65, "LoadError: bad file", CACHE).fails(
            "FailedJobs", "jobset failed"
        ),
        "exited with 65: LoadError: bad file",
        "source or the SQL",
    ),
    "a silent source": Case(
        "exit code 75",
        lambda made: made.exits(75, "SourceUnavailableError: no answer from hub", CACHE),
        "exited with 75: SourceUnavailableError: no answer from hub",
        "tries again",
    ),
    "a bad setting": Case(
        "exit code 78",
        lambda made: made.exits(78, "ConfigError: CACHE_REPLICAS must be a number", CACHE),
        "CACHE_REPLICAS",
        "A setting is bad",
    ),
    "an absent dataset": Case(
        "`DatasetNotFoundError`",
        lambda made: made.ready(CACHE).exits(1, f"cache_protocol.errors.{_ABSENT}"),
        f"exited with 1: {_ABSENT}",
        "CACHE_DATASET",
    ),
    "an absent dataset under torchrun": Case(
        "",
        lambda made: made.ready(CACHE).exits(1, "train.py FAILED\n------\n", log=_TORCHRUN),
        f"exited with 1: {_ABSENT}",
        "CACHE_DATASET",
    ),
    "too slow": Case(
        "`DeadlineExceeded`",
        lambda made: made.fails("DeadlineExceeded", "was active longer than specified deadline"),
        "DeadlineExceeded: was active",
        "activeDeadlineSeconds",
    ),
    "a failure without a word": Case(
        "", lambda made: made.fails("FailedJobs", ""), "FailedJobs", ""
    ),
    "no controller": Case(
        "`has made nothing of it`", lambda made: made, "Trainer has made", "controller", None
    ),
}


def broken(case: Case, name: str = "job", uid: str = "u1") -> BrokenJob:
    made = (
        BrokenJob.sent(name, uid)
        if case.parts is None
        else BrokenJob.made(name, uid, parts=case.parts)
    )
    return case.breaks(made)


@pytest.mark.parametrize("title", CASES)
def test_a_broken_job_has_one_finding_among_jobs_with_similar_names(title: str) -> None:
    case = CASES[title]
    namesakes = [
        broken(other, name, f"{name}-{number}")
        for number, other in enumerate(CASES.values())
        for name in ("job", "job-2")  # an earlier one of this name, and a longer name
    ]
    found = diagnose("job", "a", broken(case).objects(*namesakes))
    (finding,) = found.findings
    assert case.what in finding.what
    assert case.remedy in finding.remedy
    assert bool(finding.remedy) == bool(case.remedy)
    assert not found.is_well


def test_a_job_that_trains_is_well_among_broken_ones() -> None:
    trains = BrokenJob.made("job", "u1").ready(CACHE).ready(NODE)
    namesakes = [broken(case, "job", f"u2-{title}") for title, case in CASES.items()]
    found = diagnose("job", "a", trains.objects(*namesakes))
    assert found.state == "TrainJob job runs; ready pods: dataset-initializer 2 of 2, node 2 of 2"
    assert (found.is_well, found.findings) == (True, ())


def test_the_guide_has_a_row_for_each_cause() -> None:
    table = GUIDE.read_text("utf-8").partition("| you see |")[2].partition("\n\n")[0]
    seen = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    rows = [case.row for case in CASES.values() if case.row] + ["`Suspended`", "`403 Forbidden`"]
    assert [line for line in seen if not any(row in line for row in rows)] == []
    assert [row for row in rows if not any(row in line for line in seen)] == []


def test_one_cause_of_many_pods_names_the_first_and_counts_the_others() -> None:
    made = (
        BrokenJob.made("job", "u1")
        .exits(65, "LoadError: bad", CACHE)
        .exits(65, "LoadError: bad", CACHE)
    )
    (finding,) = diagnose("job", "a", made.objects()).findings
    assert finding.where == f"Pod/{made.pods[0]['metadata']['name']} and 3 more"


def test_two_causes_are_two_findings() -> None:
    made = BrokenJob.made("job", "u1").waits("ErrImagePull", "no such host", CACHE)
    found = diagnose("job", "a", quota(made).objects())
    assert len(found.findings) == 2


def test_the_initializer_that_repeats_the_reason_of_a_cache_pod_is_not_told() -> None:
    made = BrokenJob.made("job", "u1").exits(65, "cache-server: LoadError: there is no table", NODE)
    said = "LoadError: pod job-cache-0 exited with 65: cache-server: LoadError: there is no table"
    (finding,) = diagnose("job", "a", made.exits(65, said, CACHE).objects()).findings
    assert finding.what == "exited with 65: LoadError: there is no table"


def test_a_container_that_said_nothing_has_a_finding_with_words() -> None:
    made = BrokenJob.made("job", "u1").exits(3, reason="")
    (finding,) = diagnose("job", "a", made.objects()).findings
    assert finding.what == "exited with 3: it said nothing"


def test_a_failure_is_over_when_all_pods_have_been_ready_for_a_minute() -> None:
    for ready_s, findings in ((61, 0), (10, 1)):  # a trainer that fails at once is ready, too
        made = BrokenJob.made("job", "u1").ready(CACHE).exits(1, "ValueError: x")
        found = diagnose("job", "a", made.ready(NODE, ready_s).objects())
        assert len(found.findings) == findings


def test_a_pod_within_its_grace_and_a_cache_that_stops_are_no_causes() -> None:
    made = BrokenJob.made("job", "u1").exits(143, "told to end", CACHE)
    made.pod(CACHE)["metadata"]["deletionTimestamp"] = at(-20)
    assert diagnose("job", "a", made.objects()).findings == ()


def test_past_refusals_of_a_job_that_is_complete_are_not_told() -> None:
    made = quota(BrokenJob.made("job", "u1"))
    made.job["status"] = conditions(Complete=("AllJobsCompleted", "all is done"))
    found = diagnose("job", "a", made.objects())
    assert found.state == "TrainJob job is complete: all is done"
    assert (found.is_well, found.findings) == (True, ())


@pytest.mark.parametrize(
    ("labels", "remedy"), [({}, "kubectl patch"), ({"kueue.x-k8s.io/queue-name": "q"}, "Kueue")]
)
def test_a_suspended_job_says_who_resumes_it(labels: Json, remedy: str) -> None:
    made = quota(BrokenJob.made("job", "u1"))
    made.job["spec"]["suspend"] = True
    made.job["metadata"]["labels"] = labels
    (finding,) = diagnose("job", "a", made.objects()).findings
    assert remedy in finding.remedy


def test_what_the_caller_may_not_read_is_named() -> None:
    made = BrokenJob.made("job", "u1").ready(CACHE)
    found = diagnose("job", "a", refused(made.objects(), events="403 Forbidden"))
    (finding,) = found.findings
    assert finding.where == "events"
    assert "get and list" in finding.remedy


def test_a_job_that_is_not_there_lists_those_that_are() -> None:
    found = diagnose("jbo", "a", Objects(train_job=None, train_jobs=["job", "other"], now=NOW))
    assert found.state == (
        "TrainJob jbo does not exist in namespace a; TrainJobs there: job, other"
    )
    assert not found.is_well
