"""What a container of a pod runs as a process, and what follows from its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_protocol.errors import ConfigError
from cache_runtimes import MANIFESTS
from cache_runtimes.local import policies
from cache_runtimes.local.pods import (
    Pod,
    Process,
    Surroundings,
    pods,
    processes,
    token_files,
    volume_files,
    with_addresses,
)
from cache_runtimes.local.policies import ContainerExit
from cache_runtimes.local.render import render
from tests.manifests import job_named, pod_of, read
from tests.train_jobs import container, env, replicated_job, runtime, train_job

Json = dict[str, Any]

AROUND = Surroundings(
    secrets={"keys": {"ID": "key", "TOKEN": "secret"}},
    environment={"PATH": "/bin"},
    extra_environment={"EXTRA": "1"},
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


def test_the_memory_limit_reaches_the_environment() -> None:
    limit = {"resourceFieldRef": {"resource": "limits.memory"}}
    node = container(
        "node",
        "train",
        env=[{"name": "LIMIT", "valueFrom": limit}],
        resources={"limits": {"memory": "2Gi"}},
    )
    assert planned(node).environment["LIMIT"] == str(2 << 30)


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


def test_secrets_reach_the_environment() -> None:
    token = {"secretKeyRef": {"name": "keys", "key": "TOKEN"}}
    node = container(
        "node",
        "train",
        envFrom=[{"secretRef": {"name": "keys"}}],
        env=[{"name": "ONE", "valueFrom": token}],
    )
    found = planned(node).environment
    assert (found["ID"], found["ONE"]) == ("key", "secret")


def test_names_of_pods_become_their_addresses() -> None:
    text = "grpc://mine-node-0-0.mine:50051 mine-node-0-1.mine"
    assert planned(container("node", text)).argv[-1] == "grpc://127.1.2.2:50051 127.1.2.3"


@pytest.mark.parametrize("text", ["amine-node-0-0.mine", "mine-node-0-0.mines", "mine-node-0-0"])
def test_other_names_stay(text: str) -> None:
    assert planned(container("node", text)).argv[-1] == text


def test_services_outside_the_job_have_the_address_that_the_user_gives() -> None:
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


def pod_named(name: str, index: int = 0) -> Pod:
    return Pod("mine", "default", name, address(index), {"name": "node"}, index)


SECRETS = {"keys": {"ID": "key", "TOKEN": "secret"}}
CONFIG_MAPS = {"hosts": {"file": "here\n"}}


@pytest.mark.parametrize(
    ("volume", "files"),
    [
        ({"emptyDir": {}}, {}),
        ({"secret": {"secretName": "keys"}}, SECRETS["keys"]),
        (
            {"secret": {"secretName": "keys", "items": [{"key": "ID", "path": "id_rsa"}]}},
            {"id_rsa": "key"},
        ),
        ({"configMap": {"name": "hosts"}}, {"file": "here\n"}),
    ],
)
def test_volumes_have_the_files_of_their_objects(volume: Json, files: Json) -> None:
    found = volume_files(volume, pod_named("p"), SECRETS, CONFIG_MAPS)
    assert {path: file.text for path, file in found.items()} == files


@pytest.mark.parametrize("kind", ["secret", "configMap"])
def test_files_have_the_mode_of_their_item_or_of_their_volume(kind: str) -> None:
    name = {"secret": {"secretName": "keys"}, "configMap": {"name": "hosts"}}[kind]
    key = {"secret": "ID", "configMap": "file"}[kind]
    items = [{"key": key, "path": "a/b"}, {"key": key, "path": "c", "mode": 0o550}]

    def modes(**source: Any) -> list[int]:
        volume = {kind: {**name, **source}}
        found = volume_files(volume, pod_named("p"), SECRETS, CONFIG_MAPS)
        return [file.mode for file in found.values()]

    assert set(modes()) == {0o600}
    assert set(modes(defaultMode=0o755)) == {0o700}
    assert modes(defaultMode=0o400, items=items) == [0o400, 0o500]


@pytest.mark.parametrize(
    ("volume", "words"),
    [
        ({"secret": {"secretName": "none"}}, "p needs the Secret 'none'"),
        ({"configMap": {"name": "none"}}, "p needs the ConfigMap 'none'"),
        (
            {"configMap": {"name": "hosts", "items": [{"key": "none", "path": "x"}]}},
            "p needs, in the ConfigMap 'hosts', the key 'none'",
        ),
        *(
            (
                {"name": "v", "configMap": {"name": "hosts", "items": [item]}},
                f"'v' must be below it, got '{item['path']}'",
            )
            for item in ({"key": "file", "path": "/x"}, {"key": "file", "path": "a/../../x"})
        ),
    ],
)
def test_an_absent_object_or_a_wrong_path_of_a_volume_is_named(volume: Json, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        volume_files(volume, pod_named("p"), SECRETS, CONFIG_MAPS)


def test_config_maps_have_addresses_for_names_and_localhost_for_the_pod_itself() -> None:
    every = [pod_named("launcher-0-0"), pod_named("node-0-0", 1)]
    data = {"hostfile": "launcher-0-0.mine slots=1\nnode-0-0.mine slots=1\n"}
    for pod, hosts in zip(
        every, (["localhost", "127.1.2.3"], ["127.1.2.2", "localhost"]), strict=True
    ):
        found = with_addresses(data, pod, every, AROUND)["hostfile"].split()
        assert found[::2] == hosts


def test_pods_of_mpi_have_the_home_and_the_ssh_of_their_image() -> None:
    keys = {"name": "mpi-ssh-auth", "mountPath": "/home/mpiuser/.ssh"}
    node = container("node", "/home/mpiuser/x /home/mpiuser/.ssh/id_rsa", volumeMounts=[keys])
    found = planned(node, volumes={"mpi-ssh-auth": Path("/keys")})
    assert found.argv[-1] == "/home-of-pod/x /keys/id_rsa"
    assert found.environment["PATH"] == "/home-of-pod/bin:/bin"


@pytest.mark.parametrize("given", [None, "localhost,.svc"])
def test_pods_are_reached_without_the_proxy(given: str | None) -> None:
    proxies = {"http_proxy": "http://proxy:3128", **({"no_proxy": given} if given else {})}
    around = replace(AROUND, environment={**AROUND.environment, **proxies})
    found = planned(container("node", "train"), around=around).environment
    direct = "127.1.2.2,127.1.2.3,127.0.0.1"
    assert found["no_proxy"] == (f"{given},{direct}" if given else direct)
    assert found["NO_PROXY"] == direct


def test_without_a_proxy_no_variable_names_one() -> None:
    found = planned(container("node", "train")).environment
    assert not any("proxy" in name.lower() for name in found)


def test_the_port_of_the_framework_becomes_a_free_one() -> None:
    node = container("node", "mine-node-0-0.mine:29500 mine-node-0-0.mine:295001 29500")
    found = planned(node)
    assert found.argv[-1] == "127.1.2.2:40001 127.1.2.2:295001 29500"
    assert found.environment["PET_MASTER_PORT"] == "40001"
    assert found.environment["PET_MASTER_ADDR"] == "127.1.2.2"


def test_extra_variables_override_the_manifests_and_these_the_machine() -> None:
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
            "needs the Secret 'absent'",
        ),
        (
            container(
                "node",
                "x",
                env=[
                    {
                        "name": "A",
                        "valueFrom": {"secretKeyRef": {"name": "keys", "key": "NONE"}},
                    }
                ],
            ),
            "needs, in the Secret 'keys', the key 'NONE'",
        ),
        (
            container("node", "x", env=[{"name": "A", "valueFrom": field("spec.x")}]),
            "run-local does not support mine-node-0-1/node: fieldPath='spec.x'",
        ),
    ],
)
def test_what_cannot_be_run_is_named(node: Json, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(node)
    assert words in str(caught.value)


def test_the_repr_of_a_process_shows_no_secret() -> None:
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


def on_codes(action: str, *values: int, of: str = "main") -> Json:
    return {
        "action": action,
        "onExitCodes": {"containerName": of, "operator": "In", "values": list(values)},
    }


@pytest.mark.parametrize(
    ("rules", "code", "action"),
    [
        ([], 1, "Count"),
        ([on_codes("FailJob", 65, 78)], 78, "FailJob"),
        ([on_codes("FailJob", 65, 78)], 1, "Count"),
        ([on_codes("FailJob", 1, of="other")], 1, "Count"),
        ([on_codes("Ignore", 1), on_codes("FailJob", 1)], 1, "Ignore"),
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
    ("policy", "job", "reason", "restarts", "again"),
    [
        (None, "node", "BackoffLimitExceeded", 0, False),
        ({"maxRestarts": 1}, "node", "BackoffLimitExceeded", 0, True),
        ({"maxRestarts": 1}, "node", "BackoffLimitExceeded", 1, False),
        ({"maxRestarts": 3, "rules": [FAIL_CACHE]}, "cache", "PodFailurePolicy", 0, False),
        ({"maxRestarts": 3, "rules": [FAIL_CACHE]}, "cache", "BackoffLimitExceeded", 0, True),
        ({"maxRestarts": 3, "rules": [FAIL_CACHE]}, "node", "PodFailurePolicy", 0, True),
    ],
)
def test_the_failure_policy_of_the_jobset(
    policy: Json | None, job: str, reason: str, restarts: int, again: bool
) -> None:
    assert policies.restarts_jobset(policy, job, reason, restarts) is again


@pytest.mark.parametrize(
    ("policy", "targets"),
    [(None, ["cache", "node"]), ({"operator": "All", "targetReplicatedJobs": ["node"]}, ["node"])],
)
def test_the_success_policy(policy: Json | None, targets: list[str]) -> None:
    spec: Json = {"replicatedJobs": [{"name": "cache"}, {"name": "node"}]}
    assert policies.success_targets({**spec, "successPolicy": policy}) == targets


@pytest.mark.parametrize(
    ("status", "ready", "succeeded", "starts"),
    [
        ("Ready", (), (), False),
        ("Ready", ("cache",), (), True),
        ("Complete", ("cache",), (), False),
        ("Complete", ("cache",), ("cache",), True),
    ],
)
def test_a_job_waits_for_its_dependencies(
    status: str, ready: tuple[str, ...], succeeded: tuple[str, ...], starts: bool
) -> None:
    job = {"name": "node", "dependsOn": [{"name": "cache", "status": status}]}
    assert policies.may_start(job, ready, succeeded) is starts


def test_one_token_of_the_run_takes_the_place_of_those_of_a_cluster(tmp_path: Path) -> None:
    around = replace(AROUND, token="of-the-run")
    node = container("node", "serve")
    node["args"] = ["--auth-pods=reader:*", "--service-account-dir=/api", "--num-nodes=1"]
    assert planned(node, around=around).environment["CACHE_TOKEN"] == "of-the-run"
    node["env"] = env(CACHE_TOKEN_FILE="/var/run/secrets/data-cache/token")
    node["volumeMounts"] = [{"name": "cache-token", "mountPath": "/var/run/secrets/data-cache"}]
    made = planned(node, volumes={"cache-token": tmp_path}, around=around)
    assert made.argv[-1] == "--num-nodes=1"
    assert not any("auth" in argument or "account" in argument for argument in made.argv)
    assert made.environment["CACHE_TOKEN_FILE"] == f"{tmp_path}/token"
    assert "CACHE_TOKEN" not in made.environment
    assert "--auth-pods=reader:*" in planned(node, volumes={"cache-token": tmp_path}).argv


def test_volumes_of_tokens_hold_the_one_of_the_run() -> None:
    spec = pod_of(job_named(read(MANIFESTS / "torch-distributed-data-cache/runtime.yaml"), "node"))
    found = [token_files(volume, "of-the-run") for volume in spec["spec"]["volumes"]]
    assert found == [{}, {}, {"token": ("of-the-run", 0o600)}]


def test_a_name_of_a_pod_inside_a_path_stays_a_path() -> None:
    around = replace(AROUND, hosts={"cache": "127.0.0.9"})
    node = container("node", "serve")
    node["args"] = ["/cache/a", "--file=/etc/cache/token", "grpc://cache:1", "cache/a"]
    assert planned(node, around=around).argv[-4:] == (
        *("/cache/a", "--file=/etc/cache/token"),
        *("grpc://127.0.0.9:1", "127.0.0.9/a"),
    )
