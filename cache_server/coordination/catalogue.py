"""What the coordinator keeps on disk, so that it decides the same after a restart.

<cache_dir>/.catalogue/<dataset>@<fingerprint>.json    one version: its plan and its shards
<cache_dir>/.members.json                              the nodes that ever joined
<cache_dir>/.dropped.json                              versions that were dropped, at which attempt
<cache_dir>/.catalogue-made                            empty; its time is that of the first start
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from google.protobuf import json_format

from cache_protocol.errors import CacheError, ConfigError, from_proto, to_proto
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.plan.pinned_version import PinnedVersion, split_to_proto
from cache_server.shards.disk import replace_file
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_FORMAT = 2  # of an entry; what is added to one raises it


@dataclass(frozen=True)
class SealedSummary:
    """What a sealed shard turned out to be; the same on every replica."""

    num_rows: int
    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class CatalogueEntry:
    """One version.

    Attributes:
        sealed: one summary a shard once all are sealed, else none.
        created: grows with each request: the largest of a dataset is its newest version.
        was_ready: it was served once; there may be no shard in it.
        failure: why it can never be ready, unless it is loaded again; without secrets.
    """

    pinned: PinnedVersion
    attempt: int
    sealed: tuple[SealedSummary, ...]
    created: int = 0
    was_ready: bool = False
    failure: CacheError | None = None


class Catalogue:
    """Files in ``directory``; each is replaced as a whole. One thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._entries = directory / ".catalogue"
        self._members = directory / ".members.json"
        self._dropped = directory / ".dropped.json"
        self._made = directory / ".catalogue-made"

    def exists(self) -> bool:
        """Whether a coordinator was ever here."""
        return any(path.exists() for path in (self._made, self._entries, self._members))

    def age_s(self) -> float:
        """Seconds since the first coordinator started here; counted from now where there was none.

        Raises:
            OSError: that cannot be noted.
        """
        if not self._made.exists():
            if self.exists():
                return math.inf  # of a release that did not note it
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
    ) -> None:
        """Keeps one version; the arguments are those of `CatalogueEntry`.

        Raises:
            OSError: it cannot be written; what was kept before still is.
        """
        entry = pb.CatalogueEntry(
            spec=pinned.spec.to_proto(),
            plan=pinned.to_load_plan(attempt),
            keeps_every_row=pinned.keeps_every_row,
            created=created,
            was_ready=was_ready,
            format=_FORMAT,
            failure=None if failure is None else to_proto(failure),
        )
        for shard in pinned.shards or ():
            entry.shards.add(splits=[split_to_proto(split) for split in shard.splits])
        for summary in sealed:
            entry.sealed.add(
                num_rows=summary.num_rows, num_bytes=summary.num_bytes, checksum=summary.checksum
            )
        replace_file(self._path(pinned.key), json_format.MessageToJson(entry))

    def forget(self, key: VersionKey) -> None:
        """Removes one version."""
        self._path(key).unlink(missing_ok=True)

    def read(self) -> list[CatalogueEntry]:
        """Every version, oldest first.

        Raises:
            ConfigError: naming the file that a newer release wrote, or that cannot be read.
        """
        paths = self._entries.glob("*.json")
        entries = [
            _read_entry(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)
        ]
        return sorted(entries, key=lambda entry: entry.created)

    def write_members(self, node_ids: Iterable[str]) -> None:
        """Keeps the names of the nodes.

        Raises:
            OSError: as `write`.
        """
        replace_file(self._members, json.dumps(sorted(node_ids)))

    def read_members(self) -> list[str]:
        """The names of the nodes that ever joined; none where they cannot be read.

        They will join again; until then more may move than has to.
        """
        if not self._members.exists():
            return []
        try:
            names = json.loads(self._members.read_text(encoding="utf-8"))
            if not isinstance(names, list):
                raise ValueError("no list")
        except (OSError, ValueError) as error:
            logger.warning("members forgotten path=%s reason=%s", self._members, error)
            return []
        return [str(name) for name in names]

    def write_dropped(self, attempts: Mapping[VersionKey, int]) -> None:
        """Keeps which versions were dropped, and the attempt that each had come to, in this order.

        Raises:
            OSError: as `write`.
        """
        rows = [[key.dataset, key.fingerprint, attempt] for key, attempt in attempts.items()]
        replace_file(self._dropped, json.dumps(rows))

    def read_dropped(self) -> dict[VersionKey, int]:
        """The versions that were dropped; none where they cannot be read.

        Then what nodes still hold or listeners of one may count once more.
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
        return self._entries / f"{key.dataset}@{key.fingerprint}.json"


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
    sealed = tuple(SealedSummary(s.num_rows, s.num_bytes, s.checksum) for s in entry.sealed)
    failure = from_proto(entry.failure) if entry.HasField("failure") else None
    return CatalogueEntry(
        pinned, entry.plan.attempt, sealed, entry.created, entry.was_ready, failure
    )
