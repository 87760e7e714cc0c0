"""Begins, commits and ends writes: the rows that nodes took become a version."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from cache_protocol.errors import NodeUnavailableError, NotReadyError, RequestError, some_of
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.protocol_version import ASKS_FOR_HELD_SHARDS, told
from cache_server.auth.principals import ANYONE, Principal
from cache_server.coordination.cache_state import CacheState
from cache_server.coordination.claims import Claims
from cache_server.coordination.loads import Loads
from cache_server.coordination.versions.version_record import VersionRecord
from cache_server.coordination.versions.writes import Chosen, ChosenRows, new_write
from cache_server.shards.put_key import PutKey
from cache_server.shards.version_key import VersionKey

_ASKED_AT_ONCE = 8  # nodes

# Asks a node, by its Flight location, for the shards that it holds of puts of a dataset right now:
# index -> checksum. Raises a NodeUnavailableError if it does not answer.
AskHolder = Callable[[str, str, Collection[VersionKey]], Mapping[VersionKey, Mapping[int, str]]]


class Commits:
    """Makes versions of writes. Thread-safe.

    Args:
        ask_holder: see `AskHolder`; None: what nodes reported counts.
    """

    def __init__(
        self, state: CacheState, claims: Claims, loads: Loads, ask_holder: AskHolder | None = None
    ) -> None:
        self._state = state
        self._claims = claims
        self._loads = loads
        self._ask_holder = ask_holder

    def begin(
        self, request: pb.BeginWriteRequest, arriving: pa.Schema, *, by: Principal = ANYONE
    ) -> pb.BeginWriteResponse:
        """Begins a write: nodes take rows for it until it is committed, aborted or too old.

        Args:
            request: with the full name of the dataset.
            arriving: schema of the rows.

        Raises:
            ConfigError, RequestError: quotes what is wrong.
            NodeUnavailableError: nodes with rows of the version to append to are away.
            NotReadyError: no node answers yet.
        """
        with self._state.changed:
            takers = self._state.clusters.look().takers & self._state.membership.alive()
            nodes = [
                node
                for node in self._state.membership.nodes()
                if node.id in takers and node.flight_location
            ]
            if not nodes:
                raise NotReadyError("no node can take rows yet")
            before = self._appended_to(request.spec.name) if request.append else None
            catalogue_id = self._state.writes.catalogue_id
        write = new_write(
            request, arriving, before.pinned if before else None, by, catalogue_id=catalogue_id
        )
        with self._state.changed:
            self._state.writes.begin(write)
        self._state.notify_listeners()
        return pb.BeginWriteResponse(
            write_id=write.write_id,
            dataset=by.viewer.shown(write.spec.name),
            schema=write.schema,
            nodes=nodes,
        )

    def schema(self, write_id: str) -> bytes:
        """The schema of an open write; see `Writes.schema`."""
        with self._state.changed:
            return self._state.writes.schema(write_id)

    def commit(
        self, write_id: str, wanted: Collection[Chosen], *, by: Principal = ANYONE
    ) -> pb.DatasetInfo | list[int]:
        """Makes a version of the chosen attempts, all or nothing. A repeated call changes nothing.

        The nodes with the rows are asked before, so none of them has just ended. The version is in
        the catalogue before this returns. Its rows are safe when it is ready, with every replica:
        watch it. Until then the nodes keep what was put. An append has the shards of the newest
        version, too.

        Returns:
            A list of numbers if rows were lost: the partitions to put again, by other attempts.

        Raises:
            RequestError: the write is not open, or the choice is wrong.
            PermissionDeniedError: it is of another namespace.
            LoadError: the catalogue cannot be written, or more replicas do not fit.
            NotReadyError: the version to append to is not ready, or a node with rows does not
                answer and does not count as lost yet: commit again.
            NodeUnavailableError: nodes with rows of the version to append to are away.
        """
        with self._state.changed:
            chosen, _ = self._choose(write_id, wanted, by)
        denied = self._denied(chosen) if isinstance(chosen, ChosenRows) else frozenset()
        with self._state.changed:
            asked = chosen
            chosen, before = self._choose(write_id, wanted, by, denied)
            if not isinstance(chosen, ChosenRows):
                return chosen
            if not isinstance(asked, ChosenRows) or asked.puts != chosen.puts:
                raise NotReadyError("other nodes have the rows by now: commit again")
            write, key = self._state.writes.find(write_id, by), chosen.version.key
            version = self._state.versions.get(key)
            if version is not None and self._is_sound(version):
                info = self._loads.attach_to(version, chosen.version.spec, by=by)
            else:
                made = VersionRecord.written(
                    chosen,
                    self._state.versions.next_created(),
                    attempt=self._state.next_attempt(key),
                    asked_at=self._state.clock(),
                    owner=by.name,
                )
                if before is not None:
                    made.reuse(before)
                info = self._loads.add(made, by)
            self._state.writes.end_committed(write, key)
            self._state.mark_changed()
        self._claims.write_proven()
        self._state.notify_listeners()
        return info

    def _choose(
        self,
        write_id: str,
        wanted: Collection[Chosen],
        by: Principal,
        denied: Collection[tuple[str, PutKey]] = (),
    ) -> tuple[ChosenRows | pb.DatasetInfo | list[int], VersionRecord | None]:
        """The rows of a commit, and the version before them; or the answer to the commit."""
        if (committed := self._committed(write_id)) is not None:
            by.require_own(committed.pinned.key.dataset, "a write")
            return self._state.describe(committed, by.viewer), None
        write = self._state.writes.find(write_id, by)
        before = self._appended_to(write.spec.name) if write.appends else None
        if before is not None and not self._state.holdings(before).is_open():
            raise NotReadyError(f"dataset {write.spec.name!r} is not ready for an append yet")
        alive = self._state.membership.alive()
        pinned = before.pinned if before else None
        return self._state.writes.choose(write, wanted, alive, pinned, denied=denied), before

    def _is_sound(self, version: VersionRecord) -> bool:
        """Whether rows that are written again add nothing to a version."""
        return not version.state.is_away and self._state.holdings(version).load_failure() is None

    def _denied(self, chosen: ChosenRows) -> Set[tuple[str, PutKey]]:
        """Asks the nodes with the chosen rows for them; returns the puts that they do not have.

        Raises:
            NotReadyError: a node does not answer.
        """
        name = chosen.version.spec.name
        wanted: dict[str, dict[PutKey, list[str]]] = {}
        for put, node_id, shards in chosen.puts:
            if shards:
                checksums = [shard.checksum for shard in shards]
                wanted.setdefault(node_id, {})[put] = checksums
        with self._state.changed:
            members = self._state.membership.members
            locations = {
                node_id: members[node_id].node.flight_location
                for node_id in wanted
                if node_id in members
                and not members[node_id].is_own
                # Of an older node, what it reported counts.
                and told(members[node_id].node.protocol) >= ASKS_FOR_HELD_SHARDS
            }
        if self._ask_holder is None or not locations:
            return frozenset()

        def ask(node_id: str) -> Set[tuple[str, PutKey]]:
            keys = [put.version_key(name) for put in wanted[node_id]]
            held = self._ask_holder(locations[node_id], name, keys) if self._ask_holder else {}
            return {
                (node_id, put)
                for put, checksums in wanted[node_id].items()
                if [*held.get(put.version_key(name), {}).values()] != checksums
            }

        with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="ask-holders") as pool:
            answers = {node_id: pool.submit(ask, node_id) for node_id in locations}
        silent = sorted(n for n, a in answers.items() if a.exception() is not None)
        for answer in answers.values():
            if not isinstance(answer.exception(), NodeUnavailableError | None):
                answer.result()
        if silent:
            raise NotReadyError(
                f"dataset {name!r} is not committed yet: node {some_of(silent, ', node ')} has "
                "some of its rows, and does not answer. Its rows are kept: commit again"
            )
        return frozenset().union(*(answer.result() for answer in answers.values()))

    def _committed(self, write_id: str) -> VersionRecord | None:
        """The version that a write became, or a later one that has its rows."""
        key = self._state.writes.committed(write_id)
        known = None if key is None else self._state.versions.get(key)
        return self._state.versions.of_write(write_id) if known is None else known

    def _appended_to(self, name: str) -> VersionRecord | None:
        """The version whose rows an append follows; None: it makes a dataset.

        Raises:
            RequestError: it was loaded. LoadError: it is damaged.
            NodeUnavailableError: nodes with some of its rows are away.
            NotReadyError: nodes may hold one, but the catalogue was lost.
        """
        self._state.versions.require_undamaged(name)
        version = self._state.versions.find(name)
        if version is None:
            self._state.orphans.require_none(name, "")
            return None
        if not version.pinned.is_written:
            raise RequestError(
                f"cannot append to {name!r}: it was loaded, and its next load would drop the rows. "
                "Add files to its source and load it again, or write another dataset"
            )
        if version.state.is_away:
            raise self._state.holdings(version).absence()
        return None if version.state.has_failed else version

    def abort(self, write_id: str, *, by: Principal = ANYONE) -> None:
        """Ends a write: nodes drop its rows. A write that has ended stays as it is.

        Raises:
            PermissionDeniedError: it is of another namespace.
        """
        with self._state.changed:
            self._state.writes.abort(write_id, by)
        self._state.notify_listeners()
