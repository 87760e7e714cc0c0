"""`CacheDataset`: a cached table as a map-style dataset, read by row number.

For code with its own order: a torch sampler, Grain, a notebook. For an order that is shuffled,
shared by ranks and resumed, use `CacheIterableDataset`, which also fetches ahead.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from cache_client.batches.convert import Converter
from cache_client.batches.images import ImageMode, decode_problems
from cache_client.batches.null_rules import Nulls, nulls_problems
from cache_client.batches.sending import sent
from cache_client.flight.call_threads import CallThreads
from cache_client.job.argument_names import names_explained
from cache_client.job.arguments import BatchFormat, argument_problems
from cache_client.job.connection import Connection, access_to
from cache_client.reading.fetch_ahead import FETCH_THREADS, fetch_ahead
from cache_client.reading.local_shards import LocalShards
from cache_client.reading.per_process import PerProcess
from cache_client.reading.reader import Reader
from cache_client.reading.rows import Rows, join
from cache_client.reading.shard_maps import wait_for_shard_map
from cache_client.reading.window_sizes import row_bytes
from cache_client.training.familiar import Familiar
from cache_client.training.job_config import moved_arguments
from cache_protocol.errors import ConfigError, checked
from cache_protocol.storage.row_index import Ids

RowNumbers: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor

FETCH_BYTES = 32 * 1024 * 1024  # about the most in one fetch


class CacheDataset(Familiar, Dataset[Any]):
    """Rows of a cached table by number: row ``i`` is row ``i`` of the source.

    ``dataset[i]`` is one row: a dict from column to value. Numbers are 0-d tensors, fixed-size
    lists are tensors, strings ``str``, lists of numbers 1-d tensors. With ``batch_format="numpy"``
    they are numpy scalars and arrays, with ``arrow`` Python values.

    ``dataset[[3, 1, 3]]`` and `fetch` return one batch, as `CacheIterableDataset` makes it.

    A single row is one request to a node. A DataLoader asks for a batch of rows at once; it is
    fastest if it also gets the batch in one piece::

        DataLoader(dataset, batch_size=256, shuffle=True)  # rows, which torch collates
        DataLoader(dataset, sampler=BatchSampler(...), batch_size=None)  # batches

    With ``batch_format="numpy"`` it is a data source for Grain: a row depends only on its number,
    and ``repr`` is the same in every process that reads the same rows in the same way, so that
    checkpoints can compare it.

    A pickle has the shard map and no connection. Each process, also after a fork, connects at its
    first read; `close` closes these connections. A copy reads the same version.

    Args:
        name: of a dataset in the cache.
        cache: how to reach the cache, as for `CacheIterableDataset`.
        columns: to read, in this order; default: all.
        stack: new name -> columns; one tensor (``[n]`` in a row, ``[B, n]`` in a batch) replaces
            each group of columns.
        batch_format: ``torch``, ``numpy``, ``jax``, ``arrow`` (batches are RecordBatches) or
            ``polars`` (DataFrames). A DataLoader turns arrays into tensors, unless its
            ``collate_fn`` returns them unchanged. No ``jax`` and no ``polars`` in its workers.
        decode, nulls: as in `CacheIterableDataset`.
        transform: applied to each row, or to the batch of `fetch`, in the reading process.

    Raises:
        ConfigError: quotes every bad argument.
        DatasetNotFoundError, LoadError: there is no such dataset, or its load failed.
        NotReadyError, NodeUnavailableError: still loading, or no answer, at the deadline.

    Thread-safety: any thread may read at any time.
    """

    _more = "; view, shuffle, seed, rank and batch_size are arguments of CacheIterableDataset"

    @names_explained(lambda: {**moved_arguments(), "view": "an argument of CacheIterableDataset"})
    def __init__(
        self,
        name: str,
        *,
        cache: Connection | str | None = None,
        columns: Sequence[str] | None = None,
        stack: Mapping[str, Sequence[str]] | None = None,
        batch_format: BatchFormat = "torch",
        decode: Mapping[str, ImageMode] | None = None,
        nulls: Nulls | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        problems = argument_problems(
            name, columns, stack, batch_format=batch_format, transform=transform
        )
        problems += decode_problems(decode, batch_format) + nulls_problems(nulls)
        access = checked(problems, lambda: access_to(cache))
        if problems or access is None:
            raise ConfigError("; ".join(problems))
        self.name = name
        self._access = access
        self._columns = () if columns is None else tuple(columns)
        self._stack = {name: tuple(names) for name, names in (stack or {}).items()}
        self._batch_format: BatchFormat = batch_format
        self._decode = decode
        self._nulls: Nulls | None = nulls
        self._transform = transform
        self._shards = wait_for_shard_map(
            access.endpoint, name, self._columns, access.ready_deadline_s, access.credentials
        )
        self._prepare()

    def _prepare(self) -> None:
        """Sets what each process makes anew."""
        self._convert = Converter(
            self._shards.layout,
            self._stack,
            self._batch_format,
            decode=self._decode,
            nulls=self._nulls,
        )
        self._rows_per_fetch = max(1, FETCH_BYTES // row_bytes(self._shards))
        self._reader: PerProcess[_ProcessReader] = PerProcess()

    def __getstate__(self) -> dict[str, Any]:
        excluded = ("_convert", "_rows_per_fetch", "_reader")
        return {name: value for name, value in self.__dict__.items() if name not in excluded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def __enter__(self) -> CacheDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections of this process; running reads fail, a later one reconnects."""
        if (reader := self._reader.pop()) is not None:
            reader.close()

    # -- properties ----------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """Of the node that is asked first."""
        return self._access.endpoint

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the version."""
        return self._shards.fingerprint

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        return self._shards.num_rows

    def __len__(self) -> int:
        """Rows of the dataset."""
        return self._shards.num_rows

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the columns that are read, before they become tensors."""
        return self._shards.logical

    @property
    def column_names(self) -> list[str]:
        """The columns of a row, before ``transform``."""
        return list(self._convert.names)

    def _first_rows(self, num_rows: int) -> pa.RecordBatch:
        return self._read(np.arange(min(num_rows, self.num_rows), dtype=np.int64)).to_batch()

    @property
    def _title(self) -> str:
        return self.name

    def _facts(self) -> dict[str, Any]:
        transform = getattr(self._transform, "__qualname__", type(self._transform).__qualname__)
        return {
            "fingerprint": self.fingerprint,
            "num_rows": self.num_rows,
            "columns": self._shards.logical.names,
            "stack": {name: list(names) for name, names in self._stack.items()} or None,
            "batch_format": self._batch_format,
            "decode": self._decode,
            "nulls": self._nulls,
            "transform": None if self._transform is None else transform,
        }

    # -- reading -------------------------------------------------------------------------------

    def __getitem__(self, index: SupportsIndex | slice | RowNumbers) -> Any:
        """One row for an integer, one batch for several or a slice; negative ones count back.

        Raises:
            IndexError: names a row that does not exist.
            TypeError: quotes an index that is no integer.
            NodeUnavailableError: nodes did not answer before the deadline; names them.
            StaleVersionError: the version is gone.
        """
        if isinstance(index, slice):
            return self.fetch(range(*index.indices(self.num_rows)))
        if isinstance(index, (list, tuple, range)) or getattr(index, "ndim", 0) > 0:
            return self.fetch(index)  # type: ignore[arg-type]  # which checks it
        if isinstance(index, (bool, np.bool_)):
            raise TypeError(f"a row number must be an integer, got {index!r}")
        try:
            number = operator.index(index)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"a row number must be an integer, got {index!r}") from None
        return self.__getitems__([number])[0]

    def __getitems__(self, indices: RowNumbers) -> list[Any]:
        """The rows of these numbers, in this order, in one fetch; DataLoaders call this.

        The rows share memory, so copy a row that you keep.

        Raises:
            IndexError, TypeError, NodeUnavailableError, StaleVersionError: as for one row.
        """
        rows = _rows(self._batch(indices))
        return rows if self._transform is None else [self._transform(row) for row in rows]

    def fetch(self, indices: RowNumbers) -> Any:
        """One batch of the rows of these numbers, in this order; numbers may repeat.

        Returns:
            A batch of ``batch_format``; you may change its tensors in place.

        Raises:
            IndexError, TypeError, NodeUnavailableError, StaleVersionError: as for one row.
        """
        batch = self._batch(indices)
        return sent(batch if self._transform is None else self._transform(batch))

    def _batch(self, indices: RowNumbers) -> Any:
        rows = self._read(self._row_ids(indices))
        with torch.inference_mode(False):  # so that its tensors may be changed in place outside
            return self._convert(rows)

    def _row_ids(self, indices: RowNumbers) -> Ids:
        try:
            given = np.asarray(_uniform(indices))
        except ValueError:  # nested lists of different lengths
            given = np.empty((), object)
        if given.shape == (0,):  # of any dtype: that of an empty list is arbitrary
            return np.empty(0, np.int64)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            self._check_huge(indices)
            raise TypeError(f"row numbers must be a list of integers, got {indices!r:.200}")
        outside = (given < -self.num_rows) | (given >= self.num_rows)
        if outside.any():
            raise self._row_error(given[outside][0])
        row_ids = given.astype(np.int64)
        row_ids[row_ids < 0] += self.num_rows
        return row_ids

    def _check_huge(self, indices: RowNumbers) -> None:
        """Raises IndexError for integers that are too large for NumPy."""
        if isinstance(indices, Sequence) and all(type(number) is int for number in indices):
            raise self._row_error(max(indices, key=abs))

    def _row_error(self, number: object) -> IndexError:
        return IndexError(f"row {number} is not in dataset {self.name!r} of {self.num_rows} rows")

    def _read(self, row_ids: Ids) -> Rows:
        process_reader = self._reader.get(self._open_reader, _ProcessReader.close)
        size = self._rows_per_fetch
        if len(row_ids) <= size:
            return join(process_reader.fetch(row_ids))
        windows = [row_ids[at : at + size] for at in range(0, len(row_ids), size)]
        fetch = process_reader.reader.fetch
        results = fetch_ahead(fetch, windows, depth=FETCH_THREADS, threads=FETCH_THREADS)
        return join([piece for pieces in results for piece in pieces])

    def _open_reader(self) -> _ProcessReader:
        access = self._access
        reader = Reader(
            access.endpoint,
            self._shards,
            columns=self._columns,
            replica_offset=os.getpid(),  # spreads processes over replicas
            deadline_s=access.deadline_s,
            local=LocalShards(self._shards, self._columns) if access.local else None,
            credentials=access.credentials,
        )
        return _ProcessReader(reader, CallThreads())


class _ProcessReader(NamedTuple):
    """The reader of one process, and the threads that call it for the main thread."""

    reader: Reader
    threads: CallThreads

    def fetch(self, row_ids: Ids) -> list[Rows]:
        """As `Reader.fetch`; an interrupt ends it at once."""
        if not self.reader.num_nodes:  # all rows are in files of this machine: no gRPC
            return self.reader.fetch(row_ids)
        return self.threads.call(self.reader.fetch, row_ids)

    def close(self) -> None:
        """Closes every connection; running fetches fail."""
        self.reader.close()
        self.threads.close()


def _uniform(numbers: RowNumbers) -> Any:
    """``numbers`` such that NumPy turns neither booleans into integers nor integers into floats."""
    if not isinstance(numbers, (list, tuple)):
        return numbers
    kinds = set(map(type, numbers))
    if not kinds.isdisjoint((bool, np.bool_)):
        return np.asarray(numbers, object)
    if len(kinds) > 1 and all(issubclass(kind, (int, np.integer)) for kind in kinds):
        return [int(number) for number in numbers]
    return numbers


def _rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch, without a copy."""
    if isinstance(batch, pa.RecordBatch):
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    if not isinstance(batch, dict):
        rows = batch.to_dicts()  # of polars
        return rows
    columns = map(_values_of_rows, batch.values())
    return [dict(zip(batch, values, strict=True)) for values in zip(*columns, strict=True)]


def _values_of_rows(column: Any) -> Sequence[Any]:
    if isinstance(column, torch.Tensor):
        return column.unbind(0)
    values: Sequence[Any] = _rows(column) if isinstance(column, dict) else column
    return values
