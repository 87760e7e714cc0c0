"""A TrainJob and the settings -> the objects of its cache. Pure.

    ServiceAccount  <job>-cache           of the cache pods, which request its tokens
    Service         <job>-cache           headless: a name for each pod, ready or not
    Service         <job>-cache-service   for clients: the coordinator, pod 0
    StatefulSet     <job>-cache           the pods

The TrainJob owns them, so they end with it. An annotation holds a hash of the plan, by which a
later run recognizes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cache_protocol.errors import ConfigError
from cache_runtimes.initializer.settings import Settings

Json = dict[str, Any]

TRAINER_GROUP = "trainer.kubeflow.org"
TRAINER_VERSION = "v1alpha1"
CONTAINER = "cache"
PLAN_ANNOTATION = "trainer-data-cache/plan"
JOB_LABEL = "trainer-data-cache/train-job"
FLIGHT_PORT = 50_051
CONTROL_PORT = 50_052  # gRPC, health too
HTTP_PORT = 8080  # status page and metrics
_USER = 1000  # of the server image
_TOKEN_DIR = "/var/run/secrets/data-cache"
_API_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"
# For Istio: its proxy would carry gRPC between pods that are named by their addresses.
_NO_MESH = {"sidecar.istio.io/inject": "false"}
_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"


class Kind(StrEnum):
    """The kinds of objects that the initializer handles."""

    TRAIN_JOB = "TrainJob"
    SERVICE_ACCOUNT = "ServiceAccount"
    SERVICE = "Service"
    STATEFUL_SET = "StatefulSet"
    POD = "Pod"
    EVENT = "Event"

    @property
    def plural(self) -> str:
        """Its name in the API and in roles."""
        return f"{self.lower()}s"


@dataclass(frozen=True)
class Planned:
    """A planned object; ``body`` is what is sent, and is not shared."""

    kind: Kind
    body: Json

    @property
    def name(self) -> str:
        """Its name in the namespace."""
        return str(self.body["metadata"]["name"])

    @property
    def fingerprint(self) -> str:
        """The hash of its plan."""
        return str(self.body["metadata"]["annotations"][PLAN_ANNOTATION])


@dataclass(frozen=True)
class Names:
    """The names of the objects of one TrainJob."""

    train_job: str

    @property
    def cache(self) -> str:
        """The ServiceAccount, the headless Service and the StatefulSet."""
        return f"{self.train_job}-cache"

    @property
    def service(self) -> str:
        """The Service that clients use."""
        return f"{self.train_job}-cache-service"

    @property
    def coordinator(self) -> str:
        """The coordinator's pod."""
        return f"{self.cache}-0"

    @property
    def removed_in_order(self) -> tuple[tuple[Kind, str], ...]:
        """All objects: the pods first, then the objects that they use."""
        return (
            (Kind.STATEFUL_SET, self.cache),
            (Kind.SERVICE, self.service),
            (Kind.SERVICE, self.cache),
            (Kind.SERVICE_ACCOUNT, self.cache),
        )


def plan_objects(
    settings: Settings, train_job: Json, own_pod: Json | None = None
) -> tuple[Planned, ...]:
    """The objects of the cache of ``train_job``, in the order of their creation.

    Args:
        own_pod: of the initializer, if it is known. The cache pods get its tolerations, pull
            secrets and pod security context: they have the same image and namespace.

    Raises:
        ConfigError: the TrainJob's dataset differs from the one that this pod got, or sets a
            variable of the cache pods.
    """
    names = Names(settings.train_job)
    account: Json = {"apiVersion": "v1", "automountServiceAccountToken": False}
    if settings.iam_role is not None:
        account["metadata"] = {
            "annotations": {
                "eks.amazonaws.com/role-arn": settings.iam_role,
                "eks.amazonaws.com/sts-regional-endpoints": "true",
            }
        }
    pods = {
        "apiVersion": "apps/v1",
        "spec": {
            "replicas": settings.num_nodes,
            "serviceName": names.cache,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _selector(names)},
            "template": {
                "metadata": {
                    "labels": {**_labels(names), **_NO_MESH},
                    # For autoscalers: a cache pod that moves loads its part again.
                    "annotations": {
                        **_NO_MESH,
                        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                        "karpenter.sh/do-not-disrupt": "true",
                    },
                },
                "spec": {
                    **_pod_spec(settings, names, _environment(settings, names, train_job)),
                    **_permissions_of(own_pod),
                },
            },
        },
    }
    objects = (
        (Kind.SERVICE_ACCOUNT, names.cache, account),
        (Kind.SERVICE, names.cache, _service({"clusterIP": "None"}, _selector(names))),
        (
            Kind.SERVICE,
            names.service,
            _service({}, {"statefulset.kubernetes.io/pod-name": names.coordinator}),
        ),
        (Kind.STATEFUL_SET, names.cache, pods),
    )
    return tuple(_owned(kind, name, body, names, train_job) for kind, name, body in objects)


def _owned(kind: Kind, name: str, body: Json, names: Names, train_job: Json) -> Planned:
    metadata = {
        **body.get("metadata", {}),
        "name": name,
        "namespace": train_job["metadata"]["namespace"],
        "labels": _labels(names),
        "ownerReferences": [
            {
                "apiVersion": f"{TRAINER_GROUP}/{TRAINER_VERSION}",
                "kind": Kind.TRAIN_JOB.value,
                "name": names.train_job,
                "uid": train_job["metadata"]["uid"],
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    whole = {**body, "kind": kind.value, "metadata": metadata}
    plan = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]
    metadata["annotations"] = {**metadata.get("annotations", {}), PLAN_ANNOTATION: plan}
    return Planned(kind, whole)


def _selector(names: Names) -> Json:
    return {
        "app.kubernetes.io/name": "data-cache",
        "app.kubernetes.io/instance": names.train_job,
        "app.kubernetes.io/component": "node",
    }


def _labels(names: Names) -> Json:
    return {
        **_selector(names),
        "app.kubernetes.io/part-of": "trainer-data-cache",
        "app.kubernetes.io/managed-by": "data-cache-initializer",
        JOB_LABEL: names.train_job,
    }


def _service(more: Json, selector: Json) -> Json:
    ports = [
        {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
        for name, port in (("flight", FLIGHT_PORT), ("control", CONTROL_PORT))
    ]
    # Nodes must find each other before they are ready, and a client must find the coordinator while
    # it loads rows again.
    return {
        "apiVersion": "v1",
        "spec": {**more, "publishNotReadyAddresses": True, "selector": selector, "ports": ports},
    }


def _environment(settings: Settings, names: Names, train_job: Json) -> Json:
    """``env`` and ``envFrom`` of a cache pod: the common variables and the TrainJob's dataset."""
    own: list[Json] = [
        {"name": "TRAIN_JOB_NAME", "value": names.train_job},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "CACHE_WORLD_SIZE", "value": str(settings.num_nodes)},
        {
            "name": "CONTAINER_MEMORY_LIMIT",
            "valueFrom": {
                "resourceFieldRef": {"containerName": CONTAINER, "resource": "limits.memory"}
            },
        },
        {"name": "CACHE_TOKEN_FILE", "value": f"{_TOKEN_DIR}/token"},
        {"name": "HOME", "value": "/tmp"},
    ]
    dataset = (train_job["spec"].get("initializer") or {}).get("dataset") or {}
    theirs: list[Json] = list(dataset.get("env") or ())
    if dataset.get("storageUri") and "STORAGE_URI" not in {each["name"] for each in theirs}:
        # As Trainer does: a variable of the dataset overrides its storageUri.
        theirs.insert(0, {"name": "STORAGE_URI", "value": dataset["storageUri"]})
    # Kubernetes reads "$$" as a dollar sign.
    theirs += [
        {"name": name, "value": value.replace("$", "$$")}
        for name, value in settings.options.variables().items()
    ]
    secret = dataset.get("secretRef")
    _check_dataset(settings, theirs, {variable["name"] for variable in own}, secret)
    if settings.iam_role is not None:
        # The ServiceAccount of the pods has the role. As a setting of the store, each pod would
        # assume it again, which a role may forbid. An empty value also overrides a Secret.
        theirs = [variable for variable in theirs if variable["name"] != "IAM_ROLE"]
        theirs.append({"name": "IAM_ROLE", "value": ""})
    return {"env": own + theirs, **({"envFrom": [{"secretRef": secret}]} if secret else {})}


def _check_dataset(
    settings: Settings, theirs: list[Json], own: set[str], secret: Mapping[str, Any] | None
) -> None:
    """Refuses a dataset that differs from the one that this pod got."""
    set_by_job = {variable["name"]: variable for variable in theirs}
    problems = [
        f"spec.initializer.dataset.env must not set {name}, which every cache pod sets itself"
        for name in sorted(set_by_job.keys() & own)
    ]
    # This program does not read the Secret, which may hold credentials and the store's address.
    asked = settings.dataset.keys() if secret is None else settings.what_to_cache
    elsewhere = asked - set_by_job.keys()
    if elsewhere:
        problems.append(
            f"{', '.join(sorted(elsewhere))}: set in this pod, but not in spec.initializer.dataset "
            "of the TrainJob, which the cache pods get; set it there, by `valueFrom` if it is in a "
            "Secret and no credential"
        )
    different = [
        name
        for name, value in sorted(settings.dataset.items())
        if name in set_by_job and not _comes_to(set_by_job[name], value)
    ]
    if different:  # not quoted: some are secrets
        problems.append(
            f"{', '.join(different)}: this pod and spec.initializer.dataset of the TrainJob, which "
            "the cache pods get, have different values"
        )
    if problems:
        raise ConfigError("bad settings: " + "; ".join(problems))


def _comes_to(variable: Json, value: str) -> bool:
    """Whether a variable may have this value; Kubernetes fills in some values later."""
    plain = variable.get("value") or ""
    return "valueFrom" in variable or "$" in plain or plain == value


def _pod_spec(settings: Settings, names: Names, environment: Json) -> Json:
    return {
        "serviceAccountName": names.cache,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": _selector(names)},
            }
        ],
        "affinity": {"podAffinity": _one_zone(names)},
        "containers": [_container(settings, names, environment)],
        "volumes": [
            {
                "name": "cache",
                "emptyDir": {"medium": "Memory", "sizeLimit": str(settings.shard_bytes)},
            },
            {"name": "scratch", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            _projected("cache-token", _token(audience="data-cache")),
            # For the API server, which shows the keys of such tokens.
            _projected("api-server", _token(), _CA_OF_API),
        ],
    }


_CA_OF_API = {
    "configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
}


def _token(**audience: str) -> Json:
    return {"serviceAccountToken": {**audience, "path": "token"}}


def _projected(name: str, *sources: Json) -> Json:
    return {"name": name, "projected": {"sources": list(sources)}}


def _permissions_of(pod: Json | None) -> Json:
    """The fields that let a pod onto a node, pull its image and choose its user."""
    spec = (pod or {}).get("spec") or {}
    names = ("imagePullSecrets", "tolerations", "securityContext")
    return {name: spec[name] for name in names if spec.get(name)}


def _one_zone(names: Names) -> Json:
    """An affinity to the pods of the JobSet: the initializer, and later the trainers."""
    term = {
        "topologyKey": "topology.kubernetes.io/zone",
        "labelSelector": {"matchLabels": {_JOBSET_LABEL: names.train_job}},
    }
    return {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 100, "podAffinityTerm": term}
        ]
    }


def _container(settings: Settings, names: Names, environment: Json) -> Json:
    resources = {"cpu": settings.cpu, "memory": settings.memory}
    return {
        "name": CONTAINER,
        "image": settings.image,
        "command": ["cache-server"],
        "args": [
            "serve",
            "--cache-dir=/cache",
            "--bind=$(POD_IP)",
            f"--auth-pods=node,writer:{names.cache}-*",
            f"--auth-pods=writer:{names.train_job}-node-0-*",
            "--auth-pods=reader:*",
            f"--service-account-dir={_API_DIR}",
            f"--advertise=$(POD_NAME).{names.cache}",
            f"--coordinator={names.coordinator}.{names.cache}:{CONTROL_PORT}",
            "--num-nodes=$(CACHE_WORLD_SIZE)",
            "--container-memory-limit=$(CONTAINER_MEMORY_LIMIT)",
            "--load-from-env",
        ],
        **environment,
        "ports": [
            {"name": "flight", "containerPort": FLIGHT_PORT, "protocol": "TCP"},
            {"name": "control", "containerPort": CONTROL_PORT, "protocol": "TCP"},
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
        ],
        "resources": {"requests": resources, "limits": dict(resources)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **_probes(settings),
        "volumeMounts": [
            {"name": "cache", "mountPath": "/cache"},
            # For fetched files: on disk, not in the memory of the shards.
            {"name": "scratch", "mountPath": "/cache/.scratch"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "cache-token", "mountPath": _TOKEN_DIR, "readOnly": True},
            {"name": "api-server", "mountPath": _API_DIR, "readOnly": True},
        ],
    }


def _probes(settings: Settings) -> Json:
    live = {"grpc": {"port": CONTROL_PORT, "service": "live"}, "timeoutSeconds": 5}
    return {
        "startupProbe": {**live, "periodSeconds": 2, "failureThreshold": 60},
        "livenessProbe": {**live, "periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {
            "grpc": {"port": CONTROL_PORT, "service": "ready"},
            "initialDelaySeconds": settings.readiness.initial_delay_s,
            "periodSeconds": settings.readiness.period_s,
            "timeoutSeconds": settings.readiness.timeout_s,
            "failureThreshold": settings.readiness.failure_threshold,
        },
    }
