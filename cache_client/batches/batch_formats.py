"""Batches for JAX and polars, imported when first needed; columns of lists of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.utils.data import get_worker_info

from cache_client.job.arguments import BatchFormat
from cache_protocol.errors import ConfigError

_PACKAGES: Final = {"jax": "jax", "polars": "polars"}
_INT32: Final = np.iinfo(np.int32)
_Array = npt.NDArray[np.generic]


def check_package(batch_format: BatchFormat) -> None:
    """Raises ConfigError if the package of a format cannot be imported."""
    package = _PACKAGES.get(batch_format)
    try:
        if package is not None:
            import_module(package)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"batch_format={batch_format!r} needs the package {error.name!r}: pip install {package}"
        ) from None


def refuse_workers(batch_format: BatchFormat) -> None:
    """Raises ConfigError in a DataLoader worker, if the library does not survive forks."""
    if batch_format in _PACKAGES and get_worker_info() is not None:
        raise ConfigError(
            f"batch_format={batch_format!r} cannot be used in DataLoader workers, because a fork "
            "breaks the threads of that library: use num_workers=0, or batch_format='numpy' or "
            "'arrow' and convert in the training process"
        )


def to_polars(batch: pa.RecordBatch) -> Any:
    """A DataFrame of logical columns, of the same memory where polars has the same layout."""
    import polars

    return polars.DataFrame(polars.from_arrow(batch))


def to_jax(name: str, value: Any) -> Any:
    """A JAX array on the host for an array, or a list of them for a list; else the value.

    The array has the memory of a contiguous one, where JAX takes it as it is. Without
    ``jax_enable_x64`` JAX has no 64-bit numbers: floats are rounded, integers must fit.

    Raises:
        ConfigError: an integer of the column does not fit in 32 bits; quotes it.
    """
    import jax

    if isinstance(value, list):
        first = next((entry for entry in value if entry is not None), None)
        if isinstance(first, str | bytes):
            return value
        return [to_jax(name, entry) for entry in value]
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.itemsize == 8 and not getattr(jax.config, "jax_enable_x64"):  # noqa: B009
        value = _narrow(name, value)
    return jax.numpy.from_dlpack(np.ascontiguousarray(value))


def _narrow(name: str, value: _Array) -> _Array:
    if value.dtype.kind == "f":
        return value.astype(np.float32)
    target = np.iinfo(np.uint32) if value.dtype.kind == "u" else _INT32
    for bound in (value.min(), value.max()) if value.size else ():
        if not target.min <= bound <= target.max:
            raise ConfigError(
                f"column {name!r} has {bound}, and JAX has integers of 32 bits only: call "
                "jax.config.update('jax_enable_x64', True) first, or leave the column out"
            )
    return value.astype(target.dtype)


def with_column(
    batch: Any, name: str, values: _Array | list[str], batch_format: BatchFormat
) -> Any:
    """The batch with another column: numbers as an array of the format, strings as a list."""
    if batch_format == "arrow":
        return batch.append_column(name, pa.array(values))
    if batch_format == "polars":
        import polars

        return batch.with_columns(polars.Series(name, values))
    if batch_format == "torch" and isinstance(values, np.ndarray):
        return {**batch, name: torch.from_numpy(values)}
    return {**batch, name: to_jax(name, values) if batch_format == "jax" else values}


class ListColumn(list[Any]):
    """One entry a row: a tensor, None, or a Python list if the row has nulls.

    With ``batch_format="numpy"`` the entries are arrays, which a DataLoader turns into tensors.
    Pickling joins the tensors, because each tensor that a DataLoader worker sends takes a file
    descriptor until it arrives; unpickling cuts the joined tensor into views. Not thread-safe, as
    any list.
    """

    def __copy__(self) -> Self:
        return type(self)(self)

    def __reduce__(self) -> tuple[Any, ...]:
        tensors = [value for value in self if isinstance(value, torch.Tensor)]
        kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
        # The training loop may have put anything here.
        if len(kinds) != 1 or any(tensor.requires_grad for tensor in tensors):
            return list, (list(self),)
        shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in self]
        others = [value for value in self if not isinstance(value, torch.Tensor)]
        flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
        return cut, (torch.cat(flat), shapes, others)


def cut(
    values: torch.Tensor, shapes: Sequence[tuple[int, ...] | None], others: Sequence[Any]
) -> list[Any]:
    """Cuts one joined tensor into rows.

    Args:
        values: of all rows, joined; the rows share its storage.
        shapes: of each row; None for a row that is in ``others``.
        others: the rows that are no tensors, in order.
    """
    found = [shape for shape in shapes if shape is not None]
    # Unsafe, because torch would count an in-place change of one row as a change of all.
    rows = torch.unsafe_split_with_sizes(values, [math.prod(shape) for shape in found])
    pairs = zip(rows, found, strict=True)
    shaped = iter([row if len(shape) == 1 else row.view(shape) for row, shape in pairs])
    rest = iter(others)
    return [next(rest if shape is None else shaped) for shape in shapes]
