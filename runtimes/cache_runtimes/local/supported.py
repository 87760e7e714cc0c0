"""The fields of a JobSet that run-local supports. Pure.

They are the fields that the shipped runtimes and their TrainJobs use. Any other field ends the run
before anything starts: run-local never ignores a field that changes what a pod does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cache_protocol.errors import ConfigError

Json = dict[str, Any]

_MAX_VALUE_LENGTH = 200

# Rules: _ANY takes every value, a tuple lists the values, a dictionary lists the fields. A list
# has one rule for all of its items. A field is required where its rule is one of _REQUIRED or a
# tuple without None.
_ANY: Any = object()


def _fields(*names: str, **rules: Any) -> Json:
    return {**dict.fromkeys(names, _ANY), **rules}


_SLEEP = _fields("seconds")
_REQUIRED = (_SLEEP,)
_PROBE = _fields(
    *("periodSeconds", "timeoutSeconds", "failureThreshold"),
    grpc=_fields("port", "service"),
    tcpSocket=_fields("port"),
)
_ITEMS = _fields("key", "path", "mode")
_CONTAINER = _fields(
    *("name", "image", "imagePullPolicy", "command", "args", "workingDir", "ports", "resources"),
    *("securityContext", "terminationMessagePolicy"),
    env=_fields(
        *("name", "value"),
        valueFrom={
            "fieldRef": _fields("apiVersion", "fieldPath"),
            "resourceFieldRef": {
                "resource": ("limits.memory",),
                "containerName": ("", None),
                "divisor": ("0", None),
            },
            "secretKeyRef": _fields("name", "key"),
        },
    ),
    envFrom={"secretRef": _fields("name")},
    startupProbe=_PROBE,
    livenessProbe=_PROBE,
    readinessProbe=_PROBE,
    lifecycle={"preStop": {"sleep": _SLEEP}},
    volumeMounts=_fields("name", "mountPath", "readOnly"),
)
_POD = _fields(
    *("terminationGracePeriodSeconds", "automountServiceAccountToken", "enableServiceLinks"),
    *("serviceAccountName", "securityContext", "shareProcessNamespace", "imagePullSecrets"),
    # For the scheduler.
    *("affinity", "nodeSelector", "schedulerName", "schedulingGates", "tolerations"),
    "topologySpreadConstraints",
    restartPolicy=("Never", "OnFailure"),
    initContainers={**_CONTAINER, "restartPolicy": ("Always",)},  # sidecars
    containers={
        **_CONTAINER,
        "restartPolicy": ("Never", None),
        "restartPolicyRules": {
            "action": ("Restart",),
            "exitCodes": _fields("values", operator=("NotIn",)),
        },
    },
    volumes=_fields(
        *("name", "emptyDir"),
        secret=_fields("secretName", "defaultMode", items=_ITEMS),
        configMap=_fields("name", "defaultMode", items=_ITEMS),
        downwardAPI=_fields(
            "defaultMode",
            items={
                **_fields("path", "mode"),
                "fieldRef": _fields("apiVersion", fieldPath=("metadata.annotations",)),
            },
        ),
        # Who a pod is: the token of the run takes its place.
        projected=_fields(
            "defaultMode",
            sources={
                "serviceAccountToken": _ANY,
                "configMap": _fields("items", name=("kube-root-ca.crt",)),
            },
        ),
    ),
)
_JOB = _fields(
    *("parallelism", "completions", "backoffLimit", "podReplacementPolicy"),
    completionMode=("Indexed",),
    podFailurePolicy={
        "rules": {
            "action": ("FailJob", "Ignore"),
            "onExitCodes": _fields("containerName", "values", operator=("In",)),
            "onPodConditions": _ANY,
        }
    },
    template=_fields("metadata", spec=_POD),
)
JOBSET = _fields(
    network=_fields("enableDNSHostnames", "publishNotReadyAddresses"),
    successPolicy=_fields("targetReplicatedJobs", operator=("All",)),
    failurePolicy=_fields(
        "maxRestarts",
        rules=_fields(
            *("name", "targetReplicatedJobs", "onJobFailureReasons"), action=("FailJobSet",)
        ),
    ),
    replicatedJobs=_fields(
        "name",
        replicas=(1, None),
        dependsOn=_fields("name", status=("Ready", "Complete")),
        template=_fields("metadata", spec=_JOB),
    ),
    suspend=(False, None),
)
ML_POLICY = _fields("numNodes", "torch", "jax", "mpi", "xgboost")
_OBJECT = ("apiVersion", "kind", "metadata", "immutable", "data")
SECRET = _fields(*_OBJECT, "type", "stringData")
CONFIG_MAP = _fields(*_OBJECT)


class UnsupportedFieldError(ConfigError):
    """A manifest has a field or a value that run-local does not support; names each with it."""


def check_supported(value: Json, rules: Json, path: str) -> None:
    """Checks an object against one of the rules of this module.

    Args:
        path: of the object, such as ``spec``.

    Raises:
        UnsupportedFieldError: naming every unsupported field with its value.
    """
    found = [
        f"{where}={repr(part)[:_MAX_VALUE_LENGTH]}"
        for where, part in _unsupported(value, rules, path)
    ]
    if found:
        raise UnsupportedFieldError(f"run-local does not support {'; '.join(found)}")


def _unsupported(value: Any, rule: Any, path: str) -> Iterator[tuple[str, Any]]:
    if rule is _ANY:
        return
    if isinstance(rule, tuple):
        if value not in rule:
            yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            step = item.get("name", index) if isinstance(item, dict) else index
            yield from _unsupported(item, rule, f"{path}[{step}]")
    elif value is not None:
        for name, part in value.items():
            yield from _unsupported(part, rule.get(name, (None,)), f"{path}.{name}")
        for name, wanted in rule.items():
            needed = wanted in _REQUIRED or (isinstance(wanted, tuple) and None not in wanted)
            if needed and name not in value:
                yield f"{path}.{name}", None
        if rule is _PROBE and not {"grpc", "tcpSocket"} & value.keys():
            yield f"{path}.grpc", None
