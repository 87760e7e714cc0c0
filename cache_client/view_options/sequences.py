"""Samples of several rows, and rows ordered by length -> views and assemblers.

These are packed tokens, groups and windows, length buckets, and padded lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_client.job.arguments import BatchFormat
from cache_client.view_options.job_view import JobView
from cache_client.view_options.list_values import LENGTHS, grouping, mask_of, padding_lists
from cache_client.view_options.options import View
from cache_client.view_options.packed_batches import PackedAssembler
from cache_client.views.best_fit import BestFitView
from cache_client.views.groups import GroupsView, group_table, joint_key, window_ends
from cache_client.views.length_buckets import LengthBucketsView
from cache_client.views.packing import LongDocuments, PackingView
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import (
    Shuffle,
    SlotView,
    as_sql,
    codes_of,
    of_slots,
    quoted,
    quoted_path,
)
from cache_protocol.errors import ConfigError, some_of
from cache_protocol.storage.flat_columns import field_path, numpy_dtype
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.nested_values import plain_type

_TOKENS_AT_ONCE = 2**18  # few calls a token


def sequence_columns(options: View, columns: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that a job reads, of those that it asks for; empty: all.

    Raises:
        ConfigError: packed batches have other columns than those asked for.
    """
    if options.pack is None:
        return columns
    beside = (options.label_mask, options.label_column)
    needed = (options.pack, *(column for column in beside if column is not None))
    if not set(columns) <= set(needed):
        raise ConfigError(
            f"pack reads columns {list(needed)!r} only, got columns={list(columns)!r}"
        )
    return tuple(dict.fromkeys(needed))


def make_sequences(
    options: View,
    inner: SlotView,
    layout: Layout,
    *,
    shuffle: Shuffle,
    batch_format: BatchFormat,
    values: Callable[[str], pa.ChunkedArray],
) -> JobView:
    """The view and the assembler that the options ask for; without any, the inner view.

    Args:
        inner: chooses rows; each slot has one.
        layout: of the columns that are read.
        shuffle: of the job.
        batch_format: of the job.
        values: SQL of one value a row -> the values of all rows of the version.

    Raises:
        ConfigError: a column is not of lists of integers, or a length is no length; quotes it.
        RequestError: as `row_values`.
    """
    if options.pack is not None:
        return _packing(options, inner, layout, shuffle, batch_format, values)
    if options.group_by is not None:
        return _groups(options, inner, values)
    made = JobView(inner)
    if options.length_buckets is not None:
        sql = options.length_buckets
        lengths = _lengths(f"length_buckets={sql!r}", values(as_sql(sql, layout.logical.names)))
        made = JobView(LengthBucketsView(inner, lengths, options.bucket_rows, shuffle, sql))
    if options.pad_lists is not None:
        padding = dict(options.pad_lists)
        for column, value in padding.items():
            _check_lists(_types(layout), "pad_lists", column, floats=True)
            _check_padding(layout, column, value)
        made = replace(
            made,
            assembler=partial(padding_lists, padding=padding, batch_format=batch_format),
            added=tuple((mask_of(column), "pad_lists") for column in padding),
        )
    return made


def sequences_at_once(sequence_length: int) -> int:
    """How many packed sequences are best made at once: tokens of 2 MiB, at least one sequence."""
    return max(1, _TOKENS_AT_ONCE // sequence_length)


def _packing(
    options: View,
    inner: SlotView,
    layout: Layout,
    shuffle: Shuffle,
    batch_format: BatchFormat,
    values: Callable[[str], pa.ChunkedArray],
) -> JobView:
    column, length = options.pack, options.sequence_length
    assert column is not None and length is not None  # which the options say
    beside = {"label_mask": options.label_mask, "label_column": options.label_column}
    columns = {name: each.dtype for name, each in layout.flat.items()}
    for name, each in {"pack": column, **beside}.items():
        if each is not None:
            _check_lists({**_types(layout), **columns}, name, each)
    sql = quoted_path(field_path(layout.logical, column))
    lengths = _lengths(f"pack={column!r}", values(f"array_length({sql})"))
    make = BestFitView if options.best_fit else PackingView
    view = make(
        inner,
        lengths,
        length,
        options.cut_documents,
        shuffle,
        column,
        cast(LongDocuments, options.long_documents),
        options.end_token is not None,
    )
    assemble = PackedAssembler(
        column,
        length,
        int(options.pad_token),
        tuple(options.pack_outputs),
        batch_format,
        options.label_mask,
        options.label_column,
        None if options.end_token is None else int(options.end_token),
    )
    return JobView(
        view,
        partial(_without_converter, assemble),
        slots_at_once=sequences_at_once(length),
        kept=(column,),
        added=tuple((name, "pack_outputs") for name in assemble.added),
    )


def _without_converter(assemble: PackedAssembler, _: object) -> PackedAssembler:
    return assemble


def _groups(
    options: View,
    inner: SlotView,
    values: Callable[[str], pa.ChunkedArray],
) -> JobView:
    by, order = options.group_by, options.order_by
    names = [by] if isinstance(by, str) else list(by or ())
    window = None if options.window is None else (int(options.window[0]), int(options.window[1]))
    rows = inner.samples(np.arange(inner.num_slots(0)), 0).row_ids
    codes = [codes_of(f"group_by={name!r}", values(quoted(name))) for name in names]
    keys = joint_key([of_slots(each, inner) for each in codes])
    times = None if order is None else of_slots(values(quoted(order)), inner)
    try:
        found, offsets = group_table(rows, keys, times)
    except pa.ArrowNotImplementedError:
        assert times is not None
        raise ConfigError(
            f"order_by={order!r} must have an order, and it is {times.type}"
        ) from None
    view = GroupsView(
        SharedArray(found),
        SharedArray(offsets),
        f"{inner.identity}groups({names[0] if len(names) == 1 else names!r},{order!r},{window!r})",
        window,
        None if window is None else SharedArray(window_ends(offsets, window)),
    )
    assembler = partial(grouping, length=None if window is None else window[0])
    return JobView(view, assembler, added=((LENGTHS, "group_by"),) if window is None else ())


def _lengths(option: str, found: pa.ChunkedArray) -> SharedArray:
    """Values as unsigned integers of the smallest type that holds them; nulls are 0."""
    kind = found.type
    if not (pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise ConfigError(f"{option} must give integers, got {kind}")
    least = pc.min(found).as_py() or 0
    if least < 0:
        raise ConfigError(f"{option} must give lengths, got {least}")
    dtype = np.min_scalar_type(pc.max(found).as_py() or 0)
    filled = found.cast(pa.from_numpy_dtype(dtype)).fill_null(0)
    return SharedArray(filled.to_numpy())


def _types(layout: Layout) -> dict[str, pa.DataType]:
    return dict(zip(layout.logical.names, layout.logical.types, strict=True))


def _check_lists(
    types: Mapping[str, pa.DataType], option: str, column: str, *, floats: bool = False
) -> None:
    if column not in types:
        raise ConfigError(f"{option}: no column {column!r}; columns: {some_of(types, like=column)}")
    kind = plain_type(types[column])
    inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None
    if inner is None and pa.types.is_fixed_size_list(kind) and not floats:
        inner = kind.value_type
    fits = inner is not None and (pa.types.is_integer(inner) or pa.types.is_boolean(inner))
    fits = fits or (floats and inner is not None and pa.types.is_floating(inner))
    if not fits or inner == pa.uint64():
        wanted = "numbers" if floats else "integers"
        field = f": name a field of it, as {column}.FIELD" if pa.types.is_struct(kind) else ""
        raise ConfigError(f"{option}: column {column!r} is {kind}, not a list of {wanted}{field}")


def _check_padding(layout: Layout, column: str, value: float) -> None:
    kind = plain_type(layout.logical.field(column).type).value_type
    if pa.types.is_floating(kind):
        return
    dtype: Any = numpy_dtype(kind) if pa.types.is_integer(kind) else np.uint8
    high = np.iinfo(dtype).max if pa.types.is_integer(kind) else 1
    if not np.iinfo(dtype).min <= value <= high or value != int(value):
        raise ConfigError(f"pad_lists: column {column!r} cannot hold {value!r}")
