"""Folders whose files several programs wrote: equal values load, whatever their layout."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError, RequestError
from cache_server.plan.pinned_version import plan_version
from tests.load_here import load_here

NOW = datetime.datetime(2024, 1, 2, 3, 4, 5, 678901)
WORDS = ["a", None, "", "word", None]
LISTS = [["a"], None, [], ["b", None], [None]]
# Column -> its values, and the types in which writers write them.
ALIKE: dict[str, tuple[list[Any], list[pa.DataType]]] = {
    "words": (
        WORDS,
        [
            *(pa.string(), pa.large_string(), pa.string_view()),
            *(pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.uint32(), pa.large_string())),
        ],
    ),
    "blobs": (
        [None if word is None else word.encode() for word in WORDS],
        [pa.binary(), pa.large_binary(), pa.binary_view()],
    ),
    "codes": ([1.5, None, 2.5, 1.5, 0.0], [pa.float64(), pa.dictionary(pa.int16(), pa.float64())]),
    "instants": (
        [NOW.replace(tzinfo=datetime.UTC)] * 5,
        [pa.timestamp("us", tz) for tz in ("UTC", "+00:00", "Etc/UTC", "Europe/Berlin")],
    ),
    "lists": (
        LISTS,
        [
            pa.list_(pa.string()),
            pa.large_list(pa.large_string()),
            pa.list_(pa.field("element", pa.string())),
            pa.list_(pa.dictionary(pa.int8(), pa.string())),
        ],
    ),
    "numbers": (
        [[1, 2]] * 5,
        [
            pa.list_(pa.int64(), 2),
            pa.list_(pa.field("item", pa.int64(), nullable=False)),
            pa.large_list(pa.int64()),
        ],
    ),
}
FILES = max(len(types) for _, types in ALIKE.values())


def write(path: Path, table: pa.Table, format: str) -> None:
    if format == "parquet":
        pq.write_table(table, path.with_suffix(".parquet"))
    else:
        with pa.ipc.new_file(path.with_suffix(".arrow"), table.schema) as writer:
            writer.write_table(table)


def load(source: Path, tmp_path: Path, **options: Any) -> pa.Table:
    return load_here(DatasetSpec("t", source, **options), tmp_path / "cache")


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_columns_that_writers_lay_out_differently_load(tmp_path: Path, format: str) -> None:
    (source := tmp_path / "source").mkdir()
    for number in range(FILES):
        columns = {
            name: pa.array(values, types[number % len(types)])
            for name, (values, types) in ALIKE.items()
        }
        # Another order of columns, too.
        names = sorted(columns, reverse=bool(number % 2))
        write(source / str(number), pa.table({name: columns[name] for name in names}), format)
    loaded = load(source, tmp_path, columns=list(ALIKE))
    for name, (values, _) in ALIKE.items():
        assert loaded.column(name).to_pylist() == values * FILES, name
    kept = load(source, tmp_path, columns=["words"], filter="words = 'word' OR words LIKE 'a%'")
    assert kept.column("words").to_pylist() == ["a", "word"] * FILES


@pytest.mark.parametrize("format", ["parquet", "arrow"])
@pytest.mark.parametrize("nulls_first", [True, False])
def test_a_column_that_is_all_null_in_a_file_has_the_type_of_the_others(
    tmp_path: Path, format: str, nulls_first: bool
) -> None:
    (source := tmp_path / "source").mkdir()
    columns = {"words": WORDS, "lists": LISTS, "reals": [0.5, None, 1.0, 2.0, None]}
    full = pa.table(columns)
    empty = pa.table(dict.fromkeys(columns, pa.nulls(2)))
    none = full.slice(0, 0)
    for number, table in enumerate([empty, full, none] if nulls_first else [full, none, empty]):
        write(source / str(number), table, format)
    loaded = load(source, tmp_path)
    nulls = [None, None]
    for name in ("words", "lists"):
        expected = [*nulls, *columns[name]] if nulls_first else [*columns[name], *nulls]
        assert loaded.column(name).to_pylist() == expected


WIDER: dict[str, tuple[pa.Array, pa.Array, str]] = {
    "decimals": (
        pa.array([decimal.Decimal("1.25000")], pa.decimal128(7, 5)),
        pa.array([decimal.Decimal("123.25000")], pa.decimal128(8, 5)),
        "decimal128(8, 5)",
    ),
    "scales": (
        pa.array([decimal.Decimal("1.25")], pa.decimal128(5, 2)),
        pa.array([decimal.Decimal("1.2500")], pa.decimal128(5, 4)),
        "decimal128(7, 4)",
    ),
    "integers": (pa.array([7], pa.int32()), pa.array([2**40], pa.int64()), "int64"),
    "signs": (pa.array([255], pa.uint8()), pa.array([-1], pa.int8()), "int16"),
    "reals": (pa.array([7], pa.int64()), pa.array([0.5]), "double"),
    "floats": (pa.array([0.5], pa.float32()), pa.array([0.1]), "double"),
    "times": (
        pa.array([NOW], pa.timestamp("us")),
        pa.array([NOW], pa.timestamp("ns")),
        "timestamp",
    ),
    "fields": (
        pa.array([{"a": 1}]),
        pa.array([{"b": "x", "a": 2}]),
        "struct<a: int64, b: string>",
    ),
    "deep": (
        pa.array([[{"a": 1}]], pa.list_(pa.struct([("a", pa.int8())]))),
        pa.array([[{"a": 300, "b": "x"}, None]]),
        "list<",
    ),
}


@pytest.mark.parametrize("format", ["parquet", "arrow"])
@pytest.mark.parametrize("name", WIDER)
def test_other_values_are_refused_or_widened_by_the_remedy(
    tmp_path: Path, name: str, format: str
) -> None:
    (source := tmp_path / "source").mkdir()
    one, other, wider = WIDER[name]
    write(source / "1", pa.table({"x": one, "only": [1.0]}), format)
    write(source / "2", pa.table({"x": other}), format)
    sql = {
        "fields": "SELECT x['a'] AS a, COALESCE(x['b'], '-') AS b FROM source",
        "deep": "SELECT x[1]['a'] AS a, COALESCE(x[1]['b'], '-') AS b FROM source",
    }.get(name, "SELECT x FROM source")
    with pytest.raises(LoadError) as caught:
        plan_version(DatasetSpec("t", source, sql=sql))
    assert f"2.{format} has other columns than" in str(caught.value)
    assert "; schema: union makes it " + wider in str(caught.value)

    loaded = load(source, tmp_path, sql=sql, schema="union")
    values = [*one.to_pylist(), *other.to_pylist()]
    if name == "fields":
        assert loaded.to_pylist() == [{"a": 1, "b": "-"}, {"a": 2, "b": "x"}]
    elif name == "deep":
        assert loaded.to_pylist() == [{"a": 1, "b": "-"}, {"a": 300, "b": "x"}]
    elif name == "times":
        assert np.diff(loaded.column("x").to_numpy()).tolist() == [0]
    else:
        assert loaded.column("x").to_pylist() == [float(x) for x in values]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_an_integer_that_no_float_has_is_refused_with_its_file(tmp_path: Path, format: str) -> None:
    (source := tmp_path / "source").mkdir()
    write(source / "1", pa.table({"x": [0.5]}), format)
    write(source / "2", pa.table({"x": [2**53 + 1]}), format)
    with pytest.raises(LoadError, match=rf"2\.{format}.*9007199254740993"):
        load(source, tmp_path, schema="union")


def test_types_without_a_common_one_are_refused_without_a_remedy(tmp_path: Path) -> None:
    for number, values in enumerate([["a"], [1], [NOW], [[1]]]):
        (source := tmp_path / f"source{number}").mkdir()
        write(source / "1", pa.table({"x": pa.array(values)}), "parquet")
        write(source / "2", pa.table({"x": [True]}), "parquet")
        with pytest.raises(LoadError, match=r"x is bool instead of") as caught:
            plan_version(DatasetSpec("t", source, schema="union"))
        assert "schema: union" not in str(caught.value)


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_extension_types_come_back_as_they_came(tmp_path: Path, format: str) -> None:
    (source := tmp_path / "source").mkdir()
    pixels = np.arange(4 * 3 * 2, dtype=np.float32).reshape(4, 3, 2)
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)
    uuids = pa.array([bytes([number]) * 16 for number in range(4)], pa.binary(16))
    table = pa.table(
        {
            "pixels": tensor,
            "id": pa.ExtensionArray.from_storage(pa.uuid(), uuids),
            "doc": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}'] * 4)),
            "flag": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1, 2, 0], pa.int8())),
        }
    )
    write(source / "1", table.slice(0, 1), format)
    write(source / "2", table.slice(1), format)
    loaded = load(source, tmp_path, filter="flag >= 0 AND doc LIKE '%a%'")
    assert loaded.combine_chunks().equals(table)


def test_a_tensor_with_permuted_dimensions_comes_back_as_it_came(tmp_path: Path) -> None:
    dtype = pa.fixed_shape_tensor(pa.int8(), [3, 2], permutation=[1, 0])
    array = pa.ExtensionArray.from_storage(dtype, pa.array([[1] * 6], pa.list_(pa.int8(), 6)))
    (source := tmp_path / "source").mkdir()
    write(source / "1", pa.table({"pixels": array}), "parquet")
    assert load(source, tmp_path).combine_chunks().equals(pa.table({"pixels": array}))


def save_like_hugging_face(folder: Path, table: pa.Table, *, files: int = 1) -> Path:
    """A folder like that of ``Dataset.save_to_disk``: Arrow streams beside JSON."""
    folder.mkdir(parents=True)
    for name in ("state.json", "dataset_info.json"):
        (folder / name).write_text('{\n  "a": 1\n}')
    step = -(-table.num_rows // files)
    for number in range(files):
        path = folder / f"data-{number:05d}-of-{files:05d}.arrow"
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table.slice(number * step, step))
    return folder


def test_a_dataset_that_hugging_face_saved_loads(tmp_path: Path) -> None:
    table = pa.table({"a": range(5), "words": WORDS})
    saved = save_like_hugging_face(tmp_path / "saved", table, files=2)
    for options in ({}, {"format": "arrow"}):
        assert load(saved, tmp_path, **options).to_pylist() == table.to_pylist()


def test_the_datasets_of_a_saved_dict_are_not_mixed(tmp_path: Path) -> None:
    table = pa.table({"a": range(5)})
    for split in ("train", "test"):
        save_like_hugging_face(tmp_path / "saved" / split, table)
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for options in ({}, {"format": "arrow"}):
        with pytest.raises(RequestError, match="name the folders to load, among test, train"):
            plan_version(DatasetSpec("t", tmp_path / "saved", **options))
    both = [tmp_path / "saved/train", tmp_path / "saved/test"]
    assert load_here(DatasetSpec("t", both), tmp_path / "cache").num_rows == 10


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_arrow_files_of_polars_load(tmp_path: Path, compression: Any) -> None:
    frame = polars.DataFrame(
        {
            "words": WORDS,
            "lists": LISTS,
            "kinds": polars.Series(["u", "v", None, "u", "w"], dtype=polars.Categorical),
        }
    )
    path = tmp_path / "t.arrow"
    frame.write_ipc(path, compression=compression)
    assert load(path, tmp_path).to_pylist() == frame.to_dicts()
    frame.lazy().sink_ipc(path)
    assert load(path, tmp_path, filter="words = 'word'").to_pylist() == frame[3:4].to_dicts()
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(LoadError, match=r"t\.arrow: its rows end at byte .* joined by cat"):
        load(path, tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_type_that_arrow_lacks_is_refused_with_its_file(tmp_path: Path, suffix: str) -> None:
    frame, path = polars.DataFrame({"x": [1]}), tmp_path / f"2.{suffix}"
    for name, column in (("1", frame), ("2", frame.cast(polars.Int128))):
        write = column.write_parquet if suffix == "parquet" else column.write_ipc
        write(tmp_path / f"{name}.{suffix}")
    with pytest.raises(LoadError, match=f"{path}.*: Integers with more than 64 bits"):
        plan_version(DatasetSpec("t", tmp_path))
