"""`View`: what a job reads of a dataset, other than each row once. Each option is declared here.

An option has its type, its default, a check of its value, and the options that it needs or
excludes, in one place; `View` reads them. It asks no node.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cache_client.job.argument_names import names_explained
from cache_client.job.arguments import are_names, flag_problems, integer_problem
from cache_client.order.view_text import view_text
from cache_client.view_options.lookups import MAX_BUCKETS, Frequent, Join, Rule, Vocabulary
from cache_client.views.packing import (
    LONG_DOCUMENTS,
    PACK_OUTPUTS,
    PackOutput,
)
from cache_client.views.splits import MOST_FOLDS, as_fraction, is_whole
from cache_protocol.datasets.values import as_integer, as_number
from cache_protocol.errors import ConfigError, some_of

_MAX_EPOCH_ROWS: Final = 2**31
_MAX_LENGTH: Final = 2**31 - 1
_MAX_TOKEN: Final = 2**63 - 1
_GIVE_ONE: Final = "give one of them"
_ALL_ROWS: Final = "a group has all its rows"
MAKE_COLUMNS: Final = ("codes", "join", "pad_lists")
"""Options of `View` that only make columns; the others choose rows."""
_NO_OTHER_COLUMN: Final = "a batch has no other column"

Check = Callable[[str, Any], list[str]]
"""The name of an option and its value -> its problems, each with the value."""


@dataclass(frozen=True)
class _Rule:
    """What holds for an option that is given.

    Attributes:
        check: of its value.
        needs: one of these options must be given, too.
        excludes: other option -> why both cannot be given.
        formats: the batch formats that it works with; empty: all.
    """

    check: Check
    needs: tuple[str, ...]
    excludes: Mapping[str, str]
    formats: tuple[str, ...]


def _option(
    check: Check,
    *,
    default: Any = None,
    needs: Sequence[str] = (),
    excludes: Mapping[str, str] | None = None,
    formats: Sequence[str] = (),
) -> Any:
    rule = _Rule(check, tuple(needs), excludes or {}, tuple(formats))
    return field(default=default, metadata={"rule": rule})


def _text(what: str) -> Check:
    def check(name: str, value: Any) -> list[str]:
        fits = isinstance(value, str) and value.strip()
        return [] if fits else [f"{name} must be {what}, got {value!r}"]

    return check


def _integer(least: int, most: int) -> Check:
    return lambda name, value: integer_problem(name, value, least, most)


def _columns(name: str, value: Any) -> list[str]:
    fits = are_names(value) and len(value) and all(each.strip() for each in value)
    return [] if fits else [f"{name} must be a list of columns, got {value!r}"]


def _column_or_columns(name: str, value: Any) -> list[str]:
    if not _columns(name, [value] if isinstance(value, str) else value):
        return []
    return [f"{name} must be a column or a list of columns, got {value!r}"]


def _split(name: str, value: Any) -> list[str]:
    if not isinstance(value, Mapping) or not value or not all(
        isinstance(part, str) and _is_share(share) for part, share in value.items()
    ):  # fmt: skip
        return [
            f"{name} must map names to fractions between 0 and 1, such as "
            f"{{'train': 0.9, 'val': 0.1}}, got {value!r}"
        ]
    if sum(map(as_fraction, value.values())) > 1 and not is_whole(value):
        return [f"the fractions of {name} must be at most 1 together, got {value!r}"]
    return []


def _is_share(value: object) -> bool:
    number = as_number(value)
    return number is not None and not math.isnan(number) and 0 < number <= 1


def _fold(name: str, value: Any) -> list[str]:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        index, count = map(as_integer, value)
        if index is not None and count is not None and 0 <= index < count and count >= 2:
            most = f"{name} has at most {MOST_FOLDS} folds, got {value!r}"
            return [] if count <= MOST_FOLDS else [most]
    return [f"{name} must be (i, k) with 0 <= i < k and k >= 2, such as (0, 5), got {value!r}"]


def _row_ids(name: str, value: Any) -> list[str]:
    try:
        found = np.asarray(value)
    except (TypeError, ValueError):  # such as lists of several lengths
        found = np.empty((), object)
    if found.shape == (0,) or (found.ndim == 1 and found.dtype.kind in "iu"):
        return []
    return [f"{name} must be a list of row ids, got {reprlib.repr(value)}"]


def _outputs(name: str, value: Any) -> list[str]:
    if are_names(value) and set(value) <= set(PACK_OUTPUTS):
        return []
    return [f"{name} must be some of {', '.join(PACK_OUTPUTS)}, got {value!r}"]


def _long_documents(name: str, value: Any) -> list[str]:
    if value in LONG_DOCUMENTS:
        return []
    return [f"{name} must be one of {', '.join(LONG_DOCUMENTS)}, got {value!r}"]


def _window(name: str, value: Any) -> list[str]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return [f"{name} must be a pair of length and stride, got {value!r}"]
    return integer_problem(f"the length of {name}", value[0], 1, _MAX_LENGTH) + integer_problem(
        f"the stride of {name}", value[1], 1, _MAX_LENGTH
    )


def _padding(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping) and all(
        isinstance(column, str) and isinstance(filler, int | float)
        for column, filler in value.items()
    ):
        return []
    return [f"{name} must be a dict from column to a number, got {value!r}"]


def _codes(name: str, value: Any) -> list[str]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not (isinstance(value, Mapping) or is_list) or not all(
        isinstance(column, str) and column for column in value
    ):
        return [f"{name} must be columns, or a dict from column to a rule, got {value!r}"]
    return [
        f"{name} of {column!r} must be 'sorted', a Frequent, a Vocabulary or a number of buckets "
        f"from 1 to {MAX_BUCKETS}, got {rule!r}"
        for column, rule in (value.items() if isinstance(value, Mapping) else ())
        if not _is_rule(rule)
    ]


def _is_rule(rule: object) -> bool:
    if isinstance(rule, int) and not isinstance(rule, bool):
        return 1 <= rule <= MAX_BUCKETS
    return isinstance(rule, Frequent | Vocabulary) or (isinstance(rule, str) and rule == "sorted")


def _joins(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping) and all(
        isinstance(key, str) and key and isinstance(other, str | Join) and other
        for key, other in value.items()
    ):
        return []
    return [f"{name} must be a dict from a key column to a dataset, got {value!r}"]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class View:
    """What a job reads of a dataset, other than each row once.

    Immutable; may be printed, compared, pickled and shared by datasets. Options that choose rows,
    say how often each comes, make samples of several rows, or add columns, may be combined, unless
    one excludes another.

    Raises:
        ConfigError: quotes every bad option.
    """

    where: str | None = _option(_text("SQL of a condition on each row"))
    """SQL of a condition on each row, such as ``"price > 100 AND city = 'Oslo'"``. The nodes
    evaluate it."""

    split: Mapping[str, float] | None = _option(_split)
    """Name of a part -> its share of the rows, such as ``{"train": 0.9, "val": 0.1}``. Each row is
    in a part by a hash of its row id, or of ``split_by``."""

    part: str | None = _option(_text("the name of a part of split"), needs=("split",))
    """The part of ``split`` to read."""

    split_by: Sequence[str] | None = _option(_columns, needs=("split", "fold", "except_fold"))
    """Key columns: all rows of a key are in the same part and in the same fold."""

    fold: tuple[int, int] | None = _option(_fold, excludes={"except_fold": _GIVE_ONE})
    """``(i, k)``: fold i of k, for validation."""

    except_fold: tuple[int, int] | None = _option(_fold)
    """``(i, k)``: all rows but those of fold i, for training."""

    subset: Sequence[int] | npt.NDArray[np.integer[Any]] | None = _option(_row_ids)  # noqa: RUF009
    """Row ids, in the order in which the rows are read; they may repeat."""

    weights: str | None = _option(
        _text("the name of a column or SQL"), excludes={"per_class": _GIVE_ONE}
    )
    """A column of numbers, or SQL such as ``1 / (1 + clicks)``: how often a row comes, in
    proportion. A row of weight 0 never comes. The client keeps 8 bytes a row."""

    replacement: bool = _option(flag_problems, default=True, needs=("weights",))
    """True: each sample draws a row anew. False: each epoch draws its rows anew, one after the
    other, each in proportion to the weights of those left. Each process that reads keeps 4 bytes
    more for each row of the last two epochs."""

    per_class: str | None = _option(_text("the name of a column or SQL"))
    """A column, or SQL, of a class: all classes come equally often, in every run of as many samples
    as there are classes. A class gives all its rows before it repeats one, over epochs too. A null
    or NaN is no class, and -0.0 is that of 0.0. The client keeps 4 bytes a row."""

    epoch_rows: int | None = _option(_integer(1, _MAX_EPOCH_ROWS))
    """Samples of an epoch. Default: the number of rows; with ``replacement=False`` the sum of the
    weights by the largest one, and at most the number of weights above 0. With ``per_class`` the
    next lower multiple of the number of classes. Without weights and classes, epochs go on where
    the one before ended."""

    pack: str | None = _option(
        _text("the name of a column"),
        needs=("sequence_length",),
        excludes={
            "group_by": _GIVE_ONE,
            "length_buckets": _GIVE_ONE,
            "codes": _NO_OTHER_COLUMN,
            "join": _NO_OTHER_COLUMN,
        },
        formats=("torch", "numpy"),
    )
    """A column of lists of integers, the tokens of a document; a batch has ``[B, L]`` of them,
    int64, and no other column. ``chat.tokens`` is one field of a struct."""

    sequence_length: int | None = _option(_integer(1, _MAX_LENGTH), needs=("pack",))
    """Tokens L of a packed sequence."""

    cut_documents: bool = _option(flag_problems, default=True, needs=("pack",))
    """True: the stream of shuffled documents is cut every L tokens. False: a document stays whole,
    unless it has more than L tokens."""

    long_documents: str = _option(_long_documents, default="split", needs=("cut_documents",))
    """With ``cut_documents=False``, what becomes of a document of more than L tokens: ``split``
    into pieces of L and a rest, ``drop``, or ``truncate`` to its first L tokens."""

    best_fit: bool = _option(flag_problems, default=False, needs=("long_documents",))
    """Pack whole documents, which are dropped or truncated, into as few sequences as best fit finds
    over the whole epoch. The client keeps 8 bytes a document. Default: in order, while they fit."""

    end_token: int | None = _option(_integer(0, _MAX_TOKEN), needs=("pack",))
    """A token that follows each document, as one of its tokens; it is a label where the token
    before it is."""

    pad_token: int = _option(_integer(-_MAX_TOKEN - 1, _MAX_TOKEN), default=0, needs=("pack",))
    """In places of a sequence without a token."""

    pack_outputs: Sequence[PackOutput] = _option(
        _outputs, default=("position_ids", "labels"), needs=("pack",)
    )
    """What a batch has beside the tokens: some of ``position_ids``, ``labels``, ``document_ids``,
    ``seq_idx`` and ``cu_seqlens``, with ``max_seqlen``."""

    label_mask: str | None = _option(
        _text("the name of a column"), needs=("pack",), excludes={"label_column": _GIVE_ONE}
    )
    """A column of lists of 0 and 1, beside the tokens: which tokens are labels."""

    label_column: str | None = _option(_text("the name of a column"), needs=("pack",))
    """A column of lists of labels, beside the tokens; default: the tokens."""

    group_by: str | Sequence[str] | None = _option(
        _column_or_columns,
        excludes={
            "length_buckets": _GIVE_ONE,
            "weights": _ALL_ROWS,
            "per_class": _ALL_ROWS,
            "epoch_rows": _ALL_ROWS,
        },
        formats=("torch", "numpy", "arrow"),
    )
    """A column, or several; the rows with the same values of them are one sample."""

    order_by: str | None = _option(_text("the name of a column"), needs=("group_by",))
    """A column that orders the rows of a group; default: the order of the source, or of
    ``subset``."""

    window: tuple[int, int] | None = _option(_window, needs=("group_by",))
    """Pair of length and stride; samples are so many rows of a group, every stride rows."""

    length_buckets: str | None = _option(_text("SQL of the length of a row"))
    """SQL of the length of a row, such as ``array_length(tokens)``: steps have rows of similar
    lengths."""

    bucket_rows: int = _option(_integer(1, _MAX_LENGTH), default=1024, needs=("length_buckets",))
    """Rows among which lengths are similar. Give a multiple of ``world_size * batch_size``."""

    pad_lists: Mapping[str, float] | None = _option(
        _padding,
        excludes={"pack": _NO_OTHER_COLUMN, "group_by": "groups are lists already"},
        formats=("torch", "numpy"),
    )
    """Column of lists -> the value that pads it to the longest list of a batch."""

    codes: Sequence[str] | Mapping[str, Rule] | None = _option(_codes)
    """Columns whose values become int32 codes, or a dict from column to how: ``"sorted"`` (the
    default: 1, 2, ... in the order of the values), a `Frequent`, a `Vocabulary` of an earlier job,
    or a number of hash buckets. 0 stands for nulls and unknown values; buckets begin at 0.
    `CacheIterableDataset.vocabulary` has the values. The client keeps 4 bytes a row for each."""

    join: Mapping[str, str | Join] | None = _option(_joins)
    """Key column -> the name of a dataset, or a `Join`: its columns follow those of the batch, from
    its row with the same key. The client holds that dataset once."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is None:  # stands for an option that is left out
                object.__setattr__(self, each.name, each.default)
        given, problems = self.given(), []
        for name, value in given.items():
            rule = _RULES[name]
            problems += rule.check(name, value)
            problems += [
                f"{name} and {other} exclude each other: {why}"
                for other, why in rule.excludes.items()
                if other in given
            ]
            if rule.needs and not any(other in given for other in rule.needs):
                problems.append(f"{name} needs {' or '.join(rule.needs)}, got {value!r}")
        if "split" in given and not problems and self.part not in given["split"]:
            problems.append(f"part must be one of {some_of(given['split'])}, got {self.part!r}")
        if not problems and "labels" not in self.pack_outputs:
            problems += [
                f"{name} needs pack_outputs with 'labels', got {self.pack_outputs!r}"
                for name in ("label_mask", "label_column")
                if name in given
            ]
        if problems:
            raise ConfigError("; ".join(problems))

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults, in the order of their declaration."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {name: value for name, (value, default) in values.items() if not _is(value, default)}

    @property
    def text(self) -> str:
        """The view for states and reports, as JSON of bounded size; "" for the plain read."""
        return view_text(self.given())

    @property
    def rows(self) -> View:
        """The view without the options that only make columns."""
        return self.with_columns_of(View())

    def with_columns_of(self, other: View) -> View:
        """The view with the options of another one that only make columns."""
        return replace(self, codes=other.codes, join=other.join, pad_lists=other.pad_lists)

    def problems_with(self, *, batch_format: object, stacks: bool) -> list[str]:
        """Why a job cannot read this view; each option is quoted.

        Args:
            batch_format: of the job.
            stacks: whether the job has a ``stack``.
        """
        given = self.given()
        problems = [
            f"{name} needs a batch_format of {', '.join(formats)}, got {batch_format!r}"
            for name in given
            if (formats := _RULES[name].formats) and batch_format not in formats
        ]
        if stacks and "pack" in given:
            problems.append(f"pack and stack exclude each other: {_NO_OTHER_COLUMN}")
        return problems

    def __repr__(self) -> str:
        shown = (f"{name}={_shown(value)}" for name, value in self.given().items())
        return f"{type(self).__name__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, View):
            return NotImplemented
        ours, theirs = self.given(), other.given()
        return ours.keys() == theirs.keys() and all(_is(ours[name], theirs[name]) for name in ours)

    def __hash__(self) -> int:
        return hash(repr(self))


View.__init__ = names_explained()(View.__init__)  # type: ignore[method-assign]

_RULES: Final[Mapping[str, _Rule]] = {each.name: each.metadata["rule"] for each in fields(View)}


def _is(one: object, other: object) -> bool:
    """Whether two values of an option are the same; arrays are compared by their content."""
    if one is None or other is None:
        return one is other
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(np.asarray(one), np.asarray(other)))
    return type(one) is type(other) and bool(one == other)


def _shown(value: object) -> str:
    """An option for people: long lists are cut."""
    if isinstance(value, np.ndarray):
        value = value[:7].tolist()
    return reprlib.repr(value) if isinstance(value, list) else repr(value)
