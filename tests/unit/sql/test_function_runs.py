"""Processes that compute functions: slices, the row of a failure, limits of time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from cache_protocol.errors import LoadError
from cache_server.functions.installed import function_named
from cache_server.sql.bound_functions import BoundFunction
from cache_server.sql.function_runs import FileTexts, FunctionWorkers
from tests import function_packages

ROWS = 2100


class CancelledError(Exception):
    pass


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(function_packages.install(tmp_path_factory.mktemp("packages")))
        yield
    function_named.cache_clear()


@pytest.fixture(scope="module")
def workers() -> Iterator[FunctionWorkers]:
    running = FunctionWorkers(2, 256 << 20)
    yield running
    running.close()


def batch(*bad: int) -> pa.RecordBatch:
    texts = ["bad" if row in bad else f"text {row}" for row in range(ROWS)]
    return pa.record_batch([texts], ["text"])


def name(function: str) -> str:
    return BoundFunction(function, "1", {"text": pa.string()}, pa.int32()).name


def run(workers: FunctionWorkers, function: str, rows: pa.RecordBatch) -> list[int]:
    found: list[int] = workers.run(name(function), rows, lambda name: {}).to_pylist()
    return found


def test_values_come_in_the_order_of_the_rows_and_of_none(workers: FunctionWorkers) -> None:
    expected = [len(text.as_py()) for text in batch().column(0)]
    assert run(workers, "good", batch()) == expected
    assert run(workers, "good", batch().slice(0, 0)) == []


def test_nulls_pass_without_being_seen(workers: FunctionWorkers) -> None:
    texts = pa.record_batch([[None, "a", None, "bc", None]], ["text"])
    assert run(workers, "good", texts) == [None, 1, None, 2, None]
    only = pa.record_batch([pa.nulls(3, pa.string())], ["text"])
    assert run(workers, "raises", only) == [None] * 3


@pytest.mark.parametrize("rows", [(0,), (ROWS - 1,), (1024, 1025), (7, 2000)])
def test_the_first_row_that_fails_is_named(workers: FunctionWorkers, rows: tuple[int, ...]) -> None:
    with pytest.raises(LoadError, match=rf"function raises raised KeyError.*row {rows[0]} of"):
        run(workers, "raises", batch(*rows))


def test_a_function_that_cannot_be_made_is_not_the_fault_of_a_row(
    workers: FunctionWorkers,
) -> None:
    said = r"function hogs_when_made needed more than .* of memory, before it got a row"
    with pytest.raises(LoadError, match=said):
        run(workers, "hogs_when_made", batch())


def test_a_batch_that_hangs_ends_at_its_limit_and_its_row_is_named() -> None:
    workers = FunctionWorkers(1, 256 << 20, slice_s=1.0)
    rows = pa.record_batch([["a", "b", "bad", "c"]], ["text"])
    try:
        with pytest.raises(LoadError, match=r"function hangs took longer than 1 s: row 2 of"):
            run(workers, "hangs", rows)
        assert run(workers, "good", rows) == [1, 1, 3, 1]
    finally:
        workers.close()


def test_a_batch_that_hangs_is_given_up_when_its_load_is_not_wanted_any_more() -> None:
    workers = FunctionWorkers(1, 256 << 20)

    def check() -> None:
        raise CancelledError

    try:
        with pytest.raises(CancelledError):
            workers.run(name("hangs"), batch(0), lambda name: {}, check)
        assert run(workers, "good", batch(5))[5] == 3
    finally:
        workers.close()


def test_texts_of_files_are_read_once_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    texts, read = FileTexts(), list[int]()

    def reading(number: int) -> str:
        read.append(number)
        return str(number)

    for number in (*range(9), 8, 1, 0):
        assert texts.get(f"digest {number}", lambda number=number: reading(number)) == str(number)
    assert read == [*range(9), 0]
