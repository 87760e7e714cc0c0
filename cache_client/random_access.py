"""`CacheDataset`: a cached table as a map-style dataset, whose rows are asked for by number.

For code that brings its own order: a sampler of torch's, Grain, a notebook. An order that is
shuffled, shared by ranks and resumed belongs to `CacheIterableDataset`, which also fetches ahead.
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

from cache_client.arguments import BatchFormat, argument_problems
from cache_client.convert import Converter
from cache_client.fetch_ahead import FETCH_THREADS, fetch_ahead
from cache_client.grpc_guard.call_threads import CallThreads
from cache_client.local_shards import LocalShards
from cache_client.plan import wait_for_plan
from cache_client.ranks import find_endpoint
from cache_client.reader import Reader
from cache_client.rows import Rows, join
from cache_client.window_sizes import row_bytes
from cache_protocol.errors import ConfigError, checked
from cache_protocol.storage.row_index import Ids

RowNumbers: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor

FETCH_BYTES = 32 * 1024 * 1024  # fetched in one go, about; more goes in several


class CacheDataset(Dataset[Any]):
    """Rows of a cached table by number: row ``i`` is source row ``i``, as everywhere in the cache.

    ``dataset[i]`` is one row: a dict from column to value. Numbers are 0-d tensors, fixed-size
    lists tensors of their own shape, strings ``str``, lists of numbers 1-d tensors. With
    ``batch_format="numpy"`` they are numpy scalars and arrays, with ``arrow`` Python values.

    ``dataset[[3, 1, 3]]`` and `fetch` are one batch, just as `CacheIterableDataset` makes them.

    Each row alone is a request to a node. A DataLoader asks for a batch of rows at once, and is
    fastest where it also gets it in one piece::

        DataLoader(dataset, batch_size=256, shuffle=True)  # rows, which torch collates
        DataLoader(dataset, sampler=BatchSampler(...), batch_size=None)  # batches

    With ``batch_format="numpy"`` it is a data source for Grain: rows are a pure function of their
    number, and ``repr`` is the same in every process that reads the same rows in the same way, so
    that checkpoints can compare it. It names neither the endpoint nor anything of this process.

    Pickling carries the shard map and no connection. Each process connects by itself when it first
    reads, also after a fork; `close` lets go of that. A copy reads the version that this one reads.

    Args:
        dataset: name of a dataset in the cache.
        endpoint: ``grpc://HOST:PORT`` of any node; default: ``CACHE_ENDPOINT``, else that of the
            TrainJob this runs in.
        columns: to read, in this order; default: all.
        stack: new name -> columns; each becomes one tensor (``[n]`` in a row, ``[B, n]`` in a
            batch) in their place.
        batch_format: ``torch``, ``numpy`` or ``arrow`` (batches are RecordBatches). A DataLoader
            makes tensors of arrays, unless its ``collate_fn`` returns what it is given.
        transform: applied to what is asked for, in the process that asks: to each row, or to the
            batch of `fetch`.
        deadline_s: how long to wait for a cache that is loading, or nodes that do not answer.
        local: read shards of nodes on this machine from their files, without the node.

    Raises:
        ConfigError: quoting every bad argument.
        DatasetNotFoundError, LoadError: there is no such dataset, or its load failed.
        NotReadyError, NodeUnavailableError: still loading, or no answer, at the deadline.

    Thread-safety: any thread may read at any time.
    """

    def __init__(
        self,
        dataset: str,
        *,
        endpoint: str | None = None,
        columns: Sequence[str] | None = None,
        stack: Mapping[str, Sequence[str]] | None = None,
        batch_format: BatchFormat = "torch",
        transform: Callable[[Any], Any] | None = None,
        deadline_s: float = 60.0,
        local: bool = True,
    ) -> None:
        problems = argument_problems(
            dataset, columns, stack, deadline_s,
            batch_format=batch_format, transform=transform, local=local,
        )  # fmt: skip
        where = checked(problems, lambda: find_endpoint(endpoint))
        if problems or where is None:
            raise ConfigError("; ".join(problems))
        self.name = dataset
        self.endpoint = where
        self._columns = () if columns is None else tuple(columns)
        self._stack = {name: tuple(names) for name, names in (stack or {}).items()}
        self._batch_format = batch_format
        self._transform = transform
        self._deadline_s = float(deadline_s)
        self._local = local
        self._shards = wait_for_plan(where, dataset, self._columns, self._deadline_s)
        self._open()

    def _open(self) -> None:
        """What is made anew in each process."""
        self._convert = Converter(self._shards.layout, self._stack, self._batch_format)
        self._rows_per_fetch = max(1, FETCH_BYTES // row_bytes(self._shards))
        self._opened: dict[int, _Opened] = {}  # process id -> what it reads with; see `_open_here`

    def __getstate__(self) -> dict[str, Any]:
        own = ("_convert", "_rows_per_fetch", "_opened")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __enter__(self) -> CacheDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections of this process; reads that run fail, a later one connects."""
        opened = self._opened.pop(os.getpid(), None)
        if opened is not None:
            opened.close()

    # -- what it is ----------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Of the version that is read."""
        return self._shards.fingerprint

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        return self._shards.num_rows

    def __len__(self) -> int:
        """Rows of the dataset."""
        return self._shards.num_rows

    def __repr__(self) -> str:
        """What is read, and how: nothing that differs between processes or runs."""
        transform = getattr(self._transform, "__qualname__", type(self._transform).__qualname__)
        parts = {
            "fingerprint": self.fingerprint,
            "num_rows": self.num_rows,
            "columns": self._shards.logical.names,
            "stack": {name: list(names) for name, names in self._stack.items()} or None,
            "batch_format": self._batch_format,
            "transform": None if self._transform is None else transform,
        }
        rest = ", ".join(f"{name}={value!r}" for name, value in parts.items() if value is not None)
        return f"CacheDataset({self.name!r}, {rest})"

    # -- reading -------------------------------------------------------------------------------

    def __getitem__(self, index: SupportsIndex | slice | RowNumbers) -> Any:
        """One row for an integer, one batch for several or a slice; negative ones count back.

        Raises:
            IndexError: naming a row that is not there.
            TypeError: quoting what is no integer.
            NodeUnavailableError: a row's nodes did not answer before the deadline; names them.
            StaleVersionError: the version is gone.
        """
        if isinstance(index, slice):
            return self.fetch(range(*index.indices(self.num_rows)))
        if isinstance(index, (list, tuple, range)) or getattr(index, "ndim", 0) > 0:
            return self.fetch(index)  # type: ignore[arg-type]  # which checks it
        if isinstance(index, (bool, np.bool_)):
            raise TypeError(f"a row is chosen by an integer, got {index!r}")
        try:
            number = operator.index(index)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"a row is chosen by an integer, got {index!r}") from None
        return self.__getitems__([number])[0]

    def __getitems__(self, indices: RowNumbers) -> list[Any]:
        """The rows of these numbers, in this order, fetched together; what DataLoaders call.

        The rows share memory: one that is kept keeps the others.

        Raises:
            IndexError, TypeError, NodeUnavailableError, StaleVersionError: as for one row.
        """
        batch = self._convert(self._read(self._row_ids(indices)))
        rows = _rows(batch)
        return rows if self._transform is None else [self._transform(row) for row in rows]

    def fetch(self, indices: RowNumbers) -> Any:
        """One batch of the rows of these numbers, in this order; numbers may repeat.

        Returns:
            What ``batch_format`` says; its tensors may be changed in place.

        Raises:
            IndexError, TypeError, NodeUnavailableError, StaleVersionError: as for one row.
        """
        batch = self._convert(self._read(self._row_ids(indices)))
        return batch if self._transform is None else self._transform(batch)

    def _row_ids(self, indices: RowNumbers) -> Ids:
        try:
            given = np.asarray(_of_one_type(indices))
        except ValueError:  # lists of several lengths
            given = np.empty((), object)
        if given.shape == (0,):  # of any dtype: an empty list has none
            return np.empty(0, np.int64)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            self._check_long(indices)
            raise TypeError(f"rows are chosen by a list of integers, got {indices!r:.200}")
        outside = (given < -self.num_rows) | (given >= self.num_rows)
        if outside.any():
            raise self._no_row(given[outside][0])
        row_ids = given.astype(np.int64)
        row_ids[row_ids < 0] += self.num_rows
        return row_ids

    def _check_long(self, indices: RowNumbers) -> None:
        """Raises IndexError for integers that NumPy has no type for."""
        if isinstance(indices, Sequence) and all(type(number) is int for number in indices):
            raise self._no_row(max(indices, key=abs))

    def _no_row(self, number: object) -> IndexError:
        return IndexError(f"row {number} is not in dataset {self.name!r} of {self.num_rows} rows")

    def _read(self, row_ids: Ids) -> Rows:
        opened, size = self._open_here(), self._rows_per_fetch
        if len(row_ids) <= size:
            return join(opened.fetch(row_ids))
        windows = [row_ids[at : at + size] for at in range(0, len(row_ids), size)]
        fetch = opened.reader.fetch
        found = fetch_ahead(fetch, windows, depth=FETCH_THREADS, threads=FETCH_THREADS)
        return join([piece for pieces in found for piece in pieces])

    def _open_here(self) -> _Opened:
        """What this process reads with.

        Found by process id, because a child of a fork inherits what its parent reads with, whose
        locks may be held for ever. Without a lock for the same reason: two threads may each make
        a reader, and all use the one that `setdefault` lets in.
        """
        process = os.getpid()
        opened = self._opened.get(process)
        if opened is not None:
            return opened
        reader = Reader(
            self.endpoint,
            self._shards,
            columns=self._columns,
            replica_offset=process,  # spreads processes over replicas
            deadline_s=self._deadline_s,
            local=LocalShards(self._shards, self._columns) if self._local else None,
        )
        made = _Opened(reader, CallThreads())
        opened = self._opened.setdefault(process, made)
        if opened is not made:
            made.close()
        return opened


class _Opened(NamedTuple):
    """What one process reads with: a reader, and where the main thread calls it."""

    reader: Reader
    aside: CallThreads

    def fetch(self, row_ids: Ids) -> list[Rows]:
        """As `Reader.fetch`; an interrupt ends it at once."""
        if not self.reader.num_nodes:  # all rows lie in files of this machine: nothing of gRPC's
            return self.reader.fetch(row_ids)
        return self.aside.call(self.reader.fetch, row_ids)

    def close(self) -> None:
        """Closes every connection; running fetches fail."""
        self.reader.close()
        self.aside.close()


def _of_one_type(numbers: RowNumbers) -> Any:
    """These numbers; of a list NumPy would make 1 of True, and floats of int64 beside uint64."""
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
    columns = (v.unbind(0) if isinstance(v, torch.Tensor) else v for v in batch.values())
    return [dict(zip(batch, values, strict=True)) for values in zip(*columns, strict=True)]
