"""Columns that a batch gets by row number: codes of a vocabulary, columns of another dataset.

They are looked up where rows arrive, whether from nodes or from files, before batches are made. So
they need no memory in shards, and strings and keys need not travel. The client keeps four bytes a
row for each, the vocabularies, and the rows of the other datasets once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cache_client.job.arguments import are_names
from cache_client.order.permutation import Int64Array
from cache_client.reading.rows import Rows
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import as_keys
from cache_protocol.errors import ConfigError
from cache_protocol.storage.flat_columns import Bits, nodes
from cache_protocol.storage.layout import Layout, pool_matrix

Int32Array = npt.NDArray[np.int32]

UNKNOWN: Final = 0
"""The code of nulls, and of values that a vocabulary lacks."""
MAX_BUCKETS: Final = 2**31
_MAX_CODES: Final = 2**31 - 1


class Vocabulary:
    """The values of a column, and their codes 1, 2, ...; 0 stands for all others.

    Give it to later jobs, and to the code that serves the model, so that codes stay the same when
    the table grows: ``codes={"city": vocabulary}``. `values` can be saved with the model.

    Args:
        values: in the order of their codes, without repetitions and nulls.

    Raises:
        ConfigError: a value is null or comes twice, or the values have several types; quotes it.

    Thread-safety: immutable.
    """

    def __init__(self, values: Iterable[Any] | pa.Array) -> None:
        try:
            array = _array(values)
        except (pa.ArrowException, TypeError) as error:
            raise ConfigError(f"a vocabulary has values of one type: {error}") from None
        counts = pc.value_counts(array)
        for entry in counts.filter(pc.greater(counts.field("counts"), 1)):
            raise ConfigError(f"a vocabulary has each value once, got {entry['values'].as_py()!r}")
        if array.null_count:
            raise ConfigError("a vocabulary has no null: nulls have code 0")
        self.values: pa.Array = array

    def __len__(self) -> int:
        """Number of codes, with 0: the rows of an embedding table."""
        return len(self.values) + 1

    def __repr__(self) -> str:
        return f"<Vocabulary of {len(self.values)} values>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def digest(self) -> str:
        """A short text that tells vocabularies apart."""
        hashed = hashlib.blake2b(str(self.values.type).encode(), digest_size=8)
        for value in self.values.to_pylist():
            hashed.update(repr(value).encode() + b"\n")
        return hashed.hexdigest()

    def encode(self, values: Iterable[Any] | pa.Array) -> Int32Array:
        """The code of each value; int32, shape ``(k,)``.

        Integers of any width have the same code, and so have texts of any Arrow type.

        Raises:
            ConfigError: the values are of another kind; quotes the types and the first value.
        """
        array = _array(values)
        if not array.null_count == len(array) and not comparable(array.type, self.values.type):
            raise ConfigError(
                f"a vocabulary of {self.values.type} has no codes for {array.type}, got "
                f"{array.drop_null()[0].as_py()!r}"
            )
        return places_in(array, self.values) + np.int32(1)

    def extended(self, values: Iterable[Any] | pa.Array) -> Vocabulary:
        """This vocabulary, with further codes for values that it lacks, in their order.

        Raises:
            ConfigError: as `encode`.
        """
        array = _array(values)
        new = array.filter(pa.array(self.encode(array) == 0)).drop_null().unique()
        return Vocabulary([*self.values.to_pylist(), *new.to_pylist()])

    def decode(self, codes: npt.ArrayLike) -> list[Any]:
        """The value of each code; None for 0.

        Raises:
            ConfigError: there is no such code; quotes it.
        """
        numbers = np.asarray(codes, np.int64)
        bad = numbers[(numbers < 0) | (numbers >= len(self))]
        if len(bad):
            raise ConfigError(f"codes are from 0 to {len(self) - 1}, got {bad[0]}")
        indices = pa.array(numbers - 1)
        decoded: list[Any] = self.values.take(
            pc.if_else(pc.less(indices, 0), None, indices)
        ).to_pylist()
        return decoded


def _array(values: Iterable[Any] | pa.Array) -> Any:
    """Keys as an Arrow array."""
    return as_keys(values if isinstance(values, pa.Array) else pa.array(list(values)))


@dataclass(frozen=True)
class Frequent:
    """A vocabulary by frequency: code 1 is the value that most rows have.

    Values that are equally frequent are sorted.

    Args:
        max_size: the most values that get a code; the others are unknown.
        min_count: the fewest rows of a value that gets a code.
    """

    max_size: int = _MAX_CODES
    min_count: int = 1

    def __post_init__(self) -> None:
        for name in ("max_size", "min_count"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")


@dataclass(frozen=True)
class Join:
    """The dataset that a key looks rows up in.

    Args:
        dataset: its name.
        key: its column with the values of the key; default: the same name.
        columns: that a batch gets; default: all others.

    Raises:
        ConfigError: quotes every bad argument.
    """

    dataset: str
    key: str | None = None
    columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.dataset, str) or not self.dataset:
            problems.append(f"dataset must be a name, got {self.dataset!r}")
        if self.key is not None and (not isinstance(self.key, str) or not self.key):
            problems.append(f"key must be the name of a column, got {self.key!r}")
        if self.columns is not None and not (are_names(self.columns) and len(self.columns)):
            problems.append(f"columns must be a list of names, got {self.columns!r}")
        if problems:
            raise ConfigError("Join: " + "; ".join(problems))


Rule = str | int | Frequent | Vocabulary
"""How a column becomes codes."""


def sorted_vocabulary(found: pa.ChunkedArray) -> Vocabulary:
    """All values of a column, in ascending order."""
    values = pc.drop_null(pc.unique(found))
    return Vocabulary(values.take(pc.sort_indices(values)))


def frequent_vocabulary(found: pa.ChunkedArray, frequent: Frequent) -> Vocabulary:
    """The most frequent values of a column."""
    counts = pc.value_counts(pc.drop_null(found))
    table = pa.table({"value": counts.field("values"), "count": counts.field("counts")})
    table = table.filter(pc.greater_equal(table["count"], frequent.min_count))
    order = pc.sort_indices(table, [("count", "descending"), ("value", "ascending")])
    return Vocabulary(table["value"].take(order[: frequent.max_size]).combine_chunks())


def hash_codes(found: pa.ChunkedArray, num_buckets: int) -> Int32Array:
    """The bucket of each value, from 0: the first 8 bytes of the MD5 of its text, modulo buckets.

    The text is UTF-8, the bytes are a big-endian unsigned integer. A null has bucket 0.
    """
    values = found.unique().drop_null()
    texts = values.cast(pa.string()).to_pylist()
    buckets = np.array([bucket_of(text, num_buckets) for text in texts] + [0], np.int32)
    codes = [buckets[places_in(chunk, values)] for chunk in found.chunks]
    return np.concatenate([np.empty(0, np.int32), *codes])


def bucket_of(text: str, num_buckets: int) -> int:
    """The bucket of one text; see `hash_codes`."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") % num_buckets


class Lookup(Protocol):
    """Columns by row number. Immutable."""

    @property
    def identity(self) -> str:
        """What it looks up, as a short text."""

    @property
    def num_bytes(self) -> int:
        """Memory of its tables."""

    @property
    def fields(self) -> Sequence[pa.Field]:
        """The columns."""

    @property
    def null_units(self) -> Collection[str]:
        """The units of null bits of the columns."""

    def values(self, row_ids: Int64Array) -> dict[str, Any]:
        """For each flat column: ``(k,)`` or ``(k, n)`` numbers, or an Arrow array."""

    def nulls(self, row_ids: Int64Array) -> Mapping[str, Bits]:
        """For each unit of null bits: those of the rows, see `NullBits`."""


@dataclass(frozen=True)
class CodesLookup:
    """The codes of a column.

    Args:
        column: its name; the codes have it, too.
        codes: of each row of the version; int32.
        vocabulary: None for buckets.
        rule: how codes were made, for the identity.
    """

    column: str
    codes: SharedArray = field(repr=False)
    vocabulary: Vocabulary | None
    rule: str

    @property
    def identity(self) -> str:
        """The column and its vocabulary."""
        return f" codes({self.column!r}, {self.rule})"

    @property
    def num_bytes(self) -> int:
        """Four bytes a row, and the vocabulary."""
        values = 0 if self.vocabulary is None else int(self.vocabulary.values.nbytes)
        return self.codes.values.nbytes + values

    @property
    def fields(self) -> Sequence[pa.Field]:
        """One column of int32."""
        return (pa.field(self.column, pa.int32(), nullable=False),)

    def values(self, row_ids: Int64Array) -> dict[str, Any]:
        """The codes of rows."""
        return {self.column: self.codes.values[row_ids]}

    @property
    def null_units(self) -> Collection[str]:
        """None: nulls have code 0."""
        return ()

    def nulls(self, row_ids: Int64Array) -> Mapping[str, Bits]:
        """None."""
        return {}


@dataclass(frozen=True)
class JoinLookup:
    """Columns of another dataset, by the value of a key.

    Args:
        key: column of this dataset.
        dataset: name of the other one.
        fingerprint: of its version.
        index: its row for each row of this version; int32, -1 for none.
        layout: of its columns, without the key.
        matrices, arrays: all its rows, as in `Rows`; spawned workers map the matrices.
    """

    key: str
    dataset: str
    fingerprint: str
    index: SharedArray = field(repr=False)
    layout: Layout
    matrices: Mapping[int, SharedArray] = field(repr=False)
    arrays: Mapping[int, pa.Array] = field(repr=False)

    @property
    def identity(self) -> str:
        """The key, and the version of the other dataset."""
        names = self.layout.logical.names
        return f" join({self.key!r}, {self.dataset!r}, {self.fingerprint}, {names})"

    @property
    def num_bytes(self) -> int:
        """Four bytes a row, and the rows of the other dataset."""
        stored = (*(each.values for each in self.matrices.values()), *self.arrays.values())
        return self.index.values.nbytes + sum(int(column.nbytes) for column in stored)

    @property
    def fields(self) -> Sequence[pa.Field]:
        """Those of the other dataset."""
        return tuple(self.layout.logical)

    def values(self, row_ids: Int64Array) -> dict[str, Any]:
        """The columns for rows."""
        at = self.index.values[row_ids]
        found: dict[str, Any] = {}
        for index, column in enumerate(self.layout.columns):
            if column.kind == "nulls":
                continue
            if column.kind == "plain":
                found[column.names[0]] = self.arrays[index].take(pa.array(at))
                continue
            taken = self.matrices[index].values[at]
            if column.kind == "matrix":
                found[column.names[0]] = taken
            else:
                found.update(zip(column.names, taken.T, strict=True))
        return found

    @property
    def null_units(self) -> Collection[str]:
        """Those of the other dataset."""
        return self.layout.nulls.units

    def nulls(self, row_ids: Int64Array) -> Mapping[str, Bits]:
        """The null bits of the columns for rows."""
        index = self.layout.null_index
        if index is None:
            return {}
        return self.layout.nulls.unpack_all(self.matrices[index].values[self.index.values[row_ids]])


def join_index(key: str, keys: pa.ChunkedArray, dataset: str, others: pa.Array) -> Int32Array:
    """For each key, the row of the other dataset that has it; -1 for none, and for a null.

    Raises:
        ConfigError: the other dataset has a key twice, or keys of another kind; quotes it.
    """
    if len(others) and len(keys) and not comparable(others.type, keys.type):
        raise ConfigError(f"join: {key!r} is {keys.type}, and {others.type} in {dataset!r}")
    counts = pc.value_counts(others.drop_null())
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        raise ConfigError(
            f"join: dataset {dataset!r} has {key}={twice[0]['values'].as_py()!r} in "
            f"{twice[0]['counts'].as_py()} rows: a key must have one row"
        )
    parts = [places_in(chunk, others) for chunk in keys.chunks]
    return np.concatenate([np.empty(0, np.int32), *parts])


def comparable(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether equal values of these types are the same: of one type, all integers, or all texts."""
    return one == other or _widest(one) == _widest(other) is not None


def _widest(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_integer(kind):
        return pa.decimal128(20)  # holds int64 and uint64
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return pa.large_string() if any(is_text(kind) for is_text in texts) else None


def places_in(values: pa.Array, known: pa.Array) -> Int32Array:
    """Where each value is among known ones of a comparable type; -1 for none, and for a null."""
    if values.type != known.type:
        kind = _widest(known.type)
        if kind is None or not len(values):  # all values are null
            return np.full(len(values), -1, np.int32)
        values, known = values.cast(kind), known.cast(kind)
    found = pc.fill_null(pc.index_in(values, known, skip_nulls=True), -1)
    places: Int32Array = found.to_numpy(zero_copy_only=False).astype(np.int32, copy=False)
    return places


@dataclass(frozen=True)
class Lookups:
    """All columns that a job looks up.

    Args:
        layout: of the rows that are read.
        lookups: in the order in which their columns follow.
        hidden: columns that are read and not shown.

    Raises:
        ConfigError: two columns have one name; quotes it.
    """

    read: Layout
    lookups: tuple[Lookup, ...]
    hidden: frozenset[str] = frozenset()
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        read = [each for each in self.read.logical if each.name not in self.hidden]
        fields = [*read, *(each for one in self.lookups for each in one.fields)]
        names = [each.name for each in fields]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if twice:
            raise ConfigError(
                f"join: column {twice[0]!r} is there already: name the columns of the other "
                "dataset that you want, or leave out yours by columns"
            )
        units = {unit for one in self.lookups for unit in one.null_units} | self._kept_units(read)
        object.__setattr__(self, "layout", Layout(pa.schema(fields), units))

    def _kept_units(self, read: Sequence[pa.Field]) -> set[str]:
        """The units of null bits of the columns that are read and shown."""
        shown = Layout(pa.schema(read), ())
        units = {unit for node in nodes(shown.tree) for unit in node.null_units}
        return units & self.read.nulls.units.keys()

    @property
    def identity(self) -> str:
        """Of all lookups; "" without any."""
        return "".join(one.identity for one in self.lookups)

    @property
    def num_bytes(self) -> int:
        """Memory of all tables."""
        return sum(one.num_bytes for one in self.lookups)

    def extend(self, pieces: Sequence[Rows], row_ids: Int64Array) -> list[Rows]:
        """The rows with the columns that are looked up.

        Args:
            pieces: the rows, in order.
            row_ids: of all of them.
        """
        extended, stop = [], 0
        for piece in pieces:
            start, stop = stop, stop + piece.num_rows
            found: dict[str, Any] = {}
            nulls: dict[str, Bits] = {}
            for lookup in self.lookups:
                found |= lookup.values(row_ids[start:stop])
                nulls |= lookup.nulls(row_ids[start:stop])
            extended.append(self._joined(piece, found, nulls))
        return extended

    def _joined(self, piece: Rows, found: dict[str, Any], nulls: dict[str, Bits]) -> Rows:
        matrices: dict[int, npt.NDArray[np.generic]] = {}
        arrays: dict[int, pa.Array] = {}
        for index, column in enumerate(self.layout.columns):
            if column.kind == "nulls":
                matrices[index] = self.layout.nulls.pack(
                    {**self._read_nulls(piece), **nulls}, piece.num_rows
                )
                continue
            name = column.names[0]
            if column.kind == "plain":
                arrays[index] = found[name] if name in found else self._read(piece.arrays, name)
                continue
            if name not in found and column.names == self._stored_beside(name):
                matrices[index] = self._read(piece.matrices, name)
                continue
            if column.kind == "matrix":
                matrices[index] = found[name]
                continue
            assert column.dtype is not None
            joined = pool_matrix(piece.num_rows, column.width, column.dtype)
            beside = () if name in found else self._stored_beside(name)
            first = len(beside) if column.names[: len(beside)] == beside else 0
            if first:  # columns that are looked up follow those that are read
                joined[:, :first] = self._read(piece.matrices, name)
            for at, each in enumerate(column.names[first:], first):
                joined[:, at] = found[each] if each in found else self._scalar(piece, each)
            matrices[index] = joined
        return Rows(self.layout, matrices, arrays, piece.num_rows)

    def _read_nulls(self, piece: Rows) -> dict[str, Bits]:
        if self.read.null_index is None:
            return {}
        found = self.read.nulls.unpack_all(piece.matrices[self.read.null_index])
        return {unit: bits for unit, bits in found.items() if unit in self.layout.nulls.units}

    def _stored_beside(self, name: str) -> tuple[str, ...]:
        return self.read.columns[self.read.place(name)[0]].names

    def _read(self, stored: dict[int, Any], name: str) -> Any:
        return stored[self.read.place(name)[0]]

    def _scalar(self, piece: Rows, name: str) -> npt.NDArray[np.generic]:
        index, at = self.read.place(name)
        column: npt.NDArray[np.generic] = piece.matrices[index][:, at]
        return column
