from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from cache_client.convert import Converter
from cache_client.errors import ConfigError
from cache_client.reader import Rows
from protos.layout import Layout

LOGICAL = pa.schema(
    [
        ("a", pa.float32()),
        ("n", pa.int32()),
        ("b", pa.float32()),
        ("c", pa.float32()),
        ("image", pa.list_(pa.list_(pa.uint8(), 3), 2)),
        ("text", pa.string()),
        ("ragged", pa.list_(pa.float64())),
    ]
)


def rows(count: int = 4) -> Rows:
    layout = Layout(LOGICAL)
    matrices, arrays = {}, {}
    for index, column in enumerate(layout.columns):
        if column.dtype is not None:
            values = np.arange(count * column.width).reshape(count, column.width)
            matrices[index] = values.astype(column.dtype)
    arrays[layout.place("text")[0]] = pa.array(["x", None, "z", "w"][:count])
    arrays[layout.place("ragged")[0]] = pa.array([[1.0], [], None, [2.0, 3.0]][:count])
    return Rows(layout, matrices, arrays, count)


def test_columns_become_tensors_of_their_shapes_and_types() -> None:
    batch = Converter(Layout(LOGICAL))(rows())
    assert list(batch) == LOGICAL.names
    assert batch["a"].tolist() == [0, 3, 6, 9] and batch["a"].dtype == torch.float32
    assert batch["b"].tolist() == [1, 4, 7, 10]
    assert batch["n"].dtype == torch.int32
    assert batch["image"].shape == (4, 2, 3) and batch["image"].dtype == torch.uint8
    assert batch["text"] == ["x", None, "z", "w"]
    assert [None if v is None else v.tolist() for v in batch["ragged"]] == [[1], [], None, [2, 3]]


def test_neighbouring_columns_stack_without_a_copy_and_others_with_one() -> None:
    some = rows()
    batch = Converter(Layout(LOGICAL), {"x": ["a", "b"], "y": ["c", "n"]}, "numpy")(some)
    assert list(batch) == ["x", "y", "image", "text", "ragged"]
    assert np.shares_memory(batch["x"], some.matrices[0])
    assert batch["x"].tolist() == [[0, 1], [3, 4], [6, 7], [9, 10]]
    assert batch["y"].dtype == np.float64  # holds every int32 and every float32
    assert batch["y"].tolist() == [[2, 0], [5, 1], [8, 2], [11, 3]]
    backwards = Converter(Layout(LOGICAL), {"x": ["b", "a"]}, "numpy")(some)["x"]
    assert backwards.tolist() == [[1, 0], [4, 3], [7, 6], [10, 9]]


def test_arrow_batches_have_the_logical_columns() -> None:
    batch = Converter(Layout(LOGICAL), None, "arrow")(rows().slice(1, 3))
    assert batch.schema.names == LOGICAL.names
    assert batch["c"].to_pylist() == [5, 8]
    assert batch["image"].to_pylist()[0] == [[6, 7, 8], [9, 10, 11]]
    assert batch["ragged"].to_pylist() == [[], None]


@pytest.mark.parametrize(
    ("stack", "batch_format", "words"),
    [
        ({"x": ["nope"]}, "torch", "'nope'"),
        ({"x": ["a", "text"]}, "torch", "'text'"),
        ({"x": ["a"], "y": ["a"]}, "torch", "'a'"),
        ({"x": []}, "torch", "'x'"),
        ({"b": ["a"]}, "torch", "'b'"),
        ({"x": ["a"]}, "arrow", "arrow"),
        (None, "pandas", "'pandas'"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(
    stack: dict[str, list[str]] | None, batch_format: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Converter(Layout(LOGICAL), stack, batch_format)  # type: ignore[arg-type]
