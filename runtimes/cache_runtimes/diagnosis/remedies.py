"""What a cause says -> what to do. Pure."""

from __future__ import annotations

import re

_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"name is too long",
        "Pods get the name of the TrainJob and up to 30 more characters, 63 in all. Use a name of "
        "at most 33 characters; 32 with more than 10 cache pods.",
    ),
    (
        r"^Terminating for",
        "Its machine does not answer, or a finalizer holds it: nothing replaces the pod until it "
        "is gone. Look at `kubectl get node`; remove the Node of a machine that is off, or taint "
        "it with node.kubernetes.io/out-of-service.",
    ),
    (
        r"DatasetNotFoundError",
        "The training code names a dataset that the cache does not hold. Use a name that the "
        "message lists, or give the dataset this name with CACHE_DATASET in "
        "`spec.initializer.dataset.env`.",
    ),
    (
        r"queue resource quota insufficient|quota has reached the allowable limit|"
        r"[Nn]onPreemptibleOverQuota|OverLimit|Not(In|En)queueable",
        "The scheduler's queue has no room left for the gang. Ask for less, wait until other jobs "
        "of the queue end, or ask an administrator for more: `kubectl describe queue`.",
    ),
    (
        r"has not looked at it",
        "The scheduler that `schedulerName` names does not run in this cluster. Install it, or "
        "use the overlay torch-distributed-data-cache-colocated-default-scheduler.",
    ),
    (
        r"SchedulingGated",
        "A controller, such as Kueue, holds the pod back: `kubectl get workloads`.",
    ),
    (
        r"Coscheduling|tasks in gang|[Pp]od group is not ready|minMember|minAvailable",
        "The gang has no room for all of its pods at once. Ask for less, or wait until other jobs "
        "end: `kubectl describe podgroup`.",
    ),
    (
        r"Limit must be set for non overcommitable resources|must be equal to \S+ limit",
        "A device, such as nvidia.com/gpu, needs the same number in `requests` and `limits` of "
        "`spec.trainer.resourcesPerNode`.",
    ),
    (
        r"must be less than or equal to .*limit",
        "The requests of `spec.trainer.resourcesPerNode` are above the limits of the runtime, or "
        "its limits are below the requests. Set `limits` and `requests` of the same resources.",
    ),
    (
        r"no matches for kind \"?PodGroup|podgroups?.* not found|PodGroup",
        "The runtime needs a gang scheduler that this cluster does not have. Install "
        "scheduler-plugins or Volcano, or use the overlay "
        "torch-distributed-data-cache-colocated-default-scheduler.",
    ),
    (
        r"snapshot configmap exists but is owned by another",
        "A TrainJob of this name was deleted just before, and what it had was still there. Delete "
        "this TrainJob, wait until `kubectl get jobset` does not show it, and create it again.",
    ),
    (
        r"exceeded quota",
        "The namespace has no quota left for the pods. Ask for less, or ask an administrator for "
        "more (`kubectl describe resourcequota`).",
    ),
    (
        r"violates PodSecurity",
        "The namespace enforces a Pod Security level that a pod template breaks. Take the fields "
        "that the message names out of your `runtimePatches`.",
    ),
    (
        r"runAsUser: Invalid value|unable to validate against any security context constraint",
        "OpenShift chooses the user id of pods. Install the runtimes with "
        "runtimes/components/openshift.",
    ),
    (
        r"serviceaccount .* not found|error looking up service account",
        "The namespace lacks the ServiceAccount. For torch-distributed-with-cache, apply its "
        "namespace-access/ in this namespace.",
    ),
    (
        r"ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull",
        "The image cannot be fetched. Check its name, `imagePullSecrets`, and whether the machine "
        "reaches the registry.",
    ),
    (
        r"OOMKilled",
        "The container needed more memory than its limit. For the cache, give it more nodes or a "
        "larger limit (`cachectl plan SPEC` says how much); for the trainer, lower `batch_size`, "
        "`num_workers` or `prefetch_batches`.",
    ),
    (
        r"Insufficient (?P<what>\S+)",
        "No machine has room for the pod. Ask for less, or wait until other jobs end.",
    ),
    (
        r"untolerated taint|didn't match Pod's node (affinity|selector)",
        "No machine is allowed for the pod. Check tolerations and `nodeSelector`.",
    ),
    (
        r"secret \"?[^ ]*\"? not found|configmap \"?[^ ]*\"? not found|CreateContainerConfigError",
        "A Secret or ConfigMap that the pod mounts or reads does not exist in this namespace.",
    ),
    (
        r"needs the package .* on every node",
        "The image of the cache pods lacks this source. Install the runtimes with the image "
        "server-full (`kustomize edit set image`, or `images.server` of the chart; for "
        "torch-distributed-with-cache, `images.serverFull`).",
    ),
    (
        r"^DeadlineExceeded",
        "The job took longer than its `activeDeadlineSeconds`. Raise it, and create the TrainJob "
        "again.",
    ),
    (
        r"^Evicted|DiskPressure|low on resource|ephemeral.storage",
        "The machine ran out of memory or disk. Request what the pod needs, so that it is placed "
        "where there is enough.",
    ),
    (
        r"persistentvolumeclaim|FailedAttachVolume|FailedBinding|[Vv]olume",
        "A volume cannot be mounted: `kubectl describe pvc` says more.",
    ),
    (
        r"executable file not found|no such file or directory|exited with 12[67]\b",
        "The image lacks the program of `spec.trainer.command`. Correct the command or the image.",
    ),
    (
        r"has made nothing of it",
        "Its controller does not run, or cannot reach the API server: `kubectl get pods -A`.",
    ),
    (
        r"failed (liveness|startup) probe",
        "The process hung, or took too long to start: `kubectl logs --previous` shows its last "
        "lines.",
    ),
    (
        r"exited with 75\b",
        "The source did not answer. The Job tries again, `backoffLimit` times in all. Check the "
        "name, the DNS, the proxy and the network policies.",
    ),
    (
        r"exited with 65\b",
        "The data or the query is bad. The line above names it; correct the source or the SQL, "
        "then create the TrainJob again.",
    ),
    (
        r"exited with 78\b",
        "A setting is bad. The line above names it; correct it and create the TrainJob again.",
    ),
    (r"is forbidden|cannot (create|get|list)", "Ask an administrator for this right."),
)


def remedy(text: str) -> str:
    """What to do about a text; empty where no remedy is known. The first that matches counts."""
    return next((told for pattern, told in _REMEDIES if re.search(pattern, text)), "")
