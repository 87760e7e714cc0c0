"""The view and the description of each version, kept until something changes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.channels import rest_s
from cache_server.auth.principals import Viewer
from cache_server.coordination.holdings.holder_checks import HolderChecks
from cache_server.coordination.holdings.holdings import Holdings
from cache_server.coordination.members.clusters import Cluster
from cache_server.coordination.members.membership import Member
from cache_server.coordination.versions.version_record import VersionRecord
from cache_server.plan.pinned_version import PinnedVersion
from cache_server.shards.version_key import VersionKey

# The changes of all versions and of this one, the nodes, and the view of the base.
_AsOf = tuple[int, int, Cluster, Holdings | None]


@dataclass(frozen=True)
class _Description:
    """A description that callers got, with the seconds that it took and when it was made."""

    info: pb.DatasetInfo
    pinned: PinnedVersion
    took_s: float
    made_at: float


class Views:
    """The views of all versions. One thread at a time.

    Args:
        versions: those that the coordinator knows; read at each call.
        members: every node that belongs to the cache; likewise.
        checks: which claims count; likewise.
        lease_s: in the descriptions.
    """

    def __init__(
        self,
        versions: Mapping[VersionKey, VersionRecord],
        members: Mapping[str, Member],
        checks: HolderChecks,
        lease_s: float,
    ) -> None:
        self._versions = versions
        self._members = members
        self._checks = checks
        self._lease_s = lease_s
        self._changes_of_all = 0
        self._views: dict[VersionKey, tuple[_AsOf, Holdings]] = {}
        self._described: dict[VersionKey, _Description] = {}

    def outdate(self, key: VersionKey | None, node_id: str | None = None) -> None:
        """Notes that a version has changed; None: all may have.

        Args:
            node_id: the node whose claims have; None: those of no node, if it is one version.
        """
        if key is None:
            self._changes_of_all += 1
        elif key in self._versions:
            self._versions[key].changes += 1
            if node_id is not None and key in self._views:
                self._views[key][1].note_claims(node_id)

    def forget(self, key: VersionKey) -> None:
        """Forgets a version."""
        self._views.pop(key, None)
        self._described.pop(key, None)

    def look(self, version: VersionRecord, cluster: Cluster) -> Holdings:
        """The view of a version; it is kept if the coordinator knows this version."""
        key = version.pinned.key
        base = None  # a version that is ready has its files: no chain of versions is kept
        if version.base is not None and not version.state.was_served:
            base = self._versions.get(version.base)
        base_view = None if base is None else self.look(base, cluster)
        as_of = self._changes_of_all, version.changes, cluster, base_view
        before: Holdings | None = None
        if (known := self._views.get(key)) is not None and known[1].version is version:
            before = known[1]
            if known[0] == as_of:
                return before
        same = self._changes_of_all, cluster
        view = Holdings(version, self._members, cluster, self._checks, base_view, before, same)
        if self._versions.get(key) is version:
            self._views[key] = as_of, view
        return view

    def describe(self, view: Holdings) -> pb.DatasetInfo:
        """The version for callers; with very many shards, as it was a moment ago.

        While a dataset loads, or a lost node is replaced, shards change one by one. Each caller
        that asks then would have 100,000 shards described.
        """
        if not view.is_described(self._lease_s):
            pinned = view.version.pinned
            before = self._described.get(pinned.key)
            if (
                before is not None
                and before.pinned is pinned
                and before.info.state == view.state != pb.DATASET_STATE_FAILED
                and time.perf_counter() - before.made_at < rest_s(before.took_s)
            ):
                return before.info
            begun_s = time.thread_time()
            info = view.describe(self._lease_s)
            took_s = time.thread_time() - begun_s
            self._described[pinned.key] = _Description(info, pinned, took_s, time.perf_counter())
        return view.describe(self._lease_s)


def as_seen_by(viewer: Viewer, info: pb.DatasetInfo) -> pb.DatasetInfo:
    """The description with the name that a viewer uses; a view's own is never changed."""
    name = viewer.shown(info.spec.name)
    if name == info.spec.name:
        return info
    seen = pb.DatasetInfo()
    seen.CopyFrom(info)
    seen.spec.name = name
    return seen
