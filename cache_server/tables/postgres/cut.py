"""Cuts a relation into splits, by samples, quantiles and counts of the server.

Runs in the transaction that pinned the relation, so it counts the rows that will be read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from cache_protocol.storage.layout import GUESSED_VALUE_BYTES, Layout
from cache_server.source.pinned import SourceFile, Split, sized_fields, source_column
from cache_server.tables.postgres.quoting import array_literal
from cache_server.tables.postgres.ranges import (
    CTID,
    KeyRange,
    block_bounds,
    distinct,
    even_ranges,
    quantiles,
)
from cache_server.tables.postgres.relation import Relation
from cache_server.tables.postgres.session import Session

_SAMPLED_ROWS = 200_000  # for the bounds of ranges
_MEASURED_ROWS = 10_000  # for the lengths of strings
_BUCKETS_PER_SPLIT = 8  # buckets of unequal sizes still make even splits
_MAX_BUCKETS = 4096
_OFFSET_BYTES = 4


@dataclass(frozen=True)
class Cutting:
    """A relation and the key that it is cut by.

    Attributes:
        columns: name -> SQL expression.
        schema: of these columns.
        key: SQL expression of the ranges; empty: one split.
        estimate: of the number of rows.
        is_counted: rows are counted, by one or two scans; otherwise estimated by ranges.
    """

    session: Session
    relation: Relation
    columns: Mapping[str, str]
    schema: pa.Schema
    key: str
    estimate: int
    is_counted: bool

    def splits(self, stored: pa.Schema, target_bytes: int) -> tuple[Split, ...]:
        """Splits that together hold every row once; ``Pin.cut``.

        Raises:
            LoadError: the server does not answer, or the snapshot has ended.
        """
        row_bytes = self._row_bytes(stored)
        num_rows = self.estimate
        if self.is_counted:
            num_rows = self.session.rows(f"SELECT count(*) FROM {self.relation.sql} AS q")[0][0]
        wanted = min(_MAX_BUCKETS, math.ceil(num_rows * row_bytes / target_bytes))
        ranges = [(KeyRange(), num_rows)]
        if self.key and wanted > 1:
            ranges = self._ranges(num_rows, wanted)
        if self.is_counted:
            ranges = [(piece, rows) for piece, rows in ranges if rows]
        file = SourceFile(self.relation.path, 0, 0)
        return tuple(
            Split(
                file,
                part,
                len(ranges),
                rows if self.is_counted else None,
                math.ceil(rows * row_bytes),
                piece.to_json(),
            )
            for part, (piece, rows) in enumerate(ranges)
        )

    def _ranges(self, num_rows: int, num_ranges: int) -> list[tuple[KeyRange, int]]:
        num_buckets = min(_MAX_BUCKETS, num_ranges * _BUCKETS_PER_SPLIT)
        nulls = 0
        if self.key == CTID:
            bounds = block_bounds(self.relation.blocks or 0, num_buckets)
        else:
            bounds, null_share = self._sampled_bounds(num_rows, num_buckets)
            nulls = round(num_rows * null_share)
        if self.is_counted:
            counts, nulls = self._counts(bounds)
        else:
            counts = [(num_rows - nulls) // (len(bounds) + 1)] * (len(bounds) + 1)
        ranges = even_ranges(self.key, bounds, counts, num_ranges)
        if self.key != CTID:
            ranges.append((KeyRange(self.key, nulls=True), nulls))
        return ranges

    def _sampled_bounds(self, num_rows: int, num_buckets: int) -> tuple[list[str], float]:
        """The values between equal parts, as strings, and the share of nulls."""
        fractions = ", ".join(map(str, quantiles(num_buckets)))
        texts, rows, keyed = self.session.rows(
            "SELECT pg_catalog.array_to_json(pg_catalog.percentile_disc("
            f"ARRAY[{fractions}]::float8[]) WITHIN GROUP (ORDER BY {self.key})::text[])::text, "
            f"count(*), count({self.key}) FROM {self._sample(num_rows, _SAMPLED_ROWS)}"
        )[0]
        bounds = distinct(json.loads(texts)) if keyed else []
        return bounds, (rows - keyed) / max(1, rows)

    def _counts(self, bounds: list[str]) -> tuple[list[int], int]:
        """The number of rows in each bucket, and without a key."""
        bucket = f"pg_catalog.width_bucket({self.key}, {array_literal(bounds)})"
        found = self.session.rows(
            f"SELECT {bucket} AS bucket, count(*) FROM {self.relation.sql} AS q GROUP BY 1"
        )
        buckets: dict[int | None, int] = dict(found)
        return [buckets.get(index, 0) for index in range(len(bounds) + 1)], buckets.get(None, 0)

    def _row_bytes(self, stored: pa.Schema) -> float:
        """Decoded bytes of a row; a sample gives the lengths of strings and lists.

        Args:
            stored: the kept columns; a query may compute some.
        """
        layout = Layout(stored)
        if not layout.plain_fields:
            return max(1, layout.fixed_row_bytes)
        source = self._sample(self.estimate, _MEASURED_ROWS)
        if not self.relation.is_stored:
            if not self.key:  # one split of any size
                return layout.guessed_row_bytes
            source = f"(SELECT * FROM {source} LIMIT {_MEASURED_ROWS}) AS q"
        sizes = ", ".join(self._average_bytes(field) for field in sized_fields(layout))
        return layout.fixed_row_bytes + float(
            sum(self.session.rows(f"SELECT {sizes} FROM {source}")[0])
        )

    def _average_bytes(self, field: pa.Field) -> str:
        name = source_column(field)
        own = self.schema.field(name).type if name in self.columns else None
        if own is None or _kind(own) != _kind(field.type):
            return str(GUESSED_VALUE_BYTES)
        column = self.columns[name]
        if pa.types.is_list(field.type):
            size = f"{_value_bytes(field.type.value_type)} * pg_catalog.cardinality({column})"
        elif pa.types.is_string(field.type):
            size = f"pg_catalog.octet_length({column}::text)"
        else:
            size = f"pg_catalog.octet_length({column})"
        return f"{_OFFSET_BYTES} + coalesce(avg({size}), 0)::float8"

    def _sample(self, num_rows: int, wanted: int) -> str:
        """SQL for about ``wanted`` rows of a stored table, in whole blocks; else for all rows."""
        source = f"{self.relation.sql} AS q"
        if not self.relation.is_stored or num_rows <= wanted:
            return source
        return f"{source} TABLESAMPLE SYSTEM ({100 * wanted / num_rows:.6f}) REPEATABLE (0)"


def _kind(dtype: pa.DataType) -> str:
    return "list" if pa.types.is_list(dtype) else str(dtype)


def _value_bytes(dtype: pa.DataType) -> int:
    try:
        return max(1, int(dtype.bit_width) // 8)
    except ValueError:  # its width varies
        return GUESSED_VALUE_BYTES
