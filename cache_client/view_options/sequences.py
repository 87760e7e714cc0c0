"""Options of a job that make samples of several rows, or order rows by length.

It checks them and makes their views and assemblers: packed tokens, groups and windows, length
buckets, padded lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_client.job.arguments import BatchFormat, are_names, flag_problems, integer_or_problem
from cache_client.view_options.job_view import JobView
from cache_client.view_options.list_values import LENGTHS, grouping, mask_of, padding_lists
from cache_client.view_options.packed_batches import PACK_OUTPUTS, PackedAssembler, PackOutput
from cache_client.views.groups import GroupsView, group_table, joint_key, window_ends
from cache_client.views.length_buckets import LengthBucketsView
from cache_client.views.packing import PackingView
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import Shuffle, View, as_sql, codes_of, of_slots, quoted
from cache_protocol.errors import ConfigError
from cache_protocol.storage.layout import Layout, numpy_dtype

_MAX_LENGTH = 2**31 - 1
_MAX_TOKEN = 2**63 - 1
_DEFAULT_OUTPUTS: tuple[PackOutput, ...] = ("position_ids", "labels")
_DEFAULT_BUCKET_ROWS = 1024
_TOKENS_AT_ONCE = 2**18  # few calls a token


class SequenceOptions(TypedDict, total=False):
    """Samples of several rows, and rows ordered by length.

    Attributes:
        pack: a column of lists of integers, the tokens of a document; a batch has ``[B, L]`` of
            them, int64, and no other column.
        sequence_length: tokens L of a packed sequence.
        cut_documents: True (the default): the stream of shuffled documents is cut every L tokens.
            False: a document stays whole, unless it has more than L tokens.
        pad_token: in places of a sequence without a token; default: 0.
        pack_outputs: what a batch has beside the tokens: some of ``position_ids``, ``labels``
            (these two by default), ``document_ids`` and ``cu_seqlens``, with ``max_seqlen``.
        label_mask: a column of lists of 0 and 1, beside the tokens: which tokens are labels.
        label_column: a column of lists of labels, beside the tokens; default: the tokens.
        group_by: a column, or several; the rows with the same values of them are one sample.
        order_by: a column that orders the rows of a group; default: the order of the source, or of
            ``subset``.
        window: pair of length and stride; samples are so many rows of a group, every stride rows.
        length_buckets: SQL of the length of a row, such as ``array_length(tokens)``: steps have
            rows of similar lengths.
        bucket_rows: rows among which lengths are similar; default: 1024. Give a multiple of
            ``world_size * batch_size``.
        pad_lists: column of lists -> the value that pads it to the longest list of a batch.
    """

    pack: str
    sequence_length: int
    cut_documents: bool
    pad_token: int
    pack_outputs: Sequence[PackOutput]
    label_mask: str
    label_column: str
    group_by: str | Sequence[str]
    order_by: str
    window: tuple[int, int]
    length_buckets: str
    bucket_rows: int
    pad_lists: Mapping[str, float]


_NEEDS = {
    "pack": ("sequence_length", "cut_documents", "pad_token", "pack_outputs", "label_mask",
             "label_column"),
    "group_by": ("order_by", "window"),
    "length_buckets": ("bucket_rows",),
}  # fmt: skip


def sequence_problems(
    options: Mapping[str, Any], *, batch_format: object, stacks: bool
) -> list[str]:
    """The problems of the options that need no node; each is quoted."""
    problems = [
        f"{name} needs {main}, got {options[name]!r}"
        for main, others in _NEEDS.items()
        for name in others
        if name in options and main not in options
    ]
    for name in ("pack", "label_mask", "label_column", "order_by", "length_buckets"):
        if name in options and not (isinstance(options[name], str) and options[name].strip()):
            problems.append(f"{name} must be a text, got {options[name]!r}")
    used = [name for name in _NEEDS if name in options]
    if len(used) > 1:
        problems.append(f"{' and '.join(used)} exclude each other: give one of them")
    if "pack" in options:
        problems += _pack_problems(options, batch_format, stacks)
    if "group_by" in options:
        by = options["group_by"]
        names = [by] if isinstance(by, str) else by
        if not are_names(names) or not len(names) or not all(name.strip() for name in names):
            problems.append(f"group_by must be a column or a list of columns, got {by!r}")
        problems += _format_problems("group_by", batch_format, "torch", "numpy", "arrow")
    if "window" in options:
        problems += _window_problems(options["window"])
    integer_or_problem(problems, "bucket_rows", options.get("bucket_rows", 1), 1, _MAX_LENGTH)
    if "pad_lists" in options:
        problems += _padding_problems(options, batch_format)
    return problems


def _pack_problems(options: Mapping[str, Any], batch_format: object, stacks: bool) -> list[str]:
    problems: list[str] = []
    if "sequence_length" not in options:
        problems.append("pack needs sequence_length, the tokens of a sequence")
    length = options.get("sequence_length", 1)
    integer_or_problem(problems, "sequence_length", length, 1, _MAX_LENGTH)
    pad_token = options.get("pad_token", 0)
    integer_or_problem(problems, "pad_token", pad_token, -_MAX_TOKEN - 1, _MAX_TOKEN)
    problems += flag_problems("cut_documents", options.get("cut_documents", True))
    outputs = options.get("pack_outputs", _DEFAULT_OUTPUTS)
    if not are_names(outputs) or not set(outputs) <= set(PACK_OUTPUTS):
        problems.append(f"pack_outputs must be some of {', '.join(PACK_OUTPUTS)}, got {outputs!r}")
    elif "labels" not in outputs:
        problems += [
            f"{name} needs pack_outputs with 'labels', got {outputs!r}"
            for name in ("label_mask", "label_column")
            if name in options
        ]
    if "label_mask" in options and "label_column" in options:
        problems.append("label_mask and label_column exclude each other: give one of them")
    problems += _format_problems("pack", batch_format, "torch", "numpy")
    others = [name for name in ("codes", "join") if name in options] + ["stack"] * stacks
    return problems + [
        f"pack and {name} exclude each other: a batch has no other column" for name in others
    ]


def _window_problems(window: object) -> list[str]:
    problems: list[str] = []
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        return [f"window must be a pair of length and stride, got {window!r}"]
    integer_or_problem(problems, "the length of window", window[0], 1, _MAX_LENGTH)
    integer_or_problem(problems, "the stride of window", window[1], 1, _MAX_LENGTH)
    return problems


def _padding_problems(options: Mapping[str, Any], batch_format: object) -> list[str]:
    padding = options["pad_lists"]
    if not isinstance(padding, Mapping) or not all(
        isinstance(name, str) and isinstance(value, int | float) for name, value in padding.items()
    ):
        return [f"pad_lists must be a dict from column to a number, got {padding!r}"]
    problems = [
        f"pad_lists and {name} exclude each other"
        for name in ("pack", "group_by")
        if name in options
    ]
    return problems + _format_problems("pad_lists", batch_format, "torch", "numpy")


def _format_problems(option: str, batch_format: object, *known: str) -> list[str]:
    if batch_format in known:
        return []
    return [f"{option} needs a batch_format of {', '.join(known)}, got {batch_format!r}"]


def sequence_columns(options: Mapping[str, Any], columns: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that a job reads, of those that it asks for; empty: all.

    Raises:
        ConfigError: packed batches have other columns than those asked for.
    """
    if "pack" not in options:
        return columns
    needed = (
        options["pack"],
        *(options[k] for k in ("label_mask", "label_column") if k in options),
    )
    if not set(columns) <= set(needed):
        raise ConfigError(
            f"pack reads columns {list(needed)!r} only, got columns={list(columns)!r}"
        )
    return tuple(dict.fromkeys(needed))


def make_sequences(
    options: Mapping[str, Any],
    inner: View,
    layout: Layout,
    *,
    shuffle: Shuffle,
    batch_format: BatchFormat,
    values: Callable[[str], pa.ChunkedArray],
) -> JobView:
    """The view and the assembler that the options ask for; without any, the inner view.

    Args:
        options: without problems.
        inner: chooses rows; each slot has one.
        layout: of the columns that are read.
        shuffle: of the job.
        batch_format: of the job.
        values: SQL of one value a row -> the values of all rows of the version.

    Raises:
        ConfigError: a column is not of lists of integers, or a length is no length; quotes it.
        RequestError: as `row_values`.
    """
    if "pack" in options:
        return _packing(options, inner, layout, shuffle, batch_format, values)
    if "group_by" in options:
        return _groups(options, inner, values)
    made = JobView(inner)
    if "length_buckets" in options:
        sql = options["length_buckets"]
        lengths = _lengths(f"length_buckets={sql!r}", values(as_sql(sql, layout.logical.names)))
        bucket_rows = options.get("bucket_rows", _DEFAULT_BUCKET_ROWS)
        made = JobView(LengthBucketsView(inner, lengths, bucket_rows, shuffle, sql))
    if "pad_lists" in options:
        padding = dict(options["pad_lists"])
        for column, value in padding.items():
            _check_lists(layout, "pad_lists", column, floats=True)
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
    options: Mapping[str, Any],
    inner: View,
    layout: Layout,
    shuffle: Shuffle,
    batch_format: BatchFormat,
    values: Callable[[str], pa.ChunkedArray],
) -> JobView:
    column = options["pack"]
    for name in ("pack", "label_mask", "label_column"):
        if name in options:
            _check_lists(layout, name, options[name])
    length = int(options["sequence_length"])
    lengths = _lengths(f"pack={column!r}", values(f"array_length({quoted(column)})"))
    view = PackingView(inner, lengths, length, options.get("cut_documents", True), shuffle, column)
    assemble = PackedAssembler(
        column,
        length,
        int(options.get("pad_token", 0)),
        tuple(options.get("pack_outputs", _DEFAULT_OUTPUTS)),
        batch_format,
        options.get("label_mask"),
        options.get("label_column"),
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
    options: Mapping[str, Any],
    inner: View,
    values: Callable[[str], pa.ChunkedArray],
) -> JobView:
    by, order = options["group_by"], options.get("order_by")
    names = [by] if isinstance(by, str) else list(by)
    window = (int(options["window"][0]), int(options["window"][1])) if "window" in options else None
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


def _check_lists(layout: Layout, option: str, column: str, *, floats: bool = False) -> None:
    if column not in layout.logical.names:
        raise ConfigError(
            f"{option}: no column {column!r}; columns: {', '.join(layout.logical.names)}"
        )
    kind = layout.logical.field(column).type
    inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None
    if inner is None and pa.types.is_fixed_size_list(kind) and not floats:
        inner = kind.value_type
    fits = inner is not None and (pa.types.is_integer(inner) or pa.types.is_boolean(inner))
    fits = fits or (floats and inner is not None and pa.types.is_floating(inner))
    if not fits or inner == pa.uint64():
        wanted = "numbers" if floats else "integers"
        raise ConfigError(f"{option}: column {column!r} is {kind}, not a list of {wanted}")


def _check_padding(layout: Layout, column: str, value: float) -> None:
    kind = layout.logical.field(column).type.value_type
    if pa.types.is_floating(kind):
        return
    dtype: Any = numpy_dtype(kind) if pa.types.is_integer(kind) else np.uint8
    high = np.iinfo(dtype).max if pa.types.is_integer(kind) else 1
    if not np.iinfo(dtype).min <= value <= high or value != int(value):
        raise ConfigError(f"pad_lists: column {column!r} cannot hold {value!r}")
