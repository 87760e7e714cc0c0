"""What the tasks of an engine do: put the rows of a partition, read a range of rows.

Knows no engine. An engine gives partitions their numbers, and says which attempt at each counts.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from cache_client.control.client import CacheClient
from cache_client.writing.writes import PartitionAck, Write, until_sealed
from cache_protocol.errors import LoadError, NotReadyError

PARTITION_BYTES = 64 * 1024 * 1024  # about the size of a shard


def put_batches(
    write: Write, partition: int, attempt: int, batches: Iterable[pa.RecordBatch]
) -> PartitionAck | None:
    """Puts the rows of a task, as they come; None: there are none.

    Raises:
        As `Write.put`.
    """
    rows = write.fitted(batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is None:
        return None

    def all_rows() -> Iterator[pa.RecordBatch]:
        yield first
        yield from rows

    reader = pa.RecordBatchReader.from_batches(write.schema, all_rows())
    return write.put(partition, attempt, reader)


def put_again(
    write: Write, partition: int, batches: Sequence[pa.RecordBatch]
) -> PartitionAck | None:
    """Puts rows that stay in memory, again if a node stops; every try is another attempt.

    Raises:
        As `Write.put`.
    """
    return until_sealed(lambda _: put_batches(write, partition, new_attempt(), batches))


def new_attempt() -> int:
    """A number that no other attempt has, in any process."""
    return uuid.uuid4().int >> 64


def chosen(acks: Iterable[PartitionAck | None]) -> Mapping[int, PartitionAck]:
    """The attempts to commit, of what the tasks of an engine returned."""
    return {ack.partition: ack for ack in acks if ack is not None}


@dataclass(frozen=True)
class RowParts:
    """One version of a dataset, to be read in parts. Can be pickled.

    Attributes:
        columns: to read.
        schema: of these columns.
        num_bytes: of all columns, stored.
    """

    client: CacheClient
    name: str
    fingerprint: str
    num_rows: int
    num_bytes: int
    columns: tuple[str, ...]
    schema: pa.Schema

    @classmethod
    def of(cls, client: CacheClient, name: str, columns: Sequence[str] | None = None) -> RowParts:
        """The newest version, once it is loaded.

        Raises:
            ConfigError: a column is wrong. NotReadyError: the dataset is still loading.
            DatasetNotFoundError, LoadError: there is no such dataset, or its load failed.
        """
        schema = client.read(name, columns=columns, rows=range(0)).schema  # waits for the load
        info = client.describe(name)
        if info.state == "failed":
            raise LoadError(info.error or f"dataset {name!r} failed")
        if info.state != "ready":
            raise NotReadyError(f"dataset {name!r} is loading a new version: read it again later")
        return cls(
            client, name, info.fingerprint, info.num_rows, info.num_bytes,
            tuple(schema.names), schema,
        )  # fmt: skip

    def select(self, columns: Sequence[str] | None) -> RowParts:
        """Only these columns; None: as before."""
        if not columns:
            return self
        schema = pa.schema([self.schema.field(name) for name in columns])
        return replace(self, columns=tuple(columns), schema=schema)

    def split(self, num_parts: int | None = None) -> list[range]:
        """Ranges of rows, nearly equal; by default of about `PARTITION_BYTES`."""
        if num_parts is None:
            num_parts = -(-self.num_bytes // PARTITION_BYTES)
        num_parts = max(1, min(num_parts, self.num_rows))
        bounds = [self.num_rows * part // num_parts for part in range(num_parts + 1)]
        return [range(start, stop) for start, stop in itertools.pairwise(bounds)]

    def read(self, rows: range) -> pa.RecordBatchReader:
        """A part of the version.

        Raises:
            As `CacheClient.read`.
        """
        return self.client.read(
            self.name, columns=self.columns, rows=rows, fingerprint=self.fingerprint
        )
