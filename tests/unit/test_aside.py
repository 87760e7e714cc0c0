"""`Aside`: an interrupt ends the waiting for a call, and not the call."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cache_client.aside import Aside

WAIT_S = 30.0


def test_an_interrupt_ends_the_waiting_at_once_and_reaches_nothing_of_the_call() -> None:
    let_end, ended = threading.Event(), threading.Event()

    def call() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert let_end.wait(WAIT_S)
        ended.set()

    with Aside() as aside:
        with pytest.raises(KeyboardInterrupt):
            aside.call(call)
        assert not ended.is_set()
        aside.call(let_end.set)  # as a channel is closed, to end a call that was left
    assert ended.wait(WAIT_S)


def test_what_a_call_returns_or_raises_is_what_the_caller_gets() -> None:
    with Aside() as aside:
        assert aside.call(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            aside.call(divmod, 7, 0)


def test_a_thread_that_no_interrupt_reaches_makes_its_calls_itself() -> None:
    with Aside() as aside, ThreadPoolExecutor(1) as pool:
        assert aside.call(threading.get_ident) != threading.get_ident()
        other = pool.submit(threading.get_ident).result(WAIT_S)
        assert pool.submit(aside.call, threading.get_ident).result(WAIT_S) == other


def test_calls_are_still_made_where_no_thread_begins_any_more() -> None:
    with Aside() as aside:
        pass
    assert aside.call(threading.get_ident) == threading.get_ident()
