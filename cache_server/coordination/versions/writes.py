"""The writes that have begun and not ended: what was put for each, and where it lies.

Nothing of a write is on disk before its commit, so a coordinator that starts again knows none, and
tells the nodes to drop the rows of those that were begun with its catalogue.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from cache_protocol.datasets.dataset_names import namespace_of
from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import RequestError
from cache_protocol.storage.layout import schema_from_bytes
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import ANYONE, Principal
from cache_server.coordination.members.membership import Member
from cache_server.plan.pinned_version import PinnedVersion
from cache_server.plan.written_version import put_of, stored_schema, written_spec, written_version
from cache_server.shards.put_key import PutKey, put_checksum
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

MAX_OPEN, MAX_OPEN_OF_NAMESPACE = 200, 50  # writes; each is in every answer to a heartbeat
# Of the schemas of open writes. 60,000 columns of float32 take 3 to 6 MB.
MAX_SCHEMA_BYTES, MAX_SCHEMA_BYTES_OF_NAMESPACE = 128 << 20, 32 << 20
MAX_SCHEMA_BYTES_OF_PRINCIPAL = 16 << 20
_MOST_OF_PRINCIPAL = MAX_OPEN, MAX_SCHEMA_BYTES_OF_PRINCIPAL
_MOST_OF_NAMESPACE = MAX_OPEN_OF_NAMESPACE, MAX_SCHEMA_BYTES_OF_NAMESPACE
_REMEMBERED = 1000  # committed writes
_MAX_SECONDS = 7 * 24 * 3600.0
_MAX_NAMED = 1000


@dataclass(frozen=True)
class Chosen:
    """One attempt at a partition.

    Attributes:
        checksum: of its rows; empty: any stream of this attempt.
    """

    partition: int
    attempt: int
    checksum: str = ""


@dataclass(frozen=True)
class ChosenRows:
    """The rows of a commit.

    Attributes:
        puts: each with the node that holds it, and its shards: the last ones of the version.
    """

    version: PinnedVersion
    puts: tuple[tuple[PutKey, str, tuple[pb.SealedShard, ...]], ...]

    @property
    def shards(self) -> tuple[pb.SealedShard, ...]:
        """Of all puts."""
        return tuple(shard for _, _, shards in self.puts for shard in shards)

    @property
    def node_ids(self) -> tuple[str, ...]:
        """The node that holds each shard."""
        return tuple(node_id for _, node_id, shards in self.puts for _ in shards)


@dataclass
class Write:
    """One write that has begun.

    Attributes:
        spec: of the dataset, without its rows.
        schema: Arrow IPC message of the stored columns. Only bytes: a schema takes ten times as
            much.
        owner: the principal that began it.
        ends_at: monotonic seconds; every put moves it.
        appends: its rows follow those of the newest version.
        puts: complete ones, with their shards, by node.
    """

    write_id: str
    spec: DatasetSpec
    schema: bytes
    owner: str
    ttl_s: float
    full_wait_s: float
    ends_at: float = 0.0
    appends: bool = False
    puts: dict[PutKey, tuple[str, tuple[pb.SealedShard, ...]]] = field(default_factory=dict)

    @property
    def namespace(self) -> str:
        """Of its dataset."""
        return namespace_of(self.spec.name)

    @cached_property
    def digest(self) -> str:
        """Of the schema."""
        return hashlib.sha256(self.schema).hexdigest()

    @cached_property
    def num_bytes(self) -> int:
        """What it takes of the bounds."""
        return len(self.schema) + self.spec.to_proto().ByteSize()

    def to_proto(self) -> pb.OpenWrite:
        """The message for nodes."""
        message = _open_write(self.write_id, self.spec, self.full_wait_s)
        message.schema_digest = self.digest
        return message


def new_write(
    request: pb.BeginWriteRequest,
    arriving: pa.Schema,
    before: PinnedVersion | None = None,
    by: Principal = ANYONE,
    *,
    catalogue_id: str,
) -> Write:
    """A write to `Writes.begin`. It takes half a second for 60,000 columns: hold no lock.

    Args:
        request: with the full name of the dataset.
        arriving: schema of the rows.
        before: the version that they are appended to.
        by: begins it.
        catalogue_id: see `Writes`.

    Raises:
        ConfigError, RequestError: quotes what is wrong.
    """
    write_id = catalogue_id + uuid.uuid4().hex[len(catalogue_id) :]
    if before is not None and before.spec.nulls == "refuse":
        request.spec.nulls = before.spec.nulls
    spec = written_spec(request.spec, write_id)
    for name, seconds in (("ttl_s", request.ttl_s), ("full_wait_s", request.full_wait_s)):
        if not 0 <= seconds <= _MAX_SECONDS:
            raise RequestError(f"{name} must be from 0 to {_MAX_SECONDS:.0f}, got {seconds}")
    stored = stored_schema(arriving, spec.target_shard_bytes, before)
    return Write(
        write_id,
        spec,
        stored.serialize().to_pybytes(),
        by.name,
        request.ttl_s,
        request.full_wait_s,
        appends=request.append,
    )


def require_small_schema(num_bytes: int) -> None:
    """Refuses a schema that no write may have, before it is decoded.

    Raises:
        RequestError: names the limit.
    """
    if num_bytes > MAX_SCHEMA_BYTES_OF_PRINCIPAL:
        raise RequestError(
            f"the schema of the rows has {num_bytes} bytes, and may have "
            f"{MAX_SCHEMA_BYTES_OF_PRINCIPAL}: write fewer columns, or shorter names"
        )


class Writes:
    """The writes of a coordinator. One thread at a time.

    Args:
        members: the nodes and their reports; read at each call.
        clock: monotonic seconds.
        catalogue_id: with which the ids of its writes begin.

    Attributes:
        num_changes: of the open writes, counted.
    """

    def __init__(
        self, members: Mapping[str, Member], clock: Callable[[], float], catalogue_id: str
    ) -> None:
        self._members = members
        self.catalogue_id = catalogue_id
        self._clock = clock
        self.num_changes = 0
        self._open: dict[str, Write] = {}
        self._committed: dict[str, VersionKey] = {}

    def begin(self, write: Write) -> None:
        """Begins a write.

        Raises:
            RequestError: the open writes have too many columns, or they are too many.
        """
        self.end_old()
        of_namespace = [o for o in self._open.values() if o.namespace == write.namespace]
        of_principal = [o for o in of_namespace if o.owner == write.owner]
        for whose, writes, limit, max_bytes in (
            (f"principal {write.owner!r}", of_principal, *_MOST_OF_PRINCIPAL),
            (f"namespace {write.namespace!r}", of_namespace, *_MOST_OF_NAMESPACE),
            ("a cache", [*self._open.values()], MAX_OPEN, MAX_SCHEMA_BYTES),
        ):
            held = sum(other.num_bytes for other in writes)
            if held + write.num_bytes > max_bytes:
                raise RequestError(
                    f"{whose} has open writes with schemas of at most {max_bytes} bytes: {held} "
                    f"are open, and this one has {write.num_bytes}. Commit or abort some of them, "
                    "or write fewer columns"
                )
            if len(writes) >= limit:
                raise RequestError(
                    f"{whose} has at most {limit} open writes: commit or abort some of them"
                )
        write.ends_at = self._clock() + write.ttl_s
        self._open[write.write_id] = write
        self.num_changes += 1
        logger.info("write begun dataset=%s write=%s", write.spec.name, write.write_id)

    def schema(self, write_id: str) -> bytes:
        """The schema of an open write, for a node.

        Raises:
            RequestError: it is not open.
        """
        write = self._open.get(write_id)
        if write is None:
            raise _not_open(write_id)
        return write.schema

    def find(self, write_id: str, by: Principal = ANYONE) -> Write:
        """An open write; its time to live begins again.

        Raises:
            RequestError: it is not open. PermissionDeniedError: it is of another namespace.
        """
        write = self._open.get(write_id)
        if write is None:
            raise _not_open(write_id)
        by.require_own(write.spec.name, "a write")
        write.ends_at = self._clock() + write.ttl_s
        return write

    def committed(self, write_id: str) -> VersionKey | None:
        """The version that a write became, if it is remembered."""
        return self._committed.get(write_id)

    def abort(self, write_id: str, by: Principal = ANYONE) -> None:
        """Ends a write; nodes drop its rows. An unknown write has ended already.

        Raises:
            PermissionDeniedError: it is of another namespace.
        """
        if write_id in self._open:
            write = self.find(write_id, by)
            del self._open[write_id]
            self.num_changes += 1
            logger.info("write aborted dataset=%s write=%s", write.spec.name, write_id)

    def end_old(self) -> bool:
        """Ends the writes that were idle for too long; returns whether there were any."""
        old = [write for write in self._open.values() if write.ends_at < self._clock()]
        for write in old:
            del self._open[write.write_id]
            self.num_changes += 1
            logger.warning("write ended dataset=%s write=%s", write.spec.name, write.write_id)
        return bool(old)

    def apply_report(
        self,
        node_id: str,
        reported: Mapping[VersionKey, pb.ActualDataset],
        changed: Iterable[VersionKey],
    ) -> None:
        """Notes the complete puts of a node.

        Args:
            changed: what differs from the report before, or is new.
        """
        for key in changed:
            actual, put = reported.get(key), PutKey.of(key.fingerprint)
            write = self._open.get(put.write_id) if put is not None else None
            if put is None or write is None or actual is None or put in write.puts:
                continue
            if key.dataset != write.spec.name:
                continue
            write.ends_at = self._clock() + write.ttl_s
            if actual.HasField("num_shards") and len(actual.shards) == actual.num_shards:
                write.puts[put] = node_id, _sealed(actual)

    def choose(
        self,
        write: Write,
        wanted: Collection[Chosen],
        alive: Collection[str],
        before: PinnedVersion | None = None,
        *,
        denied: Collection[tuple[str, PutKey]] = (),
    ) -> ChosenRows | list[int]:
        """The rows of the chosen attempts; else what is lost.

        Args:
            alive: ids of the nodes that answer.
            denied: puts that a node does not hold, as it said when it was asked.
            before: the version that they are appended to.

        Returns:
            A list of numbers: the partitions that no live node has complete.

        Raises:
            RequestError: a partition is chosen twice, or see `written_version`.
        """
        by_partition = {chosen.partition: chosen for chosen in wanted}
        if len(by_partition) < len(wanted):
            raise RequestError("a commit names each partition once")
        there: dict[int, PutKey] = {}
        for put in sorted(write.puts):
            chosen = by_partition.get(put.partition)
            if chosen is not None and chosen.attempt == put.attempt and put.partition not in there:
                node_id, of_put = write.puts[put]
                is_meant = chosen.checksum in ("", put_checksum(s.checksum for s in of_put))
                is_held = self._is_held(write, put, node_id, of_put, alive)
                if is_meant and is_held and (node_id, put) not in denied:
                    there[put.partition] = put
        lost = sorted(by_partition.keys() - there.keys())
        if lost:
            return lost[:_MAX_NAMED]
        puts = [there[partition] for partition in sorted(there)]
        version = written_version(
            write.spec,
            schema_from_bytes(write.schema),
            [(put, write.puts[put][1]) for put in puts],
            before,
        )
        of_puts = tuple((put, *write.puts[put]) for put in puts)
        return ChosenRows(version, of_puts)

    def _is_held(
        self,
        write: Write,
        put: PutKey,
        node_id: str,
        shards: tuple[pb.SealedShard, ...],
        alive: Collection[str],
    ) -> bool:
        if not shards:
            return True
        member = self._members.get(node_id)
        if member is None or node_id not in alive:
            return False
        actual = member.actual.get(put.version_key(write.spec.name))
        return actual is not None and _sealed(actual) == shards

    def end_committed(self, write: Write, key: VersionKey) -> None:
        """Ends a write that became a version."""
        self._open.pop(write.write_id, None)
        self.num_changes += 1
        self._committed[write.write_id] = key
        for write_id in [*self._committed][:-_REMEMBERED]:
            del self._committed[write_id]

    def messages(
        self, pending: Iterable[tuple[PinnedVersion, Collection[int]]]
    ) -> list[pb.OpenWrite]:
        """The writes that nodes keep rows of.

        Args:
            pending: versions whose rows nodes have yet to move, with the shards that they share.
        """
        messages = [write.to_proto() for write in self._open.values()]
        for version, shared in pending:
            for write_id in write_ids(version, shared):
                message = _open_write(write_id, version.spec, 0.0)
                message.committed = True
                messages.append(message)
        return messages

    def open_of(self, dataset: str) -> list[str]:
        """The open writes of a dataset."""
        return [w.write_id for w in self._open.values() if w.spec.name == dataset]

    def is_open(self, put: PutKey) -> bool:
        """Whether a put may be chosen yet."""
        return put.write_id in self._open

    def began(self, put: PutKey) -> bool:
        """Whether the write of a put was begun with this catalogue, also before a restart."""
        return put.write_id.startswith(self.catalogue_id)


def write_ids(version: PinnedVersion, without: Collection[int] = ()) -> set[str]:
    """The writes whose rows a written version is made of.

    Args:
        without: shards that do not count.
    """
    puts = map(PutKey.of, puts_of(version, without))
    return {put.write_id for put in puts if put is not None}


def puts_of(version: PinnedVersion, without: Collection[int] = ()) -> set[str]:
    """The names of the puts that a written version is made of; see `write_ids`."""
    shards = (shard for shard in version.shards or () if shard.index not in without)
    return {put_of(split)[0] for shard in shards for split in shard.splits}


def _not_open(write_id: str) -> RequestError:
    return RequestError(
        f"no open write {write_id[:64]!r}: it was aborted, it was idle for longer than its ttl_s, "
        "or the coordinator started again; write the dataset again"
    )


def _open_write(write_id: str, spec: DatasetSpec, full_wait_s: float) -> pb.OpenWrite:
    return pb.OpenWrite(
        write_id=write_id,
        dataset=spec.name,
        target_shard_bytes=spec.target_shard_bytes,
        nulls=spec.nulls,
        full_wait_s=full_wait_s,
    )


def _sealed(actual: pb.ActualDataset) -> tuple[pb.SealedShard, ...]:
    shards = sorted(
        (shard for shard in actual.shards if shard.sealed), key=lambda shard: shard.index
    )
    return tuple(
        pb.SealedShard(
            num_rows=shard.num_rows,
            num_bytes=shard.num_bytes,
            checksum=shard.checksum,
            nulls=shard.nulls,
        )
        for shard in shards
    )
