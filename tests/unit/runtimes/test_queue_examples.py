"""The examples for queues and gangs build, are admitted, and fit each other."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from cache_runtimes import MANIFESTS
from cache_runtimes.local.render import render_objects
from cache_server.config import NodeConfig
from tests import admission
from tests.kustomize import build
from tests.manifests import Json, is_runtime, job_named, pod_of, read
from tests.runtime_rules import problems

EXAMPLES = MANIFESTS.parent / "examples"
ZONE = "topology.kubernetes.io/zone"


def fields(required: str = "", **known: Any) -> Json:
    return {
        "type": "object",
        "properties": known,
        "required": required.split(),
        "additionalProperties": False,
    }


def many(of: Json) -> Json:
    return {"type": "array", "items": of, "minItems": 1}


TEXT = {"type": "string", "minLength": 1}
LABELS = {"type": "object", "additionalProperties": TEXT, "minProperties": 1}
QUOTA = fields("name nominalQuota", name=TEXT, nominalQuota={"type": ["integer", "string"]})
NUMBER = {"type": "number"}
SHARE = fields("quota limit", quota=NUMBER, limit=NUMBER, overQuotaWeight=NUMBER)
# The fields that the examples use, by the CRDs of Kueue (v1beta1, v1beta2), Volcano (v1alpha1), KAI
# (v2) and LeaderWorkerSet (v1).
SPECS = {
    "kueue.x-k8s.io/v1beta2 Topology": fields(
        "levels", levels=many(fields("nodeLabel", nodeLabel=TEXT))
    ),
    "kueue.x-k8s.io/v1beta2 ResourceFlavor": fields(nodeLabels=LABELS, topologyName=TEXT),
    "kueue.x-k8s.io/v1beta2 ClusterQueue": fields(
        "namespaceSelector resourceGroups",
        namespaceSelector=fields(),
        resourceGroups=many(
            fields(
                "coveredResources flavors",
                coveredResources=many(TEXT),
                flavors=many(fields("name resources", name=TEXT, resources=many(QUOTA))),
            )
        ),
        admissionChecksStrategy=fields(
            "admissionChecks", admissionChecks=many(fields("name", name=TEXT))
        ),
    ),
    "kueue.x-k8s.io/v1beta1 MultiKueueCluster": fields(
        "kubeConfig",
        kubeConfig=fields(
            "location locationType", location=TEXT, locationType={"enum": ["Secret", "Path"]}
        ),
    ),
    "kueue.x-k8s.io/v1beta2 MultiKueueConfig": fields("clusters", clusters=many(TEXT)),
    "kueue.x-k8s.io/v1beta2 AdmissionCheck": fields(
        "controllerName",
        controllerName={"const": "kueue.x-k8s.io/multikueue"},
        parameters=fields("apiGroup kind name", apiGroup=TEXT, kind=TEXT, name=TEXT),
    ),
    "scheduling.run.ai/v2 Queue": fields(
        parentQueue=TEXT, resources=fields(cpu=SHARE, gpu=SHARE, memory=SHARE)
    ),
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": fields(
        "leaderWorkerTemplate",
        replicas={"type": "integer", "minimum": 0},
        startupPolicy={"enum": ["LeaderReady", "LeaderCreated"]},
        leaderWorkerTemplate=fields(
            "workerTemplate",
            workerTemplate={"type": "object"},
            size={"type": "integer", "minimum": 1},
            restartPolicy={
                "enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
            },
        ),
    ),
    "kueue.x-k8s.io/v1beta2 LocalQueue": fields("clusterQueue", clusterQueue=TEXT),
    "topology.volcano.sh/v1alpha1 HyperNode": fields(
        "tier members",
        tier={"type": "integer", "minimum": 0},
        members=many(
            fields(
                "type selector",
                type={"enum": ["Node", "HyperNode"]},
                selector={
                    **fields(
                        exactMatch=fields("name", name=TEXT),
                        labelMatch=fields("matchLabels", matchLabels=LABELS),
                    ),
                    "maxProperties": 1,
                    "minProperties": 1,
                },
            )
        ),
    ),
}


@pytest.fixture(scope="module", params=["kai", "kueue", "multikueue", "volcano"])
def example(request: pytest.FixtureRequest) -> tuple[str, dict[str, Json]]:
    return request.param, build(EXAMPLES / request.param)


def test_an_example_is_valid_and_its_train_job_finds_what_it_names(
    example: tuple[str, dict[str, Json]],
) -> None:
    name, built = example
    (runtime,) = [thing for thing in built.values() if is_runtime(thing)]
    assert problems(runtime) == []
    others = [thing for thing in built.values() if not is_runtime(thing)]
    for thing in others:
        schema = SPECS[f"{thing['apiVersion']} {thing['kind']}"]
        assert list(Draft202012Validator(schema).iter_errors(thing.get("spec", {}))) == []
    job = read(EXAMPLES / name.removeprefix("multi") / "trainjob.yaml")
    assert list(admission.problems(job)) == []
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    made = render_objects(job, runtime)
    (job_set,) = [thing for thing in made if thing["kind"] == "JobSet"]
    assert list(admission.problems(job_set)) == []


def test_kueue_counts_and_places_every_pod() -> None:
    built = build(EXAMPLES / "kueue")
    queues = {thing["kind"]: thing["spec"] for thing in built.values() if "spec" in thing}
    levels = [level["nodeLabel"] for level in queues["Topology"]["levels"]]
    assert levels[-1] == "kubernetes.io/hostname"
    (runtime,) = [thing for thing in built.values() if is_runtime(thing)]
    for job in ("dataset-initializer", "node"):
        annotations = pod_of(job_named(runtime, job))["metadata"]["annotations"]
        (level,) = [value for key, value in annotations.items() if "-topology" in key]
        assert level in levels
    job = read(EXAMPLES / "kueue/trainjob.yaml")
    wanted = job["spec"]["trainer"]["resourcesPerNode"]["requests"].keys()
    (group,) = queues["ClusterQueue"]["resourceGroups"]
    assert wanted <= {*group["coveredResources"]}
    assert [each["name"] for each in group["flavors"][0]["resources"]] == group["coveredResources"]
    queue = built["LocalQueue/training"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
    assert job["metadata"]["namespace"] == queue["metadata"]["namespace"]


def test_volcano_gets_the_topology_and_its_tiers_are_there() -> None:
    built = build(EXAMPLES / "volcano")
    job = read(EXAMPLES / "volcano/trainjob.yaml")
    (runtime,) = [thing for thing in built.values() if is_runtime(thing)]
    (group,) = [each for each in render_objects(job, runtime) if each["kind"] == "PodGroup"]
    topology = group["spec"]["networkTopology"]
    nodes = {name: thing for name, thing in built.items() if thing["kind"] == "HyperNode"}
    assert topology["highestTierAllowed"] in {each["spec"]["tier"] for each in nodes.values()}
    named = yaml.safe_dump([*nodes.values()])
    for member in nodes["HyperNode/hall"]["spec"]["members"]:
        assert f"HyperNode/{member['selector']['exactMatch']['name']}" in nodes, named


def test_kai_gets_pods_of_all_jobs_at_once_in_a_queue_that_is_there() -> None:
    built = build(EXAMPLES / "kai")
    (runtime,) = [thing for thing in built.values() if is_runtime(thing)]
    job = read(EXAMPLES / "kai/trainjob.yaml")
    (job_set,) = [each for each in render_objects(job, runtime) if each["kind"] == "JobSet"]
    for each in job_set["spec"]["replicatedJobs"]:
        assert pod_of(each)["spec"]["schedulerName"] == "kai-scheduler"
        assert "dependsOn" not in each  # KAI waits for pods of every job
    queue = built[f"Queue/{job['metadata']['labels']['kai.scheduler/queue']}"]
    assert f"Queue/{queue['spec']['parentQueue']}" in built


def test_multikueue_finds_its_clusters_and_its_check() -> None:
    built = build(EXAMPLES / "multikueue")
    check = built["AdmissionCheck/workers"]
    (named,) = built["ClusterQueue/training"]["spec"]["admissionChecksStrategy"]["admissionChecks"]
    assert named["name"] == check["metadata"]["name"]
    parameters = check["spec"]["parameters"]
    for cluster in built[f"{parameters['kind']}/{parameters['name']}"]["spec"]["clusters"]:
        assert f"MultiKueueCluster/{cluster}" in built


def test_a_leader_worker_set_starts_one_cache_whose_leader_coordinates() -> None:
    text = (EXAMPLES / "lws/cache.yaml").read_text("utf-8")
    group, service = yaml.safe_load_all(text)
    schema = SPECS[f"{group['apiVersion']} {group['kind']}"]
    assert list(Draft202012Validator(schema).iter_errors(group["spec"])) == []
    template = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    labels = {"matchLabels": template["metadata"]["labels"]}
    made = {"serviceName": "cache", "selector": labels, "template": template}  # as LWS does
    pods = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": group["metadata"]}
    assert list(admission.problems({**pods, "spec": made})) == []
    (container,) = template["spec"]["containers"]
    taken = {
        "$(LWS_LEADER_ADDRESS)": "cache-0.cache.a",
        "$(POD_NAME).cache.$(POD_NAMESPACE)": "cache-0.cache.a",
        "$(POD_IP)": "127.0.0.1",
        "$(CONTAINER_MEMORY_LIMIT)": str(8 << 30),
    }
    given = {}
    for argument in container["args"][1:]:
        option, _, value = argument.removeprefix("--").partition("=")
        for name, replaced in taken.items():
            value = value.replace(name, replaced)
        given[option.replace("-", "_")] = value
    given["container_memory_limit_bytes"] = given.pop("container_memory_limit")
    assert NodeConfig.build(**given).is_coordinator  # of the leader; its workers have other names
    given["advertise"] = "cache-0-1.cache.a"
    assert not NodeConfig.build(**given).is_coordinator
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
