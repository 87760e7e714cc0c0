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
from tests.initializer_world import JOB, NAMESPACE, OBJECTS, WAIT_S, World
from tests.stateful_sets import StatefulSets, exited, starting
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
TERMINATED = 128 + signal.SIGTERM


class Program:
    """``python -m cache_runtimes.initializer``; a context manager."""

    def __init__(self, world: World, **changes: str) -> None:
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environ = {**inherited, **world.environ(**changes), "KUBECONFIG": str(world.kubeconfig)}
        self.world = world
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
            lambda: self.world.ready_file.exists() or self.process.poll() is not None,
            WAIT_S,
            "ready",
        )
        assert self.process.poll() is None, self.process.communicate()[1]
        return self

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Exit code and last line, by itself or after a signal."""
        if number is not None:
            self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=WAIT_S)
        assert output == ""
        assert "Traceback" not in errors
        return self.process.returncode, errors.splitlines()[-1] if errors else ""


@pytest.mark.parametrize("writes", [1, 2, 3, 4])
def test_a_run_after_a_crash_at_any_step_makes_what_is_missing_and_nothing_twice(
    world: World, pods: StatefulSets, writes: int
) -> None:
    assert len(OBJECTS) == 4  # as many as it writes
    with Program(world) as crashed:

        def kill(number: int) -> None:
            if number == writes:
                crashed.process.kill()
                crashed.process.wait()

        world.server.on_write = kill
        assert crashed.end()[0] == -signal.SIGKILL
    before = {key: uid for key, uid in world.uids().items() if key in OBJECTS}
    assert list(before) == sorted(OBJECTS[:writes])

    running_ = world.begin().until_ready()
    after = world.uids()
    assert {key: after[key] for key in before} == before
    assert set(after) == {*OBJECTS, ("pods", "train-1-cache-0"), ("pods", "train-1-cache-1")}
    for key, planned in world.planned().items():
        assert world.objects()[key].get("spec") == planned.body.get("spec")
    assert running_.end() is Ending.REMOVED
    assert world.objects() == {}


def test_a_run_after_a_crash_while_the_job_trains_adopts_the_cache_as_it_is(
    world: World, pods: StatefulSets
) -> None:
    with Program(world) as crashed:
        crashed.until_ready().end(signal.SIGKILL)
    before = world.uids()
    with Program(world) as program:
        program.until_ready()  # whatever the first one left there
        world.wait_for_calls("get", "statefulsets")
        code, last = program.until_ready().end(signal.SIGTERM)
    assert code == TERMINATED, last
    assert len(before) == 6
    created = [call.status for call in world.server.calls if call.verb == "create"]
    assert created == [201] * 4 + [409] * 4
    assert world.objects() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_is_ready_removes_everything(
    world: World, number: signal.Signals
) -> None:
    with StatefulSets(world.store, lambda name: starting()), Program(world) as program:
        world.wait_for_calls("watch", "pods")
        code, last = program.end(number)
    assert (code, last.startswith("initializer: told to end")) == (TERMINATED, True)
    assert not world.ready_file.exists()
    assert world.objects() == {}


def test_sigterm_when_it_is_ready_removes_everything_in_time(
    world: World, pods: StatefulSets
) -> None:
    with Program(world) as program:
        program.until_ready()
        began = time.monotonic()
        code, last = program.end(signal.SIGTERM)
        assert time.monotonic() - began < 10
    assert code == TERMINATED, last  # a Job would take 0 for work that is done
    assert not world.ready_file.exists()
    assert world.objects() == {}


def test_sigterm_by_an_eviction_is_no_success_of_the_pod(world: World, pods: StatefulSets) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    own = {"metadata": {"name": "initializer"}, "status": {"conditions": [condition]}}
    world.store.create("pods", own, NAMESPACE)
    with Program(world, POD_NAME="initializer") as program:
        code, last = program.until_ready().end(signal.SIGTERM)
    assert code == TERMINATED
    assert "the cache stays" in last
    assert set(OBJECTS) <= set(world.objects())


@pytest.mark.parametrize(
    ("pod_code", "code", "error"), [(65, 65, "LoadError"), (78, 78, "ConfigError")]
)
def test_the_exit_code_of_a_pod_is_passed_on_and_its_reason_is_the_last_line(
    world: World, pod_code: int, code: int, error: str
) -> None:
    told = exited(pod_code, f"cache-server: {error}: what was wrong")
    with StatefulSets(world.store, lambda name: told), Program(world) as program:
        assert program.end() == (
            code,
            f"initializer: {error}: pod train-1-cache-0 exited with {pod_code}: "
            f"cache-server: {error}: what was wrong",
        )
    assert world.objects() == {}


def test_bad_settings_are_told_together_before_the_cluster_is_asked(world: World) -> None:
    with Program(world, CLUSTER_SIZE="many", STORAGE_URI="", CACHE_SQL="SELECT 1") as program:
        code, last = program.end()
    assert code == 78
    assert last.startswith("initializer: ConfigError: ")
    assert "'many'" in last
    assert "STORAGE_URI is missing" in last
    assert world.server.calls == []


def test_without_a_cluster_the_last_line_says_so(world: World) -> None:
    world.kubeconfig = world.folder / "absent"
    with Program(world) as program:
        code, last = program.end()
    assert code == 78
    assert "no way to the API server" in last


def test_a_missing_job_exits_with_1_and_its_name(world: World) -> None:
    world.store.delete("trainjobs", JOB, NAMESPACE)
    with Program(world) as program:
        assert program.end() == (
            1,
            "initializer: ClusterError: there is no trainjobs/train-1 in namespace team-a",
        )
