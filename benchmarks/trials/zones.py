"""Generated conditions on times of zones whose clocks jump, for `differential`.

A load must keep the rows that Python's zoneinfo keeps. DuckDB is a second opinion, for expressions
that it computes in the zone, too; its time zone database may be an older one. The rows are next to
jumps since 1970: of earlier ones, the databases differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.trials.outcome import Outcome
from cache_protocol.errors import LoadError, RequestError
from tests.query_source import check, rows_of, whole

UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_FIRST, _LAST, _STEP_S = datetime(1970, 1, 1, tzinfo=UTC), datetime(2037, 1, 1, tzinfo=UTC), 86_400
_BESIDE_S = (-86_400, -7200, -1800, -1, 0, 1, 1800, 7200, 86_400)  # of a jump
_JUMPS = 8  # of a table
_GROUP_ROWS = 4  # few, so that bounds of row groups decide
_Wall = datetime  # the time that clocks show, without a zone


@dataclass(frozen=True)
class _Kind:
    """An expression over a time ``t``: for us, for DuckDB (empty: not there), and in Python."""

    ours: str
    theirs: str
    value: Callable[[_Wall], Any]
    literal: str = "{}"


_KINDS = [
    *(
        _Kind(f"EXTRACT({part} FROM t)", f"EXTRACT({part} FROM t)", value)
        for part, value in {
            "YEAR": lambda wall: wall.year,
            "QUARTER": lambda wall: (wall.month + 2) // 3,
            "MONTH": lambda wall: wall.month,
            "WEEK": lambda wall: wall.isocalendar()[1],
            "DAY": lambda wall: wall.day,
            "DOY": lambda wall: wall.timetuple().tm_yday,
            "DOW": lambda wall: wall.isoweekday() % 7,
            "HOUR": lambda wall: wall.hour,
            "MINUTE": lambda wall: wall.minute,
        }.items()
    ),
    _Kind("date_part('year', t)", "date_part('year', t)", lambda wall: wall.year),
    _Kind("CAST(EXTRACT(YEAR FROM t) AS BIGINT)", "year(t)", lambda wall: wall.year),
    _Kind("EXTRACT(YEAR FROM date_trunc('day', t))", "year(t)", lambda wall: wall.year),
    _Kind("CAST(t AS DATE)", "CAST(t AS DATE)", lambda wall: wall.date(), "DATE '{}'"),
    _Kind(
        "CAST(date_trunc('day', t) AS DATE)",
        "CAST(t AS DATE)",
        lambda wall: wall.date(),
        "DATE '{}'",
    ),
    _Kind("CAST(t AS TIME)", "", lambda wall: wall.time(), "TIME '{}'"),
    _Kind("to_char(t, '%Y')", "strftime(t, '%Y')", lambda wall: str(wall.year), "'{}'"),
    _Kind("to_local_time(t)", "", lambda wall: wall, "TIMESTAMP '{}'"),
]
_CONDITIONS: dict[str, Callable[[Any, Any, Any], bool]] = {
    "{x} = {a}": lambda x, a, b: x == a,
    "{x} <> {a}": lambda x, a, b: x != a,
    "{x} < {a}": lambda x, a, b: x < a,
    "{x} <= {a}": lambda x, a, b: x <= a,
    "{x} > {a}": lambda x, a, b: x > a,
    "{x} >= {a}": lambda x, a, b: x >= a,
    "{x} IS DISTINCT FROM {a}": lambda x, a, b: x != a,
    "{x} IS NOT DISTINCT FROM {a}": lambda x, a, b: x == a,
    "{x} BETWEEN {a} AND {b}": lambda x, a, b: a <= x <= b,
    "{x} IN ({a}, {b})": lambda x, a, b: x in (a, b),
    "NOT ({x} IN ({a}, {b}))": lambda x, a, b: x not in (a, b),
}


def jumps(zone: str) -> list[int]:
    """The seconds since 1970 at which the clocks of a zone jump."""
    rule, found = ZoneInfo(zone), []

    def offset(second: int) -> timedelta | None:
        return datetime.fromtimestamp(second, rule).utcoffset()

    stop = int(_LAST.timestamp())
    for start in range(int(_FIRST.timestamp()), stop, _STEP_S):
        low, high = start, start + _STEP_S
        if offset(low) == offset(high):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if offset(middle) == offset(low) else (low, middle)
        found.append(high)
    return found


def _is_at_new_year(second: int, zone: str) -> bool:
    wall = datetime.fromtimestamp(second, ZoneInfo(zone))
    return (wall + timedelta(days=2)).year != (wall - timedelta(days=2)).year


def compare_zones(
    zones: Sequence[str], conditions_a_table: int, seed: int, directory: Path, outcome: Outcome
) -> None:
    """Compares conditions over one table for each unit of each zone that has jumps."""
    rng = random.Random(seed)
    engine = duckdb.connect(config={"threads": 1})
    for zone in zones:
        known = jumps(zone)
        if not known:
            continue
        first = [second for second in known if _is_at_new_year(second, zone)][-_JUMPS:]
        others = [second for second in known if second not in first]
        some = [*first, *rng.sample(others, min(len(others), _JUMPS - len(first)))]
        seconds = sorted({second + beside for second in some for beside in _BESIDE_S})
        for unit in UNITS:
            table = _Table(zone, unit, seconds, directory, engine)
            for _ in range(conditions_a_table):
                table.compare(rng, outcome)
    engine.close()


class _Table:
    """Times of one zone and unit, for both engines."""

    def __init__(
        self,
        zone: str,
        unit: str,
        seconds: Sequence[int],
        directory: Path,
        engine: duckdb.DuckDBPyConnection,
    ) -> None:
        self._walls = [
            datetime.fromtimestamp(second, ZoneInfo(zone)).replace(tzinfo=None, fold=0)
            for second in seconds
        ]
        self._name = f"{zone} [{unit}]"
        values = pa.array([second * UNITS[unit] for second in seconds], pa.timestamp(unit, zone))
        path = directory / "zones.parquet"
        pq.write_table(
            pa.table({"row": range(len(seconds)), "t": values}), path, row_group_size=_GROUP_ROWS
        )
        read = pq.read_table(path)
        self._schema, self._split, self._engine = read.schema, whole(path), engine
        engine.execute(f"SET TimeZone = '{zone}'")
        micros = read.set_column(1, "t", values.cast(pa.timestamp("us", zone)))
        engine.register("source", micros)

    def compare(self, rng: random.Random, outcome: Outcome) -> None:
        """Draws a condition and compares the rows that it keeps."""
        kind = rng.choice(_KINDS[:1] * 6 + _KINDS)
        values = [kind.value(wall) for wall in self._walls]
        a, b = (rng.choice(values) for _ in range(2))
        template, keeps = rng.choice(list(_CONDITIONS.items()))
        literals = {"a": kind.literal.format(a), "b": kind.literal.format(b)}
        condition = template.format(x=kind.ours, **literals)
        expected = [row for row, value in enumerate(values) if keeps(value, a, b)]
        sql = f"SELECT row FROM source WHERE {condition}"
        try:
            check(sql, self._schema)
            ours = [row["row"] for row in rows_of(self._split, sql, self._schema)]
        except (LoadError, RequestError) as error:
            outcome.refuse("ours", str(error).rpartition(".parquet: ")[2])
            return
        if ours == expected:
            outcome.counts["agree"] += 1
        else:
            outcome.disagree(f"{self._name} {condition}\n  DataFusion {ours}\n  Python {expected}")
        if kind.theirs:
            found = self._engine.execute(
                f"SELECT row FROM source WHERE {template.format(x=kind.theirs, **literals)} "
                "ORDER BY row"
            )
            if [row for (row,) in found.fetchall()] != expected:
                outcome.counts["DuckDB differs"] += 1
                outcome.errors[f"DuckDB differs: {self._name} {condition}"] += 1
