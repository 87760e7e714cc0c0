"""The initializer as a program: crashes, signals, exit codes and its last line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cache_runtimes.initializer.program import Ending
from tests import forked_python
from tests.initializer_cluster import JOB, NAMESPACE, OBJECTS, WAIT_S, InitializerCluster
from tests.stateful_sets import StatefulSets, exited, starting
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
TERMINATED = 128 + signal.SIGTERM


class Program:
    """``python -m cache_runtimes.initializer``; a context manager."""

    def __init__(self, cluster: InitializerCluster, **changes: str) -> None:
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environ = {**inherited, **cluster.environ(**changes), "KUBECONFIG": str(cluster.kubeconfig)}
        self.cluster = cluster
        self.process = forked_python.Popen(
            [sys.executable, "-m", "cache_runtimes.initializer"],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()

    def until_ready(self) -> Program:
        wait_until(
            lambda: self.cluster.ready_file.exists() or self.process.poll() is not None,
            WAIT_S,
            "ready",
        )
        assert self.process.poll() is None, self.process.communicate()[1]
        return self

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """The exit code and the last line."""
        if number is not None:
            self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=WAIT_S)
        assert output == ""
        assert "Traceback" not in errors
        return self.process.returncode, errors.splitlines()[-1] if errors else ""


@pytest.mark.parametrize("writes", [1, 2, 3, 4])
def test_a_run_after_a_crash_at_any_step_creates_only_the_missing_objects(
    cluster: InitializerCluster, pods: StatefulSets, writes: int
) -> None:
    assert len(OBJECTS) == 4  # as many as it writes
    with Program(cluster) as crashed:

        def kill(number: int) -> None:
            if number == writes:
                crashed.process.kill()
                crashed.process.wait()

        cluster.server.on_write = kill
        assert crashed.end()[0] == -signal.SIGKILL
    before = {key: uid for key, uid in cluster.uids().items() if key in OBJECTS}
    assert list(before) == sorted(OBJECTS[:writes])

    running_ = cluster.begin().until_ready()
    after = cluster.uids()
    assert {key: after[key] for key in before} == before
    assert set(after) == {*OBJECTS, ("pods", "train-1-cache-0"), ("pods", "train-1-cache-1")}
    for key, planned in cluster.planned().items():
        assert cluster.objects()[key].get("spec") == planned.body.get("spec")
    assert running_.end() is Ending.REMOVED
    assert cluster.objects() == {}


def test_a_run_after_a_crash_while_the_job_trains_adopts_the_cache_as_it_is(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    with Program(cluster) as crashed:
        crashed.until_ready().end(signal.SIGKILL)
    before = cluster.uids()
    with Program(cluster) as program:
        program.until_ready()  # whatever the first one left there
        cluster.wait_for_calls("get", "statefulsets")
        code, last = program.until_ready().end(signal.SIGTERM)
    assert code == TERMINATED, last
    assert len(before) == 6
    created = [call.status for call in cluster.server.calls if call.verb == "create"]
    assert created == [201] * 4 + [409] * 4
    assert cluster.objects() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_is_ready_removes_everything(
    cluster: InitializerCluster, number: signal.Signals
) -> None:
    with StatefulSets(cluster.store, lambda name: starting()), Program(cluster) as program:
        cluster.wait_for_calls("watch", "pods")
        code, last = program.end(number)
    assert (code, last.startswith("initializer: told to end")) == (TERMINATED, True)
    assert not cluster.ready_file.exists()
    assert cluster.objects() == {}


def test_sigterm_when_it_is_ready_removes_everything_in_time(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    with Program(cluster) as program:
        program.until_ready()
        began = time.monotonic()
        code, last = program.end(signal.SIGTERM)
        assert time.monotonic() - began < 30  # as long as a pod has
    assert code == TERMINATED, last  # a Job would take 0 for work that is done
    assert not cluster.ready_file.exists()
    assert cluster.objects() == {}


def test_sigterm_by_an_eviction_is_no_success_of_the_pod(
    cluster: InitializerCluster, pods: StatefulSets
) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    own = {"metadata": {"name": "initializer"}, "status": {"conditions": [condition]}}
    cluster.store.create("pods", own, NAMESPACE)
    with Program(cluster, POD_NAME="initializer") as program:
        code, last = program.until_ready().end(signal.SIGTERM)
    assert code == TERMINATED
    assert "the cache stays" in last
    assert set(OBJECTS) <= set(cluster.objects())


@pytest.mark.parametrize(
    ("pod_code", "code", "error"), [(65, 65, "LoadError"), (78, 78, "ConfigError")]
)
def test_the_exit_code_of_a_pod_is_passed_on_and_its_reason_is_the_last_line(
    cluster: InitializerCluster, pod_code: int, code: int, error: str
) -> None:
    told = exited(pod_code, f"cache-server: {error}: what was wrong")
    with StatefulSets(cluster.store, lambda name: told), Program(cluster) as program:
        assert program.end() == (
            code,
            f"initializer: {error}: pod train-1-cache-0 exited with {pod_code}: "
            f"cache-server: {error}: what was wrong",
        )
    assert cluster.objects() == {}


def test_all_bad_settings_are_named_before_any_call(
    cluster: InitializerCluster,
) -> None:
    with Program(cluster, CLUSTER_SIZE="many", STORAGE_URI="", CACHE_SQL="SELECT 1") as program:
        code, last = program.end()
    assert code == 78
    assert last.startswith("initializer: ConfigError: ")
    assert "'many'" in last
    assert "STORAGE_URI is missing" in last
    assert cluster.server.calls == []


def test_without_a_cluster_the_last_line_says_so(cluster: InitializerCluster) -> None:
    cluster.kubeconfig = cluster.folder / "absent"
    with Program(cluster) as program:
        code, last = program.end()
    assert code == 78
    assert "cannot reach the API server" in last


def test_a_missing_job_exits_with_1_and_its_name(cluster: InitializerCluster) -> None:
    cluster.store.delete("trainjobs", JOB, NAMESPACE)
    with Program(cluster) as program:
        assert program.end() == (
            1,
            "initializer: ClusterError: trainjobs/train-1 in namespace team-a does not exist",
        )
