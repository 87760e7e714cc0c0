from __future__ import annotations

import itertools
import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch

from cache_client.batches import convert as batches_convert
from cache_client.job import arguments
from cache_client.reading import reader
from cache_protocol.errors import ConfigError, InvalidTextError
from cache_protocol.storage.layout import Layout

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


def rows(count: int = 4) -> reader.Rows:
    layout = Layout(LOGICAL)
    matrices, arrays = {}, {}
    for index, column in enumerate(layout.columns):
        if column.dtype is not None:
            values = np.arange(count * column.width).reshape(count, column.width)
            matrices[index] = values.astype(column.dtype)
    arrays[layout.place("text")[0]] = pa.array(["x", None, "z", "w"][:count])
    arrays[layout.place("ragged")[0]] = pa.array([[1.0], [], None, [2.0, 3.0]][:count])
    return reader.Rows(layout, matrices, arrays, count)


def test_columns_become_tensors_of_their_shapes_and_types() -> None:
    batch = batches_convert.Converter(Layout(LOGICAL))(rows())
    assert list(batch) == LOGICAL.names
    assert batch["a"].tolist() == [0, 3, 6, 9] and batch["a"].dtype == torch.float32
    assert batch["b"].tolist() == [1, 4, 7, 10]
    assert batch["n"].dtype == torch.int32
    assert batch["image"].shape == (4, 2, 3) and batch["image"].dtype == torch.uint8
    assert batch["text"] == ["x", None, "z", "w"]
    assert [None if v is None else v.tolist() for v in batch["ragged"]] == [[1], [], None, [2, 3]]


def test_neighbouring_columns_stack_without_a_copy_and_others_with_one() -> None:
    some = rows()
    batch = batches_convert.Converter(Layout(LOGICAL), {"x": ["a", "b"], "y": ["c", "n"]}, "numpy")(
        some
    )
    assert list(batch) == ["x", "y", "image", "text", "ragged"]
    assert np.shares_memory(batch["x"], some.matrices[0])
    assert batch["x"].tolist() == [[0, 1], [3, 4], [6, 7], [9, 10]]
    assert batch["y"].dtype == np.float64  # holds every int32 and every float32
    assert batch["y"].tolist() == [[2, 0], [5, 1], [8, 2], [11, 3]]
    backwards = batches_convert.Converter(Layout(LOGICAL), {"x": ["b", "a"]}, "numpy")(some)["x"]
    assert backwards.tolist() == [[1, 0], [4, 3], [7, 6], [10, 9]]


@pytest.mark.parametrize("stack", [None, {"x": ["a", "b"]}])
def test_without_copies_the_columns_of_a_batch_share_one_storage_of_its_own_rows_alone(
    stack: dict[str, list[str]] | None,
) -> None:
    window = rows()
    batch = batches_convert.Converter(Layout(LOGICAL), stack, copy=False)(window.slice(1, 3))
    # DataLoader workers send whole storages.
    found = {
        (value.untyped_storage().data_ptr(), value.untyped_storage().nbytes())
        for value in batch.values()
        if isinstance(value, torch.Tensor)
    }
    own = [matrix[1:3] for matrix in window.matrices.values()]
    assert found == {(matrix.ctypes.data, matrix.nbytes) for matrix in own}


@pytest.mark.parametrize("stack", [None, {"x": ["a", "b"]}])
@pytest.mark.parametrize("copy", [True, False])
def test_a_column_that_is_changed_in_place_does_not_mark_the_others(
    stack: dict[str, list[str]] | None, copy: bool
) -> None:
    batch = batches_convert.Converter(Layout(LOGICAL), stack, copy=copy)(rows())
    changed, other = batch["c"], batch["x" if stack else "a"]
    weight = torch.ones((), requires_grad=True)
    loss = (weight * other).sum()
    changed += 1
    loss.backward()  # torch would refuse, had it seen a change of `other`
    changed *= weight
    assert changed.requires_grad and not other.requires_grad


@pytest.mark.parametrize("batch_format", ["torch", "numpy"])
@pytest.mark.parametrize("width", [1, 3, 40])
@pytest.mark.parametrize("count", [0, 1, 700])
def test_a_scalar_column_is_contiguous_and_owns_its_memory(
    batch_format: arguments.BatchFormat, width: int, count: int
) -> None:
    names = [f"c{number}" for number in range(width)]
    layout = Layout(pa.schema([(name, pa.float32()) for name in names]))
    matrix = np.arange(1000 * width, dtype=np.float32).reshape(1000, width)
    batch = batches_convert.Converter(layout, None, batch_format)(
        reader.Rows(layout, {0: matrix}, {}, 1000).slice(7, 7 + count)
    )
    for position, name in enumerate(names):
        column = torch.as_tensor(batch[name])
        assert column.is_contiguous()
        assert column.tolist() == [(7 + row) * width + position for row in range(count)]
        assert not np.shares_memory(column.numpy(), matrix)
        assert column.untyped_storage().nbytes() == 4 * count
        assert len(pickle.dumps(batch[name])) < 4 * count + 1000
        base = batch[name].base if batch_format == "numpy" else None
        assert base is None  # it keeps no block
        column.fill_(-1)  # no column is another's memory
        if batch_format == "torch":
            assert column._version == 1  # autograd counts them apart
    assert torch.equal(torch.as_tensor(batch[names[0]]), torch.full((count,), -1.0))


BOOLS = pa.schema(
    [
        pa.field("flag", pa.bool_()),
        pa.field("number", pa.uint8()),
        pa.field("other", pa.bool_()),
        pa.field("pair", pa.list_(pa.bool_(), 2)),
        pa.field("some", pa.list_(pa.bool_())),
    ]
)


def bools() -> reader.Rows:
    layout = Layout(BOOLS)
    packed, pair = layout.place("flag")[0], layout.place("pair")[0]
    matrices = {
        packed: np.array([[1, 2, 0], [0, 3, 1]], np.uint8),
        pair: np.array([[1, 0], [1, 1]], np.uint8),
    }
    some = {layout.place("some")[0]: pa.array([[1, 0], [1, None]], pa.list_(pa.uint8()))}
    return reader.Rows(layout, matrices, some, 2)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(("batch_format", "dtype"), [("torch", torch.bool), ("numpy", np.bool_)])
def test_columns_that_were_bools_are_bools(
    batch_format: arguments.BatchFormat, dtype: object, copy: bool
) -> None:
    batch = batches_convert.Converter(Layout(BOOLS), None, batch_format, copy=copy)(bools())
    assert batch["flag"].dtype == batch["pair"].dtype == batch["some"][0].dtype == dtype
    assert batch["flag"].tolist() == [True, False] and batch["other"].tolist() == [False, True]
    assert batch["number"][~batch["flag"]].tolist() == [3]
    assert batch["number"].tolist() == [2, 3]
    assert batch["pair"].tolist() == [[True, False], [True, True]]
    assert batch["some"][0].tolist() == [True, False]
    assert batch["some"][1] == [True, None] and batch["some"][1][0] is True


def test_a_stack_of_bools_is_bool_and_one_with_a_number_is_not() -> None:
    flags = batches_convert.Converter(Layout(BOOLS), {"x": ["other", "flag"]})(bools())["x"]
    assert flags.dtype == torch.bool and flags.tolist() == [[False, True], [True, False]]
    mixed = batches_convert.Converter(Layout(BOOLS), {"x": ["flag", "number"]})(bools())["x"]
    assert mixed.dtype == torch.uint8 and mixed.tolist() == [[1, 2], [0, 3]]


def test_unsigned_columns_and_empty_batches_become_tensors() -> None:
    layout = Layout(pa.schema([(name, pa.uint16()) for name in "abcde"]))
    some = reader.Rows(layout, {0: np.arange(10, dtype=np.uint16).reshape(2, 5)}, {}, 2)
    batch = batches_convert.Converter(layout, {"x": ["b", "c"], "y": ["e", "d"]})(some)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "a": [0, 5],
        "x": [[1, 2], [6, 7]],
        "y": [[4, 3], [9, 8]],
    }
    assert {value.dtype for value in batch.values()} == {torch.uint16}
    empty = batches_convert.Converter(Layout(LOGICAL))(rows().slice(1, 1))
    assert {name: len(value) for name, value in empty.items()} == dict.fromkeys(LOGICAL.names, 0)
    assert empty["image"].shape == (0, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, "float32", np.float32])
def test_stacks_take_a_dtype(dtype: object) -> None:
    batch = batches_convert.Converter(
        Layout(LOGICAL), {"x": ["c", "n"], "y": ["a", "b"]}, stack_dtype=dtype
    )(rows())  # fmt: skip
    assert batch["x"].dtype == batch["y"].dtype == torch.float32
    assert batch["x"].tolist() == [[2, 0], [5, 1], [8, 2], [11, 3]]
    assert batches_convert.Converter(Layout(LOGICAL), {"y": ["a", "b"]}, stack_dtype="float64")(
        rows()
    )["y"].tolist() == [[0, 1], [3, 4], [6, 7], [9, 10]]


def test_a_dtype_that_cannot_hold_a_column_is_refused() -> None:
    with pytest.raises(ConfigError, match="stack_dtype=int64 cannot hold column 'c', float32"):
        batches_convert.Converter(Layout(LOGICAL), {"x": ["n", "c"]}, stack_dtype="int64")
    for bad in ("text", "str", torch.bool, 7):
        with pytest.raises(ConfigError, match="stack_dtype must be a dtype of numbers, got"):
            batches_convert.Converter(Layout(LOGICAL), {"x": ["n", "c"]}, stack_dtype=bad)


@pytest.mark.parametrize(
    "dtype",
    [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.list_(pa.string())],
    ids=str,
)
def test_strings_and_bytes_are_python_objects_in_lists(dtype: pa.DataType) -> None:
    texts = ["", "a", None, "é" * 300, "a\0b", "\N{SNOWMAN}"]
    layout = Layout(pa.schema([("some", dtype)]))
    array = pa.array(texts, getattr(dtype, "value_type", dtype))
    if pa.types.is_list(dtype):
        array = pa.array([[text, None] for text in texts], dtype)
    batch = batches_convert.Converter(layout)(reader.Rows(layout, {}, {0: array}, 6).slice(1, 6))[
        "some"
    ]
    assert type(batch) is list and batch == array.to_pylist()[1:]
    assert [type(value) for value in batch] == [type(value) for value in array.to_pylist()[1:]]


@pytest.mark.parametrize("dtype", [pa.string(), pa.list_(pa.string())], ids=str)
def test_invalid_utf_8_names_column_and_row(dtype: pa.DataType) -> None:
    layout = Layout(pa.schema([("name", dtype)]))
    offsets, data = pa.array([0, 2, 4], pa.int32()), pa.py_buffer(b"ok\xff\xfe")
    array = pa.StringArray.from_buffers(2, offsets.buffers()[1], data)
    if pa.types.is_list(dtype):
        array = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), array)
    with pytest.raises(
        InvalidTextError, match="column 'name' holds no valid UTF-8 in row 1"
    ) as bad:
        batches_convert.Converter(layout)(reader.Rows(layout, {}, {0: array}, 2))
    assert "arrow_cast(name, 'Binary')" in str(bad.value)


@pytest.mark.parametrize("value_type", [pa.int64(), pa.float32()])
def test_the_type_of_a_list_depends_only_on_its_row(value_type: pa.DataType) -> None:
    values = [[1, 2], None, [3, None], [], [4]]
    layout = Layout(pa.schema([("some", pa.large_list(value_type))]))
    whole = reader.Rows(layout, {}, {0: pa.array(values, layout.logical.field("some").type)}, 5)
    convert = batches_convert.Converter(layout)
    dtype = torch.int64 if value_type == pa.int64() else torch.float32
    for start, stop in itertools.combinations(range(6), 2):
        batch = convert(whole.slice(start, stop))["some"]
        for found, expected in zip(batch, values[start:stop], strict=True):
            if expected is None or None in expected:
                assert found == expected
            else:
                assert found.tolist() == expected and found.dtype == dtype


@pytest.mark.parametrize("batch_format", ["torch", "numpy"])
def test_lists_of_one_length_are_rows_of_their_own(batch_format: arguments.BatchFormat) -> None:
    layout = Layout(pa.schema([("some", pa.list_(pa.float32()))]))
    values = pa.array([[0, 1], [2, 3], [4, 5]], pa.list_(pa.float32()))
    rows = reader.Rows(layout, {}, {0: values}, 3).slice(1, 3)

    some = batches_convert.Converter(layout, batch_format=batch_format)(rows)["some"]

    assert type(some) is list and [row.tolist() for row in some] == [[2, 3], [4, 5]]
    some[0] += 1  # a copy: the values of the window stay
    assert some[1].tolist() == [4, 5] and values.to_pylist()[1] == [2, 3]
    if batch_format == "torch":
        assert some[0].dtype == torch.float32
        assert some[0]._version == 1 and some[1]._version == 0  # autograd counts them apart


def test_arrow_batches_have_the_logical_columns() -> None:
    batch = batches_convert.Converter(Layout(LOGICAL), None, "arrow")(rows().slice(1, 3))
    assert batch.schema.names == LOGICAL.names
    assert batch["c"].to_pylist() == [5, 8]
    assert batch["image"].to_pylist()[0] == [[6, 7, 8], [9, 10, 11]]
    assert batch["ragged"].to_pylist() == [[], None]


def test_an_arrow_batch_that_is_sent_has_only_its_rows_and_not_its_window() -> None:
    count = 3_000
    numbers = range(count)
    window = pa.table(
        {
            "packed": np.arange(count, dtype=np.float32),
            "beside": np.arange(count, dtype=np.float32),
            "image": pa.FixedSizeListArray.from_arrays(np.arange(6 * count, dtype=np.int16), 6),
            "text": [None if n % 3 == 1 else f"some text of row {n}" for n in numbers],
            "lists": [None if n % 3 == 1 else [[n] * (n % 4), None] for n in numbers],
            "pairs": pa.array([[f"a {n}", None] for n in numbers], pa.list_(pa.string(), 2)),
        }
    ).combine_chunks()
    layout = Layout(window.schema)
    matrices = {
        layout.place("packed")[0]: np.column_stack([window["packed"], window["beside"]]),
        layout.place("image")[0]: np.arange(6 * count, dtype=np.int16).reshape(count, 6),
    }
    names = ("text", "lists", "pairs")
    arrays = {layout.place(name)[0]: window[name].chunk(0) for name in names}
    batch = batches_convert.Converter(layout, None, "arrow")(
        reader.Rows(layout, matrices, arrays, count).slice(1_003, 1_013)
    )

    sent = pickle.dumps(batch)

    assert len(sent) < 4_000
    assert pickle.loads(sent).to_pylist() == window.slice(1_003, 10).to_pylist()


@pytest.mark.parametrize(
    ("stack", "batch_format", "words"),
    [
        ({"x": ["nope"]}, "torch", "'nope'"),
        ({"x": ["a", "text"]}, "torch", "'text'"),
        ({"x": ["a"], "y": ["a"]}, "torch", "'a'"),
        ({"x": []}, "torch", "'x'"),
        ({"b": ["a"]}, "torch", "'b'"),
        ({"x": ["a"]}, "arrow", "arrow"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(
    stack: dict[str, list[str]], batch_format: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        batches_convert.Converter(Layout(LOGICAL), stack, batch_format)  # type: ignore[arg-type]


WIDE = Layout(
    pa.schema([("i", pa.int64()), ("u", pa.uint64()), ("s", pa.int8()), ("f", pa.float32())])
)


@pytest.mark.parametrize("columns", [["i", "u"], ["u", "s"]])
def test_integers_that_no_integer_dtype_holds_are_not_stacked(columns: list[str]) -> None:
    first, second = columns
    types = {name: WIDE.logical.field(name).type for name in columns}
    words = f"'x'.*'{first}' {types[first]}, '{second}' {types[second]}"
    with pytest.raises(ConfigError, match=words):
        batches_convert.Converter(WIDE, {"x": columns})


def test_integers_are_stacked_with_floats_and_with_narrower_ones() -> None:
    matrices = {i: np.full((1, 1), 3, column.dtype) for i, column in enumerate(WIDE.columns)}
    some = reader.Rows(WIDE, matrices, {}, 1)
    for columns, dtype in (
        (["i", "f"], torch.float64),
        (["u", "f"], torch.float64),
        (["s", "i"], torch.int64),
    ):
        batch = batches_convert.Converter(WIDE, {"x": columns})(some)
        assert batch["x"].dtype == dtype and batch["x"].tolist() == [[3, 3]]
