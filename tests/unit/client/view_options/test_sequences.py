"""Options of samples of several rows: what is refused, and what becomes of the batches."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache_client.batches import convert as batches_convert
from cache_client.reading import rows as reading_rows
from cache_client.view_options import options as view_options
from cache_client.view_options import sequences
from cache_client.views import rows_view
from cache_client.views import view as views_view
from cache_protocol.errors import ConfigError
from cache_protocol.storage.layout import Layout

LISTS = pa.list_(pa.int32())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"pack": "t"}, "pack needs sequence_length"),
        ({"pack": 3, "sequence_length": 4}, "pack must be the name of a column, got 3"),
        ({"pack": "t", "sequence_length": 0}, "sequence_length must be at least 1, got 0"),
        ({"sequence_length": 4}, "sequence_length needs pack, got 4"),
        ({"pack": "t", "sequence_length": 4, "cut_documents": 1}, "cut_documents must be True or"),
        ({"pack": "t", "sequence_length": 4, "pad_token": "x"}, "pad_token must be an integer"),
        ({"pack": "t", "sequence_length": 4, "pack_outputs": ["mask"]}, "got ['mask']"),
        ({"pack": "t", "sequence_length": 4, "codes": ["c"]}, "pack and codes exclude each other"),
        ({"pack": "t", "sequence_length": 4, "join": {"k": "d"}}, "pack and join exclude each oth"),
        (
            {"pack": "t", "sequence_length": 4, "pack_outputs": [], "label_mask": "m"},
            "label_mask needs pack_outputs with 'labels', got []",
        ),
        (
            {"pack": "t", "sequence_length": 4, "label_mask": "m", "label_column": "l"},
            "label_mask and label_column exclude each other",
        ),
        (
            {"pack": "t", "sequence_length": 4, "length_buckets": "n"},
            "pack and length_buckets exclude each other",
        ),
        ({"group_by": "g", "window": 4}, "window must be a pair of length and stride, got 4"),
        ({"group_by": "g", "window": (0, 1)}, "the length of window must be at least 1, got 0"),
        ({"window": (2, 1)}, "window needs group_by, got (2, 1)"),
        ({"bucket_rows": 4}, "bucket_rows needs length_buckets, got 4"),
        ({"length_buckets": "n", "bucket_rows": 0}, "bucket_rows must be at least 1, got 0"),
        ({"pad_lists": "t"}, "pad_lists must be a dict from column to a number, got 't'"),
        ({"group_by": "g", "pad_lists": {"t": 0}}, "pad_lists and group_by exclude each other"),
    ],
)
def test_bad_options_are_quoted(options, problem):
    with pytest.raises(ConfigError) as raised:
        view_options.View(**options)
    assert problem in str(raised.value)


def test_packing_makes_neither_record_batches_nor_stacks():
    view = view_options.View(pack="t", sequence_length=4)
    assert len(view.problems_with(batch_format="arrow", stacks=True)) == 2
    assert view.problems_with(batch_format="torch", stacks=False) == []


def test_packing_reads_its_columns_only():
    assert sequences.sequence_columns(view_options.View(), ("a",)) == ("a",)
    options = view_options.View(pack="t", sequence_length=4, label_mask="m")
    assert sequences.sequence_columns(options, ()) == ("t", "m")
    with pytest.raises(ConfigError, match=r"pack reads columns \['t', 'm'\] only"):
        sequences.sequence_columns(options, ("t", "a"))


def rows_of(layout, table):
    matrices, arrays = {}, {}
    for index, column in enumerate(layout.columns):
        values = [table.column(name) for name in column.names]
        if column.kind == "plain":
            arrays[index] = values[0]
        elif column.kind == "matrix":
            flat = values[0].flatten().to_numpy()
            matrices[index] = flat.reshape(-1, column.width).copy()
        else:
            matrices[index] = np.stack([each.to_numpy() for each in values], 1)
    return reading_rows.Rows(layout, matrices, arrays, table.num_rows)


def chunked(values):
    return pa.chunked_array([values[at : at + 3] for at in range(0, len(values), 3)], values.type)


def made(options, table, *, batch_format="torch", values=None, inner=None, stack=None):
    """The batch of all slots of a table, which is read without a shuffle.

    Values are in chunks of three rows, as if from several shards.
    """
    layout = Layout(table.schema)
    found = sequences.make_sequences(
        view_options.View(**options),
        inner or views_view.PlainView(table.num_rows),
        layout,
        shuffle=views_view.Shuffle(False),
        batch_format=batch_format,
        values=lambda sql: chunked((values or {})[sql]),
    )
    convert, view = batches_convert.Converter(layout, stack, batch_format), found.view
    names = found.column_names(convert.names)
    samples = view.samples(np.arange(view.num_slots(0)), 0)
    samples = samples.shared([view.num_slots(0)])
    rows = rows_of(layout, table.take(pa.array(samples.row_ids)))
    (batch,) = found.assembler(convert)(rows, samples, [view.num_slots(0)])
    assert set(batch.schema.names if batch_format == "arrow" else batch) == set(names)
    return batch


@pytest.mark.parametrize(
    ("options", "lengths", "problem"),
    [
        ({"pack": "n", "sequence_length": 4}, [1], "pack: column 'n' is int64, not a list of in"),
        ({"pack": "x", "sequence_length": 4}, [1], "pack: no column 'x'; columns: n, s, t, s.t"),
        ({"pack": "s", "sequence_length": 4}, [1], "pack: column 's' is struct<t: list<item: int"),
        ({"pad_lists": {"s.t": 0}}, [1], "pad_lists: no column 's.t'; columns: n, s, t"),
        ({"length_buckets": "n"}, [-3], "length_buckets='n' must give lengths, got -3"),
        ({"length_buckets": "n"}, [0.5], "length_buckets='n' must give integers, got double"),
        ({"group_by": "n"}, [[1]], "group_by='n' must give single values, got list<"),
        ({"group_by": ["n"], "order_by": "t"}, [1], "order_by='t' must have an order, and it is l"),
        ({"pad_lists": {"n": 0}}, [1], "pad_lists: column 'n' is int64, not a list of numbers"),
        ({"pad_lists": {"t": 2**40}}, [1], "pad_lists: column 't' cannot hold 1099511627776"),
        ({"pad_lists": {"t": 0.5}}, [1], "pad_lists: column 't' cannot hold 0.5"),
    ],
)
def test_columns_that_do_not_fit_are_refused(options, lengths, problem):
    struct = pa.array([{"t": [1]}], pa.struct([("t", LISTS)]))
    table = pa.record_batch({"n": pa.array([1]), "s": struct, "t": pa.array([[1]], LISTS)})
    with pytest.raises(ConfigError) as error:
        made(options, table, values={'"n"': pa.array(lengths), '"t"': table["t"]})
    assert problem in str(error.value)


def test_padded_lists_have_a_mask():
    table = pa.record_batch({"n": pa.array([1, 2, 3]), "t": pa.array([[1], None, [2, 3]], LISTS)})
    batch = made({"pad_lists": {"t": -1}}, table)
    assert batch["t"].tolist() == [[1, -1], [-1, -1], [2, 3]]
    assert batch["t"].dtype == torch.int32
    assert batch["t_mask"].tolist() == [[True, False], [False, False], [True, True]]
    assert batch["n"].tolist() == [1, 2, 3]
    assert isinstance(made({"pad_lists": {"t": -1}}, table, batch_format="numpy")["t"], np.ndarray)


SESSIONS = pa.record_batch(
    {
        "user": pa.array(["b", "a", "b", "a", "b"]),
        "x": pa.array([0, 1, 2, 3, 4]),
        "pair": pa.array([[i, i] for i in range(5)], pa.list_(pa.float32(), 2)),
    }
)
SESSION_VALUES = {'"user"': SESSIONS["user"], '"t"': pa.array([9, 1, 5, 0, 7])}


def test_groups_are_lists_of_tensors_with_their_lengths():
    batch = made({"group_by": "user", "order_by": "t"}, SESSIONS, values=SESSION_VALUES)
    assert [each.tolist() for each in batch["x"]] == [[2, 4, 0], [3, 1]]
    assert [tuple(each.shape) for each in batch["pair"]] == [(3, 2), (2, 2)]
    assert batch["user"] == [["b", "b", "b"], ["a", "a"]]
    assert batch["lengths"].tolist() == [3, 2]


KEYS = st.one_of(
    st.lists(st.sampled_from([None, "a", "b"]), min_size=1, max_size=12).map(
        lambda keys: pa.array(keys, pa.string())
    ),
    st.lists(st.sampled_from([None, 1.5]), min_size=1, max_size=12).map(
        lambda keys: pa.array(keys, pa.float64())
    ),
    st.integers(1, 9).map(pa.nulls),
)


@given(keys=KEYS, is_ordered=st.booleans(), data=st.data())
def test_a_group_has_its_rows_of_a_subset_in_their_order(keys, is_ordered, data):
    size = len(keys)
    rows = data.draw(
        st.one_of(
            st.permutations(range(size)),
            st.lists(st.integers(0, size - 1), min_size=size, max_size=size),
            st.lists(st.integers(0, size - 1), min_size=1, max_size=2 * size),
        )
    )
    times = pa.array(data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    inner = rows_view.rows_in_order("subset", np.array(rows, np.int64), size)
    options = {"group_by": "k"} | ({"order_by": "t"} if is_ordered else {})
    batch = made(
        options,
        pa.record_batch({"row": pa.array(np.arange(size))}),
        values={'"k"': keys, '"t"': times},
        inner=inner,
    )
    expected = {}
    for row in rows:
        expected.setdefault(keys[row].as_py(), []).append(row)
    if is_ordered:
        expected = {
            k: sorted(rows, key=times.to_pylist().__getitem__) for k, rows in expected.items()
        }
    assert [group.tolist() for group in batch["row"]] == list(expected.values())


def test_windows_are_tensors():
    options = {"group_by": "user", "order_by": "t", "window": (2, 1)}
    batch = made(options, SESSIONS, values=SESSION_VALUES)
    assert batch["x"].tolist() == [[2, 4], [4, 0], [3, 1]]
    assert batch["pair"].shape == (3, 2, 2)
    assert batch["user"] == [["b", "b"], ["b", "b"], ["a", "a"]]
    assert list(batch) == ["user", "x", "pair"]


@pytest.mark.parametrize("window", [None, (2, 1)])
def test_record_batches_have_lists_of_rows(window):
    options = {"group_by": "user"} | ({} if window is None else {"window": window})
    batch = made(options, SESSIONS, batch_format="arrow", values=SESSION_VALUES)
    expected = [[0, 2, 4], [1, 3]] if window is None else [[0, 2], [2, 4], [1, 3]]
    assert batch["x"].to_pylist() == expected


PACK = {"pack": "t", "sequence_length": 4}


@pytest.mark.parametrize(
    ("options", "lists", "numbers", "stack", "problem"),
    [
        ({"group_by": "n"}, [], ["n", "lengths"], {}, "group_by adds a column 'lengths'"),
        ({"group_by": "n"}, [], ["n"], {"lengths": ["n"]}, "group_by adds a column 'lengths'"),
        ({"pad_lists": {"t": 0}}, ["t"], ["t_mask"], {}, "pad_lists adds a column 't_mask'"),
        ({"pad_lists": {"t": 0}}, ["t"], ["n"], {"t_mask": ["n"]}, "adds a column 't_mask'"),
        (PACK | {"pack": "labels"}, ["labels"], [], {}, "pack_outputs adds a column 'labels'"),
        (
            PACK | {"pack": "max_seqlen", "pack_outputs": ["cu_seqlens"]},
            ["max_seqlen"], [], {}, "pack_outputs adds a column 'max_seqlen'",
        ),
    ],
)  # fmt: skip
def test_a_name_that_batches_have_already_is_refused(options, lists, numbers, stack, problem):
    lengths = [f'array_length("{name}")' for name in lists]
    columns = {name: pa.array([[1]], LISTS) for name in lists}
    table = pa.record_batch(columns | {name: pa.array([1]) for name in numbers})
    with pytest.raises(ConfigError, match=problem):
        made(options, table, values=dict.fromkeys(['"n"', *lengths], pa.array([1])), stack=stack)


def test_packed_batches_have_no_other_columns_whose_names_are_taken():
    table = pa.record_batch({"t": pa.array([[1]], LISTS), "labels": pa.array([[2]], LISTS)})
    options = PACK | {"label_column": "labels", "pack_outputs": ["cu_seqlens", "labels"]}
    batch = made(options, table, values={'array_length("t")': pa.array([1])})
    assert batch["labels"].tolist() == [[-100, -100, -100, -100]]
