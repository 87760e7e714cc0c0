"""A column of lists as one object: what it is after a copy, and after a process has sent it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from cache_client.batches import batch_formats

ROWS: list[Any] = [torch.arange(3), None, torch.arange(0), [7, None], torch.arange(5, 9)]


def plain(rows: list[Any]) -> list[Any]:
    return [row.tolist() if isinstance(row, torch.Tensor) else row for row in rows]


def test_a_sent_column_arrives_unchanged_in_one_storage() -> None:
    found = pickle.loads(pickle.dumps(batch_formats.ListColumn(ROWS)))
    assert type(found) is list and plain(found) == plain(ROWS)
    tensors = [row for row in found if isinstance(row, torch.Tensor)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


def test_rows_that_arrived_are_changed_one_by_one() -> None:
    found = pickle.loads(pickle.dumps(batch_formats.ListColumn([torch.ones(2), torch.ones(2)])))
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * found[0]).sum()
    found[1] += 1  # torch would refuse this if both were views of one tensor to it
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [1, 1]
    assert plain(found) == [[1, 1], [2, 2]]


def test_a_change_before_it_is_sent_is_sent() -> None:
    rows = batch_formats.ListColumn([torch.arange(3), torch.arange(2)])
    rows[0] = torch.tensor([9])
    rows.append(torch.tensor([8, 8]))
    assert plain(pickle.loads(pickle.dumps(rows))) == [[9], [0, 1], [8, 8]]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [None, "text"],
        [torch.zeros(2, 2), torch.ones(1)],
        [torch.zeros(1), torch.ones(1, dtype=torch.int32)],
        [torch.zeros(2, requires_grad=True)],
    ],
    ids=["nothing", "no tensor", "a matrix", "two dtypes", "gradients"],
)
def test_whatever_a_transform_put_there_arrives(rows: list[Any]) -> None:
    found = pickle.loads(pickle.dumps(batch_formats.ListColumn(rows)))
    assert plain(found) == plain(batch_formats.ListColumn(rows))
    assert [getattr(row, "dtype", None) for row in found] == [
        getattr(row, "dtype", None) for row in rows
    ]
    assert [getattr(row, "requires_grad", None) for row in found] == [
        getattr(row, "requires_grad", None) for row in rows
    ]


def test_a_copy_holds_the_same_rows_and_is_still_sent_as_one() -> None:
    rows = batch_formats.ListColumn(ROWS)
    duplicate = copy.copy(rows)
    assert type(duplicate) is batch_formats.ListColumn and duplicate is not rows
    assert all(a is b for a, b in zip(duplicate, rows, strict=True))
    assert plain(copy.deepcopy(rows)) == plain(rows)


def test_pinning_keeps_every_row_and_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a DataLoader does it with ``pin_memory=True``, before and after a process sent them."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    for rows in (
        batch_formats.ListColumn(ROWS),
        pickle.loads(pickle.dumps(batch_formats.ListColumn(ROWS))),
    ):
        pinned = pin_memory({"tokens": rows, "number": torch.arange(5)})
        assert pinned["number"].tolist() == [0, 1, 2, 3, 4]
        assert type(pinned["tokens"]) is type(rows)
        assert pinned["tokens"] is not rows and plain(pinned["tokens"]) == plain(ROWS)
        assert plain(pickle.loads(pickle.dumps(pinned["tokens"]))) == plain(ROWS)
        assert plain(rows) == plain(ROWS)
