"""The live rows of one data file of an Iceberg table, with the columns of a schema.

pyiceberg maps the columns. Its own scan has errors: null lists of structs become empty
(apache/iceberg-python#3833), renamed fields of structs in nested lists are lost, and far 96-bit
timestamps wrap around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import (
    ArrowAccessor,
    ArrowProjectionVisitor,
    _combine_positional_deletes,
    _get_column_projection_values,
    _read_all_delete_files,
    pyarrow_to_schema,
)
from pyiceberg.manifest import FileFormat
from pyiceberg.schema import Schema, prune_columns, visit_with_partner
from pyiceberg.table import FileScanTask, StaticTable
from pyiceberg.types import ListType, MapType

from cache_server.tables import lake

_LAST_VERSION_IN_MICROSECONDS = 2  # of the format; later ones have nanoseconds


def live_rows(table: StaticTable, task: FileScanTask, schema: Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a data file without the deleted ones, in order.

    Args:
        task: the file, Parquet or ORC, and its positional deletes and deletion vectors.
        schema: columns of the table; missing ones get the format's default.
    """
    metadata, file = table.metadata, task.file
    version = metadata.format_version
    in_microseconds = version <= _LAST_VERSION_IN_MICROSECONDS
    deletes = _read_all_delete_files(table.io, [task]).get(file.file_path)
    with table.io.new_input(file.file_path).open() as opened:
        physical, batches = _opened(opened, file.file_format)
        stored = pyarrow_to_schema(physical, metadata.name_mapping(), in_microseconds, version)
        absent = absent_values(table, task, schema, stored)
        wanted = {n for n in schema.field_ids if not _is_container(schema, n)}
        read = prune_columns(stored, wanted, select_full_types=False)
        visitor = _Projection(
            read,
            in_microseconds,
            projected_missing_fields=absent,
            allow_timestamp_tz_mismatch=True,
        )
        stop = 0
        for batch in batches([field.name for field in read.fields]):
            start, stop = stop, stop + batch.num_rows
            if deletes:
                batch = batch.take(_combine_positional_deletes(deletes, start, stop))
            if batch.num_rows:
                fitted = visit_with_partner(schema, batch, visitor, ArrowAccessor(read))
                yield pa.RecordBatch.from_struct_array(fitted)


def absent_values(
    table: StaticTable, task: FileScanTask, schema: Schema, stored: Schema
) -> dict[int, Any]:
    """The values of columns that a data file lacks and its partition tells, by their ids.

    Args:
        stored: the columns of the file.
    """
    metadata, file = table.metadata, task.file
    spec = metadata.specs().get(file.spec_id)
    return dict(
        _get_column_projection_values(file, schema, metadata.schema(), spec, stored.field_ids)
    )


def _opened(
    file: pa.NativeFile, format: FileFormat
) -> tuple[pa.Schema, Callable[[list[str]], Iterator[pa.RecordBatch]]]:
    """The schema of a data file, and what reads some of its columns."""
    if format == FileFormat.PARQUET:
        parquet = pq.ParquetFile(file, coerce_int96_timestamp_unit="us", pre_buffer=True)
        return parquet.schema_arrow, partial(lake.parquet_batches, parquet)
    orc = ds.OrcFileFormat().make_fragment(file)
    return orc.physical_schema, lambda names: orc.scanner(columns=names).to_batches()


def _is_container(schema: Schema, field_id: int) -> bool:
    return isinstance(schema.find_type(field_id), ListType | MapType)


class _Projection(ArrowProjectionVisitor):
    """pyiceberg's, but lists and maps keep their nulls and their mapped fields."""

    def list(
        self, list_type: ListType, list_array: pa.Array | None, value_array: pa.Array | None
    ) -> pa.Array | None:
        if value_array is None or not isinstance(list_array, pa.ListArray | pa.LargeListArray):
            return super().list(list_type, list_array, value_array)
        values = self._cast_if_needed(list_type.element_field, value_array)
        field = self._construct_field(list_type.element_field, values.type)
        is_large = isinstance(list_array, pa.LargeListArray)
        return type(list_array).from_arrays(  # pyright: ignore[reportAttributeAccessIssue]
            _offsets(list_array),
            values,
            type=pa.large_list(field) if is_large else pa.list_(field),
            mask=list_array.is_null(),  # pyright: ignore[reportOptionalMemberAccess]
        )

    def map(
        self,
        map_type: MapType,
        map_array: pa.Array | None,
        key_result: pa.Array | None,
        value_result: pa.Array | None,
    ) -> pa.Array | None:
        if map_array is None or key_result is None or value_result is None:
            return None
        keys = self._cast_if_needed(map_type.key_field, key_result)
        values = self._cast_if_needed(map_type.value_field, value_result)
        return pa.MapArray.from_arrays(
            _offsets(map_array),
            keys,
            values,
            type=pa.map_(
                self._construct_field(map_type.key_field, keys.type),
                self._construct_field(map_type.value_field, values.type),
            ),
            mask=map_array.is_null(),
        )


def _offsets(array: pa.Array) -> pa.Array:
    """The offsets of lists or maps, as an unsliced array: Arrow needs that with a mask."""
    return pa.array(array.offsets.to_numpy())
