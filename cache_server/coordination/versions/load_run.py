"""A load as a run of lineage: what it reads and makes, by the names of OpenLineage."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from urllib.parse import urlsplit

from cache_protocol.datasets.dataset_spec import DatasetSpec, TableSpec
from cache_protocol.errors import CacheError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire import lineage
from cache_server.plan.pinned_version import PinnedVersion
from cache_server.secrets.redaction import hidden, redacted, secret_values
from cache_server.source.pinned import WRITTEN, PinnedTable, Split

_LOAD, _WRITE = "LOAD", "WRITE"
_WILDCARD = re.compile(r"[*?\[]")
_POSTGRES = ("postgresql", "postgres")
_POSTGRES_PORT = 5432
_SCHEMES = {"s3a": "s3", "gcs": "gs"}
_MOST_FILES = 101  # that are looked at: an event has fewer


@dataclass
class LoadRun:
    """One load, from its plan to its end. Sends nothing where OpenLineage is not set up.

    Attributes:
        run_id: a UUID, the same after a restart of the coordinator.
        owner: the principal that asked for it.
    """

    run_id: str
    pinned: PinnedVersion
    secrets: pb.Secrets
    owner: str = ""
    has_ended: bool = False

    @classmethod
    def of(
        cls,
        pinned: PinnedVersion,
        secrets: pb.Secrets,
        owner: str,
        *attempt: object,
    ) -> LoadRun:
        """The run of a load.

        Args:
            attempt: tells it from every other load of the version.
        """
        name = "/".join(map(str, (pinned.key.dataset, pinned.key.fingerprint, *attempt)))
        return cls(str(uuid.uuid5(uuid.NAMESPACE_OID, name)), pinned, secrets, owner)

    def begin(self) -> None:
        """Says that it began."""
        self._tell("START")

    def complete(self, num_rows: int, num_bytes: int) -> None:
        """Says that the version is ready."""
        self._end("COMPLETE", "", num_rows, num_bytes)

    def fail(self, error: CacheError | None) -> None:
        """Says why it failed."""
        self._end("FAIL", "" if error is None else str(error))

    def abort(self) -> None:
        """Says that the dataset was dropped meanwhile."""
        self._end("ABORT", "")

    def _end(self, state: lineage.State, error: str, *made: int) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._tell(state, error, *made)

    def _tell(
        self,
        state: lineage.State,
        error: str = "",
        num_rows: int | None = None,
        num_bytes: int | None = None,
    ) -> None:
        if (sender := lineage.sender()) is None:
            return
        pinned, secrets = self.pinned, _values(self.secrets)

        def run() -> lineage.Run:
            made = lineage.Table(
                lineage.NAMESPACE,
                pinned.key.dataset,
                pinned.key.fingerprint,
                pinned.logical,
                num_rows=num_rows,
                num_bytes=num_bytes,
            )
            return lineage.Run(
                self.run_id,
                _job(pinned.key.dataset, pinned.is_written),
                _WRITE if pinned.is_written else _LOAD,
                tuple(_inputs(pinned, secrets)),
                (made,),
                _sql(pinned, secrets),
                {"requestedBy": self.owner} if self.owner else {},
            )

        sender.send(state, run, redacted(error, secrets))


def tell_refused(spec: DatasetSpec, error: CacheError) -> None:
    """Tells of a load that failed before it began, such as by a missing source."""
    if (sender := lineage.sender()) is None:
        return
    secrets = _values(spec.secrets_to_proto())
    run = lineage.Run(
        str(uuid.uuid4()),
        _job(spec.name, False),
        _LOAD,
        tuple(
            lineage.Table(*named(source, table)) for table in spec.tables for source in table.source
        ),
        (lineage.Table(lineage.NAMESPACE, spec.name),),
        hidden(spec.sql or "", secrets),
    )
    sender.send("START", lambda: run)
    sender.send("FAIL", lambda: run, redacted(str(error), secrets))


def _job(dataset: str, is_written: bool) -> str:
    return f"{'write' if is_written else 'load'}.{dataset}"


def _values(secrets: pb.Secrets) -> frozenset[str]:
    return frozenset().union(
        *(secret_values(table.values, {}) for table in secrets.tables.values())
    )


def _sql(pinned: PinnedVersion, secrets: frozenset[str]) -> str:
    """The query of a version; empty where it reads a whole table."""
    spec = pinned.spec
    is_query = spec.sql or spec.columns or spec.filter
    return hidden(spec.sql or pinned.sql, secrets) if is_query and not pinned.is_written else ""


def _inputs(pinned: PinnedVersion, secrets: frozenset[str]) -> Iterator[lineage.Table]:
    specs = {table.name: table for table in pinned.spec.tables}
    for index, table in enumerate(pinned.tables):
        spec = specs.get(table.name)
        if spec is None or table.format == WRITTEN:
            continue
        splits: Iterable[Split] = table.splits
        if index == 0 and pinned.shards is not None:
            splits = chain.from_iterable(shard.splits for shard in pinned.shards)
        paths = (redacted(split.file.path, secrets) for split in splits)
        files = tuple(dict.fromkeys(islice(paths, _MOST_FILES)))
        for source in spec.source:
            read = tuple(file for file in files if file.startswith(_folder(source)))
            if _is_postgres(source):  # the server has resolved the name
                source, read = next(iter(files), source), ()
            elif len(spec.source) == 1:
                read = files if files != (source,) else ()
            namespace, name = (redacted(text, secrets) for text in named(source, spec))
            yield lineage.Table(namespace, name, _version(table), files=read)


def _version(table: PinnedTable) -> str:
    """The snapshot of a table that has versions; empty for files."""
    if table.format not in ("iceberg", "delta"):
        return ""
    state = json.loads(table.snapshot)
    return str(state.get("snapshot_id", state.get("version")) or 0)


def _is_postgres(source: str) -> bool:
    return source.partition("://")[0] in _POSTGRES


def named(source: str, table: TableSpec) -> tuple[str, str]:
    """Namespace and name of a source, by the naming conventions of OpenLineage.

    A glob has the name of its folder. Without passwords and queries of URIs.

    Args:
        source: a path or URI; in a catalogue, the name of a table.
    """
    catalog = table.options.get("catalog.uri", "")
    if "://" not in source and catalog:
        return catalog.partition("?")[0], source
    if "://" not in source:
        return "file", _folder(source)
    parts = urlsplit(source)
    place = parts.netloc.rpartition("@")[2]
    if parts.scheme in _POSTGRES:
        port = "" if ":" in place else f":{_POSTGRES_PORT}"
        database, _, relation = parts.path.strip("/").partition("/")
        return f"postgres://{place}{port}", f"{database}.{relation}" if relation else database
    if parts.scheme == "file":
        return "file", _folder(parts.path)
    if parts.scheme in ("abfss", "abfs"):
        place = parts.netloc  # CONTAINER@ACCOUNT
    scheme = _SCHEMES.get(parts.scheme, parts.scheme)
    return f"{scheme}://{place}", _folder(parts.path).strip("/") or "/"


def _folder(path: str) -> str:
    """A path up to the folder of its first wildcard."""
    found = _WILDCARD.search(path)
    return path if found is None else path[: found.start()].rpartition("/")[0] or "/"
