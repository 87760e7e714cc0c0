"""The manifests of runtimes/ keep every rule and fit each other."""

import os
import signal
import subprocess
import tomllib
import warnings
from pathlib import Path

import pytest

from cache_protocol.datasets.job_options import FILE_VARIABLE, JobOptions
from cache_runtimes import MANIFESTS
from cache_runtimes.local.policies import ContainerExit, after_pod_failure, restarts_in_place
from cache_server.auth.jwt_tokens import JwtSettings
from cache_server.auth.principals import Role
from cache_server.auth.token_file import parse_yaml
from cache_server.config import NodeConfig
from tests.kubeflow_backend import import_sdk
from tests.manifests import (
    CACHE_COMMAND,
    Json,
    ancestor,
    container_named,
    containers,
    env_of,
    job_named,
    job_set,
    jobs,
    pod_of,
    pods,
    read,
)
from tests.runtime_rules import problems

ROOT = MANIFESTS.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
OURS = "ghcr.io/trainer-data-cache/"
TRAINERS = "ghcr.io/kubeflow/trainer/"  # a BuiltinTrainer runs in its images
FILES = sorted(
    path
    for path in MANIFESTS.rglob("*.yaml")
    if path.name != "kustomization.yaml" and MANIFESTS / "chart" not in path.parents
)
RUNTIMES = [path for path in FILES if path.name == "runtime.yaml"]
WITH_PODS = [*RUNTIMES, MANIFESTS / "shared/stateful-set.yaml"]


def name_of(path: Path) -> str:
    return path.parent.name if path.name == "runtime.yaml" else f"{path.parent.name}/{path.stem}"


def runtime(folder: str) -> Json:
    return read(MANIFESTS / folder / "runtime.yaml")


FLAGSHIP = runtime("torch-distributed-data-cache")
COLOCATED = runtime("torch-distributed-data-cache-colocated")
DEEPSPEED = runtime("deepspeed-data-cache")
WITH_CACHE = runtime("torch-distributed-with-cache")
SHARED = runtime("torch-distributed-shared-data-cache")
CACHE = read(MANIFESTS / "shared/stateful-set.yaml")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_manifest_keeps_every_rule(path: Path) -> None:
    assert problems(read(path)) == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_has_one_object(path: Path) -> None:
    assert "\n---" not in path.read_text("utf-8")


@pytest.mark.parametrize("path", RUNTIMES, ids=name_of)
def test_a_runtime_is_named_as_its_folder(path: Path) -> None:
    assert read(path)["metadata"]["name"] == path.parent.name


@pytest.mark.parametrize("path", RUNTIMES, ids=name_of)
def test_the_sdk_reads_a_runtime_from_its_file(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of pydantic, when it is imported
        from kubeflow.trainer.backends.container import runtime_loader
    name = path.parent.name
    found = runtime_loader.get_training_runtime_from_sources(name, [f"file://{path}"])
    labels = read(path)["metadata"]["labels"]
    assert found.name == name
    assert found.trainer.framework == labels["trainer.kubeflow.org/framework"]
    assert found.trainer.num_nodes == 1


@pytest.mark.parametrize("path", WITH_PODS, ids=name_of)
def test_images_are_ours_and_of_this_version(path: Path) -> None:
    for name, pod in pods(read(path)):
        for container in containers(pod):
            repository, _, tag = container["image"].rpartition(":")
            if repository.startswith(TRAINERS):
                assert path.parent.name.startswith("torchtune-"), container["image"]
                assert tag == "v2.3.0"
            else:
                assert repository.startswith(OURS), f"{name}: {container['image']}"
                assert tag == VERSION


@pytest.mark.parametrize("path", WITH_PODS, ids=name_of)
def test_only_the_pod_that_makes_a_cache_may_do_what_its_account_may_do(path: Path) -> None:
    for name, pod in pods(read(path)):
        wanted = (path.parent.name, name) == ("torch-distributed-with-cache", "dataset-initializer")
        assert pod["spec"]["automountServiceAccountToken"] is wanted, name
        assert pod["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("path", WITH_PODS, ids=name_of)
def test_autoscalers_do_not_move_pods_and_failed_pods_show_their_log(path: Path) -> None:
    for name, pod in pods(read(path)):
        if name != "model-initializer":
            assert pod["metadata"]["annotations"] == {
                "sidecar.istio.io/inject": "false",
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                "karpenter.sh/do-not-disrupt": "true",
            }
        for container in containers(pod):
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


@pytest.mark.parametrize("path", WITH_PODS, ids=name_of)
def test_cache_nodes_have_all_probes_and_scratch_beside_their_memory(path: Path) -> None:
    for _, pod in pods(read(path)):
        for container in containers(pod):
            if container.get("command") == CACHE_COMMAND:
                assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
                assert container["livenessProbe"]["grpc"]["service"] == "live"
                mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
                volumes = {v["name"]: v.get("emptyDir") for v in pod["spec"]["volumes"]}
                assert volumes[mounts["/cache"]]["medium"] == "Memory"
                assert volumes[mounts["/cache/.scratch"]] == volumes[mounts["/tmp"]] == {}
                assert container["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("path", RUNTIMES, ids=name_of)
def test_trainers_can_be_given_a_function_by_the_sdk(path: Path) -> None:
    """It runs bash, which writes into the working directory, and pip, which writes into HOME."""
    for job in jobs(read(path)):
        if job["name"] != "node" or "mpi" in read(path)["spec"]["mlPolicy"]:
            continue
        node = container_named(pod_of(job), "node")
        mounts = {m["mountPath"]: m for m in node["volumeMounts"]}
        environment = env_of(node)
        assert "/dev/shm" in mounts
        assert node["workingDir"] == environment["HOME"] == "/workspace"
        assert not mounts["/workspace"].get("readOnly")
        assert environment["USER"]
        assert not node["securityContext"].get("readOnlyRootFilesystem")


@pytest.mark.parametrize("path", RUNTIMES, ids=name_of)
def test_trainers_are_told_the_endpoint(path: Path) -> None:
    job = "$(TRAIN_JOB_NAME)"
    expected = {
        "torch-distributed-data-cache-colocated": f"grpc://{job}-node-0-0.{job}:50051",
        "torch-distributed-with-cache": f"grpc://{job}-cache-service:50051",
        "torch-distributed-shared-data-cache": "grpc://data-cache.data-cache-system:50051",
    }.get(path.parent.name, f"grpc://{job}-dataset-initializer-0-0.{job}:50051")
    for found in jobs(read(path)):
        if found["name"] in ("node", "launcher"):
            assert env_of(container_named(pod_of(found), "node"))["CACHE_ENDPOINT"] == expected


IN_JOB = [
    path
    for path in RUNTIMES
    if read(path)["metadata"]["labels"]["app.kubernetes.io/component"] == "cache-in-job"
]


@pytest.mark.parametrize("path", IN_JOB, ids=name_of)
def test_a_cache_that_is_a_replicated_job_is_the_same_in_every_runtime(path: Path) -> None:
    thing = read(path)
    cache = job_named(thing, "dataset-initializer")
    arguments = container_named(pod_of(cache), "dataset-initializer")["args"]
    is_writer = "--auth-pods=writer:$(TRAIN_JOB_NAME)-launcher-0-*"
    assert (is_writer in arguments) == ("mpi" in thing["spec"]["mlPolicy"])
    if is_writer in arguments:
        arguments.remove(is_writer)
    assert cache == job_named(FLAGSHIP, "dataset-initializer")
    assert (
        job_set(thing)["failurePolicy"]["rules"][0]
        == job_set(FLAGSHIP)["failurePolicy"]["rules"][0]
    )


_ACTIONS = {65: "FailJob", 75: "Count", 78: "FailJob", 143: "Ignore", 1: "Count"}


@pytest.mark.parametrize("path", IN_JOB, ids=name_of)
def test_the_exit_code_of_a_cache_process_decides_what_follows(path: Path) -> None:
    job = job_named(read(path), "dataset-initializer")["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    restarted = {code for code in range(256) if restarts_in_place(container, pod, code)}
    assert set(range(256)) - restarted == {0, 65, 75, 78}
    for code, action in _ACTIONS.items():
        ended = ContainerExit("dataset-initializer", code, "")
        assert after_pod_failure(job, [ended]) == action


def test_the_exit_code_of_the_initializer_that_stays_decides_what_follows() -> None:
    job = job_named(WITH_CACHE, "dataset-initializer")["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert not any(restarts_in_place(container, pod, code) for code in range(256))
    for code, action in _ACTIONS.items():
        ended = ContainerExit("dataset-initializer", code, "")
        assert after_pod_failure(job, [ended]) == action


def test_a_sidecar_caches_as_the_pods_of_a_job_do() -> None:
    cache = pod_of(job_named(FLAGSHIP, "dataset-initializer"))["spec"]["containers"][0]
    sidecar = container_named(pod_of(job_named(COLOCATED, "node")), "cache")
    theirs = [
        argument.replace("$(CACHE_WORLD_SIZE)", "$(PET_NNODES)").replace(
            "-dataset-initializer-0-", "-node-0-"
        )
        for argument in cache["args"]
        # What a sidecar ends with is of no account to its pod; a trainer has the pod of a node.
        if not argument.startswith(("--signal-exit-code", "--auth-pods=writer:"))
    ]
    assert sidecar["args"] == theirs
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["grpc"]["service"] == "ready"
    for same in ("image", "command", "ports", "livenessProbe", "resources", "securityContext"):
        assert sidecar[same] == cache[same]


@pytest.mark.parametrize("path", RUNTIMES, ids=name_of)
def test_the_container_that_loads_sees_the_annotations_of_its_pod(path: Path) -> None:
    takes = [
        (pod, container)
        for _, pod in pods(read(path))
        for container in containers(pod)
        if FILE_VARIABLE in {each["name"] for each in container.get("env", ())}
    ]
    ((pod, container),) = takes
    asks = {"--load-from-env", "--from-env"} & set(container.get("args", ()))
    assert asks or container["command"] == ["python", "-m", "cache_runtimes.initializer"]
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "job")
    (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == "job")
    (item,) = volume["downwardAPI"]["items"]
    assert item["fieldRef"] == {"fieldPath": "metadata.annotations"}
    assert env_of(container)[FILE_VARIABLE] == f"{mount['mountPath']}/{item['path']}"
    import_sdk()
    from cache_runtimes.sdk import checked_job

    # The same container as the SDK's `cache_options` find.
    assert checked_job(read(path), JobOptions(replicas=2)) == (
        "node"
        if path.parent.name == "torch-distributed-data-cache-colocated"
        else "dataset-initializer"
    )


def start_mpi_node(folder: Path, script: str) -> subprocess.Popen[str]:
    """The container ``node`` of deepspeed-data-cache with ``script`` in the place of sshd."""
    node = container_named(pod_of(job_named(DEEPSPEED, "node")), "node")
    sshd = folder / "sshd"
    sshd.write_text(f"#!/bin/sh\n{script}\n")
    sshd.chmod(0o755)
    command = [part.replace("/usr/sbin/sshd", str(sshd)) for part in node["command"]]
    assert command != node["command"]
    return subprocess.Popen(
        [*command, *node["args"]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )


def test_an_mpi_node_that_is_told_to_end_has_not_succeeded(tmp_path: Path) -> None:
    with start_mpi_node(tmp_path, "echo $$; exec sleep 60") as process:
        assert process.stdout is not None
        daemon = int(process.stdout.readline())
        process.terminate()
        code = process.wait(timeout=60)
        os.kill(daemon, signal.SIGKILL)  # in a container it ends with its shell
    assert code == 143


def test_an_mpi_node_is_sshd_with_its_arguments_and_its_exit_code(tmp_path: Path) -> None:
    with start_mpi_node(tmp_path, 'for each; do echo "$each"; done; exit 7') as process:
        output, _ = process.communicate(timeout=60)
    node = container_named(pod_of(job_named(DEEPSPEED, "node")), "node")
    assert output.splitlines() == node["args"]
    assert process.returncode == 7


def test_trainer_and_sidecar_see_the_shards_at_one_path() -> None:
    pod = pod_of(job_named(COLOCATED, "node"))
    (writes,) = [m for m in container_named(pod, "cache")["volumeMounts"] if m["name"] == "cache"]
    (reads,) = [m for m in container_named(pod, "node")["volumeMounts"] if m["name"] == "cache"]
    assert reads == {**writes, "readOnly": True}


def test_the_initializer_creates_pods_of_its_image() -> None:
    container = container_named(
        pod_of(job_named(WITH_CACHE, "dataset-initializer")), "dataset-initializer"
    )
    assert env_of(container)["CACHE_IMAGE"] == container["image"]


def test_the_role_of_the_initializer_holds_exactly_the_rights_that_it_uses() -> None:
    folder = MANIFESTS / "torch-distributed-with-cache"
    role = read(folder / "cluster-role.yaml")
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {
        ("trainer.kubeflow.org", "trainjobs", "get"),
        ("trainer.kubeflow.org", "trainjobs/finalizers", "update"),  # of blockOwnerDeletion
        *(("", "serviceaccounts", verb) for verb in ("create", "delete", "get")),
        *(("", "services", verb) for verb in ("create", "delete", "get")),
        *(("apps", "statefulsets", verb) for verb in ("create", "delete", "get", "list", "watch")),
        *(("", "pods", verb) for verb in ("get", "list", "watch")),
        ("", "events", "list"),
    }
    account = read(folder / "namespace-access/service-account.yaml")["metadata"]["name"]
    binding = read(folder / "namespace-access/role-binding.yaml")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    pod = pod_of(job_named(WITH_CACHE, "dataset-initializer"))["spec"]
    assert pod["serviceAccountName"] == account


def test_the_objects_of_the_shared_cache_fit_together() -> None:
    shared = {path.stem: read(path) for path in (MANIFESTS / "shared").glob("*.yaml")}
    namespace = shared["namespace"]["metadata"]
    spec = CACHE["spec"]
    labels = spec["template"]["metadata"]["labels"]
    ports = {port["name"] for port in spec["template"]["spec"]["containers"][0]["ports"]}
    for name in ("service", "nodes-service"):
        assert shared[name]["spec"]["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in shared[name]["spec"]["ports"]} == ports
    assert spec["serviceName"] == shared["nodes-service"]["metadata"]["name"]
    assert (
        spec["template"]["spec"]["serviceAccountName"]
        == shared["service-account"]["metadata"]["name"]
    )
    policy = shared["network-policy"]["spec"]
    for selector in (shared["disruption-budget"]["spec"]["selector"], policy["podSelector"]):
        assert selector["matchLabels"].items() <= labels.items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert namespace["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    (volume,) = (v for v in spec["template"]["spec"]["volumes"] if "configMap" in v)
    assert volume["configMap"]["name"] == shared["auth"]["metadata"]["name"]
    for name, thing in shared.items():
        if name not in ("namespace", "kustomization"):
            assert thing["metadata"]["namespace"] == namespace["name"], name
    host = f"{shared['service']['metadata']['name']}.{namespace['name']}"
    (initializer,) = pod_of(job_named(SHARED, "dataset-initializer"))["spec"]["containers"]
    assert f"--endpoint=grpc://{host}:50051" in initializer["args"]


def test_a_pod_of_the_shared_cache_is_replaced_only_once_the_others_hold_their_shards() -> None:
    shared = {path.stem: read(path) for path in (MANIFESTS / "shared").glob("*.yaml")}
    (container,) = CACHE["spec"]["template"]["spec"]["containers"]
    probe = container["readinessProbe"]
    seen_after_s = probe["failureThreshold"] * (probe["periodSeconds"] + probe["timeoutSeconds"])
    lost_after_s = NodeConfig.model_fields["node_timeout_s"].default

    assert probe["grpc"]["service"] == "ready"
    assert CACHE["spec"]["minReadySeconds"] > lost_after_s + seen_after_s
    assert shared["disruption-budget"]["spec"]["unhealthyPodEvictionPolicy"] == "IfHealthyBudget"
    assert shared["nodes-service"]["spec"]["publishNotReadyAddresses"] is True  # to join
    # A pod of a lost machine is asked nothing by those who come new.
    assert "publishNotReadyAddresses" not in shared["service"]["spec"]


def test_the_nodes_of_the_shared_cache_may_do_what_an_election_takes_and_no_more() -> None:
    shared = {path.stem: read(path) for path in (MANIFESTS / "shared").glob("*.yaml")}
    granted = {
        (group, resource, verb)
        for rule in shared["role"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {
        *(("coordination.k8s.io", "leases", verb) for verb in ("create", "get", "update")),
        *(("", "configmaps", verb) for verb in ("create", "delete", "get", "list", "update")),
    }
    binding, account = shared["role-binding"], shared["service-account"]["metadata"]
    assert binding["roleRef"]["name"] == shared["role"]["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    spec = CACHE["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert "--leader-election=kubernetes:$(POD_NAMESPACE)/data-cache" in container["args"]
    (volume,) = (each for each in spec["volumes"] if each["name"] == "api-server")
    (folder,) = (m["mountPath"] for m in container["volumeMounts"] if m["name"] == "api-server")
    assert {"serviceAccountToken": {"path": "token"}} in volume["projected"]["sources"]
    assert f"--service-account-dir={folder}" in container["args"]
    assert "volumeClaimTemplates" not in CACHE["spec"]


def test_every_kind_of_ancestor_is_among_the_runtimes() -> None:
    found = {ancestor(job) for path in RUNTIMES for job in jobs(read(path))}
    assert found - {None} == {"trainer", "dataset-initializer", "model-initializer"}


def test_only_nodes_of_the_shared_cache_are_nodes_and_a_namespace_is_a_writer_of_its_own() -> None:
    text = read(MANIFESTS / "shared/auth.yaml")["data"]["auth.yaml"]
    rules = parse_yaml(text, JwtSettings).rules
    account = read(MANIFESTS / "shared/service-account.yaml")["metadata"]
    nodes = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    assert [(rule.subject, rule.roles) for rule in rules] == [
        (nodes, {Role.NODE, Role.ADMIN}),
        ("system:serviceaccount:*", {Role.WRITER}),
    ]
    assert all(rule.namespace is None for rule in rules)
