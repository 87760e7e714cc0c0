"""The versions that the coordinator knows, and the one that a caller means."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import CacheError, DatasetNotFoundError, StaleVersionError, some_of
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import EVERYTHING, Viewer
from cache_server.coordination.catalogue import CatalogueEntry
from cache_server.coordination.damaged_entries import DamagedEntries
from cache_server.coordination.versions.version_record import VersionRecord
from cache_server.coordination.versions.writes import write_ids
from cache_server.plan.pinned_version import PinnedVersion
from cache_server.plan.shard_plan import same_shards
from cache_server.plan.written_version import write_id_of
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_MOST_CHOICES = 10_000  # remembered


class Versions(dict[VersionKey, VersionRecord]):
    """Every version of every dataset, by key. One thread at a time.

    Args:
        entries: the versions from before a restart, oldest first.
        now: monotonic seconds.
        damaged: of the catalogue. The bare name of such a dataset means none of its other
            versions, until one is loaded, written or attached to: the damaged one may be newer.

    Attributes:
        last_created: the highest number that a version got; see `next_created`.
    """

    def __init__(
        self, entries: Iterable[CatalogueEntry], now: float, damaged: DamagedEntries
    ) -> None:
        super().__init__()
        self.damaged = damaged
        self.last_created = 0
        for entry in entries:
            self.last_created = entry.created
            version = self[entry.pinned.key] = VersionRecord.from_catalogue(entry)
            if version.state.was_served:  # readers had no time to report
                version.last_used = now
            elif (base := self.base_of(version)) is not None:
                version.reuse(base)
            logger.info("dataset found in the catalogue name=%s", entry.pinned.spec.name)
        self._last_found = self.last_created

    def next_created(self) -> int:
        """A number for the version that becomes the newest."""
        self.last_created += 1
        return self.last_created

    def seen_by(self, viewer: Viewer, dataset: str | None = None) -> list[VersionRecord]:
        """The versions that a viewer may read; all, or those of one dataset."""
        return [
            version
            for key, version in self.items()
            if (dataset is None or key.dataset == dataset)
            and viewer.can_read(key.dataset, version.pinned.spec.readers)
        ]

    def find(
        self, name: str, fingerprint: str = "", viewer: Viewer = EVERYTHING
    ) -> VersionRecord | None:
        """The version with ``fingerprint``, or the newest one, if the viewer may read it.

        Versions that failed come last.
        """
        named = self.seen_by(viewer, viewer.resolve(name))
        meant = (
            version
            for version in named
            if fingerprint == version.pinned.key.fingerprint
            or (not fingerprint and self._may_be_newest(version))
        )
        return max(meant, key=_rank, default=None)

    def _may_be_newest(self, version: VersionRecord) -> bool:
        is_new = version.created > self._last_found
        return is_new or self.damaged.of(version.pinned.key.dataset) is None

    def require_undamaged(self, name: str, fingerprint: str = "") -> None:
        """Refuses a dataset whose newest version is damaged, or a damaged version.

        Args:
            name: the full one.

        Raises:
            LoadError: names what an administrator can do.
        """
        key = VersionKey(name, fingerprint)
        damaged = self.damaged.get(key) if fingerprint else self.damaged.of(name)
        if damaged is not None and self.find(name, fingerprint) is None:
            raise damaged.error(name)

    def not_found(self, name: str, fingerprint: str, viewer: Viewer) -> CacheError:
        """The error for a viewer of a version that `find` does not find."""
        others = self.seen_by(viewer, viewer.resolve(name))
        if others:
            fingerprints = some_of(version.pinned.key.fingerprint for version in others)
            return StaleVersionError(
                f"dataset {name!r} has fingerprint {fingerprints}, not {fingerprint}"
            )
        known = sorted({viewer.shown(each.pinned.key.dataset) for each in self.seen_by(viewer)})
        return DatasetNotFoundError(f"no dataset {name!r}; datasets: {some_of(known, like=name)}")

    def newest_of_each(self, viewer: Viewer) -> list[VersionRecord]:
        """The version that `find` returns of each dataset that a viewer sees, by name."""
        seen = (version for version in self.seen_by(viewer) if self._may_be_newest(version))
        ranked = sorted(seen, key=_rank)
        last = {viewer.shown(version.pinned.key.dataset): version for version in ranked}
        return [last[name] for name in sorted(last)]

    def of_spec(self, spec: DatasetSpec) -> Iterator[VersionRecord]:
        """The versions of a spec; its replicas, readers and secrets do not count."""
        content = _content(spec)
        for version in self.values():
            if version.pinned.spec.name == spec.name and _content(version.pinned.spec) == content:
                yield version

    def has_other_source(self, spec: DatasetSpec) -> bool:
        """Whether the newest version of this name that has not failed has another source.

        Raises:
            LoadError: see `require_undamaged`.
        """
        self.require_undamaged(spec.name)
        version = self.find(spec.name)
        if version is None or version.state.has_failed:
            return False
        return version.pinned.spec.source != spec.source

    def of_write(self, write_id: str) -> VersionRecord | None:
        """The version that a write became, or a later one that has its rows."""
        made = (
            version
            for version in self.values()
            if write_id_of(version.pinned.spec) == write_id
            or (version.pinned.is_written and write_id in write_ids(version.pinned))
        )
        return max(made, key=_rank, default=None)

    def readable(self, dataset: str, given: pb.Secrets, owner: str) -> list[VersionRecord]:
        """The versions whose shards a new one of this owner may share, the newest first."""
        readable = [
            version
            for key, version in self.items()
            if key.dataset == dataset
            and version.state.was_served
            and not version.state.is_evicted
            and version.may_be_read(given, owner)
        ]
        return sorted(readable, key=lambda version: version.created, reverse=True)

    def base_of(self, made: VersionRecord) -> VersionRecord | None:
        """The newest other version that has some of the shards of a new one."""
        for version in self.readable(made.pinned.key.dataset, made.secrets, made.owner):
            if version.pinned.key != made.pinned.key and same_shards(
                made.pinned.shards or (), version.pinned.shards or ()
            ):
                return version
        return None

    def replaced(self, is_ready: Callable[[VersionRecord], bool], since: float) -> list[VersionKey]:
        """The versions that a newer one replaces, and that were not ready or not read since then.

        Damaged ones are earlier than those that were made since the start.

        Args:
            is_ready: whether every shard of a version is served now; asked only where it matters.
            since: monotonic seconds.
        """
        of_dataset: dict[str, list[VersionRecord]] = {}
        for version in self.values():
            of_dataset.setdefault(version.pinned.key.dataset, []).append(version)
        keys: list[VersionKey] = []
        for dataset, versions in of_dataset.items():
            damaged = [key for key in self.damaged if key.dataset == dataset]
            if damaged or len(versions) > 1:
                keys += self._replaced(versions, damaged, is_ready, since)
        return keys

    def _replaced(
        self,
        versions: list[VersionRecord],
        damaged: list[VersionKey],
        is_ready: Callable[[VersionRecord], bool],
        since: float,
    ) -> list[VersionKey]:
        """As `replaced`, of one dataset: the newest version that is ready replaces all before."""
        unread = [version for version in versions if not version.is_read_since(since)]
        oldest = min((version.created for version in unread), default=self.last_created)
        for newer in sorted(versions, key=lambda version: version.created, reverse=True):
            before = damaged if newer.created > self._last_found else []
            if not before and newer.created <= oldest:
                return []
            if is_ready(newer):
                earlier = [each.pinned.key for each in unread if each.created < newer.created]
                return before + earlier
        return []

    def named(self, dataset: str) -> list[VersionKey]:
        """Every version of a dataset, also the damaged ones."""
        return [key for key in (*self, *self.damaged) if key.dataset == dataset]

    def forget(self, key: VersionKey) -> None:
        """Forgets a version, and closes its source."""
        if (version := self.pop(key, None)) is not None:
            version.release()
            version.abort()

    def of_put(self, put: VersionKey) -> VersionRecord | None:
        """The version that needs a put, or had it; of several, one that has not been served."""
        made = [
            version
            for key, version in self.items()
            if key.dataset == put.dataset and put.fingerprint in version.puts
        ]
        return min(made, key=lambda version: version.state.was_served, default=None)

    def are_moving(self) -> bool:
        """Whether the rows of a commit are on their way to its replicas."""
        return any(
            version.pinned.is_written and version.state.is_loading and not version.state.is_away
            for version in self.values()
        )

    def moving(self) -> list[tuple[PinnedVersion, Collection[int]]]:
        """The committed versions whose rows nodes have yet to move, and the shards they share."""
        return [
            (version.pinned, version.reused.keys())
            for version in self.values()
            if version.pinned.is_written and version.state.is_loading
        ]


def newest(versions: Iterable[VersionRecord]) -> VersionRecord | None:
    """The version that was made or attached to last."""
    return max(versions, key=lambda version: version.created, default=None)


def _rank(version: VersionRecord) -> tuple[bool, int]:
    """Ascending: versions that failed come first, then older ones."""
    return not version.state.has_failed, version.created


def _content(spec: DatasetSpec) -> bytes:
    """The content of a spec to compare: without replicas, readers and secrets."""
    content = spec.to_proto()
    content.replicas = 0
    content.ClearField("readers")
    return content.SerializeToString(deterministic=True)


class EpochVersions:
    """The choices of the last minutes. One thread at a time.

    A later start of the same job may choose anew, so a choice does not last longer than the ranks
    of one start are apart.

    Args:
        keep_s: how long a choice holds; the version must be kept as long.
        clock: monotonic seconds.
    """

    def __init__(self, keep_s: float, clock: Callable[[], float]) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._chosen: dict[Hashable, tuple[tuple[str, int], float]] = {}  # the oldest first

    def choose(
        self, asked: Hashable, newest: tuple[str, int], ready: Collection[str]
    ) -> tuple[str, int]:
        """The fingerprint for a job and an epoch, and how many acts of erasing it knows.

        Args:
            asked: names the job, the epoch and the dataset.
            newest: the choice of the first who asks.
            ready: the versions that can be read.
        """
        now = self._clock()
        found, chosen_at = self._chosen.pop(asked, (newest, now))
        if found[0] not in ready or now - chosen_at > self._keep_s:
            found, chosen_at = newest, now
        self._chosen[asked] = found, chosen_at
        if len(self._chosen) > _MOST_CHOICES:
            del self._chosen[next(iter(self._chosen))]
        return found
