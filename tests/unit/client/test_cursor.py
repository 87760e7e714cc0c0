from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from cache_client.cursor import Cursor
from cache_protocol.errors import ConfigError


def copy_in_worker(cursor: Cursor) -> Cursor:
    """As a forked worker has it: another object over the same shared cells."""
    return copy.copy(cursor)


def test_an_offset_holds_for_one_pass_of_the_main_process() -> None:
    cursor = Cursor()
    cursor.set(2, 50)
    assert cursor.next_offset == 50
    assert cursor.begin(11, worker=None) == (2, 50)
    assert cursor.next_offset == 0
    assert cursor.begin(12, worker=None) == (2, 0)


def test_all_workers_of_one_pass_use_the_offset_and_none_of_the_next() -> None:
    cursor = Cursor()
    cursor.set(1, 30)
    assert [copy_in_worker(cursor).begin(7, worker=n) for n in range(3)] == [(1, 30)] * 3
    assert cursor.read_by_workers
    assert [copy_in_worker(cursor).begin(8, worker=n) for n in range(3)] == [(1, 0)] * 3


def test_a_worker_that_lives_on_uses_the_offset_once_though_its_token_stays() -> None:
    cursor = Cursor()
    cursor.set(1, 30)
    worker = copy_in_worker(cursor)
    assert worker.begin(7, worker=0) == (1, 30)
    assert worker.begin(7, worker=0) == (1, 0)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda cursor: pickle.loads(pickle.dumps(cursor))]
)
def test_a_duplicate_starts_at_the_same_position_and_shares_with_its_copies(
    duplicate: Callable[[Cursor], Cursor],
) -> None:
    original = Cursor()
    original.set(3, 40)
    cursor = duplicate(original)
    assert cursor._cells.is_shared()
    assert (cursor.epoch, cursor.next_offset) == (3, 40)
    cursor.set(4, 50)
    assert (original.epoch, original.next_offset) == (3, 40)
    assert copy_in_worker(cursor).begin(7, worker=0) == (4, 50)
    assert cursor.read_by_workers


def test_setting_reaches_the_copies() -> None:
    cursor = Cursor()
    worker = copy_in_worker(cursor)
    cursor.set(5, 0)
    assert worker.begin(7, worker=0) == (5, 0)
    cursor.set(6, 9)
    assert not cursor.read_by_workers
    assert worker.begin(7, worker=0) == (6, 9)


@pytest.mark.parametrize("worker", [None, 0])
def test_the_offset_is_that_of_the_last_pass(worker: int | None) -> None:
    cursor = Cursor()
    cursor.set(1, 30)
    assert cursor.offset == 30
    copy_in_worker(cursor).begin(7, worker=worker)
    assert cursor.offset == 30
    copy_in_worker(cursor).begin(8, worker=worker)
    assert cursor.offset == 0
    cursor.set(1, 20)
    assert cursor.offset == 20


def test_the_offset_is_that_of_the_second_pass_of_a_persistent_worker() -> None:
    cursor = Cursor()
    cursor.set(1, 30)
    worker = copy_in_worker(cursor)
    worker.begin(7, worker=0)
    worker.begin(7, worker=0)
    assert cursor.offset == 0


def test_a_second_pass_of_the_same_token_is_refused_where_it_would_use_the_offset_again() -> None:
    cursor = Cursor()
    cursor.set(1, 30)
    first = [copy_in_worker(cursor) for _ in range(2)]
    assert [worker.begin(7, worker=n) for n, worker in enumerate(first)] == [(1, 30)] * 2
    with pytest.raises(ConfigError, match=r"same seed .*epoch 1 at row 30"):
        copy_in_worker(cursor).begin(7, worker=1)
    assert first[0].begin(7, worker=0) == (1, 0)
    cursor.set(1, 20)
    assert [copy_in_worker(cursor).begin(7, worker=n) for n in range(2)] == [(1, 20)] * 2
    cursor.set(2, 0)
    assert [copy_in_worker(cursor).begin(7, worker=0) for _ in range(2)] == [(2, 0)] * 2


def test_a_worker_of_any_number_begins() -> None:
    cursor = Cursor()
    cursor.set(1, 30)
    assert copy_in_worker(cursor).begin(7, worker=10**6) == (1, 30)
