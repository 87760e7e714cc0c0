"""Spark 4 writes and reads datasets by a Python data source, `CacheDataSource`.

The rows of a Spark task are a partition. For each partition, Spark takes the message of the first
attempt that ends. It commits on the driver. This module runs on the driver and the executors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from cache_client.control.client import CacheClient
from cache_client.engines.tasks import RowParts, chosen, put_batches
from cache_client.job.connection import Connection
from cache_client.writing.writes import PartitionAck, Write
from cache_protocol.errors import ConfigError, SchemaError, checked, missing_package, some_of
from cache_protocol.storage.lossless import Verdict, can_become, conform

try:
    from pyspark import TaskContext
    from pyspark.sql import types
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceArrowWriter,
        DataSourceReader,
        InputPartition,
        WriterCommitMessage,
    )
except ImportError as error:
    raise ConfigError(missing_package(error, "Spark", "spark")) from None

FORMAT = "trainer-data-cache"
_CLIENT = ("endpoint", "token", "token_file", "tls_ca")
_WRITE = ("replicas", "target_shard_bytes", "nulls", "readers", "ttl_s", "full_wait_s")
_READ = ("num_partitions",)

_ARROW: Mapping[type[types.DataType], pa.DataType] = {
    types.BooleanType: pa.bool_(),
    types.ByteType: pa.int8(),
    types.ShortType: pa.int16(),
    types.IntegerType: pa.int32(),
    types.LongType: pa.int64(),
    types.FloatType: pa.float32(),
    types.DoubleType: pa.float64(),
    types.StringType: pa.string(),
    types.BinaryType: pa.binary(),
    types.DateType: pa.date32(),
    types.TimestampType: pa.timestamp("us", "UTC"),
    types.TimestampNTZType: pa.timestamp("us"),
    types.DayTimeIntervalType: pa.duration("us"),
}
_SPARK: Mapping[pa.DataType, types.DataType] = {
    **{arrow: spark() for spark, arrow in _ARROW.items()},
    pa.uint8(): types.ShortType(),
    pa.uint16(): types.IntegerType(),
    pa.uint32(): types.LongType(),
    pa.uint64(): types.DecimalType(20, 0),
    pa.float16(): types.FloatType(),
    pa.large_string(): types.StringType(),
    pa.large_binary(): types.BinaryType(),
}


class CacheDataSource(DataSource):
    """The format ``trainer-data-cache``: ``spark.dataSource.register(CacheDataSource)``.

    Options, of reads and writes: ``name`` of the dataset, ``endpoint``, ``token``, ``token_file``,
    ``tls_ca`` as for `CacheClient`; the driver finds the defaults, and files must have the same
    path on every executor. Of reads: ``num_partitions``. Of writes: ``replicas``,
    ``target_shard_bytes``, ``nulls``, ``readers`` (by commas), ``ttl_s``, ``full_wait_s`` as for
    `CacheClient.begin_write`. The mode ``overwrite`` replaces the rows of a dataset; ``append``
    adds rows to them, or makes a dataset.
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> types.StructType:
        """Columns of the newest version, once it is loaded."""
        client, name, _ = _settings(self.options, _READ)
        return spark_schema(RowParts.of(client, name).schema)

    def reader(self, schema: types.StructType) -> CacheReader:
        """Reads the columns of ``schema``, of the newest version."""
        client, name, options = _settings(self.options, _READ)
        return CacheReader(RowParts.of(client, name, schema.names), schema, **options)

    def writer(self, schema: types.StructType, overwrite: bool) -> CacheWriter:
        """Begins a write."""
        client, name, options = _settings(self.options, _WRITE)
        write = client.begin_write(name, arrow_schema(schema), append=not overwrite, **options)
        return CacheWriter(write)


@dataclass
class TaskPut(WriterCommitMessage):
    """What a task put; None: it had no rows."""

    ack: PartitionAck | None


class CacheWriter(DataSourceArrowWriter):
    """One write. Pickled: a copy puts the rows of each task, and one commits or aborts."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskPut:
        """Puts the rows of a task. Called on an executor."""
        task = TaskContext.get()
        assert task is not None
        return TaskPut(put_batches(self._write, task.partitionId(), task.taskAttemptId(), iterator))

    def commit(self, messages: Sequence[Any]) -> None:
        """Commits. Called on the driver."""
        self._write.commit(chosen(message.ack for message in messages))

    def abort(self, messages: Sequence[Any]) -> None:
        """Aborts. Called on the driver."""
        self._write.abort()


@dataclass
class _Rows(InputPartition):
    start: int
    stop: int


class CacheReader(DataSourceReader):
    """Reads one version, each partition a range of rows."""

    def __init__(
        self, parts: RowParts, schema: types.StructType, num_partitions: int | None = None
    ) -> None:
        self._parts = parts
        self._schema = arrow_schema(schema)
        self._num_partitions = num_partitions

    def partitions(self) -> list[InputPartition]:
        """Ranges of rows, nearly equal."""
        parts = self._parts.split(self._num_partitions)
        return [_Rows(part.start, part.stop) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition. Called on an executor."""
        assert isinstance(partition, _Rows)
        for batch in self._parts.read(range(partition.start, partition.stop)):
            yield read_as(batch, self._schema)


def read_as(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of ``schema`` of a batch of stored columns; times come as integers.

    Raises:
        SchemaError, pa.ArrowInvalid: a value does not become the type.
    """
    columns = [
        column.cast(field.type)
        if can_become(column.type, field.type) is Verdict.NEVER
        else conform(field.name, column, field.type, advice="give its column another type in Spark")
        for field in schema
        for column in [batch.column(field.name)]
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def arrow_schema(schema: types.StructType) -> pa.Schema:
    """The Arrow types of columns of Spark.

    Raises:
        SchemaError: names each column that cannot be stored.
    """
    found = [(field, _arrow_type(field.dataType)) for field in schema.fields]
    problems = [
        f"column {field.name!r} is {field.dataType.simpleString()}, which cannot be stored"
        for field, dtype in found
        if dtype is None
    ]
    if problems:
        raise SchemaError(some_of(problems, "; "))
    return pa.schema([(field.name, dtype) for field, dtype in found])


def spark_schema(schema: pa.Schema) -> types.StructType:
    """The types that Spark gives to stored columns; unsigned numbers get wider ones."""
    return types.StructType(
        [types.StructField(field.name, _spark_type(field.type)) for field in schema]
    )


def _arrow_type(dtype: types.DataType) -> pa.DataType | None:
    if isinstance(dtype, types.DecimalType):
        return pa.decimal128(dtype.precision, dtype.scale)
    if isinstance(dtype, types.ArrayType):
        inner = _arrow_type(dtype.elementType)
        return None if inner is None else pa.list_(inner)
    return _ARROW.get(type(dtype))


def _spark_type(dtype: pa.DataType) -> types.DataType:
    kinds = pa.types
    if kinds.is_list(dtype) or kinds.is_large_list(dtype) or kinds.is_fixed_size_list(dtype):
        return types.ArrayType(_spark_type(dtype.value_type))
    return _SPARK[dtype]


def _settings(
    options: Mapping[str, str], others: Sequence[str]
) -> tuple[CacheClient, str, dict[str, Any]]:
    """The cache, the dataset, and other options with their types.

    Raises:
        ConfigError: quotes every wrong option.
    """
    given = {name.lower(): value for name, value in options.items()}
    known = ("name", *_CLIENT, *others)
    problems = [
        f"unknown option {name!r}: give some of {', '.join(known)}"
        for name in given
        if name not in known
    ]
    if not given.get("name"):
        problems.append("option 'name' must be the name of a dataset")
    found = {
        name: checked(problems, partial(_value, name, given[name]))
        for name in others
        if name in given
    }
    client = checked(
        problems,
        lambda: CacheClient(
            Connection(
                given.get("endpoint"),
                token=given.get("token"),
                token_file=given.get("token_file"),
                tls_ca=given.get("tls_ca"),
            )
        ),
    )
    if problems or client is None:
        raise ConfigError("; ".join(problems))
    return client, given["name"], found


def _value(name: str, text: str) -> Any:
    try:
        if name in ("replicas", "num_partitions"):
            return int(text)
        if name in ("ttl_s", "full_wait_s"):
            return float(text)
    except ValueError:
        raise ConfigError(f"option {name!r} must be a number, got {text!r}") from None
    if name == "readers":
        return [reader.strip() for reader in text.split(",")]
    return int(text) if text.isdecimal() else text
