"""``run-local``: the semantics of pods, Jobs and JobSets, with shell scripts for containers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import psutil
import pytest
import yaml

from cache_protocol.errors import ConfigError
from cache_runtimes.local import Console, kubelet, read_manifests, run_local
from cache_runtimes.local.supported import UnsupportedFieldError
from tests import forked_python
from tests.train_jobs import container, replicated_job, runtime, train_job, write
from tests.waiting import wait_until

Json = dict[str, Any]


def probe(file: Path, **fields: Any) -> Json:
    """A gRPC probe that succeeds while ``file`` exists."""
    return {"grpc": {"port": 1, "service": str(file)}, "periodSeconds": 1, **fields}


@pytest.fixture(autouse=True)
def probes_look_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = kubelet.is_serving

    async def is_serving(address: str, service: str, timeout_s: float) -> bool:
        if service.startswith("/"):
            return Path(service).exists()
        return await ask(address, service, timeout_s)

    monkeypatch.setattr(kubelet, "is_serving", is_serving)


@dataclass
class Seen:
    """The lines and events of a run, in order."""

    lines: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    @property
    def console(self) -> Console:
        def line(pod: str, container: str, text: str) -> None:
            self.lines.append(f"{pod}/{container} {text}")

        return Console(event=self.events.append, line=line)

    def of(self, container: str) -> list[str]:
        return [line.partition(" ")[2] for line in self.lines if f"/{container} " in line]


def run(
    tmp_path: Path,
    made: Json,
    job: Json | None = None,
    *others: Json,
    console: Console | None = None,
) -> tuple[int, Seen]:
    """Runs a job to its end; the folder ``tmp_path`` is ``$DIR`` in every container."""
    file = write(tmp_path / "job.yaml", job or train_job(), *others)
    manifests = read_manifests(file, write(tmp_path / "runtime.yaml", made))
    seen = Seen()
    code = run_local(
        manifests,
        environment=os.environ,
        extra_environment={"DIR": str(tmp_path), "MARKED": str(tmp_path)},
        console=console or seen.console,
        backoff_s=0.01,
    )
    return code, seen


def node(script: str, **fields: Any) -> Json:
    """A trainer whose container runs ``script``."""
    pod = {key: fields.pop(key) for key in ("volumes", "initContainers") if key in fields}
    job = fields.pop("job", None)
    depends_on = fields.pop("depends_on", None)
    return replicated_job(
        "node",
        container("node", script, **fields),
        ancestor="trainer",
        job=job,
        depends_on=depends_on,
        **pod,
    )


def test_a_job_is_complete_when_its_trainers_are(tmp_path: Path) -> None:
    cache = replicated_job("cache", container("cache", "echo up; sleep 1000 & wait"))
    made = runtime(
        cache,
        node("echo rank $PET_NODE_RANK of $PET_NNODES", depends_on="cache:Ready"),
        successPolicy={"operator": "All", "targetReplicatedJobs": ["node"]},
    )
    code, seen = run(tmp_path, made, train_job(trainer={"numNodes": 2}))
    assert code == 0
    assert sorted(seen.of("node")) == ["rank 0 of 2", "rank 1 of 2"]
    assert seen.of("cache") == ["up"]
    assert seen.events[-1] == "TrainJob job is complete"


def test_a_dependent_job_waits_until_every_pod_is_ready(tmp_path: Path) -> None:
    cache = container(
        "cache",
        'if [ $JOB_COMPLETION_INDEX = 1 ]; then echo last; touch "$DIR/ready"; fi; sleep 1000',
        readinessProbe=probe(tmp_path / "ready"),
    )
    made = runtime(
        replicated_job("cache", cache, parallelism=2),
        node('test -f "$DIR/ready" && echo found', depends_on="cache:Ready"),
        successPolicy={"operator": "All", "targetReplicatedJobs": ["node"]},
    )
    code, seen = run(tmp_path, made)
    assert code == 0
    assert [line.split()[-1] for line in seen.lines] == ["last", "found"]


def test_a_dependent_job_may_wait_for_the_end_of_another(tmp_path: Path) -> None:
    load = replicated_job("load", container("load", "sleep 0.3; echo loaded"))
    code, seen = run(tmp_path, runtime(load, node("echo trained", depends_on="load:Complete")))
    assert code == 0
    assert [line.split()[-1] for line in seen.lines] == ["loaded", "trained"]


def test_a_failed_trainer_is_replaced_and_the_cache_is_not(tmp_path: Path) -> None:
    cache = replicated_job("cache", container("cache", "echo up; sleep 1000"))
    script = 'if mkdir "$DIR/once"; then echo first >&2; exit 1; fi; echo second'
    made = runtime(
        cache,
        node(script, depends_on="cache:Ready", job={"backoffLimit": 1}),
        successPolicy={"operator": "All", "targetReplicatedJobs": ["node"]},
    )
    code, seen = run(tmp_path, made)
    assert code == 0
    assert seen.of("node")[0] == "first"
    assert seen.of("node")[-1] == "second"
    assert seen.of("cache") == ["up"]
    assert any("ended with exit code 1; another pod takes its place" in e for e in seen.events)


def test_a_replaced_pod_starts_with_empty_volumes(tmp_path: Path) -> None:
    script = 'ls /work | wc -l; touch /work/left; mkdir "$DIR/once" && exit 1; true'
    made = runtime(
        node(
            script,
            volumes=[{"name": "w", "emptyDir": {}}],
            volumeMounts=[{"name": "w", "mountPath": "/work"}],
        )
    )
    code, seen = run(tmp_path, made)
    assert code == 0
    assert [line for line in seen.of("node") if line.isdigit()] == ["0", "0"]


RESTARTED = {
    "restartPolicy": "Never",
    "restartPolicyRules": [
        {"action": "Restart", "exitCodes": {"operator": "NotIn", "values": [0, 65, 78]}}
    ],
}
MEMORY = {
    "volumes": [{"name": "m", "emptyDir": {"medium": "Memory"}}],
    "volumeMounts": [{"name": "m", "mountPath": "/cache"}],
}


def test_a_killed_container_is_restarted_in_place_and_finds_its_files(tmp_path: Path) -> None:
    script = (
        "if [ -f /cache/kept ]; then echo kept; exit 0; fi; touch /cache/kept; kill -9 $BASHPID"
    )
    code, seen = run(tmp_path, runtime(node(script, **RESTARTED, **MEMORY)))
    assert code == 0
    assert seen.of("node") == ["kept"]
    assert any("ended with exit code 137; it is restarted in place" in e for e in seen.events)


@pytest.mark.parametrize("exit_code", [65, 78])
def test_the_exit_codes_of_the_policy_fail_the_job_at_once_with_the_last_line(
    tmp_path: Path, exit_code: int
) -> None:
    script = f"echo more; echo the reason >&2; exit {exit_code}"
    never = probe(tmp_path / "never")
    cache = container("cache", script, readinessProbe=never, **RESTARTED)
    policy = {
        "rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [65, 78]}}]
    }
    rule = {"name": "bad", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    made = runtime(
        replicated_job("cache", cache, job={"podFailurePolicy": policy}),
        node("echo never", depends_on="cache:Ready"),
        failurePolicy={"maxRestarts": 3, "rules": [rule]},
    )
    code, seen = run(tmp_path, made)
    assert code == exit_code
    assert seen.events[-1] == (
        f"TrainJob job failed: cache: PodFailurePolicy: job-cache-0-0/cache ended with exit code "
        f"{exit_code}: the reason"
    )
    assert seen.of("node") == []


def test_a_process_that_ends_just_before_it_is_killed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen(["sleep", "100"])
    ended = psutil.Process(child.pid)
    child.kill()
    child.wait()
    # As if it had still been there when the processes of the container were looked for.
    monkeypatch.setattr(ended, "environ", lambda: SimpleNamespace(get=lambda _: ANY))
    monkeypatch.setattr(psutil, "process_iter", lambda: iter([ended]))
    assert run(tmp_path, runtime(node("echo done")))[0] == 0


def test_the_reason_is_reported_though_a_launcher_prints_more_after_it(tmp_path: Path) -> None:
    says = "echo 'ValueError: no column x' >&2; echo ChildFailedError: >&2; echo ==== >&2; exit 1"
    _, seen = run(tmp_path, runtime(node(says, job={"backoffLimit": 0})))
    assert seen.events[-1].endswith("ended with exit code 1: ValueError: no column x")


def test_too_many_failures_fail_the_job(tmp_path: Path) -> None:
    code, seen = run(tmp_path, runtime(node("echo sad; exit 3", job={"backoffLimit": 2})))
    assert code == 3
    assert seen.of("node") == ["sad"] * 3
    assert "BackoffLimitExceeded" in seen.events[-1]


@pytest.mark.parametrize(("limit", "starts"), [(0, 1), (1, 1), (2, 2)])
def test_restarts_of_pods_that_restart_on_failure_count_until_they_reach_the_limit(
    tmp_path: Path, limit: int, starts: int
) -> None:
    made = replicated_job(
        "node",
        container("node", "echo sad; exit 3"),
        ancestor="trainer",
        job={"backoffLimit": limit},
        restartPolicy="OnFailure",
    )
    code, seen = run(tmp_path, runtime(made))
    assert code == 3
    assert seen.of("node") == ["sad"] * starts
    assert "BackoffLimitExceeded" in seen.events[-1]


def test_the_failure_policy_restarts_all_jobs(tmp_path: Path) -> None:
    cache = replicated_job("cache", container("cache", 'echo up; echo >> "$DIR/ups"; sleep 1000'))
    # Ready when it is started, and ended with the job: so it is waited for until it has spoken.
    script = (
        'wanted=1; mkdir "$DIR/once" || wanted=2; '
        'until [ "$(wc -l < "$DIR/ups")" -ge $wanted ]; do sleep 0.02; done; '
        "[ $wanted = 2 ] && echo done"
    )
    made = runtime(
        cache,
        node(f"({script}) 2>/dev/null", depends_on="cache:Ready", job={"backoffLimit": 0}),
        failurePolicy={"maxRestarts": 1},
        successPolicy={"operator": "All", "targetReplicatedJobs": ["node"]},
    )
    code, seen = run(tmp_path, made)
    assert code == 0
    assert seen.of("cache") == ["up", "up"]
    assert seen.of("node") == ["done"]


def test_a_sidecar_gates_the_trainer_and_ends_after_it(tmp_path: Path) -> None:
    sidecar = container(
        "cache",
        "trap 'echo stopped; exit 0' TERM; sleep 0.3; touch \"$DIR/up\"; sleep 1000 & wait",
        restartPolicy="Always",
        startupProbe=probe(tmp_path / "up", failureThreshold=9),
    )
    script = 'test -f "$DIR/up" && echo gated'
    code, seen = run(tmp_path, runtime(node(script, initContainers=[sidecar])))
    assert code == 0
    assert [line.split()[-1] for line in seen.lines] == ["gated", "stopped"]


def test_a_sidecar_that_keeps_failing_fails_the_job(tmp_path: Path) -> None:
    sidecar = container("cache", "echo the reason; exit 78", restartPolicy="Always")
    made = replicated_job(
        "node",
        container("node", "sleep 1000"),
        ancestor="trainer",
        job={"backoffLimit": 2},
        initContainers=[sidecar],
        restartPolicy="OnFailure",
    )
    code, seen = run(tmp_path, runtime(made))
    assert code == 78
    assert seen.events[-1].endswith("job-node-0-0/cache ended with exit code 78: the reason")


def test_a_sidecar_that_is_given_up_ends_the_other_containers(tmp_path: Path) -> None:
    script = (
        'mkdir "$DIR/held" || echo two at once; trap \'rmdir "$DIR/held"; exit 0\' TERM; '
        "setsid sleep 1001 & sleep 1002 & wait"
    )
    kept = container("kept", script, restartPolicy="Always")
    given_up = container(
        "bad", 'until [ -d "$DIR/held" ]; do :; done; exit 78', restartPolicy="Always"
    )
    made = replicated_job(
        "node",
        container("node", "sleep 1000"),
        ancestor="trainer",
        job={"backoffLimit": 1},
        initContainers=[kept, given_up],
        restartPolicy="OnFailure",
    )
    code, seen = run(tmp_path, runtime(made, failurePolicy={"maxRestarts": 1}))
    assert (code, seen.of("kept")) == (78, [])
    assert marked(str(tmp_path)) == []


def test_a_sidecar_with_a_hook_before_its_stop_serves_until_the_hook_is_over(
    tmp_path: Path,
) -> None:
    since = 'echo $(( $(date +%s%3N) - $(cat "$DIR/end") )); exit 0'
    sidecar = container(
        "cache",
        f"trap '{since}' TERM; sleep 1000 & wait",
        restartPolicy="Always",
        lifecycle={"preStop": {"sleep": {"seconds": 1}}},
    )
    code, seen = run(tmp_path, runtime(node('date +%s%3N > "$DIR/end"', initContainers=[sidecar])))
    assert code == 0
    assert 1_000 <= int(seen.of("cache")[0]) < 5_000


HEALTH_SERVER = """
import os, grpc
from concurrent.futures import ThreadPoolExecutor
from grpc_health.v1 import health, health_pb2_grpc
server = grpc.server(ThreadPoolExecutor(2))
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
server.add_insecure_port(os.environ["POD_IP"] + ":50052")
server.start()
server.wait_for_termination()
"""
HEALTH_CLIENT = """
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
stub = health_pb2_grpc.HealthStub(grpc.insecure_channel("job-cache-0-0.job:50052"))
print(stub.Check(health_pb2.HealthCheckRequest(), timeout=20).status)
"""


def test_probes_and_pods_reach_pods_past_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    pod_ip = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    cache: Json = {"name": "cache", "command": ["python", "-c", HEALTH_SERVER], "env": pod_ip}
    cache["readinessProbe"] = {"grpc": {"port": 50_052}, "periodSeconds": 1, "timeoutSeconds": 5}
    trainer = node("", depends_on="cache:Ready", command=["python", "-c", HEALTH_CLIENT], args=[])
    made = runtime(
        replicated_job("cache", cache),
        trainer,
        successPolicy={"operator": "All", "targetReplicatedJobs": ["node"]},
    )
    code, seen = run(tmp_path, made, train_job(activeDeadlineSeconds=40))
    assert (code, seen.of("node")) == (0, ["1"])


@pytest.mark.parametrize("text", ["a line", "the startupProbe failed"])
def test_a_log_that_cannot_be_written_ends_the_run(tmp_path: Path, text: str) -> None:
    def line(pod: str, container: str, said: str) -> None:
        if said.startswith(text):
            raise BrokenPipeError(said)

    never = {"startupProbe": probe(tmp_path / "never", failureThreshold=1)}
    made = runtime(node("echo a line; sleep 1000", **(never if "Probe" in text else {})))
    with pytest.raises(BrokenPipeError, match=text):
        run(tmp_path, made, console=Console(event=lambda text: None, line=line))
    assert marked(str(tmp_path)) == []


def test_a_container_that_is_no_longer_live_is_restarted(tmp_path: Path) -> None:
    script = "if [ -f /cache/again ]; then exit 0; fi; touch /cache/again; sleep 1000"
    never = probe(tmp_path / "never", failureThreshold=1)
    code, seen = run(tmp_path, runtime(node(script, livenessProbe=never, **RESTARTED, **MEMORY)))
    assert code == 0
    assert "the livenessProbe failed: the container is stopped" in seen.of("node")


def test_a_container_ends_with_its_program_and_leaves_no_process(tmp_path: Path) -> None:
    script = "setsid sleep 1001 & sleep 1002 & sleep 0.2; echo done"
    code, seen = run(tmp_path, runtime(node(script)), train_job(activeDeadlineSeconds=10))
    assert (code, seen.of("node")) == (0, ["done"])
    assert marked(str(tmp_path)) == []


def test_secrets_of_the_same_file_reach_the_initializer(tmp_path: Path) -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "keys"},
        "data": {"ID": "a2V5"},
        "stringData": {"TOKEN": "plain"},
    }
    mounts = [{"name": "initializer", "mountPath": "/x"}]
    made = runtime(
        replicated_job(
            "dataset-initializer",
            container("dataset-initializer", "echo $STORAGE_URI $ID $TOKEN", volumeMounts=mounts),
            ancestor="dataset-initializer",
            volumes=[{"name": "initializer", "emptyDir": {}}],
        )
    )
    dataset = {"storageUri": "s3://b/t", "secretRef": {"name": "keys"}}
    code, seen = run(tmp_path, made, train_job(initializer={"dataset": dataset}), secret)
    assert code == 0
    assert seen.of("dataset-initializer") == ["s3://b/t key plain"]


def test_a_job_with_a_deadline_ends_by_it(tmp_path: Path) -> None:
    code, seen = run(tmp_path, runtime(node("sleep 1000")), train_job(activeDeadlineSeconds=1))
    assert code == 1
    assert "DeadlineExceeded" in seen.events[-1]


def test_long_lines_and_invalid_utf_8_are_logged(tmp_path: Path) -> None:
    script = r"head -c 200000 /dev/zero | tr '\0' x; echo; printf 'a\xffb\rprogress\n'"
    code, seen = run(tmp_path, runtime(node(script)))
    assert code == 0
    assert sum(map(len, seen.of("node")[:-2])) == 200_000
    assert seen.of("node")[-2:] == ["a\ufffdb", "progress"]


def test_the_file_of_a_job_may_hold_its_runtime(tmp_path: Path) -> None:
    own = runtime(node("echo own"))
    code, seen = run(tmp_path, runtime(node("echo shipped")), None, own)
    assert (code, seen.of("node")) == (0, ["own"])


def unknown_field() -> Json:
    made = runtime(node("x"))
    made["spec"]["template"]["spec"]["replicatedJob"] = []
    return made


@pytest.mark.parametrize(
    ("job", "made", "words"),
    [
        (train_job(numNodes=2), runtime(node("x")), ["unknown field spec.numNodes"]),
        (train_job(), unknown_field(), ["unknown field spec.template.spec.replicatedJob"]),
        (train_job(runtimeRef={"name": "other"}), runtime(node("x")), ["'other'", "scripts"]),
        (
            train_job(trainer={"numNodes": "two"}),
            runtime(node("x")),
            ["TrainJob job", "spec.trainer.numNodes", "integer"],
        ),
        (
            train_job(trainer={"command": ["sleep", 1000]}),
            runtime(node("x")),
            ["TrainJob job", "spec.trainer.command[1]", "string"],
        ),
        (
            train_job(initializer={"dataset": {"secretRef": "keys"}}),
            runtime(node("x")),
            ["TrainJob job", "spec.initializer.dataset.secretRef"],
        ),
        (
            train_job(initializer={"dataset": {"env": 1}}),
            runtime(node("x")),
            ["TrainJob job", "spec.initializer.dataset.env: ", "list"],
        ),
        (
            train_job(trainer={"resourcesPerNode": {"limits": {"memory": True}}}),
            runtime(node("x")),
            ["TrainJob job", "spec.trainer.resourcesPerNode.limits.memory: "],
        ),
        (
            train_job(),
            runtime(node("x", resources={"limits": ["cpu"]})),
            ["containers[0].resources.limits: "],
        ),
        ({**train_job(), "spec": None}, runtime(node("x")), ["TrainJob job", "spec"]),
    ],
)
def test_errors_in_the_files_are_named_before_anything_runs(
    tmp_path: Path, job: Json, made: Json, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, made, job)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("field", ["data", "stringData"])
@pytest.mark.parametrize("data", [{"PIN": 12345678}, ["12345678"], "12345678"])
def test_a_secret_whose_value_is_no_string_is_named_and_not_shown(
    tmp_path: Path, field: str, data: Any
) -> None:
    other = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, field: data}
    with pytest.raises(ConfigError, match=f"Secret keys: {field}") as caught:
        run(tmp_path, runtime(node("x")), None, other)
    assert "12345678" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("Secret", {"binaryData": {"A": "aGlkZGVu"}}, "Secret keys.binaryData='<not shown>'"),
        ("Secret", {"Data": {"A": "aGlkZGVu"}}, "Secret keys.Data='<not shown>'"),
        ("ConfigMap", {"binaryData": {"A": "YQ=="}}, "ConfigMap keys.binaryData={'A': 'YQ=='}"),
        ("ConfigMap", {"stringData": {"A": "b"}}, "ConfigMap keys.stringData={'A': 'b'}"),
    ],
)
def test_a_field_of_an_object_with_values_is_not_ignored(
    tmp_path: Path, kind: str, fields: Json, named: str
) -> None:
    other = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "keys"}, **fields}
    with pytest.raises(
        UnsupportedFieldError, match=re.escape(f"does not support {named}")
    ) as caught:
        run(tmp_path, runtime(node("x")), None, other)
    assert "aGlkZGVu" not in str(caught.value)


def test_files_of_volumes_have_their_folders_and_modes(tmp_path: Path) -> None:
    items = [{"key": "run", "path": "a/b/run.sh"}, {"key": "run", "path": "a/kept", "mode": 0o400}]
    made = node(
        "/scripts/a/b/run.sh && stat -c %a /scripts/a/kept",
        volumes=[{"name": "v", "configMap": {"name": "c", "defaultMode": 0o755, "items": items}}],
        volumeMounts=[{"name": "v", "mountPath": "/scripts"}],
    )
    script = {"run": "#!/bin/sh\necho done\n"}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "c"},
        "data": script,
    }
    code, seen = run(tmp_path, runtime(made), None, config_map)
    assert (code, seen.of("node")) == (0, ["done", "400"])


def test_a_field_that_run_local_does_not_support_is_named_before_anything_runs(
    tmp_path: Path,
) -> None:
    made = runtime(node('touch "$DIR/ran"', lifecycle={"postStart": {"exec": {"command": ["x"]}}}))
    with pytest.raises(UnsupportedFieldError, match=r"containers\[node\].lifecycle.postStart="):
        run(tmp_path, made)
    assert not (tmp_path / "ran").exists()


def cachectl(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "cache_client", "run-local", *map(str, arguments)]


def test_render_prints_the_jobset_and_runs_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "job.yaml", train_job("mine"))
    made = write(tmp_path / "runtime.yaml", runtime(node('touch "$DIR/ran"')))
    done = forked_python.run(
        cachectl(file, "--runtimes", made, "--render", "--env", f"DIR={tmp_path}"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    jobset = yaml.safe_load(done.stdout)
    assert (jobset["kind"], jobset["metadata"]["name"]) == ("JobSet", "mine")
    assert not (tmp_path / "ran").exists()


def left_behind(name: str) -> list[str]:
    return [
        *(str(path) for path in Path("/dev/shm").glob(f"run-local-{name}-*")),
        *(str(path) for path in Path("/tmp").glob(f"run-local-{name}-*")),
    ]


def marked(word: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARKED") == word:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@contextmanager
def started(tmp_path: Path, name: str, made: Json) -> Iterator[subprocess.Popen[str]]:
    """``cachectl run-local`` as a process, whose containers are marked by the name."""
    process = subprocess.Popen(
        cachectl(
            write(tmp_path / "job.yaml", train_job(name)),
            *("--runtimes", write(tmp_path / "runtime.yaml", made)),
            *("--env", f"MARKED={name}", "--env", f"TMPDIR={tmp_path}"),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the suite by nohup has it ignored, and so would every child.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        yield process
    except BaseException:  # the test has failed: the next run would find what it left
        process.kill()
        for left in marked(name):
            with suppress(psutil.NoSuchProcess):
                left.kill()
        raise
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().partition(" | ")[2].rstrip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_end_leaves_no_process_and_no_file(
    tmp_path: Path, number: signal.Signals
) -> None:
    name = f"stopped-{number.name.lower()}-{os.getpid()}"  # not what a failed run has left
    # One that ignores the signal, one in another session, one without a parent.
    script = (
        "trap '' TERM; setsid sleep 1001 & (setsid sleep 1002 &) ; touch /cache/x; "
        "echo running; sleep 1003"
    )
    made = runtime(
        replicated_job(
            "node",
            container("node", script, volumeMounts=MEMORY["volumeMounts"]),
            ancestor="trainer",
            volumes=MEMORY["volumes"],
            terminationGracePeriodSeconds=1,
        )
    )
    with started(tmp_path, name, made) as process:
        assert next_line(process) == "running"
        wait_until(lambda: len(marked(name)) >= 3, 10, "all processes of the pod")
        assert left_behind(name)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert errors.splitlines()[-1] == f"run-local: TrainJob {name} was stopped by {number.name}"
    assert marked(name) == []
    assert left_behind(name) == []


def test_a_run_that_is_told_to_end_while_a_sidecar_drains_starts_no_other_pod(
    tmp_path: Path,
) -> None:
    name = "drained"
    sidecar = container(
        "cache",
        "trap 'echo draining' TERM; (setsid sleep 1001 &) ; while :; do sleep 1002 & wait; done",
        restartPolicy="Always",
    )
    made = runtime(
        replicated_job(
            "node",
            container("node", "echo up; exit 1"),
            ancestor="trainer",
            initContainers=[sidecar],
            terminationGracePeriodSeconds=1,
        )
    )
    with started(tmp_path, name, made) as process:
        assert [next_line(process), next_line(process)] == ["up", "draining"]
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert output == ""
    assert process.returncode == 128 + signal.SIGINT
    assert errors.splitlines()[-1] == f"run-local: TrainJob {name} was stopped by SIGINT"
    assert marked(name) == []


def test_a_run_ends_when_its_output_is_closed(tmp_path: Path) -> None:
    name = "unread"
    with started(tmp_path, name, runtime(node("yes a line"))) as process:
        assert next_line(process) == "a line"
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(timeout=60) != 0
    assert "Traceback" not in errors
    assert marked(name) == []
    assert left_behind(name) == []
