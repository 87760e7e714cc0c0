"""Makes one shard: reads its splits, runs a whole query, or copies its file.

Runs in the load threads of a node. A job that fails leaves nothing behind. This module knows no
heartbeats.
"""

from __future__ import annotations

import base64
import logging
import shutil
import threading
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pyarrow as pa

from cache_protocol.errors import LoadError, NodeUnavailableError, some_of
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.shard_files import SealedShard
from cache_protocol.wire import tracing
from cache_protocol.wire.credentials import Credentials
from cache_server.node import peer_files
from cache_server.node.desired import DesiredShard, LoadPlan, SameShard
from cache_server.node.loads import staging
from cache_server.node.loads.null_places import NullPlaces, RowSource
from cache_server.plan.shard_plan import load_memory_bytes, max_rows
from cache_server.plan.written_version import put_of
from cache_server.shards.packing import ShardBuilder
from cache_server.shards.store import ShardStore
from cache_server.shards.version_key import VersionKey
from cache_server.source.pinned import PinnedTable, Split
from cache_server.sql import loader, queries
from cache_server.sql.bounded import is_unbounded
from cache_server.sql.planned_types import other_types
from cache_server.sql.quoting import identifier
from cache_server.sql.sql_process import ANY, Limits

logger = logging.getLogger(__name__)


class CancelledError(Exception):
    """The job was cancelled."""


@dataclass(eq=False)
class Job:
    """One load; equal only to itself.

    Attributes:
        shard: to load or to copy; None for a run of the whole query.
        missing: the shards to keep of a whole query; empty: all of them.
        query_bytes: memory of a query over whole tables; None: no limit.
        cancelled: set when the result is no longer needed.
        rows: loaded so far; written by the load thread.
        notes: what the loads of the version changed, for people; load threads add to it.
        traceparent: of the load of the version; empty: it is not traced.
    """

    plan: LoadPlan
    shard: DesiredShard | None = None
    missing: frozenset[int] = frozenset()
    query_bytes: int | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    rows: int = 0
    notes: set[str] = field(default_factory=set)
    traceparent: str = ""

    @property
    def limits(self) -> Limits:
        """Of a query that runs in a process apart."""
        memory_bytes = ANY.memory_bytes if self.query_bytes is None else self.query_bytes
        return Limits(memory_bytes, check=self.check_wanted)

    @property
    def key(self) -> VersionKey:
        """Of the version."""
        return self.plan.key

    @property
    def index(self) -> int | None:
        """Of the shard; None for a whole query."""
        return None if self.shard is None else self.shard.index

    @property
    def splits(self) -> tuple[Split, ...]:
        """Of the table that is read split by split."""
        return () if self.shard is None else self.shard.splits

    @property
    def whole_splits(self) -> list[Split]:
        """Of the tables that the job reads whole."""
        return [split for table in self.plan.tables for split in table.splits]

    def __str__(self) -> str:
        if self.shard is None:
            return "the whole query"
        splits = f" of {some_of(self.splits)}" if self.splits else ""
        return f"shard {self.shard.index}{splits}"

    def secrets_of(self, table: PinnedTable) -> Mapping[str, str]:
        """The secrets of one table of the plan."""
        return self.plan.secrets.get(table.name, {})

    def note(self, text: str) -> None:
        """Notes what the load changes; logs it once."""
        if text not in self.notes:
            self.notes.add(text)
            logger.warning("values changed dataset=%s %s", self.key.dataset, text)

    def check_wanted(self) -> None:
        """Raises `CancelledError` after the job was cancelled."""
        if self.cancelled.is_set():
            raise CancelledError


def memory_bytes(job: Job) -> int:
    """Memory that a job needs: see `shard_plan.load_memory_bytes`; and its process apart."""
    placed = job.plan.layout.fixed_row_bytes if job.plan.keeps_every_row else 0
    tables = {table.name: table.read_schema for table in job.plan.tables}
    apart = job.query_bytes or 0 if is_unbounded(job.plan.sql, tables) else 0
    return load_memory_bytes(job.splits, job.whole_splits, placed) + apart


class SpooledTables:
    """Tables that a query reads whole, as local Arrow files. Thread-safe.

    Each file is written when it is first needed; `close` removes them all.

    Args:
        directory: used by nothing else.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._paths: dict[str, Path] = {}
        self.is_used = False

    def paths(self, job: Job, wanted: Sequence[PinnedTable]) -> dict[str, Path]:
        """The files of these tables, by name.

        Raises:
            LoadError: naming table, file, split and reason.
        """
        with self._lock:
            self.is_used = self.is_used or bool(wanted)
            for table in wanted:
                if table.name not in self._paths:
                    path = self._directory / f"{table.name}.arrow"
                    _spool(job, table, table.splits, path)
                    self._paths[table.name] = path
            return {table.name: self._paths[table.name] for table in wanted}

    def close(self) -> None:
        """Removes the files. Without files it does nothing."""
        with self._lock:
            if self.is_used:
                self._paths.clear()
                shutil.rmtree(self._directory, ignore_errors=True)
                self.is_used = False


def load_shard(store: ShardStore, job: Job, spooled: SpooledTables) -> None:
    """Reads the splits of one shard with the query, and seals it.

    Args:
        spooled: the other tables of the query.

    Raises:
        LoadError: naming the file, the split and the reason. CancelledError.
    """
    assert job.shard is not None
    table, *others = job.plan.tables
    index, splits, layout = job.shard.index, job.splits, job.plan.layout
    expected = max_rows(splits)
    with ExitStack() as stack:
        draft = None
        if job.plan.keeps_every_row and expected and layout.fixed_row_bytes:
            draft = stack.enter_context(store.draft(job.key, index, layout, expected))
        builder = ShardBuilder(
            job.plan.logical, expected, draft, refuse_nulls=job.plan.refuse_nulls
        )
        if job.plan.joined:
            rows = _joined_rows(job, table, splits, spooled.paths(job, others), store.scratch)
        else:
            rows = _rows(job, table, splits, job.plan.sql, store.scratch)
        check, places = _TypeCheck(job.plan.logical), NullPlaces()
        latest, start = None, 0
        for source, batch in rows:
            if source is not latest:
                latest, start = source, builder.num_rows
            check(batch, source)
            row = builder.num_rows - start
            _append(builder, batch, source)
            places.note(builder, source, row)
            job.rows = builder.num_rows
        batch = _finish(job, builder, str(places), RowSource(splits) if splits else "no file")
        store.seal(job.key, index, batch, draft, builder.nulls)


def move_put(store: ShardStore, job: Job) -> None:
    """Makes a shard of rows that a writer put on this node.

    Raises:
        LoadError: they are not on this node.
    """
    assert job.shard is not None
    (split,) = job.splits
    name, place = put_of(split)
    store.move(VersionKey(job.key.dataset, name), place, job.key, job.shard.index)


def run_whole(store: ShardStore, job: Job) -> int:
    """Runs a whole query and cuts its result into shards.

    The same tables give the same rows in the same order, so lost shards can be made again.

    Returns:
        The number of shards of the result.

    Raises:
        LoadError: with the reason. CancelledError.
    """
    if not job.missing:
        store.drop_version(job.key)
    builder = ShardBuilder(job.plan.logical, refuse_nulls=job.plan.refuse_nulls)
    num_shards = done = 0
    check, what = _TypeCheck(job.plan.logical), "the result of the query"
    first_null: int | None = None

    def seal() -> None:
        nonlocal num_shards, builder
        if not job.missing or num_shards in job.missing:
            where = "" if first_null is None else f", in row {first_null} of {what}"
            batch = _finish(job, builder, where, what)
            store.seal(job.key, num_shards, batch, nulls=builder.nulls)
        num_shards += 1
        builder = ShardBuilder(job.plan.logical, refuse_nulls=job.plan.refuse_nulls)

    with closing(SpooledTables(store.scratch / uuid.uuid4().hex)) as spooled:
        for batch in loader.run_whole(
            job.plan.sql, spooled.paths(job, job.plan.tables), job.query_bytes, job.limits
        ):
            job.check_wanted()
            check(batch, what)
            for start, rows in _pieces(batch, builder.layout, job.plan.target_shard_bytes):
                if builder.num_rows and (
                    builder.num_bytes + builder.num_bytes // builder.num_rows * rows
                    > job.plan.target_shard_bytes
                ):
                    seal()
                _append(builder, batch.slice(start, rows), what)
                if first_null is None and builder.refused_rows:
                    first_null = done + int(builder.refused_rows[next(iter(builder.refused))][0])
                done += rows
                job.rows = done
        if builder.num_rows:
            seal()
    job.check_wanted()
    return num_shards


def copy_shard(store: ShardStore, job: Job, credentials: Credentials) -> None:
    """Shares the file of the same shard of another version, or copies it from another node.

    Args:
        credentials: of this node.

    Raises:
        NodeUnavailableError: it is not here any more, and no node gave it.
        LoadError: it does not fit here. CancelledError.
    """
    assert job.shard is not None and job.shard.copy is not None
    copy = job.shard.copy
    sealed = SealedShard(
        job.shard.index,
        copy.num_rows,
        copy.num_bytes,
        copy.checksum,
        copy.nulls,
        erased=base64.b64encode(copy.erased).decode(),
    )
    source = copy.same_as or SameShard(job.key, sealed.index)
    if copy.same_as is not None:
        try:
            store.share(job.key, sealed, source.key, source.index)
            return
        except NodeUnavailableError:
            if not copy.locations:
                raise
    for location in copy.locations[:-1]:
        try:
            _copy(store, job, sealed, source, location, credentials)
            return
        except NodeUnavailableError as error:
            logger.warning("copy failed dataset=%s %s", job.key.dataset, error)
    _copy(store, job, sealed, source, copy.locations[-1], credentials)


def _copy(
    store: ShardStore,
    job: Job,
    sealed: SealedShard,
    source: SameShard,
    location: str,
    credentials: Credentials,
) -> None:
    file = peer_files.shard_file(location, source.key, source.index, credentials=credentials)
    with closing(file) as chunks:
        store.receive(job.key, sealed, _while_wanted(job, chunks))


def _while_wanted(job: Job, chunks: Iterator[pa.Buffer]) -> Iterator[pa.Buffer]:
    for chunk in chunks:
        job.check_wanted()
        yield chunk


def _rows(
    job: Job, table: PinnedTable, splits: Sequence[Split], sql: str, scratch: Path
) -> Generator[tuple[RowSource, pa.RecordBatch], None, None]:
    """The rows of a query over each split of one table, in row order, with where they come from."""
    with closing(staging.stage(table, splits, job.secrets_of(table), scratch)) as groups:
        for files in groups:
            source = RowSource([file.split for file in files], files, sql, table)
            with tracing.ending(tracing.begin("cache.split", table=table.name, source=str(source))):
                if len(files) == 1:
                    batches = loader.read_split(files[0], sql, table, job.note, job.limits)
                else:
                    batches = loader.read_together(files, sql, table, job.limits)
                for batch in batches:
                    job.check_wanted()
                    yield source, batch


def _joined_rows(
    job: Job,
    table: PinnedTable,
    splits: Sequence[Split],
    others: Mapping[str, Path],
    scratch: Path,
) -> Generator[tuple[RowSource, pa.RecordBatch], None, None]:
    """Like `_rows`, for a query that also reads other tables."""
    for split in splits:
        path = scratch / f"{uuid.uuid4().hex}.arrow"
        source = RowSource([split])
        try:
            _spool(job, table, [split], path)
            for batch in _run_over(split, job, {**others, table.name: path}):
                job.check_wanted()
                yield source, batch
        finally:
            path.unlink(missing_ok=True)


def _run_over(split: Split, job: Job, tables: Mapping[str, Path]) -> Iterator[pa.RecordBatch]:
    """The rows of a query; an error names the split."""
    try:
        yield from loader.run_whole(job.plan.sql, tables, job.query_bytes, job.limits)
    except LoadError as error:
        raise LoadError(f"cannot load {split}: {error}") from None


def _spool(job: Job, table: PinnedTable, splits: Sequence[Split], path: Path) -> None:
    """Writes the columns that a query reads of some splits as one Arrow file, or no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ", ".join(map(identifier, table.read_schema.names))
    rows = _rows(job, table, splits, f"SELECT {names} FROM {identifier(table.name)}", path.parent)
    with closing(rows):
        try:
            first = next(rows, None)
            schema = table.read_schema if first is None else first[1].schema
            batches = (batch for _, batch in rows)
            staging.write_arrow(
                path, schema, batches if first is None else chain([first[1]], batches)
            )
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise LoadError(f"cannot write {path}: {error.strerror}") from None
            raise


def _pieces(batch: pa.RecordBatch, layout: Layout, target_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and length of runs of rows, each at most about a sixteenth of a shard."""
    row_bytes = max(1, batch.nbytes // max(1, batch.num_rows), layout.fixed_row_bytes)
    step = max(1, target_bytes // 16 // row_bytes)
    for start in range(0, batch.num_rows, step):
        yield start, min(step, batch.num_rows - start)


class _TypeCheck:
    """Refuses batches whose types are not those of the plan: a cast could change their values."""

    def __init__(self, logical: pa.Schema) -> None:
        self._logical = logical
        self._checked: pa.Schema | None = None

    def __call__(self, batch: pa.RecordBatch, what: object) -> None:
        """Raises a LoadError that names the columns."""
        if self._checked is not None and batch.schema.equals(self._checked):
            return
        if problem := other_types(batch.schema, self._logical):
            raise LoadError(f"cannot store {what}: {problem}")
        self._checked = batch.schema


def _append(builder: ShardBuilder, batch: pa.RecordBatch, what: object) -> None:
    try:
        builder.append(batch)
    except pa.ArrowInvalid as error:
        raise LoadError(f"cannot store {what}: {error}") from None


def _finish(job: Job, builder: ShardBuilder, where: str, what: object) -> pa.RecordBatch:
    tables = {table.name: table.read_schema for table in job.plan.tables}
    try:
        return builder.finish(lambda: queries.computed_columns(job.plan.sql, tables), where)
    except LoadError as error:
        if builder.refused:
            raise
        raise LoadError(f"{error}; the rows are those of {what}") from None
