"""Each rule of `tests.manifests` and `tests.runtime_rules` finds its violation."""

import copy
from typing import Any

import pytest

from cache_runtimes import MANIFESTS
from tests.manifests import FIELD_RULES, POD_RULES, Json, read
from tests.runtime_rules import RUNTIME_RULES

FLAGSHIP = read(MANIFESTS / "torch-distributed-data-cache/runtime.yaml")
COLOCATED = read(MANIFESTS / "torch-distributed-data-cache-colocated/runtime.yaml")
WITH_CACHE = read(MANIFESTS / "torch-distributed-with-cache/runtime.yaml")
DEEPSPEED = read(MANIFESTS / "deepspeed-data-cache/runtime.yaml")
TORCHTUNE = read(MANIFESTS / "torchtune-qwen2.5-1.5b/runtime.yaml")
SHARED = read(MANIFESTS / "shared/stateful-set.yaml")

# Paths of steps; a step into a list is a position or a name.
SPEC = "spec template spec"
CACHE_JOB = f"{SPEC} replicatedJobs dataset-initializer"
NODE_JOB = f"{SPEC} replicatedJobs node"
CACHE_FAILURES = f"{CACHE_JOB} template spec podFailurePolicy"
CACHE_POD = f"{CACHE_JOB} template spec template spec"
CACHE_POD_METADATA = f"{CACHE_JOB} template spec template metadata"
NODE_POD = f"{NODE_JOB} template spec template spec"
CACHE = f"{CACHE_POD} containers dataset-initializer"
SIDECAR = f"{NODE_POD} initContainers cache"
NODE = f"{NODE_POD} containers node"
FAILURE_RULE = f"{SPEC} failurePolicy rules 0"
GONE = object()


def changed(thing: Json, path: str, value: Any) -> Json:
    """A copy with another value at a path, or without it."""
    thing = copy.deepcopy(thing)
    *steps, last = path.split()
    place: Any = thing
    for step in steps:
        place = place[_key(place, step)]
    if value is GONE:
        del place[_key(place, last)]
    else:
        place[_key(place, last)] = value
    return thing


def _key(place: Any, step: str) -> str | int:
    if not isinstance(place, list):
        return step
    if step.isdecimal():
        return int(step)
    return next(index for index, each in enumerate(place) if each["name"] == step)


# The rule, a manifest that it has nothing against, and a change that it does not let through.
BITES: list[tuple[str, Json, str, Any]] = [
    ("admission_lets_it_in", FLAGSHIP, f"{CACHE} livenessProb", {}),
    ("admission_lets_it_in", FLAGSHIP, f"{CACHE_JOB} template spec paralelism", "2"),
    ("admission_lets_it_in", SHARED, f"{SPEC} terminationGracePeriod", 1),
    ("admission_lets_it_in", SHARED, "spec replicas", "2"),
    ("the_sdk_keeps_every_field", FLAGSHIP, f"{CACHE} livenessProb", {}),
    ("requests_fit_limits", FLAGSHIP, f"{CACHE} resources limits cpu", "500m"),
    ("requests_fit_limits", FLAGSHIP, f"{NODE} resources", {"requests": {"nvidia.com/gpu": 1}}),
    ("pods_are_restricted", FLAGSHIP, f"{CACHE_POD} securityContext runAsNonRoot", False),
    ("pods_are_restricted", FLAGSHIP, f"{CACHE_POD} securityContext runAsUser", 0),
    ("pods_are_restricted", FLAGSHIP, f"{NODE_POD} securityContext seccompProfile", GONE),
    ("pods_are_restricted", FLAGSHIP, f"{NODE} securityContext", GONE),
    ("pods_are_restricted", COLOCATED, f"{SIDECAR} securityContext", GONE),
    (
        "pods_are_restricted",
        SHARED,
        f"{SPEC} containers cache securityContext capabilities",
        {"add": ["SYS_NICE"], "drop": ["ALL"]},
    ),
    (
        "pods_are_restricted",
        SHARED,
        f"{SPEC} volumes tmp",
        {"name": "tmp", "hostPath": {"path": "/tmp"}},
    ),
    ("pods_are_restricted", SHARED, f"{SPEC} hostNetwork", True),
    *(
        ("callers_are_known", runtime, f"{container} env", [{"name": "CACHE_ENDPOINT"}])
        for runtime, container in ((FLAGSHIP, NODE), (FLAGSHIP, CACHE), (COLOCATED, SIDECAR))
    ),
    ("callers_are_known", SHARED, f"{SPEC} containers cache args", ["--insecure", "--auth-jwt=a"]),
    ("callers_are_known", SHARED, f"{SPEC} containers cache args", []),
    ("callers_are_known", FLAGSHIP, f"{NODE_POD} volumes cache-token projected sources", []),
    (
        "callers_are_known",
        COLOCATED,
        f"{NODE} volumeMounts cache",
        {"name": "api-server", "mountPath": "/api", "readOnly": True},
    ),
    ("no_mesh_joins_pods", FLAGSHIP, f"{CACHE_POD_METADATA} labels", {}),
    ("no_mesh_joins_pods", SHARED, "spec template metadata annotations", {}),
    ("mounts_have_volumes", FLAGSHIP, f"{CACHE} volumeMounts 0 name", "cash"),
    (
        "mounts_have_volumes",
        TORCHTUNE,
        f"{NODE_POD} volumes 0",
        {"name": "workspace", "emptyDir": {}},
    ),
    (
        "mounts_have_volumes",
        TORCHTUNE,
        f"{SPEC} volumeClaimPolicies 0 templates 0 metadata name",
        "other",
    ),
    ("variables_are_defined", FLAGSHIP, f"{NODE} env TRAIN_JOB_NAME name", "TRAINJOB_NAME"),
    ("variables_are_defined", COLOCATED, f"{SIDECAR} env PET_NNODES", GONE),
    ("probes_find_their_port", FLAGSHIP, f"{CACHE} startupProbe grpc port", "control"),
    ("restarts_are_possible", FLAGSHIP, f"{CACHE} restartPolicy", GONE),
    ("restarts_are_possible", COLOCATED, f"{SIDECAR} restartPolicyRules", [{"action": "Restart"}]),
    (
        "keys_are_matched_once",
        FLAGSHIP,
        f"{CACHE_POD} topologySpreadConstraints 0 matchLabelKeys",
        ["jobset.sigs.k8s.io/replicatedjob-name"],
    ),
    ("shards_fit_their_volume", FLAGSHIP, f"{CACHE} resources limits memory", "16Gi"),
    ("shards_fit_their_volume", COLOCATED, f"{NODE_POD} volumes cache emptyDir sizeLimit", "8Gi"),
    ("shards_fit_their_volume", SHARED, f"{SPEC} volumes cache emptyDir sizeLimit", GONE),
    ("ancestors_have_their_container", FLAGSHIP, f"{CACHE_JOB} replicas", 2),
    ("ancestors_have_their_container", FLAGSHIP, f"{NODE} name", "trainer"),
    ("the_job_sizes_its_trainers", FLAGSHIP, f"{NODE} resources", {"requests": {"cpu": "2"}}),
    ("the_job_sizes_its_trainers", FLAGSHIP, f"{NODE} resources", {"limits": {"cpu": "2"}}),
    ("initializers_mount_their_volume", WITH_CACHE, f"{CACHE} volumeMounts 0 name", "tmp"),
    ("policy_is_whole", FLAGSHIP, "spec mlPolicy", {"numNodes": 1}),
    ("policy_is_whole", COLOCATED, f"{SIDECAR} name", "cache-node"),
    ("policy_is_whole", DEEPSPEED, f"{SPEC} replicatedJobs launcher name", "launch"),
    ("torchtune_knows_the_model", TORCHTUNE, "metadata name", "torchtune-qwen2.5-1.5b-data-cache"),
    ("dependencies_come_first", FLAGSHIP, f"{NODE_JOB} dependsOn 0 name", "cache"),
    (
        "dependencies_come_first",
        FLAGSHIP,
        f"{CACHE_JOB} dependsOn",
        [{"name": "node", "status": "Ready"}],
    ),
    ("policies_name_jobs", FLAGSHIP, f"{SPEC} successPolicy targetReplicatedJobs", ["trainer"]),
    ("policies_name_jobs", FLAGSHIP, f"{FAILURE_RULE} targetReplicatedJobs", ["cache"]),
    ("policies_name_jobs", FLAGSHIP, f"{FAILURE_RULE} name", "bad-data"),
    ("policies_name_jobs", FLAGSHIP, f"{FAILURE_RULE} action", "RestartJob"),
    ("policies_name_jobs", FLAGSHIP, f"{FAILURE_RULE} onJobFailureReasons", ["Failed"]),
    ("policies_name_jobs", FLAGSHIP, f"{FAILURE_RULE} name", "trainerFailed"),
    ("names_fit", FLAGSHIP, f"{CACHE_JOB} template spec completions", 128),
    ("pod_failures_are_final", FLAGSHIP, f"{CACHE_POD} restartPolicy", "OnFailure"),
    (
        "pod_failures_are_final",
        FLAGSHIP,
        f"{CACHE_JOB} template spec podFailurePolicy rules 0 onExitCodes containerName",
        "cache",
    ),
    ("pods_that_stay_do_not_succeed", FLAGSHIP, f"{SPEC} successPolicy", GONE),
    (
        "pods_that_stay_do_not_succeed",
        WITH_CACHE,
        f"{SPEC} successPolicy targetReplicatedJobs",
        ["dataset-initializer", "node"],
    ),
    ("pods_that_stay_do_not_succeed", FLAGSHIP, f"{CACHE_FAILURES} rules 1", GONE),
    ("pods_that_stay_do_not_succeed", WITH_CACHE, f"{CACHE_FAILURES} rules 1", GONE),
    (
        "pods_that_stay_do_not_succeed",
        DEEPSPEED,
        f"{NODE_JOB} template spec podFailurePolicy rules 0",
        GONE,
    ),
    (
        "pods_that_stay_do_not_succeed",
        DEEPSPEED,
        f"{CACHE_FAILURES} rules 0 onExitCodes values",
        [65, 78, 143],
    ),
    ("pods_that_stay_do_not_succeed", FLAGSHIP, f"{CACHE} args", ["serve"]),
    (
        "pods_that_stay_do_not_succeed",
        TORCHTUNE,
        f"{CACHE} restartPolicyRules 0 exitCodes values",
        [0, 65, 78, 143],
    ),
    ("no_gang_waits_for_itself", FLAGSHIP, "spec podGroupPolicy", {"coscheduling": {}}),
    ("no_gang_waits_for_itself", FLAGSHIP, "spec podGroupPolicy", {"volcano": {}}),
    (
        "the_number_of_cache_nodes_is_the_same_everywhere",
        FLAGSHIP,
        f"{CACHE} env CACHE_WORLD_SIZE value",
        "4",
    ),
    (
        "the_number_of_cache_nodes_is_the_same_everywhere",
        FLAGSHIP,
        f"{CACHE_JOB} template spec parallelism",
        4,
    ),
    (
        "the_number_of_cache_nodes_is_the_same_everywhere",
        FLAGSHIP,
        f"{CACHE_JOB} template spec completions",
        GONE,
    ),
    ("hosts_are_pods_of_the_job", FLAGSHIP, f"{SPEC} network subdomain", "cache"),
    (
        "hosts_are_pods_of_the_job",
        FLAGSHIP,
        f"{NODE} env CACHE_ENDPOINT value",
        "grpc://$(TRAIN_JOB_NAME)-cache-0-0.$(TRAIN_JOB_NAME):50051",
    ),
    ("the_sdk_can_read_it", FLAGSHIP, f"{CACHE} resources limits", {"memory": "8Gi"}),
    ("the_sdk_can_read_it", FLAGSHIP, "metadata labels", {}),
    ("the_sdk_can_read_it", FLAGSHIP, f"{NODE_JOB} template metadata", {}),
    (
        "the_webhook_is_on",
        FLAGSHIP,
        "metadata labels trainer.kubeflow.org/webhook-validation",
        "disabled",
    ),
]
RULES = {rule.__name__: rule for rule in (*FIELD_RULES, *POD_RULES, *RUNTIME_RULES)}


@pytest.mark.parametrize(
    ("rule", "thing", "path", "value"),
    BITES,
    ids=[f"{rule}-{path.split()[-1]}" for rule, _, path, _ in BITES],
)
def test_a_rule_finds_its_violation(rule: str, thing: Json, path: str, value: Any) -> None:
    assert list(RULES[rule](thing)) == []
    assert list(RULES[rule](changed(thing, path, value))) != []


def test_every_rule_has_a_violation_here() -> None:
    assert RULES.keys() == {rule for rule, *_ in BITES}
