import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_protocol.errors import LoadError, RequestError
from cache_server.source.pinned import SourceFile
from cache_server.tables import lake
from cache_server.tables.lake import OpenedSnapshots, conform, naming, plain_schema

SCHEMA = pa.schema([("id", pa.int64()), ("part", pa.string())])


def test_a_snapshot_is_opened_once_for_the_same_settings() -> None:
    opened = OpenedSnapshots[object]()
    first = opened.get("a", {"x": "1"}, {"y": "2"}, object)
    assert opened.get("a", {"x": "1"}, {"y": "2"}, object) is first
    for others in (("b", {"x": "1"}, {"y": "2"}), ("a", {}, {"y": "2"}), ("a", {"x": "1"}, {})):
        assert opened.get(*others, object) is not first


def test_an_old_snapshot_is_opened_again() -> None:
    opened = OpenedSnapshots[object](max_age_s=-1.0)
    assert opened.get("a", {}, {}, object) is not opened.get("a", {}, {}, object)


def test_the_last_snapshots_are_kept() -> None:
    opened = OpenedSnapshots[object]()
    first, second = (opened.get(state, {}, {}, object) for state in (1, 2))
    for state in range(3, 9):
        opened.get(state, {}, {}, object)
        assert opened.get(1, {}, {}, object) is first
    opened.get(9, {}, {}, object)
    assert opened.get(1, {}, {}, object) is first
    assert opened.get(2, {}, {}, object) is not second


def test_a_failure_is_not_kept() -> None:
    def fail() -> Any:
        raise OSError("gone")

    opened = OpenedSnapshots[int]()
    with pytest.raises(OSError, match="gone"):
        opened.get("a", {}, {}, fail)
    assert opened.get("a", {}, {}, lambda: 7) == 7


@pytest.mark.parametrize(
    ("secrets", "text"),
    [
        ({"key": "hush/hush"}, "no hush/hush and no hush%2Fhush"),
        (
            {"uri": "postgresql://me:hu@sh@db/c"},
            "no hu@sh and no \x1b[31mpostgresql://me:hu@sh@db/c",
        ),
        ({"token": "hush", "empty": ""}, "no hush\n\n ↳ and no hush"),
        ({"bad": "http://[me:hush@h"}, "no hush and no http://[me:hush@h"),
    ],
)
def test_a_failure_is_one_line_without_a_secret(secrets: dict[str, str], text: str) -> None:
    with (
        pytest.raises(LoadError) as caught,
        naming("table t", {"aws_endpoint_url": "http://h"}, secrets),
    ):
        raise ValueError(text)
    assert str(caught.value) == "cannot read table t from http://h: no *** and no ***"
    assert caught.value.__suppress_context__


def test_a_long_failure_is_cut_and_one_of_ours_is_let_through() -> None:
    with pytest.raises(LoadError, match=r"x{200}\.\.\.x{194}reason$"), naming("t", {}, {}):
        raise ValueError(f"{'x' * 601}reason")
    with pytest.raises(RequestError, match=r"^mine$"), naming("t", {}, {}):
        raise RequestError("mine")


def test_constants_go_before_columns_and_no_columns_are_still_rows() -> None:
    batch = pa.record_batch({"part": ["a", "b"], "id": pa.array([1, 2], pa.int32())})
    (found,) = conform(batch, SCHEMA, {"part": pa.scalar(None, pa.string())})
    assert found.schema == SCHEMA
    assert found.to_pylist() == [{"id": 1, "part": None}, {"id": 2, "part": None}]
    (found,) = conform(batch, pa.schema([]))
    assert found.num_rows == 2


def test_a_plain_schema_has_small_offsets_and_no_extension_or_view() -> None:
    wide = pa.schema(
        [
            pa.field("u", pa.uuid(), nullable=False),
            ("s", pa.large_list(pa.struct([("v", pa.string_view()), ("b", pa.large_binary())]))),
            ("m", pa.map_(pa.large_string(), pa.binary_view())),
        ]
    )
    plain = pa.schema(
        [
            pa.field("u", pa.binary(16), nullable=False),
            ("s", pa.list_(pa.struct([("v", pa.string()), ("b", pa.binary())]))),
            ("m", pa.map_(pa.string(), pa.binary())),
        ]
    )
    assert plain_schema(wide).equals(plain)


@given(st.integers(0, 500), st.integers(1, 70))
def test_samples_lie_evenly_over_all_files(total: int, most: int) -> None:
    chosen = list(lake.evenly(total, most))
    assert len(chosen) == min(total, most)
    assert chosen == sorted(set(chosen)) and all(0 <= index < total for index in chosen)
    steps = [b - a for a, b in itertools.pairwise(chosen)]
    assert not steps or max(steps) - min(steps) <= 1


def test_of_many_files_the_footers_of_some_foretell_the_others(tmp_path: Path) -> None:
    """Files of no Parquet, which have none, do not count."""
    text = pa.table({"text": ["x" * 96] * 10})
    pq.write_table(text, tmp_path / "a.parquet")
    footer = pq.read_metadata(tmp_path / "a.parquet")
    files = [lake.DataFile(SourceFile(str(n), 1, 0), 10) for n in range(1000)]
    asked = []

    def footer_of(data: lake.DataFile) -> lake.Footer | None:
        asked.append(data)
        return None if len(asked) == 1 else (footer, lambda field: field.name)

    splits = lake.cut(files, text.schema, footer_of)
    fixed = lake.cut(files, pa.schema([("n", pa.int16())]), footer_of)

    assert len(asked) == lake.MOST_FOOTERS
    assert lake.bytes_by(len(files)) == "the footers of 64 of its files"
    assert lake.bytes_by(lake.MOST_FOOTERS) == ""
    assert [split.estimated_bytes for split in splits] == [10 * (96 + 4)] * 1000
    assert [split.estimated_bytes for split in fixed] == [10 * 2] * 1000
