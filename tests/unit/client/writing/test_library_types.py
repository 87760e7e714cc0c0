"""Each type of each library becomes the Arrow column with its values, or fails with what to do."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cache_client.writing.arrow_sources import arrow_source
from cache_protocol.errors import ConfigError, SchemaError
from cache_protocol.storage.nested_values import plain_type, without_codes

pd: Any = pytest.importorskip("pandas")
pl: Any = pytest.importorskip("polars")

BIG = 2**60 + 1  # float64 would round it
ZONED = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


def column(data: Any) -> pa.ChunkedArray:
    source = arrow_source(data)
    table = pa.Table.from_batches(source.batches, source.schema)
    table.validate(full=True)
    return table.column("a")


def check(data: Any, dtype: pa.DataType, values: list[Any]) -> None:
    """Checks a column whose values are of a type, maybe in a dictionary."""
    found = column(data)
    (plain,) = without_codes(pa.schema([("a", found.type)])).types
    assert (plain, found.to_pylist()) == (plain_type(dtype) if plain != dtype else dtype, values)


def ids(value: Any) -> str:
    return value if isinstance(value, str) else ""


# -- dicts of arrays, tensors and Python values --------------------------------------------------

F8, F4, I8 = pa.float64(), pa.float32(), pa.int64()
ARRAYS: dict[str, tuple[Any, pa.DataType, list[Any]]] = {
    "masked int": (np.ma.array([1, -999, 3], mask=[0, 1, 0]), I8, [1, None, 3]),
    "masked float": (np.ma.array([1.0, -999, 3], mask=[0, 1, 0]), F8, [1, None, 3]),
    "masked text": (np.ma.array(["a", "b"], mask=[1, 0]), pa.string(), [None, "b"]),
    "masked objects": (np.ma.array(["a", 1], mask=[1, 0], dtype=object), I8, [None, 1]),
    "masked, no mask": (np.ma.array([1, 2]), I8, [1, 2]),
    "masked rows": (
        np.ma.array([[1, -999], [3, 4]], mask=[[0, 1], [0, 0]]),
        pa.list_(I8, 2),
        [[1, None], [3, 4]],
    ),
    "masked, strided": (
        np.ma.array(np.arange(6), mask=[1, 0, 0, 1, 1, 0])[::2],
        I8,
        [None, 2, None],
    ),
    "nan": (np.array([1.0, np.inf]), F8, [1.0, np.inf]),
    "big endian": (np.array([1, BIG], ">i8"), I8, [1, BIG]),
    "big endian rows": (np.array([[1], [2]], ">f4"), pa.list_(F4, 1), [[1.0], [2.0]]),
    "half": (np.array([1.5], "f2"), pa.float16(), [1.5]),
    "bool": (np.array([[True], [False]]), pa.list_(pa.bool_(), 1), [[True], [False]]),
    "days": (np.array(["2024-01-01", "NaT"], "M8[D]"), pa.date32(), [dt.date(2024, 1, 1), None]),
    "seconds": (np.array([1, 2], "m8[s]"), pa.duration("s"),
                [dt.timedelta(seconds=1), dt.timedelta(seconds=2)]),
    "text": (np.array(["x", "yy"]), pa.string(), ["x", "yy"]),
    "text with NUL": (np.array(["x\0y", "z"]), pa.string(), ["x\0y", "z"]),
    "bytes with NUL": (np.array([b"x\0y", b"z"]), pa.binary(), [b"x\0y", b"z"]),
    "text of any size": (np.array(["x", "y\0"], np.dtypes.StringDType()), pa.string(),
                         ["x", "y\0"]),
    "objects": (np.array([1, None, BIG], object), I8, [1, None, BIG]),
    "objects of lists": (np.array([[1], [1, BIG], None], object), pa.list_(I8),
                         [[1], [1, BIG], None]),
    "three dimensions": (np.zeros((1, 2, 1)), pa.list_(pa.list_(F8, 1), 2), [[[0.0], [0.0]]]),
    "no columns": (np.zeros((2, 0)), pa.list_(F8, 0), [[], []]),
    "no rows": (np.zeros((0, 2)), pa.list_(F8, 2), []),
    "backwards": (np.arange(3)[::-1], I8, [2, 1, 0]),
    "transposed": (np.arange(4).reshape(2, 2).T, pa.list_(I8, 2), [[0, 2], [1, 3]]),
    "broadcast": (np.broadcast_to(np.array([7]), (2,)), I8, [7, 7]),
    "list": ([1, None, BIG], I8, [1, None, BIG]),
    "list of numbers": ([1, 2.5, None], F8, [1.0, 2.5, None]),
    "list of large numbers": ([1, 2**63], pa.uint64(), [1, 2**63]),
    "list of text": (["b\0", "", None], pa.string(), ["b\0", "", None]),
    "list of decimals": ([Decimal("1.5"), 2], pa.decimal128(2, 1), [Decimal("1.5"), 2]),
    "list of lists": ([[1, 2], [], None], pa.list_(I8), [[1, 2], [], None]),
    "list of times": ([ZONED, None], pa.timestamp("us", "UTC"), [ZONED, None]),
    "tuple": ((1, 2), I8, [1, 2]),
    "range": (range(2), I8, [0, 1]),
    "arrow": (pa.array([1, None]), I8, [1, None]),
    "arrow chunks": (pa.chunked_array([[1], [BIG]]), I8, [1, BIG]),
    "arrow dictionary": (pa.array(["u", None]).dictionary_encode(), pa.string(), ["u", None]),
    "series": (pd.Series([1, None, BIG], dtype="Int64"), I8, [1, None, BIG]),
    "series of categories": (pd.Series(["u", None], dtype="category"), pa.large_string(),
                             ["u", None]),
    "series of objects": (pd.Series(["u", float("nan"), None], dtype=object), pa.string(),
                          ["u", None, None]),
    "index": (pd.Index([1, 2]), I8, [1, 2]),
    "zoned index": (pd.DatetimeIndex([ZONED]), pa.timestamp("us", "UTC"), [ZONED]),
    "polars series": (pl.Series([1, None, BIG]), I8, [1, None, BIG]),
    "polars categories": (pl.Series(["u", None], dtype=pl.Categorical), pa.string_view(),
                          ["u", None]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_keeps_its_values(kind: str) -> None:
    values, dtype, wanted = ARRAYS[kind]
    check({"a": values}, dtype, wanted)


def test_nan_of_numpy_stays_and_numbers_are_not_copied() -> None:
    values = np.array([np.nan, -0.0])
    found = column({"a": values})
    assert found.null_count == 0 and str(found.to_pylist()) == "[nan, -0.0]"
    assert found.chunk(0).buffers()[1].address == values.ctypes.data


NOT_ARRAYS: dict[str, tuple[Any, str]] = {
    "complex": (np.array([1j]), r"ndarray of complex128.*array.view\(float\)"),
    "long double": (np.array([1], np.longdouble), r"of float128.*array.astype"),
    "structure": (np.zeros(1, [("x", "i4")]), "each of its fields as a column"),
    "hours": (
        np.array(["2024-01-01T05"], "M8[h]"),
        r"datetime64\[h\].*astype\('datetime64\[s\]'\)",
    ),
    "one number": (np.array(5), "one value, and no column"),
    "Python number": (5, "one value, and no column"),
    "Python text": ("abc", "one value, and no column"),
    "Python set": ({1, 2}, "one value, and no column"),
    "mixed list": ([1, None, "x"], "'x' in row 2 is a str among others"),
    "bool among numbers": ([1, True], "True in row 1 is a bool"),
    "text among bytes": ([b"x", "y"], "'y' in row 1 is a str"),
    "date among times": ([dt.date(2024, 1, 1), dt.datetime(2024, 1, 1, 5)], "row 1 is a datetime"),
    "number among dates": ([dt.date(2024, 1, 1), 1], "1 in row 1 is an int"),
    "zones": ([ZONED, dt.datetime(2024, 1, 1)], "with and without a zone"),
    "rounded": ([2**53 + 1, 0.5], "9007199254740993"),
    "mixed inside": ([[1], ["x"]], "'x' in row 1 is a str"),
    "mixed fields": ([{"x": 1}, {"x": "1"}], "'1' in row 1 is a str"),
    "no type": ([-1, 2**63], "cannot be an Arrow column"),
    "mixed objects": (np.array([1, "x"], object), "'x' in row 1 is a str"),
    "Python objects": ([object()], "cannot be an Arrow column"),
    "mixed series": (pd.Series([1, "x"], dtype=object), r"Series of object.*Series.astype"),
    "polars object": (pl.Series([object()], dtype=pl.Object), "Python objects.*map_elements"),
    "polars int128": (pl.Series([2**100], dtype=pl.Int128), r"Arrow has no Int128.*pl.Int64"),
}


@pytest.mark.parametrize("kind", NOT_ARRAYS)
def test_an_array_without_an_arrow_type_is_refused_with_what_to_do(kind: str) -> None:
    values, problem = NOT_ARRAYS[kind]
    with pytest.raises(SchemaError, match=rf"^column 'a', .*{problem}"):
        arrow_source({"a": values})


def test_names_of_a_dict_are_texts_and_lengths_are_one() -> None:
    with pytest.raises(SchemaError, match="a column needs a name, got 1"):
        arrow_source({1: [2]})
    with pytest.raises(ConfigError, match="one length"):
        arrow_source({"a": [1], "b": [1, 2]})


def test_tensors_keep_their_values_or_say_what_to_give() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor
    for values, dtype, wanted in (
        (tensor([1.5], requires_grad=True), F4, [1.5]),
        (tensor([1 + 2j, 3 - 4j]).conj().imag, F4, [-2.0, 4.0]),
        (torch.arange(4).reshape(2, 2).t(), pa.list_(I8, 2), [[0, 2], [1, 3]]),
        (tensor([True]), pa.bool_(), [True]),
        (tensor([65535], dtype=torch.uint16), pa.uint16(), [65535]),
        (tensor([0.5], dtype=torch.float16), pa.float16(), [0.5]),
    ):
        check({"a": values}, dtype, wanted)
    for values, advice in (
        (torch.ones(2, dtype=torch.bfloat16), r"torch.bfloat16.*Give tensor.float\(\)"),
        (torch.ones(2, dtype=torch.float8_e5m2), r"Give tensor.float\(\)"),
        (torch.eye(2).to_sparse(), r"Give tensor.to_dense\(\)"),
        (tensor([1j]), "Give torch.view_as_real"),
        (tensor(5), "one value"),
        ([tensor([1]), tensor([2])], r"Give torch.stack\(values\)"),
    ):
        with pytest.raises(SchemaError, match=rf"^column 'a', .*{advice}"):
            arrow_source({"a": values})


# -- frames --------------------------------------------------------------------------------------

PANDAS: dict[str, tuple[Any, pa.DataType, list[Any]]] = {
    "Int64": (pd.array([1, None, BIG], dtype="Int64"), I8, [1, None, BIG]),
    "float": ([1.5, None], F8, [1.5, None]),
    "boolean": (pd.array([True, None], dtype="boolean"), pa.bool_(), [True, None]),
    "text": (["x", None], pa.large_string(), ["x", None]),
    "categories": (pd.Categorical(["u", None]), pa.large_string(), ["u", None]),
    "categories of numbers": (pd.Categorical([BIG, None]), I8, [BIG, None]),
    "zoned": (pd.DatetimeIndex([ZONED]), pa.timestamp("us", "UTC"), [ZONED]),
    "duration": (pd.to_timedelta([1], unit="s"), pa.duration("us"), [dt.timedelta(seconds=1)]),
    "nulls": ([None, None], pa.null(), [None, None]),
    "decimals": ([Decimal("1.5"), None], pa.decimal128(2, 1), [Decimal("1.5"), None]),
    "dates": ([dt.date(2024, 1, 1)], pa.date32(), [dt.date(2024, 1, 1)]),
    "lists": ([[1], [2, BIG]], pa.list_(I8), [[1], [2, BIG]]),
    "arrow": (pd.array([[1]], dtype=pd.ArrowDtype(pa.list_(pa.int8()))), pa.list_(pa.int8()),
              [[1]]),
    "objects and NaN": (pd.Series(["x", float("nan")], dtype=object), pa.string(), ["x", None]),
}  # fmt: skip


@pytest.mark.parametrize("kind", PANDAS)
def test_a_column_of_pandas_keeps_its_values(kind: str) -> None:
    values, dtype, wanted = PANDAS[kind]
    check(pd.DataFrame({"a": values}), dtype, wanted)


NOT_PANDAS: dict[str, tuple[Callable[[], Any], str]] = {
    "mixed": (lambda: pd.DataFrame({"a": [1, "x"]}), r"'a', a Series of object.*'x' in row 1"),
    "mixed bytes": (
        lambda: pd.DataFrame({"a": pd.Series(["x", b"y"], dtype=object)}),
        "'a', .*row 1",
    ),
    "objects": (lambda: pd.DataFrame({"a": [object()]}), "'a', a Series of object.*Series.astype"),
    "complex": (lambda: pd.DataFrame({"a": [1j]}), "'a', a Series of complex128"),
    "sparse": (
        lambda: pd.DataFrame({"a": pd.arrays.SparseArray([0, 1])}),
        "'a', a Series of Sparse",
    ),
    "numbers as names": (
        lambda: pd.DataFrame(np.zeros((1, 2))),
        r"column 0 has a name.*str\(name\)",
    ),
    "levels of names": (
        lambda: pd.DataFrame({("a", "b"): [1]}),
        r"\('a', 'b'\) has a name.*'_'.join",
    ),
    "index as a column": (
        lambda: pd.DataFrame({"a": [1]}, index=pd.Index([1], name="a")),
        "a level of the index has the name of another column, 'a'.*rename_axis",
    ),
    "one name twice": (lambda: pd.DataFrame([[1, 2]], columns=["a", "a"]), "share a name: 'a'"),
    "a number as level": (
        lambda: pd.DataFrame({"a": [1]}, index=pd.Index([1], name=5)),
        "column 5 has a name that is no text",
    ),
}


@pytest.mark.parametrize("kind", NOT_PANDAS)
def test_a_frame_of_pandas_that_is_no_table_says_what_to_do(kind: str) -> None:
    make, problem = NOT_PANDAS[kind]
    with pytest.raises(SchemaError, match=problem):
        arrow_source(make())


def series(values: list[Any], dtype: Any = None) -> Any:
    return pl.DataFrame({"a": pl.Series(values, dtype=dtype)})


VIEW = pa.string_view()
POLARS: dict[str, tuple[Any, pa.DataType, list[Any]]] = {
    "int": (series([1, None, BIG]), I8, [1, None, BIG]),
    "categories": (series(["u", None, "v"], pl.Categorical), VIEW, ["u", None, "v"]),
    "enum": (series(["u", "v"], pl.Enum(["v", "u"])), VIEW, ["u", "v"]),
    "lists of categories": (series([["u"], [None], None], pl.List(pl.Categorical)),
                            pa.large_list(VIEW), [["u"], [None], None]),
    "structs of categories": (
        series(["u"], pl.Categorical).select(pl.struct(pl.col("a").alias("x")).alias("a")),
        pa.struct([("x", VIEW)]), [{"x": "u"}],
    ),
    "half": (series([1.5], pl.Float16), pa.float16(), [1.5]),
    "decimals": (series([Decimal("1.1")]), pa.decimal128(38, 1), [Decimal("1.1")]),
    "arrays": (series([[1, 2]], pl.Array(pl.Int64, 2)), pa.list_(I8, 2), [[1, 2]]),
    "nulls": (series([None]), pa.null(), [None]),
    "structs": (series([{"x": 1}]), pa.struct([("x", I8)]), [{"x": 1}]),
    "time": (series([dt.time(1)]), pa.time64("ns"), [dt.time(1)]),
    "zoned": (series([ZONED]), pa.timestamp("us", "UTC"), [ZONED]),
}  # fmt: skip


@pytest.mark.parametrize("kind", POLARS)
@pytest.mark.parametrize("read", ["frame", "lazy", "filtered", "empty"])
def test_a_column_of_polars_keeps_its_values(kind: str, read: str) -> None:
    frame, dtype, wanted = POLARS[kind]
    if read == "frame":
        check(frame, dtype, wanted)
    elif read == "lazy":
        check(frame.lazy(), dtype, wanted)
    elif read == "filtered":
        check(pl.concat([frame, frame], rechunk=False).slice(len(frame)), dtype, wanted)
    else:
        check(frame.lazy().filter(pl.lit(value=False)), dtype, [])
        check(frame.clear(), dtype, [])


@pytest.mark.parametrize("dtype", [pl.Int128, pl.UInt128, pl.List(pl.Int128), pl.Object])
def test_a_type_of_polars_that_arrow_lacks_is_refused_by_name(dtype: Any) -> None:
    frame = series([[1]] if isinstance(dtype, pl.List) else [1], dtype)
    for data in (frame, frame.lazy()):
        with pytest.raises(
            SchemaError, match=r"^column 'a' is .* in Polars: .*(cast|map_elements)"
        ):
            arrow_source(data)


def test_one_series_and_a_group_are_no_table() -> None:
    frame = series([1])
    for data in (
        frame["a"],
        frame.group_by("a"),
        pd.Series([1]),
        np.arange(2),
        pa.array([1]),
        pa.chunked_array([[1]]),
    ):
        with pytest.raises(ConfigError, match="data must be"):
            arrow_source(data)


# -- DuckDB, Hugging Face, generators -------------------------------------------------------------


def test_a_relation_of_duckdb_keeps_its_values_or_says_what_to_write() -> None:
    duckdb = pytest.importorskip("duckdb")
    connection = duckdb.connect()
    for sql, dtype, values in (
        ("5::HUGEINT", pa.decimal128(38, 0), [Decimal(5)]),
        ("'u'::ENUM('v', 'u')", pa.string(), ["u"]),
        ("['u']::ENUM('v', 'u')[]", pa.list_(pa.field("l", pa.string())), [["u"]]),
        ("[1, 2]::FLOAT[2]", pa.list_(pa.field("", F4), 2), [[1.0, 2.0]]),
        ("'2024-01-01'::TIMESTAMP_S", pa.timestamp("s"), [dt.datetime(2024, 1, 1)]),
        ("NULL", pa.null(), [None]),
        ("1.5::DECIMAL(4, 1)", pa.decimal128(4, 1), [Decimal("1.5")]),
    ):
        check(connection.sql(f"SELECT {sql} AS a"), dtype, values)
    for sql, problem in (
        ("5::UHUGEINT", "UHUGEINT in DuckDB"),
        ("[5::UHUGEINT]", r"UHUGEINT\[\] in DuckDB"),
        ("{'x': 5::UHUGEINT}", "STRUCT"),
        ("'101'::BIT", "BIT in DuckDB"),
        ("'12:00:00+02'::TIMETZ", "loses its zone"),
        ("1::UNION(n INT, s VARCHAR)", "loses its tags"),
        (
            "170141183460469231731687303715884105727::HUGEINT",
            "is HUGEINT in DuckDB, and .* precision",
        ),
    ):
        with pytest.raises(SchemaError, match=rf"column 'a' .*{problem}.*CAST\(\"a\" AS VARCHAR\)"):
            column(connection.sql(f"SELECT {sql} AS a"))
    with pytest.raises(SchemaError, match="columns cannot share a name: 'a'"):
        arrow_source(pa.table([[1], [2]], names=["a", "a"]))


def test_hugging_face_rows_have_the_types_of_their_features(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"a": datasets.Value("int64")})
    rows = datasets.Dataset.from_dict({"a": [1, 2, BIG]}, features=features)
    kept = rows.filter(lambda row: row["a"] > 1)
    check(kept, I8, [2, BIG])
    check(rows.filter(lambda row: row["a"] < 0), I8, [])
    check(rows.to_iterable_dataset().filter(lambda row: row["a"] < 0), I8, [])
    check(rows.select([2, 0]), I8, [BIG, 1])

    def late(*values: Any) -> Any:
        return datasets.IterableDataset.from_generator(lambda: ({"a": v} for v in values))

    check(late(1, BIG), I8, [1, BIG])
    for stream in (late(None, 1), late(1, "x")):
        with pytest.raises(SchemaError, match=r"a: (null|int64).*features=datasets.Features"):
            column(stream)
    with pytest.raises(SchemaError, match=r"neither rows nor a schema: give the dataset its types"):
        column(late())


def test_a_generator_gives_parts_with_the_types_of_the_first() -> None:
    def parts(*values: Any) -> Iterator[Any]:
        yield from values

    check(parts(pa.table({"a": [1]}), {"a": np.array([2], "i4")}, pa.record_batch({"a": [3]})), I8,
          [1, 2, 3])  # fmt: skip
    check(parts(pd.DataFrame({"a": ["x"]}), series([None])), pa.large_string(), ["x", None])
    with pytest.raises(SchemaError, match=r"column 'a': 0\.1 in row 2 cannot become float"):
        column(parts(pa.table({"a": pa.array([1.5], F4)}), {"a": [2.5, 0.1]}))
    with pytest.raises(
        SchemaError, match="'a' comes as string, which cannot become int64: the first"
    ):
        column(parts({"a": [1]}, {"a": ["x"]}))
    with pytest.raises(SchemaError, match="neither rows nor a schema"):
        column(parts())
    with pytest.raises(ConfigError, match="got a str"):
        arrow_source(iter(["x"]))
