"""Iceberg tables for tests: a catalogue, and what pyiceberg reads but does not write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table import Table
from pyiceberg.typedef import Record


@contextmanager
def opened_catalog(directory: Path) -> Iterator[SqlCatalog]:
    """A catalogue with one namespace, ``ns``; its tables lie below the directory."""
    opened = SqlCatalog(
        "default",
        uri=f"sqlite:///{directory}/catalog.db",
        warehouse=f"file://{directory}/warehouse",
    )
    with closing(opened):
        opened.create_namespace("ns")
        yield opened


def written_file(
    table: Table, name: str, rows: pa.Table, partition: Record | None = None, **options: object
) -> DataFile:
    """A data file without statistics, written by pyarrow: pyiceberg would change some values.

    Args:
        options: of pyarrow's writer.
    """
    path = Path(table.location().removeprefix("file://"), "data", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path, **options)
    return described_file(path, rows.num_rows, partition=partition)


def described_file(
    path: Path,
    num_rows: int,
    content: DataFileContent = DataFileContent.DATA,
    *,
    format: FileFormat = FileFormat.PARQUET,
    partition: Record | None = None,
    equality_ids: list[int] | None = None,
) -> DataFile:
    """What a manifest says of a file that is there, of rows or of deletes; without statistics."""
    return DataFile.from_args(
        content=content,
        file_path=f"file://{path}",
        file_format=format,
        partition=partition or Record(),
        record_count=num_rows,
        file_size_in_bytes=path.stat().st_size,
        equality_ids=equality_ids,
    )


def append_files(table: Table, *files: DataFile) -> None:
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        for file in files:
            append.append_data_file(file)


def with_deletes(table: Table, deletes: list[DataFile]) -> tuple[str, int]:
    """The metadata location and id of a snapshot that also has these delete files.

    pyiceberg writes none, so its manifest writer is told that this manifest holds deletes.
    """

    class DeleteManifestWriter(ManifestWriterV2):
        def content(self) -> ManifestContent:
            return ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    with table.transaction() as transaction:
        append = transaction.update_snapshot().fast_append()
        path = f"{table.location()}/metadata/deletes.avro"
        writer = DeleteManifestWriter(
            table.spec(),
            table.schema(),
            table.io.new_output(path),
            append.snapshot_id,
            "gzip",
        )
        with writer:
            for delete in deletes:
                entry = ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED,
                    snapshot_id=append.snapshot_id,
                    sequence_number=None,
                    file_sequence_number=None,
                    data_file=delete,
                )
                writer.add_entry(entry)
        added: ManifestFile = writer.to_manifest_file()
        existing = append._existing_manifests

        with patch.object(append, "_existing_manifests", lambda: [*existing(), added]):
            append.commit()
    snapshot = table.refresh().current_snapshot()
    assert snapshot is not None
    return table.metadata_location, snapshot.snapshot_id
