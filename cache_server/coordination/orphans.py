"""Versions that nodes hold or speak of and the coordinator does not know.

Because its catalogue was lost, so that they may be wanted again; or because they were dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from cache_protocol.errors import NotReadyError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.membership import Membership
from cache_server.coordination.version_record import VersionRecord
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_REMEMBERED = 1000  # drops: what nodes still hold or listeners of an older one is long past


class Orphans:
    """What a coordinator leaves alone until its spec is given again. One thread at a time.

    Args:
        versions: those that the coordinator knows, as they are at each call.
        membership: what its nodes hold.
        catalogue: keeps what was dropped over a restart.
        lease_s: so long a new catalogue, and a version whose rows were read, is waited for.
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
        self._lease_s = lease_s
        self._clock = clock
        self._new_until = clock() + lease_s - catalogue.age_s()
        self._dropped = catalogue.read_dropped()

    def drop(self, *keys: VersionKey) -> None:
        """Nobody waits for these any more, whatever nodes still hold or listeners of them.

        Of those that the coordinator knows: called before it forgets them.
        """
        if not keys:
            return
        for key in keys:
            attempt = self._newest_attempt(key)
            self._dropped.pop(key, None)  # to its end
            self._dropped[key] = attempt
        for key in [*self._dropped][:-_REMEMBERED]:
            del self._dropped[key]
        try:
            self._catalogue.write_dropped(self._dropped)
        except OSError as error:  # it is missed after a restart only
            logger.error("drops not kept reason=%s", error.strerror)

    def find(self, name: str | None = None) -> set[VersionKey]:
        """Those that may be wanted, all or of one dataset."""
        is_new = self._is_new()
        held = {
            key
            for member in self._membership.members.values()
            for key, actual in member.actual.items()
            if name in {None, key.dataset}
            and (is_new or (actual.HasField("idle_s") and actual.idle_s < self._lease_s))
        }
        return held - self._versions.keys() - self._dropped.keys()

    def attempt(self, key: VersionKey) -> int:
        """The attempt at which a version that is not known is to be loaded.

        Of one that is held it is that of the nodes, which keep their shards then. Otherwise it is
        one that no node can speak of yet, as of a version that was dropped or failed.
        """
        attempt = self._newest_attempt(key)
        failed = any(
            _reports_failure(said) for said in self._last_report(key) if said.attempt == attempt
        )
        return attempt if key in self.find() and not failed else attempt + 1

    def _newest_attempt(self, key: VersionKey) -> int:
        """-1 where there was none."""
        attempts = [said.attempt for said in self._last_report(key)]
        if key in self._versions:
            attempts.append(self._versions[key].attempt)
        return max(*attempts, self._dropped.get(key, -1), -1)

    def _last_report(self, key: VersionKey) -> list[pb.ActualDataset]:
        members = self._membership.members.values()
        return [member.actual[key] for member in members if key in member.actual]

    def require_none(self, name: str, fingerprint: str) -> None:
        """Has whoever asks for such a version come again.

        Raises:
            NotReadyError: there may be one.
        """
        wanted = VersionKey(name, fingerprint)
        there = self.find(name)
        lost = wanted in there if fingerprint else bool(there)
        # Whoever names a version has read it; its nodes may not have reported yet.
        known = any(key.dataset == name for key in self._versions)
        read = fingerprint and not known and self._is_new() and wanted not in self._dropped
        if lost or read:
            raise NotReadyError(
                f"dataset {name!r} is not known yet to a coordinator that was replaced: load its "
                "spec again"
            )

    def _is_new(self) -> bool:
        return self._clock() < self._new_until


def _reports_failure(said: pb.ActualDataset) -> bool:
    return bool(said.failure) or any(shard.failure for shard in said.shards)
