"""The initializer's pure parts: settings, planned objects, and the health of a cache."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import (
    ApiClient,
    Configuration,
    V1Service,
    V1ServiceAccount,
    V1StatefulSet,
)

from cache_protocol.datasets.job_options import FILE_VARIABLE, PREFIX
from cache_protocol.datasets.job_settings import spec_from_env
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    LoadError,
    NodeUnavailableError,
    RequestError,
)
from cache_protocol.storage.memory_budget import shard_bytes
from cache_runtimes import MANIFESTS
from cache_runtimes.initializer.cache_health import Severity, assess, is_disrupted, lacks_pods
from cache_runtimes.initializer.plan import (
    JOB_LABEL,
    PLAN_ANNOTATION,
    Json,
    Kind,
    Names,
    Planned,
    plan_objects,
)
from cache_runtimes.initializer.settings import Settings, from_env
from tests.manifests import callers_are_known, container_named, job_named, pod_of, read

GIB = 1 << 30
INITIALIZER = "dataset-initializer"
ROLE = "arn:aws:iam::123456789012:role/trainer"
ENVIRON = {
    "TRAIN_JOB_NAME": "train-1",
    "POD_NAMESPACE": "team-a",
    "CACHE_IMAGE": "ghcr.io/trainer-data-cache/server:0.2.0",
    "STORAGE_URI": "s3://bucket/tpch/lineitem/",
}
TRAIN_JOB: Json = {
    "metadata": {"name": "train-1", "namespace": "team-a", "uid": "uid-of-the-job"},
    "spec": {"initializer": {"dataset": {"storageUri": "s3://bucket/tpch/lineitem/"}}},
}


def settings_of(**changes: str) -> Settings:
    return from_env({**ENVIRON, **changes})


def job_with(**dataset: Any) -> Json:
    job = copy.deepcopy(TRAIN_JOB)
    job["spec"]["initializer"]["dataset"] |= dataset
    return job


def planned(train_job: Json = TRAIN_JOB, **changes: str) -> dict[tuple[Kind, str], Planned]:
    return {(one.kind, one.name): one for one in plan_objects(settings_of(**changes), train_job)}


def pod_template(train_job: Json = TRAIN_JOB, **changes: str) -> Json:
    stateful_set = planned(train_job, **changes)[Kind.STATEFUL_SET, "train-1-cache"]
    template: Json = stateful_set.body["spec"]["template"]
    return template


def container_of(train_job: Json = TRAIN_JOB, **changes: str) -> Json:
    (container,) = pod_template(train_job, **changes)["spec"]["containers"]
    return dict(container)


def annotations_of(folder: Path, **options: str) -> dict[str, str]:
    """The environment of an initializer whose pod has these annotations."""
    lines = [f"{PREFIX}{name}={json.dumps(text)}\n" for name, text in options.items()]
    (folder / "annotations").write_text("".join(lines))
    return {FILE_VARIABLE: str(folder / "annotations")}


def test_annotations_set_the_size_of_the_cache_and_what_it_holds(tmp_path: Path) -> None:
    given = annotations_of(tmp_path, nodes="5", memory="3Gi", filter="a > $(b)", replicas="2")
    settings = settings_of(**given)
    assert (settings.num_nodes, settings.memory_bytes) == (5, 3 * GIB)
    container = container_of(**given)
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["CACHE_WORLD_SIZE"] == "5"
    assert variables["CACHE_FILTER"] == "a > $$(b)"  # Kubernetes fills in nothing
    assert variables["CACHE_REPLICAS"] == "2"
    assert container["resources"]["limits"]["memory"] == "3Gi"
    same = settings_of(**given, CLUSTER_SIZE="6", WORKER_MEM="3Gi")
    assert same.num_nodes == 5


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        ({"nodes": "5"}, {"CLUSTER_SIZE": "3"}, "nodes=5 and CLUSTER_SIZE='3' are two sizes"),
        ({"memory": "3Gi"}, {"WORKER_MEM": "2Gi"}, "memory=3Gi and WORKER_MEM='2Gi'"),
        ({"replicas": "2"}, {"CACHE_REPLICAS": "2"}, "replicas and CACHE_REPLICAS"),
        ({"node": "2"}, {}, "node is unknown"),
    ],
)
def test_annotations_that_cannot_be_are_refused(
    options: dict[str, str], environ: dict[str, str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=words):
        settings_of(**annotations_of(tmp_path, **options), **environ)


# -- settings --------------------------------------------------------------------------------------


def test_the_default_sizes_are_those_of_trainers_cache() -> None:
    settings = settings_of()
    assert (settings.num_nodes, settings.cpu, settings.memory) == (2, "2", "2Gi")
    assert settings.ready_deadline_s == 1800


@pytest.mark.parametrize(("size", "num_nodes"), [("1", 1), ("2", 1), ("3", 2), ("9", 8)])
def test_the_cluster_size_counts_the_head_of_trainers_cache(size: str, num_nodes: int) -> None:
    assert settings_of(CLUSTER_SIZE=size).num_nodes == num_nodes


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TRAIN_JOB_NAME", "Train_1"),
        ("TRAIN_JOB_NAME", "a" * 47),
        ("CLUSTER_SIZE", "0"),
        ("CLUSTER_SIZE", "three"),
        ("CLUSTER_SIZE", "-3"),
        ("WORKER_CPU", "two"),
        ("WORKER_CPU", "0"),
        ("WORKER_MEM", "2GB"),
        ("WORKER_MEM", "-2Gi"),
        ("WORKER_MEM", "1Gi"),
        ("READINESS_PERIOD_SECONDS", "0"),
        ("READINESS_INITIAL_DELAY_SECONDS", "soon"),
        ("CACHE_READY_DEADLINE_S", "0"),
        ("CACHE_READY_DEADLINE_S", "nan"),
        ("CACHE_READY_DEADLINE_S", "inf"),
        ("CACHE_FAILURE_GRACE_S", "-1"),
        ("CACHE_READY_FILE", "ready"),
        ("STORAGE_URI", "ftp://host/x"),
        ("STORAGE_URI", "file://"),
        ("CACHE_REPLICAS", "none"),
    ],
)
def test_a_bad_setting_is_quoted(variable: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(**{variable: value})
    assert variable in str(caught.value)
    assert repr(value) in str(caught.value)


def test_all_bad_settings_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        from_env({"CLUSTER_SIZE": "x", "WORKER_MEM": "y", "STORAGE_URI": "s3:/z"})
    for name in ("TRAIN_JOB_NAME", "POD_NAMESPACE", "CACHE_IMAGE"):
        assert f"{name} is missing" in str(caught.value)
    for quoted in ("CLUSTER_SIZE", "'x'", "WORKER_MEM", "'y'", "STORAGE_URI='s3:/z'"):
        assert quoted in str(caught.value)


def test_an_absent_dataset_is_not_an_error() -> None:
    assert settings_of(STORAGE_URI="").dataset == {}
    with pytest.raises(ConfigError, match="STORAGE_URI is missing"):
        settings_of(STORAGE_URI="", CACHE_REPLICAS="2")


def test_the_namespace_of_the_service_account_is_the_default() -> None:
    environ = {k: v for k, v in ENVIRON.items() if k != "POD_NAMESPACE"}
    assert from_env(environ, own_namespace="team-b").namespace == "team-b"
    assert from_env(ENVIRON, own_namespace="team-b").namespace == "team-a"


def test_variables_of_a_head_are_accepted_and_recorded() -> None:
    assert settings_of(HEAD_CPU="1", HEAD_MEM="1Gi").head_variables == ("HEAD_CPU", "HEAD_MEM")


@pytest.mark.parametrize(
    ("limit", "shards"), [(2 * GIB, GIB), (4 * GIB, 3 * GIB), (8 * GIB, 6 * GIB)]
)
def test_the_process_keeps_a_quarter_of_the_memory_and_at_least_a_gibibyte(
    limit: int, shards: int
) -> None:
    assert shard_bytes(limit) == shards


# -- the planned objects ---------------------------------------------------------------------------


def test_the_objects_are_planned_in_the_order_of_their_dependencies() -> None:
    assert [(one.kind, one.name) for one in plan_objects(settings_of(), TRAIN_JOB)] == [
        (Kind.SERVICE_ACCOUNT, "train-1-cache"),
        (Kind.SERVICE, "train-1-cache"),
        (Kind.SERVICE, "train-1-cache-service"),
        (Kind.STATEFUL_SET, "train-1-cache"),
    ]
    assert set(Names("train-1").removed_in_order) == set(planned())


def test_every_object_is_owned_by_the_train_job_and_labelled_with_it() -> None:
    for one in planned().values():
        (owner,) = one.body["metadata"]["ownerReferences"]
        assert owner == {
            "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": "train-1",
            "uid": "uid-of-the-job", "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip
        assert one.body["metadata"]["namespace"] == "team-a"
        assert one.body["metadata"]["labels"][JOB_LABEL] == "train-1"
        assert one.body["metadata"]["labels"]["app.kubernetes.io/instance"] == "train-1"


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (Kind.SERVICE_ACCOUNT, V1ServiceAccount),
        (Kind.SERVICE, V1Service),
        (Kind.STATEFUL_SET, V1StatefulSet),
    ],
)
def test_every_field_is_one_that_kubernetes_knows(kind: Kind, model: type) -> None:
    job = job_with(env=[{"name": "REGION", "value": "eu-west-1"}], secretRef={"name": "keys"})
    api = ApiClient(Configuration())

    class Answer:
        def __init__(self, body: Json) -> None:
            self.data = json.dumps(body)

    for (of_kind, _), one in planned(job, IAM_ROLE=ROLE).items():
        if of_kind is kind:
            parsed = api.deserialize(Answer(one.body), model)
            assert api.sanitize_for_serialization(parsed) == one.body


def test_a_pod_may_run_where_pod_security_is_restricted() -> None:
    spec, container = pod_template()["spec"], container_of()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    kinds = {kind for volume in spec["volumes"] for kind in volume.keys() - {"name"}}
    assert kinds == {"emptyDir", "projected"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()


def test_pods_spread_over_machines_within_the_zone_of_the_job() -> None:
    spec = pod_template()["spec"]
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    labels = pod_template()["metadata"]["labels"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    assert not any(key.startswith("jobset.") for key in labels)  # they are none of the JobSet's
    (near,) = spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert near["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
    wanted = near["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert wanted == {"jobset.sigs.k8s.io/jobset-name": "train-1"}


def test_cache_pods_get_tolerations_pull_secrets_and_user_of_the_initializer() -> None:
    allowed = {
        "imagePullSecrets": [{"name": "registry"}],
        "tolerations": [{"key": "training", "operator": "Exists"}],
        # As OpenShift gives it to pods that name no user.
        "securityContext": {"runAsNonRoot": True, "fsGroup": 1000650000},
    }
    own_pod = {"spec": {**allowed, "nodeName": "node-1", "priority": 0}}
    *_, stateful_set = plan_objects(settings_of(), TRAIN_JOB, own_pod)
    pod = stateful_set.body["spec"]["template"]["spec"]
    assert pod == {**pod_template()["spec"], **allowed}
    *_, without = plan_objects(settings_of(), TRAIN_JOB, {"spec": {"tolerations": []}})
    assert without.body["spec"]["template"] == pod_template()


def test_pods_know_their_callers_as_those_of_the_shipped_runtimes_do() -> None:
    account = planned()[Kind.SERVICE_ACCOUNT, "train-1-cache"].body
    assert account["automountServiceAccountToken"] is False
    assert pod_template()["spec"]["automountServiceAccountToken"] is False
    made = planned()[Kind.STATEFUL_SET, "train-1-cache"].body
    assert list(callers_are_known(made)) == []
    job = job_named(read(MANIFESTS / "torch-distributed-data-cache/runtime.yaml"), INITIALIZER)
    shipped = container_named(pod_of(job), INITIALIZER)
    for ours, theirs in (
        (pod_template()["spec"]["volumes"], pod_of(job)["spec"]["volumes"]),
        (container_of()["volumeMounts"], shipped["volumeMounts"]),
    ):
        of_identity = [each for each in theirs if each["name"] in ("cache-token", "api-server")]
        assert ours[-2:] == of_identity


def test_the_volume_for_rows_leaves_memory_for_the_process() -> None:
    container = container_of(WORKER_CPU="500m", WORKER_MEM="8Gi")
    wanted = {"cpu": "500m", "memory": "8Gi"}
    assert container["resources"] == {"requests": wanted, "limits": wanted}
    volumes = pod_template(WORKER_MEM="8Gi")["spec"]["volumes"]
    assert {"medium": "Memory", "sizeLimit": str(6 * GIB)} in [v.get("emptyDir") for v in volumes]
    assert {"name": "cache", "mountPath": "/cache"} in container["volumeMounts"]


def test_the_cache_has_the_size_of_the_job() -> None:
    stateful_set = planned(CLUSTER_SIZE="5")[Kind.STATEFUL_SET, "train-1-cache"].body
    assert stateful_set["spec"]["replicas"] == 4
    assert stateful_set["spec"]["podManagementPolicy"] == "Parallel"
    assert stateful_set["spec"]["serviceName"] == "train-1-cache"
    container = container_of(CLUSTER_SIZE="5")
    assert {"name": "CACHE_WORLD_SIZE", "value": "4"} in container["env"]
    assert container["command"] == ["cache-server"]
    assert container["args"] == [
        "serve",
        "--cache-dir=/cache",
        "--bind=$(POD_IP)",
        "--auth-pods=node,writer:train-1-cache-*",
        "--auth-pods=writer:train-1-node-0-*",
        "--auth-pods=reader:*",
        "--service-account-dir=/var/run/secrets/kubernetes.io/serviceaccount",
        "--advertise=$(POD_NAME).train-1-cache",
        "--coordinator=train-1-cache-0.train-1-cache:50052",
        "--num-nodes=$(CACHE_WORLD_SIZE)",
        "--container-memory-limit=$(CONTAINER_MEMORY_LIMIT)",
        "--load-from-env",
    ]
    named = {variable["name"] for variable in container["env"]}
    for argument in container["args"]:
        if "$(" in argument:
            assert argument.partition("$(")[2].partition(")")[0] in named


def test_pods_find_each_other_before_they_are_ready_and_clients_find_the_coordinator() -> None:
    nodes = planned()[Kind.SERVICE, "train-1-cache"].body["spec"]
    clients = planned()[Kind.SERVICE, "train-1-cache-service"].body["spec"]
    labels = pod_template()["metadata"]["labels"]
    assert nodes["clusterIP"] == "None"
    assert nodes["publishNotReadyAddresses"] is True
    assert nodes["selector"].items() <= labels.items()
    assert clients["selector"] == {"statefulset.kubernetes.io/pod-name": "train-1-cache-0"}
    ports = {port["name"]: port["port"] for port in clients["ports"]}
    assert ports == {"flight": 50051, "control": 50052}


def test_probes_use_grpc_and_the_readiness_settings_of_trainers_cache() -> None:
    container = container_of(
        READINESS_INITIAL_DELAY_SECONDS="1",
        READINESS_PERIOD_SECONDS="2",
        READINESS_TIMEOUT_SECONDS="4",
        READINESS_FAILURE_THRESHOLD="6",
    )
    assert container["readinessProbe"] == {
        "grpc": {"port": 50052, "service": "ready"},
        "initialDelaySeconds": 1, "periodSeconds": 2, "timeoutSeconds": 4, "failureThreshold": 6,
    }  # fmt: skip
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["grpc"] == {"port": 50052, "service": "live"}
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_cache_pods_get_the_dataset_of_the_job_and_no_secret_is_copied() -> None:
    env = [
        {"name": "REGION", "value": "eu-west-1"},
        {"name": "CLUSTER_SIZE", "value": "3"},
        {
            "name": "SECRET_ACCESS_KEY",
            "valueFrom": {"secretKeyRef": {"name": "keys", "key": "secret"}},
        },
    ]
    container = container_of(
        job_with(env=env, secretRef={"name": "keys"}),
        REGION="eu-west-1",
        ACCESS_KEY_ID="the-id",
        SECRET_ACCESS_KEY="the-secret",
    )
    storage = {"name": "STORAGE_URI", "value": "s3://bucket/tpch/lineitem/"}
    assert container["env"][-4:] == [storage, *env]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert "the-secret" not in json.dumps(container)
    assert "the-id" not in json.dumps(container)


def test_a_storage_uri_in_env_overrides_the_field_as_in_trainer() -> None:
    theirs = {"name": "STORAGE_URI", "value": "s3://other/"}
    env = container_of(job_with(env=[theirs]), STORAGE_URI="s3://other/")["env"]
    assert [variable for variable in env if variable["name"] == "STORAGE_URI"] == [theirs]


@pytest.mark.parametrize("dataset", [{"storageUri": None}, {"env": None}, {"secretRef": None}])
def test_parts_of_the_dataset_may_be_null(dataset: Json) -> None:
    job = job_with(env=[{"name": "STORAGE_URI", "value": "s3://b/t"}])
    job["spec"]["initializer"]["dataset"] |= dataset
    if "env" in dataset:
        assert "envFrom" not in container_of(job_with(**dataset))
    else:
        assert "envFrom" not in container_of(job, STORAGE_URI="s3://b/t")


def test_a_setting_that_the_cache_pods_would_not_get_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"CACHE_REPLICAS.*spec\.initializer\.dataset"):
        planned(CACHE_REPLICAS="2")
    job = copy.deepcopy(TRAIN_JOB)
    job["spec"] = {}
    with pytest.raises(ConfigError, match="STORAGE_URI"):
        planned(job)


def test_a_setting_that_a_cache_pod_sets_itself_is_an_error() -> None:
    with pytest.raises(ConfigError, match="POD_IP"):
        planned(job_with(env=[{"name": "POD_IP", "value": "127.0.0.1"}]))


@pytest.mark.parametrize(
    "given",
    [
        {"ACCESS_KEY_ID": "the-id", "SECRET_ACCESS_KEY": "hush"},
        {"ENDPOINT": "http://minio:9000", "REGION": "eu-west-1"},
        {"ROLE_ARN": ROLE},
    ],
    ids=lambda given: " ".join(given),
)
def test_a_secret_may_hold_credentials_and_the_address_of_the_store(given: dict[str, str]) -> None:
    job = job_with(secretRef={"name": "keys"})
    assert container_of(job, **given)["envFrom"] == [{"secretRef": {"name": "keys"}}]
    with pytest.raises(ConfigError, match="which the cache pods get"):
        container_of(**given)


@pytest.mark.parametrize(
    "given",
    [
        *({"CACHE_REPLICAS": "2"}, {"CACHE_SQL": "SELECT 1"}, {"CACHE_DATASET": "mine"}),
        {"IGNORE_PATTERNS": "*.json"},
    ],
    ids=lambda given: " ".join(given),
)
def test_a_secret_may_not_hold_what_to_cache(given: dict[str, str]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=rf"{name}.*spec\.initializer\.dataset"):
        container_of(job_with(secretRef={"name": "keys"}), **given)
    theirs = {"name": name, "valueFrom": {"secretKeyRef": {"name": "keys", "key": "k"}}}
    assert theirs in container_of(job_with(env=[theirs]), **given)["env"]


def test_a_secret_may_not_hold_another_storage_uri() -> None:
    job = job_with(storageUri=None, secretRef={"name": "keys"})
    with pytest.raises(ConfigError, match=r"STORAGE_URI.*spec\.initializer\.dataset"):
        planned(job)


def test_a_setting_that_differs_from_the_job_is_an_error_without_its_value() -> None:
    env = [
        {"name": "REGION", "value": "eu-west-1"},
        {"name": "SECRET_ACCESS_KEY", "value": "hush-one"},
        {"name": "ACCESS_KEY_ID", "value": "the-id"},
    ]
    keys = {"ACCESS_KEY_ID": "the-id", "SECRET_ACCESS_KEY": "hush-two"}
    with pytest.raises(ConfigError) as caught:
        planned(job_with(env=env, storageUri="s3://elsewhere/t"), REGION="us-east-1", **keys)
    assert "REGION, SECRET_ACCESS_KEY, STORAGE_URI: " in str(caught.value)
    assert "hush" not in str(caught.value)
    assert "hush" not in repr(settings_of(**keys))


def test_a_value_that_kubernetes_fills_in_is_not_compared() -> None:
    env = [{"name": "REGION", "value": "$(WHERE)"}, {"name": "CACHE_SQL", "value": "SELECT '$$1'"}]
    assert container_of(job_with(env=env), REGION="eu-west-1", CACHE_SQL="SELECT '$1'")


@pytest.mark.parametrize("role", [None, ROLE])
def test_the_role_is_optional(role: str | None) -> None:
    account = planned(
        job_with(env=[{"name": "IAM_ROLE", "value": role}] if role else []),
        **({"IAM_ROLE": role} if role else {}),
    )[Kind.SERVICE_ACCOUNT, "train-1-cache"]
    annotations = account.body["metadata"]["annotations"]
    assert annotations.get("eks.amazonaws.com/role-arn") == role
    assert ("eks.amazonaws.com/sts-regional-endpoints" in annotations) == (role is not None)


@pytest.mark.parametrize(
    "dataset",
    [{"env": [{"name": "IAM_ROLE", "value": ROLE}]}, {"secretRef": {"name": "keys"}}],
    ids=["variable", "secret"],
)
def test_pods_with_a_role_do_not_assume_it_again(dataset: Json) -> None:
    env = container_of(job_with(**dataset), IAM_ROLE=ROLE)["env"]
    assert [each for each in env if each["name"] == "IAM_ROLE"] == [
        {"name": "IAM_ROLE", "value": ""}
    ]
    plain = {each["name"]: each["value"] for each in env if "value" in each}
    assert spec_from_env(plain).tables[0].options == {}
    again = container_of(job_with(env=[{"name": "ROLE_ARN", "value": ROLE}]), ROLE_ARN=ROLE)["env"]
    assert {"name": "ROLE_ARN", "value": ROLE} in again


def test_equal_plans_have_equal_fingerprints() -> None:
    assert planned() == planned()
    key = (Kind.STATEFUL_SET, "train-1-cache")
    assert planned()[key].fingerprint != planned(CLUSTER_SIZE="4")[key].fingerprint
    assert planned()[key].body["metadata"]["annotations"] == {
        PLAN_ANNOTATION: planned()[key].fingerprint
    }


# -- what pods say ---------------------------------------------------------------------------------

STATEFUL_SET: Json = {
    "metadata": {"name": "train-1-cache", "uid": "uid-of-the-set"},
    "spec": {"replicas": 2},
    "status": {"readyReplicas": 1},
}


def pod(index: int, owner: str = "uid-of-the-set", **status: Any) -> Json:
    return {
        "metadata": {
            "name": f"train-1-cache-{index}",
            "uid": f"uid-{index}",
            "ownerReferences": [{"uid": owner}],
        },
        "status": status,
    }


def container(name: str = "cache", **status: Any) -> Json:
    return {"name": name, "ready": False, "restartCount": 1, **status}


def waits(reason: str) -> Json:
    return container(state={"waiting": {"reason": reason, "message": f"why {reason}"}})


def ended(code: int, name: str = "cache", said: str = "first\ncache: last\n\n") -> Json:
    how = {"exitCode": code, "reason": "Error", "message": said}
    return container(name, state={"waiting": {}}, lastState={"terminated": how})


def refusal(message: str, uid: str = "uid-of-the-set") -> Json:
    return {"reason": "FailedCreate", "message": message, "involvedObject": {"uid": uid}}


@pytest.mark.parametrize(
    ("status", "severity", "error", "text"),
    [
        (waits("ErrImagePull"), Severity.TRANSIENT, NodeUnavailableError, "why ErrImagePull"),
        (waits("ImagePullBackOff"), Severity.TRANSIENT, NodeUnavailableError, "ImagePullBackOff"),
        (waits("InvalidImageName"), Severity.PERMANENT, NodeUnavailableError, "InvalidImageName"),
        (
            waits("CreateContainerConfigError"),
            Severity.TRANSIENT,
            NodeUnavailableError,
            "ConfigError",
        ),
        (ended(65), Severity.PERMANENT, LoadError, "exited with 65: cache: last"),
        (ended(78), Severity.PERMANENT, ConfigError, "exited with 78: cache: last"),
        (ended(65, said=""), Severity.PERMANENT, LoadError, "exited with 65: Error"),
        (ended(1), Severity.PENDING, NodeUnavailableError, "exited with 1: cache: last"),
        (ended(65, name="sidecar"), Severity.PENDING, NodeUnavailableError, "exited with 65"),
    ],
)
def test_the_state_of_a_container_has_a_severity(
    status: Json, severity: Severity, error: type[CacheError], text: str
) -> None:
    (problem,) = assess(STATEFUL_SET, [pod(0), pod(1, containerStatuses=[status])], ()).problems
    assert (problem.severity, problem.raises) == (severity, error)
    assert "train-1-cache-1" in problem.text
    assert text in problem.text


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing", "CrashLoopBackOff"])
def test_a_starting_pod_is_no_problem(reason: str) -> None:
    pods = [pod(0), pod(1, containerStatuses=[waits(reason)])]
    assert assess(STATEFUL_SET, pods, ()).problems == ()


def test_a_container_that_is_ready_again_is_no_problem() -> None:
    again = {**ended(65), "ready": True}
    assert assess(STATEFUL_SET, [pod(0), pod(1, containerStatuses=[again])], ()).problems == ()


def test_an_unschedulable_pod_waits_and_says_why() -> None:
    condition = {
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/3 nodes are available",
    }  # fmt: skip
    health = assess(STATEFUL_SET, [pod(0), pod(1, conditions=[condition])], ())
    assert [problem.severity for problem in health.problems] == [Severity.PENDING]
    assert str(health) == (
        "1 of 2 cache pods ready; pod train-1-cache-1: Unschedulable: 0/3 nodes are available"
    )


@pytest.mark.parametrize(
    ("message", "severity"),
    [
        ('pods "p" is forbidden: violates PodSecurity "restricted:latest": x', Severity.PERMANENT),
        ('admission webhook "w" denied the request: no', Severity.PERMANENT),
        ("ValidatingAdmissionPolicy 'x' with binding 'y' denied request: no", Severity.PERMANENT),
        ('pods "p" is forbidden: maximum memory usage per Container is 1Gi', Severity.PERMANENT),
        ('Pod "p" is invalid: spec.containers[0].image: Required value', Severity.PERMANENT),
        ('pods "p" is forbidden: exceeded quota: q, requested: cpu=2', Severity.PENDING),
        ('pods "p" is forbidden: status unknown for quota: q, resources: cpu', Severity.PENDING),
        ('pods "p" is forbidden: not yet ready to handle request', Severity.PENDING),
        ('pods "p" is forbidden: error looking up service account a/b: x', Severity.PENDING),
        ('failed calling webhook "w": connection refused', Severity.PENDING),
    ],
)
def test_a_refused_pod_is_permanent_unless_the_reason_may_pass(
    message: str, severity: Severity
) -> None:
    (problem,) = assess(STATEFUL_SET, [pod(0)], [refusal(message)]).problems
    assert (problem.severity, message in problem.text) == (severity, True)


def test_old_refusals_and_those_of_other_sets_are_ignored() -> None:
    event = refusal('pods "p" is forbidden: violates PodSecurity')
    assert assess(STATEFUL_SET, [pod(0), pod(1)], [event]).problems == ()
    assert assess(STATEFUL_SET, [pod(0)], [{**event, "involvedObject": {}}]).problems == ()


def test_pods_of_an_earlier_set_of_that_name_are_ignored() -> None:
    former = pod(0, owner="uid-of-another", containerStatuses=[ended(65)])
    assert assess(STATEFUL_SET, [former, pod(1)], ()).problems == ()
    assert lacks_pods(STATEFUL_SET, [former, pod(1)])
    assert not lacks_pods(STATEFUL_SET, [pod(0), pod(1)])


def test_the_pods_own_reason_comes_first() -> None:
    pods = [pod(0, containerStatuses=[ended(1)]), pod(1, containerStatuses=[ended(78)])]
    assert [p.raises for p in assess(STATEFUL_SET, pods, ()).problems] == [
        ConfigError,
        NodeUnavailableError,
    ]


def test_a_cache_is_ready_when_every_pod_is() -> None:
    assert not assess(STATEFUL_SET, (), ()).is_ready
    assert assess({**STATEFUL_SET, "status": {"readyReplicas": 2}}, (), ()).is_ready
    assert not assess({**STATEFUL_SET, "status": {}}, (), ()).is_ready


def test_an_eviction_is_told_from_a_plain_deletion() -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    assert is_disrupted(pod(0, conditions=[condition])) == "EvictionByEvictionAPI"
    assert is_disrupted(pod(0, conditions=[{**condition, "status": "False"}])) is None
    assert is_disrupted(pod(0)) is None
