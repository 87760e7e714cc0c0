"""Shared by `iceberg` and `delta`: exact schemas, open snapshots, splits, failures."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Generic, TypeVar

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from cache_protocol.errors import CacheError, without_middle
from cache_protocol.storage.layout import Layout
from cache_server.egress.gate import why_unreachable
from cache_server.object_stores.connections import from_env
from cache_server.object_stores.options import option_value
from cache_server.secrets.redaction import redacted, secret_values
from cache_server.source.outages import load_error
from cache_server.source.pinned import SourceFile, Split, sized_fields, with_source_type
from cache_server.sql.formats.batch_rows import batch_rows
from cache_server.sql.plain_columns import with_fields, with_short_offsets
from cache_server.tables.column_sizes import Place, plain_bytes, row_bytes

_SMALL_OFFSETS_BYTES = 1 << 30  # a smaller batch fits 32-bit offsets
_CACHED_SNAPSHOTS = 8
# Of a row group that DataFusion reads. It holds the whole group in memory, Arrow does not.
MOST_GROUP_BYTES = 128 * 1024 * 1024
MOST_FOOTERS = 64  # read to estimate the bytes of strings and lists
# Parquet's INT96 in the unit of both formats; nanoseconds overflow for far dates.
PARQUET = ds.ParquetFileFormat(
    read_options=ds.ParquetReadOptions(coerce_int96_timestamp_unit="us"),
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(pre_buffer=True),
)
_FOOTER_THREADS = 8
_DRAWN = re.compile(r"\x1b\[[0-9;]*m|↳")  # terminal colours and arrows in messages
_INPUT = re.compile(r", input_value=.*?, input_type=\w+(?=\])", re.DOTALL)  # pydantic cuts secrets
_FRAMES = re.compile(r"\n\s*0: .*", re.DOTALL)  # a stack trace after a message
_LONGEST = 500  # characters of a message, of which a reason has these at least and at most
_LEAST_REASON, _MOST_REASON = 160, 400
_NO_CONSTANTS: Mapping[str, pa.Scalar] = {}

T = TypeVar("T")


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """``schema`` as files are read, with a note of the extension types.

    It has small offsets, no extension types, views or metadata, and nullable inner fields.
    """
    return pa.schema(
        [
            with_source_type(
                pa.field(field.name, _read_type(field.type), field.nullable),
                pa.field(field.name, _read_type(field.type, keep_extensions=True), field.nullable),
            )
            for field in schema
        ]
    )


def _read_type(dtype: pa.DataType, *, keep_extensions: bool = False) -> pa.DataType:
    """The type of a column of `plain_schema`, or with its extension types."""
    if isinstance(dtype, pa.BaseExtensionType):
        return dtype if keep_extensions else _read_type(dtype.storage_type)
    inner = partial(_read_type, keep_extensions=keep_extensions)
    short = with_short_offsets(dtype)
    return with_fields(short, lambda child: pa.field(child.name, inner(child.type)))


def conform(
    batch: pa.RecordBatch, schema: pa.Schema, constants: Mapping[str, pa.Scalar] = _NO_CONSTANTS
) -> Iterator[pa.RecordBatch]:
    """``batch`` with exactly ``schema``, in several pieces if it is too large for 32-bit offsets.

    Args:
        constants: columns with one value for all rows; they override those of the batch.
    """
    if batch.nbytes > _SMALL_OFFSETS_BYTES and batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from conform(batch.slice(0, half), schema, constants)
        yield from conform(batch.slice(half), schema, constants)
        return
    if not schema.names:
        yield batch.select([])  # keeps the number of rows
        return
    arrays = []
    for field in schema:
        if field.name in constants:
            array = pa.repeat(constants[field.name], batch.num_rows)
        else:
            array = batch.column(field.name)
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        arrays.append(array if array.type == field.type else array.cast(field.type))
    yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def parquet_batches(
    file: pq.ParquetFile, names: Sequence[str], groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of some columns, in order, in small batches.

    Arrow's scanner decodes a row group at once, and cannot if a list column has over 2 GiB.

    Args:
        groups: numbers of row groups; None: all.

    Raises:
        ValueError: Arrow loses rows.
    """
    footer = file.metadata
    for group in range(footer.num_row_groups) if groups is None else groups:
        missing = footer.row_group(group).num_rows
        rows = batch_rows(row_bytes(footer, names, [group]))
        for batch in file.iter_batches(
            rows, row_groups=[group], columns=list(names), use_threads=False
        ):
            missing -= batch.num_rows
            yield batch.select(names)
        if missing:  # pyarrow 26 loses rows of lists of booleans in small pages of version 2
            raise ValueError(f"Arrow reads {missing} rows fewer than its footer says")


class _Slot(Generic[T]):
    """One snapshot: the first caller opens it, the others wait."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.opened: T | None = None
        self.opened_s = 0.0


class OpenedSnapshots(Generic[T]):
    """Keeps the latest snapshots open for all their splits. Thread-safe.

    Args:
        max_age_s: an older one is opened again.
    """

    def __init__(self, *, max_age_s: float = math.inf) -> None:
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._slots: OrderedDict[Hashable, _Slot[T]] = OrderedDict()

    def get(
        self,
        state: Hashable,
        options: Mapping[str, str],
        secrets: Mapping[str, str],
        open_it: Callable[[], T],
    ) -> T:
        """The snapshot of ``state``, opened with these options and secrets.

        Raises:
            the error of ``open_it``; the next call tries again.
        """
        key = (state, tuple(sorted(options.items())), tuple(sorted(secrets.items())))
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            if len(self._slots) > _CACHED_SNAPSHOTS:
                self._slots.popitem(last=False)
        with slot.lock:
            if slot.opened is None or time.monotonic() - slot.opened_s > self._max_age_s:
                slot.opened = open_it()
                slot.opened_s = time.monotonic()
            return slot.opened


@dataclass(frozen=True)
class DataFile:
    """A data file of a snapshot.

    Attributes:
        num_rows: before any deletes.
        group_bytes: about the size of a row group, at most `MOST_GROUP_BYTES`; 0 if the file is
            not read as a `plain_files.PlainFile`.
        deletes: identifies them; empty if there are none.
    """

    file: SourceFile
    num_rows: int
    group_bytes: int = 0
    _: KW_ONLY
    deletes: str = ""


Footer = tuple[pq.FileMetaData, Callable[[pa.Field], Place]]


def cut(
    files: Sequence[DataFile], stored: pa.Schema, footer_of: Callable[[DataFile], Footer | None]
) -> tuple[Split, ...]:
    """One split for each data file; some footers give the bytes of strings and lists.

    Args:
        stored: the logical schema that is kept, see `pinned.with_lineage`.
        footer_of: None for a file that is not Parquet. Called by several threads, for at most
            `MOST_FOOTERS` files, evenly spaced; not at all if all widths are fixed.
    """
    layout = Layout(stored)
    sampled = evenly(len(files), MOST_FOOTERS) if layout.plain_fields else ()

    def measure(index: int) -> int | None:
        found = footer_of(files[index])
        if found is None:
            return None
        footer, place_of = found
        columns = [(field, place_of(field)) for field in sized_fields(layout)]
        return sum(map(sum, plain_bytes(footer, columns)))

    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        measured = dict(zip(sampled, pool.map(measure, sampled), strict=True))
    known = {index: size for index, size in measured.items() if size is not None}
    rows = sum(files[index].num_rows for index in known)
    guess = layout.guessed_row_bytes - layout.fixed_row_bytes
    mean = sum(known.values()) / rows if rows else guess
    return tuple(
        Split(
            data.file,
            0,
            1,
            data.num_rows,
            data.num_rows * layout.fixed_row_bytes + known.get(index, round(data.num_rows * mean)),
            group_bytes=data.group_bytes,
            piece=data.deletes,
        )
        for index, data in enumerate(files)
    )


def bytes_by(num_files: int) -> str:
    """`Pin.bytes_by` for splits from `cut`."""
    return f"the footers of {MOST_FOOTERS} of its files" if num_files > MOST_FOOTERS else ""


def evenly(total: int, most: int) -> Sequence[int]:
    """Evenly spaced numbers below ``total``; all of them if there are not enough."""
    return [index * total // most for index in range(most)] if total > most else range(total)


@contextmanager
def naming(what: str, options: Mapping[str, str], secrets: Mapping[str, str]) -> Iterator[None]:
    """Turns any exception of a library into a `LoadError` of one line that names ``what``.

    These libraries have no common base of exceptions, and any message may quote a credential.
    """
    try:
        yield
    except CacheError:
        raise
    except Exception as error:
        if refused := why_unreachable(options, secrets):
            raise load_error(f"cannot read {what}: {refused}", refused) from None
        endpoint = option_value(options, "endpoint")
        store = f" from {endpoint}" if endpoint else ""
        text = _FRAMES.sub("", _DRAWN.sub("", str(error) or type(error).__name__))
        reason = redacted(_INPUT.sub("", text), secret_values(secrets, from_env()))
        left = max(_LEAST_REASON, _LONGEST - len(what) - len(store))
        shown = without_middle(reason, min(left, _MOST_REASON))
        raise load_error(f"cannot read {what}{store}: {shown}", error) from None
