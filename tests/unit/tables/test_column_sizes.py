"""What strings and lists take once they are stored, as the footer of a Parquet file tells."""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_server.sql.formats.footer_bytes import encrypted_columns
from cache_server.tables import column_sizes
from cache_server.tables.column_sizes import plain_bytes, value_bytes

TEXTS = st.lists(st.none() | st.text(max_size=20), min_size=1, max_size=30)
LISTS = st.lists(
    st.none() | st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=30
)  # fmt: skip


def foretold(table: pa.Table, fields: list[pa.Field], **options: Any) -> list[int]:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    footer = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    return [
        sum(sizes)
        for sizes in zip(*plain_bytes(footer, [(f, f.name) for f in fields]), strict=True)
    ]


@given(TEXTS)
def test_strings_are_foretold_exactly(texts: list[str | None]) -> None:
    table = pa.table({"a": pa.array(texts, pa.string())})

    (size,) = foretold(table, [table.schema.field("a")], row_group_size=7)

    assert size == sum(len((text or "").encode()) + 4 for text in texts)


@given(LISTS)
def test_lists_of_numbers_are_foretold_exactly_in_the_type_that_is_stored(
    lists: list[list[int] | None],
) -> None:
    table = pa.table({"a": pa.array(lists, pa.list_(pa.int8()))})
    values = sum(len(row or ()) for row in lists)

    narrow, wide = (
        foretold(table, [pa.field("a", pa.list_(dtype))], row_group_size=7)
        for dtype in (pa.int8(), pa.float64())
    )

    assert narrow == [4 * len(lists) + values]
    assert wide == [4 * len(lists) + 8 * values]


@pytest.mark.parametrize(
    ("dtype", "stored", "row_bytes"),
    [
        (pa.list_(pa.string()), pa.list_(pa.string()), 4 + 2 * (4 + 3)),
        (pa.list_(pa.string()), pa.large_list(pa.large_string()), 8 + 2 * (8 + 3)),
        (pa.list_(pa.string(), 2), pa.list_(pa.string()), 4 + 2 * (4 + 3)),
        (pa.list_(pa.binary(3)), pa.list_(pa.binary()), 4 + 2 * (4 + 3)),
    ],
)
def test_lists_of_strings_have_offsets_of_both(
    dtype: pa.DataType, stored: pa.DataType, row_bytes: int
) -> None:
    table = pa.table({"a": pa.array([[b"abc", b"xyz"]] * 50, dtype)})

    assert foretold(table, [pa.field("a", stored)]) == [50 * row_bytes]


def test_a_field_of_a_struct_counts_as_a_column() -> None:
    rows = [{"n": 1, "t": "four"}] * 10
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"s": rows, "t": ["x"] * 10}), sink)
    footer = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    text = pa.field("a", pa.string())

    sizes = plain_bytes(footer, [(text, "s.t"), (text, "t"), (text, "absent"), (text, 9)])

    assert sizes == [[80, 50, 40, 90]]


def test_a_value_for_all_rows_is_as_long_as_it_is() -> None:
    assert value_bytes(pa.field("a", pa.string()), "é") == 6
    assert value_bytes(pa.field("a", pa.large_string()), None) == 8


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_strings_are_nearly_foretold_where_the_writer_kept_no_sizes(
    monkeypatch: pytest.MonkeyPatch, use_dictionary: bool
) -> None:
    monkeypatch.setattr(
        column_sizes, "unencoded_bytes", lambda f: [[None] * f.num_columns] * f.num_row_groups
    )
    table = pa.table({"a": ["some words", "as many ch"] * 500})

    (size,) = foretold(table, [table.schema.field("a")], use_dictionary=use_dictionary)

    assert size == pytest.approx(1000 * 14, rel=0.05)


def test_a_footer_with_an_endless_integer_is_left_to_pyarrow() -> None:
    footer = b"\x15" + b"\xff" * 2**20  # a structure whose first field is an integer
    tail = footer + len(footer).to_bytes(4, "little") + b"PAR1"
    assert encrypted_columns(tail) == []
