"""Reads rows of several versions as if they were one: those of a version follow the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from cache_client.flight.routing import ShardMap
from cache_client.reading.counts import ReadCounts
from cache_client.reading.local_shards import LocalShards, ShardFileLostError
from cache_client.reading.per_process import PerProcess
from cache_client.reading.reader import Reader
from cache_client.reading.rows import Answer, Rows, in_order
from cache_client.reading.source import Source
from cache_protocol.storage.row_index import Ids


class JoinedSource:
    """Several versions with the same columns, and how this process reads their rows.

    Args:
        sources: at least one.

    Thread-safety: use it from one thread; readers may be used from any.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        null_names = {name for each in sources for name in each.shards.layout.nulls.units}
        self._sources = [source.with_nulls(null_names) for source in sources]
        self.shards = _joined([source.shards for source in self._sources])
        self.versions = tuple(source.shards for source in self._sources)
        self._process_shards: PerProcess[LocalShards] = PerProcess()

    def open_reader(
        self, *, replica_offset: int, rows_per_message: int, counts: ReadCounts
    ) -> JoinedReader:
        """A reader for one pass; see `Reader` for the arguments."""
        readers = [
            source.open_reader(
                replica_offset=replica_offset, rows_per_message=rows_per_message, counts=counts
            )
            for source in self._sources
        ]
        return JoinedReader(
            self.shards,
            readers,
            list(accumulate((source.shards.num_rows for source in self._sources), initial=0)),
            local=self._local_shards(),
            counts=counts,
        )

    def _local_shards(self) -> LocalShards | None:
        """The files of all versions as one table, shared by the passes of a process."""
        if not all(source.local for source in self._sources):
            return None
        columns = self._sources[0].columns
        return self._process_shards.get(lambda: LocalShards(self.shards, columns))


class JoinedReader:
    """Fetches rows of several versions with one layout. Thread-safe.

    Where the files of all versions are on this machine, and have the same stored columns, one call
    gathers the rows of all. Else each version is read, and the answers are brought in order.

    Args:
        shards: of all versions, joined.
        readers: one a version.
        bounds: the first row of each version, and the end of the last one.
        local: the files of all versions; None: read by the readers only.
        counts: of rows from files.
    """

    def __init__(
        self,
        shards: ShardMap,
        readers: Sequence[Reader],
        bounds: Sequence[int],
        *,
        local: LocalShards | None,
        counts: ReadCounts,
    ) -> None:
        self._shards = shards
        self._readers = readers
        self._bounds = list(pairwise(bounds))
        self._local = local
        self._counts = counts

    def __enter__(self) -> JoinedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_nodes(self) -> int:
        """The most nodes that one window is requested from."""
        return max(reader.num_nodes for reader in self._readers)

    def fetch(self, row_ids: Ids) -> list[Rows]:
        """The rows of these ids, in this order; raises what `Reader.fetch` raises."""
        return self._ask(row_ids, in_order_of_calls=False)()

    def request(self, row_ids: Ids) -> Callable[[], list[Rows]]:
        """Asks for rows, as `Reader.request`."""
        return self._ask(row_ids, in_order_of_calls=True)

    def _ask(self, row_ids: Ids, *, in_order_of_calls: bool) -> Callable[[], list[Rows]]:
        layout = self._shards.layout
        if self._local is not None and len(self._local.shards) == len(self._shards.starts):
            self.keep_lease()
            try:
                batches = self._local.gather(row_ids)
            except ShardFileLostError:
                pass  # the readers find out which one, and read its rows from a node
            else:
                self._counts.add_local(len(row_ids), sum(batch.nbytes for batch in batches))
                return lambda: [Rows.of_batch(layout, batch) for batch in batches]
        asked: list[Callable[[], list[Answer]]] = []
        for reader, (first, stop) in zip(self._readers, self._bounds, strict=True):
            places = np.flatnonzero((row_ids >= first) & (row_ids < stop))
            if len(places):
                own = row_ids[places] - first
                positions = None if len(own) == len(row_ids) else places
                asked.append(reader.ask(own, positions, in_order_of_calls=in_order_of_calls))

        def wait() -> list[Rows]:
            answers = [answer for wait_for in asked for answer in wait_for()]
            return in_order(layout, len(row_ids), answers)

        return wait

    def keep_lease(self) -> None:
        """Renews the leases in the background when they are due."""
        for reader in self._readers:
            reader.keep_lease()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return any(reader.is_closed for reader in self._readers)

    def close(self) -> None:
        """Closes every connection; running fetches fail."""
        for reader in self._readers:
            reader.close()


def _joined(maps: Sequence[ShardMap]) -> ShardMap:
    """One map of the shards of several versions, for their files, sizes and columns."""
    firsts = accumulate((each.num_rows for each in maps), initial=0)
    return replace(
        maps[0],
        num_rows=sum(each.num_rows for each in maps),
        num_bytes=sum(each.num_bytes for each in maps),
        starts=np.concatenate([each.starts + first for each, first in zip(maps, firsts)]),  # noqa: B905
        files=tuple(files for each in maps for files in each.files),
    )
