from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from cache_client.epochs import cursor as cursor_module
from cache_client.epochs import cursor as epochs_cursor
from cache_protocol.errors import ConfigError


def at(epoch: int, offset: int) -> epochs_cursor.Cursor:
    cursor = epochs_cursor.Cursor()
    cursor.set(epoch, offset, num_steps=5)
    return cursor


def copy_in_worker(cursor: epochs_cursor.Cursor) -> epochs_cursor.Cursor:
    """As a forked worker has it: another object over the same shared cells."""
    return copy.copy(cursor)


def begin(
    cursor: epochs_cursor.Cursor, seed: int, worker: int, own: epochs_cursor.Start | None = None
) -> epochs_cursor.Start:
    return cursor.begin_in_worker(worker, seed, own, deadline_s=0.1)


def test_an_offset_is_used_by_the_first_pass_that_hands_out_two_batches() -> None:
    cursor = at(2, 50)
    assert cursor.planned() == (2, 50)
    for _ in range(2):
        look = cursor.begin(is_look=True)
        assert cursor.planned() == (2, 50)
    cursor.use(look)
    assert cursor.planned() == (2, 0)
    cursor.use(cursor.begin(is_look=True))
    assert cursor.planned() == (2, 0)
    cursor.set(2, 10, num_steps=1)
    cursor.begin(is_look=False)
    assert cursor.planned() == (2, 0)


def test_all_workers_of_one_pass_use_the_offset_and_none_of_the_next() -> None:
    cursor = at(1, 30)
    for seed, offset in ((7, 30), (8, 0)):
        assert [begin(copy_in_worker(cursor), seed, n) for n in range(3)] == [(1, offset)] * 3
        assert cursor.pass_of_workers(0) == (offset, True)
    assert cursor.read_by_workers


def test_workers_that_begin_after_a_change_follow_worker_0_of_their_pass() -> None:
    cursor = at(1, 30)
    workers = [copy_in_worker(cursor) for _ in range(3)]
    assert begin(workers[0], 7, 0) == (1, 30)
    cursor.set(2, 0, num_steps=9)
    assert [begin(worker, 7, n) for n, worker in enumerate(workers[1:], 1)] == [(1, 30)] * 2
    assert [begin(worker, 7, n) for n, worker in enumerate(workers)] == [(2, 0)] * 3


def test_a_worker_waits_for_worker_0_until_its_deadline() -> None:
    with pytest.raises(ConfigError, match=r"worker 1 waited 0\.1 s for worker 0"):
        begin(copy_in_worker(at(1, 30)), 7, 1)


def test_a_worker_that_lives_on_uses_the_offset_once_though_its_seed_stays() -> None:
    cursor = at(1, 30)
    worker = copy_in_worker(cursor)
    assert [begin(worker, 7, 0) for _ in range(2)] == [(1, 30), (1, 0)]
    assert worker.given_up_at == 30
    assert cursor.pass_of_workers(0) == (0, True)


def test_a_worker_with_a_state_of_its_own_begins_there_and_leaves_the_offset() -> None:
    cursor = at(1, 30)
    workers = [copy_in_worker(cursor) for _ in range(3)]
    assert [begin(workers[n], 7, n, epochs_cursor.Start(3, 40 + n)) for n in range(2)] == [
        (3, 40),
        (3, 41),
    ]
    with pytest.raises(ConfigError, match="worker 0 resumes a state of its own, and worker 2"):
        begin(workers[2], 7, 2)
    assert cursor.planned() == (1, 30)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda cursor: pickle.loads(pickle.dumps(cursor))]
)
def test_a_duplicate_starts_at_the_same_position_and_shares_with_its_copies(
    duplicate: Callable[[epochs_cursor.Cursor], epochs_cursor.Cursor],
) -> None:
    original = at(3, 40)
    cursor = duplicate(original)
    assert cursor._shared.is_shared()
    assert cursor.planned() == (3, 40)
    cursor.set(4, 50, num_steps=5)
    assert original.planned() == (3, 40)
    assert begin(copy_in_worker(cursor), 7, 0) == (4, 50)
    assert cursor.read_by_workers


def test_setting_reaches_the_copies() -> None:
    cursor = epochs_cursor.Cursor()
    worker = copy_in_worker(cursor)
    cursor.set(5, 0, num_steps=5)
    assert begin(worker, 7, 0) == (5, 0)
    cursor.set(6, 9, num_steps=5)
    assert not cursor.read_by_workers
    assert cursor.pass_of_workers(0) is None
    assert begin(worker, 7, 0) == (6, 9)


def test_a_worker_of_any_number_and_seed_begins() -> None:
    cursor = at(1, 30)
    for seed in (0, 2**63 - 1):
        first = begin(copy_in_worker(cursor), seed, 0)
        assert begin(copy_in_worker(cursor), seed, 10**6) == first


def test_a_change_that_was_interrupted_ends_the_workers_and_can_be_made_again() -> None:
    cursor = at(1, 30)
    cursor._cells[cursor_module._GENERATION] += 1  # as `set` leaves it in the middle
    with pytest.raises(ConfigError, match=r"was interrupted .*call it again"):
        begin(copy_in_worker(cursor), 7, 0)
    cursor.set(2, 10, num_steps=5)
    assert [begin(copy_in_worker(cursor), 8, n) for n in range(2)] == [(2, 10)] * 2


def test_a_worker_0_that_was_killed_while_it_decided_delays_one_change_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cursor_module, "_DECISION_S", 0.02)
    cursor = at(1, 30)
    cursor._slots[3, cursor_module._STATUS] = cursor_module._DECIDING
    cursor.set(2, 0, num_steps=5)
    assert cursor_module._DECIDING not in cursor._slots[:, cursor_module._STATUS]
    assert cursor.planned() == (2, 0)


def test_a_change_that_is_refused_changes_nothing_also_where_worker_0_decides_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cursor = at(1, 30)
    worker, token = copy_in_worker(cursor), 9
    worker._started_by = token
    cursor._loaders[token] = SimpleNamespace(waits=True, alive=True, in_order=True, taken=0)  # type: ignore[assignment]
    deciding = cursor._slots[token + 1]
    deciding[cursor_module._STATUS] = cursor_module._DECIDING

    def decide(_: float) -> None:
        slot = cursor_module._Slot(deciding, token, token + 1)
        slot.write(epochs_cursor.Start(1, 30), cursor.generation // 2 * 2)
        slot.close()

    monkeypatch.setattr(cursor_module.time, "sleep", decide)
    with pytest.raises(ConfigError, match="too late"):
        cursor.set(2, 0, num_steps=5)
    assert cursor.planned() == (1, 30)
    assert cursor.pass_of_workers(0) == (30, True)
    cursor.set(1, 30, num_steps=5)  # what workers have begun
    assert begin(copy_in_worker(cursor), 8, 0) == (1, 30)
