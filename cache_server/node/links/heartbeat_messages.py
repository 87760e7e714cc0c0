"""The messages of a heartbeat: encodes what a node holds, decodes what it should hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa

from cache_protocol.errors import CacheError, InvalidTicketError
from cache_protocol.storage.layout import schema_from_bytes
from cache_protocol.storage.shard_files import MappedShard
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.desired import (
    DesiredShard,
    DesiredState,
    DesiredVersion,
    LoadPlan,
    OpenWrite,
    SameShard,
    ShardCopy,
)
from cache_server.node.reconcile import ActualVersion
from cache_server.plan.pinned_version import split_from_proto, table_from_proto
from cache_server.shards import checked_names
from cache_server.shards.version_key import VersionKey

SealedShards = Mapping[VersionKey, Mapping[int, MappedShard]]
_Said = dict[VersionKey, tuple[ActualVersion, Mapping[int, MappedShard]]]


class ReportEncoder:
    """Encodes reports; a version that the coordinator knows is only named. One thread."""

    def __init__(self) -> None:
        self._number = 0
        self._said: _Said = {}  # in the last report
        self._known_number = 0  # 0: the coordinator may know no report
        self._known: _Said = {}
        self._sealed: SealedShards = {}
        self._sums = 0, 0  # of the bytes and the number of these

    def encode(
        self, description: pb.Node, actual: Mapping[VersionKey, ActualVersion], sealed: SealedShards
    ) -> pb.HeartbeatRequest:
        """The request of a heartbeat.

        Args:
            description: the node, without the sums of its shards.
            actual: every version on the node.
            sealed: the shards of these versions; not changed afterwards.
        """
        self._number += 1
        request = pb.HeartbeatRequest(
            node=description,
            report=self._number,
            since=self._known_number,
        )
        request.node.stored_bytes, request.node.stored_shards = self._sum(sealed)
        if self._known_number:  # they do not change, and are longer than the rest
            request.node.ClearField("functions")
        self._said = {}
        for key, version in actual.items():
            if version.is_retired:  # a later version of this name has not begun
                continue
            message = request.datasets.add(dataset=key.dataset, fingerprint=key.fingerprint)
            said = _said(version), sealed.get(key, {})
            self._said[key] = said
            if self._known_number and self._known.get(key) == said:
                message.unchanged = True
            else:
                _encode_version(message, version, sealed.get(key, {}))
            if version.idle_s is not None and version.desired is not None:
                message.idle_s = version.idle_s
        return request

    def _sum(self, sealed: SealedShards) -> tuple[int, int]:
        if sealed != self._sealed:
            files = {shard.inode: shard for shards in sealed.values() for shard in shards.values()}
            num_bytes = sum(shard.sealed.num_bytes for shard in files.values())
            self._sealed, self._sums = sealed, (num_bytes, sum(map(len, sealed.values())))
        return self._sums

    def apply(self, response: pb.HeartbeatResponse) -> None:
        """Takes what the answer to the last report says of it."""
        is_known = response.report == self._number and not response.resend
        self._known_number = self._number if is_known else 0
        self._known = self._said if is_known else {}


def held_shards(key: VersionKey, shards: Mapping[int, MappedShard]) -> pb.ActualDataset:
    """The shards of a version or a put whose files are there at this moment."""
    actual = pb.ActualDataset(dataset=key.dataset, fingerprint=key.fingerprint)
    for index, shard in sorted(shards.items()):
        with suppress(OSError):
            if shard.path.stat().st_size == shard.sealed.num_bytes:
                actual.shards.add(index=index, sealed=True, checksum=shard.sealed.checksum)
    return actual


def _said(version: ActualVersion) -> ActualVersion:
    """What a report says of a version, but for ``idle_s``."""
    return replace(
        version,
        idle_s=None,
        may_copy_again=False,
        reported=frozenset(),
        has_spooled_tables=False,
    )


def _encode_version(
    message: pb.ActualDataset, version: ActualVersion, sealed: Mapping[int, MappedShard]
) -> None:
    starts = version.row_starts or {}
    for index, shard in sealed.items():
        message.shards.add(
            index=index,
            sealed=True,
            num_rows=shard.sealed.num_rows,
            num_bytes=shard.sealed.num_bytes,
            checksum=shard.sealed.checksum,
            rows_fixed=index in starts,
            row_start=starts.get(index, 0),
            nulls=shard.sealed.nulls,
            erased=shard.erased,
        )
    if version.num_shards is not None:
        message.num_shards = version.num_shards
    if version.desired is None:
        return
    message.attempt = version.desired.plan.attempt
    for job, num_rows in version.loading.items():
        if job is None:
            message.rows_loaded = num_rows
        else:
            message.shards.add(index=job, rows_loaded=num_rows, running=job in version.running)
    for job, reason in version.failures.items():
        if job is None:
            message.failure, message.failure_may_pass = reason, job in version.may_pass
        else:
            may_pass = job in version.may_pass
            message.shards.add(index=job, failure=reason, failure_may_pass=may_pass)
    message.waits = max(version.waits.values(), default="")
    message.notes.extend(sorted(version.notes))
    message.files_read = version.files_read
    message.forgot = version.forgot


class DesiredDecoder:
    """Decodes the answers to heartbeats; decodes an unchanged version only once. One thread.

    A version may have 100,000 shards.

    Attributes:
        answer: the number of the last decoded answer.
    """

    def __init__(self) -> None:
        self.answer = 0
        self._state = DesiredState()
        self._known: dict[VersionKey, tuple[pb.DesiredDataset, DesiredVersion]] = {}
        self._writes: dict[str, tuple[pb.OpenWrite, OpenWrite]] = {}

    def decode(self, response: pb.HeartbeatResponse) -> DesiredState:
        """What the node should hold. An unchanged version is the same object as before.

        Raises:
            InvalidTicketError: the answer has a name that no coordinator gives; quotes it.
        """
        if response.unchanged:
            if response.answer != self.answer:
                raise InvalidTicketError(
                    f"answer {response.answer} is as one that this node does not have"
                )
            return self._state
        known, decoded = self._known, {}
        for message in response.datasets:
            key = checked_names.version_key(message.plan.dataset, message.plan.fingerprint)
            try:
                decoded[key] = message, _decode_again(message, known.get(key))
            except (ValueError, pa.ArrowException) as error:
                if isinstance(error, CacheError):
                    raise
                raise InvalidTicketError(
                    f"the plan of {key.dataset!r} cannot be decoded: {error}"
                ) from None
        self._known = decoded
        self._writes = {
            message.write_id: before
            if (before := self._writes.get(message.write_id)) and before[0] == message
            else (message, _decode_write(message))
            for message in response.writes
        }
        self._state = DesiredState(
            {key: version for key, (_, version) in decoded.items()},
            _keys(response.gone),
            _keys(response.orphans),
            response.room_may_come,
            {write_id: write for write_id, (_, write) in self._writes.items()},
        )
        self.answer = response.answer
        return self._state


def _keys(names: Iterable[pb.VersionName]) -> frozenset[VersionKey]:
    return frozenset(checked_names.version_key(name.dataset, name.fingerprint) for name in names)


def _decode_write(message: pb.OpenWrite) -> OpenWrite:
    key = checked_names.version_key(message.dataset, message.write_id)
    return OpenWrite(
        key.fingerprint,
        key.dataset,
        message.schema_digest,
        message.target_shard_bytes,
        message.nulls == "refuse",
        message.full_wait_s,
        message.committed,
        message.tombstones,
    )


def _decode_again(
    message: pb.DesiredDataset, before: tuple[pb.DesiredDataset, DesiredVersion] | None
) -> DesiredVersion:
    """The version of a message; what did not change is not decoded again."""
    if before is not None and message == before[0]:
        return before[1]
    is_same_plan = (
        before is not None
        and message.plan == before[0].plan
        and message.secrets == before[0].secrets
    )
    plan = before[1].plan if before and is_same_plan else decode_plan(message.plan, message.secrets)
    return _decode_version(message, plan)


def decode_plan(plan: pb.LoadPlan, secrets: pb.Secrets) -> LoadPlan:
    """The load plan of a version, with its secrets."""
    return LoadPlan(
        key=VersionKey(plan.dataset, plan.fingerprint),
        attempt=plan.attempt,
        sql=plan.sql,
        tables=tuple(table_from_proto(table) for table in plan.tables),
        logical=schema_from_bytes(plan.logical_schema),
        target_shard_bytes=plan.target_shard_bytes,
        keeps_every_row=plan.keeps_every_row,
        joined=plan.joined,
        refuse_nulls=plan.refuse_nulls,
        readers=tuple(plan.readers),
        secrets={name: dict(table.values) for name, table in secrets.tables.items()},
    )


def _decode_version(message: pb.DesiredDataset, plan: LoadPlan) -> DesiredVersion:
    return DesiredVersion(
        plan=plan,
        shards={shard.index: _decode_shard(shard, plan.key) for shard in message.shards},
        rows_fixed=message.rows_fixed,
        num_rows=message.num_rows,
        run_whole=message.run_whole,
        missing=frozenset(map(checked_names.shard_index, message.missing)),
        num_shards=(
            checked_names.shard_index(message.num_shards)
            if message.HasField("num_shards")
            else None
        ),
        traceparent=message.traceparent,
        erased={each.index: each.places for each in message.erased},
        tombstones=message.tombstones,
    )


def _decode_shard(shard: pb.DesiredShard, key: VersionKey) -> DesiredShard:
    index = checked_names.shard_index(shard.index)
    splits = tuple(split_from_proto(split) for split in shard.splits)
    same_as = None
    if shard.HasField("same_as"):
        same_as = SameShard(
            checked_names.version_key(key.dataset, shard.same_as.fingerprint),
            checked_names.shard_index(shard.same_as.index),
        )
    copy = None
    if shard.copy_from or same_as is not None:
        copy = ShardCopy(
            tuple(map(checked_names.location, shard.copy_from or shard.same_as.copy_from)),
            shard.num_rows,
            shard.num_bytes,
            checked_names.token(shard.checksum, "checksum"),
            dict(shard.nulls),
            same_as,
            shard.erased,
        )
    return DesiredShard(index, shard.row_start, splits, copy)


def encode_secrets(secrets: Mapping[str, Mapping[str, str]]) -> pb.Secrets:
    """The message of the secrets of a load plan."""
    return pb.Secrets(
        tables={name: pb.TableSecrets(values=values) for name, values in secrets.items()}
    )
