"""Versions that nodes hold and the coordinator does not know, because its catalogue was lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cache_server.membership import Membership
from cache_server.planning import VersionKey
from cache_server.version_record import Version
from protos.errors import NotReadyError


class Unclaimed:
    """What a coordinator leaves alone until its spec is given again. One thread at a time.

    Args:
        versions: those that the coordinator knows, as they are at each call.
        membership: what its nodes hold.
        lease_s: so long a new catalogue, and a version whose rows were read, is waited for.
        catalogue_age_s: how long there has been a catalogue.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        versions: Mapping[VersionKey, Version],
        membership: Membership,
        *,
        lease_s: float,
        catalogue_age_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._versions = versions
        self._membership = membership
        self._lease_s = lease_s
        self._clock = clock
        self._new_until = clock() + lease_s - catalogue_age_s
        self._dropped: set[VersionKey] = set()

    def drop(self, *keys: VersionKey) -> None:
        """Nobody waits for these any more, whatever nodes still hold of them."""
        self._dropped.update(keys)

    def held(self, name: str | None = None) -> set[VersionKey]:
        """Those that may be wanted, all or of one dataset."""
        is_new = self._is_new()
        held = {
            key
            for member in self._membership.members.values()
            for key, actual in member.actual.items()
            if name in {None, key.dataset}
            and (is_new or (actual.HasField("idle_s") and actual.idle_s < self._lease_s))
        }
        return held - self._versions.keys() - self._dropped

    def attempt(self, key: VersionKey) -> int:
        """The attempt of which nodes hold shards; 0 where they hold none."""
        if key not in self.held():
            return 0
        members = self._membership.members.values()
        return max(member.actual[key].attempt for member in members if key in member.actual)

    def require_none(self, name: str, fingerprint: str) -> None:
        """Has whoever asks for such a version come again.

        Raises:
            NotReadyError: there may be one.
        """
        wanted = VersionKey(name, fingerprint)
        there = self.held(name)
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
