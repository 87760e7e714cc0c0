"""Which fields of a JobSet run-local supports, and how it names the others."""

from __future__ import annotations

from typing import Any

import pytest

from cache_protocol.errors import ConfigError
from cache_runtimes import MANIFESTS
from cache_runtimes.local.render import render
from cache_runtimes.local.supported import JOBSET, UnsupportedFieldError, check_supported
from tests.manifests import read
from tests.train_jobs import container, replicated_job, runtime, train_job

Json = dict[str, Any]

NODE = "spec.replicatedJobs[node]"
POD = f"{NODE}.template.spec.template.spec"
CONTAINER = f"{POD}.containers[node]"
GRPC = {"grpc": {"port": 1, "service": "ready"}}


def check(made: Json) -> None:
    check_supported(made["spec"]["template"]["spec"], JOBSET, "spec")


def with_job(**job: Any) -> Json:
    return runtime(replicated_job("node", container("node", "x"), job=job))


def with_pod(**pod: Any) -> Json:
    return runtime(replicated_job("node", container("node", "x"), **pod))


def with_container(**fields: Any) -> Json:
    return runtime(replicated_job("node", container("node", "x", **fields)))


@pytest.mark.parametrize(
    "name",
    [
        "deepspeed-data-cache",
        "jax-distributed-data-cache",
        "mlx-data-cache",
        "torch-distributed-data-cache",
        "torch-distributed-data-cache-colocated",
        "torch-distributed-shared-data-cache",
        "xgboost-data-cache",
    ],
)
def test_runtimes_that_run_on_one_machine_are_supported(name: str) -> None:
    jobset = render(train_job("job"), read(MANIFESTS / name / "runtime.yaml"))
    check_supported(jobset["spec"], JOBSET, "spec")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch-distributed-with-cache", "readinessProbe.exec={"),
        ("torchtune-qwen2.5-1.5b", "spec.volumeClaimPolicies="),
    ],
)
def test_runtimes_that_need_a_cluster_are_refused(name: str, words: str) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        jobset = render(train_job("job"), read(MANIFESTS / name / "runtime.yaml"))
        check_supported(jobset["spec"], JOBSET, "spec")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (with_container(startupProbe={}), f"{CONTAINER}.startupProbe.grpc=None"),
        (
            with_container(livenessProbe={"exec": {"command": ["true"]}}),
            f"{CONTAINER}.livenessProbe.exec={{'command': ['true']}}; "
            f"{CONTAINER}.livenessProbe.grpc=None",
        ),
        (
            with_container(readinessProbe={**GRPC, "successThreshold": 2}),
            f"{CONTAINER}.readinessProbe.successThreshold=2",
        ),
        (with_container(lifecycle={"postStart": {}}), f"{CONTAINER}.lifecycle.postStart={{}}"),
        (
            with_container(lifecycle={"preStop": {"exec": {"command": ["true"]}}}),
            f"{CONTAINER}.lifecycle.preStop.exec={{'command': ['true']}}",
        ),
        (
            with_container(envFrom=[{"configMapRef": {"name": "settings"}}]),
            f"{CONTAINER}.envFrom[0].configMapRef={{'name': 'settings'}}",
        ),
        (
            with_container(restartPolicyRules=[{"action": "Restart", "exitCodes": {}}]),
            f"{CONTAINER}.restartPolicyRules[0].exitCodes.operator=None",
        ),
        (with_pod(restartPolicy="Always"), f"{POD}.restartPolicy='Always'"),
        (
            with_pod(initContainers=[container("first", "x")]),
            f"{POD}.initContainers[first].restartPolicy=None",
        ),
        (
            with_pod(volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]),
            f"{POD}.volumes[v].persistentVolumeClaim={{'claimName': 'c'}}",
        ),
        (with_job(backoffLimitPerIndex=1), f"{NODE}.template.spec.backoffLimitPerIndex=1"),
        (
            with_job(podFailurePolicy={"rules": [{"action": "FailIndex"}]}),
            f"{NODE}.template.spec.podFailurePolicy.rules[0].action='FailIndex'",
        ),
        (
            runtime(failurePolicy={"rules": [{"name": "x", "action": "RestartJob"}]}),
            "spec.failurePolicy.rules[x].action='RestartJob'",
        ),
        (runtime(successPolicy={"operator": "Any"}), "spec.successPolicy.operator='Any'"),
        (runtime({**replicated_job("node"), "replicas": 2}), f"{NODE}.replicas=2"),
        (runtime(suspend=True), "spec.suspend=True"),
        (runtime(x="y" * 999), f"spec.x='{'y' * 199}"),
    ],
)
def test_another_field_is_named_with_its_value(made: Json, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(made)
    assert str(caught.value).startswith(f"run-local does not support {named}")


def test_every_such_field_is_named_at_once() -> None:
    with pytest.raises(UnsupportedFieldError, match=r"spec.suspend=True; spec.coordinator=\{\}"):
        check(runtime(suspend=True, coordinator={}))


def test_a_field_of_null_is_absent() -> None:
    check(with_container(livenessProbe=None, stdin=None))
