"""``cachectl stats``: what the values of columns are, as the nodes compute it."""

from __future__ import annotations

from typing import Annotated, Any

import pyarrow as pa
import typer

from cache_client.cli.app import AsJson, Endpoint, Name, connection_of
from cache_client.cli.display import cell, json_value, print_json, show_line, show_rows
from cache_client.control.row_reads import open_version
from cache_client.job.connection import access_to
from cache_client.view_options.columns import VersionNodes, column_stats
from cache_protocol.cli.facts import counted, type_name
from cache_protocol.errors import ConfigError, some_of
from cache_protocol.storage.column_stats import KEPT, ColumnStats

_RANKS = (0.05, 0.25, 0.5, 0.75, 0.95)
_AT_ONCE = 64  # columns: their sketches take 50 KB each, of each part of a shard


def stats(
    name: Name,
    columns: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COLUMN]...", help="Columns.  [default: all]"),
    ] = None,
    endpoint: Endpoint = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for each answer.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Show counts, extremes, means and quantiles of columns."""
    access = access_to(connection_of(endpoint, timeout_s))
    shards = open_version(access, name)
    types = {field.name: field.type for field in shards.logical}
    wanted = columns or list(types)
    if unknown := [each for each in wanted if each not in types]:
        raise ConfigError(
            f"dataset {name!r} has no column {some_of(map(repr, unknown))}; "
            f"it has {some_of(types, like=unknown[0])}"
        )
    version = VersionNodes(access.endpoint, shards, access.credentials, access.deadline_s)
    found: dict[str, ColumnStats] = {}
    for at in range(0, len(wanted), _AT_ONCE):
        some = wanted[at : at + _AT_ONCE]
        found |= zip(some, column_stats(version, some), strict=True)
    if as_json:
        print_json({each: _json(found[each], types[each]) for each in found})
        return
    show_line(f"{name}  {counted(shards.num_rows, 'row')}")
    has_nan = any(each.nans for each in found.values())
    header = ["column", "type", "count", "nulls", *(["nan"] if has_nan else []), "min"]
    header += [*(f"{rank:.0%}" for rank in _RANKS), "max", "mean", "distinct"]
    show_rows(header, [_row(each, types[each], found[each], has_nan) for each in found])
    for note in _notes(found.values()):
        show_line(note)


def _row(name: str, dtype: pa.DataType, of: ColumnStats, has_nan: bool) -> list[str]:
    least, greatest = _bounds(of)
    return [
        name,
        type_name(dtype),
        f"{of.rows - of.nulls:,}",
        f"{of.nulls:,}",
        *([f"{of.nans:,}"] if has_nan else []),
        least,
        *(_quantiles(of, dtype) or [""] * len(_RANKS)),
        greatest,
        "" if of.mean is None else f"{of.mean:.6g}",
        "" if of.distinct is None else f"{'' if of.distinct_exact else '~'}{of.distinct:,}",
    ]


def _json(of: ColumnStats, dtype: pa.DataType) -> dict[str, Any]:
    bounds = [None, None] if of.bounds is None else of.bounds
    least, greatest = (
        _text(each) if _is_time(dtype) and each is not None else _value(each) for each in bounds
    )
    return {
        "type": type_name(dtype),
        "count": of.rows - of.nulls,
        "nulls": of.nulls,
        "nans": of.nans,
        "min": least,
        "max": greatest,
        "mean": of.mean,
        "quantiles": dict(zip(map(str, _RANKS), _quantiles(of, dtype), strict=False)),
        "quantiles_exact": of.quantiles_exact,
        "distinct": of.distinct,
        "distinct_exact": of.distinct_exact,
    }


def _notes(found: Any) -> list[str]:
    notes = []
    if any(not each.distinct_exact for each in found):
        notes.append("~ distinct: estimated; the standard error is 2.2%")
    if any(len(each.sample) and not each.quantiles_exact for each in found):
        notes.append(
            f"quantiles: of a uniform sample of {KEPT:,} rows, the same in each run; the rank is "
            "off by at most 2.2 points in 95 of 100"
        )
    if any(each.nans for each in found):
        notes.append("count has NaN; min, quantiles, max, mean and distinct leave it out")
    return notes


def _bounds(of: ColumnStats) -> tuple[str, str]:
    return ("", "") if of.bounds is None else (_text(of.bounds[0]), _text(of.bounds[1]))


def _quantiles(of: ColumnStats, dtype: pa.DataType) -> list[str]:
    found = of.quantiles(_RANKS)
    if found and of.bounds is not None and _is_time(dtype):
        width = pa.int32() if dtype.bit_width == 32 else pa.int64()
        return [_text(each) for each in pa.array(map(int, found), width).view(of.bounds.type)]
    return [f"{each:.6g}" for each in found]


def _is_time(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_temporal(dtype))


def _value(scalar: pa.Scalar | None) -> object:
    return None if scalar is None else json_value(scalar.as_py())


def _text(scalar: pa.Scalar) -> str:
    if not _is_time(scalar.type):
        return cell(scalar.as_py(), scalar.type)
    if pa.types.is_duration(scalar.type):
        return f"{scalar.value} {scalar.type.unit}"
    text: str = scalar.cast(pa.string()).as_py()  # nanoseconds are no Python times
    return text
