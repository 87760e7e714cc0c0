"""Codes of vocabularies, and columns of another dataset, by row number."""

import hashlib
import pickle

import numpy as np
import pyarrow as pa
import pytest

from cache_client.batches import convert
from cache_client.reading import rows as reading_rows
from cache_client.view_options import lookup_options
from cache_client.view_options import lookups as view_options_lookups
from cache_client.view_options import options as view_options
from cache_client.views import shared_array
from cache_protocol.errors import ConfigError
from cache_protocol.storage.layout import Layout

CITIES = pa.chunked_array([["Oslo", None, "Rome", "Oslo"], ["Bonn", "Rome", "Oslo"]])


def rows_of(columns: dict[str, object]) -> reading_rows.Rows:
    """Rows as a reader gives them; columns are arrays of numpy or of Arrow."""
    arrays = {
        name: values if isinstance(values, pa.Array) else None for name, values in columns.items()
    }
    fields = []
    for name, values in columns.items():
        if arrays[name] is not None:
            fields.append(pa.field(name, values.type))
        elif values.ndim == 2:
            kind = pa.list_(pa.from_numpy_dtype(values.dtype), values.shape[1])
            fields.append(pa.field(name, kind, nullable=False))
        else:
            fields.append(pa.field(name, pa.from_numpy_dtype(values.dtype), nullable=False))
    layout = Layout(pa.schema(fields))
    matrices, plain = {}, {}
    for index, column in enumerate(layout.columns):
        if column.kind == "plain":
            plain[index] = columns[column.names[0]]
        elif column.kind == "matrix":
            matrices[index] = columns[column.names[0]]
        else:
            matrices[index] = np.stack([columns[name] for name in column.names], 1)
    return reading_rows.Rows(layout, matrices, plain, len(next(iter(columns.values()))))


def joined(
    key: str, index: np.ndarray, columns: dict[str, object]
) -> view_options_lookups.JoinLookup:
    """The columns of another dataset, by its rows."""
    rows = rows_of(columns)
    matrices = {
        number: shared_array.SharedArray(matrix) for number, matrix in rows.matrices.items()
    }
    return view_options_lookups.JoinLookup(
        key, "users", "f", shared_array.SharedArray(index), rows.layout, matrices, rows.arrays
    )


# -- vocabularies ----------------------------------------------------------------------------------


def test_a_sorted_vocabulary_numbers_the_values_from_1():
    vocabulary = view_options_lookups.sorted_vocabulary(CITIES)
    assert vocabulary.values.to_pylist() == ["Bonn", "Oslo", "Rome"]
    assert len(vocabulary) == 4
    assert vocabulary.encode(["Rome", None, "Paris", "Bonn"]).tolist() == [3, 0, 0, 1]
    assert vocabulary.decode([3, 0, 1]) == ["Rome", None, "Bonn"]


def test_a_vocabulary_by_frequency_keeps_the_most_frequent_values():
    assert view_options_lookups.frequent_vocabulary(
        CITIES, view_options_lookups.Frequent()
    ).values.to_pylist() == ["Oslo", "Rome", "Bonn"]
    assert view_options_lookups.frequent_vocabulary(
        CITIES, view_options_lookups.Frequent(1)
    ).values.to_pylist() == ["Oslo"]
    assert view_options_lookups.frequent_vocabulary(
        CITIES, view_options_lookups.Frequent(min_count=2)
    ).values.to_pylist() == ["Oslo", "Rome"]


@pytest.mark.parametrize("values", [[3, 1, 2, 1], [0.5, -1.0], [True, False], [b"x", b"a"]])
def test_values_of_any_single_type_have_codes(values):
    vocabulary = view_options_lookups.sorted_vocabulary(pa.chunked_array([values]))
    assert vocabulary.decode(vocabulary.encode(values)) == values


def test_codes_stay_the_same_when_the_table_grows():
    saved = view_options_lookups.Vocabulary(
        view_options_lookups.sorted_vocabulary(CITIES).values.to_pylist()
    )
    grown = ["Aarhus", "Oslo", "Rome"]
    assert saved.encode(grown).tolist() == [0, 2, 3]
    extended = saved.extended(pa.array([*grown, None, "Turin", "Aarhus"]))
    assert extended.encode([*grown, "Turin"]).tolist() == [4, 2, 3, 5]
    assert len(extended) == 6
    assert extended.extended(pa.nulls(2)) == extended
    assert view_options_lookups.Vocabulary(pa.array([7], pa.int8())).extended([2**40]).encode(
        [2**40]
    ).tolist() == [2]


def test_vocabularies_are_told_apart_by_their_values():
    one, same, other = (
        view_options_lookups.Vocabulary(["a", "b"]),
        view_options_lookups.Vocabulary(["a", "b"]),
        view_options_lookups.Vocabulary(["ab"]),
    )
    assert one == same
    assert one.digest == same.digest != other.digest


def test_bad_vocabularies_are_refused():
    with pytest.raises(ConfigError, match="each value once, got 'a'"):
        view_options_lookups.Vocabulary(["a", "b", "a"])
    with pytest.raises(ConfigError, match="no null"):
        view_options_lookups.Vocabulary(["a", None])
    with pytest.raises(ConfigError, match="values of one type: Could not convert 'a'"):
        view_options_lookups.Vocabulary([1, "a"])
    with pytest.raises(ConfigError, match=r"of int64 has no codes for string, got 'x'"):
        view_options_lookups.Vocabulary([1, 2]).encode(["x"])
    with pytest.raises(ConfigError, match=r"codes are from 0 to 2, got 3"):
        view_options_lookups.Vocabulary([1, 2]).decode([3])


def test_a_value_of_a_wider_type_is_unknown_and_no_error():
    narrow = view_options_lookups.Vocabulary(pa.array([1, 2], pa.int32()))
    assert narrow.encode([2, 2**40, None]).tolist() == [2, 0, 0]
    assert narrow.encode(pa.array([1], pa.uint64())).tolist() == [1]
    assert narrow.encode([None, None]).tolist() == [0, 0]
    assert view_options_lookups.Vocabulary(["a"]).encode(
        pa.array(["a", "b"], pa.large_string())
    ).tolist() == [1, 0]
    assert view_options_lookups.Vocabulary([float("nan")]) == view_options_lookups.Vocabulary(
        [float("nan")]
    )


def test_buckets_are_those_of_md5():
    digest = hashlib.md5(b"Oslo").digest()
    expected = int.from_bytes(digest[:8], "big") % 100
    codes = view_options_lookups.hash_codes(CITIES, 100)
    assert codes[0] == codes[3] == codes[6] == expected
    assert codes[1] == 0
    assert codes.dtype == np.int32


@pytest.mark.parametrize("kind", [pa.null(), pa.string(), pa.float32()], ids=str)
def test_columns_without_values_have_codes(kind: pa.DataType):
    for chunks in [], [pa.nulls(3, kind), pa.nulls(1, kind)]:
        found = pa.chunked_array(chunks, kind)
        assert view_options_lookups.hash_codes(found, 5).tolist() == [0] * len(found)
        assert (
            len(view_options_lookups.sorted_vocabulary(found))
            == len(view_options_lookups.frequent_vocabulary(found, view_options_lookups.Frequent()))
            == 1
        )


# -- rows with more columns ------------------------------------------------------------------------


def test_looked_up_columns_join_those_of_their_type():
    rng = np.random.default_rng(0)
    read = {
        "a": rng.integers(0, 9, 6).astype(np.int32),
        "x": rng.random(6),
        "m": rng.random((6, 3)),
        "s": pa.array(list("uvwxyz")),
        "b": rng.integers(0, 9, 6).astype(np.int32),
    }
    users = {
        "age": np.arange(10, 14, dtype=np.int32),
        "vector": rng.random((4, 2)).astype(np.float32),
        "name": pa.array(["p", "q", "r", "t"]),
    }
    codes = np.arange(100, 120, dtype=np.int32)
    index = (np.arange(20) % 4).astype(np.int32)
    rows = rows_of(read)
    lookups = view_options_lookups.Lookups(
        rows.layout,
        (
            view_options_lookups.CodesLookup(
                "city", shared_array.SharedArray(codes), None, "20 buckets"
            ),
            joined("user", index, users),
        ),
    )
    ids = np.array([7, 3, 19, 0, 4, 4])

    extended = lookups.extend([rows.slice(0, 4), rows.slice(4, 6)], ids)

    assert [piece.num_rows for piece in extended] == [4, 2]
    batch = extended[0].to_batch(), extended[1].to_batch()
    table = pa.Table.from_batches(batch)
    assert table.column_names == ["a", "x", "m", "s", "b", "city", "age", "vector", "name"]
    assert table["city"].to_pylist() == codes[ids].tolist()
    assert table["age"].to_pylist() == users["age"][index[ids]].tolist()
    assert table["name"].to_pylist() == users["name"].take(index[ids]).to_pylist()
    assert np.array_equal(np.stack(table["vector"].to_numpy()), users["vector"][index[ids]])
    for name in ("a", "x", "b"):
        assert table[name].to_pylist() == read[name].tolist()
    assert table["s"].to_pylist() == read["s"].to_pylist()
    stacked = convert.Converter(lookups.layout, {"ints": ["a", "b", "city", "age"]})(extended[0])
    assert stacked["ints"].shape == (4, 4)
    assert stacked["ints"][:, 2].tolist() == codes[ids[:4]].tolist()


def test_a_batch_of_codes_alone_does_not_show_the_column_that_is_read():
    rows = rows_of({"city": pa.array(["a", "b"])})
    lookups = view_options_lookups.Lookups(
        rows.layout,
        (
            view_options_lookups.CodesLookup(
                "city", shared_array.SharedArray(np.array([1, 2], np.int32)), None, ""
            ),
        ),
        frozenset({"city"}),
    )
    (extended,) = lookups.extend([rows], np.array([1, 0]))
    assert extended.to_batch().to_pydict() == {"city": [2, 1]}


def test_two_columns_of_one_name_are_refused():
    rows = rows_of({"age": np.zeros(2)})
    join = joined("user", np.zeros(2, np.int32), {"age": np.zeros(1)})
    with pytest.raises(ConfigError, match="join: column 'age' is there already"):
        view_options_lookups.Lookups(rows.layout, (join,))


# -- keys ------------------------------------------------------------------------------------------


def test_each_key_finds_its_row():
    keys = pa.chunked_array([[5, 7], [5, None, 9]])
    assert view_options_lookups.join_index("id", keys, "users", pa.array([9, 7, 5])).tolist() == [
        2,
        1,
        2,
        -1,
        0,
    ]
    nulls = pa.array([None, 5, None])
    assert view_options_lookups.join_index("id", keys, "users", nulls).tolist() == [
        1,
        -1,
        1,
        -1,
        -1,
    ]
    narrow = pa.array([7], pa.int32())
    assert view_options_lookups.join_index("id", keys, "users", narrow).tolist() == [
        -1,
        0,
        -1,
        -1,
        -1,
    ]
    wide = pa.chunked_array([pa.array([7, 2**40])])
    assert view_options_lookups.join_index("id", wide, "users", narrow).tolist() == [0, -1]


def test_keys_that_come_twice_or_are_of_another_type_are_refused():
    keys = pa.chunked_array([[5]])
    with pytest.raises(ConfigError, match="'users' has id=5 in 2 rows"):
        view_options_lookups.join_index("id", keys, "users", pa.array([5, 6, 5]))
    with pytest.raises(ConfigError, match="'id' is int64, and string in 'users'"):
        view_options_lookups.join_index("id", keys, "users", pa.array(["x"]))
    with pytest.raises(ConfigError, match="'id' is string, and int64 in 'users'"):
        view_options_lookups.join_index("id", pa.chunked_array([["0005"]]), "users", pa.array([5]))


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"codes": "city"}, "codes must be columns, or a dict from column to a rule, got 'city'"),
        ({"codes": [3]}, "codes must be columns"),
        ({"codes": {"city": 0}}, "codes of 'city' must be 'sorted', a Frequent"),
        ({"codes": {"city": "hash"}}, "got 'hash'"),
        ({"join": ["user"]}, "join must be a dict from a key column to a dataset, got ['user']"),
        ({"join": {"user": 3}}, "join must be a dict"),
    ],
)
def test_bad_options_are_quoted(options, problem):
    with pytest.raises(ConfigError) as raised:
        view_options.View(**options)
    assert problem in str(raised.value)


def test_good_options_are_no_problem():
    codes = {
        "a": "sorted",
        "b": view_options_lookups.Frequent(10),
        "c": view_options_lookups.Vocabulary(["x"]),
        "d": 100,
    }
    view_options.View(codes=codes, join={"u": view_options_lookups.Join("users"), "v": "items"})
    for name in ("max_size", "min_count"):
        with pytest.raises(ConfigError, match=f"{name} must be an integer of at least 1, got 0"):
            view_options_lookups.Frequent(**{name: 0})


def test_a_column_that_becomes_codes_is_not_read():
    names = ["a", "city", "b"]
    assert lookup_options.columns_to_read(view_options.View(codes=["city"]), names, ()) == (
        ("a", "b"),
        frozenset(),
    )
    assert lookup_options.columns_to_read(
        view_options.View(codes=["city"]), names, ("b", "city")
    ) == (
        ("b",),
        frozenset(),
    )
    only = lookup_options.columns_to_read(view_options.View(codes=["city"]), ["city"], ())
    assert only == (("city",), frozenset({"city"}))
    with pytest.raises(ConfigError, match="no column 'town'; columns: a, city, b"):
        lookup_options.columns_to_read(view_options.View(codes=["town"]), names, ())


def test_a_spawned_worker_maps_the_rows_of_a_joined_dataset(monkeypatch: pytest.MonkeyPatch):
    join = joined("user", np.zeros(9, np.int32), {"vector": np.ones((50_000, 8))})
    plain = pickle.dumps(join)
    monkeypatch.setattr(shared_array, "get_spawning_popen", lambda: object())
    spawned = pickle.dumps(join)
    monkeypatch.undo()
    assert len(spawned) < 5_000 < 3_000_000 < len(plain)
    assert pickle.loads(spawned).values(np.array([3]))["vector"].tolist() == [[1.0] * 8]


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.float16()])
def test_floats_have_one_code_where_sql_has_one_group(kind: pa.DataType) -> None:
    values = pa.array([0.0, -0.0, float("nan"), -float("nan"), 1.5, None], pa.float64()).cast(kind)
    vocabulary = view_options_lookups.Vocabulary(
        pa.array([-0.0, float("nan"), 1.5], pa.float64()).cast(kind)
    )
    assert vocabulary.encode(values).tolist() == [1, 1, 2, 2, 3, 0]
    with pytest.raises(ConfigError, match="each value once"):
        view_options_lookups.Vocabulary([0.0, -0.0])
