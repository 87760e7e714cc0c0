"""The gate that forks wait at: what they wait for, and who waits for them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from cache_client.flight import forks
from cache_protocol.errors import ConfigError
from tests.interrupts import interrupt_conditions

WAIT_S = 30.0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> forks.ForkGate:
    monkeypatch.setattr(forks, "_grpc_threads", lambda young=True: set())  # of other tests
    return forks.ForkGate()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as running:
        yield running


def call(gate: forks.ForkGate) -> None:
    with gate.call():
        pass


def test_a_fork_does_not_wait_for_a_call_of_its_thread_that_an_interrupt_left(
    gate: forks.ForkGate, pool: ThreadPoolExecutor
) -> None:
    never_ended = gate.call()

    def fork() -> None:
        never_ended.__enter__()
        gate.before_fork()
        gate.after_fork_in_parent()

    pool.submit(fork).result(WAIT_S)
    pool.submit(call, gate).result(WAIT_S)


def test_an_interrupt_at_the_gate_leaves_it_open(
    gate: forks.ForkGate, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_conditions(patch)
        call(gate)
        with gate.closing():
            pass
        gate.before_fork()
        gate.after_fork_in_parent()
    pool.submit(call, gate).result(WAIT_S)


def test_a_fork_waits_for_the_calls_of_other_threads(
    gate: forks.ForkGate, pool: ThreadPoolExecutor
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def long_call() -> None:
        with gate.call():
            begun.set()
            assert go_on.wait(WAIT_S)

    running = pool.submit(long_call)
    assert begun.wait(WAIT_S)
    fork = pool.submit(gate.before_fork)
    with pytest.raises(TimeoutError):
        fork.result(0.1)
    go_on.set()
    running.result(WAIT_S)
    fork.result(WAIT_S)


def test_calls_begin_again_after_the_last_of_the_forks_that_run(
    gate: forks.ForkGate, pool: ThreadPoolExecutor
) -> None:
    forks_begun: list[Future[None]] = [pool.submit(gate.before_fork) for _ in range(2)]
    for fork in forks_begun:
        fork.result(WAIT_S)
    gate.after_fork_in_parent()
    waiting = pool.submit(call, gate)
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    gate.after_fork_in_parent()
    waiting.result(WAIT_S)


def in_a_child(gate: forks.ForkGate) -> forks.ForkGate:
    """The gate, as a child has it that was forked after a call."""
    call(gate)
    gate.before_fork()
    gate.after_fork_in_child()
    return gate


def test_a_child_probes_grpc_once_if_another_user_of_it_was_forked_too(
    gate: forks.ForkGate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    probes = tmp_path / "probes"  # a probe runs in another process
    probes.touch()

    def probe(name: str) -> Callable[[], None]:
        return lambda: probes.open("a").write(name) and None

    in_a_child(gate).require_answers(probe("0"))
    assert probes.read_text() == ""
    monkeypatch.setattr(forks, "_grpc_threads", lambda young=True: {1})
    gate.before_fork()
    gate.after_fork_in_parent()
    gate.require_answers(probe("1"))
    assert probes.read_text() == ""
    for _ in range(2):
        in_a_child(gate).require_answers(probe("2"))
        gate.require_answers(probe("3"))
    assert probes.read_text() == "22"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("probe", [signal.pause, die])
def test_a_child_in_which_grpc_answers_nothing_says_what_to_do(
    gate: forks.ForkGate, monkeypatch: pytest.MonkeyPatch, probe: Callable[[], None]
) -> None:
    monkeypatch.setattr(forks, "_grpc_threads", lambda young=True: {1})
    monkeypatch.setattr(forks, "_PROBE_S", 0.1)
    child = in_a_child(gate)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"forked .* multiprocessing_context='spawn'"):
            child.require_answers(probe)
