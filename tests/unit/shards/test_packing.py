"""Rows -> stored shards: what comes out of a shard is what went in."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cache_protocol.errors import LoadError, RequestError
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.shard_files import MappedShard, SealedShard
from cache_server.shards.draft import ShardDraft
from cache_server.shards.packing import ShardBuilder, logical_schema

ADDRESS = pa.struct([("zip", pa.int32()), ("street", pa.string())])
WITH_NULLS = {
    "number": pa.array([1, None, 3], pa.int64()),
    "price": pa.array([Decimal("1.25"), None, Decimal("-3.10")], pa.decimal128(12, 2)),
    "ok": pa.array([True, None, False]),
    "at": pa.array([1, None, 3], pa.timestamp("us", "UTC")),
    "image": pa.array([[1, 2], None, [None, 4]], pa.list_(pa.uint8(), 2)),
    "address": pa.array([{"zip": 1, "street": "a"}, None, {"zip": None, "street": "b"}], ADDRESS),
    "text": pa.array(["a", None, ""]),
}


def batch_of(*columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns), [f"c{n}" for n in range(len(columns))])


def pack(*batches: pa.RecordBatch, expected_rows: int | None = None) -> pa.RecordBatch:
    """The logical rows of a shard of these batches."""
    builder = ShardBuilder(logical_schema(batches[0].schema), expected_rows)
    for batch in batches:
        builder.append(batch)
    stored = builder.finish()
    stored.validate(full=True)
    return Layout.of_stored(stored.schema).unpack(stored)


# -- nulls -----------------------------------------------------------------------------------------


def test_nulls_of_every_kind_come_back_and_are_counted() -> None:
    batch = pa.RecordBatch.from_pydict(WITH_NULLS)
    builder = ShardBuilder(logical_schema(batch.schema))

    builder.append(batch)
    builder.append(batch.slice(2))
    stored = builder.finish()
    found = Layout.of_stored(stored.schema).unpack(stored)

    assert found.equals(pa.concat_batches([batch, batch.slice(2)]))
    assert builder.nulls == {
        "number": 1, "price": 1, "ok": 1, "at": 1, "image": 1, "image[]": 2, "address": 1,
        "address.zip": 2,
    }  # fmt: skip


def test_columns_without_nulls_have_no_bits() -> None:
    batch = pa.RecordBatch.from_pydict(WITH_NULLS).slice(0, 1)
    builder = ShardBuilder(logical_schema(batch.schema))

    builder.append(batch)

    assert builder.finish().schema.names == builder.layout.schema.names
    assert not builder.nulls


@pytest.mark.parametrize("name", WITH_NULLS)
def test_a_spec_that_refuses_nulls_gets_their_column_and_number(name: str) -> None:
    batch = pa.RecordBatch.from_pydict({name: WITH_NULLS[name]})
    builder = ShardBuilder(logical_schema(batch.schema), refuse_nulls=True)
    builder.append(batch)

    with pytest.raises(LoadError, match=rf"column '{name}.*' holds [12] nulls?, .*COALESCE"):
        builder.finish()


def test_a_null_in_a_column_that_has_none_by_its_type_is_refused() -> None:
    logical = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    builder = ShardBuilder(logical)
    builder.append(pa.RecordBatch.from_arrays([pa.array([1, None])], schema=logical))

    with pytest.raises(LoadError, match="column 'a' holds 1 null"):
        builder.finish()


def test_what_lies_under_a_null_does_not_decide_the_stored_bytes() -> None:
    def stored(hidden: int) -> pa.RecordBatch:
        values = pa.array([1, hidden], pa.int64())
        masked = pa.Array.from_buffers(
            pa.int64(), 2, [pa.py_buffer(b"\x01"), values.buffers()[1]], null_count=1
        )
        builder = ShardBuilder(pa.schema([("c0", pa.int64())]))
        builder.append(batch_of(masked))
        return builder.finish()

    assert stored(7).equals(stored(8))


# -- files -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.sets(st.sampled_from(sorted(WITH_NULLS)), min_size=1), st.booleans(), st.integers(0, 7))
def test_a_file_that_was_made_before_its_nulls_were_known_has_its_rows_in_their_places(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], has_nulls: bool, more: int
) -> None:
    columns = {name: WITH_NULLS[name] for name in sorted(names)}
    batch = pa.RecordBatch.from_pydict(columns).slice(0, 3 if has_nulls else 1)
    whole = pa.concat_batches([batch] * (1 + more))
    path: Path = tmp_path_factory.mktemp("draft") / "shard.arrow"
    path.touch()
    logical = logical_schema(batch.schema)
    assume(Layout(logical).fixed_row_bytes)
    with ShardDraft(path, Layout(logical, ()), whole.num_rows) as draft:
        builder = ShardBuilder(logical, whole.num_rows, draft)
        for _ in range(1 + more):
            builder.append(batch)
        stored = builder.finish()
        draft.complete(stored)

    mapped = MappedShard(SealedShard(0, whole.num_rows, path.stat().st_size, ""), path)

    assert mapped.layout.unpack(mapped.batch).equals(whole)


# -- types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (pa.array(["a", None]).dictionary_encode(), pa.string()),
        (pa.array(["a", None], pa.string_view()), pa.string()),
        (pa.array(["a", None]), pa.dictionary(pa.int8(), pa.string())),
        (pa.array([[1], None], pa.list_view(pa.int64())), pa.list_(pa.int64())),
    ],
)
def test_values_may_come_in_another_encoding(given: pa.Array, kept: pa.DataType) -> None:
    builder = ShardBuilder(pa.schema([("c0", kept)]))

    builder.append(batch_of(given))
    stored = builder.finish()
    found = Layout.of_stored(stored.schema).unpack(stored)

    assert found.column(0).type.equals(kept)
    assert found.column(0).to_pylist() == given.to_pylist()


@pytest.mark.parametrize(
    ("given", "kept"),
    [(pa.array([300]), pa.int8()), (pa.array([1.5]), pa.int64()), (pa.array([[1]]), pa.int64())],
)
def test_values_that_do_not_fit_their_type_are_refused_by_name(
    given: pa.Array, kept: pa.DataType
) -> None:
    builder = ShardBuilder(pa.schema([("c0", kept)]))

    with pytest.raises(LoadError, match=rf"column 'c0' comes as .*, not as {kept}"):
        builder.append(batch_of(given))


def test_types_that_cannot_be_stored_are_refused_by_name() -> None:
    union = pa.union([pa.field("a", pa.int64())], mode="sparse")

    with pytest.raises(RequestError, match=r"'u': .*union.*'v': .*union"):
        logical_schema(pa.schema([("u", union), ("ok", pa.int64()), ("v", pa.list_(union))]))


def test_names_must_be_unique_also_with_those_of_fields() -> None:
    for names in (["a.zip", "a"], ["address.zip", "address"]):
        with pytest.raises(RequestError, match="several columns, or fields of structs, are named"):
            logical_schema(pa.schema([(names[0], pa.int64()), (names[1], ADDRESS)]))
    with pytest.raises(RequestError, match="there are no columns"):
        logical_schema(pa.schema([]))


# -- rows ------------------------------------------------------------------------------------------


def test_rows_of_unknown_number_may_be_of_many_megabytes() -> None:
    width = 2**26  # of which there is no memory for tens of thousands
    image = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(width, np.uint8)), width)

    assert pack(batch_of(image)).num_rows == 1


@pytest.mark.parametrize("expected_rows", [None, 0, 5, 99, 100, 101, 100_000])
def test_the_expected_rows_are_a_hint_only(expected_rows: int | None) -> None:
    batches = [
        batch_of(pa.array(range(start, start + 10)), pa.array([str(start)] * 10))
        for start in range(0, 100, 10)
    ]

    packed = pack(*batches, expected_rows=expected_rows)

    assert packed.column(0).to_pylist() == list(range(100))
    assert packed.column(1)[99].as_py() == "90"


def test_room_grows_far_beyond_the_first_guess() -> None:
    big = pa.array(np.arange(70_000))
    images = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(140_000) % 251), 2)
    batch = batch_of(big, images)

    packed = pack(batch, batch.slice(5), batch)

    assert packed.num_rows == 3 * 70_000 - 5
    assert packed.column(0).slice(70_000, 69_995).equals(big.slice(5))
    assert packed.column(1).slice(139_995).to_pylist()[-1] == images[69_999].as_py()


@settings(max_examples=40)
@given(st.lists(st.integers(0, 20), max_size=6), st.one_of(st.none(), st.integers(0, 60)))
def test_any_batches_make_the_same_shard_as_one(
    sizes: list[int], expected_rows: int | None
) -> None:
    total = sum(sizes)
    whole = batch_of(
        pa.array(np.arange(total, dtype=np.int32)),
        pa.array(np.arange(total) / 2),
        pa.array([None if i % 3 == 0 else f"row {i}" for i in range(total)], pa.string()),
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * total, dtype=np.uint8)), 2),
    )
    parts, start = [], 0
    for size in sizes:
        parts.append(whole.slice(start, size))
        start += size

    packed = pack(*(parts or [whole]), expected_rows=expected_rows)

    assert packed.to_pylist() == whole.to_pylist()


def test_columns_are_taken_by_name_in_any_order() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1, 2], "b": [3, 4]})
    builder = ShardBuilder(logical_schema(batch.schema))

    builder.append(batch.select(["b", "a"]))

    assert builder.layout.unpack(builder.finish()).to_pydict() == {"a": [1, 2], "b": [3, 4]}


def test_the_builder_counts_its_rows_and_bytes() -> None:
    batch = batch_of(pa.array([1, 2, 3]), pa.array(["a", "bc", "d"]))
    builder = ShardBuilder(logical_schema(batch.schema))
    assert (builder.num_rows, builder.num_bytes) == (0, 0)

    builder.append(batch)

    assert builder.num_rows == 3
    assert builder.num_bytes == 3 * 8 + batch.column(1).nbytes
