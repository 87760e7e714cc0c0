"""Reads rows of several versions as if they were one: those of a version follow the one before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cache_client.reader import Reader
from cache_client.rows import Answer, Rows, in_order
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.row_index import Ids


class JoinedReader:
    """Fetches rows of several versions with one layout. Thread-safe.

    Args:
        layout: of the rows.
        readers: one a version.
        first_rows: the id of the first row of each version, ascending from 0.
    """

    def __init__(
        self, layout: Layout, readers: Sequence[Reader], first_rows: Sequence[int]
    ) -> None:
        self._layout = layout
        self._readers = readers
        self._first_rows = np.array(first_rows, np.int64)

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
        of_reader = np.searchsorted(self._first_rows[1:], row_ids, side="right")
        answers: list[Answer] = []
        for number, reader in enumerate(self._readers):
            places = np.flatnonzero(of_reader == number)
            if len(places):
                own = row_ids[places] - self._first_rows[number]
                answers += reader.answers(own, None if len(own) == len(row_ids) else places)
        return in_order(self._layout, len(row_ids), answers)

    def keep_lease(self) -> None:
        """Renews the leases in the background when they are due."""
        for reader in self._readers:
            reader.keep_lease()

    def close(self) -> None:
        """Closes every connection; running fetches fail."""
        for reader in self._readers:
            reader.close()
