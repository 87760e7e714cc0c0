"""SQL in a process that may end: its limits, its errors, its rows."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from cache_protocol.errors import LoadError, RequestError
from cache_server.source.pinned import PinnedTable
from cache_server.sql import loader, sql_process
from cache_server.sql.queries import check_query
from cache_server.sql.row_queries import check_row_query
from cache_server.sql.sql_frames import Request
from cache_server.sql.sql_process import ANY, LimitError, Limits, call, lease, stream
from tests.query_source import SCHEMA, local, rows_of, table_of, whole, write_parquet

died = partial(RuntimeError, "it")


def test_a_query_that_would_take_gigabytes_while_it_is_planned_is_refused_by_name() -> None:
    for sql in (
        "SELECT a, repeat('x', 2000000000) AS b FROM source",
        "SELECT a FROM source WHERE length(lpad('x', 2000000000)) > 1",
    ):
        with pytest.raises(RequestError, match=r"needed more than 1.0 GiB of memory while it was"):
            check_query(sql, {"source": SCHEMA})


def test_an_unbounded_query_gives_the_rows_of_its_split(tmp_path: Path) -> None:
    split = write_parquet(tmp_path / "t.parquet")
    sql = "SELECT a, repeat(text, 3) AS b FROM source WHERE a % 2 = 0"

    query = check_query(sql, {"source": SCHEMA})

    assert query.keeps_every_row is False and query.drivers == {"source"}
    assert rows_of(split, sql) == [{"a": n, "b": f"row {n}" * 3} for n in range(0, 100, 2)]


def test_unbounded_whole_queries_and_groups_of_files_give_their_rows(tmp_path: Path) -> None:
    sql = "SELECT string_agg(text, '' ORDER BY a) AS t FROM source"
    path = tmp_path / "t.arrow"
    table = table_of(3)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    (batch,) = loader.run_whole(sql, {"source": path})
    assert batch.to_pylist() == [{"t": "row 0row 1row 2"}]

    (folder := tmp_path / "d").mkdir()
    files = [local(write_parquet(folder / f"{n}.parquet")) for n in range(2)]
    sql = "SELECT rpad(text, 9, '-') AS t FROM source WHERE a = 5"
    rows = loader.read_together(files, sql, PinnedTable("source", "parquet", SCHEMA))
    assert [row for batch in rows for row in batch.to_pylist()] == [{"t": "row 5----"}] * 2


def test_a_load_that_takes_more_than_its_memory_fails_by_name(tmp_path: Path) -> None:
    split = write_parquet(tmp_path / "t.parquet")
    sql = "SELECT repeat(text, 100000000) AS b FROM source"
    table = PinnedTable("source", "parquet", SCHEMA)

    with pytest.raises(LoadError, match=r"t.parquet.*the query needed more than 256.0 MiB of mem"):
        list(loader.read_split(local(split), sql, table, limits=Limits(256 << 20)))


def test_the_error_of_a_function_keeps_its_class_and_its_words() -> None:
    with pytest.raises(RequestError, match=r"where 'nope > 1': .*nope"):
        call(check_row_query, "", ("nope > 1",), SCHEMA, failure=died)


def gone() -> None:
    raise ConnectionError


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        (Limits(time_s=0.2), "took longer than 0.2 s"),
        (Limits(check=gone), None),
    ],
)
def test_a_call_ends_at_its_deadline_or_when_nobody_waits(
    limits: Limits, error: str | None
) -> None:
    with lease() as process:
        pid = process._process.pid
        expected = LimitError if error else ConnectionError
        with pytest.raises(expected, match=error):
            list(process.run(Request(time.sleep, (60,)), limits))
    assert not psutil.pid_exists(pid)


def test_a_process_that_was_killed_while_it_waited_is_replaced() -> None:
    for _ in range(2):
        assert call(check_row_query, "a + 1", (), SCHEMA, failure=died).text == "a + 1"
        for process in sql_process._POOL._idle:
            process._process.kill()
            process._process.wait()


def test_the_process_gets_no_environment_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_TOKEN", "the-token")
    sql_process._POOL.close()

    seen = call(Path.read_bytes, Path("/proc/self/environ"), failure=died)

    assert b"PYTHONPATH=" in seen and b"the-token" not in seen


def test_a_fork_starts_its_own_process() -> None:
    call(check_row_query, "a", (), SCHEMA, failure=died)
    mine = [process._process.pid for process in sql_process._POOL._idle]
    if not (pid := os.fork()):
        try:
            assert not sql_process._POOL._idle
            call(check_row_query, "a", (), SCHEMA, failure=died)
            sql_process._POOL.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert all(map(psutil.pid_exists, mine))
    assert call(check_row_query, "a", (), SCHEMA, failure=died).text == "a"


def test_notes_of_a_function_arrive(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a\n" + "007\n" * 3)
    notes: list[str] = []
    schema = pa.schema([("a", pa.int64())])
    file = local(whole(path), "csv")

    rows = stream(
        loader.read_split,
        *(file, "SELECT a FROM source", PinnedTable("source", "csv", schema)),
        limits=ANY,
        failure=died,
        note=notes.append,
    )

    assert [row["a"] for batch in rows for row in batch.to_pylist()] == [7] * 3
    assert "lost leading zeros" in notes[0]
