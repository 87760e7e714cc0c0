"""How many rows are asked for at once, by the bytes of a row. Pure, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from cache_client.routing import ShardMap
from cache_protocol.storage.layout import Layout

MESSAGE_BYTES = 2 * 1024 * 1024  # the best size of Flight over loopback
_FEWEST_MESSAGES, _MOST_MESSAGES = 4, 8  # of a window: one a node, and enough to be worth asking
_WINDOW_BYTES = 16 * 1024 * 1024  # few calls a row, and still in the processor's caches
_MOST_MESSAGE_BYTES = 2**30  # Flight sends none of 2 GiB, with what stands around the rows
_FEWEST_WINDOWS = 3  # one being consumed, one arriving, one asked for
_PREFETCHED_BATCHES, _PREFETCHED_BYTES = 32, 256 * 1024 * 1024


def row_bytes(shards: ShardMap) -> int:
    """Bytes of a row on the wire, at least 1.

    Where strings, binaries or lists are read: their mean in the stored files, with that of those
    which are left out, since nothing says what each of them takes.
    """
    fixed = max(1, shards.layout.fixed_row_bytes)
    if not shards.num_rows or not has_plain(shards.layout):
        return fixed
    return max(fixed, -(-shards.num_bytes // shards.num_rows))


def has_plain(layout: Layout) -> bool:
    """Whether the bytes of a row depend on its values: strings, binaries or lists are read."""
    return any(column.kind == "plain" for column in layout.columns)


@dataclass(frozen=True)
class WindowSizes:
    """Of the windows and messages of one rank's batches.

    Args:
        shards: what is read.
        batch_size: rows of a full step.
        message_bytes: of one message of a node, about.
        prefetch_batches: fetched ahead, about; None: 32, fewer where they would take 256 MiB.
    """

    shards: ShardMap
    batch_size: int
    message_bytes: int = MESSAGE_BYTES
    prefetch_batches: int | None = None

    def steps_per_window(self, num_nodes: int) -> int:
        """Steps that are asked for at once from so many nodes; 0: from files of this machine.

        Of nodes several messages of whole steps, fewer where each is large.
        """
        if not num_nodes:
            return self._steps_in(_WINDOW_BYTES)
        messages = min(max(num_nodes, _FEWEST_MESSAGES), _MOST_MESSAGES)
        most_bytes = max(_WINDOW_BYTES, messages * self.message_bytes)
        return min(messages * self._steps_in(self.message_bytes), self._steps_in(most_bytes))

    def windows_ahead(self, steps_per_window: int) -> int:
        """Windows of so many steps that are under way or wait."""
        batches = self.prefetch_batches
        if batches is None:
            batches = min(_PREFETCHED_BATCHES, self._steps_in(_PREFETCHED_BYTES))
        return max(_FEWEST_WINDOWS, -(-batches // steps_per_window))

    def rows_per_message(self) -> int:
        """Those of whole steps, whose batches are views of a message then.

        Fewer where a step has longer strings or lists than a message should, or more bytes than
        one can have: a batch is put together of several then.
        """
        rows = self._steps_in(self.message_bytes) * self.batch_size
        most_bytes = _MOST_MESSAGE_BYTES
        if has_plain(self.shards.layout):
            most_bytes = min(most_bytes, self.message_bytes)
        return min(rows, max(1, most_bytes // row_bytes(self.shards)))

    def _steps_in(self, num_bytes: int) -> int:
        return max(1, num_bytes // (self.batch_size * row_bytes(self.shards)))
