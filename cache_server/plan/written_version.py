"""Makes a version of the rows that writers put on nodes.

Its table has the format `WRITTEN`. Each split is one sealed shard of a put, which lies on one node.
An append has the shards of the version before it, then its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import pyarrow as pa

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import RequestError, SchemaError, some_of
from cache_protocol.storage.layout import with_large_offsets
from cache_protocol.storage.lossless import column_problems
from cache_protocol.storage.type_rules import repeated_names
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.plan.pinned_version import PinnedVersion
from cache_server.plan.shard_plan import ShardPlan, with_contents
from cache_server.shards.checked_names import MAX_SHARDS
from cache_server.shards.packing import logical_schema
from cache_server.shards.put_key import PutKey
from cache_server.shards.version_key import VersionKey
from cache_server.source.pinned import WRITTEN, PinnedTable, SourceFile, Split

_SCHEME = "write://"
_TABLE = "source"
# A shard of this size may have more bytes of strings than offsets of 32 bits can tell.
_LARGE_BYTES = 1 << 30


def written_spec(content: pb.DatasetSpec, write_id: str) -> DatasetSpec:
    """The spec of a dataset that is written.

    Args:
        content: without tables and a query.

    Raises:
        ConfigError: quotes every bad field. RequestError: it has a table or a query.
    """
    if content.tables or content.sql or content.columns or content.filter:
        raise RequestError(
            f"a write of {content.name!r} takes rows as they are: give it no source and no query"
        )
    spec = pb.DatasetSpec()
    spec.CopyFrom(content)
    spec.tables.add(name=_TABLE, source=[f"{_SCHEME}{write_id}"])
    return DatasetSpec.from_proto(spec)


def write_id_of(spec: DatasetSpec) -> str:
    """The write that a version was made by; empty: it was loaded."""
    source = spec.source[0]
    return source.removeprefix(_SCHEME) if source.startswith(_SCHEME) else ""


def stored_schema(
    arriving: pa.Schema, target_shard_bytes: int, before: PinnedVersion | None = None
) -> pa.Schema:
    """The logical schema that rows of ``arriving`` are stored with.

    Args:
        before: the version that they are appended to.

    Raises:
        SchemaError: names every column that cannot be stored, or does not fit that of ``before``.
    """
    if before is None:
        if not arriving.names:
            raise SchemaError("the rows have no columns: write at least one")
        if repeated := repeated_names(arriving.names):
            raise SchemaError(
                f"columns cannot share a name: {some_of(map(repr, repeated))}: give each another "
                "one"
            )
        try:
            logical = logical_schema(arriving)
        except RequestError as error:
            raise SchemaError(f"the rows cannot be stored: {error}") from None
        return with_large_offsets(logical) if target_shard_bytes > _LARGE_BYTES else logical
    if problems := column_problems(arriving, before.logical):
        raise SchemaError(
            f"cannot append to {before.spec.name!r}: {some_of(problems, '; ')}. Cast the "
            "rows before you write them, or write all rows again without append"
        )
    return before.logical


def appended_spec(spec: DatasetSpec, before: DatasetSpec) -> DatasetSpec:
    """The spec of rows that follow those of an earlier version: what that one promises holds."""
    content = spec.to_proto()
    content.replicas = max(spec.replicas, before.replicas)
    content.readers.extend(name for name in before.readers if name not in spec.readers)
    if before.nulls == "keep":
        content.nulls = before.nulls
    return DatasetSpec.from_proto(content)


def written_version(
    spec: DatasetSpec,
    logical: pa.Schema,
    puts: Sequence[tuple[PutKey, Sequence[pb.SealedShard]]],
    before: PinnedVersion | None = None,
) -> PinnedVersion:
    """The version of the chosen puts, in this order.

    Args:
        puts: with the shards of each.
        before: the version that they are appended to.

    Raises:
        RequestError: ``before`` has another schema by now, or there are too many shards.
    """
    shards: list[ShardPlan] = []
    if before is not None:
        if not before.logical.equals(logical, check_metadata=True):
            raise RequestError(
                f"cannot append to {spec.name!r}: its columns have changed since the append began, "
                f"from {logical.to_string()!r} to {before.logical.to_string()!r}. Append again"
            )
        spec = appended_spec(spec, before.spec)
        shards += before.shards or ()
    for put, sealed in puts:
        name = put.version_key(spec.name).fingerprint
        for place, shard in enumerate(sealed):
            file = SourceFile(name, shard.num_bytes, 0, shard.checksum)
            split = Split(file, place, len(sealed), shard.num_rows, shard.num_bytes)
            shards.append(ShardPlan(len(shards), (split,)))
    if len(shards) > MAX_SHARDS:
        raise RequestError(
            f"a version has at most {MAX_SHARDS} shards, got {len(shards)}: choose a larger "
            "target_shard_bytes, or larger partitions, or write all rows again without append"
        )
    shards = list(with_contents(shards, logical.serialize().to_pybytes()))
    return PinnedVersion(
        spec,
        VersionKey(spec.name, _fingerprint(logical, shards)),
        "",
        (PinnedTable(_TABLE, WRITTEN, logical),),
        logical,
        tuple(shards),
        keeps_every_row=True,
    )


def put_of(split: Split) -> tuple[str, int]:
    """Where the shard of a split lies: the name of its put, and its index there."""
    return split.file.path, split.part


def _fingerprint(logical: pa.Schema, shards: Sequence[ShardPlan]) -> str:
    """The hash of the stored rows: the same rows in the same shards are the same version."""
    content: Mapping[str, object] = {
        "schema": logical.to_string(show_field_metadata=True),
        "shards": [[split.num_rows, split.file.etag] for shard in shards for split in shard.splits],
    }
    text = json.dumps(content, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
