"""Finds the rows to forget in every version, and begins the act."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_protocol.errors import NodeUnavailableError, NotReadyError, RequestError, some_of
from cache_protocol.storage.row_sets import encode_rows
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.protocol_version import ERASES_ROWS, told
from cache_server.auth.principals import EVERYTHING, Principal, Viewer
from cache_server.coordination.cache_state import CacheState
from cache_server.coordination.evictions import Evictions
from cache_server.coordination.forgets import row_ids
from cache_server.coordination.versions.version_record import VersionRecord
from cache_server.shards.tombstones import BYTES

FindRows = Callable[[str, pb.FindRowsRequest], pb.FindRowsResponse]
_AT_ONCE = 8


@dataclass(frozen=True)
class _Search:
    """One shard to search; other versions may have the same one."""

    version: VersionRecord
    index: int
    locations: tuple[str, ...]
    request: pb.FindRowsRequest


class Forgetting:
    """Begins acts. Thread-safe.

    Args:
        evictions: load evicted versions again.
        find_rows: asks the node at a location.
    """

    def __init__(self, state: CacheState, evictions: Evictions, find_rows: FindRows | None) -> None:
        self._state = state
        self._evictions = evictions
        self._find_rows = find_rows

    def begin(self, request: pb.ForgetRowsRequest, by: Principal) -> pb.ForgetAct:
        """Records which rows are erased; nodes erase them. Without any, there is no act.

        Raises:
            DatasetNotFoundError: there is no such dataset.
            NotReadyError: something is in the way; says what.
            RequestError: a condition is wrong, or a version lacks a column.
            ConfigError: a node, or this one, cannot do it.
        """
        name = by.viewer.resolve(request.name)
        with self._state.changed:
            key = self._state.forgets.key()
            versions = self._versions(name)
            searches = self._searches(versions, list(request.where), key)
        self._state.notify_listeners()
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="find-rows") as pool:
            answers = list(pool.map(self._search, searches))
        places: dict[str, dict[int, bytes]] = {v.pinned.key.fingerprint: {} for v in versions}
        tombstones: set[bytes] = set()
        for search, answer in zip(searches, answers, strict=True):
            if answer.places:
                places[search.version.pinned.key.fingerprint][search.index] = answer.places
            made = answer.tombstones
            tombstones |= {made[i : i + BYTES] for i in range(0, len(made), BYTES)}
        with self._state.changed:
            if self._versions(name) != versions:
                raise NotReadyError(f"dataset {name!r} has changed meanwhile: ask again")
            found = {
                version.pinned.key.fingerprint: row_ids(
                    places[version.pinned.key.fingerprint], version
                )
                for version in versions
            }
            text = "\n".join(request.where).encode()
            about: dict[str, Any] = {
                "dataset": name,
                "by": by.name,
                "reason": request.reason,
                "condition_mac": hashlib.blake2b(text, key=key, digest_size=32).hexdigest(),
            }
            if request.dry_run or not any(map(len, found.values())):
                return self._nothing_erased(request, by, about, versions, found)
            if request.keep_condition:
                about["conditions"] = list(request.where)
            rows = {name: encode_rows(ids) for name, ids in found.items()}
            number = self._state.forgets.begin(self._state, about, rows, tombstones)
            self._state.mark_changed()
            self._state.settle()
            (message,) = self._state.forgets.messages(self._state, name, number)
        self._state.notify_listeners()
        return message

    def _nothing_erased(
        self,
        request: pb.ForgetRowsRequest,
        by: Principal,
        about: dict[str, Any],
        versions: Sequence[VersionRecord],
        found: dict[str, npt.NDArray[np.int64]],
    ) -> pb.ForgetAct:
        """The answer where rows are only counted, or there are none. Inside the lock.

        The answer to the first call may be lost: the same call again has the same act.

        Raises:
            NotReadyError: another act may have these rows, and is not done.
        """
        forgets, name = self._state.forgets, about["dataset"]
        if not request.dry_run:
            if number := forgets.asked_before(about):
                (act,) = forgets.messages(self._state, name, number)
                return act
            if opened := forgets.open_of(name):
                raise NotReadyError(
                    f"act {opened[0]} on dataset {name!r} may have these rows, and is not done: "
                    f"{some_of(forgets.waits(self._state, opened[0]))}"
                )
        act = pb.ForgetAct(dataset=by.viewer.shown(name), by=by.name, reason=request.reason)
        for version in versions:
            fingerprint = version.pinned.key.fingerprint
            act.versions.add(
                fingerprint=fingerprint,
                erased_rows=len(found[fingerprint]),
                num_rows=(version.row_starts() or (0,))[-1],
            )
        return act

    def acts(self, name: str, number: int, viewer: Viewer = EVERYTHING) -> list[pb.ForgetAct]:
        """The acts that a viewer sees, the latest first."""
        with self._state.changed:
            self._state.settle()
            full = viewer.resolve(name) if name else ""
            found = self._state.forgets.messages(self._state, full, number)
        seen = [act for act in found if viewer.can_read(act.dataset, ())]
        for act in seen:
            act.dataset = viewer.shown(act.dataset)
        return seen

    def tombstones(self, dataset: str) -> pb.GetTombstonesResponse:
        """What loads of a dataset leave out; for nodes."""
        with self._state.changed:
            return self._state.forgets.tombstones(dataset)

    def public_key(self) -> bytes:
        """Of the attestations; empty before the first act."""
        with self._state.changed:
            return self._state.forgets.public_key()

    def _versions(self, name: str) -> list[VersionRecord]:
        """The versions of a dataset; each can be searched.

        Raises:
            NotReadyError: one cannot; says why, and what to do. ConfigError: a node is too old.
        """
        state = self._state
        state.find(name)
        state.versions.require_undamaged(name)
        state.orphans.require_none(name, "")
        nodes = [state.membership.members[each].node for each in sorted(state.membership.alive())]
        if silent := [node.id for node in nodes if not node.flight_location]:
            raise NotReadyError(
                f"node {some_of(silent)} has not reported since the coordinator started: which "
                "rows it has is not known"
            )
        if old := [node.id for node in nodes if told(node.protocol) < ERASES_ROWS]:
            raise RequestError(f"node {some_of(old)} is too old to erase rows: update it first")
        if open_writes := state.writes.open_of(name):
            raise NotReadyError(
                f"write {some_of(open_writes)} of dataset {name!r} is open: its rows are searched "
                "once it is committed. Commit or abort it"
            )
        versions = [v for k, v in state.versions.items() if k.dataset == name]
        versions = [v for v in versions if not v.state.has_failed]
        for version in versions:
            fingerprint = version.pinned.key.fingerprint
            if version.state.is_evicted:
                self._evictions.recall_for_reader(version)
            if not state.holdings(version).is_open():
                raise NotReadyError(
                    f"version {fingerprint} of dataset {name!r} is loading, erasing rows, or away: "
                    "its rows cannot be searched now"
                )
        return versions

    def _searches(
        self, versions: Sequence[VersionRecord], where: Sequence[str], key: bytes
    ) -> list[_Search]:
        """The shards to search, each on a node that serves it."""
        found = []
        for version in versions:
            serving = self._state.holdings(version).holders(serving=True)
            starts = version.row_starts() or ()
            for index in range(version.num_shards or 0):
                if starts[index] == starts[index + 1]:
                    continue
                members = self._state.membership.members
                locations = tuple(
                    members[node].node.flight_location for node in sorted(serving[index])
                )
                request = pb.FindRowsRequest(
                    dataset=version.pinned.key.dataset,
                    fingerprint=version.pinned.key.fingerprint,
                    rows=pb.RowRange(start=starts[index], stop=starts[index + 1]),
                    where=where,
                    key=key,
                )
                found.append(_Search(version, index, locations, request))
        return found

    def _search(self, search: _Search) -> pb.FindRowsResponse:
        """Asks the nodes that serve a shard in turn. Raises the error of the last one."""
        assert self._find_rows is not None
        *others, last = search.locations
        for location in others:
            try:
                return self._find_rows(location, search.request)
            except NodeUnavailableError:
                continue
        return self._find_rows(last, search.request)
