"""Gives columns other types without a loss, or says why that cannot be done. Pure.

Loads, writes, puts and appends ask only this module. A value survives exactly, or the conversion
fails with its row: nothing is rounded, cut, parsed or dropped. `type_rules` has the table.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from cache_protocol.errors import LoadError, SchemaError, some_of
from cache_protocol.storage.exact_values import Misfit, as_column
from cache_protocol.storage.type_rules import Verdict, can_become, repeated_names

__all__ = [
    "WRITE_ADVICE",
    "Verdict",
    "can_become",
    "column_problems",
    "conform",
    "conform_batch",
    "require_no_nulls",
]

WRITE_ADVICE = "cast the column before you write it, or write all rows again without append"


def column_problems(arriving: pa.Schema, wanted: pa.Schema) -> list[str]:
    """Why rows of ``arriving`` never become rows of ``wanted``, by names and types."""
    problems = []
    came, known = dict.fromkeys(arriving.names), dict.fromkeys(wanted.names)
    if repeated := repeated_names(arriving.names):
        problems.append(f"columns cannot share a name: {some_of(map(repr, repeated))}")
    if missing := [name for name in known if name not in came]:
        problems.append(f"the rows must have a column {some_of(map(repr, missing))}")
    if extra := [name for name in came if name not in known]:
        problems.append(f"the rows cannot have a column {some_of(map(repr, extra))}")
    return problems or [
        f"column {field.name!r} comes as {old}, which cannot become {field.type}"
        for field in wanted
        for old in [arriving.field(field.name).type]
        if can_become(old, field.type) is Verdict.NEVER
    ]


def conform_batch(
    batch: pa.RecordBatch, schema: pa.Schema, *, first_row: int = 0, advice: str = WRITE_ADVICE
) -> pa.RecordBatch:
    """The columns of ``schema`` of a batch, with its types; the same batch if it has them.

    Args:
        first_row: number of its first row, for errors.
        advice: what to do after an error.

    Raises:
        SchemaError: names other or missing columns, or as `conform`.
    """
    if batch.schema.equals(schema):
        return batch
    if problems := column_problems(batch.schema, schema):
        raise SchemaError(f"{some_of(problems, '; ')}: {advice}")
    columns = [
        conform(
            field.name,
            batch.column(field.name),
            field.type,
            nullable=field.nullable,
            first_row=first_row,
            advice=advice,
        )
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def conform(
    name: str,
    array: pa.Array,
    dtype: pa.DataType,
    *,
    nullable: bool = True,
    first_row: int = 0,
    advice: str = WRITE_ADVICE,
) -> pa.Array:
    """The values of a column as ``dtype``, each exactly; the same array if it has that type.

    Args:
        name: of the column, for errors.
        array: without chunks.
        nullable: whether nulls may come.
        first_row: number of its first row, for errors.
        advice: what to do after an error.

    Raises:
        SchemaError: names the column, both types, and the first value that does not survive with
            its row.
    """
    try:
        if can_become(array.type, dtype) is Verdict.NEVER:
            raise SchemaError(
                f"column {name!r} comes as {array.type}, which cannot become {dtype}: {advice}"
            )
        return as_column(array, pa.field(name, dtype, nullable))
    except Misfit as misfit:
        raise SchemaError(
            f"column {name!r}: {misfit.value} in row {first_row + misfit.row} cannot become "
            f"{dtype} without a loss; the column comes as {array.type}: {advice}"
        ) from None
    except pa.ArrowException as error:
        raise SchemaError(
            f"column {name!r} comes as {array.type} and cannot become {dtype} ({error}): {advice}"
        ) from None


def require_no_nulls(counts: Mapping[str, int]) -> None:
    """Refuses the nulls of a write with ``nulls="refuse"``.

    Args:
        counts: column -> the nulls that are refused.

    Raises:
        LoadError: names each column with nulls.
    """
    problems = [f"{count} in column {name!r}" for name, count in counts.items() if count]
    if problems:
        raise LoadError(
            f"the rows have nulls, {some_of(problems)}, and the write has nulls='refuse': fill "
            "them or leave their rows out before you write, or write with nulls='keep'"
        )
