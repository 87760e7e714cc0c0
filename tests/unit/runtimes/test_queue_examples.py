"""The examples for Kueue and Volcano build, are admitted, and fit each other."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from cache_runtimes import MANIFESTS
from cache_runtimes.local.render import render_objects
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
# The fields that the examples use, by the CRDs of Kueue (v1beta2) and Volcano (v1alpha1).
SPECS = {
    "kueue.x-k8s.io/v1beta2 Topology": fields(
        "levels", levels=many(fields("nodeLabel", nodeLabel=TEXT))
    ),
    "kueue.x-k8s.io/v1beta2 ResourceFlavor": fields(
        "nodeLabels topologyName", nodeLabels=LABELS, topologyName=TEXT
    ),
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


@pytest.fixture(scope="module", params=["kueue", "volcano"])
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
        assert list(Draft202012Validator(schema).iter_errors(thing["spec"])) == []
    job = read(EXAMPLES / name / "trainjob.yaml")
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
