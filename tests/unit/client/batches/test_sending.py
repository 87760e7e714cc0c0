"""What a DataLoader worker sends: a block of shared memory, and small columns copied from it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from cache_client.batches import sending
from cache_client.batches.batch_formats import ListColumn


@pytest.fixture(autouse=True)
def in_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "get_worker_info", lambda: "a worker")


def arrived(batch: Any) -> Any:
    """The batch after it was sent to another process."""
    return pickle.loads(bytes(ForkingPickler.dumps(sending.sent(batch))))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


BATCH: dict[str, Any] = {
    "label": torch.arange(4, dtype=torch.int64),
    "flag": torch.tensor([True, False, True, True]),
    "half": torch.arange(4, dtype=torch.bfloat16),
    "complex": torch.zeros(4, dtype=torch.complex64),
    "none": torch.empty(0, 3),
    "scalar": torch.tensor(1.5),
    "matrix": torch.arange(400, dtype=torch.float32).reshape(4, 100),
    "strided": torch.arange(8).reshape(4, 2)[:, 0],
    "text": ["a", None, "b", "c"],
    "lists": ListColumn([torch.arange(3), None, torch.arange(2), [1, None]]),
    "struct": {"zip": torch.arange(4, dtype=torch.int8), "pair": (torch.ones(4), 7)},
}


@pytest.mark.parametrize(
    "batch",
    [BATCH, list(BATCH.values()), tuple(BATCH.values()), {}, {"text": ["a"]}, BATCH["label"], 3],
)
def test_a_batch_arrives_as_it_was(batch: Any) -> None:
    found = arrived(batch)
    assert type(found) is type(batch) and same(batch, found)


def test_small_tensors_arrive_with_memory_of_their_own_and_large_ones_in_the_block() -> None:
    found = arrived(BATCH)
    for value in (found["label"], found["flag"], found["struct"]["zip"], found["lists"][0]):
        storage = value.untyped_storage()
        assert not storage.is_shared() and storage.nbytes() <= 5 * 8
    assert found["matrix"].untyped_storage().is_shared()
    assert found["matrix"].untyped_storage().nbytes() <= 4 * found["matrix"].nbytes
    for value in (found["label"], found["matrix"]):
        value += 1
        assert value._version == 1


def test_a_batch_arrives_changeable_under_inference_mode() -> None:
    with torch.inference_mode():
        found = arrived({name: BATCH[name] for name in ("label", "matrix", "lists", "struct")})
    found["label"] += 1
    found["matrix"] += 1
    found["lists"][0] += 1
    found["struct"]["zip"] += 1


def test_a_tensor_under_two_names_arrives_as_one() -> None:
    tensor = torch.arange(4)
    found = arrived({"a": tensor, "b": tensor})
    assert found["a"] is found["b"]


def test_tensors_that_share_a_storage_or_have_gradients_are_left_to_torch() -> None:
    rows = torch.arange(8.0)
    weight = torch.ones(4, requires_grad=True)
    found = arrived({"a": rows[:4], "b": rows[4:], "weight": weight})
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()
    assert found["weight"].requires_grad and found["b"].tolist() == [4, 5, 6, 7]


def test_a_copy_in_the_worker_is_no_pickle() -> None:
    batch = sending.sent({"a": BATCH["label"]})
    assert copy.copy(batch)["a"] is BATCH["label"] and copy.copy(sending.sent([1])) == [1]


def test_outside_workers_a_batch_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "get_worker_info", lambda: None)
    assert sending.sent(BATCH) is BATCH


def test_batches_are_made_outside_the_inference_mode_of_the_caller() -> None:
    def make() -> Iterator[torch.Tensor]:
        for _ in range(3):
            yield torch.zeros(2)

    batches = sending.changeable(make())
    with torch.inference_mode():
        first = next(batches)
        assert torch.is_inference_mode_enabled()
    assert [int((batch + 1).sum()) for batch in [first, *batches]] == [2, 2, 2]
    assert not first.is_inference()
