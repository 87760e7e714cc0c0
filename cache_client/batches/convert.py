"""Rows -> the batches a training loop sees: dicts of tensors or arrays, or Arrow record batches.

A dict is made of flat columns, and structs become dicts in it. Record batches and frames have the
logical columns, with their nulls.

A scalar column is copied out of its packed matrix, because collectives and `view` need contiguous
memory, and a column that is kept or pickled must not keep its neighbours. A stack of at most a
quarter of the matrix is copied too. Other columns stacked in the order in which they lie side by
side are a view, as matrices are; any other stack is a copy. Knows neither nodes nor order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.utils.data import get_worker_info

from cache_client.batches.batch_formats import (
    ListColumn,
    check_package,
    refuse_workers,
    to_jax,
    to_polars,
)
from cache_client.batches.column_values import (
    Finish,
    finish_of,
    floats_of,
    shape_of,
    values_getter,
    without,
    words_of,
)
from cache_client.batches.images import ImageDecoder, ImageMode
from cache_client.batches.null_rules import NullRules, Nulls, is_number_column, value_type
from cache_client.job.arguments import BatchFormat
from cache_client.reading.rows import Rows, cut
from cache_protocol.errors import ConfigError, RequestError, some_of
from cache_protocol.storage.flat_columns import FlatColumn, FlatStruct, FlatTree
from cache_protocol.storage.layout import Layout, transposed

_Array = npt.NDArray[np.generic]
_Getter = Callable[[Rows], Any]
_Cutter = Callable[[torch.Tensor], dict[str, torch.Tensor]]

_FEW = 16  # columns of a matrix that are copied one by one; more are transposed together before
_SMALL = 4  # a stack is copied out of a matrix that is at least so many times as wide


class _View(NamedTuple):
    """A column, or a stack of neighbours, inside a stored column."""

    stored: int
    part: int | slice


class Converter:
    """Turns rows into batches of one format. Immutable, any thread.

    A list of numbers becomes a 1-d tensor or array; a list with a null becomes a Python list. A
    batch may hold both.

    Args:
        layout: of the rows.
        stack: new name -> columns that it replaces; each becomes one ``[B, n]`` tensor. Several
            dtypes become the smallest dtype that holds them all. 64-bit integers with floats become
            float64, which is exact up to 2**53.
        batch_format: ``torch`` (a dict of tensors), ``numpy`` (a dict of arrays) or ``arrow`` (a
            RecordBatch), ``jax`` (a dict of JAX arrays) or ``polars`` (a DataFrame).
        stack_dtype: of every stack, a dtype of torch or numpy; default: as above.
        copy: scalar columns and small stacks own their memory; False: they are strided views of the
            rows of a window.
        decode: binary columns with encoded images -> how to decode them, see `ImageDecoder`.
        nulls: what stands for nulls of numbers, see `null_rules`; tables have their nulls.

    Columns in ``stack``, ``decode`` and ``nulls`` may be fields of structs, as in ``address.zip``.

    Raises:
        ConfigError: names a column that is unknown, used twice, or cannot be stacked. Integers
            that have no common integer dtype, such as ``int64`` and ``uint64``, are not stacked.
            A fill value does not fit; quotes it.
    """

    def __init__(
        self,
        layout: Layout,
        stack: Mapping[str, Sequence[str]] | None = None,
        batch_format: BatchFormat = "torch",
        *,
        copy: bool = True,
        stack_dtype: object = None,
        decode: Mapping[str, ImageMode] | None = None,
        nulls: Nulls | None = None,
    ) -> None:
        check_package(batch_format)
        stacks = {name: list(columns) for name, columns in (stack or {}).items()}
        dtype = None if stack_dtype is None else _number_dtype(stack_dtype)
        _check_stacks(layout, stacks, batch_format, dtype)
        self._layout = layout
        self._batch_format: BatchFormat = batch_format
        self._rules = NullRules(layout, nulls)
        views = _views(layout, stacks)
        cast = {
            name
            for name, columns in stacks.items()
            for column in columns
            if _is_decimal(layout.flat[column])
            or (dtype is not None and _stored(layout, column) != dtype)
        }
        views = {
            name: view
            for name, view in views.items()
            if name not in cast and not (copy and _is_small_stack(layout, view))
        }
        getters = _getters(layout, stacks, views, dtype, self._rules, batch_format)
        getters |= _image_getters(
            layout, decode or {}, self._rules, as_torch=batch_format == "torch"
        )
        self._flat_names = list(getters)
        self._finish = _finishes(layout, stacks, batch_format, cast=dtype is not None)
        self._places = _places(layout.tree, stacks)
        self._names = [
            *dict.fromkeys(path[0] for _, path in self._places),
            *self._rules.valid.values(),
        ]
        self._nested = any(len(path) > 1 for _, path in self._places)
        _check_masks(self._names, self._rules)
        self._copied = _scalars(layout, views) if copy else []
        own = {name for _, names, _ in self._copied for name in names}
        views = {name: view for name, view in views.items() if name not in own}
        self._cutters = _cutters(layout, views) if batch_format == "torch" else []
        cut = {index for index, _ in self._cutters}
        self._getters = [
            (name, get)
            for name, get in getters.items()
            if name not in own and (name not in views or views[name].stored not in cut)
        ]

    def __call__(self, rows: Rows) -> Any:
        """The batch of these rows; tensors share their memory."""
        refuse_workers(self._batch_format)
        if self.makes_tables:
            return self._table(rows.to_batch())
        if self._rules.prepares:
            self._rules.prepare(rows)
        batch: dict[str, Any] = dict.fromkeys(self._flat_names)
        as_torch = self._batch_format == "torch"
        for index, names, positions in self._copied:
            columns = _own_columns(rows.matrices[index], positions)
            tensors = map(torch.from_numpy, columns) if as_torch else columns
            batch.update(zip(names, tensors, strict=True))
        for index, cutter in self._cutters:
            batch.update(cutter(torch.from_numpy(rows.matrices[index])))
        convert = self._convert_value()
        for name, get in self._getters:
            value = get(rows)
            batch[name] = convert(value) if isinstance(value, np.ndarray) else value
        for name, finish in self._finish:
            batch[name] = finish(batch[name])
        masks = self._rules.masks(rows) if self._rules.valid else {}
        if self._batch_format == "jax":
            batch = {name: to_jax(name, value) for name, value in batch.items()}
            masks = {name: to_jax(name, mask) for name, mask in masks.items()}
        if self._nested:
            batch = self._in_structs(batch)
        for name, mask in masks.items():
            batch[name] = convert(mask) if self._batch_format != "jax" else mask
        return batch

    def _in_structs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The same values, in a dict for each struct."""
        found: dict[str, Any] = {}
        for name, path in self._places:
            inner = found
            for struct in path[:-1]:
                inner = inner.setdefault(struct, {})
            inner[path[-1]] = batch[name]
        return found

    def batches(self, rows: Rows, sizes: Sequence[int]) -> Iterator[Any]:
        """The batches of consecutive rows; tables are parts of one that has all of them.

        Args:
            sizes: rows of each batch.
        """
        if len(sizes) == 1 or not self.makes_tables:
            yield from map(self, cut([rows], sizes) if len(sizes) > 1 else [rows])
            return
        refuse_workers(self._batch_format)
        whole, stop = rows.to_batch(), 0
        for size in sizes:
            start, stop = stop, stop + size
            yield self._table(whole.slice(start, size))

    @property
    def makes_tables(self) -> bool:
        """Whether a batch is a table of another library, not a dict."""
        return self._batch_format in ("arrow", "polars")

    def _table(self, batch: pa.RecordBatch) -> Any:
        return batch if self._batch_format == "arrow" else to_polars(batch)

    @property
    def names(self) -> list[str]:
        """The names in a batch, in order."""
        return self._layout.logical.names if self.makes_tables else self._names

    def _convert_value(self) -> Callable[[_Array], Any]:
        in_worker = get_worker_info() is not None
        if self._batch_format == "torch":
            # A view of some columns would send those beside it too.
            if self._copied and in_worker:
                return lambda value: torch.from_numpy(np.ascontiguousarray(value))
            return torch.from_numpy
        return np.ascontiguousarray if in_worker else lambda value: value


def _check_stacks(
    layout: Layout,
    stacks: Mapping[str, Sequence[str]],
    batch_format: BatchFormat,
    dtype: np.dtype[np.generic] | None,
) -> None:
    if stacks and batch_format in ("arrow", "polars"):
        raise ConfigError(
            f"stack cannot be used with batch_format={batch_format!r}: it makes tensors"
        )
    used: set[str] = set()
    for name, columns in stacks.items():
        if not columns:
            raise ConfigError(f"stack {name!r} names no column")
        try:
            layout.select(columns)
        except RequestError as error:
            raise ConfigError(f"stack {name!r}: {error}") from None
        for column in columns:
            flat = layout.flat.get(column)
            if flat is None or not _is_single(flat):
                kind = "struct" if flat is None else flat.dtype
                raise ConfigError(
                    f"stack {name!r}: column {column!r} is a {kind}, only numbers can be stacked"
                )
            if column in used:
                raise ConfigError(f"stack {name!r}: column {column!r} is already in another stack")
            used.add(column)
        _check_dtypes(layout, name, columns, dtype)
    taken = [name for name in stacks if name in layout.logical.names and name not in used]
    if taken:
        raise ConfigError(f"stack {taken[0]!r} has the name of a column that is not stacked")


def _number_dtype(dtype: object) -> np.dtype[np.generic]:
    """A dtype of torch or numpy, as numpy's."""
    try:
        name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
        found: np.dtype[np.generic] = np.dtype(name)  # type: ignore[call-overload]
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "iuf":
        raise ConfigError(f"stack_dtype must be a dtype of numbers, got {dtype!r}")
    return found


def _check_dtypes(
    layout: Layout, name: str, columns: Sequence[str], dtype: np.dtype[np.generic] | None
) -> None:
    dtypes = [_dtype(layout, column) for column in columns]
    if dtype is not None:
        for column, own in zip(columns, dtypes, strict=True):
            if not np.can_cast(own, dtype, "same_kind"):
                raise ConfigError(
                    f"stack {name!r}: stack_dtype={dtype} cannot hold column {column!r}, {own}"
                )
        return
    common = np.result_type(*dtypes)
    if common.kind == "f" and all(dtype.kind in "iu" for dtype in dtypes):
        # One of each dtype: there may be hundreds of columns.
        of_dtype = {dtype: column for column, dtype in zip(columns, dtypes, strict=True)}
        named = ", ".join(f"{column!r} {dtype}" for dtype, column in of_dtype.items())
        raise ConfigError(
            f"stack {name!r}: no integer dtype holds columns {named}, and {common} would round them"
        )


def _dtype(layout: Layout, name: str) -> np.dtype[np.generic]:
    """The dtype of a column of numbers in a stack."""
    is_decimal = _is_decimal(layout.flat[name])
    return np.dtype(np.float64) if is_decimal else _stored(layout, name)


def _stored(layout: Layout, name: str) -> np.dtype[np.generic]:
    dtype = layout.columns[layout.place(name)[0]].dtype
    assert dtype is not None  # only columns of numbers are stacked
    return dtype


def _is_decimal(column: FlatColumn) -> bool:
    return column.kind != "arrow" and bool(pa.types.is_decimal(value_type(column)))


def _is_as_stored(column: FlatColumn) -> bool:
    """Whether a batch has the numbers that are stored."""
    return is_number_column(column) and not _is_decimal(column)


def _is_single(column: FlatColumn) -> bool:
    """Whether it has one number a row."""
    return is_number_column(column) and (column.kind == "number" or _is_decimal(column))


def _views(layout: Layout, stacks: Mapping[str, Sequence[str]]) -> dict[str, _View]:
    """What can be a view of a packed matrix: columns, and stacks of neighbours in order."""
    stacked = {column for columns in stacks.values() for column in columns}
    views = {
        name: _View(index, position)
        for index, column in enumerate(layout.columns)
        if column.kind == "packed"
        for position, name in enumerate(column.names)
        if name not in stacked and _is_as_stored(layout.flat[name])
    }
    for name, columns in stacks.items():
        places = [layout.place(column) for column in columns]
        index, first = places[0]
        if places == [(index, first + i) for i in range(len(places))]:
            views[name] = _View(index, slice(first, first + len(places)))
    return views


def _scalars(layout: Layout, views: Mapping[str, _View]) -> list[tuple[int, list[str], list[int]]]:
    """Stored columns, their scalar columns, which are copied, and positions."""
    found: dict[int, dict[str, int]] = {}
    for name, (index, part) in views.items():
        if isinstance(part, int):
            found.setdefault(index, {})[name] = part
    return [(index, list(places), list(places.values())) for index, places in found.items()]


def _is_small_stack(layout: Layout, view: _View) -> bool:
    if isinstance(view.part, int):
        return False
    width = len(range(view.part.start, view.part.stop))
    return width * _SMALL <= layout.columns[view.stored].width


def _own_columns(matrix: _Array, positions: list[int]) -> list[_Array]:
    """Contiguous copies of these columns."""
    if len(positions) <= _FEW:
        return [matrix[:, position].copy() for position in positions]
    chosen = matrix if len(positions) == matrix.shape[1] else matrix[:, positions]
    return [column.copy() for column in transposed(chosen)]


def _finishes(
    layout: Layout,
    stacks: Mapping[str, Sequence[str]],
    batch_format: BatchFormat,
    *,
    cast: bool,
) -> list[tuple[str, Finish]]:
    """Columns whose stored numbers stand for other values, and stacks of nothing but bools."""
    found = []
    stacked = {column for columns in stacks.values() for column in columns}
    for name, column in layout.flat.items():
        if name not in stacked and column.kind != "arrow":
            finish = finish_of(value_type(column), batch_format)
            if finish is not None:
                found.append((name, finish))
    for name, columns in stacks.items():
        types = {value_type(layout.flat[column]) for column in columns}
        if types == {pa.bool_()} and not cast:
            finish = finish_of(pa.bool_(), batch_format)
            assert finish is not None
            found.append((name, finish))
    return found


def _places(
    tree: FlatTree, stacks: Mapping[str, Sequence[str]]
) -> list[tuple[str, tuple[str, ...]]]:
    """Each value of a batch, and the keys that lead to it; a stack is at its first column."""
    stack_of = {column: name for name, columns in stacks.items() for column in columns}
    found: dict[str, tuple[str, ...]] = {}

    def walk(nodes: FlatTree, above: tuple[str, ...], prefix: str) -> None:
        for node in nodes:
            path = (*above, node.name.removeprefix(prefix))
            if isinstance(node, FlatStruct):
                walk(node.children, path, f"{node.name}.")
            elif node.name in stack_of:
                found.setdefault(stack_of[node.name], (stack_of[node.name],))
            else:
                found[node.name] = path

    walk(tree, (), "")
    return list(found.items())


def _check_masks(names: Sequence[str], rules: NullRules) -> None:
    for name in rules.valid.values():
        if names.count(name) > 1:
            raise ConfigError(
                f"nulls='mask' adds a column {name!r}, and batches have one: rename yours, or "
                "leave it out by columns"
            )


def _getters(
    layout: Layout,
    stacks: Mapping[str, Sequence[str]],
    views: Mapping[str, _View],
    dtype: np.dtype[np.generic] | None,
    rules: NullRules,
    batch_format: BatchFormat,
) -> dict[str, _Getter]:
    stack_of = {column: name for name, columns in stacks.items() for column in columns}
    getters: dict[str, _Getter] = {}
    for column in layout.flat:
        name = stack_of.get(column, column)
        if name in getters:
            continue
        if name in views:
            getters[name] = _view_getter(views[name])
        elif name in stacks:
            getters[name] = _copy_getter(layout, stacks[name], dtype, rules)
        else:
            getters[name] = _column_getter(layout, name, rules, batch_format)
    return getters


def _view_getter(view: _View) -> _Getter:
    index, part = view
    return lambda rows: rows.matrices[index][:, part]


def _copy_getter(
    layout: Layout,
    names: Sequence[str],
    dtype: np.dtype[np.generic] | None,
    rules: NullRules,
) -> _Getter:
    places = [layout.place(name) for name in names]
    common = np.result_type(*(_dtype(layout, name) for name in names)) if dtype is None else dtype
    columns = [layout.flat[name] for name in names]
    if len({index for index, _ in places}) == 1 and not any(map(_is_decimal, columns)):
        index, positions = places[0][0], [position for _, position in places]
        return lambda rows: rows.matrices[index][:, positions].astype(common, copy=False)
    getters = [_number_getter(layout, column, rules) for column in columns]

    def join(rows: Rows) -> _Array:
        values = [get(rows) for get in getters]
        return np.stack(values, axis=1, dtype=common, casting="same_kind")

    return join


def _number_getter(layout: Layout, column: FlatColumn, rules: NullRules) -> _Getter:
    """The numbers of a column that can be stacked."""
    numbers, fill = _stored_getter(layout, column), rules.fills.get(column.name, np.nan)
    if not _is_decimal(column):
        return numbers
    return lambda rows: floats_of(column, numbers(rows), rules.nulls_of(column.name, rows), fill)


def _stored_getter(layout: Layout, column: FlatColumn) -> Callable[[Rows], _Array]:
    index, position = layout.place(column.name)
    if column.kind == "number":
        return lambda rows: rows.matrices[index][:, position]
    return lambda rows: rows.matrices[index]


def _column_getter(
    layout: Layout, name: str, rules: NullRules, batch_format: BatchFormat
) -> _Getter:
    """The values of a column that is no view of a packed one."""
    index, _ = layout.place(name)
    column = layout.flat[name]
    if column.kind == "arrow":
        values = values_getter(column, batch_format)
        if not rules.has_nulls(name):  # of a struct that it is in
            return lambda rows: values(rows.arrays[index])
        return lambda rows: without(values(rows.arrays[index]), rules.nulls_of(name, rows))
    if _is_decimal(column):
        return _number_getter(layout, column, rules)
    if not is_number_column(column):
        words = _stored_getter(layout, column)
        return lambda rows: words_of(column, words(rows), rules.nulls_of(name, rows))
    shaped = shape_of(column)
    return lambda rows: shaped(rows.matrices[index])


def _image_getters(
    layout: Layout, decode: Mapping[str, ImageMode], rules: NullRules, *, as_torch: bool
) -> dict[str, _Getter]:
    getters: dict[str, _Getter] = {}
    for name, mode in decode.items():
        if name not in layout.flat:
            raise ConfigError(
                f"decode: no column {name!r}; columns: {some_of(layout.flat, like=name)}"
            )
        column = layout.flat[name]
        if column.kind != "arrow" or column.stored not in (pa.binary(), pa.large_binary()):
            raise ConfigError(f"decode: column {name!r} is a {column.dtype}, and images are binary")
        images = ImageDecoder(name, mode, channels_first=as_torch)
        getters[name] = _image_getter(layout.place(name)[0], name, images, rules, as_torch)
    return getters


def _image_getter(
    index: int, name: str, images: ImageDecoder, rules: NullRules, as_torch: bool
) -> _Getter:
    def get(rows: Rows) -> Any:
        array, nulls = rows.arrays[index], rules.nulls_of(name, rows)
        if nulls is not None:  # of the struct that it is in
            array = array.take(pa.array(np.arange(len(array)), mask=nulls))
        found: Any = images(array)
        if not isinstance(found, list):
            return found
        if as_torch:
            found = [None if image is None else torch.from_numpy(image) for image in found]
        return ListColumn(found) if get_worker_info() is not None else found

    return get


def _cutters(layout: Layout, views: Mapping[str, _View]) -> list[tuple[int, _Cutter]]:
    """For each packed matrix with several views: a function from its tensor to the views."""
    cuts: dict[int, dict[str, int | slice]] = {}
    for name, view in views.items():
        cuts.setdefault(view.stored, {})[name] = view.part
    return [
        (index, _cutter(layout.columns[index].width, cut))
        for index, cut in cuts.items()
        if len(cut) > 1
    ]


def _cutter(width: int, cuts: Mapping[str, int | slice]) -> _Cutter:
    single = {name: at for name, at in cuts.items() if isinstance(at, int)}
    stacked = {name: at for name, at in cuts.items() if isinstance(at, slice)}
    most = 3 * len(single) > width

    # `data`, because torch would count an in-place change of one view as a change of all.
    def cut(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        if most:  # `unbind` takes a third of the time of single selects
            columns = matrix.unbind(1)
            views = {name: columns[at].data for name, at in single.items()}
        else:
            views = {name: matrix.select(1, at).data for name, at in single.items()}
        for name, at in stacked.items():
            views[name] = matrix[:, at].data
        return views

    return cut
