"""Pure planners: splits -> shards, shards -> nodes, what a node should hold. No I/O.

A shard is a run of consecutive splits, so its number does not depend on the number of nodes.
Placement is rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup
and Zadimoghaddam, 2018): each member gets a score for each shard, and the best `replicas` members
that have not had their even share yet hold it. It depends on nothing but names, so a restarted
coordinator reaches the same answer, and a lost node moves only its own shards.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

PARTITION = b"cache.partition"  # in the metadata of a field whose values stand in paths
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class VersionKey:
    """The name of a version: its dataset and its fingerprint."""

    dataset: str
    fingerprint: str


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when the dataset was planned.

    Attributes:
        path: or a URI, or what else names it to its table, such as a database and a relation.
        etag: of an object store; empty where there is none.
    """

    path: str
    size: int
    mtime_ns: int
    etag: str = ""


@dataclass(frozen=True)
class Split:
    """The rows of one file that start in byte range ``part`` of ``parts`` equal ones.

    Attributes:
        num_rows: before any filter, at most; None where the format does not tell.
        estimated_bytes: decoded, of the columns that are kept.
        piece: what else says which rows these are, in the words of the table's format; for a table
            that is not made of files.
    """

    file: SourceFile
    part: int
    parts: int
    num_rows: int | None
    estimated_bytes: int
    piece: str = ""

    def __str__(self) -> str:
        where = "" if self.parts == 1 else f" (split {self.part + 1} of {self.parts})"
        return f"{self.file.path}{where}"


@dataclass(frozen=True)
class PinnedTable:
    """A table as it was pinned: enough, with the secrets of its store, to read any split of it.

    Attributes:
        name: in the query.
        format: one of `protos.spec.FORMATS`.
        schema: every column, as the query sees them.
        options: settings of the store or catalogue that are no secrets.
        snapshot: what finds this state of the table again, in the words of the format.
        columns: the ones that the query reads, in the order of the schema; None for all.
        splits: all of them, in row order, of a table that is read whole; none of one that is read
            split by split.
    """

    name: str
    format: str
    schema: pa.Schema
    options: Mapping[str, str] = field(default_factory=dict)
    snapshot: str = ""
    columns: tuple[str, ...] | None = None
    splits: tuple[Split, ...] = ()

    @property
    def read_schema(self) -> pa.Schema:
        """The columns that the query reads."""
        if self.columns is None:
            return self.schema
        return pa.schema([self.schema.field(name) for name in self.columns])


@dataclass(frozen=True)
class Condition:
    """What every row that a query keeps fulfils: ``column operator value``.

    Attributes:
        operator: ``=``, ``<``, ``<=``, ``>`` or ``>=``.
        value: an int, a str or a date, of the column's own type.
    """

    column: str
    operator: str
    value: object

    def holds(self, value: Any) -> bool:
        """Whether a row with this value in the column may be kept."""
        return value is not None and bool(_OPERATORS[self.operator](value, self.value))


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Pin:
    """What a source holds at one moment. Made by the module of its format.

    Attributes:
        schema: every column, as the query sees them; no metadata but `PARTITION` of a field.
        content: JSON values that decide the rows, and no secret: part of the fingerprint.
        cut: stored logical schema of the table's columns that are kept, decoded bytes of a split
            -> splits in row order.
        snapshot: see `PinnedTable`.
        exact_rows: every split knows exactly how many rows it holds.
        comparable: whether ``content`` is the same when the source is the same. Where it is not,
            such as for a database, a version of the same spec counts as the same until a refresh.
        prune: the same without splits of which no row fulfils all conditions, as partitions and
            statistics tell; None where there are none to tell.
        sample: so many rows that are like those of the table, made up from its statistics; None
            where the format has none.
        close: lets go of what keeps the state readable, such as a transaction. Called once, when
            no split will be read any more.
    """

    schema: pa.Schema
    content: Sequence[object]
    cut: Callable[[pa.Schema, int], tuple[Split, ...]]
    snapshot: str = ""
    exact_rows: bool = False
    comparable: bool = True
    prune: Callable[[Sequence[Condition]], Pin] | None = None
    sample: Callable[[int], pa.RecordBatch] | None = None
    close: Callable[[], None] = lambda: None


def partition_values(path: str, schema: pa.Schema) -> dict[str, pa.Scalar]:
    """The columns of a file that stand in the names of its directories, ``key=value``, as in Hive.

    Args:
        path: or URI, of the file.
        schema: of the table; its partition columns are marked with `PARTITION`.
    """
    names = {field.name: field for field in schema if PARTITION in (field.metadata or {})}
    values = {}
    for key, text in partition_texts(path).items() if names else ():
        if key in names:
            scalar = pa.scalar(text, pa.string())
            values[key] = scalar.cast(names[key].type)
    return values


def partition_texts(path: str) -> dict[str, str | None]:
    """The ``key=value`` directories of a path; None for Hive's name of a null."""
    texts: dict[str, str | None] = {}
    for part in path.split("/")[:-1]:
        key, equals, text = part.partition("=")
        if key and equals:
            texts[unquote(key)] = None if text == _HIVE_NULL else unquote(text)
    return texts


@dataclass(frozen=True)
class ShardPlan:
    """The consecutive splits whose rows make shard ``index``."""

    index: int
    splits: tuple[Split, ...]

    @property
    def estimated_bytes(self) -> int:
        """Decoded bytes before any filter."""
        return sum(split.estimated_bytes for split in self.splits)

    @property
    def max_rows(self) -> int | None:
        """Rows before any filter; None where a format does not tell."""
        return max_rows(self.splits)


def max_rows(splits: Iterable[Split]) -> int | None:
    """Rows of all splits before any filter; None where a format does not tell."""
    total = 0
    for split in splits:
        if split.num_rows is None:
            return None
        total += split.num_rows
    return total


def cut_shards(splits: Iterable[Split], target_bytes: int) -> tuple[ShardPlan, ...]:
    """Consecutive splits joined up to ``target_bytes``; a larger split is a shard of its own."""
    shards: list[ShardPlan] = []
    current: list[Split] = []
    size = 0
    for split in splits:
        if current and size + split.estimated_bytes > target_bytes:
            shards.append(ShardPlan(len(shards), tuple(current)))
            current, size = [], 0
        current.append(split)
        size += split.estimated_bytes
    if current:
        shards.append(ShardPlan(len(shards), tuple(current)))
    return tuple(shards)


def place(
    fingerprint: str,
    num_shards: int,
    members: Iterable[str],
    replicas: int,
    *,
    alive: Collection[str] | None = None,
) -> tuple[tuple[str, ...], ...]:
    """For each shard the nodes that should hold it, in order of preference.

    No member gets more than its even share (rounded up) while all are alive; a lost member's
    shards, and no others, go to the next best nodes alive.

    Args:
        fingerprint: of the version; makes two datasets lie differently.
        num_shards: shards ``0 .. num_shards - 1``.
        members: every node that belongs to the cache, in any order.
        replicas: wanted; fewer where there are fewer nodes.
        alive: the members that answer; None for all.

    Returns:
        ``num_shards`` tuples of ``min(replicas, nodes alive)`` distinct node ids.
    """
    nodes = sorted(set(members))
    living = set(nodes if alive is None else alive)
    if not nodes:
        return ((),) * num_shards
    share = -(-num_shards * min(replicas, len(nodes)) // len(nodes))
    load = dict.fromkeys(nodes, 0)
    placement = []
    for shard in range(num_shards):
        left = num_shards - shard
        ranking = sorted(nodes, key=lambda node: _score(fingerprint, shard, node), reverse=True)
        # The best with room. Before them, whoever needs every shard left to come to its share:
        # otherwise the last shards could find too few nodes with room.
        homes = sorted(
            ranking, key=lambda node: (load[node] >= share) - (share - load[node] >= left)
        )[:replicas]
        for node in homes:
            load[node] += 1
        spare = [node for node in ranking if node in living and node not in homes]
        kept = [node for node in homes if node in living]
        placement.append(tuple(kept + spare[: len(homes) - len(kept)]))
    return tuple(placement)


def _score(fingerprint: str, shard: int, node: str) -> bytes:
    return hashlib.blake2b(f"{fingerprint}/{shard}/{node}".encode(), digest_size=8).digest()


def desired_shards(
    node_id: str,
    placement: Sequence[Sequence[str]],
    holders: Mapping[int, Set[str]],
    sealed: Collection[int] = (),
) -> frozenset[int]:
    """The shards that ``node_id`` should hold.

    Those that `place` gives it, and, of those it holds already, the ones whose new homes do not
    all hold them yet: a shard is dropped only when nobody needs it there any more.

    Args:
        placement: from `place`.
        holders: for each shard the nodes that serve it now.
        sealed: the shards that the node itself holds, served yet or not.
    """
    wanted = set()
    for shard, homes in enumerate(placement):
        held_by = holders.get(shard, frozenset())
        held = node_id in held_by or shard in sealed
        if node_id in homes or (held and not set(homes) <= held_by):
            wanted.add(shard)
    return frozenset(wanted)


def row_starts(row_counts: Sequence[int]) -> tuple[int, ...]:
    """First row id of each shard, and the total at the end: ``len(row_counts) + 1`` numbers."""
    starts = [0]
    for count in row_counts:
        starts.append(starts[-1] + count)
    return tuple(starts)


def bytes_by_node(placement: Sequence[Sequence[str]], sizes: Sequence[int]) -> dict[str, int]:
    """How many bytes `placement` puts on each node that holds any."""
    totals: dict[str, int] = {}
    for homes, size in zip(placement, sizes, strict=True):
        for node in homes:
            totals[node] = totals.get(node, 0) + size
    return totals
