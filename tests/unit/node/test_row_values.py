import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cache_protocol.errors import InvalidRowsError, NotReadyError, RequestError
from cache_protocol.storage.memory_budget import ExpressionMemory
from cache_protocol.storage.shard_files import MappedShard, SealedShard
from cache_server.node import row_values
from cache_server.node.row_values import Caller, RowValues
from cache_server.shards.packing import ShardBuilder, logical_schema
from cache_server.shards.resident_rows import ResidentRows
from cache_server.shards.version_key import VersionKey
from tests.stored_rows import KEY, LAYOUT, mapped

SIZES = [5, 7, 3]
ONE = ExpressionMemory(at_once=1, of_namespace=1, num_bytes=512 << 20)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> ResidentRows:
    """Rows 0 to 14 in three shards; the last one is on another node."""
    directory = tmp_path_factory.mktemp("shards")
    shards = {0: mapped(directory, 0, range(5)), 5: mapped(directory, 1, range(5, 12))}
    return ResidentRows(KEY, LAYOUT, sum(SIZES), shards)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The conditions that were evaluated."""
    found: list[str] = []
    compute = RowValues._computed

    def noting(
        values: RowValues, expression: str, where: tuple[str, ...], *others: Any
    ) -> tuple[pa.Schema, list[pa.Array]]:
        found.extend(where)
        return compute(values, expression, where, *others)

    monkeypatch.setattr(RowValues, "_computed", noting)
    return found


def selected(
    values: RowValues, rows: ResidentRows, start: int, stop: int, where: str, principal: str = ""
) -> list[int]:
    schema, (numbers,) = values.answer(rows, start, stop, "", (where,), Caller(principal=principal))
    assert schema == pa.schema([("row", pa.uint32())])
    found: list[int] = numbers.to_pylist()
    return found


def test_values_are_those_of_the_rows_asked_for_in_their_order(rows: ResidentRows) -> None:
    values = RowValues(lambda: None, ONE)

    for expression, expected in {
        "wide": [-6, -7, -8],
        "a + b": [15.0, 17.5, 20.0],
        "array_length(tags)": [0, 1, 2],
        "text": ["row 6", "row 7", "row 8"],
        "image[2]": [(3 * n + 1) % 251 for n in (6, 7, 8)],
    }.items():
        schema, pieces = values.answer(rows, 6, 9, expression, ())
        assert schema.names == ["value"]
        assert [v for piece in pieces for v in piece.to_pylist()] == expected
    _, pieces = values.answer(rows, 5, 12, "row", ("row % 3 = 0", "row > 0"))
    assert [v for piece in pieces for v in piece.to_pylist()] == [6, 9]


def test_rows_of_a_condition_count_from_the_first_row_asked_for(
    rows: ResidentRows, runs: list[str]
) -> None:
    values = RowValues(lambda: None, ONE)

    assert selected(values, rows, 5, 12, '"row" % 2 = 0') == [1, 3, 5]
    assert selected(values, rows, 7, 12, '"row" % 2 = 0') == [1, 3]
    assert selected(values, rows, 7, 10, '"row" % 2 = 0') == [1]
    assert selected(values, rows, 0, 5, '"row" % 2 = 0') == [0, 2, 4]
    assert len(runs) == 2, "once a shard"


@pytest.mark.parametrize(
    ("start", "stop", "error"),
    [
        (4, 6, InvalidRowsError),
        (3, 3, InvalidRowsError),
        (14, 16, InvalidRowsError),
        (12, 15, NotReadyError),
    ],
)
@pytest.mark.parametrize(("expression", "where"), [("row", ()), ("", ("row > 1",))])
def test_rows_of_several_shards_or_of_other_nodes_are_refused(
    rows: ResidentRows,
    start: int,
    stop: int,
    error: type[Exception],
    expression: str,
    where: tuple[str, ...],
) -> None:
    with pytest.raises(error):
        RowValues(lambda: None, ONE).answer(rows, start, stop, expression, where)


def test_callers_who_ask_at_the_same_time_share_one_evaluation(
    rows: ResidentRows, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, begun, may_end = (
        RowValues(lambda: None, ONE),
        threading.Event(),
        threading.Event(),
    )
    joined = row_values._joined

    def late(pieces: list[row_values.RowNumbers]) -> row_values.RowNumbers:
        begun.set()
        assert may_end.wait(60)
        return joined(pieces)

    monkeypatch.setattr(row_values, "_joined", late)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(selected, values, rows, 0, 5, "wide < -2") for _ in range(3)]
        assert begun.wait(60)
        may_end.set()

        assert [answer.result() for answer in answers] == [[3, 4]] * 3
    assert len(runs) == 1


def test_what_the_shards_leave_no_room_for_is_freed_the_oldest_first(
    rows: ResidentRows, runs: list[str]
) -> None:
    free = 48
    values = RowValues(lambda: free, ONE)
    for bound in (1, 0, 1, 2):  # 3, 4 and 2 rows of 4 bytes
        selected(values, rows, 0, 5, f'"row" > {bound}')
    assert (len(runs), values.num_bytes) == (3, 36)

    free = 20
    values.trim()

    assert values.num_bytes == 20
    selected(values, rows, 0, 5, '"row" > 1')
    assert len(runs) == 3
    selected(values, rows, 0, 5, '"row" > 0')
    assert len(runs) == 4


@pytest.mark.parametrize("limit", ["bytes", "number"])
def test_a_principal_who_asks_for_much_evicts_nothing_of_another(
    rows: ResidentRows, runs: list[str], monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    if limit == "number":
        monkeypatch.setattr(row_values, "MAX_KEPT", 4)
    values = RowValues(lambda: 60 if limit == "bytes" else None, ONE)
    for least in (3, 2):  # 1 and 2 rows of 4 bytes
        selected(values, rows, 0, 5, f'"row" > {least}', "team a")
    for number in range(20):
        selected(values, rows, 0, 5, f'"row" > {number} - {number}', "team b")  # 4 rows
    assert (len(runs), values.num_bytes) == (22, 60 if limit == "bytes" else 12 + 2 * 16)

    for least in (3, 2):
        selected(values, rows, 0, 5, f'"row" > {least}', "team b")
    assert len(runs) == 22, "those of another principal are used, too"
    selected(values, rows, 0, 5, '"row" > 19 - 19', "team b")
    selected(values, rows, 0, 5, '"row" > 0 - 0', "team b")
    assert len(runs) == 23, "the oldest is gone"


def test_what_is_kept_does_not_contain_the_text_of_its_condition(rows: ResidentRows) -> None:
    values = RowValues(lambda: None, ONE)
    selected(values, rows, 0, 5, f"\"text\" <> '{'x' * 4000}'")

    (name,) = values._kept
    assert len(pickle.dumps(name)) < 300


def test_a_request_waits_a_bounded_time_for_its_turn_and_for_another_request(
    rows: ResidentRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_values, "MAX_WAIT_S", 0.01)
    values, begun, may_end = (
        RowValues(lambda: None, ONE),
        threading.Event(),
        threading.Event(),
    )
    joined = row_values._joined

    def late(pieces: list[row_values.RowNumbers]) -> row_values.RowNumbers:
        begun.set()
        assert may_end.wait(60)
        return joined(pieces)

    monkeypatch.setattr(row_values, "_joined", late)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(selected, values, rows, 0, 5, "wide < -2")
        try:
            assert begun.wait(60)
            for expression, where in (("", ("wide < -2",)), ("", ("wide < -3",)), ("wide", ())):
                with pytest.raises(NotReadyError, match=r"longer than 0.01 s: try again"):
                    values.answer(rows, 0, 5, expression, where)
        finally:
            may_end.set()
        assert first.result() == [3, 4]
    assert selected(values, rows, 0, 5, "wide < -3") == [4], "its failure is not kept"


def test_the_number_of_conditions_that_are_kept_is_bounded(
    rows: ResidentRows, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_values, "MAX_KEPT", 2)
    values = RowValues(lambda: None, ONE)

    for bound in (5, 6, 7, 7, 6, 5):  # none of them keeps a row
        assert selected(values, rows, 0, 5, f'"row" > {bound}') == []

    assert len(runs) == 4


def test_a_version_that_is_gone_keeps_nothing(rows: ResidentRows) -> None:
    values = RowValues(lambda: None, ONE)
    selected(values, rows, 0, 5, "wide < -2")

    values.forget(VersionKey("table", "f2"))
    assert values.num_bytes == 8
    values.forget(KEY)
    assert values.num_bytes == 0


def test_a_condition_that_fails_is_evaluated_again(rows: ResidentRows, runs: list[str]) -> None:
    values = RowValues(lambda: None, ONE)

    for _ in range(2):
        with pytest.raises(RequestError, match="Divide by zero"):
            selected(values, rows, 0, 5, '1 / "row" > 0')
    assert len(runs) == 2 and values.num_bytes == 0


def test_answers_and_waiting_requests_are_bounded(
    rows: ResidentRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = RowValues(lambda: None, ONE)
    monkeypatch.setattr(row_values, "MAX_VALUE_BYTES", 32)
    with pytest.raises(RequestError, match="ask for fewer rows"):
        values.answer(rows, 0, 5, "row", ())

    monkeypatch.setattr(row_values, "MAX_WAITING", 0)
    with pytest.raises(NotReadyError, match="0 other requests of 'team a'"):
        values.answer(rows, 0, 5, "row", (), Caller(principal="team a"))


def test_dates_times_and_booleans_are_seen_as_in_the_source(tmp_path: Path) -> None:
    source = pa.RecordBatch.from_pydict(
        {
            "bool": [True, False],
            **{
                str(dtype): pa.array([1, 2], _integer(dtype)).view(dtype)
                for dtype in (
                    pa.date32(), pa.date64(), pa.time32("ms"), pa.time64("ns"), pa.duration("s"),
                    pa.timestamp("us"), pa.timestamp("ms", "Europe/Oslo"),
                )
            },
        }
    )  # fmt: skip
    builder = ShardBuilder(logical_schema(source.schema))
    builder.append(source)
    path = tmp_path / "0.arrow"
    with pa.ipc.new_file(str(path), builder.layout.schema) as writer:
        writer.write_batch(builder.finish())
    shard = MappedShard(SealedShard(0, 2, path.stat().st_size, ""), path)
    rows = ResidentRows(KEY, builder.layout, 2, {0: shard})

    (lot,) = rows.lots(0, 2, source.schema.names, 1 << 20)

    assert lot.to_pydict() == source.to_pydict()
    assert lot.schema.types == source.schema.types


def _integer(dtype: pa.DataType) -> pa.DataType:
    return pa.int32() if dtype.bit_width == 32 else pa.int64()
