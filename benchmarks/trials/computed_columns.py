"""Generated computed columns, for `differential`: types and values as DataFusion gives them alone.

A load plans the types before it reads a row, so they must be those of the rows that come. The rows
of a bare session over the same table are the truth.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datafusion import SessionConfig, SessionContext

from benchmarks.trials.outcome import Outcome
from cache_protocol.errors import LoadError, RequestError
from cache_server.source.pinned import PinnedTable
from cache_server.sql.loader import read_split, run_whole
from cache_server.sql.planned_types import is_alike, other_types
from cache_server.sql.queries import Query, check_query
from cache_server.sql.row_queries import check_row_query, run_row_query
from tests.query_source import local, whole

_COLUMNS_A_QUERY = 6
_NUMBERS = [0, 1, 2, 3, 7, 100, 101]
_TEXTS = ["", "a", "ab", "é", "1", "-1", "1.5", "2024-02-29"]
_TIMES = [datetime(1994, 1, 1), datetime(2024, 2, 29, 12, 0, 0, 500_000), datetime(1969, 12, 31)]
_DECIMALS = {"d9": pa.decimal128(9, 2), "d20": pa.decimal128(20, 4), "d38": pa.decimal128(30, 10)}
_TIME_TYPES = {
    **{f"t_{unit}": pa.timestamp(unit) for unit in ("ms", "us", "ns")},
    **{f"z_{unit}": pa.timestamp(unit, "Europe/Berlin") for unit in ("ms", "us", "ns")},
    "y_us": pa.timestamp("us", "America/New_York"),
}
# Columns and constants of each family, of mixed widths.
_ATOMS = {
    "integer": [
        *("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "0", "1", "16777217", "NULL"),
        *("CAST(1 AS TINYINT)", "CAST(2 AS SMALLINT)", "CAST(3 AS INT UNSIGNED)"),
    ],
    "float": [
        *("f32", "f64", "f32", "f64", "0.1", "16777217.0", "1e10", "CAST(0 AS FLOAT)"),
        *("CAST(0.1 AS DOUBLE)", "CAST('NaN' AS DOUBLE)"),
    ],
    "decimal": [*_DECIMALS, "CAST(1.25 AS DECIMAL(4, 2))", "CAST(7 AS DECIMAL(38, 0))"],
    "text": ["text", "large", "'x'", "''", "NULL"],
    "time": ["t_ms", "t_us", "t_ns", "day", "TIMESTAMP '2024-02-29 12:00:00'", "DATE '1994-01-01'"],
    "moment": [
        *("z_ms", "z_us", "z_ns", "y_us", "TIMESTAMPTZ '2024-02-29 12:00:00 -05:00'"),
        *("t_us AT TIME ZONE 'Europe/Berlin'", "CAST(t_ms AS TIMESTAMPTZ)"),
    ],
    "flag": ["flag", "true", "false", "NULL"],
}
_CHOICES = [  # for values of any one family
    "CASE WHEN {c} THEN {0} ELSE {1} END",
    "CASE WHEN {c} THEN {0} WHEN {c} THEN {1} ELSE {2} END",
    "CASE WHEN {c} THEN {0} END",
    "CASE WHEN {0} IS NULL THEN {1} ELSE {0} END",
    "coalesce({0}, {1})",
    "coalesce({0}, {1}, {2})",
    "nvl({0}, {1})",
    "nullif({0}, {1})",
    "greatest({0}, {1})",
    "least({0}, {1}, {2})",
]
_OPERATIONS = {
    "integer": ["{0} + {1}", "{0} - {1}", "{0} * {1}", "abs({0})", "CAST({0} AS INT)", "-{0}"],
    "float": [
        *("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / {1}", "abs({0})", "sqrt(abs({0}))"),
        *("CAST({0} AS FLOAT)", "round({0}, 1)", "floor({0})", "power({0}, 2)"),
    ],
    "decimal": ["{0} + {1}", "{0} - {1}", "{0} * {1}", "CAST({0} AS DECIMAL(30, 3))", "round({0})"],
    "text": ["{0} || {1}", "concat({0}, {1})", "upper({0})", "substr({0}, 1, 1)", "trim({0})"],
    "time": [
        *("date_trunc('day', {0})", "{0} + INTERVAL '1 day'", "CAST({0} AS DATE)"),
        "CAST({0} AS TIMESTAMP)",
    ],
    "moment": ["date_trunc('day', {0})", "{0} + INTERVAL '1 day'", "CAST({0} AS TIMESTAMPTZ)"],
    "flag": ["NOT {0}", "{0} AND {1}", "{0} OR {1}"],
}
_MIXED = [("integer", "float"), ("integer", "decimal"), ("float", "decimal"), ("integer", "text")]
_AGGREGATES = ["sum", "avg", "min", "max", "count", "array_agg", "first_value", "stddev"]


def _table(rng: random.Random, num_rows: int) -> pa.Table:
    """A table of mixed widths, with values that single precision cannot hold."""

    def column(dtype: pa.DataType, draw: Callable[[], Any]) -> pa.Array:
        values = [None if rng.random() < 0.2 else draw() for _ in range(num_rows)]
        return pa.array(values, dtype)

    columns: dict[str, pa.Array] = {"row": pa.array(range(num_rows), pa.int64())}
    for bits in (8, 16, 32, 64):
        wide = [16_777_217] * (bits >= 32) + [2**53 + 1] * (bits == 64)
        for sign, kind in (("i", "int"), ("u", "uint")):
            dtype = getattr(pa, f"{kind}{bits}")()
            columns[f"{sign}{bits}"] = column(dtype, lambda w=wide: rng.choice([*_NUMBERS, *w]))
    floats = [0.0, -0.0, 0.1, 1.5, -2.5, 3.0, float("nan"), float("inf")]
    columns["f32"] = column(pa.float32(), lambda: rng.choice(floats))
    columns["f64"] = column(pa.float64(), lambda: rng.choice([*floats, 16_777_217.0, 1e300]))
    for name, dtype in _DECIMALS.items():
        columns[name] = column(dtype, lambda: Decimal(rng.choice([0, 125, -125, 99_999])) / 100)
    columns["text"] = column(pa.string(), lambda: rng.choice(_TEXTS))
    columns["large"] = column(pa.large_string(), lambda: rng.choice(_TEXTS))
    columns["flag"] = column(pa.bool_(), lambda: rng.random() < 0.5)
    for name, dtype in _TIME_TYPES.items():
        columns[name] = column(
            dtype, lambda: rng.choice(_TIMES) + timedelta(milliseconds=rng.choice([0, 1, 999]))
        )
    columns["day"] = column(pa.date32(), lambda: rng.choice(_TIMES).date())
    columns["numbers"] = column(pa.list_(pa.float32()), lambda: [0.1] * rng.randint(0, 2))
    return pa.table(columns)


class _Generator:
    """Draws expressions and queries over `_table`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def value(self) -> str:
        """An expression over one row."""
        draw, family = self._rng.random(), self._rng.choice(list(_ATOMS))
        if draw < 0.45:
            return self._choice([family])
        if draw < 0.65:
            return self._choice(list(self._rng.choice(_MIXED)))
        if draw < 0.75:
            items = [self._of(family, 1) for _ in range(self._rng.randint(1, 3))]
            name = self._rng.choice(["make_array({})", "[{}]"])
            return name.format(", ".join(items))
        if draw < 0.8:
            return f"named_struct('a', {self._of(family, 1)}, 'b', {self._choice(['float'])})"
        if draw < 0.85:
            item = self._choice(["integer", "float"])
            return self._rng.choice(
                [f"array_append(numbers, {item})", f"array_concat(numbers, [{item}])"]
            )
        if draw < 0.9:
            return f"EXTRACT({self._rng.choice(['YEAR', 'DAY', 'EPOCH'])} FROM {self._of('time')})"
        return self._of(family)

    def whole_query(self) -> str:
        """A query with columns of its whole table."""
        draw = self._rng.random()
        if draw < 0.4:
            family = self._rng.choice(list(_ATOMS))
            mixed = [family, *self._rng.choice(_MIXED)[:1]] if draw < 0.1 else [family]
            kind = self._rng.choice(["UNION ALL", "UNION", "UNION ALL"])
            parts = [self._of(self._rng.choice(mixed), 1) for _ in range(self._rng.randint(2, 3))]
            selects = [f"SELECT {part} AS x, row AS r FROM source" for part in parts]
            return f"{f' {kind} '.join(selects)} ORDER BY r, x"
        if draw < 0.65:
            name = self._rng.choice(_AGGREGATES)
            family = "float" if name in ("avg", "stddev") else self._rng.choice(list(_ATOMS))
            argument = self._choice([family])
            ordered = " ORDER BY row" if name in ("array_agg", "first_value") else ""
            group = self._choice(["integer"])
            call = f"{name}({argument}{ordered})"
            if self._rng.random() < 0.5:
                return f"SELECT {call} AS x FROM source"
            return f"SELECT {group} AS g, {call} AS x FROM source GROUP BY {group} ORDER BY g"
        if draw < 0.85:
            value = self._choice([self._rng.choice(["integer", "float", "decimal"])])
            call = self._rng.choice(
                [f"lag({value}, 1, 0)", f"sum({value})", f"max({value})", f"first_value({value})"]
            )
            return f"SELECT {call} OVER (ORDER BY row) AS x FROM source ORDER BY row"
        value = self._choice(["integer", "float"])
        return f"SELECT q.x + 1 AS x FROM (SELECT {value} AS x FROM source) q"

    def _choice(self, families: Sequence[str]) -> str:
        parts = [self._of(self._rng.choice(families), 1) for _ in range(3)]
        return self._rng.choice(_CHOICES).format(*parts, c=self._condition())

    def _of(self, family: str, depth: int = 0) -> str:
        if depth < 2 and self._rng.random() < 0.3:
            parts = [self._of(family, depth + 1) for _ in range(2)]
            return f"({self._rng.choice(_OPERATIONS[family]).format(*parts)})"
        return self._rng.choice(_ATOMS[family])

    def _condition(self) -> str:
        column = self._rng.choice(["f32", "i32", "u8", "text", "t_us", "flag"])
        return self._rng.choice([f"{column} IS NULL", "flag", "i8 > 1", "row % 2 = 0"])


class _Columns:
    """One table, read by a bare session and by loads."""

    def __init__(self, seed: int, directory: Path, outcome: Outcome) -> None:
        self._rng, self._outcome = random.Random(seed), outcome
        self.generator = _Generator(self._rng)
        path, self._spooled = directory / "columns.parquet", directory / "columns.arrow"
        pq.write_table(_table(self._rng, 40), path, row_group_size=16)
        self._split, self._rows = whole(path), pq.read_table(path)
        with pa.ipc.new_file(self._spooled, self._rows.schema) as file:
            file.write_table(self._rows)
        config = SessionConfig().set("datafusion.execution.time_zone", "UTC")
        self._bare = SessionContext(config.with_target_partitions(1))
        self._bare.register_record_batches("source", [self._rows.to_batches()])

    def compare_values(self, values: Sequence[str]) -> None:
        """Compares columns computed from one row; one by one where one of them is refused."""
        columns = [f"{value} AS c{number}" for number, value in enumerate(values)]
        sql = f"SELECT {', '.join(columns)} FROM source"
        expected = self._expected(sql)
        if isinstance(expected, str):
            who, reason = "DataFusion", expected
        else:
            who, reason = "ours", self._compare(sql, expected, len(values))
        if reason and len(values) > 1:
            for value in values:
                self.compare_values([value])
            return
        if reason:
            self._outcome.refuse(who, reason)
        if isinstance(expected, str):
            return
        for value, column in zip(values, expected.columns, strict=True):
            self._compare_expression(value, column)

    def compare_query(self, sql: str) -> None:
        """Compares the columns of a query."""
        expected = self._expected(sql)
        if isinstance(expected, str):
            self._outcome.refuse("DataFusion", expected)
        elif reason := self._compare(sql, expected, 1):
            self._outcome.refuse("ours", reason)

    def _expected(self, sql: str) -> pa.Table | str:
        """The result of the bare session, or why it has none."""
        try:
            batches = [batch.to_pyarrow() for batch in self._bare.sql(sql).execute_stream()]
        except Exception as error:  # DataFusion raises bare Exception
            return str(error)
        return pa.Table.from_batches(batches)

    def _compare(self, sql: str, expected: pa.Table, num_columns: int) -> str:
        """Compares a query; gives the reason if it is refused."""
        try:
            query = check_query(sql, {"source": self._rows.schema}, allow_unordered=True)
            batches = list(self._read(sql, query))
        except (LoadError, RequestError) as error:
            return str(error).removeprefix(f"sql {sql!r}: ")
        for batch in batches:
            if problem := other_types(batch.schema, query.schema):
                self._outcome.disagree(f"{sql}\n  {problem}")
                return ""
        values = pa.Table.from_batches(batches)
        for name, column in zip(expected.column_names, expected.columns, strict=True):
            planned = query.schema.field(name).type
            if planned != column.type or _shown(values[name]) != _shown(column):
                self._outcome.disagree(
                    f"{sql}\n  {name} {planned} {_shown(values[name])}\n"
                    f"  DataFusion {column.type} {_shown(column)}"
                )
                return ""
        self._outcome.counts["agree"] += num_columns
        return ""

    def _compare_expression(self, expression: str, column: pa.ChunkedArray) -> None:
        """The same of an expression over rows in memory, such as weights."""
        try:
            query = check_row_query(expression, (), self._rows.schema)
            read = self._rows.select(query.schema.names).combine_chunks().to_batches()
            values = pa.chunked_array(run_row_query(query, read), query.result.field(0).type)
        except (LoadError, RequestError) as error:
            if "was planned with" in str(error):
                self._outcome.disagree(str(error))
            else:
                self._outcome.refuse("weights", str(error).rpartition("': ")[2])
            return
        # Results have no views.
        if not is_alike(values.type, column.type) or _shown(values) != _shown(column):
            self._outcome.disagree(
                f"{expression}\n  {values.type} {_shown(values)}\n"
                f"  DataFusion {column.type} {_shown(column)}"
            )
        else:
            self._outcome.counts["agree as an expression"] += 1

    def _read(self, sql: str, query: Query) -> Iterator[pa.RecordBatch]:
        if not query.drivers or query.joins:
            return run_whole(sql, {"source": self._spooled})
        columns = query.columns["source"]
        table = PinnedTable("source", "parquet", self._rows.schema, columns=columns)
        return read_split(local(self._split), sql, table)


def _shown(values: pa.ChunkedArray) -> str:
    """The values as text, in which a NaN is a NaN and -0.0 is not 0.0."""
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    return repr(values.to_pylist())


def compare_columns(
    num_columns: int, seed: int, directory: Path, outcome: Outcome, columns_a_table: int = 500
) -> None:
    """Compares generated columns over generated tables; three of four are of single rows."""
    for start in range(0, num_columns, columns_a_table):
        columns = _Columns(seed + start, directory, outcome)
        left = min(columns_a_table, num_columns - start)
        for _ in range(left // 4):
            columns.compare_query(columns.generator.whole_query())
        left -= left // 4
        while left > 0:
            number = min(left, _COLUMNS_A_QUERY)
            columns.compare_values([columns.generator.value() for _ in range(number)])
            left -= number
