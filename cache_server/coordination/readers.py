"""Answers callers that read: which versions there are, and where their rows lie."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple

from cache_protocol.errors import CacheError
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.channels import rest_s
from cache_server.auth.principals import EVERYTHING, Viewer
from cache_server.coordination.cache_state import CacheState
from cache_server.coordination.evictions import Evictions
from cache_server.coordination.holdings.views import as_seen_by
from cache_server.coordination.versions.file_fates import Fate
from cache_server.coordination.versions.version_record import VersionRecord
from cache_server.coordination.versions.versions import EpochVersions, newest
from cache_server.shards.version_key import VersionKey

_WATCH_S = 0.5
_MOST_ERASED_BYTES = 8 << 20  # of an answer, or one act


class Readers:
    """What callers see of the versions. Thread-safe.

    Args:
        evictions: load evicted versions again.
        interval_s: the longest time between two states of a watch.
        closed: ends the watches.
    """

    def __init__(
        self, state: CacheState, evictions: Evictions, interval_s: float, closed: threading.Event
    ) -> None:
        self._state = state
        self._evictions = evictions
        self._interval_s = interval_s
        self._closed = closed
        self._epochs = EpochVersions(state.lease_s, state.clock)

    def get(
        self,
        name: str,
        fingerprint: str = "",
        *,
        lease: bool = False,
        viewer: Viewer = EVERYTHING,
        follow: pb.EpochOfJob | None = None,
    ) -> pb.DatasetInfo:
        """The version with ``fingerprint``, or the newest one of ``name`` that has not failed.

        A failed load does not affect readers of an older version. If every version failed, the
        newest one is returned, with its error.

        Args:
            lease: its rows are about to be read, so it is kept for a while after it is replaced,
                and loaded again if it was evicted.
            viewer: who asks; other datasets do not exist for it.
            follow: the version that a job reads in an epoch, and the acts of erasing that it knows;
                with a fingerprint, only these.

        Raises:
            DatasetNotFoundError: lists the existing datasets.
            StaleVersionError: ``name`` exists, but not with this fingerprint.
            NotReadyError: nodes may hold it, but the catalogue was lost: see `Orphans`.
            LoadError: its catalogue entry is damaged.
        """
        with self._state.changed:
            erasures = None
            if follow is not None:
                fingerprint, erasures = self._of_epoch(name, fingerprint, follow, viewer)
            version = self._state.find(name, fingerprint, viewer)
            is_recalled = False
            if lease:
                version.last_used = self._state.clock()
                self._state.keepings.note_read(version.pinned.key.dataset)
                is_recalled = self._evictions.recall_for_reader(version)
            info = self._state.describe(version, viewer)
            info = info if lease else self._with_keeping(info, version)
            if erasures is not None and erasures != info.erasures:
                agreed = pb.DatasetInfo()
                agreed.CopyFrom(info)
                agreed.erasures, info = erasures, agreed
        if is_recalled:
            self._state.notify_listeners()
        return info

    def erased_rows(
        self, name: str, fingerprint: str, start: int, viewer: Viewer = EVERYTHING
    ) -> pb.GetErasedRowsResponse:
        """The erased rows of a version, by act, from an act on; as many as fit in an answer.

        Raises:
            DatasetNotFoundError, StaleVersionError, NotReadyError, LoadError: as `get`.
        """
        with self._state.changed:
            version = self._state.find(name, fingerprint, viewer)
            left = version.erasures.acts[start:]
        answer = pb.GetErasedRowsResponse(fingerprint=version.pinned.key.fingerprint)
        num_bytes = 0
        for act in left:
            num_bytes += len(act.rows)
            if answer.acts and num_bytes > _MOST_ERASED_BYTES:
                answer.more = True
                break
            answer.acts.add(number=act.number, rows=act.rows)
        return answer

    def keep(
        self,
        name: str,
        *,
        pinned: bool | None = None,
        priority: int | None = None,
        viewer: Viewer = EVERYTHING,
    ) -> pb.DatasetInfo:
        """Pins a dataset, or sets its priority; see `Evictions.keep`."""
        with self._state.changed:
            version = self._evictions.keep(name, pinned=pinned, priority=priority, viewer=viewer)
            return self._with_keeping(self._state.describe(version, viewer), version)

    def shares(self, viewer: Viewer = EVERYTHING) -> list[pb.NamespaceShare]:
        """What namespaces hold and may hold, of those that a viewer sees."""
        with self._state.changed:
            return self._evictions.shares(viewer)

    def _with_keeping(self, info: pb.DatasetInfo, version: VersionRecord) -> pb.DatasetInfo:
        """A copy of a description, with what decides how long the dataset is kept."""
        keeping = self._state.keepings.of(version.pinned.key.dataset)
        kept = pb.DatasetInfo()
        kept.CopyFrom(info)
        kept.pinned, kept.priority, kept.load_s = keeping.pinned, keeping.priority, version.load_s
        if keeping.last_read is not None:
            kept.last_read_s = keeping.last_read
        return kept

    def _of_epoch(
        self, name: str, fingerprint: str, follow: pb.EpochOfJob, viewer: Viewer
    ) -> tuple[str, int | None]:
        """The version of an epoch, and how many acts of erasing it knows of it.

        Args:
            fingerprint: the version, if only the acts are asked.

        Returns:
            An empty fingerprint and None if there is no ready version.
        """
        full = viewer.resolve(name)
        ready = {
            version.pinned.key.fingerprint: version
            for version in self._state.versions.seen_by(viewer, full)
            if version.state.was_served and fingerprint in ("", version.pinned.key.fingerprint)
        }
        if (latest := newest(ready.values())) is None:
            return fingerprint, None
        self._state.versions.require_undamaged(full)
        place = (follow.job, follow.epoch, follow.amended_at, follow.amendment)
        asked = (viewer.namespace, full, fingerprint, place)
        found = latest.pinned.key.fingerprint, len(latest.erasures.acts)
        return self._epochs.choose(asked, found, ready.keys())

    def failure(self, name: str, fingerprint: str) -> CacheError | None:
        """Why a version cannot be served; None while it is served or loaded.

        Raises:
            DatasetNotFoundError, StaleVersionError: it was dropped.
        """
        with self._state.changed:
            return self._state.holdings(self._state.find(name, fingerprint)).failure()

    def datasets(self, viewer: Viewer = EVERYTHING) -> list[pb.DatasetInfo]:
        """The version that `get` returns of each dataset that a viewer sees, by name."""
        with self._state.changed:
            known = self._state.versions.newest_of_each(viewer)
            return self._state.versions.damaged.among(
                [self._with_keeping(self._state.describe(v, viewer), v) for v in known], viewer
            )

    def summaries(self, viewer: Viewer = EVERYTHING) -> list[pb.DatasetInfo]:
        """Like `datasets`, without schemas, shards and nodes; cheap, for the status page."""
        with self._state.changed:
            summaries = []
            for version in self._state.versions.newest_of_each(viewer):
                summary = self._state.holdings(version).summarize()
                if version.asked_at is not None and summary.state == pb.DATASET_STATE_LOADING:
                    summary.progress.elapsed_s = self._state.clock() - version.asked_at
                summaries.append(as_seen_by(viewer, summary))
            return self._state.versions.damaged.among(summaries, viewer)

    def delete(self, name: str, *, viewer: Viewer = EVERYTHING) -> None:
        """Forgets every version of ``name``; nodes remove the shards at their next heartbeat.

        Raises:
            DatasetNotFoundError: lists the existing datasets.
        """
        full = viewer.resolve(name)
        with self._state.changed:
            orphans = self._orphans(viewer, full)
            if not orphans and self._state.versions.damaged.of(full) is None:
                self._state.find(name, viewer=viewer)
            self._state.orphans.drop(*orphans)
            self._state.forget(*self._state.versions.named(full))
            if full == self._state.expected:
                self._state.expected = None
            self._state.keepings.forget(full)
            self._state.mark_changed()
        self._state.notify_listeners()

    def orphans(self, viewer: Viewer = EVERYTHING, name: str = "") -> list[pb.Orphan]:
        """The files on live nodes that belong to no known version or write, by name.

        Args:
            name: of a dataset; empty: all that the viewer's namespace has.
        """
        with self._state.changed:
            return list(self._orphans(viewer, viewer.resolve(name) if name else "").values())

    def drop_orphans(self, viewer: Viewer = EVERYTHING, name: str = "") -> list[pb.Orphan]:
        """Lets the nodes remove `orphans`, also those that are away now; returns what they hold."""
        with self._state.changed:
            found = self._orphans(viewer, viewer.resolve(name) if name else "")
            self._state.orphans.drop(*found)
            self._state.mark_changed()
        self._state.notify_listeners()
        return list(found.values())

    def _orphans(self, viewer: Viewer, name: str) -> dict[VersionKey, pb.Orphan]:
        found: dict[VersionKey, pb.Orphan] = {}
        alive = self._state.membership.alive()
        for node_id, member in sorted(self._state.membership.members.items()):
            for key, actual in member.actual.items() if node_id in alive else ():
                shards = [shard for shard in actual.shards if shard.sealed]
                if (
                    not shards
                    or (name and key.dataset != name)
                    or not viewer.can_read(key.dataset, ())
                    or self._state.fate(key) is not Fate.ORPHANED
                ):
                    continue
                orphan = found.setdefault(
                    key,
                    pb.Orphan(dataset=viewer.shown(key.dataset), fingerprint=key.fingerprint),
                )
                orphan.node_ids.append(node_id)
                orphan.num_shards += len(shards)
                orphan.num_bytes += sum(shard.num_bytes for shard in shards)
        return {key: found[key] for key in sorted(found, key=astuple)}

    def watch(
        self,
        name: str,
        fingerprint: str,
        active: Callable[[], bool],
        *,
        viewer: Viewer = EVERYTHING,
    ) -> Iterator[pb.DatasetInfo]:
        """The dataset at every change, until it is ready or failed, or ``active()`` is false.

        While it loads, it has no shards and nodes. It is repeated at least every half second.

        Raises:
            DatasetNotFoundError, StaleVersionError, NotReadyError: as `get`.
        """
        while active() and not self._closed.is_set():
            with self._state.changed:
                seen, begun = self._state.num_changes, time.perf_counter()
                version = self._state.find(name, fingerprint, viewer)
                info = self._state.holdings(version).summarize()
                loads = info.state == pb.DATASET_STATE_LOADING
                info = as_seen_by(viewer, info) if loads else self._state.describe(version, viewer)
                took_s = time.perf_counter() - begun
            yield info
            if not loads:
                return
            self._closed.wait(rest_s(took_s))
            with self._state.changed:
                if self._state.num_changes == seen and not self._closed.is_set():
                    self._state.changed.wait(min(self._interval_s, _WATCH_S))
