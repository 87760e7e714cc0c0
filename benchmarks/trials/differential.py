"""Compares generated queries: DataFusion, as a load runs it, with other engines.

    python -m benchmarks.trials.differential [--queries 20000] [--columns 3000]
                                             [--zone-conditions 4] [--seed 0]

- Conditions with DuckDB, over a table with a column of each type and times of several zones: in
  the SQL of a load, and as ``where`` of a view over the stored rows.
- Computed columns with a bare session of DataFusion: see `computed_columns`.
- Conditions on times of zones with Python and DuckDB, some for each unit of each zone: see `zones`.

The suite compares some hundreds; `make soak-queries` thousands, after a change of DataFusion's
version or of `cache_server.sql`. A seed draws the same queries again. Ends with 1 after a
disagreement: fix it, refuse it by name, or leave it out of the generator if it is a known
difference (`KNOWN`).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import available_timezones

import duckdb
import pyarrow as pa

from benchmarks.trials.computed_columns import compare_columns
from benchmarks.trials.outcome import Outcome
from benchmarks.trials.zones import compare_zones
from cache_protocol.errors import LoadError, RequestError
from cache_protocol.storage.shard_files import MappedShard, SealedShard
from cache_server.shards.packing import ShardBuilder, logical_schema
from cache_server.shards.resident_rows import ResidentRows
from cache_server.shards.store import write_shard_file
from cache_server.shards.version_key import VersionKey
from cache_server.sql.plain_columns import plain_schema
from cache_server.sql.row_queries import check_row_query, run_row_query
from tests.query_source import check, rows_of, write_parquet

# What the generator leaves out, because both engines are right in their own way.
KNOWN = {
    "x / y of integers": "DataFusion cuts the fraction, as PostgreSQL does; DuckDB gives a double",
    "x % 0": "DataFusion fails, DuckDB gives NULL",
    "CAST(1.5 AS INT)": "DataFusion cuts the fraction, DuckDB rounds it",
    "x = 0.1 of a float32": "DataFusion compares as doubles, DuckDB as the float32 next to 0.1",
    "a string with a time": "DuckDB cuts it to the column's unit; TIMESTAMP '...' is exact",
    "a double as a string": "the engines write 1e300 in other forms",
    "- CAST('NaN' AS DOUBLE)": "a constant NaN with a sign, which nobody writes, is not refused",
    "floor(0.1) NOT IN (0, -0.0)": "constants alone, folded before the guard, which nobody writes",
    "nullif(0.0, ceil(-0.0))": "the same",
    "a date plus an interval": "DuckDB gives a timestamp",
    "date_trunc('hour', date) < TIMESTAMP '...'": "DuckDB cuts the timestamp to its day",
}
_LOT_BYTES = 1 << 20
_ZONES = {"utc": "UTC", "york": "America/New_York", "nepal": "Asia/Kathmandu"}
_EPOCH = datetime(1970, 1, 1)
_TIMES = [  # at and beside the ends of seconds, days, years and of what nanoseconds can hold
    datetime(1969, 12, 31, 23, 59, 59, 999_000),
    _EPOCH,
    datetime(1994, 1, 1),
    datetime(1994, 12, 31, 23, 59, 59),
    datetime(2024, 12, 31, 23, 59, 59, 999_000),
    datetime(2024, 12, 31, 23, 59, 59, 999_999),
    datetime(2024, 2, 29, 12, 0, 0, 500_000),
    datetime(1678, 1, 1),
    datetime(2261, 12, 31),
]
_FAR = [datetime(1, 1, 1), datetime(3000, 5, 5), datetime(9999, 12, 31, 23, 59, 59, 999_999)]
_INTEGERS = {f"{sign}{bits}": (sign, bits) for sign in "iu" for bits in (8, 16, 32, 64)}
_TEXTS = ["", "a", "A", "ab", "1", "-1", "1.5", "é", "%", "a_b", "z" * 20]


def _range(name: str) -> tuple[int, int]:
    sign, bits = _INTEGERS[name]
    return (0, 2**bits - 1) if sign == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def table(rng: random.Random, num_rows: int = 60) -> pa.Table:
    """A table with a column of each type: extremes, nulls, NaN, signed zeros, far years."""

    def column(dtype: pa.DataType, draw: Callable[[], Any]) -> pa.Array:
        values = [None if rng.random() < 0.1 else draw() for _ in range(num_rows)]
        return pa.array(values, dtype)

    def times(unit: str, values: list[datetime]) -> pa.Array:
        per_unit = {"s": 10**6, "ms": 10**3, "us": 1, "ns": 1}[unit]

        def draw() -> int:
            micros = (rng.choice(values) - _EPOCH) // timedelta(microseconds=1)
            return micros // per_unit * (1000 if unit == "ns" else 1)

        return column(pa.int64(), draw)

    columns: dict[str, pa.Array] = {"row": pa.array(range(num_rows), pa.int64())}
    for name, (sign, bits) in _INTEGERS.items():
        low, high = _range(name)
        dtype = getattr(pa, f"{'u' if sign == 'u' else ''}int{bits}")()
        some = [low, low + 1, high, high - 1, high // 2, 0, 1, 2, 3, 100]
        columns[name] = column(dtype, lambda some=some: rng.choice(some))
    floats = [0.0, -0.0, 1.0, -1.0, 1.5, 2.5, -2.5, 1e30, float("nan"), float("inf"), -float("inf")]
    columns["f32"] = column(pa.float32(), lambda: rng.choice(floats))
    columns["f64"] = column(pa.float64(), lambda: rng.choice([*floats, 1e300, 5e-324, 2.0**53]))
    columns["plain"] = column(pa.float64(), lambda: rng.choice([0.0, 1.0, 2.0, -3.5]))
    columns["dec"] = column(
        pa.decimal128(6, 2), lambda: Decimal(rng.choice([0, 1, 125, -125, 9999, -9999])) / 100
    )
    columns["text"] = column(pa.string(), lambda: rng.choice(_TEXTS))
    columns["code"] = column(pa.string(), lambda: rng.choice(_TEXTS)).dictionary_encode()
    columns["flag"] = column(pa.bool_(), lambda: rng.random() < 0.5)
    for unit in ("s", "ms", "us", "ns"):
        columns[f"t_{unit}"] = times(unit, _TIMES).cast(pa.timestamp(unit))
        for name, zone in _ZONES.items():
            columns[f"{name}_{unit}"] = times(unit, _TIMES).cast(pa.timestamp(unit, zone))
    columns["far"] = times("ms", [*_TIMES, *_FAR]).cast(pa.timestamp("ms"))
    columns["day"] = times("s", _TIMES).cast(pa.timestamp("s")).cast(pa.date32(), safe=False)
    return pa.table(columns)


def _for_duckdb(source: pa.Table) -> pa.Table:
    """The same values in types in which DuckDB is exact: times of UTC without a zone."""
    columns = {}
    for name, values in zip(source.column_names, source.columns, strict=True):
        if pa.types.is_timestamp(values.type):
            values = values.cast(pa.timestamp(values.type.unit)).cast(
                pa.timestamp("ns" if values.type.unit == "ns" else "us")
            )
        columns[name] = values.cast(pa.string()) if name == "code" else values
    return pa.table(columns)


@dataclass(frozen=True)
class Sql:
    """One expression for both engines.

    Attributes:
        zone: of a time; DuckDB has the time in UTC.
    """

    ours: str
    theirs: str
    zone: str = ""

    @property
    def clock(self) -> str:
        """What clocks in the zone show, for DuckDB."""
        return f"timezone('{self.zone}', {_in_utc(self.theirs)})" if self.zone else self.theirs


def _in_utc(time: str, zone: str = "UTC") -> str:
    """The moment of a time without a zone, for DuckDB."""
    return f"timezone('{zone}', {time})"


def _of_zone(ours: str, clock: str, zone: str) -> Sql:
    """A time of a zone, from what clocks there show for DuckDB."""
    return Sql(ours, f"timezone('UTC', {_in_utc(clock, zone)})", zone)


def _sql(template: str, *parts: Sql) -> Sql:
    ours, theirs = zip(*((part.ours, part.theirs) for part in parts), strict=True)
    return Sql(template.format(*ours), template.format(*theirs))


class Generator:
    """Draws conditions over `table`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def condition(self, depth: int = 0) -> Sql:
        """A condition on a row."""
        draw, inner = self._rng.random(), depth + 1
        if depth < 2 and draw < 0.3:
            parts = [self.condition(inner) for _ in range(3)]
            template = self._rng.choice(
                [
                    "({0}) AND ({1})",
                    "({0}) OR ({1})",
                    "NOT ({0})",
                    "({0}) IS TRUE",
                    "({0}) IS NOT FALSE",
                    "({0}) IS NULL",
                    "CASE WHEN {0} THEN {1} ELSE {2} END",
                    "coalesce({0}, {1})",
                ]
            )
            return _sql(template, *parts)
        kinds = [self._number, self._number, self._float, self._time, self._moment, self._text]
        kind = self._rng.choice([*kinds * 8, self._any_time])
        values = [kind(0) for _ in range(self._rng.randint(3, 6))]
        if draw < 0.65:
            comparison = self._rng.choice(
                ["=", "<>", "<", "<=", ">", ">=", "IS DISTINCT FROM", "IS NOT DISTINCT FROM"]
            )
            return _sql(f"{{0}} {comparison} {{1}}", *values)
        if kind == self._float:  # constants alone: see KNOWN
            values[0] = self._column("f32", "f64", "plain", "dec")
        if draw < 0.8:
            places = ", ".join(f"{{{index}}}" for index in range(1, len(values)))
            lists = [f"{{0}} {self._rng.choice(['', 'NOT '])}IN ({places})"]
            if self._rng.random() < 0.3:
                lists.append(f"{{0}} {self._rng.choice(['', 'NOT '])}IN ({{1}}, {{1}})")
            return _sql(self._rng.choice([" AND ", " OR "]).join(lists), *values)
        if draw < 0.9:
            return _sql("{0} BETWEEN {1} AND {2}", *values)
        if draw < 0.93:
            return _sql("nullif({0}, {1}) IS NULL", *values)
        if draw < 0.96:
            return _sql("CASE {0} WHEN {1} THEN true WHEN {2} THEN false END", *values)
        return self._column("flag")

    def _column(self, *names: str) -> Sql:
        name = self._rng.choice(names)
        return Sql(name, name)

    def _literal(self, *texts: str) -> Sql:
        text = self._rng.choice(texts)
        return Sql(text, text)

    def _number(self, depth: int) -> Sql:
        """An integer. DuckDB computes it as HUGEINT, which does not wrap."""
        draw = self._rng.random()
        if depth < 2 and draw < 0.35:
            left, right = self._number(depth + 1), self._number(depth + 1)
            operator = self._rng.choice(
                ["{0} + {1}", "{0} - {1}", "{0} * {1}", "- {0}", "abs({0})"]
            )
            return _sql(f"({operator})", left, right)
        if draw < 0.4:
            part = self._rng.choice(["year", "month", "day", "hour", "quarter", "week", "doy"])
            time = self._any_time(depth + 1)
            return Sql(
                f"EXTRACT({part} FROM {time.ours})", f"EXTRACT({part} FROM {time.clock})::HUGEINT"
            )
        if draw < 0.45:
            return _sql("char_length({0})", self._text(depth + 1))
        if draw < 0.75:
            name = self._rng.choice(list(_INTEGERS))
            return Sql(name, f"{name}::HUGEINT")
        low, high = _range(self._rng.choice(list(_INTEGERS)))
        value = self._rng.choice([0, 1, -1, 2, 3, 9, 100, 1994, 2024, 2262, 9999, low, high])
        value = max(value, -(2**63 - 1))
        return self._literal(str(value) if value >= 0 else f"({value})")

    def _float(self, depth: int) -> Sql:
        draw = self._rng.random()
        if depth < 2 and draw < 0.3:
            parts = [self._float(depth + 1) for _ in range(2)]
            template = self._rng.choice(
                [
                    *("({0} + {1})", "({0} - {1})", "({0} * {1})", "(- {0})", "abs({0})"),
                    *("floor({0})", "ceil({0})", "CAST({0} AS DOUBLE)", "coalesce({0}, {1})"),
                    "greatest({0}, {1})",
                ]
            )
            return _sql(template, *parts)
        if draw < 0.65:
            return self._column("f32", "f64", "plain", "plain", "dec")
        return self._literal(
            *("0.0", "(-0.0)", "0", "1.0", "1", "1.5", "(-2.5)", "CAST(0.1 AS DOUBLE)", "1.25"),
            *("2.0", "3.0", "4", *(["CAST('NaN' AS DOUBLE)"] if depth == 0 else [])),
        )

    def _any_time(self, depth: int) -> Sql:
        """Also two of these in one comparison, which is refused for zones that are not UTC."""
        return self._rng.choice([self._time, self._moment])(depth)

    def _moment(self, depth: int) -> Sql:
        """A time of a zone."""
        draw = self._rng.random()
        if depth < 1 and draw < 0.2:
            unit = self._rng.choice(["year", "month", "day", "hour", "second", "week"])
            inner = self._moment(depth + 1)
            ours, zone = f"date_trunc('{unit}', {inner.ours})", inner.zone or "UTC"
            return _of_zone(ours, f"date_trunc('{unit}', {inner.clock}::TIMESTAMP)", zone)
        if depth < 1 and draw < 0.3:
            time = self._column("t_s", "t_ms", "t_us", "t_ns")
            zone = self._rng.choice(list(_ZONES.values()))
            ours = f"({time.ours} AT TIME ZONE '{zone}')"
            return _of_zone(ours, f"{time.theirs}::TIMESTAMP", zone)
        if depth < 1 and draw < 0.35:
            inner = self._moment(depth + 1)
            return Sql(f"CAST({inner.ours} AS TIMESTAMPTZ)", inner.theirs)
        if draw < 0.75 or depth:
            name = self._rng.choice(list(_ZONES))
            column = f"{name}_{self._rng.choice(['s', 'ms', 'us', 'ns'])}"
            return Sql(column, column, _ZONES[name])
        moment, hours = self._instant(), self._rng.choice([-5, 0, 2])
        local = moment + timedelta(hours=hours)
        return Sql(
            f"TIMESTAMPTZ '{local} {'-' if hours < 0 else '+'}{abs(hours):02}:00'",
            f"TIMESTAMP '{moment}'",
        )

    def _instant(self) -> datetime:
        return self._rng.choice(_TIMES) + timedelta(
            microseconds=self._rng.choice([0, 0, 1, -1, 999_999, 500, 86_400_000_000])
        )

    def _time(self, depth: int) -> Sql:
        """A time without a zone, or one of UTC, which may be compared with it."""
        draw = self._rng.random()
        if depth < 1 and draw < 0.05:
            inner = self._moment(depth + 1)
            return Sql(f"to_local_time({inner.ours})", inner.clock)
        if depth < 1 and draw < 0.2:
            unit = self._rng.choice(["year", "month", "day", "hour", "second", "week"])
            inner = self._time(depth + 1)
            return Sql(  # of a timestamp in DuckDB: see KNOWN
                f"date_trunc('{unit}', {inner.ours})",
                f"date_trunc('{unit}', {inner.theirs}::TIMESTAMP)",
            )
        if depth < 1 and draw < 0.25:
            time = self._column("t_s", "t_ms", "t_us", "far")
            return Sql(
                f"date_bin(INTERVAL '1 day', {time.ours}, TIMESTAMP '1970-01-01')",
                f"date_trunc('day', {time.theirs})",
            )
        if draw < 0.7 or depth:
            names = [f"{kind}_{unit}" for kind in ("t", "utc") for unit in ("s", "ms", "us", "ns")]
            return self._column(*names, "far", "day")
        time = self._instant()
        return self._literal(f"TIMESTAMP '{time.isoformat(sep=' ', timespec='microseconds')}'")

    def _text(self, depth: int) -> Sql:
        if depth < 2 and self._rng.random() < 0.25:
            parts = [self._text(depth + 1) for _ in range(2)]
            template = self._rng.choice(
                [
                    *("({0} || {1})", "upper({0})", "lower({0})", "substr({0}, 2, 1)"),
                    *("concat({0}, {1})", "reverse({0})", "replace({0}, 'a', 'b')", "trim({0})"),
                    "coalesce({0}, {1})",
                ]
            )
            return _sql(template, *parts)
        if self._rng.random() < 0.6:
            return self._column("text", "code")
        return self._literal(*(f"'{text}'" for text in _TEXTS))


class Comparison:
    """One table in both engines. Close it."""

    def __init__(self, seed: int, directory: Path) -> None:
        rng = random.Random(seed)
        self._table = table(rng)
        self._split = write_parquet(directory / f"{seed}.parquet", self._table)
        self._generator = Generator(rng)
        self._duckdb = duckdb.connect(config={"threads": 1})
        self._duckdb.register("source", _for_duckdb(self._table))
        self._stored = _stored(directory / f"{seed}.arrow", self._table)

    def close(self) -> None:
        """Closes DuckDB."""
        self._duckdb.close()

    def run(self, num_queries: int, outcome: Outcome) -> None:
        """Compares some queries."""
        for _ in range(num_queries):
            condition = self._generator.condition()
            ours, theirs = self._ours(condition.ours), self._theirs(condition.theirs)
            if isinstance(ours, str):
                outcome.refuse("ours", ours)
            elif isinstance(theirs, str):
                outcome.refuse("theirs", theirs)
            elif ours == theirs:
                outcome.counts["agree"] += 1
            else:
                outcome.disagree(f"{condition.ours}\n  DataFusion {ours}\n  DuckDB     {theirs}")
            wanted = theirs if isinstance(ours, str) else ours
            self._compare_view(condition.ours, wanted, outcome)

    def _ours(self, condition: str) -> list[int] | str:
        sql = f"SELECT row FROM source WHERE ({condition})"
        try:
            check(sql, self._table.schema)
            rows = rows_of(self._split, sql, self._table.schema)
        except (LoadError, RequestError) as error:
            return str(error).rpartition(".parquet: ")[2]
        return [row["row"] for row in rows]

    def _compare_view(self, condition: str, wanted: list[int] | str, outcome: Outcome) -> None:
        """Compares a view with the load, or with DuckDB where the load is refused."""
        schema = plain_schema(self._stored.layout.logical)
        try:
            query = check_row_query("", (condition,), schema)
            lots = self._stored.lots(0, self._table.num_rows, query.schema.names, _LOT_BYTES)
            found = [row for piece in run_row_query(query, lots) for row in piece.to_pylist()]
        except RequestError as error:
            outcome.counts["refused as a view"] += 1
            outcome.errors[str(error)[:110]] += 1
            return
        if isinstance(wanted, str):
            outcome.counts["only as a view"] += 1
        elif found == wanted:
            outcome.counts["agree as a view"] += 1
        else:
            outcome.disagree(f"{condition}\n  load or DuckDB {wanted}\n  view {found}")

    def _theirs(self, condition: str) -> list[int] | str:
        try:
            found = self._duckdb.execute(f"SELECT row FROM source WHERE ({condition}) ORDER BY row")
        except duckdb.Error as error:
            return str(error)
        return [row for (row,) in found.fetchall()]


def _stored(path: Path, rows: pa.Table) -> ResidentRows:
    """The rows as a node stores them."""
    builder = ShardBuilder(logical_schema(rows.schema))
    for batch in rows.to_batches():
        builder.append(batch)
    write_shard_file(path, builder.finish())
    shard = MappedShard(SealedShard(0, rows.num_rows, path.stat().st_size, ""), path)
    return ResidentRows(VersionKey("t", "f"), builder.layout, rows.num_rows, {0: shard})


def compare(num_queries: int, seed: int, outcome: Outcome, queries_a_table: int = 500) -> None:
    """Compares generated conditions over generated tables."""
    with tempfile.TemporaryDirectory() as directory:
        for number, start in enumerate(range(0, num_queries, queries_a_table)):
            comparison = Comparison(seed + number, Path(directory))
            comparison.run(min(queries_a_table, num_queries - start), outcome)
            comparison.close()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--columns", type=int, default=3000)
    parser.add_argument("--zone-conditions", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    conditions, columns, times = (Outcome(prints=True) for _ in range(3))
    compare(arguments.queries, arguments.seed, conditions)
    with tempfile.TemporaryDirectory() as directory:
        compare_columns(arguments.columns, arguments.seed, Path(directory), columns)
        zones = sorted(name for name in available_timezones() if "/" in name)
        number = arguments.zone_conditions
        compare_zones(zones if number else [], number, arguments.seed, Path(directory), times)
    for name, outcome in {"conditions": conditions, "columns": columns, "zones": times}.items():
        print(name, outcome.counts, *outcome.errors.most_common(40), sep="\n")
    return 1 if any(outcome.disagreements for outcome in (conditions, columns, times)) else 0


if __name__ == "__main__":
    sys.exit(main())
