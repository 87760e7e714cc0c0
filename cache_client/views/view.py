"""A view: which rows of a version each slot of an epoch has. Pure.

An epoch of a job has slots ``[0, num_slots)``. The order of the epoch permutes slots, divides them
over ranks and counts them in states. A view says which rows a slot has: for the plain read, slot i
has row i. So ranks, workers, resume and audit are the same for every view.

A view computes a slot by random access, from tables whose memory it states. It knows neither nodes
nor tensors, and does no I/O.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cache_client.order.load_log import GroupLog
from cache_client.order.order import EpochOrder
from cache_client.order.permutation import Int64Array
from cache_protocol.errors import ConfigError
from cache_protocol.storage.row_sets import among

IntArray = npt.NDArray[np.signedinteger]

Epochs = Literal["same rows", "same size", "any size"]
"""What all epochs have in common: the rows, in any order; only the number of slots; or nothing."""


@dataclass(frozen=True)
class Samples:
    """The rows of some slots.

    Attributes:
        row_ids: of all slots, joined; int64, shape ``(k,)``.
        lengths: rows of each slot; int64, shape ``(slots,)``. None: each slot has one row.
        skipped: for packed lists: values of the first row of each slot that do not belong to it;
            int64, shape ``(slots,)``.
        shares: whether the first row of a slot is the last one of the slot before, which
            ``row_ids`` then has once; bool, shape ``(slots,)``. None: nowhere.
        sources: in a mixture, the number of the source of each slot; shape ``(slots,)``.
    """

    row_ids: Int64Array
    lengths: Int64Array | None = None
    skipped: Int64Array | None = None
    shares: npt.NDArray[np.bool_] | None = None
    sources: IntArray | None = None

    @property
    def firsts(self) -> Int64Array:
        """Where the rows of each slot begin, among the rows of all; int64, shape ``(slots,)``."""
        assert self.lengths is not None
        own = self.lengths if self.shares is None else self.lengths - self.shares
        firsts: Int64Array = own.cumsum() - self.lengths
        return firsts

    def shared(self, slots_of_steps: list[int]) -> Samples:
        """The same samples; a row that ends a slot and begins the next of a step is given once."""
        if self.lengths is None or self.skipped is None or not len(self.lengths):
            return self
        firsts = self.firsts
        shares = self.row_ids[firsts] == self.row_ids[firsts - 1]
        shares[np.cumsum([0, *slots_of_steps[:-1]])] = False
        kept = np.ones(len(self.row_ids), np.bool_)
        kept[firsts[shares]] = False
        return Samples(self.row_ids[kept], self.lengths, self.skipped, shares, self.sources)

    def without(self, rows: Int64Array, slots_of_steps: list[int]) -> tuple[Samples, list[int]]:
        """The samples without some rows, which ascend, and the slots that are left of each step.

        A slot that has no other rows is left out.
        """
        kept = ~among(self.row_ids, rows)
        if kept.all():
            return self, slots_of_steps
        lengths = np.ones(sum(slots_of_steps), np.int64) if self.lengths is None else self.lengths
        ends, before = lengths.cumsum(), np.concatenate([[0], kept.cumsum()])
        counts = before[ends] - before[ends - lengths]
        left = (counts > 0) | (lengths == 0)
        steps = np.arange(len(slots_of_steps)).repeat(slots_of_steps)
        sizes: list[int] = np.bincount(steps[left], minlength=len(slots_of_steps)).tolist()
        skipped = self.skipped
        if skipped is not None:  # of a first row that is left out, nothing is to be skipped
            first = np.minimum(ends - lengths, len(kept) - 1)
            skipped = np.where(kept[first], skipped, 0)[left]
        found = Samples(
            self.row_ids[kept],
            None if self.lengths is None else counts[left],
            skipped,
            sources=None if self.sources is None else self.sources[left],
        )
        return found, sizes

    def rows_of_steps(self, slots_of_steps: list[int]) -> list[int]:
        """Rows of each step, for steps of so many slots."""
        if self.lengths is None:
            return slots_of_steps
        firsts = np.append(self.firsts, len(self.row_ids))
        rows: list[int] = np.diff(firsts[np.cumsum([0, *slots_of_steps])]).tolist()
        return rows

    def slots(self, start: int, stop: int) -> Samples:
        """What is known of slots ``[start, stop)``, without their row ids."""
        if self.lengths is None and self.sources is None:
            return _ONE_ROW_EACH
        lengths = None if self.lengths is None else self.lengths[start:stop]
        skipped = None if self.skipped is None else self.skipped[start:stop]
        shares = None if self.shares is None else self.shares[start:stop]
        sources = None if self.sources is None else self.sources[start:stop]
        return Samples(self.row_ids[:0], lengths, skipped, shares, sources)


_ONE_ROW_EACH: Final = Samples(np.empty(0, np.int64))


class Numbers(Protocol):
    """Integers that the processes of a job share, such as a `SharedArray`.

    Attributes:
        values: shape ``(n,)``.
    """

    values: npt.NDArray[np.integer[Any]]

    def __len__(self) -> int: ...


class SlotView(Protocol):
    """Slots -> rows of one version.

    Thread-safety: immutable; instances are pickled into DataLoader workers.
    """

    @property
    def identity(self) -> str:
        """What the view does, as a short text; "" for the plain read.

        Part of the fingerprint of states: two views with one identity have the same slots.
        """

    @property
    def num_bytes(self) -> int:
        """Memory of its tables."""

    @property
    def orders_rows(self) -> bool:
        """Whether it shuffles itself, so that the order leaves the slots as they are."""

    @property
    def epochs(self) -> Epochs:
        """What all epochs have in common."""

    @property
    def rows_per_slot(self) -> float:
        """Mean number of rows in a slot; it sizes windows."""

    def num_slots(self, epoch: int) -> int:
        """Slots of an epoch."""

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of slots in ``[0, num_slots(epoch))``, in any order."""


@dataclass(frozen=True)
class PlainView:
    """Slot i has row i.

    Args:
        num_rows: of the version.
    """

    num_rows: int
    identity: str = ""
    num_bytes: int = 0
    orders_rows: bool = False
    epochs: Epochs = "same rows"
    rows_per_slot: float = 1.0

    def num_slots(self, epoch: int) -> int:
        """Rows of the version."""
        return self.num_rows

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The slots themselves."""
        return Samples(slots)


@dataclass(frozen=True)
class Shuffle:
    """How the slots of a view are shuffled; see `EpochOrder`."""

    shuffle: bool
    shuffle_block_size: int | None = None
    seed: int = 0

    def order(
        self, view: SlotView, epoch: int, skipped: tuple[tuple[int, int], ...] = ()
    ) -> EpochOrder:
        """The order of a view's slots in an epoch, left as it is if the view orders them.

        Args:
            skipped: as in `EpochOrder`.
        """
        shuffle = Shuffle(False, seed=self.seed) if view.orders_rows else self
        return epoch_order(shuffle, view.num_slots(epoch), epoch, skipped)


def with_seed(view: Any, seed: int) -> Any:
    """The same view, which shuffles and draws by another seed; tables are shared.

    Args:
        view: a dataclass, as all views are: its fields ``seed`` and ``shuffle``, and those of
            ``inner``, say how.
    """
    changed: dict[str, Any] = {}
    for each in fields(view):
        value = getattr(view, each.name)
        if each.name == "seed":
            changed["seed"] = seed
        elif isinstance(value, Shuffle):
            changed[each.name] = replace(value, seed=seed)
        elif each.name == "inner":
            changed["inner"] = with_seed(value, seed)
    return replace(view, **changed) if changed else view


NO_SHUFFLE: Final = Shuffle(False)


@lru_cache(maxsize=256)  # an order makes a key from its arguments, which takes longer than few rows
def epoch_order(
    shuffle: Shuffle,
    num_slots: int,
    epoch: int,
    skipped: tuple[tuple[int, int], ...] = (),
    groups: tuple[int, ...] = (),
) -> EpochOrder:
    """The order of so many slots; ``skipped`` and ``groups`` as in `EpochOrder`."""
    return EpochOrder(
        num_slots,
        shuffle=shuffle.shuffle,
        shuffle_block_size=shuffle.shuffle_block_size,
        seed=shuffle.seed,
        epoch=epoch,
        skipped=skipped,
        groups=groups,
    )


def view_fingerprint(version: str, identity: str) -> str:
    """The fingerprint of what a job reads: of a version, and of a view by its identity."""
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return f"{version}-{digest}" if identity else version


def joined_ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """The integers of half-open ranges, one range after the other."""
    before = lengths.cumsum() - lengths
    return (starts - before).repeat(lengths) + np.arange(lengths.sum(), dtype=np.int64)


_COLUMN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def quoted(column: str) -> str:
    """SQL of a column, which may have any name."""
    return '"' + column.replace('"', '""') + '"'


def quoted_path(names: Sequence[str]) -> str:
    """SQL of a column, or of a field of structs: of the names from the column to the field."""
    column, *below = names
    return quoted(column) + "".join("['" + name.replace("'", "''") + "']" for name in below)


def as_sql(text: str, columns: Collection[str]) -> str:
    """SQL of an option that takes a column or an expression.

    Args:
        text: the name of a column, or SQL.
        columns: that are known. A name of letters, digits and ``_`` needs not be one of them.
    """
    return quoted(text) if text in columns or _COLUMN.fullmatch(text) else text


def of_slots(found: pa.ChunkedArray, inner: SlotView) -> pa.Array:
    """The value of each slot.

    Args:
        found: the values of all rows of the version, in order.
        inner: a view with one row in each slot, the same in all epochs.
    """
    rows = inner.samples(np.arange(inner.num_slots(0), dtype=np.int64), 0).row_ids
    if len(rows) != len(found) or not np.array_equal(rows, np.arange(len(rows))):
        found = found.take(pa.array(rows))
    return found.combine_chunks()


def as_keys(found: Any) -> Any:
    """Values as SQL groups them: -0.0 as 0.0, and every NaN as one. A null stays null.

    Arrow tells floats apart by their bits. Floats of 16 bits become those of 32.

    Args:
        found: an Arrow array, chunked or not, of any type.
    """
    kind = found.type
    if pa.types.is_dictionary(kind) and pa.types.is_floating(kind.value_type):
        kind = kind.value_type
    if not pa.types.is_floating(kind):
        return found
    kind = pa.float32() if pa.types.is_float16(kind) else kind
    floats = pc.add(found.cast(kind), pa.scalar(0, kind))
    return pc.if_else(pc.is_nan(floats), pa.scalar(float("nan"), kind), floats)


def without_nan(found: Any) -> Any:
    """The same keys, with a null for NaN: a missing float may be either."""
    return pc.if_else(pc.is_nan(found), None, found) if pa.types.is_floating(found.type) else found


def codes_of(option: str, found: pa.ChunkedArray) -> pa.ChunkedArray:
    """A code for each key of `as_keys`, from 0 by first appearance; int32. A null stays null.

    Values are encoded one chunk after the other: together, texts may be longer than an Arrow array.

    Args:
        option: that has these values, for the error.
        found: of any type but lists and structs.

    Raises:
        ConfigError: Arrow does not encode values of this type; quotes it.
    """
    found = as_keys(found)
    if pa.types.is_null(found.type):  # Arrow does not unify dictionaries of this type
        return found.cast(pa.int32())
    try:
        encoded = found.dictionary_encode().unify_dictionaries()
    except pa.ArrowNotImplementedError:
        raise ConfigError(f"{option} must give single values, got {found.type}") from None
    return pa.chunked_array([chunk.indices for chunk in encoded.chunks], pa.int32())


@dataclass(frozen=True)
class LoggedView:
    """Slot i has the i-th row of the log.

    Args:
        log: as far as it is known.
        has_row_ids: all groups are known, and rows have their row ids; else numbers by shard.
    """

    log: GroupLog
    has_row_ids: bool = False
    num_bytes: int = 0
    orders_rows: bool = False
    epochs: Epochs = "same rows"
    rows_per_slot: float = 1.0

    @property
    def identity(self) -> str:
        """Names the log."""
        return f"log {self.log.log_id}"

    def num_slots(self, epoch: int) -> int:
        """Rows of the version; `UNKNOWN_ROWS` while that is not known."""
        return self.log.num_slots

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of slots of known groups."""
        log = self.log
        return Samples(log.row_ids(slots) if self.has_row_ids else log.numbers_by_shard(slots))
