"""From a spec to a version: what exactly is to be loaded, pinned, fingerprinted and cut.

Reads listings, footers and first rows through `sources` and `loader`; knows no node.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from cache_server import loader, sources
from cache_server.packing import storage_schema
from cache_server.planning import ShardPlan, SourceFile, Split, VersionKey, cut_shards
from protos.cache.v1 import cache_pb2 as pb
from protos.errors import LoadError
from protos.layout import schema_from_bytes
from protos.spec import DatasetSpec

_STORAGE_FORMAT = 2  # part of every fingerprint: a change of the stored bytes is another version


@dataclass(frozen=True)
class VersionPlan:
    """One version of a dataset, as planned from its pinned source.

    Attributes:
        spec: as last asked for; `replicas` may differ between two that name the same version.
        format, sql, source_schema: how each split is read.
        logical: schema of the stored columns.
        shards: in row order.
        keeps_every_row: the footers tell the number of rows exactly.
    """

    spec: DatasetSpec
    key: VersionKey
    format: str
    sql: str
    source_schema: pa.Schema
    logical: pa.Schema
    shards: tuple[ShardPlan, ...]
    keeps_every_row: bool

    @property
    def max_rows(self) -> int:
        """Rows before any filter, of the shards whose format tells."""
        return sum(shard.max_rows or 0 for shard in self.shards)

    def to_load_plan(self, attempt: int) -> pb.LoadPlan:
        """What a node needs to load any shard of this version."""
        return pb.LoadPlan(
            dataset=self.key.dataset,
            fingerprint=self.key.fingerprint,
            format=self.format,
            sql=self.sql,
            source_schema=self.source_schema.serialize().to_pybytes(),
            logical_schema=self.logical.serialize().to_pybytes(),
            attempt=attempt,
            keeps_every_row=self.keeps_every_row,
        )

    @classmethod
    def from_catalogue(cls, entry: pb.CatalogueEntry) -> VersionPlan:
        """The plan that a catalogue entry keeps."""
        return cls(
            DatasetSpec.from_proto(entry.spec),
            VersionKey(entry.plan.dataset, entry.plan.fingerprint),
            entry.plan.format,
            entry.plan.sql,
            schema_from_bytes(entry.plan.source_schema),
            schema_from_bytes(entry.plan.logical_schema),
            tuple(
                ShardPlan(index, tuple(split_from_proto(split) for split in shard.splits))
                for index, shard in enumerate(entry.shards)
            ),
            entry.keeps_every_row,
        )


def plan_version(spec: DatasetSpec) -> VersionPlan:
    """Finds the files of ``spec``, checks its query against them and cuts them into shards.

    Raises:
        LoadError: the source cannot be read.
        RequestError: the query cannot be run.
    """
    message = spec.to_proto()
    format, files = sources.find_files(message.source, spec.format)
    footers: tuple[pq.FileMetaData, ...] = ()
    if format == "parquet":
        source_schema, footers = sources.parquet_schema(files)
    else:
        source_schema = _inferred_schema(files, format)
    text = loader.query_text(message.sql, tuple(message.columns), message.filter)
    query = loader.check_query(text, source_schema)
    logical = storage_schema(query.schema)
    if format == "parquet":
        splits = sources.parquet_splits(files, footers, logical, message.target_shard_bytes)
    else:
        splits = sources.text_splits(files, format, message.target_shard_bytes)
    if not query.only_drops_rows:
        # An unnest may make any number of rows of one: the footer is no upper bound.
        splits = tuple(replace(split, num_rows=None) for split in splits)
    return VersionPlan(
        spec,
        VersionKey(spec.name, _fingerprint(message, files, format, query.sql)),
        format,
        query.sql,
        source_schema,
        logical,
        cut_shards(splits, message.target_shard_bytes),
        query.keeps_every_row and format == "parquet",
    )


def _inferred_schema(files: Sequence[SourceFile], format: str) -> pa.Schema:
    """The schema that all files share.

    Rows of CSV and Arrow files are read by the position of their columns, so every file must name
    the same ones. JSON is read by name, and a name that a file lacks is null.
    """
    filled = [file for file in files if file.size]
    if not filled:
        raise LoadError(f"{files[0].path} is empty: it does not even name its columns")
    first = loader.infer_schema(filled[0], format)
    for file in filled[1:] if format != "json" else ():
        schema = loader.infer_schema(file, format)
        # The types that a sample of a CSV suggests may differ; reading it will tell.
        same = schema.names == first.names if format == "csv" else schema.equals(first)
        if not same:
            raise LoadError(
                f"{file.path} has other columns than {filled[0].path}: "
                f"{sources.difference(first, schema)}"
            )
    return first


def split_to_proto(split: Split) -> pb.Split:
    """The message of a planner's split."""
    return pb.Split(
        file=pb.SourceFile(
            path=split.file.path, size=split.file.size, mtime_ns=split.file.mtime_ns
        ),
        part=split.part,
        parts=split.parts,
        num_rows=split.num_rows or 0,
        num_rows_known=split.num_rows is not None,
        estimated_bytes=split.estimated_bytes,
    )


def split_from_proto(split: pb.Split) -> Split:
    """The planner's split of a message."""
    file = SourceFile(split.file.path, split.file.size, split.file.mtime_ns)
    rows = split.num_rows if split.num_rows_known else None
    return Split(file, split.part, split.parts, rows, split.estimated_bytes)


def _fingerprint(spec: pb.DatasetSpec, files: tuple[SourceFile, ...], format: str, sql: str) -> str:
    """Of everything that decides the stored bytes and how they are cut; not of replicas."""
    content = {
        "storage_format": _STORAGE_FORMAT,
        "format": format,
        "sql": sql,
        "target_shard_bytes": spec.target_shard_bytes,
        "files": [[file.path, file.size, file.mtime_ns] for file in files],
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
