"""Runs queries with DataFusion: over one split, or over whole tables.

Rows must always come in source order, and a split must read only its own rows. Hence the session
settings:

- as many partitions as the file has parts, cut by byte ranges and executed one at a time;
- no round-robin repartition, which reorders rows;
- no work stealing between partitions: the first one would read them all;
- no statistics: a file of few rows would not be cut.

Every file is local: `staging` fetches others first. `queries` decides how a query runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
from datafusion import DataFrame, RuntimeEnvBuilder, SessionContext

from cache_protocol.cli.output import size
from cache_protocol.datasets.dataset_spec import TABLE
from cache_protocol.errors import LoadError
from cache_server.source.pinned import (
    GIVEN,
    PinnedTable,
    Split,
    check_schema,
    no_rows,
    with_source_type,
)
from cache_server.sql import sql_process
from cache_server.sql.bounded import is_unbounded
from cache_server.sql.formats import json_rows, json_types
from cache_server.sql.formats.batch_rows import (
    BATCH_BYTES,
    DEFAULT_BATCH_ROWS,
    MOST_BATCH_ROWS,
    arrow_row_bytes,
    batch_rows,
)
from cache_server.sql.formats.csv_quotes import check_quotes, find_problem
from cache_server.sql.formats.csv_sample import read_sample
from cache_server.sql.formats.csv_zeros import has_zeros, is_number, may_have_zeros
from cache_server.sql.formats.first_bytes import FIRST_BYTES, objection
from cache_server.sql.formats.parquet_bounds import skips_wrongly
from cache_server.sql.formats.text_values import MisfitError, read_column, remedy, wider_type
from cache_server.sql.formats.trailing_data import batches_of, check_end, open_arrow
from cache_server.sql.function_runs import current_run
from cache_server.sql.local_tables import (
    FILE,
    LocalFile,
    reads_nothing,
    register_file,
    register_table,
    register_view,
    rows_of_batch,
    select_read,
    stored_and_read,
    stored_columns,
)
from cache_server.sql.plain_columns import plain_column, plain_schema
from cache_server.sql.quoting import shown
from cache_server.sql.selection import selection_of
from cache_server.sql.session import (
    check_values,
    folds_to_nothing,
    frame_of,
    has_node,
    mode_of,
    named,
    open_session,
    read_only,
    reason_of,
    reraise_exit,
)
from cache_server.sql.sql_process import ANY, Limits

_MOST_NOTED = 4 * 1024 * 1024  # characters of a CSV's sample whose quotes are checked


def infer_schema(
    path: Path, format: str, name: str, *, is_whole: bool = True, escape: str = ""
) -> pa.Schema:
    """The schema of a file; of CSV by its first 1000 rows.

    Args:
        name: of the file, for messages.
        is_whole: otherwise the file is the beginning of ``name`` and may end inside a record.
        escape: of a CSV.

    Raises:
        LoadError: the file cannot be read; names it.
    """
    try:
        check_first_bytes(path, format)
        if format == "arrow":
            with pa.OSFile(str(path)) as file:
                given = open_arrow(file).schema.remove_metadata()
                pairs = zip(plain_schema(given), given, strict=True)
                schema = pa.schema([with_source_type(field, source) for field, source in pairs])
        else:
            schema = (
                _schema_of_csv(path, is_whole, escape)
                if format == "csv"
                else _schema_of(path, format)
            )
        schema = plain_schema(schema)
        check_schema(schema)
        return schema
    except BaseException as error:  # DataFusion raises bare Exception, or panics
        reraise_exit(error)
        raise LoadError(f"cannot read {name} as {format}: {reason_of(error)}") from None


def infer_json(
    path: Path,
    name: str,
    known: pa.Schema | None = None,
    given: Collection[str] = (),
    max_bytes: int | None = None,
) -> pa.Schema:
    """The columns of a file of newline JSON; see `json_types.infer`."""
    try:
        check_first_bytes(path, "json")
        schema = json_types.infer(path, name, known, given=given, max_bytes=max_bytes)
        check_schema(schema)
        return schema
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {name} as json: {error}") from None


def check_first_bytes(path: Path, format: str) -> None:
    """Raises a ValueError for a file that begins like another format or an HTML page."""
    with path.open("rb") as opened:
        if (reason := objection(opened.read(FIRST_BYTES), format)) is not None:
            raise ValueError(reason)


def read_split(
    file: LocalFile,
    sql: str,
    table: PinnedTable,
    note: Callable[[str], None] = lambda text: None,
    limits: Limits = ANY,
) -> Iterator[pa.RecordBatch]:
    """The result rows of one split, in source order.

    Args:
        file: where the split's rows are.
        sql: runs split by split and reads only ``table``.
        note: called with what the types of columns change, before the first row.
        limits: of a query that is not `bounded`, which runs in a process apart.

    Raises:
        LoadError: naming file, split and reason.
    """
    split = file.split
    if is_unbounded(sql, {table.name: table.schema}):
        yield from sql_process.stream(
            read_split,
            *(file, sql, table),
            limits=limits.beside([file.path]),
            failure=partial(_died, f"cannot load {split}"),
            note=note,
            functions=current_run(),
        )
        return
    parts = 1 if file.is_staged else split.parts
    try:
        if (rows := _rows_in_memory(file, table, note)) is not None:
            yield from named(_by_lots(rows, file, sql, table), sql)
            return
        context, frame = _planned(file, sql, table, parts)
        if folds_to_nothing(frame):
            return  # no row can pass the filter
        plan = frame.execution_plan()
        if reads_nothing(plan):
            raise LoadError(f"cannot load {split}: the file is gone")
        if plan.partition_count == parts:
            part = split.part if parts > 1 else 0
            check_values(context, frame, part)
            stream = context.execute(plan, part)
            yield from named((batch.to_pyarrow() for batch in stream), sql)
            return
    except LoadError:
        raise
    except FileNotFoundError:
        raise LoadError(f"cannot load {split}: the file is gone") from None
    except BaseException as error:  # DataFusion raises bare Exception, or panics
        reraise_exit(error)
        raise LoadError(f"cannot load {split}: {reason_of(error)}") from None
    raise LoadError(
        f"cannot load {split}: DataFusion cut the file into {plan.partition_count} parts "
        f"instead of {parts}"
    )


def read_together(
    files: Sequence[LocalFile], sql: str, table: PinnedTable, limits: Limits = ANY
) -> Iterator[pa.RecordBatch]:
    """Like `read_split`, for whole Parquet files, in order of names.

    One query reads all of them: planning takes longer than reading a small file.

    Args:
        files: alone in a folder, with the same partition values.
    """
    folder, splits = files[0].path.parent, [file.split for file in files]
    if is_unbounded(sql, {table.name: table.schema}):
        yield from sql_process.stream(
            read_together,
            *(files, sql, table),
            limits=limits.beside([file.path for file in files]),
            failure=partial(_died, f"cannot load {splits[0]} to {splits[-1]}"),
            functions=current_run(),
        )
        return
    try:
        context, frame = _planned(LocalFile(folder, table.format, splits[0]), sql, table, 1)
        if not folds_to_nothing(frame):
            check_values(context, frame)
            stream = (batch.to_pyarrow() for batch in frame.execute_stream())
            yield from _joined(named(stream, sql))
    except BaseException as error:  # DataFusion raises bare Exception, or panics
        reraise_exit(error)
        for file in files:  # find the bad file
            for _ in read_split(file, sql, table):
                pass
        raise LoadError(f"cannot load {splits[0]} to {splits[-1]}: {reason_of(error)}") from None


def with_rows(splits: Sequence[Split], sql: str, table: PinnedTable) -> list[Split]:
    """The splits that may hold rows of a query, by their partition values."""
    selection = selection_of(sql)
    if selection is not None and not selection.filter:
        return list(splits)
    if is_unbounded(sql, {table.name: table.schema}):
        found: list[Split] = sql_process.call(
            with_rows, splits, sql, table, failure=partial(_died, f"cannot run {shown(sql)}")
        )
        return found
    answers: dict[tuple[object, ...], bool] = {}
    kept = []
    for split in splits:
        constants = table.partition_of(split)
        key = tuple(value.as_py() for value in constants.values())
        if key not in answers:
            answers[key] = not constants or _may_keep(constants, sql, table)
        if answers[key]:
            kept.append(split)
    return kept


def run_whole(
    sql: str, tables: Mapping[str, Path], memory_bytes: int | None = None, limits: Limits = ANY
) -> Iterator[pa.RecordBatch]:
    """The rows of a query over whole tables, in its order.

    It uses one partition, so the same tables give the same order, also of ties.

    Args:
        tables: name -> Arrow file.
        memory_bytes: of sorts, joins and groups together. What does not fit is written beside the
            first file; some joins cannot, and fail. None: no limit.
        limits: see `read_split`.

    Raises:
        LoadError: with the reason.
    """
    try:
        schemas = {name: _schema_of(path, "arrow") for name, path in tables.items()}
        if is_unbounded(sql, schemas):
            yield from sql_process.stream(
                run_whole,
                *(sql, tables, memory_bytes),
                limits=limits.beside(tables.values()),
                failure=partial(_died, f"cannot run {shown(sql)}"),
                functions=current_run(),
            )
            return
        longest = max(map(arrow_row_bytes, tables.values()), default=0)
        rows = min(DEFAULT_BATCH_ROWS, batch_rows(longest))
        mode, runtime = mode_of(sql, schemas), _bounded(memory_bytes, tables)
        context = open_session(1, rows, mode=mode, runtime=runtime, sql=sql)
        for name, path in tables.items():
            register_file(context, name, path, "arrow", None)
        frame = context.sql_with_options(sql, read_only())
        check_values(context, frame)
        for batch in frame.execute_stream():
            yield batch.to_pyarrow()
    except LoadError:
        raise
    except Exception as error:  # DataFusion raises bare Exception
        if memory_bytes is not None and "Resources exhausted" in str(error):
            raise LoadError(
                f"cannot run {shown(sql)}: a query gets {size(memory_bytes)} of the memory of this "
                "container. Give the nodes more memory, or join smaller tables"
            ) from None
        raise LoadError(f"cannot run {shown(sql)}: {reason_of(error)}") from None


def _died(what: str, reason: str) -> LoadError:
    return LoadError(
        f"{what}: the query {reason}. Make its values shorter, or give the nodes more memory"
    )


def _bounded(memory_bytes: int | None, tables: Mapping[str, Path]) -> RuntimeEnvBuilder | None:
    if memory_bytes is None:
        return None
    folder = next(iter(tables.values())).parent
    folder.mkdir(parents=True, exist_ok=True)
    return (
        RuntimeEnvBuilder().with_fair_spill_pool(memory_bytes).with_disk_manager_specified(folder)
    )


def _schema_of(path: Path, format: str) -> pa.Schema:
    context = open_session(1)
    register_file(context, TABLE, path, format, None)
    return context.table(TABLE).schema()


def _schema_of_csv(path: Path, is_whole: bool, escape: str) -> pa.Schema:
    """The schema of a CSV by its `csv_sample`.

    A column without values in it is a string column: one of nulls would lose later values.
    """
    read: list[str] = []
    sample, error = None, ""
    try:
        with open(path, encoding="latin-1", newline="") as lines:
            sample = read_sample(_noted(lines, read), is_whole=is_whole, escape=escape)
    except ValueError as found:
        error = str(found)
    # The cause of the error may be in the quotes.
    problem = find_problem("".join(read).encode("latin-1"), escape, is_whole=False) or error
    if problem or sample is None:
        raise ValueError(problem)
    with tempfile.TemporaryDirectory() as directory:
        beginning = Path(directory, "sample.csv")
        beginning.write_text("".join(sample.records), encoding="latin-1", newline="")
        schema = _schema_of(beginning, "csv")
    types = [pa.string() if pa.types.is_null(dtype) else dtype for dtype in schema.types]
    return pa.schema(list(zip(sample.names, types, strict=True)))


def _noted(lines: Iterable[str], read: list[str]) -> Iterator[str]:
    """The same lines, which are added to ``read`` up to some number of characters."""
    size = 0
    for line in lines:
        size += len(line)
        if size <= _MOST_NOTED:
            read.append(line)
        yield line


def _planned(
    file: LocalFile, sql: str, table: PinnedTable, parts: int
) -> tuple[SessionContext, DataFrame]:
    """A planned query over a split, and its session; see `parquet_bounds`."""
    for skips in (True, False):
        context = open_session(
            parts, rows_of_batch(file), mode=mode_of(sql, {table.name: table.schema}), sql=sql
        )
        register_table(context, file, table, sql, skips=skips)
        frame = frame_of(context, sql, table.read_schema.names)
        if file.format != "parquet" or not has_node(frame.logical_plan(), "Filter"):
            break
        plan = frame.execution_plan().display_indent()
        if not skips_wrongly(plan, file.path, table.read_schema):
            break
    return context, frame


def _rows_in_memory(
    file: LocalFile, table: PinnedTable, note: Callable[[str], None]
) -> Iterator[pa.RecordBatch] | None:
    """The rows of a split that DataFusion would read wrongly; None: it reads them correctly."""
    if file.format == "json":
        return _json_rows(file, table)
    if file.format == "csv":
        return _csv_rows(file, table, note)
    if file.format == "arrow" and not file.is_staged:
        return _arrow_rows(file, table)
    return None


def _by_lots(
    rows: Iterator[pa.RecordBatch], file: LocalFile, sql: str, table: PinnedTable
) -> Iterator[pa.RecordBatch]:
    """The result of a query over rows in memory, some rows at a time.

    Args:
        rows: of the stored columns that the query reads.
    """
    schema, constants = plain_schema(table.read_schema), table.partition_of(file.split)

    def plain(batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [
            pa.repeat(constants[field.name], batch.num_rows)
            if field.name in constants
            else plain_column(batch.column(field.name), field.type)
            for field in schema
        ]
        # Without columns only the number of rows counts.
        return pa.RecordBatch.from_arrays(columns, schema=schema) if columns else batch

    mode = mode_of(sql, {table.name: table.schema})
    for lot in _joined(map(plain, rows), MOST_BATCH_ROWS):
        context = open_session(1, MOST_BATCH_ROWS, mode=mode, sql=sql)
        context.register_record_batches(table.name, [[lot]])
        frame = frame_of(context, sql, table.read_schema.names)
        if folds_to_nothing(frame):
            return
        check_values(context, frame)
        for batch in frame.execute_stream():
            yield batch.to_pyarrow()


def _json_rows(file: LocalFile, table: PinnedTable) -> Iterator[pa.RecordBatch]:
    """The rows of newline JSON, of the columns that the query reads."""
    check_first_bytes(file.path, file.format)
    yield from json_rows.read(
        file.path, file.split, stored_and_read(file, table), is_every_key=table.columns is None
    )


def _arrow_rows(file: LocalFile, table: PinnedTable) -> Iterator[pa.RecordBatch]:
    """The rows of an Arrow file or stream, of the columns that the query reads.

    Arrow reads them: DataFusion aborts where a damaged file says how many bytes are compressed.
    """
    check_first_bytes(file.path, file.format)
    check_end(file.path, file.split)
    num_rows = rows_of_batch(file)
    with pa.memory_map(str(file.path)) as source:
        reader = open_arrow(source, stored_and_read(file, table).names)
        for batch in batches_of(reader):
            batch.validate(full=True)
            for start in range(0, batch.num_rows, num_rows):
                yield batch.slice(start, num_rows)


def _csv_rows(
    file: LocalFile, table: PinnedTable, note: Callable[[str], None]
) -> Iterator[pa.RecordBatch]:
    """The rows of a CSV, of the columns that the query reads; notes numbers that lose zeros.

    DataFusion reads them as strings: it would cut decimals and times to fit.
    """
    check_first_bytes(file.path, file.format)
    check_quotes(file.path, file.split, table.escape)
    stored = stored_columns(table, table.partition_of(file.split))
    texts = pa.schema([field.with_type(pa.string()) for field in stored])
    read = stored_and_read(file, table)
    if not read.names:  # only the number of rows counts
        read = pa.schema([texts.field(0)])
    numbers = {f.name for f in read if is_number(f.type) and GIVEN not in (f.metadata or {})}
    if numbers and not may_have_zeros(file.path):
        numbers.clear()
    num_rows = 0
    for batch in select_read(file, table, texts, read.names).execute_stream():
        rows, columns = batch.to_pyarrow(), []
        for column, field in zip(rows.columns, read, strict=True):
            if field.name in numbers and has_zeros(column):
                numbers.remove(field.name)
                of_table = "" if table.name == TABLE else f" of table {table.name!r}"
                note(
                    f"column {field.name!r}{of_table} lost leading zeros, because it is of "
                    f"{field.type}: {remedy(field.name, 'string')} to keep them"
                )
            try:
                columns.append(read_column(column, field.type))
            except MisfitError as error:
                problem = _misfit(error, field, num_rows + error.index + 1)
                raise LoadError(f"cannot load {file.split}: {problem}") from None
        yield pa.RecordBatch.from_arrays(columns, schema=read)
        num_rows += rows.num_rows


def _misfit(error: MisfitError, field: pa.Field, row: int) -> str:
    """Why a value of a CSV is not one of its column, and what to do."""
    holds = f"column {field.name!r} holds {error.text!r} in row {row}, but"
    if GIVEN in (field.metadata or {}):
        return f"{holds} its type in the spec is {field.type}"
    wider = remedy(field.name, wider_type(error.text, field.type))
    return f"{holds} it is of {field.type} by the first rows of the table: {wider}"


def _may_keep(constants: Mapping[str, pa.Scalar], sql: str, table: PinnedTable) -> bool:
    context = open_session(1, mode=mode_of(sql, {table.name: table.schema}), sql=sql)
    empty = no_rows(stored_columns(table, constants))
    context.register_record_batches(FILE, [[empty]])
    register_view(context, table, constants)
    try:
        return not folds_to_nothing(frame_of(context, sql, table.read_schema.names))
    except Exception:  # DataFusion raises bare Exception; reading the split will report it
        return True


def _joined(
    batches: Iterator[pa.RecordBatch], enough_rows: int = DEFAULT_BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """The same rows in larger batches: packing costs the same Python time for any batch."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= enough_rows or size >= BATCH_BYTES:
            yield pa.concat_batches(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.concat_batches(waiting)
