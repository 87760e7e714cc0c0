"""The view of a mixture: its slots -> rows of its sources. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from cache_client.order.permutation import Int64Array
from cache_client.views.mixing import Mixing
from cache_client.views.view import Epochs, IntArray, Samples, Shuffle, SlotView, with_seed
from cache_protocol.storage.layout import pool_matrix

_CHUNK_SLOTS: Final = 15_000  # their arrays stay in the processor's cache
_Integer = TypeVar("_Integer", bound=np.signedinteger)


@dataclass(frozen=True)
class MixedSource:
    """One source of a mixture.

    Attributes:
        name: in the mixture.
        fingerprint: of its version and its view.
        num_rows: of its version.
        view: its slots -> rows.
        shuffle: of its passes.
    """

    name: str
    fingerprint: str
    num_rows: int
    view: SlotView
    shuffle: Shuffle

    def samples(self, slots: Int64Array, number: int) -> Samples:
        """The rows of slots of one pass."""
        return self.view.samples(self.shuffle.order(self.view, number).row_ids(slots), number)

    def keyed(self, place: int) -> MixedSource:
        """The source with a seed of its place and name, so that no two sources have one order."""
        text = f"mixture place={place} name={self.name!r} seed={self.shuffle.seed}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
        shuffle = replace(self.shuffle, seed=seed)
        return replace(self, view=with_seed(self.view, seed), shuffle=shuffle)

    @property
    def identity(self) -> str:
        """What decides which row a slot of a pass has."""
        how = self.shuffle
        order = f"shuffle={how.shuffle} block={how.shuffle_block_size} seed={how.seed}"
        return f"{self.name!r} {self.fingerprint} {order}"


@dataclass(frozen=True)
class MixtureView:
    """The slots of a mixture -> rows of its sources.

    Each source has other permutations and draws: their seed is made of its place and its name.
    The row ids of the sources are joined: those of a source begin where the version of the source
    before it ends.

    Args:
        sources: at least one; passes over each have the same number of slots.
        mixing: slots -> sources.

    Attributes:
        keyed_sources: the sources as they are read, see `MixedSource.keyed`.
    """

    sources: tuple[MixedSource, ...]
    mixing: Mixing
    first_rows: tuple[int, ...] = field(init=False)
    keyed_sources: tuple[MixedSource, ...] = field(init=False, repr=False, compare=False)
    orders_rows: bool = field(default=True, init=False)
    epochs: Epochs = field(default="any size", init=False)

    def __post_init__(self) -> None:
        ends = np.cumsum([0, *(source.num_rows for source in self.sources)])
        object.__setattr__(self, "first_rows", tuple(ends[:-1].tolist()))
        keyed = tuple(source.keyed(place) for place, source in enumerate(self.sources))
        object.__setattr__(self, "keyed_sources", keyed)

    @property
    def identity(self) -> str:
        """The sources, and how they are drawn; not their weights, which may change."""
        mixing = self.mixing
        stop = "slots" if isinstance(mixing.stop, int) else mixing.stop
        seed = f" seed={mixing.seed}" if mixing.draw == "random" else ""
        sources = "; ".join(source.identity for source in self.sources)
        return f"mixture, keyed sources, {mixing.draw}{seed} {stop}: {sources}"

    @property
    def fingerprint(self) -> str:
        """Of the sources, and how they are drawn."""
        return hashlib.sha256(self.identity.encode()).hexdigest()[:32]

    @property
    def num_bytes(self) -> int:
        """Memory of its tables and of those of the sources."""
        return self.mixing.num_bytes + sum(source.view.num_bytes for source in self.keyed_sources)

    @property
    def rows_per_slot(self) -> float:
        """Mean number of rows in a slot, by the last weights."""
        weights = self.mixing.changes[-1].weights
        rows = [source.view.rows_per_slot for source in self.sources]
        return float(np.average(rows, weights=weights))

    def num_slots(self, epoch: int) -> int:
        """Slots of an epoch."""
        return self.mixing.num_slots(epoch)

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of slots, with the source of each."""
        sources = _pool(len(slots), np.int16)
        parts: list[tuple[Int64Array, Samples]] = []
        run = None
        if len(slots) and (np.diff(slots) == 1).all():
            run = self.mixing.locate_run(int(slots[0]), len(slots), epoch)
        if run is not None:
            for number, (places, row) in enumerate(run):
                if len(places):
                    sources[places] = number
                    in_run = np.arange(row, row + len(places), dtype=np.int64)
                    parts += self._passes(number, places, in_run, self.mixing.rows[number])
            return _in_slots(sources, parts)
        rows = _pool(len(slots), np.int64)
        chunks = range(0, len(slots), _CHUNK_SLOTS)
        for at in chunks:
            chunk = slice(at, at + _CHUNK_SLOTS)
            sources[chunk], rows[chunk] = self.mixing.locate(slots[chunk], epoch)
        for number, size in enumerate(self.mixing.rows):
            places, in_run = _pool(len(slots), np.int64), _pool(len(slots), np.int64)
            count = 0
            for at in chunks:
                found = np.flatnonzero(sources[at : at + _CHUNK_SLOTS] == number)
                own = slice(count, count := count + len(found))
                np.add(found, at, out=places[own])
                np.take(rows[at : at + _CHUNK_SLOTS], found, out=in_run[own], mode="clip")
            if count:
                parts += self._passes(number, places[:count], in_run[:count], size)
        return _in_slots(sources, parts)

    def _passes(
        self, number: int, places: Int64Array, in_run: Int64Array, size: int
    ) -> list[tuple[Int64Array, Samples]]:
        """Places and samples of one source, apart for each pass over it."""
        first, last = int(in_run.min()) // size, int(in_run.max()) // size
        in_run -= first * size
        if first == last:
            return [(places, self._samples(number, in_run, first))]
        passes = in_run // size
        in_run -= passes * size
        return [
            (places[own], self._samples(number, in_run[own], first + each))
            for each in np.unique(passes).tolist()
            for own in [np.flatnonzero(passes == each)]
        ]

    def _samples(self, number: int, slots: Int64Array, of_pass: int) -> Samples:
        """Samples of one pass over a source, with joined row ids."""
        found = self.keyed_sources[number].samples(slots, of_pass)
        row_ids = _pool(len(found.row_ids), np.int64)
        np.add(found.row_ids, self.first_rows[number], out=row_ids)
        return replace(found, row_ids=row_ids)


def _pool(size: int, dtype: type[_Integer]) -> npt.NDArray[_Integer]:
    """An uninitialised array in Arrow's pool: fresh pages would cost as much as their use."""
    array: npt.NDArray[_Integer] = pool_matrix(1, size, np.dtype(dtype))[0]
    return array


def _in_slots(sources: IntArray, parts: Sequence[tuple[Int64Array, Samples]]) -> Samples:
    """Samples of several sources, in the order of the slots; all have lengths, or none has.

    Args:
        sources: of each slot.
        parts: places among the slots, and their samples.
    """
    if not parts or parts[0][1].lengths is None:
        row_ids = _pool(len(sources), np.int64)
        for places, part in parts:
            row_ids[places] = part.row_ids
        return Samples(row_ids, sources=sources)
    lengths = np.empty(len(sources), np.int64)
    skipped = np.zeros(len(sources), np.int64)
    for places, part in parts:
        assert part.lengths is not None
        lengths[places] = part.lengths
        if part.skipped is not None:
            skipped[places] = part.skipped
    starts = lengths.cumsum() - lengths
    row_ids = np.empty(int(lengths.sum()), np.int64)
    for places, part in parts:
        own = lengths[places]
        within = np.arange(len(part.row_ids)) - (own.cumsum() - own).repeat(own)
        row_ids[starts[places].repeat(own) + within] = part.row_ids
    has_skipped = any(part.skipped is not None for _, part in parts)
    return Samples(row_ids, lengths, skipped if has_skipped else None, sources=sources)
