"""Ray Data writes a dataset by `CacheDatasink`, and reads one by `CacheDatasource`.

The rows of a write task are a partition. The driver begins the write when it knows the schema, and
commits what the tasks return. Ray repeats a task whose worker dies; only the attempt whose result
the driver has is committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from inspect import signature
from typing import Any

import pyarrow as pa

from cache_client.control.client import CacheClient
from cache_client.engines.tasks import PARTITION_BYTES, RowParts, chosen, put_again
from cache_client.job.connection import Connection
from cache_client.writing.writes import PartitionAck, Write
from cache_protocol.errors import ConfigError, SchemaError, missing_package

try:
    from ray.data.block import Block, BlockAccessor, BlockMetadata
    from ray.data.datasource import Datasink, Datasource, ReadTask
except ImportError as error:
    raise ConfigError(missing_package(error, "Ray Data", "ray")) from None

_PICKLES = "ray.data.arrow_pickled_object"


class CacheDatasink(Datasink[PartitionAck | None]):
    """Writes a Ray dataset into a cache: ``ds.write_datasink(CacheDatasink("houses"))``.

    All rows are there when `write_datasink` returns; after an error, none. Give it to one write at
    a time. Rows are ordered by the tasks that write them, so by Ray's order of blocks: that of the
    dataset if its ``DataContext`` says ``execution_options.preserve_order``, else the order in
    which blocks were ready. Tensors of one shape are stored as lists of fixed size.

    Args:
        name: of the dataset; the rows replace those of an existing one, or follow them with
            ``append=True``.
        cache: as for `CacheClient`; found on the driver. Files must have the same path everywhere.
        schema: of the rows; default: that of the first blocks that have columns. Give one if
            columns of later blocks have other types, or if all blocks may be empty.
        options: of `CacheClient.begin_write`, such as ``append`` and ``replicas``.

    Raises:
        ConfigError, TypeError: an argument is wrong.
    """

    def __init__(
        self,
        name: str,
        cache: Connection | str | None = None,
        *,
        schema: pa.Schema | None = None,
        **options: Any,
    ) -> None:
        self._client = CacheClient(cache)
        signature(self._client.begin_write).bind(name, schema, **options)
        self._name = name
        self._schema = schema
        self._options = options
        self._write: Write | None = None

    @property
    def min_bytes_per_write(self) -> int:
        """Of a task: small blocks become one partition.

        Ray then runs the tasks apart from those before them, and so knows the schema of the rows
        when it starts the write.
        """
        return PARTITION_BYTES

    def on_write_start(self, schema: pa.Schema | None = None) -> None:
        """Begins the write. Called on the driver, before the tasks."""
        self._write = self._begin(schema)

    def _begin(self, schema: pa.Schema | None) -> Write:
        schema = schema if self._schema is None else self._schema
        if schema is None or not schema.names:
            raise ConfigError(
                f"dataset {self._name!r} has no rows that tell its columns: give CacheDatasink "
                "a schema"
            )
        fields = [field.with_type(_without_ray_types(field.name, field.type)) for field in schema]
        return self._client.begin_write(self._name, pa.schema(fields), **self._options)

    def write(self, blocks: Iterable[Block], ctx: Any) -> PartitionAck | None:
        """Puts the blocks of a task. Called on a worker."""
        assert self._write is not None
        batches = [
            _plain_batch(batch)
            for block in blocks
            for batch in BlockAccessor.for_block(block).to_arrow().to_batches()
        ]
        return put_again(self._write, ctx.task_idx, batches)

    def on_write_complete(self, write_result: Any) -> None:
        """Commits. Called on the driver."""
        write = self._begin(None) if self._write is None else self._write
        self._write = write
        write.commit(chosen(write_result.write_returns))
        self._write = None

    def on_write_failed(self, error: Exception) -> None:
        """Aborts. Called on the driver."""
        write, self._write = self._write, None
        if write is not None:
            write.give_up()


class CacheDatasource(Datasource):
    """Reads a dataset of a cache: ``ray.data.read_datasource(CacheDatasource("houses"))``.

    All tasks read the version that is the newest now, each a range of rows. Ray reads only the
    columns that it needs.

    Args:
        name: of the dataset.
        cache: as for `CacheClient`; found on the driver. Files must have the same path everywhere.
        columns: to read; default: all.

    Raises:
        ConfigError: an argument is wrong. NotReadyError: the dataset is still loading.
        DatasetNotFoundError, LoadError: there is no such dataset, or its load failed.
    """

    def __init__(
        self,
        name: str,
        cache: Connection | str | None = None,
        *,
        columns: Iterable[str] | None = None,
    ) -> None:
        super().__init__()
        client = CacheClient(cache)
        self._parts = RowParts.of(client, name, None if columns is None else list(columns))
        self._projection_map: dict[str, str] | None = None

    def supports_projection_pushdown(self) -> bool:
        """Ray tells which columns it needs."""
        return True

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all columns."""
        return self._parts.num_bytes

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: object = None,
    ) -> list[ReadTask]:
        """A task for each of about ``parallelism`` ranges of rows."""
        parts = self._parts.select(self._get_data_columns())
        row_bytes = parts.num_bytes / max(1, parts.num_rows)
        return [
            ReadTask(
                partial(_blocks, parts, rows),
                BlockMetadata(len(rows), int(len(rows) * row_bytes), None, None),
                schema=parts.schema,
                per_task_row_limit=per_task_row_limit,
            )
            for rows in parts.split(parallelism)
        ]


def _blocks(parts: RowParts, rows: range) -> Iterator[pa.Table]:
    for batch in parts.read(rows):
        yield pa.Table.from_batches([batch])


def _without_ray_types(name: str, dtype: pa.DataType) -> pa.DataType:
    """The type of a column without Ray's extensions."""
    if not isinstance(dtype, pa.BaseExtensionType):
        return dtype
    if dtype.extension_name == _PICKLES:
        raise SchemaError(f"column {name!r} has Python objects, which cannot be stored")
    shape = getattr(dtype, "shape", None)
    storage = dtype.storage_type
    if shape is None or not hasattr(storage, "value_type"):
        return storage
    plain = storage.value_type
    for size in reversed(shape):
        plain = pa.list_(plain, size)
    return plain


def _plain_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    fields = [field.with_type(_without_ray_types(field.name, field.type)) for field in batch.schema]
    columns = [_plain_array(column, field) for column, field in zip(batch, fields, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _plain_array(array: pa.Array, field: pa.Field) -> pa.Array:
    if not isinstance(array.type, pa.BaseExtensionType):
        return array
    if array.type.storage_type == field.type:
        return array.storage
    if array.null_count:
        raise SchemaError(f"column {field.name!r} has null tensors, which cannot be stored")
    plain = array.storage.flatten()
    for size in reversed(array.type.shape):
        plain = pa.FixedSizeListArray.from_arrays(plain, size)
    return plain
