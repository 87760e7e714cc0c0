"""Erases rows as the cache does, for tests of the client: before what nodes answer reaches it.

Rows are erased in all versions of a dataset. Versions must grow by appends, so that a row keeps its
id. Nodes do not know of it: their answers are changed here, in this process and its forks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from cache_client.control import erasures
from cache_client.flight import connections
from cache_client.flight.routing import ShardMap
from cache_client.order.erased import Erased
from cache_client.reading.reader import Reader
from cache_client.training import left_out
from cache_client.view_options import columns, open_view, selection
from cache_protocol.errors import ErasedRowsError


class Erasing:
    """Datasets whose rows may be erased.

    Args:
        monkeypatch: of the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._acts: dict[str, dict[int, npt.NDArray[np.int64]]] = {}
        self._number = 0
        shard_map, ask, chosen = connections._shard_map, Reader.ask, columns.selected_rows
        values = columns.row_values

        def with_count(*arguments: Any) -> ShardMap:
            found = shard_map(*arguments)
            return replace(found, erasures=len(self.acts(found)))

        def ask_for(reader: Reader, row_ids: Any, *arguments: Any, **options: Any) -> Any:
            asked = reader._router.shards
            if np.isin(row_ids, self._rows(asked)).any():
                raise ErasedRowsError(f"rows of {asked.dataset!r} were forgotten")
            return ask(reader, row_ids, *arguments, **options)

        def select(version: columns.VersionNodes, where: Any) -> list[npt.NDArray[np.uint32]]:
            rows = self._rows(version.shards)
            return [
                found[~np.isin(found + start, rows)]
                for found, start in zip(
                    chosen(version, where), version.shards.starts.tolist(), strict=True
                )
            ]

        def row_values(version: columns.VersionNodes, *arguments: Any) -> pa.ChunkedArray:
            found = values(version, *arguments).combine_chunks()
            is_gone = np.isin(np.arange(len(found)), self._rows(version.shards))
            zero = pa.scalar(0).cast(found.type) if pa.types.is_integer(found.type) else None
            return pa.chunked_array([pa.compute.if_else(pa.array(is_gone), zero, found)])

        monkeypatch.setattr(connections, "_shard_map", with_count)
        monkeypatch.setattr(Reader, "ask", ask_for)
        monkeypatch.setattr(selection, "selected_rows", select)
        monkeypatch.setattr(open_view, "row_values", row_values)
        for module in (erasures, left_out):
            monkeypatch.setattr(module, "read_erased", self._read)

    def erase(self, name: str, rows: Sequence[int]) -> int:
        """Erases rows; returns the number of the act."""
        acts = self._acts.setdefault(name, {})
        new = np.setdiff1d(np.array(rows, np.int64), np.concatenate([*acts.values(), []]))
        self._number += 1
        if len(new):
            acts[self._number] = new
        return self._number

    def acts(self, shards: ShardMap) -> dict[int, npt.NDArray[np.int64]]:
        """The acts of a version."""
        num_rows = shards.num_rows
        acts = {n: ids[ids < num_rows] for n, ids in self._acts.get(shards.dataset, {}).items()}
        return {number: ids for number, ids in acts.items() if len(ids)}

    def _rows(self, shards: ShardMap) -> npt.NDArray[np.int64]:
        return np.concatenate([np.empty(0, np.int64), *self.acts(shards).values()])

    def _read(self, access: object, shards: ShardMap) -> Erased:
        acts = self.acts(shards)
        return Erased(acts, [0, *acts][min(shards.erasures, len(acts))])


@pytest.fixture
def erasing(monkeypatch: pytest.MonkeyPatch) -> Erasing:
    """Lets a test erase rows."""
    return Erasing(monkeypatch)
