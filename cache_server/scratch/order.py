"""One announced order: the bucket of each row, the bucket files, and rows from them."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_protocol.errors import CacheError, InvalidRowsError, short
from cache_protocol.storage.row_index import Ids
from cache_protocol.storage.shard_files import Selection
from cache_server.scratch import shard_pages
from cache_server.scratch.bucket_files import Bucket, BucketFiles, grouped, row_type
from cache_server.scratch.sizes import Sizes
from cache_server.secrets import error_text
from cache_server.shards.resident_rows import ResidentRows

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1 << 20  # of an announcement
_FEW = 64  # of so many rows, one may come from its shard rather than load its bucket
_MOST_LOST = 10  # of so many buckets one may be gone, before an order is prepared again
_ALMOST = 0.999
_KEPT_BUCKETS = 8  # that were read: a job that restarts reads again what it had asked for ahead
_MOST_OF_REASON = 200

State = Literal["announced", "preparing", "ready", "read", "failed", "dropped"]
_OVER: tuple[State, ...] = ("read", "failed", "dropped")


class Loads(Protocol):
    """Buckets in memory; see `ReadAhead`."""

    def get(self, order: Order, bucket: int, *, load: bool) -> Bucket | None:
        """A bucket, if it can be had."""

    def begin(self, order: Order, bucket: int) -> None:
        """Begins to read a bucket."""

    def drop(self, order: Order, bucket: int | None = None) -> None:
        """Forgets a bucket, or all."""


class Order:
    """An order of rows that this node holds. Thread-safe.

    Args:
        rows: that are read; those of later shards come from these.
        name: as announced.
        after: the order that is read before; empty: none.
        num_buckets: of all rows of the order.
        first: the first bucket that will be asked for.
        reserved_bytes: of the scratch disk.
        folder: for its files; made here.
        sizes: of buffers and chunks.
        loads: keeps buckets in memory.

    Attributes:
        state: ``announced`` until all rows have a bucket, then ``preparing``, ``ready``, and
            ``read`` when every row was served.
        reason: why it failed.
        ends_at: monotonic seconds.
        num_served: rows that came from buckets.
        was_prepared: all rows were in their buckets.

    Raises:
        OSError: the scratch disk cannot be written.
    """

    def __init__(
        self,
        rows: ResidentRows,
        name: str,
        *,
        after: str,
        num_buckets: int,
        first: int,
        reserved_bytes: int,
        folder: Path,
        sizes: Sizes,
        loads: Loads,
    ) -> None:
        self.key, self.name, self.after = rows.key, name, after
        self.num_buckets, self.first = num_buckets, first
        self.reserved_bytes = reserved_bytes
        self.state: State = "announced"
        self.reason = ""
        self.ends_at = self._lease_s = 0.0
        self.num_served = 0
        self.was_prepared = False
        self._rows: ResidentRows | None = rows
        self._num_rows = rows.num_rows
        self._ranges = rows.ranges
        self._held = sum(stop - start for start, stop in self._ranges)
        self._done = 0  # rows that were received; then those that were scattered
        self._folder, self._sizes, self._loads = folder, sizes, loads
        self._lock = threading.Lock()
        self._gone = np.zeros(num_buckets, np.bool_)
        self._served = np.zeros(num_buckets, np.int64)
        folder.mkdir(parents=True)
        path = folder / "numbers"
        with path.open("wb") as file:
            file.truncate(2 * rows.num_rows)  # holes take no room, and are no bucket
        self._file = path.open("r+b", buffering=0)
        # Written by calls, not by this map: a full disk would end the process.
        self._numbers: npt.NDArray[np.uint16] | None = np.memmap(path, np.uint16, "r")
        self.files = BucketFiles(
            folder, rows.layout, rows.num_rows, num_buckets, sizes.buffer_bytes
        )

    @property
    def is_over(self) -> bool:
        """Whether no row comes from it any more."""
        return self.state in _OVER

    @property
    def prepared(self) -> float:
        """The share that is prepared; 1: rows come from buckets."""
        if self.state == "preparing":
            return min(_ALMOST, self._done / max(1, self._held))
        return float(self.state in ("ready", "read"))

    @property
    def held_bytes(self) -> int:
        """What it takes or will take of the scratch disk."""
        if self.is_over:
            return 0
        return self.files.num_bytes if self.state == "ready" else self.reserved_bytes

    @property
    def read_share(self) -> float:
        """The share of the rows that were served."""
        return self.num_served / max(1, int(self.files.rows.sum()))

    def lasts(self, lease_s: float = 0.0) -> None:
        """Keeps it for so long from now on, or for as long as was said before."""
        self._lease_s = lease_s or self._lease_s
        self.ends_at = time.monotonic() + self._lease_s

    def has(self, bucket: int) -> bool:
        """Whether nearly all that is asked for from a bucket on is here or will be."""
        if self.state in ("failed", "dropped"):
            return False
        lost = max(0, self.first - bucket) + int(self._gone[bucket:].sum())
        return lost * _MOST_LOST <= self.num_buckets - bucket

    # -- what is announced ---------------------------------------------------------------------

    @property
    def wanted(self) -> tuple[int, int] | None:
        """The rows whose buckets are wanted next."""
        if self.state != "announced":
            return None
        left = self._done
        for start, stop in self._ranges:
            if left < stop - start:
                return start + left, min(start + left + _ROWS_AT_ONCE, stop)
            left -= stop - start
        return None

    def receive(self, first: int, data: bytes) -> bool:
        """Takes the buckets of rows from ``first`` on, if they are those that are wanted.

        Returns:
            Whether it was the last of them.

        Raises:
            InvalidRowsError: there is no such bucket. OSError: the scratch disk is full.
        """
        numbers = np.frombuffer(data, "<u2")
        if len(data) % 2 or not len(numbers) or int(numbers.max()) > self.num_buckets:
            raise InvalidRowsError(
                f"an announcement has two bytes a row, at most {self.num_buckets}, got "
                f"{len(data)} bytes from row {first} on"
            )
        with self._lock:
            wanted = self.wanted
            if wanted is None or first != wanted[0] or first + len(numbers) > wanted[1]:
                return False  # another process has sent it
            self._file.seek(2 * first)
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            self._done += len(numbers)
            if self.wanted is not None:
                return False
            self.state, self._done = "preparing", 0
            return True

    # -- scatter -------------------------------------------------------------------------------

    def prepare(self, turn: Callable[[Order], None]) -> None:
        """Writes every row to its bucket; notes why it could not.

        Args:
            turn: called before each chunk; waits while others should use the disk.
        """
        begun = time.monotonic()
        try:
            if not self.is_over:
                self._scatter(turn)
        except error_text.EXITS:
            raise
        except Exception as error:
            if not isinstance(error, OSError | CacheError | pa.ArrowException | ValueError):
                logger.exception("order not prepared order=%s", self.name)
            self.fail(f"{type(error).__name__}: {error}")
            return
        finally:
            if self.is_over:  # a file may have been made while another thread removed all
                shutil.rmtree(self._folder, ignore_errors=True)
        with self._lock:
            if self.state == "preparing":
                self.state, self.was_prepared = "ready", True
            self._rows = None
        logger.info(
            "order prepared dataset=%s order=%s buckets=%d bytes=%d seconds=%.1f",
            self.key.dataset, self.name, self.num_buckets, self.files.num_bytes,
            time.monotonic() - begun,
        )  # fmt: skip

    def _scatter(self, turn: Callable[[Order], None]) -> None:
        rows = self._rows
        assert rows is not None
        selection = Selection(rows.layout, [])
        at_once = max(1, self._sizes.chunk_bytes // max(1, rows.mean_row_bytes(selection)))
        kind = np.uint32 if row_type(self._num_rows) == pa.uint32() else np.int64
        for start, stop in self._ranges:
            at = start
            for batch in rows.stored(start, stop, at_once, selection):
                turn(self)
                numbers = self._numbers
                if numbers is None or self.state != "preparing":
                    return
                count = batch.num_rows
                with shard_pages.streamed(rows.shard_of(at), at - rows.first_of_shard(at), count):
                    own = np.array(numbers[at : at + count])
                    order = np.argsort(own, kind="stable")  # of 16 bits: by radix
                    counts = np.bincount(own, minlength=self.num_buckets + 1)
                    places = order[counts[0] :]
                    if len(places):
                        ids = (places + at).astype(kind)
                        made = grouped(batch, rows.layout, ids, places)
                        del batch
                        self.files.add(made, counts[1:])
                at += count
                self._done += count
        self.files.flush()

    # -- rows ----------------------------------------------------------------------------------

    def gather(
        self,
        row_ids: Ids,
        selection: Selection,
        from_shards: Callable[[Ids], pa.RecordBatch],
    ) -> pa.RecordBatch:
        """The rows with these ids, in this order, as a stored batch.

        Args:
            row_ids: at least one, of rows that this node holds.
            from_shards: gathers rows whose bucket is not here.
        """
        numbers = self._numbers
        if numbers is None:
            return from_shards(row_ids)
        of_rows = np.take(numbers, row_ids)
        places: list[Ids] = []
        batches: list[pa.RecordBatch] = []
        left = np.zeros(len(row_ids), np.bool_)
        for number in np.unique(of_rows).tolist():
            lanes = np.flatnonzero(of_rows == number)
            few = len(lanes) * _FEW < len(row_ids)
            batch = self._of_bucket(number - 1, row_ids[lanes], selection, few=few)
            if batch is None:
                left[lanes] = True
            else:
                places.append(lanes)
                batches.append(batch)
        if not batches:
            return from_shards(row_ids)
        if left.any():
            places.append(np.flatnonzero(left))
            batches.append(from_shards(row_ids[left]))
        if len(batches) == 1:
            return batches[0]
        inverse = np.empty(len(row_ids), np.int64)
        inverse[np.concatenate(places)] = np.arange(len(row_ids))
        joined = pa.Table.from_batches(batches).combine_chunks().to_batches()
        if len(joined) != 1:  # more than Arrow can have in one column
            return from_shards(row_ids)
        return joined[0].take(pa.array(inverse))

    def _of_bucket(
        self, bucket: int, row_ids: Ids, selection: Selection, *, few: bool
    ) -> pa.RecordBatch | None:
        """Rows of a bucket; None if it is not here, or not worth loading for few rows."""
        if bucket < 0 or self._gone[bucket]:
            return None
        loaded = self._loads.get(self, bucket, load=not few)
        batch = None if loaded is None else loaded.gather(row_ids, selection)
        if batch is None:
            return None
        with self._lock:
            self._served[bucket] += len(row_ids)
            self.num_served += len(row_ids)
            is_read = self._served[bucket] >= self.files.rows[bucket]
        following = bucket + 1
        while following < self.num_buckets and self._has_nothing(following):
            following += 1
        if following < self.num_buckets:
            self._loads.begin(self, following)
        if is_read:
            self._note_read(bucket)
        return batch

    def _note_read(self, bucket: int) -> None:
        """Frees what is not needed any more, now that all rows of a bucket were served."""
        self._loads.drop(self, bucket)
        with self._lock:
            is_read = (self._served >= self.files.rows) | self._gone
        if is_read.all():
            self._end("read")
            return
        before = max(0, bucket - _KEPT_BUCKETS)
        for old in np.flatnonzero(is_read[:before] & ~self._gone[:before]).tolist():
            self._let_go(old)

    def _has_nothing(self, bucket: int) -> bool:
        return bool(self._gone[bucket] or not self.files.rows[bucket])

    def lose(self, bucket: int, error: Exception) -> None:
        """Gives up a bucket that cannot be read: its rows come from their shards."""
        logger.warning(
            "bucket lost dataset=%s order=%s reason=%s", self.key.dataset, self.name, error
        )
        self._let_go(bucket)

    def _let_go(self, bucket: int) -> None:
        self._gone[bucket] = True
        self._loads.drop(self, bucket)
        try:
            self.files.remove(bucket)
        except OSError as error:
            logger.warning("bucket not removed reason=%s", error)

    def fail(self, reason: str) -> None:
        """Notes why it cannot be prepared, and removes its files."""
        if self.state != "dropped":
            self.reason = short(reason, _MOST_OF_REASON)
            logger.warning(
                "order not prepared dataset=%s order=%s reason=%s",
                self.key.dataset, self.name, self.reason,
            )  # fmt: skip
            self._end("failed")

    def drop(self) -> None:
        """Ends it, and removes its files."""
        self._end("dropped")

    def _end(self, state: State) -> None:
        with self._lock:
            if self.state != "dropped":
                self.state = state
            self._numbers, self._rows = None, None  # the map holds room on the disk
            self._file.close()
        self._loads.drop(self)
        shutil.rmtree(self._folder, ignore_errors=True)
