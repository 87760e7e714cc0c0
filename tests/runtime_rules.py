"""The rules of training runtimes, restated from webhooks and controllers.

Sources are files of kubeflow/trainer v2.3.0, kubernetes-sigs/jobset v0.12.0 and kubeflow/sdk 0.5.0,
where nothing else is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.manifests import (
    CACHE_COMMAND,
    FIELD_RULES,
    POD_RULES,
    Json,
    Rule,
    ancestor,
    container_named,
    containers,
    is_runtime,
    job_set,
    jobs,
    pod_of,
    pods,
)

LONGEST_JOB_NAME = "j" * 32  # the SDK's names have 12 characters, ZenML's 27
CONTAINER_OF = {
    "trainer": "node",
    "dataset-initializer": "dataset-initializer",
    "model-initializer": "model-initializer",
}
_DEVICE = re.compile(r"^(cpu|nvidia\.com/(gpu|mig-.+)|google\.com/tpu|huawei\.com/Ascend910)$")
# TorchTuneSupportedPretrainedModels of pkg/constants/constants.go, as names of runtimes have them.
_TORCHTUNE_MODELS = ("llama3.2-1b", "llama3.2-3b", "llama3.3-70b", "qwen2.5-1.5b")


def problems(thing: Json) -> list[str]:
    """The violations of every rule, with the name of the rule."""
    rules = [*FIELD_RULES, *POD_RULES, *(RUNTIME_RULES if is_runtime(thing) else ())]
    return [f"{rule.__name__}: {problem}" for rule in rules for problem in rule(thing)]


def ancestors_have_their_container(runtime: Json) -> Iterator[str]:
    """``pkg/webhooks/trainingruntime_webhook.go``, validateReplicatedJobs."""
    for job in jobs(runtime):
        wanted = CONTAINER_OF.get(ancestor(job) or "")
        if wanted is None:
            continue
        if job.get("replicas", 1) != 1:
            yield f"{job['name']}: replicas must be 1, got {job['replicas']}"
        if wanted not in [container["name"] for container in pod_of(job)["spec"]["containers"]]:
            yield f"{job['name']}: no container {wanted}"


def the_job_sizes_its_trainers(runtime: Json) -> Iterator[str]:
    """``pkg/runtime/resourcerequirements.go``: resourcesPerNode of a TrainJob is merged in.

    What a runtime ships stays where a job does not name it: a limit that a job cannot see, or a
    request above the limit of the job, which no pod may have.
    """
    for job in jobs(runtime):
        for container in pod_of(job)["spec"]["containers"]:
            resources = container.get("resources", {})
            if container["name"] == "node" and (
                resources.get("requests") or resources.get("limits")
            ):
                yield f"{job['name']}/node: resources are the TrainJob's, got {resources}"


def initializers_mount_their_volume(runtime: Json) -> Iterator[str]:
    """``pkg/runtime/framework/plugins/jobset/jobset.go``, Validate, since v2.3.0 (#3714).

    A TrainJob with `initializer` is refused where the container does not mount ``initializer``.
    """
    for job in jobs(runtime):
        name = job["name"]
        if name in ("dataset-initializer", "model-initializer"):
            mounts = container_named(pod_of(job), name).get("volumeMounts", ())
            if "initializer" not in [mount["name"] for mount in mounts]:
                yield f"{name}: no volumeMount named initializer"


def policy_is_whole(runtime: Json) -> Iterator[str]:
    """One source of the ML policy (CRD); torch.go and mpi.go, Validate: what they name is there."""
    policy = runtime["spec"]["mlPolicy"]
    if len(policy.keys() - {"numNodes"}) != 1:
        yield f"mlPolicy must have one of torch, jax, mpi, ..., got {sorted(policy)}"
    names = {job["name"]: [c["name"] for c in containers(pod_of(job))] for job in jobs(runtime)}
    injection = (policy.get("torch") or {}).get("envInjection", {})
    for target in injection.get("targets", ()):
        for name in target["containerNames"]:
            if name not in names.get(target["jobName"], ()):
                yield f"envInjection: no container {name} in {target['jobName']}"
    if policy.get("mpi", {}).get("runLauncherAsNode") and not {"launcher", "node"} <= names.keys():
        yield "mpi.runLauncherAsNode needs the replicated jobs launcher and node"


def torchtune_knows_the_model(runtime: Json) -> Iterator[str]:
    """``pkg/runtime/framework/plugins/torch/torchtune.go``, getModelFromRuntimeRef: by its name."""
    if runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "torchtune":
        parts = runtime["metadata"]["name"].split("-")
        if "-".join(parts[1:]) not in _TORCHTUNE_MODELS:
            yield f"{runtime['metadata']['name']} names no model that Trainer knows"


def dependencies_come_first(runtime: Json) -> Iterator[str]:
    """``pkg/webhooks/jobset_webhook.go``, ValidateCreate."""
    before: list[str] = []
    for job in jobs(runtime):
        for dependency in job.get("dependsOn", ()):
            if dependency["name"] not in before:
                yield f"{job['name']} cannot depend on {dependency['name']}"
        before.append(job["name"])


_JOB_FAILURES = {
    *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes"),
    *("MaxFailedIndexesExceeded", "PodFailurePolicy"),
}
_RULE_ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")


def policies_name_jobs(runtime: Json) -> Iterator[str]:
    """``pkg/webhooks/jobset_webhook.go``, ValidateCreate and validateFailurePolicy.

    The other actions of the CRD are behind the feature gate RestartJob, which is off.
    """
    spec = job_set(runtime)
    names = [job["name"] for job in jobs(runtime)]
    rules = spec.get("failurePolicy", {}).get("rules", ())
    for policy in (spec.get("successPolicy", {}), *rules):
        for target in policy.get("targetReplicatedJobs", ()):
            if target not in names:
                yield f"no replicated job {target}"
    for rule in rules:
        if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]):
            yield f"{rule['name']!r} is no name of a rule"
        if rule["action"] not in _RULE_ACTIONS:
            yield f"{rule['name']}: {rule['action']} is refused"
        if not set(rule.get("onJobFailureReasons", ())) <= _JOB_FAILURES:
            yield f"{rule['name']}: {rule['onJobFailureReasons']}"
    if len({rule["name"] for rule in rules}) != len(rules):
        yield "two rules of one name"


def names_fit(runtime: Json) -> Iterator[str]:
    """``pkg/webhooks/jobset_webhook.go``: a pod's name and suffix have 63 characters at most."""
    for job in jobs(runtime):
        last = job["template"]["spec"].get("completions", 100) - 1
        name = f"{LONGEST_JOB_NAME}-{job['name']}-{job.get('replicas', 1) - 1}-{last}-abcde"
        if len(name) > 63:
            yield f"{name} has {len(name)} characters"


def pod_failures_are_final(runtime: Json) -> Iterator[str]:
    """Kubernetes' validation of Jobs: ``podFailurePolicy`` needs ``restartPolicy: Never``."""
    for job in jobs(runtime):
        pod = pod_of(job)["spec"]
        policy = job["template"]["spec"].get("podFailurePolicy")
        if pod.get("restartPolicy") not in ("Never", "OnFailure"):
            yield f"{job['name']}: restartPolicy {pod.get('restartPolicy')}"
        if policy and pod["restartPolicy"] != "Never":
            yield f"{job['name']}: podFailurePolicy needs restartPolicy Never"
        for rule in (policy or {}).get("rules", ()):
            name = rule.get("onExitCodes", {}).get("containerName")
            if name and name not in [container["name"] for container in containers({"spec": pod})]:
                yield f"{job['name']}: podFailurePolicy has no container {name}"


TERMINATED = 143  # 128 + SIGTERM


def pods_that_stay_do_not_succeed(runtime: Json) -> Iterator[str]:
    """``pkg/controller/job/job_controller.go`` of kubernetes/kubernetes, syncJob.

    A pod that is deleted, as by a drain, and ends with 0 is a completed index, which is never made
    again. So what stays until it is told to end ends with another code, which is no failure: such
    are the pods of a Job that others wait to see ready, and not complete.
    """
    staying = {
        dependency["name"]
        for job in jobs(runtime)
        for dependency in job.get("dependsOn", ())
        if dependency["status"] == "Ready"
    }
    targets = job_set(runtime).get("successPolicy", {}).get("targetReplicatedJobs")
    for job in (job for job in jobs(runtime) if job["name"] in staying):
        name, spec = job["name"], job["template"]["spec"]
        if targets is None or name in targets:
            yield f"{name}: the JobSet waits for it to succeed"
        policy = spec.get("podFailurePolicy")
        if policy and _action_after(policy, TERMINATED) != "Ignore":
            yield f"{name}: podFailurePolicy does not ignore {TERMINATED}"
        for container in pod_of(job)["spec"]["containers"]:
            told = f"--signal-exit-code={TERMINATED}" in container.get("args", ())
            if container["command"] == CACHE_COMMAND and not told:
                yield f"{name}/{container['name']}: no --signal-exit-code={TERMINATED}"
            for rule in container.get("restartPolicyRules", ()):
                codes = rule["exitCodes"]
                # As after a probe that failed; a kubelet restarts nothing in a pod that is deleted.
                if (TERMINATED in codes["values"]) is (codes["operator"] == "NotIn"):
                    yield f"{name}/{container['name']}: not restarted after {TERMINATED}"


def _action_after(policy: Json, code: int) -> str | None:
    """Of the first rule for an exit code."""
    for rule in policy["rules"]:
        codes = rule.get("onExitCodes")
        if codes and (code in codes["values"]) is (codes["operator"] == "In"):
            action: str = rule["action"]
            return action
    return None


def no_gang_waits_for_itself(runtime: Json) -> Iterator[str]:
    """``coscheduling.go`` and ``volcano.go``, Build: minMember counts the pods of every job.

    JobSet makes the pods of a job with `dependsOn` only when the others are ready, which the gang
    does not let start.
    """
    if runtime["spec"].get("podGroupPolicy") and any(job.get("dependsOn") for job in jobs(runtime)):
        yield "podGroupPolicy with dependsOn: it would wait for ever"


def the_number_of_cache_nodes_is_the_same_everywhere(runtime: Json) -> Iterator[str]:
    """``jobset.go``, SyncParallelCount: completions becomes parallelism; the nodes must know it."""
    for job in jobs(runtime):
        spec = job["template"]["spec"]
        for container in containers(pod_of(job)):
            size = next(
                (v["value"] for v in container.get("env", ()) if v["name"] == "CACHE_WORLD_SIZE"),
                None,
            )
            counts = {spec.get("parallelism"), spec.get("completions"), size and int(size)}
            if (size is not None or "parallelism" in spec) and len(counts) != 1:
                yield (
                    f"{job['name']}: CACHE_WORLD_SIZE, parallelism and completions are "
                    f"{size}, {spec.get('parallelism')} and {spec.get('completions')}"
                )


def hosts_are_pods_of_the_job(runtime: Json) -> Iterator[str]:
    """JobSet's names, ``<jobset>-<job>-<index>-<pod>.<subdomain>``.

    torch.go and jax.go take the subdomain to be the name of the TrainJob, so it is never set.
    """
    if job_set(runtime).get("network", {}).get("subdomain"):
        yield "network.subdomain is set"
    names = [job["name"] for job in jobs(runtime)]
    pattern = re.compile(r"\$\(TRAIN_JOB_NAME\)-([a-z-]+)-0-[^.]+\.\$\(TRAIN_JOB_NAME\)")
    for name, pod in pods(runtime):
        for container in containers(pod):
            values = [variable.get("value", "") for variable in container.get("env", ())]
            for text in (*container.get("args", ()), *values):
                for match in pattern.finditer(text):
                    if match[1] not in names:
                        yield f"{name}/{container['name']}: {match[0]} is no pod"


def the_sdk_can_read_it(runtime: Json) -> Iterator[str]:
    """``kubeflow/trainer/backends/kubernetes/utils.py`` and ``backend.py``.

    A runtime needs the label of its framework and an ML policy. get_container_devices raises where
    limits name no device, and takes cpu for one.
    """
    if "trainer.kubeflow.org/framework" not in runtime["metadata"].get("labels", {}):
        yield "no label trainer.kubeflow.org/framework"
    if not any(ancestor(job) == "trainer" for job in jobs(runtime)):
        yield "no replicated job of the trainer"
    for job in jobs(runtime):
        for container in pod_of(job)["spec"]["containers"]:
            limits = container.get("resources", {}).get("limits")
            if limits is not None and not any(map(_DEVICE.search, limits)):
                yield f"{job['name']}/{container['name']}: limits without a device: {limits}"


def the_webhook_is_on(runtime: Json) -> Iterator[str]:
    """``manifests/base/webhook/patch_validating.yaml`` skips runtimes with this label."""
    if "trainer.kubeflow.org/webhook-validation" in runtime["metadata"].get("labels", {}):
        yield "the label trainer.kubeflow.org/webhook-validation"


RUNTIME_RULES: tuple[Rule, ...] = (
    ancestors_have_their_container,
    the_job_sizes_its_trainers,
    initializers_mount_their_volume,
    policy_is_whole,
    torchtune_knows_the_model,
    dependencies_come_first,
    policies_name_jobs,
    names_fit,
    pod_failures_are_final,
    pods_that_stay_do_not_succeed,
    no_gang_waits_for_itself,
    the_number_of_cache_nodes_is_the_same_everywhere,
    hosts_are_pods_of_the_job,
    the_sdk_can_read_it,
    the_webhook_is_on,
)
