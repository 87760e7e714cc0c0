"""How many rows to ask for at once, by the bytes of a row. Pure, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from cache_client.flight.routing import ShardMap
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.pace import Pace

MESSAGE_BYTES = 4 * 1024 * 1024  # measured: the best size for Flight over loopback
_MIN_MESSAGES, _MAX_MESSAGES = 4, 8  # in a window: one a node, and enough to be worth a request
_WINDOW_BYTES = 16 * 1024 * 1024  # few calls a row, and still fits the processor's caches
_MAX_MESSAGE_BYTES = 2**30  # Flight sends less than 2 GiB, headers included
_MIN_WINDOWS = 3  # one is consumed, one arrives, one is requested
_FIRST_ROWS, _WINDOW_S = 4096, 0.5  # of the first windows; of windows from a slow disk
_PREFETCHED_BATCHES, _PREFETCHED_BYTES = 32, 256 * 1024 * 1024


def row_bytes(shards: ShardMap) -> int:
    """Bytes of a row on the wire, at least 1.

    With strings, binaries or lists it is the mean over the stored files. That includes the columns
    that are not read, because the size of each single column is unknown.
    """
    fixed = max(1, shards.layout.fixed_row_bytes)
    if not shards.num_rows or not has_plain(shards.layout):
        return fixed
    return max(fixed, -(-shards.num_bytes // shards.num_rows))


def has_plain(layout: Layout) -> bool:
    """Whether rows differ in size: the layout has strings, binaries or lists."""
    return any(column.kind == "plain" for column in layout.columns)


@dataclass(frozen=True)
class WindowSizes:
    """The sizes of windows and messages for one rank. Immutable.

    Args:
        shards: the version to read.
        batch_size: rows of a full step.
        message_bytes: target size of one message of a node.
        prefetch_batches: about how many to fetch ahead; None: 32, but at most 256 MiB.
        in_streams: each window continues the stream of the one before, and is one message.
    """

    shards: ShardMap
    batch_size: int
    message_bytes: int = MESSAGE_BYTES
    prefetch_batches: int | None = None
    in_streams: bool = False

    def steps_per_window(self, num_nodes: int) -> int:
        """Steps in one window from so many nodes; 0 nodes: from files of this machine.

        A window from nodes has several messages of whole steps, fewer if steps are large.
        """
        if not num_nodes:
            return self._steps_in(_WINDOW_BYTES)
        if self.in_streams:
            return self._steps_in(self.message_bytes)
        messages = min(max(num_nodes, _MIN_MESSAGES), _MAX_MESSAGES)
        most_bytes = max(_WINDOW_BYTES, messages * self.message_bytes)
        return min(messages * self._steps_in(self.message_bytes), self._steps_in(most_bytes))

    def pace(self) -> Pace:
        """Makes windows smaller while they take long, such as from a disk."""
        return Pace(max(1, _FIRST_ROWS // self.batch_size), _WINDOW_S)

    def windows_ahead(self, steps_per_window: int) -> int:
        """How many windows of so many steps to fetch ahead."""
        batches = self.prefetch_batches
        if batches is None:
            batches = min(_PREFETCHED_BATCHES, self._steps_in(_PREFETCHED_BYTES))
        return max(_MIN_WINDOWS, -(-batches // steps_per_window))

    def rows_per_message(self) -> int:
        """Rows in one message: whole steps, so that batches are views of a message.

        If one step is larger than a message may be, it takes several, and its batch is a copy.
        """
        rows = self._steps_in(self.message_bytes) * self.batch_size
        most_bytes = _MAX_MESSAGE_BYTES
        if has_plain(self.shards.layout):
            most_bytes = min(most_bytes, self.message_bytes)
        return min(rows, max(1, most_bytes // row_bytes(self.shards)))

    def _steps_in(self, num_bytes: int) -> int:
        return max(1, num_bytes // (self.batch_size * row_bytes(self.shards)))
