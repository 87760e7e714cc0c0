"""What ``kubectl kustomize`` makes of runtimes/: the objects, the sizes, the images."""

import os
import shutil
from pathlib import Path

import pytest
import yaml

from cache_runtimes import MANIFESTS
from cache_server.auth.verbs import ROLES, is_open
from tests.kustomize import build, customised
from tests.manifests import (
    Json,
    container_named,
    containers,
    env_of,
    is_runtime,
    job_named,
    job_set,
    jobs,
    pod_of,
    pods,
    read,
)
from tests.runtime_rules import problems

CACHE = "torch-distributed-data-cache"
SHARED = {
    "ConfigMap/data-cache-auth",
    *("Namespace/data-cache-system", "NetworkPolicy/data-cache", "PodDisruptionBudget/data-cache"),
    *("Service/data-cache", "Service/data-cache-nodes", "ServiceAccount/data-cache"),
    *("StatefulSet/data-cache", "Role/data-cache", "RoleBinding/data-cache"),
}


def runtimes_named(*names: str) -> set[str]:
    return {f"ClusterTrainingRuntime/{name}" for name in names}


WITH_CACHE = {
    "ClusterRole/data-cache-initializer",
    *runtimes_named("torch-distributed-with-cache"),
}
OBJECTS = {
    ".": {
        *runtimes_named(CACHE, f"{CACHE}-colocated", "torch-distributed-shared-data-cache"),
        *WITH_CACHE,
        *SHARED,
    },
    "shared": SHARED,
    CACHE: runtimes_named(CACHE),
    f"{CACHE}-colocated": runtimes_named(f"{CACHE}-colocated"),
    "torch-distributed-with-cache": WITH_CACHE,
    "torch-distributed-shared-data-cache": runtimes_named("torch-distributed-shared-data-cache"),
    "deepspeed-data-cache": runtimes_named("deepspeed-data-cache"),
    "jax-distributed-data-cache": runtimes_named("jax-distributed-data-cache"),
    "mlx-data-cache": runtimes_named("mlx-data-cache"),
    "xgboost-data-cache": runtimes_named("xgboost-data-cache"),
    "torchtune-qwen2.5-1.5b": {"TrainingRuntime/torchtune-qwen2.5-1.5b"},
    "overlays/before-kubernetes-1.35": runtimes_named(CACHE),
    **{
        f"overlays/{name}": runtimes_named(name)
        for name in (
            *(f"{CACHE}-4", f"{CACHE}-8", f"{CACHE}-colocated-volcano"),
            *(f"{CACHE}-colocated-default-scheduler", f"{CACHE}-start-together", f"{CACHE}-gpu"),
        )
    },
}
RUNTIMES = sorted(
    folder
    for folder in OBJECTS
    if "/" not in folder and (MANIFESTS / folder / "runtime.yaml").exists()
)
BY_SSH = ("deepspeed-data-cache", "mlx-data-cache")
IN_JOB = [
    folder
    for folder in RUNTIMES
    if "cache-in-job" in read(MANIFESTS / folder / "runtime.yaml")["metadata"]["labels"].values()
]


def only(built: dict[str, Json]) -> Json:
    (thing,) = built.values()
    return thing


@pytest.mark.parametrize("folder", OBJECTS)
def test_a_kustomization_builds_objects_that_keep_every_rule(
    folder: str,
) -> None:
    built = build(MANIFESTS / folder)
    assert built.keys() == OBJECTS[folder]
    assert {name: problems(thing) for name, thing in built.items() if problems(thing)} == {}


def test_no_kustomization_is_left_out() -> None:
    found = {
        str(path.parent.relative_to(MANIFESTS))
        for path in MANIFESTS.rglob("kustomization.yaml")
        if read(path)["kind"] == "Kustomization"
    }
    assert found == OBJECTS.keys()


@pytest.mark.parametrize("folder", [CACHE, "jax-distributed-data-cache", "xgboost-data-cache"])
@pytest.mark.parametrize("size", [4, 8])
def test_a_size_is_one_number_and_another_name(folder: str, size: int, tmp_path: Path) -> None:
    base = only(build(MANIFESTS / folder))
    built = only(
        customised(tmp_path, resources=[folder], components=[f"components/cache-nodes-{size}"])
    )
    assert built["metadata"].pop("name") == f"{base['metadata'].pop('name')}-{size}"
    job = job_named(base, "dataset-initializer")["template"]["spec"]
    job["parallelism"] = job["completions"] = size
    environment = container_named(job["template"], "dataset-initializer")["env"]
    next(each for each in environment if each["name"] == "CACHE_WORLD_SIZE")["value"] = str(size)
    assert built == base


def unchangeable(runtime: Json) -> Json:
    """What an installed runtime keeps: the schema of Trainer calls it immutable."""
    spec = job_set(runtime)
    fields = ("network", "successPolicy", "failurePolicy", "startupPolicy", "volumeClaimPolicies")
    kept = {name: spec[name] for name in fields if name in spec}
    return {**kept, "dependsOn": {job["name"]: job.get("dependsOn") for job in jobs(runtime)}}


@pytest.mark.parametrize("folder", IN_JOB)
def test_before_kubernetes_1_35_the_kubelet_restarts_cache_pods(
    folder: str, tmp_path: Path
) -> None:
    component = "components/before-kubernetes-1.35"
    built = only(customised(tmp_path, resources=[folder], components=[component]))
    assert problems(built) == []
    job = job_named(built, "dataset-initializer")
    assert pod_of(job)["spec"]["restartPolicy"] == "OnFailure"
    assert "podFailurePolicy" not in job["template"]["spec"]
    base = only(build(MANIFESTS / folder))
    assert unchangeable(built) == unchangeable(base)
    assert built["metadata"] == base["metadata"]
    assert not {"restartPolicy", "restartPolicyRules"} & pod_of(job)["spec"]["containers"][0].keys()
    (cache,) = pod_of(job)["spec"]["containers"]
    assert "--signal-exit-code=143" in cache["args"]  # with 0 a drained pod would count as done
    for other in ("node", "launcher"):
        if other in [each["name"] for each in job_set(built)["replicatedJobs"]]:
            assert pod_of(job_named(built, other))["spec"]["restartPolicy"] == "Never"


def test_the_overlay_names_the_scheduler_of_the_gang() -> None:
    folder = MANIFESTS / "overlays" / f"{CACHE}-colocated"
    volcano = only(build(folder.with_name(f"{folder.name}-volcano")))
    assert volcano["spec"]["podGroupPolicy"] == {"volcano": {}}
    assert pod_of(job_named(volcano, "node"))["spec"]["schedulerName"] == "volcano"
    none = only(build(folder.with_name(f"{folder.name}-default-scheduler")))
    assert "podGroupPolicy" not in none["spec"]
    assert "schedulerName" not in pod_of(job_named(none, "node"))["spec"]


def test_images_change_in_every_pod(tmp_path: Path) -> None:
    """In runtimes/kustomization.yaml itself, as its comment says."""
    copied = tmp_path / "runtimes"
    for path in MANIFESTS.rglob("*.yaml"):
        target = copied / path.relative_to(MANIFESTS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    top = read(copied / "kustomization.yaml")
    for image in top["images"]:
        image["newName"] = image["name"].replace("ghcr.io", "registry.example.com:5000")
        image["newTag"] = "tomorrow"
    (copied / "kustomization.yaml").write_text(yaml.safe_dump(top), encoding="utf-8")
    built = build(copied)
    images = {
        container["image"]
        for thing in built.values()
        for _, pod in pods(thing)
        for container in containers(pod)
    }
    repository = "registry.example.com:5000/trainer-data-cache"
    assert images == {
        f"{repository}/{name}:tomorrow" for name in ("server", "server-full", "trainer")
    }
    made = built["ClusterTrainingRuntime/torch-distributed-with-cache"]
    pod = pod_of(job_named(made, "dataset-initializer"))
    image = env_of(container_named(pod, "dataset-initializer"))["CACHE_IMAGE"]
    assert image == f"{repository}/server-full:tomorrow"


def test_a_kustomization_on_top_changes_images_too(tmp_path: Path) -> None:
    images = [{"name": "ghcr.io/trainer-data-cache/server", "newTag": "tomorrow"}]
    built = customised(tmp_path, resources=["."], images=images)
    changed = [
        container["image"]
        for thing in built.values()
        for _, pod in pods(thing)
        for container in containers(pod)
        if "/server:" in container["image"]
    ]
    assert changed
    assert all(image.endswith("/server:tomorrow") for image in changed)


def test_a_namespace_is_given_access_by_a_component(tmp_path: Path) -> None:
    built = customised(
        tmp_path,
        namespace="team-a",
        components=["torch-distributed-with-cache/namespace-access"],
    )
    account = built["ServiceAccount/data-cache-initializer"]
    binding = built["RoleBinding/data-cache-initializer"]
    assert account["metadata"]["namespace"] == binding["metadata"]["namespace"] == "team-a"
    (subject,) = binding["subjects"]
    assert subject == {
        "kind": "ServiceAccount",
        "name": "data-cache-initializer",
        "namespace": "team-a",
    }
    assert all(problems(thing) == [] for thing in built.values() if not is_runtime(thing))


@pytest.mark.parametrize("folder", [".", *(name for name in RUNTIMES if name not in BY_SSH)])
def test_on_openshift_no_pod_names_a_user_or_a_group(folder: str, tmp_path: Path) -> None:
    built = customised(tmp_path, resources=[folder], components=["components/openshift"])
    found = {
        f"{name} {field}"
        for thing in built.values()
        for name, pod in pods(thing)
        for field in ("runAsUser", "runAsGroup", "fsGroup")
        if field in pod["spec"]["securityContext"]
    }
    assert found == set()
    assert {name: problems(thing) for name, thing in built.items() if problems(thing)} == {}


@pytest.mark.parametrize("folder", [CACHE, "jax-distributed-data-cache", "xgboost-data-cache"])
def test_trainers_that_start_together_with_the_cache_wait_for_it(
    folder: str, tmp_path: Path
) -> None:
    base = only(build(MANIFESTS / folder))
    built = only(customised(tmp_path, resources=[folder], components=["components/start-together"]))
    assert problems(built) == []
    assert problems({**built, "spec": {**built["spec"], "podGroupPolicy": {"volcano": {}}}}) == []
    assert built["metadata"].pop("name") == f"{base['metadata'].pop('name')}-start-together"
    node = container_named(pod_of(job_named(built, "node")), "node")
    assert float(node["env"].pop()["value"]) > 3600
    del job_named(base, "node")["dependsOn"]
    cache = container_named(pod_of(job_named(base, "dataset-initializer")), "dataset-initializer")
    cache["readinessProbe"]["grpc"]["service"] = "live"  # for Kueue, a loading pod is ready
    assert built == base


COMPONENTS = sorted(path.parent.name for path in MANIFESTS.glob("components/*/kustomization.yaml"))
NO_CACHE_IN_JOB = {
    ".",
    "shared",
    *({*RUNTIMES} - {*IN_JOB}),
    *(f for f in OBJECTS if f"{CACHE}-col" in f),
}
# What a component is not for. It must say so, not build something else.
REFUSED: dict[str, set[str]] = {
    "before-kubernetes-1.35": {"overlays/before-kubernetes-1.35"},
    "cache-nodes-4": {*NO_CACHE_IN_JOB, "torchtune-qwen2.5-1.5b"},
    "cache-nodes-8": {*NO_CACHE_IN_JOB, "torchtune-qwen2.5-1.5b"},
    "gpu": {*NO_CACHE_IN_JOB, "torchtune-qwen2.5-1.5b"},
    "job-network-policy": set(),
    "kueue-topology": {*NO_CACHE_IN_JOB, *BY_SSH, "torchtune-qwen2.5-1.5b"},
    "openshift": {*BY_SSH},
    "start-together": {
        *NO_CACHE_IN_JOB,
        *(*BY_SSH, "torchtune-qwen2.5-1.5b"),
        f"overlays/{CACHE}-start-together",
    },
    "tls": set(),
    "tls-cert-manager": set(),
    "volcano-topology": {*OBJECTS} - {f"overlays/{CACHE}-colocated-volcano"},
}


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_builds_with_every_folder_that_it_is_for(
    component: str, tmp_path: Path
) -> None:
    """All in one call, by a suffix of the names for each folder."""
    folders = [folder for folder in OBJECTS if folder not in REFUSED[component]]
    for number, folder in enumerate(folders):
        (tmp_path / str(number)).mkdir()
        fields = {
            "nameSuffix": f"-in{number}",
            "resources": [os.path.relpath(MANIFESTS / folder, tmp_path / "0")],
            "components": [os.path.relpath(MANIFESTS / "components" / component, tmp_path / "0")],
        }
        if folder in (".", "shared"):  # no suffix reaches the name of a Namespace
            fields["namespace"] = f"x-in{number}"
        file = tmp_path / str(number) / "kustomization.yaml"
        file.write_text(yaml.safe_dump(fields), encoding="utf-8")
    numbers = [str(number) for number in range(len(folders))]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": numbers}))
    seen, found = set(), {}
    for key, thing in build(tmp_path).items():
        thing["metadata"]["name"], _, number = thing["metadata"]["name"].rpartition("-in")
        seen.add(number)
        found[folders[int(number)], key] = problems(thing)
    assert {key: lines for key, lines in found.items() if lines} == {}
    assert seen == {*numbers}


@pytest.mark.parametrize(
    ("folder", "component"),
    [
        (folder, component)
        for component in COMPONENTS
        if component != "cache-nodes-8"  # as cache-nodes-4 but for the number
        for folder in sorted(REFUSED[component])
        if "/" not in folder or component in folder  # others are as the runtime below them
    ],
)
def test_a_component_refuses_what_it_is_not_for(
    folder: str, component: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"test failed|missing|multiple|nothing selected"):
        customised(tmp_path, resources=[folder], components=[f"components/{component}"])


def test_pods_of_jobs_reach_each_other_in_a_namespace_that_denies_by_default(
    tmp_path: Path,
) -> None:
    built = only(
        customised(tmp_path, namespace="team-a", components=["components/job-network-policy"])
    )
    assert problems(built) == []
    assert built["metadata"]["namespace"] == "team-a"
    chosen = built["spec"]["podSelector"]["matchLabels"].items()
    for folder in RUNTIMES:
        for name, pod in pods(read(MANIFESTS / folder / "runtime.yaml")):
            assert chosen <= pod["metadata"]["labels"].items(), f"{folder} {name}"
    ingress, egress = built["spec"]["ingress"], built["spec"]["egress"]
    own = [{"podSelector": built["spec"]["podSelector"]}]
    assert ingress == [{"from": own}]
    assert {"to": own} in egress
    shared = read(MANIFESTS / "shared/stateful-set.yaml")
    labels = shared["spec"]["template"]["metadata"]["labels"]
    (to_shared,) = (rule for rule in egress if "podSelector" in rule["to"][0] and "ports" in rule)
    assert to_shared["to"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    # Names, and HTTPS for stores and the keys of tokens: as for the shared cache.
    assert egress[-2:] == read(MANIFESTS / "shared/network-policy.yaml")["spec"]["egress"][-2:]


def test_nodes_and_clients_of_the_shared_cache_use_tls_by_a_certificate_of_their_names(
    tmp_path: Path,
) -> None:
    built = customised(tmp_path, resources=["."], components=["components/tls-cert-manager"])
    assert {name: problems(thing) for name, thing in built.items() if problems(thing)} == {}
    (node,) = built["StatefulSet/data-cache"]["spec"]["template"]["spec"]["containers"]
    assert "--tls-cert=/etc/data-cache-tls/tls.crt" in node["args"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert node[probe]["httpGet"]["scheme"] == "HTTPS"
        assert f"http {node[probe]['httpGet']['path']}" in {verb for verb in ROLES if is_open(verb)}
    runtime = built["ClusterTrainingRuntime/torch-distributed-shared-data-cache"]
    loads = container_named(
        pod_of(job_named(runtime, "dataset-initializer")), "dataset-initializer"
    )
    trains = container_named(pod_of(job_named(runtime, "node")), "node")
    endpoint = env_of(trains)["CACHE_ENDPOINT"]
    assert f"--endpoint={endpoint}" in loads["args"]
    assert endpoint.startswith("grpc+tls://")
    for client in (loads, trains):
        assert env_of(client)["CACHE_TLS_CA"] == "/etc/data-cache-ca/ca.crt"
    names = built["Certificate/data-cache-tls"]["spec"]["dnsNames"]
    advertised = "data-cache-1.data-cache-nodes.data-cache-system"
    host = endpoint.removeprefix("grpc+tls://").partition(":")[0]
    assert host in names
    assert advertised.replace("data-cache-1", "*", 1) in names
