"""`Call`: run once, by the first thread that takes it, and waited for by another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from cache_client.flight import calls
from tests.interrupts import interrupt_conditions


def test_the_waiting_thread_gets_what_the_call_returns_or_raises_in_another_thread() -> None:
    good, bad = calls.Call(divmod, 7, 2), calls.Call(divmod, 7, 0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(bad.run)
        pool.submit(good.run)
        assert good.wait() == (3, 1)
        with pytest.raises(ZeroDivisionError):
            bad.wait()


def test_a_call_runs_once_however_often_it_is_tried() -> None:
    made: list[int] = []
    call = calls.Call(made.append, 1)
    call.run()
    call.run()
    call.wait()
    assert made == [1]


def test_to_wait_for_a_call_takes_no_lock_that_an_interrupt_could_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = calls.Call(divmod, 7, 2)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(call.run)
        with monkeypatch.context() as patch:
            interrupt_conditions(patch)
            assert call.wait() == (3, 1)
        made.result()
