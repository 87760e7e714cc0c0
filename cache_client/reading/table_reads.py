"""Reads a dataset as a stream of Arrow batches, for engines and notebooks. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from cache_client.flight.routing import ShardMap
from cache_client.reading.fetch_ahead import FETCH_THREADS, fetch_ahead
from cache_client.reading.local_shards import LocalShards
from cache_client.reading.reader import Reader
from cache_client.reading.shard_maps import wait_for_shard_map
from cache_client.reading.window_sizes import row_bytes
from cache_protocol.errors import ConfigError
from cache_protocol.storage.row_index import Ids
from cache_protocol.storage.row_sets import among
from cache_protocol.wire.credentials import Credentials

WINDOW_BYTES = 32 * 1024 * 1024  # about the bytes of one batch


def read_table(
    endpoint: str,
    dataset: str,
    *,
    columns: Sequence[str],
    rows: range | None,
    fingerprint: str,
    deadline_s: float,
    local: bool,
    credentials: Credentials,
    erased: Callable[[str], Sequence[Ids]] = lambda fingerprint: (),
) -> pa.RecordBatchReader:
    """A stream of rows in row order; see `CacheClient.read`.

    Args:
        columns: empty for all.
        fingerprint: of the version to read; empty for the newest.
        erased: gives the rows of a version that were forgotten, which are left out.
    """
    shards = wait_for_shard_map(
        endpoint, dataset, columns, deadline_s, credentials, fingerprint=fingerprint
    )
    wanted = range(shards.num_rows) if rows is None else rows
    if wanted and not (wanted.step == 1 and wanted.start >= 0 and wanted.stop <= shards.num_rows):
        raise ConfigError(
            f"rows must be a range of consecutive rows within {shards.num_rows}, got {rows}"
        )
    left_out = np.sort(np.concatenate([*erased(shards.fingerprint), np.empty(0, np.int64)]))
    reader = Reader(
        endpoint,
        shards,
        columns=tuple(columns),
        deadline_s=deadline_s,
        local=LocalShards(shards, tuple(columns)) if local else None,
        credentials=credentials,
    )
    return pa.RecordBatchReader.from_batches(
        shards.logical, _batches(reader, shards, wanted, left_out)
    )


def _batches(
    reader: Reader, shards: ShardMap, rows: range, left_out: Ids
) -> Iterator[pa.RecordBatch]:
    size = max(1, WINDOW_BYTES // row_bytes(shards))
    windows = (
        window[~among(window, left_out)] if len(left_out) else window
        for start in range(rows.start, rows.stop, size)
        for window in [np.arange(start, min(start + size, rows.stop), dtype=np.int64)]
    )
    fetch = partial(fetch_ahead, depth=FETCH_THREADS, threads=FETCH_THREADS)
    with reader:
        for pieces in fetch(reader.fetch, windows):
            for piece in pieces:
                yield piece.to_batch()
