"""The state that a coordinator keeps on disk, to decide the same after a restart.

<cache_dir>/.catalogue/<dataset>@<fingerprint>.json    one version: its plan and its shards
<cache_dir>/.catalogue/<dataset>@<fingerprint>.log     the groups in which its shards were sealed
<cache_dir>/.members.json                              the nodes that ever joined
<cache_dir>/.proven-members.json                       those that hold a shard for certain
<cache_dir>/.dropped.json                              dropped versions, with their attempts
<cache_dir>/.catalogue-made                            empty; its time is the first start
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pyarrow as pa
from google.protobuf import json_format

from cache_protocol.errors import CacheError, ConfigError, from_proto, to_proto
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.plan.pinned_version import PinnedVersion, split_to_proto
from cache_server.shards.disk import replace_file
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_FORMAT = 4  # of an entry; raise it with every addition


@dataclass(frozen=True)
class SealedSummary:
    """Size, checksum and nulls of a sealed shard; the same on every replica."""

    num_rows: int
    num_bytes: int
    checksum: str
    nulls: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class CatalogueLog:
    """The log of the load of one version; see `LoadLog`.

    Attributes:
        attempt: of the version.
        sealed: the shards of all groups.
    """

    log_id: str
    attempt: int
    groups: tuple[tuple[int, ...], ...]
    sealed: Mapping[int, SealedSummary]


@dataclass(frozen=True)
class CatalogueEntry:
    """One version.

    Attributes:
        sealed: one summary for each shard once all are sealed, else empty.
        created: grows with each request; the newest version of a dataset has the largest.
        was_ready: it was served once, possibly without any shard.
        failure: why its load failed; without secrets.
        owner: the principal that asked for the load; empty: this cache had no authentication.
        homes: see `VersionRecord`.
        log: of this attempt; None if it has no group yet, or cannot be read.
    """

    pinned: PinnedVersion
    attempt: int
    sealed: tuple[SealedSummary, ...]
    created: int = 0
    was_ready: bool = False
    failure: CacheError | None = None
    owner: str = ""
    homes: Sequence[Sequence[str]] = ()
    log: CatalogueLog | None = None


class Catalogue:
    """Files in ``directory``, each replaced atomically. One thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._entries = directory / ".catalogue"
        self._members = directory / ".members.json"
        self._proven = directory / ".proven-members.json"
        self._dropped = directory / ".dropped.json"
        self._made = directory / ".catalogue-made"

    def exists(self) -> bool:
        """Whether a coordinator ever used this directory."""
        return any(path.exists() for path in (self._made, self._entries, self._members))

    def age_s(self) -> float:
        """Seconds since the first coordinator started here; 0 at that start.

        Raises:
            OSError: the start cannot be written.
        """
        if not self._made.exists():
            if self.exists():
                return math.inf  # of a release that did not write it
            self._made.parent.mkdir(parents=True, exist_ok=True)
            self._made.touch()
        return max(0.0, time.time() - self._made.stat().st_mtime)

    def write(
        self,
        pinned: PinnedVersion,
        attempt: int,
        sealed: Sequence[SealedSummary],
        created: int = 0,
        *,
        was_ready: bool = False,
        failure: CacheError | None = None,
        owner: str = "",
        homes: Sequence[Sequence[str]] = (),
    ) -> None:
        """Writes one version; the arguments are the attributes of `CatalogueEntry`.

        Raises:
            OSError: the entry cannot be written; the one before stays.
        """
        entry = pb.CatalogueEntry(
            spec=pinned.spec.to_proto(),
            plan=pinned.to_load_plan(attempt),
            keeps_every_row=pinned.keeps_every_row,
            created=created,
            was_ready=was_ready,
            format=_FORMAT,
            failure=None if failure is None else to_proto(failure),
            owner=owner,
        )
        for shard in pinned.shards or ():
            entry.shards.add(
                splits=[split_to_proto(split) for split in shard.splits],
                content=shard.content,
                homes=homes[shard.index] if homes else (),
            )
        for summary in sealed:
            entry.sealed.add(
                num_rows=summary.num_rows,
                num_bytes=summary.num_bytes,
                checksum=summary.checksum,
                nulls=summary.nulls,
            )
        replace_file(self._path(pinned.key), json_format.MessageToJson(entry, indent=None))

    def write_log(self, key: VersionKey, log: CatalogueLog) -> None:
        """Writes the log of one version.

        Raises:
            OSError: as `write`.
        """
        # Plain JSON: a message of 100,000 shards takes nine times as long.
        groups = [
            [
                (index, shard.num_rows, shard.num_bytes, shard.checksum, dict(shard.nulls))
                for index in group
                for shard in [log.sealed[index]]
            ]
            for group in log.groups
        ]
        content = {"id": log.log_id, "attempt": log.attempt, "groups": groups}
        replace_file(_log_path(self._path(key)), json.dumps(content))

    def forget(self, key: VersionKey) -> None:
        """Removes one version."""
        path = self._path(key)
        path.unlink(missing_ok=True)
        _log_path(path).unlink(missing_ok=True)

    def read(self) -> list[CatalogueEntry]:
        """Every version, oldest first.

        Raises:
            ConfigError: names a file that a newer release wrote, or that cannot be read.
        """
        paths = self._entries.glob("*.json")
        entries = [
            _read_entry(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)
        ]
        return sorted(entries, key=lambda entry: entry.created)

    def write_members(self, node_ids: Iterable[str]) -> None:
        """Writes the ids of the nodes.

        Raises:
            OSError: as `write`.
        """
        replace_file(self._members, json.dumps(sorted(node_ids)))

    def read_members(self) -> list[str]:
        """The ids of the nodes that ever joined; empty if the file cannot be read.

        The nodes join again, but shards may move in the meantime.
        """
        return _read_names(self._members)

    def write_proven(self, node_ids: Iterable[str]) -> None:
        """Writes the ids of the nodes that hold a shard for certain.

        Raises:
            OSError: as `write`.
        """
        replace_file(self._proven, json.dumps(sorted(node_ids)))

    def read_proven(self) -> list[str]:
        """Their ids; all members if no release wrote them before."""
        return _read_names(self._proven if self._proven.exists() else self._members)

    def write_dropped(self, attempts: Mapping[VersionKey, int]) -> None:
        """Writes the dropped versions, with the last attempt of each, in this order.

        Raises:
            OSError: as `write`.
        """
        rows = [[key.dataset, key.fingerprint, attempt] for key, attempt in attempts.items()]
        replace_file(self._dropped, json.dumps(rows))

    def read_dropped(self) -> dict[VersionKey, int]:
        """The dropped versions; empty if the file cannot be read.

        Then reports of nodes about a dropped version may count again.
        """
        if not self._dropped.exists():
            return {}
        try:
            rows = json.loads(self._dropped.read_text(encoding="utf-8"))
            return {
                VersionKey(str(dataset), str(fingerprint)): int(attempt)
                for dataset, fingerprint, attempt in rows
            }
        except (OSError, ValueError, TypeError) as error:
            logger.warning("drops forgotten path=%s reason=%s", self._dropped, error)
            return {}

    def _path(self, key: VersionKey) -> Path:
        return self._entries / f"{key.folder}@{key.fingerprint}.json"


def _read_names(path: Path) -> list[str]:
    if not path.exists():
        return []
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(names, list):
            raise ValueError("not a list")
    except (OSError, ValueError) as error:
        logger.warning("members forgotten path=%s reason=%s", path, error)
        return []
    return [str(name) for name in names]


def _read_entry(path: Path) -> CatalogueEntry:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format", _FORMAT) > _FORMAT:
            raise ValueError(
                f"a newer release wrote it, in format {content['format']}, and this one knows "
                f"{_FORMAT}"
            )
        entry = json_format.ParseDict(content, pb.CatalogueEntry())
        pinned = PinnedVersion.from_catalogue(entry)
    except (
        *(OSError, ValueError, TypeError, AttributeError),
        *(json_format.ParseError, pa.ArrowException, CacheError),
    ) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"cannot read the catalogue entry {path}: {reason}; without the file its dataset is "
            "forgotten and may be loaded again"
        ) from None
    sealed = tuple(
        SealedSummary(s.num_rows, s.num_bytes, s.checksum, dict(s.nulls)) for s in entry.sealed
    )
    failure = from_proto(entry.failure) if entry.HasField("failure") else None
    homes = tuple(tuple(shard.homes) for shard in entry.shards)
    return CatalogueEntry(
        pinned,
        entry.plan.attempt,
        sealed,
        entry.created,
        entry.was_ready,
        failure,
        entry.owner,
        homes if any(homes) else (),
        _read_log(_log_path(path), entry.plan.attempt),
    )


def _log_path(entry: Path) -> Path:
    return entry.with_suffix(".log")


def _read_log(path: Path, attempt: int) -> CatalogueLog | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [[_sealed_from_json(*shard) for shard in group] for group in content["groups"]]
        groups = tuple(tuple(index for index, _ in group) for group in rows)
        found = CatalogueLog(
            str(content["id"]), int(content["attempt"]), groups, dict(chain.from_iterable(rows))
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("log of a load forgotten path=%s reason=%s", path, error)
        return None
    return found if found.attempt == attempt else None


def _sealed_from_json(
    index: int, num_rows: int, num_bytes: int, checksum: str, nulls: Mapping[str, int]
) -> tuple[int, SealedSummary]:
    return int(index), SealedSummary(int(num_rows), int(num_bytes), str(checksum), dict(nulls))
