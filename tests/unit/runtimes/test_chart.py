"""The Helm chart makes what kustomize makes of the same manifests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache_runtimes import MANIFESTS
from tests.helm import helm
from tests.kustomize import build, customised
from tests.manifests import (
    CACHE_COMMAND,
    POD_RULES,
    container_named,
    containers,
    job_named,
    pod_of,
    pods,
    read,
)
from tests.runtime_rules import problems

Json = dict[str, Any]

MONITORING = MANIFESTS.parent / "docs/monitoring"
FLAGSHIP = "torch-distributed-data-cache"
CACHE = f"ClusterTrainingRuntime/{FLAGSHIP}"


def test_the_defaults_are_those_of_kustomize() -> None:
    assert helm() == build(MANIFESTS)


@pytest.mark.parametrize("folder", [FLAGSHIP, "jax-distributed-data-cache"])
@pytest.mark.parametrize(
    ("component", "value"),
    [
        ("before-kubernetes-1.35", "beforeKubernetes135=true"),
        ("cache-nodes-4", "cache.nodes=4"),
        ("gpu", "gpu=true"),
        ("openshift", "openshift=true"),
        ("start-together", "startTogether=true"),
    ],
)
def test_a_value_does_what_its_component_does(
    folder: str, component: str, value: str, tmp_path: Path
) -> None:
    built = customised(tmp_path, resources=[folder], components=[f"components/{component}"])
    made = helm(f'runtimes=["{folder}"]', "shared.enabled=false", value)
    assert [thing["spec"] for thing in made.values()] == [thing["spec"] for thing in built.values()]


def test_tls_of_the_shared_cache_is_that_of_its_component(tmp_path: Path) -> None:
    for namespace in ("data-cache-system", "team-a"):
        (tmp_path / namespace).mkdir()
        datasets = os.path.relpath(MONITORING / "datasets", tmp_path / namespace)
        (tmp_path / namespace / "kustomization.yaml").write_text(
            yaml.safe_dump({"namespace": namespace, "resources": [datasets]})
        )
        built = customised(
            tmp_path,
            resources=[".", "../docs/monitoring", tmp_path / namespace],
            components=["components/tls"],
        )
        watched = ("monitoring.enabled=true", f'monitoring.datasetNamespaces=["{namespace}"]')
        assert helm('shared.tls.secretName="data-cache-tls"', *watched) == built
        (datasets,) = built["PodMonitor/data-cache-datasets"]["spec"]["podMetricsEndpoints"]
        # Caches of jobs have no TLS.
        assert (datasets.get("scheme") == "https") == (namespace == "data-cache-system")
    (nodes,) = built["PodMonitor/data-cache"]["spec"]["podMetricsEndpoints"]
    (rule,) = nodes["relabelings"]
    assert (rule["targetLabel"], rule["replacement"]) == ("__scheme__", "https")
    names = {
        (path.parent.name, pod["metadata"]["labels"].get("app.kubernetes.io/name"))
        for path in (*MANIFESTS.glob("*/runtime.yaml"), MANIFESTS / "shared/stateful-set.yaml")
        for _, pod in pods(read(path))
    }
    assert [folder for folder, name in names if name == rule["regex"]] == ["shared"]


def test_without_auth_nothing_is_left_of_it_and_nodes_say_so() -> None:
    kept = "torch-distributed-with-cache"
    names = ("shared-data-cache", "data-cache", "data-cache-colocated")
    folders = [*(f"torch-distributed-{name}" for name in names), "deepspeed-data-cache", kept]
    built = helm("auth.enabled=false", f"runtimes={json.dumps(folders)}")
    theirs = built.pop(f"ClusterTrainingRuntime/{kept}")
    assert theirs == helm()[f"ClusterTrainingRuntime/{kept}"]  # its initializer makes its nodes
    cache = built["StatefulSet/data-cache"]["spec"]["template"]["spec"]
    # Its nodes show a token to the API server, which has the Lease, and to nobody else.
    (token,) = (each for each in cache["volumes"] if "projected" in each)
    assert token["name"] == "api-server"
    shared = json.dumps(built["StatefulSet/data-cache"])
    assert not [w for w in ("CACHE_TOKEN_FILE", "--auth", "data-cache-auth") if w in shared]
    text = json.dumps({key: thing for key, thing in built.items() if "StatefulSet" not in key})
    for word in ("CACHE_TOKEN_FILE", "--auth", "service-account-dir", "projected", "configMap"):
        assert word not in text
    nodes = [
        container
        for thing in built.values()
        for _, pod in pods(thing)
        for container in containers(pod)
        if container.get("command") == CACHE_COMMAND
    ]
    assert len(nodes) == 4
    assert all("--insecure" in node["args"] for node in nodes)
    assert {
        problem
        for thing in built.values()
        for problem in problems(thing)
        if not problem.startswith("callers_are_known")
    } == set()


def test_the_rules_of_the_shared_cache_are_a_value() -> None:
    rules = [{"subject": "system:serviceaccount:a:*", "roles": ["reader"]}]
    built = helm(f"auth.sharedRules={json.dumps(rules)}")
    data = built["ConfigMap/data-cache-auth"]["data"]
    assert yaml.safe_load(data["auth.yaml"]) == {"rules": rules}


def test_monitoring_is_that_of_its_kustomization() -> None:
    built = build(MONITORING)
    made = helm("runtimes=[]", "shared.enabled=false", "monitoring.enabled=true")
    assert made == built
    assert built.keys() == {
        *("PodMonitor/data-cache", "PrometheusRule/data-cache", "ConfigMap/data-cache-dashboard")
    }
    labels = 'monitoring={"enabled":true,"namespace":"watch","labels":{"release":"prometheus"}}'
    namespaces = 'monitoring.datasetNamespaces=["team-a"]'
    placed = helm("runtimes=[]", "shared.enabled=false", labels, namespaces)
    datasets = placed.pop("PodMonitor/data-cache-datasets")
    assert datasets["metadata"]["namespace"] == "team-a"
    assert datasets["spec"] == read(MONITORING / "datasets/pod-monitor.yaml")["spec"]
    for thing in placed.values():
        assert thing["metadata"]["namespace"] == "watch"
    for thing in (datasets, *placed.values()):
        assert thing["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.parametrize(
    "values",
    [
        (),
        ('shared.tls.secretName="tls"', 'shared.tls.caConfigMap="ca"'),
        ("openshift=true",),
        ("startTogether=true", "cache.nodes=7", 'cache.memory="64Gi"'),
        ('jobNetworkPolicyNamespaces=["a"]', 'initializerNamespaces=["a"]'),
        (
            'runtimes=["deepspeed-data-cache","jax-distributed-data-cache","mlx-data-cache",'
            '"torchtune-qwen2.5-1.5b","xgboost-data-cache"]',
            "shared.enabled=false",
        ),
    ],
)
def test_every_object_keeps_the_rules(values: tuple[str, ...]) -> None:
    built = helm(*values)
    assert built
    assert {name: problems(thing) for name, thing in built.items() if problems(thing)} == {}


@pytest.mark.parametrize("tls", ["", "data-cache-tls"])
def test_the_pod_of_helm_test_keeps_the_rules_and_reaches_the_shared_cache(tls: str) -> None:
    built = helm(f'shared.tls.secretName="{tls}"', with_tests=True)
    pod = built.pop("Pod/data-cache-test")
    assert built == helm(f'shared.tls.secretName="{tls}"')
    job = {"kind": "Job", "metadata": pod["metadata"], "spec": {"template": pod}}
    assert [problem for rule in POD_RULES for problem in rule(job)] == []
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["cachectl"]
    scheme = "grpc+tls" if tls else "grpc"
    assert container["args"] == [
        "doctor",
        f"--endpoint={scheme}://data-cache.data-cache-system:50051",
    ]
    (rule, *_) = built["NetworkPolicy/data-cache"]["spec"]["ingress"]
    admitted = [
        each["podSelector"]["matchLabels"] for each in rule["from"] if "podSelector" in each
    ]
    assert any(labels.items() <= pod["metadata"]["labels"].items() for labels in admitted)
    selected = built["NetworkPolicy/data-cache"]["spec"]["podSelector"]["matchLabels"]
    assert not selected.items() <= pod["metadata"]["labels"].items()  # the Service's, too
    assert "Pod/data-cache-test" not in helm("shared.enabled=false", with_tests=True)


def test_images_and_pull_secrets_reach_every_pod() -> None:
    mirror = "registry.example.com:5000"
    built = helm(
        f'images.server.repository="{mirror}/server"',
        f'images.serverFull.repository="{mirror}/server-full"',
        f'images.trainer.repository="{mirror}/trainer"',
        'images.pullSecrets=["mirror"]',
    )
    found = [pod for thing in built.values() for _, pod in pods(thing)]
    assert {each["image"] for pod in found for each in containers(pod)} == {
        f"{mirror}/server:0.2.0",
        f"{mirror}/server-full:0.2.0",
        f"{mirror}/trainer:0.2.0",
    }
    assert all(pod["spec"]["imagePullSecrets"] == [{"name": "mirror"}] for pod in found)
    assert yaml.safe_dump_all(built.values()).count(f"value: {mirror}/server-full:0.2.0") == 1


def test_one_value_is_the_registry_of_every_image() -> None:
    folders = [path.parent.name for path in MANIFESTS.glob("*/runtime.yaml")]
    built = helm(
        'images.registry="registry.example.com/mirror/"', f"runtimes={json.dumps(folders)}"
    )
    found = {
        each["image"]
        for thing in built.values()
        for _, pod in pods(thing)
        for each in containers(pod)
    }
    assert {image.rpartition("/")[0] for image in found} == {"registry.example.com/mirror"}
    names = {image.rpartition("/")[2].partition(":")[0] for image in found}
    assert {"torchtune-trainer", "model-initializer"} < names
    assert {f"trainer-{name}" for name in ("jax", "mlx", "mpi", "xgboost")} < names
    assert "ghcr.io" not in json.dumps(built)


def test_cache_pods_have_their_size_and_machines() -> None:
    built = helm(
        "cache.nodes=3",
        'cache.memory="64Gi"',
        'cache.nodeSelector={"pool":"memory"}',
    )
    job = job_named(built[CACHE], "dataset-initializer")
    pod = pod_of(job)
    assert job["template"]["spec"]["parallelism"] == 3
    cache = container_named(pod, "dataset-initializer")
    assert cache["resources"]["limits"]["memory"] == "64Gi"
    assert pod["spec"]["nodeSelector"] == {"pool": "memory"}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["initializer"]["emptyDir"]["sizeLimit"] == "48Gi"
    trainer = pod_of(job_named(built[CACHE], "node"))
    assert "nodeSelector" not in trainer["spec"]
