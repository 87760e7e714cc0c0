"""Files that nodes hold, but no version or write of the coordinator has.

The catalogue was lost, and the versions may be requested again; or their entries are damaged; or
they were dropped, and nodes that were away still hold them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from cache_protocol.errors import NotReadyError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.members.membership import Membership
from cache_server.coordination.versions.version_record import VersionRecord
from cache_server.shards.put_key import PutKey
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_REMEMBERED = 1000  # dropped versions; what a node still holds of an older one is an orphan


class Orphans:
    """Versions that the nodes keep until they are loaded again or dropped. One thread at a time.

    Args:
        versions: those that the coordinator knows; read at each call.
        membership: the nodes and their reports.
        catalogue: keeps the dropped versions over a restart.
        lease_s: how long a new catalogue expects nodes that hold versions of an earlier one.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        versions: Mapping[VersionKey, VersionRecord],
        membership: Membership,
        catalogue: Catalogue,
        *,
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._versions = versions
        self._membership = membership
        self._catalogue = catalogue
        self._clock = clock
        self._new_until = clock() + lease_s - catalogue.age_s()
        self._dropped = catalogue.read_dropped()

    def drop(self, *keys: VersionKey) -> None:
        """Marks versions as dropped: nodes need not keep them.

        Call it before the coordinator forgets a version.
        """
        if not keys:
            return
        for key in keys:
            attempt = self._newest_attempt(key)
            self._dropped.pop(key, None)  # moves it to the end
            self._dropped[key] = attempt
        for key in [*self._dropped][:-_REMEMBERED]:
            del self._dropped[key]
        try:
            self._catalogue.write_dropped(self._dropped)
        except OSError as error:  # matters only after a restart
            logger.error("dropped versions not written reason=%s", error.strerror)

    def is_dropped(self, key: VersionKey) -> bool:
        """Whether a user dropped or replaced a version, and it is remembered."""
        return key in self._dropped

    def find(self, name: str | None = None) -> set[VersionKey]:
        """The versions without an entry to keep; all of them, or those of one dataset."""
        return {
            key
            for member in self._membership.members.values()
            for key in member.actual
            if name in {None, key.dataset}
            and key not in self._versions
            and key not in self._dropped
            and PutKey.of(key.fingerprint) is None
        }

    def attempt(self, key: VersionKey) -> int:
        """The attempt for the load of a version that the coordinator does not know.

        For an orphan it is the attempt of the nodes, so that they keep their shards. For a dropped
        or failed version it is a new one, so that old reports do not count.
        """
        attempt = self._newest_attempt(key)
        failed = any(
            _reports_failure(report)
            for report in self._last_reports(key)
            if report.attempt == attempt
        )
        return attempt if key in self.find() and not failed else attempt + 1

    def _newest_attempt(self, key: VersionKey) -> int:
        """The newest known attempt; -1 if there was none."""
        attempts = [report.attempt for report in self._last_reports(key)]
        if key in self._versions:
            attempts.append(self._versions[key].attempt)
        return max(*attempts, self._dropped.get(key, -1), -1)

    def _last_reports(self, key: VersionKey) -> list[pb.ActualDataset]:
        members = self._membership.members.values()
        return [member.actual[key] for member in members if key in member.actual]

    def require_none(self, name: str, fingerprint: str) -> None:
        """Asks the caller to retry while nodes may still hold such a version.

        Raises:
            NotReadyError: there may be such an orphan.
        """
        wanted = VersionKey(name, fingerprint)
        orphans = self.find(name)
        lost = wanted in orphans if fingerprint else bool(orphans)
        # A caller that names a version has read it; its nodes may not have reported yet.
        known = any(key.dataset == name for key in self._versions)
        read = fingerprint and not known and self._is_new() and wanted not in self._dropped
        if lost or read:
            raise NotReadyError(
                f"dataset {name!r} is not known yet to a coordinator that was replaced: load its "
                "spec again, or write it again, or drop it (cachectl ls --orphans)"
            )

    def _is_new(self) -> bool:
        return self._clock() < self._new_until


def _reports_failure(report: pb.ActualDataset) -> bool:
    return bool(report.failure) or any(shard.failure for shard in report.shards)
