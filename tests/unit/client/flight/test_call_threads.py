"""`CallThreads`: an interrupt ends the waiting for a call, and not the call."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from cache_client.flight import call_threads
from tests.waiting import wait_until

WAIT_S = 30.0


def test_an_interrupt_ends_the_waiting_at_once_and_reaches_nothing_of_the_call() -> None:
    let_end, ended = threading.Event(), threading.Event()

    def call() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert let_end.wait(WAIT_S)
        ended.set()

    with call_threads.CallThreads() as threads:
        with pytest.raises(KeyboardInterrupt):
            threads.call(call)
        assert not ended.is_set()
        threads.call(let_end.set)  # as a channel is closed, to end a call that was left
    assert ended.wait(WAIT_S)


def test_the_caller_gets_what_the_call_returns_or_raises() -> None:
    with call_threads.CallThreads() as threads:
        assert threads.call(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            threads.call(divmod, 7, 0)


def test_only_the_caller_keeps_the_error_of_a_call() -> None:
    class Failure(Exception):
        pass

    def fail() -> None:
        raise Failure

    gc.disable()  # its traceback would keep what the call used, until the next collection
    try:
        with call_threads.CallThreads() as threads:
            with pytest.raises(Failure) as caught:
                threads.call(fail)
            failure = weakref.ref(caught.value)
            del caught
            wait_until(lambda: failure() is None, WAIT_S, "only the caller has held the error")
    finally:
        gc.enable()


def test_other_threads_than_the_main_thread_make_calls_themselves() -> None:
    with call_threads.CallThreads() as threads, ThreadPoolExecutor(1) as pool:
        assert threads.call(threading.get_ident) != threading.get_ident()
        other = pool.submit(threading.get_ident).result(WAIT_S)
        assert pool.submit(threads.call, threading.get_ident).result(WAIT_S) == other


def test_calls_are_still_made_where_no_thread_begins_any_more() -> None:
    with call_threads.CallThreads() as threads:
        pass
    assert threads.call(threading.get_ident) == threading.get_ident()


def test_a_call_for_which_no_thread_begins_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    let_end, calls = threading.Event(), list[int]()

    def left() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert let_end.wait(WAIT_S)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with call_threads.CallThreads() as threads:
        with pytest.raises(KeyboardInterrupt):
            threads.call(left)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            threads.call(calls.append, threading.get_ident())
        let_end.set()  # the thread that was left takes what waits for one
        threads.call(calls.append, 0)
    assert calls == [threading.get_ident(), 0]
