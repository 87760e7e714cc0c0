from typing import Any

import pyarrow as pa
import pytest

from cache_server.tables.lake import OpenedSnapshots, conform, naming, plain_schema
from protos.errors import LoadError, RequestError

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
    with pytest.raises(LoadError, match=r"x{600}\.\.\.$"), naming("t", {}, {}):
        raise ValueError("x" * 601)
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
