"""What a container of a pod runs as a process, and what follows from its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_protocol.errors import ConfigError
from cache_runtimes.local import policies
from cache_runtimes.local.pods import Process, Surroundings, pods, processes
from cache_runtimes.local.policies import ContainerExit, JobStatus
from cache_runtimes.local.render import render
from tests.train_jobs import container, env, replicated_job, runtime, train_job

Json = dict[str, Any]

AROUND = Surroundings(
    secrets={"keys": {"ID": "key", "TOKEN": "secret"}},
    config_maps={"settings": {"MODE": "fast"}},
    environment={"PATH": "/bin"},
    extra_environment={"EXTRA": "1"},
    memory_bytes=8 << 30,
    cpu_count=4,
    ports={29_500: 40_001},
    hosts={"data-cache.other:50051": "127.0.0.1:4000"},
    find_program=lambda program: None if program == "nowhere" else f"/bin/{program}",
)


def address(number: int) -> str:
    return f"127.1.2.{number + 2}"


def planned(
    node: Json, *, volumes: Mapping[str, Path] | None = None, around: Surroundings = AROUND
) -> Process:
    """What ``node`` runs in the second pod of a job called mine."""
    spec = [{"name": name, "emptyDir": {}} for name in volumes or {}]
    made = runtime(replicated_job("node", node, ancestor="trainer", volumes=spec))
    jobset = render(train_job("mine", trainer={"numNodes": 2}), made)
    every_pod = pods(jobset, address)
    found = processes(every_pod[1], every_pod, volumes or {}, around, home=Path("/home-of-pod"))
    return found[node["name"]]


def field(path: str) -> Json:
    return {"fieldRef": {"fieldPath": path}}


def test_pods_are_named_and_addressed_as_a_jobset_does_it() -> None:
    made = runtime(
        replicated_job("cache", container("cache", "serve"), parallelism=2),
        replicated_job("node", container("node", "train"), ancestor="trainer"),
    )
    found = pods(render(train_job("mine"), made), address)
    assert [(pod.host, pod.address, pod.index) for pod in found] == [
        ("mine-cache-0-0.mine", "127.1.2.2", 0),
        ("mine-cache-0-1.mine", "127.1.2.3", 1),
        ("mine-node-0-0.mine", "127.1.2.4", 0),
    ]


def test_fields_of_the_pod_reach_the_environment() -> None:
    wanted = {
        "JOB": "metadata.labels['jobset.sigs.k8s.io/jobset-name']",
        "INDEX": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        "IP": "status.podIP",
        "POD": "metadata.name",
        "SPACE": "metadata.namespace",
    }
    items = [{"name": name, "valueFrom": field(path)} for name, path in wanted.items()]
    found = planned(container("node", "train", env=items)).environment
    assert {name: found[name] for name in wanted} == {
        "JOB": "mine",
        "INDEX": "1",
        "IP": "127.1.2.3",
        "POD": "mine-node-0-1",
        "SPACE": "default",
    }


@pytest.mark.parametrize(
    ("resource", "divisor", "value"),
    [
        ("limits.memory", None, str(2 << 30)),
        ("limits.memory", "1Mi", "2048"),
        ("requests.memory", None, str(8 << 30)),
        ("limits.cpu", None, "2"),
        ("limits.cpu", "1m", "1500"),
    ],
)
def test_resources_reach_the_environment(resource: str, divisor: str | None, value: str) -> None:
    reference = {"resource": resource, **({"divisor": divisor} if divisor else {})}
    node = container(
        "node",
        "train",
        env=[{"name": "LIMIT", "valueFrom": {"resourceFieldRef": reference}}],
        resources={"limits": {"memory": "2Gi", "cpu": "1500m"}},
    )
    assert planned(node).environment["LIMIT"] == value


def test_variables_may_refer_to_earlier_ones_and_arguments_to_all() -> None:
    node = container(
        "node",
        "go $(SECOND) $(UNKNOWN) $$(FIRST)",
        env=env(FIRST="1", SECOND="$(FIRST)2", BEFORE="$(LATER)", LATER="x"),
    )
    found = planned(node)
    assert found.environment["SECOND"] == "12"
    assert found.environment["BEFORE"] == "$(LATER)"
    assert found.argv[-1] == "go 12 $(UNKNOWN) $(FIRST)"


def test_secrets_and_config_maps_reach_the_environment() -> None:
    node = container(
        "node",
        "train",
        envFrom=[
            {"secretRef": {"name": "keys"}, "prefix": "KEY_"},
            {"configMapRef": {"name": "settings"}},
            {"secretRef": {"name": "absent", "optional": True}},
        ],
        env=[
            {
                "name": "ONE",
                "valueFrom": {"secretKeyRef": {"name": "keys", "key": "TOKEN"}},
            },
            {
                "name": "NONE",
                "valueFrom": {
                    "configMapKeyRef": {"name": "settings", "key": "X", "optional": True}
                },
            },
        ],
    )
    found = planned(node).environment
    assert (found["KEY_ID"], found["MODE"], found["ONE"]) == ("key", "fast", "secret")
    assert "NONE" not in found


def test_names_of_pods_become_their_addresses() -> None:
    text = "grpc://mine-node-0-0.mine:50051 mine-node-0-1.mine.default.svc.cluster.local"
    assert planned(container("node", text)).argv[-1] == "grpc://127.1.2.2:50051 127.1.2.3"


@pytest.mark.parametrize("text", ["amine-node-0-0.mine", "mine-node-0-0.mines", "mine-node-0-0"])
def test_other_names_stay(text: str) -> None:
    assert planned(container("node", text)).argv[-1] == text


def test_services_outside_of_the_job_are_where_the_user_says() -> None:
    text = "grpc://data-cache.other:50051 my-data-cache.other:50051 data-cache.other:500511"
    assert planned(container("node", text)).argv[-1] == (
        "grpc://127.0.0.1:4000 my-data-cache.other:50051 data-cache.other:500511"
    )


def test_mount_paths_become_the_directories_of_volumes() -> None:
    node = container(
        "node",
        "--dir=/cache/x:/cache /cached /my/cache s3://bucket/cache",
        volumeMounts=[{"name": "c", "mountPath": "/cache"}, {"name": "w", "mountPath": "/work"}],
        workingDir="/work",
        env=env(HOME="/work/home"),
    )
    found = planned(node, volumes={"c": Path("/tmp/c"), "w": Path("/tmp/w")})
    assert found.argv[-1] == "--dir=/tmp/c/x:/tmp/c /cached /my/cache s3://bucket/cache"
    assert found.directory == Path("/tmp/w")
    assert found.environment["HOME"] == "/tmp/w/home"


def test_commands_of_probes_and_hooks_are_rewritten_as_arguments_are() -> None:
    command = ["ask", "mine-node-0-0.mine:1", "/cache/up", "$(A)", "$(B)", "$(UNKNOWN)"]
    node = container(
        "node",
        "train",
        volumeMounts=[{"name": "c", "mountPath": "/cache"}],
        env=[*env(A="/cache/a"), {"name": "B", "valueFrom": field("metadata.name")}],
        readinessProbe={"exec": {"command": command}, "periodSeconds": 3},
        lifecycle={"preStop": {"exec": {"command": command}}},
    )
    found = planned(node, volumes={"c": Path("/tmp/c")}).container
    here = ["ask", "127.1.2.2:1", "/tmp/c/up"]
    assert found["readinessProbe"] == {
        "exec": {"command": [*here, "/tmp/c/a", "", "$(UNKNOWN)"]},
        "periodSeconds": 3,
    }
    assert found["lifecycle"]["preStop"]["exec"]["command"] == [*here, *command[3:]]


@pytest.mark.parametrize("given", [None, "localhost,.svc"])
def test_pods_are_reached_without_the_proxy(given: str | None) -> None:
    proxies = {"http_proxy": "http://proxy:3128", **({"no_proxy": given} if given else {})}
    around = replace(AROUND, environment={**AROUND.environment, **proxies})
    found = planned(container("node", "train"), around=around).environment
    direct = "127.1.2.2,127.1.2.3,127.0.0.1"
    assert found["no_proxy"] == (f"{given},{direct}" if given else direct)
    assert found["NO_PROXY"] == direct


def test_without_a_proxy_nothing_is_said_of_one() -> None:
    found = planned(container("node", "train")).environment
    assert not any("proxy" in name.lower() for name in found)


def test_the_port_of_the_framework_becomes_a_free_one() -> None:
    node = container("node", "mine-node-0-0.mine:29500 mine-node-0-0.mine:295001 29500")
    found = planned(node)
    assert found.argv[-1] == "127.1.2.2:40001 127.1.2.2:295001 29500"
    assert found.environment["PET_MASTER_PORT"] == "40001"
    assert found.environment["PET_MASTER_ADDR"] == "127.1.2.2"


def test_the_environment_is_the_machines_then_the_manifests_then_what_was_asked_for() -> None:
    found = planned(container("node", "train", env=env(EXTRA="0", OWN="2"))).environment
    assert (found["PATH"], found["OWN"], found["EXTRA"]) == ("/bin", "2", "1")
    assert (found["HOME"], found["TMPDIR"]) == ("/home-of-pod", "/home-of-pod")


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"name": "node", "image": "x"}, "mine-node-0-1/node has no command"),
        ({"name": "node", "command": ["nowhere"]}, "no program 'nowhere'"),
        (
            container("node", "x", volumeMounts=[{"name": "v", "mountPath": "/v"}]),
            "volumeMount 'v' has no volume",
        ),
        (
            container("node", "x", envFrom=[{"secretRef": {"name": "absent"}}]),
            "needs the secret 'absent'",
        ),
        (
            container("node", "x", env=[{"name": "A", "valueFrom": field("spec.x")}]),
            "does not know the field 'spec.x'",
        ),
    ],
)
def test_what_cannot_be_run_is_named(node: Json, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(node)
    assert words in str(caught.value)


def test_secrets_are_not_in_what_is_printed_of_a_process() -> None:
    node = container("node", "train", envFrom=[{"secretRef": {"name": "keys"}}])
    around = replace(AROUND, secrets={"keys": {"ID": "top-secret"}})
    found = planned(node, around=around)
    assert found.environment["ID"] == "top-secret"
    assert "top-secret" not in repr(found) + repr(around)


RULES = [{"action": "Restart", "exitCodes": {"operator": "NotIn", "values": [0, 65, 78]}}]


@pytest.mark.parametrize(
    ("fields", "pod_policy", "code", "restarts"),
    [
        ({}, "Never", 1, False),
        ({}, "OnFailure", 1, True),
        ({}, "OnFailure", 0, False),
        ({}, "Always", 0, True),
        ({"restartPolicy": "Never", "restartPolicyRules": RULES}, "Never", 137, True),
        ({"restartPolicy": "Never", "restartPolicyRules": RULES}, "Never", 78, False),
        ({"restartPolicy": "Never", "restartPolicyRules": RULES}, "Never", 0, False),
        ({"restartPolicy": "Always"}, "Never", 0, True),
    ],
)
def test_restarts_in_place(fields: Json, pod_policy: str, code: int, restarts: bool) -> None:
    found = policies.restarts_in_place(
        container("c", "x", **fields), {"restartPolicy": pod_policy}, code
    )
    assert found is restarts


def on_codes(action: str, *values: int, of: str | None = None, operator: str = "In") -> Json:
    wanted: Json = {"operator": operator, "values": list(values)}
    return {"action": action, "onExitCodes": wanted | ({"containerName": of} if of else {})}


@pytest.mark.parametrize(
    ("rules", "code", "action"),
    [
        ([], 1, "Count"),
        ([on_codes("FailJob", 65, 78)], 78, "FailJob"),
        ([on_codes("FailJob", 65, 78)], 1, "Count"),
        ([on_codes("FailJob", 1, operator="NotIn")], 2, "FailJob"),
        ([on_codes("FailJob", 1, of="other")], 1, "Count"),
        ([on_codes("Ignore", 1, of="main"), on_codes("FailJob", 1)], 1, "Ignore"),
        ([{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}], 1, "Count"),
    ],
)
def test_the_failure_policy_of_pods(rules: list[Json], code: int, action: str) -> None:
    exits = [ContainerExit("main", code, "why"), ContainerExit("side", 0, "")]
    assert policies.after_pod_failure({"podFailurePolicy": {"rules": rules}}, exits) == action


FAIL_CACHE = {
    "name": "bad",
    "action": "FailJobSet",
    "targetReplicatedJobs": ["cache"],
    "onJobFailureReasons": ["PodFailurePolicy"],
}


@pytest.mark.parametrize(
    ("restart_policy", "limit", "failures", "restarts", "exceeds"),
    [
        ("Never", 2, 2, 9, False),
        ("Never", 2, 3, 0, True),
        ("OnFailure", 2, 0, 1, False),
        ("OnFailure", 2, 0, 2, True),
        ("OnFailure", 0, 0, 0, False),
        ("OnFailure", 0, 0, 1, True),
    ],
)
def test_the_limit_of_failures_and_of_restarts(
    restart_policy: str, limit: int, failures: int, restarts: int, exceeds: bool
) -> None:
    pod = {"restartPolicy": restart_policy}
    assert policies.exceeds_backoff_limit(pod, limit, failures, restarts) is exceeds


@pytest.mark.parametrize(
    ("job", "jobset", "named"),
    [
        ({}, {}, []),
        ({"podFailurePolicy": {"rules": [on_codes("Ignore", 1)]}}, {}, []),
        ({"backoffLimitPerIndex": 0}, {}, ["node: backoffLimitPerIndex"]),
        (
            {"podFailurePolicy": {"rules": [on_codes("FailIndex", 1)]}},
            {},
            ["node: podFailurePolicy: action FailIndex"],
        ),
        (
            {},
            {"failurePolicy": {"rules": [{"name": "x", "action": "RestartJob"}]}},
            ["failurePolicy: action RestartJob"],
        ),
    ],
)
def test_policies_that_are_not_restated_are_named(
    job: Json, jobset: Json, named: list[str]
) -> None:
    spec = {"replicatedJobs": [replicated_job("node", job=job)], **jobset}
    assert [*policies.unknown_policies(spec)] == named


@pytest.mark.parametrize(
    ("policy", "job", "reason", "restarts", "action"),
    [
        (None, "node", "BackoffLimitExceeded", 0, "FailJobSet"),
        ({"maxRestarts": 1}, "node", "BackoffLimitExceeded", 0, "RestartJobSet"),
        ({"maxRestarts": 1}, "node", "BackoffLimitExceeded", 1, "FailJobSet"),
        ({"maxRestarts": 3, "rules": [FAIL_CACHE]}, "cache", "PodFailurePolicy", 0, "FailJobSet"),
        ({"maxRestarts": 3, "rules": [FAIL_CACHE]}, "node", "PodFailurePolicy", 0, "RestartJobSet"),
        (
            {"rules": [{"name": "x", "action": "RestartJobSetAndIgnoreMaxRestarts"}]},
            "node",
            "x",
            9,
            "RestartJobSetAndIgnoreMaxRestarts",
        ),
    ],
)
def test_the_failure_policy_of_the_jobset(
    policy: Json | None, job: str, reason: str, restarts: int, action: str
) -> None:
    assert policies.after_job_failure(policy, job, reason, restarts) == action


@pytest.mark.parametrize(
    ("policy", "succeeded", "complete"),
    [
        (None, {"cache": 1, "node": 1}, True),
        (None, {"node": 1}, False),
        ({"operator": "All", "targetReplicatedJobs": ["node"]}, {"node": 1}, True),
        ({"operator": "Any"}, {"cache": 1}, True),
        ({"operator": "Any", "targetReplicatedJobs": ["node"]}, {"cache": 1}, False),
    ],
)
def test_the_success_policy(policy: Json | None, succeeded: dict[str, int], complete: bool) -> None:
    spec: Json = {"replicatedJobs": [{"name": "cache"}, {"name": "node"}]}
    if policy is not None:
        spec["successPolicy"] = policy
    assert policies.is_complete(spec, succeeded) is complete


@pytest.mark.parametrize(
    ("wanted", "status", "starts"),
    [
        ("Ready", JobStatus(), False),
        ("Ready", JobStatus(ready=1), True),
        ("Ready", JobStatus(succeeded=1), True),
        ("Complete", JobStatus(ready=1), False),
        ("Complete", JobStatus(succeeded=1), True),
    ],
)
def test_a_job_waits_for_what_it_depends_on(wanted: str, status: JobStatus, starts: bool) -> None:
    job = {"name": "node", "dependsOn": [{"name": "cache", "status": wanted}]}
    assert policies.may_start(job, {"cache": status}, {"cache": 1}) is starts
