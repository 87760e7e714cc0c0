"""What an API server refuses of this project's objects, and of those that are made of them."""

from __future__ import annotations

import copy
import json
import lzma
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache_runtimes import MANIFESTS
from cache_runtimes.local.render import render_objects
from cache_runtimes.local.trainer.jobset import jobs_of
from cache_runtimes.local.trainer.refusals import (
    SCHEMA_OF_TRAIN_JOB,
    RefusedError,
)
from tests import admission
from tests.manifests import Json, pods_are_restricted, read, requests_fit_limits

ROOT = MANIFESTS.parent
GOLDEN = Path(__file__).parents[2] / "golden"
RUNTIMES = sorted(path.parent.name for path in MANIFESTS.glob("*/runtime.yaml"))
TRAINER = "trainer.kubeflow.org/v1alpha1"
KINDS = {
    "TrainJob": f"{TRAINER} TrainJob",
    "ClusterTrainingRuntime": f"{TRAINER} ClusterTrainingRuntime",
    "TrainingRuntime": f"{TRAINER} TrainingRuntime",
    "JobSet": "jobset.x-k8s.io/v1alpha2 JobSet",
}


def golden_cases(name: str) -> list[Json]:
    file = GOLDEN / f"{name}.json.xz"
    found: list[Json] = json.loads(lzma.decompress(file.read_bytes()))["cases"]
    return found


def test_the_schemas_refuse_the_train_jobs_that_a_cluster_refused_and_no_other() -> None:
    names = sorted(path.name.removesuffix(".json.xz") for path in GOLDEN.glob("*.json.xz"))
    wrong = [
        (name, case["case"])
        for name in names
        for case in golden_cases(name)
        if any(each["by"] == SCHEMA_OF_TRAIN_JOB for each in case.get("refused", ()))
        is not bool(list(admission.problems(case["trainJob"])))
    ]
    assert wrong == []


# Runtimes without cases of their own -> one of the same policy.
SAME_POLICY = {"mlx-data-cache": "deepspeed-data-cache", "xgboost-data-cache": "xgboost-minimal"}
# Those that differ in resources, pods, environment and names.
RENDERED = {
    *("bare", "sdk-gpu-1", "gpu-4", "requests-only", "requests-gpu-only", "limits-below-requests"),
    *("nodes-3-procs-2", "patched", "env-over-runtime", "name-33", "torchtune-sdk"),
}
# The job asks for a device in `requests` alone.
HANGS = {"requests-gpu-only"}


@pytest.mark.parametrize("name", RUNTIMES)
def test_what_is_made_of_a_train_job_is_admitted(name: str) -> None:
    """The JobSet by its CRD; each Job by Kubernetes, Pod Security and its requests and limits."""
    runtime = read(MANIFESTS / name / "runtime.yaml")
    cases = {
        case["case"]: case["trainJob"]
        for case in golden_cases(SAME_POLICY.get(name, name))
        if case["case"] in RENDERED
    }
    admitted = {}
    for case, train_job in cases.items():
        try:
            made = render_objects(train_job, runtime)
        except RefusedError:
            continue
        made = [thing for thing in made if thing["kind"] != "PodGroup"]  # its CRD is elsewhere
        made += [
            {**job, "apiVersion": "batch/v1", "kind": "Job"}
            for job_set in made
            if job_set["kind"] == "JobSet"
            for job in jobs_of(job_set)
        ]
        admitted[case] = [
            problem
            for thing in made
            for rule in (admission.problems, pods_are_restricted, requests_fit_limits)
            for problem in rule(thing)
        ]
    assert len(admitted) >= 8
    assert {case for case, problems in admitted.items() if problems} == HANGS & admitted.keys()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_the_objects_of_an_example_are_admitted(path: Path) -> None:
    for thing in yaml.safe_load_all(path.read_text("utf-8")):
        if "apiVersion" in thing:
            assert list(admission.problems(thing)) == []


POD: Json = {
    "serviceAccountName": "a",
    "terminationGracePeriodSeconds": 1,
    "volumes": [{"name": "a", "emptyDir": {}}],
    "containers": [{"name": "a", "volumeMounts": [{"name": "a", "mountPath": "/a"}]}],
    "initContainers": [{"name": "b", "volumeMounts": [{"name": "a", "mountPath": "/a"}]}],
    "imagePullSecrets": [{"name": "a"}],
    "securityContext": {"runAsUser": 1},
}
# An object of each kind in which every path with a rule has a value.
WHOLE: dict[str, Json] = {
    "TrainJob": {
        "apiVersion": TRAINER,
        "kind": "TrainJob",
        "metadata": {"name": "job"},
        "spec": {
            "runtimeRef": {"name": "a"},
            "managedBy": "trainer.kubeflow.org/trainjob-controller",
            "activeDeadlineSeconds": 60,
            "initializer": {
                "dataset": {"storageUri": "s3://a/b"},
                "model": {"storageUri": "s3://a/b"},
            },
            "trainer": {"numNodes": 1, "numProcPerNode": 1},
            "runtimePatches": [
                {
                    "manager": "example.com/a",
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {
                                "replicatedJobs": [
                                    {
                                        "name": "node",
                                        "template": {"spec": {"template": {"spec": POD}}},
                                    }
                                ]
                            }
                        }
                    },
                }
            ],
        },
        "status": {"trainerStatus": {"lastUpdatedTime": "2026-01-01T00:00:00Z"}},
    }
}
JOB_SET: Json = {
    "failurePolicy": {"maxRestarts": 1},
    "network": {"enableDNSHostnames": True},
    "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
    "successPolicy": {"operator": "All"},
    "volumeClaimPolicies": [{"templates": [{"metadata": {"name": "a"}, "spec": {}}]}],
    "replicatedJobs": [
        {"name": "a", "template": {"spec": {"template": {"spec": {"containers": []}}}}},
        {
            "name": "b",
            "dependsOn": [{"name": "a", "status": "Ready"}],
            "template": {"spec": {"template": {"spec": {"containers": []}}}},
        },
    ],
}
for _job in JOB_SET["replicatedJobs"]:
    _job["template"]["spec"]["template"]["spec"]["containers"] = [{"name": "node"}]
WHOLE["JobSet"] = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "job"},
    "spec": JOB_SET,
}
for _kind in ("ClusterTrainingRuntime", "TrainingRuntime"):
    WHOLE[_kind] = {
        "apiVersion": TRAINER,
        "kind": _kind,
        "metadata": {"name": "runtime"},
        "spec": {
            "mlPolicy": {
                "torch": {
                    "envInjection": {"targets": [{"jobName": "a", "containerNames": ["cache"]}]}
                }
            },
            "template": {"spec": JOB_SET},
        },
    }

# Path of a rule and a part of its text -> the field to change, and a value that breaks the rule.
_SPEC = "$.spec.template.spec"
_IN_JOB_SET = {
    ("", "startupPolicyOrder"): ("startupPolicy.startupPolicyOrder", "InOrder"),
    (".volumeClaimPolicies[]", "namespace"): (
        "volumeClaimPolicies.0.templates.0.metadata.namespace",
        "other",
    ),
}
BREAKS: dict[str, dict[tuple[str, str], tuple[str, Any]]] = {
    "TrainJob": {
        ("$", "matches"): ("metadata.name", "1job"),
        ("$", "size"): ("metadata.name", "j" * 64),
        ("$.spec.managedBy", "in ["): ("spec.managedBy", "example.com/me"),
        ("$.spec.initializer.dataset.storageUri", "matches"): (
            "spec.initializer.dataset.storageUri",
            "/data",
        ),
        ("$.spec.initializer.model.storageUri", "matches"): (
            "spec.initializer.model.storageUri",
            "/data",
        ),
        ("$.spec.trainer.numProcPerNode", ">= 1"): ("spec.trainer.numProcPerNode", 0),
        ("$.status.trainerStatus", "lastUpdatedTime"): ("status.trainerStatus", {}),
    },
    "JobSet": {
        (f"$.spec{path}", text): (f"spec.{field}", value)
        for (path, text), (field, value) in _IN_JOB_SET.items()
    },
    "ClusterTrainingRuntime": {
        **{
            (f"{_SPEC}{path}", text): (f"spec.template.spec.{field}", value)
            for (path, text), (field, value) in _IN_JOB_SET.items()
        },
        ("$.spec.mlPolicy", "filter"): ("spec.mlPolicy.jax", {}),
        ("$.spec.mlPolicy.mpi.numProcPerNode", ">= 1"): (
            "spec.mlPolicy",
            {"mpi": {"numProcPerNode": 0}},
        ),
        ("$.spec.mlPolicy.flux.numProcPerNode", ">= 1"): (
            "spec.mlPolicy",
            {"flux": {"numProcPerNode": 0}},
        ),
        ("$.spec.mlPolicy.torch.envInjection.targets[].containerNames", "exists"): (
            "spec.mlPolicy.torch.envInjection.targets.0.containerNames",
            ["node"],
        ),
    },
}
BREAKS["TrainingRuntime"] = BREAKS["ClusterTrainingRuntime"]
# It is the key by which the items of the list are compared: another one is another item.
KEY = ("TrainJob", "$.spec.runtimePatches[].manager", "self == oldSelf")
RULES = sorted(
    {(kind, *rule) for kind, name in KINDS.items() for rule in admission.rules_of(name)} - {KEY}
)


def changed(thing: Json, path: str, value: Any) -> Json:
    thing = copy.deepcopy(thing)
    place: Any = thing
    *steps, last = path.split(".")
    for step in steps:
        place = place[int(step) if isinstance(place, list) else step]
    place[last] = value
    return thing


def updated(kind: str, rule_path: str) -> Json:
    """The object of a kind, with another value at the path of a rule."""
    thing = copy.deepcopy(WHOLE[kind])
    place: Any = thing
    *steps, last = re.sub(r"\[\]", ".0", rule_path.removeprefix("$.")).split(".")
    if steps[-2:] == ["replicatedJobs", "0"] and last == "dependsOn":
        steps[-1] = "1"
    for step in steps:
        place = place[int(step) if isinstance(place, list) else step]
    place[last] = other(place[last])
    return thing


def other(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return f"{value}x"
        case list():
            return [*value, *value]
        case _:
            return {key: other(each) for key, each in value.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_with_every_field_that_has_a_rule_keeps_them_all(kind: str) -> None:
    assert list(admission.problems(WHOLE[kind])) == []
    assert list(admission.broken_rules(WHOLE[kind], old=WHOLE[kind])) == []


@pytest.mark.parametrize(("kind", "path", "text"), RULES)
def test_each_rule_of_a_crd_refuses_something(kind: str, path: str, text: str) -> None:
    place = re.escape(path).replace(r"\[\]", r"\[\d+\]")
    if text == "self == oldSelf":
        thing, old = updated(kind, path), WHOLE[kind]
    else:
        (found,) = [
            found for (of, part), found in BREAKS[kind].items() if of == path and part in text
        ]
        thing, old = changed(WHOLE[kind], *found), None
    broken = [line for line in admission.broken_rules(thing, old) if re.match(f"{place}: ", line)]
    assert broken, list(admission.broken_rules(thing, old))


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("TrainJob", "spec.trainr", {}),
        ("TrainJob", "spec.trainer.numNodes", "2"),
        ("TrainJob", "spec.runtimeRef", {}),
        ("TrainJob", "spec.runtimePatches.0.manager", ""),
        ("TrainJob", "spec.runtimePatches", [{"manager": "example.com/a"}] * 2),
        ("JobSet", "spec.successPolicy.operator", "Some"),
        ("JobSet", "spec.replicatedJobs.0.template.spec.template.spec.container", []),
        ("JobSet", "metadata.label", {}),
        ("ClusterTrainingRuntime", "spec.template.spec.replicatedJobs.1.dependsOn.0.status", "Up"),
    ],
)
def test_a_schema_refuses_what_it_does_not_know(kind: str, path: str, value: Any) -> None:
    assert list(admission.problems(changed(WHOLE[kind], path, value))) != []


def test_a_job_set_with_one_port_twice_is_refused() -> None:
    """The default of a key counts: the protocol is TCP."""
    ports = [{"containerPort": 1}, {"containerPort": 1, "protocol": "TCP"}]
    pod = "spec.replicatedJobs.0.template.spec.template.spec"
    thing = changed(WHOLE["JobSet"], f"{pod}.containers.0.ports", ports)
    assert "containerPort, protocol twice" in "".join(admission.problems(thing))
