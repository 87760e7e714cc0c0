"""Begins, commits and ends writes: the rows that nodes took become a version."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

from cache_protocol.errors import LoadError, NotReadyError, RequestError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import ANYONE, Principal
from cache_server.coordination.cache_state import CacheState
from cache_server.coordination.claims import Claims
from cache_server.coordination.loads import Loads
from cache_server.coordination.versions.version_record import VersionRecord
from cache_server.coordination.versions.writes import Chosen, new_write


class Commits:
    """Makes versions of writes. Thread-safe."""

    def __init__(self, state: CacheState, claims: Claims, loads: Loads) -> None:
        self._state = state
        self._claims = claims
        self._loads = loads

    def begin(
        self, request: pb.BeginWriteRequest, arriving: pa.Schema, *, by: Principal = ANYONE
    ) -> pb.BeginWriteResponse:
        """Begins a write: nodes take rows for it until it is committed, aborted or too old.

        Args:
            request: with the full name of the dataset.
            arriving: schema of the rows.

        Raises:
            ConfigError, RequestError: quotes what is wrong.
            LoadError: rows of the version to append to are lost.
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
        write = new_write(request, arriving, before.pinned if before else None, by)
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

        The version is in the catalogue before this returns. It is ready when the nodes have moved
        and copied its shards: watch it. An append has the shards of the newest version, too.

        Returns:
            A list of numbers if rows were lost: the partitions to put again, by other attempts.

        Raises:
            RequestError: the write is not open, or the choice is wrong.
            PermissionDeniedError: it is of another namespace.
            LoadError: the catalogue cannot be written, more replicas do not fit, or rows of the
                version to append to are lost.
            NotReadyError: the version to append to is not ready: commit again.
        """
        with self._state.changed:
            if (committed := self._committed(write_id)) is not None:
                by.require_own(committed.pinned.key.dataset, "a write")
                return self._state.describe(committed, by.viewer)
            write = self._state.writes.find(write_id, by)
            before = self._appended_to(write.spec.name) if write.appends else None
            if before is not None and not self._state.holdings(before).is_ready():
                raise NotReadyError(f"dataset {write.spec.name!r} is not ready for an append yet")
            alive = self._state.membership.alive()
            chosen = self._state.writes.choose(
                write, wanted, alive, before.pinned if before else None
            )
            if isinstance(chosen, list):
                return chosen
            key = chosen.version.key
            version = self._state.versions.get(key)
            if version is not None and self._state.holdings(version).load_failure() is None:
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

    def _committed(self, write_id: str) -> VersionRecord | None:
        """The version that a write became, or a later one that has its rows."""
        key = self._state.writes.committed(write_id)
        known = None if key is None else self._state.versions.get(key)
        return self._state.versions.of_write(write_id) if known is None else known

    def _appended_to(self, name: str) -> VersionRecord | None:
        """The version whose rows an append follows; None: it makes a dataset.

        Raises:
            RequestError: it was loaded. LoadError: some of its rows are lost, or it is damaged.
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
        if not version.state.has_failed and (lost := self._state.holdings(version).load_failure()):
            raise LoadError(f"cannot append: {lost}")
        return None if version.state.has_failed else version

    def abort(self, write_id: str, *, by: Principal = ANYONE) -> None:
        """Ends a write: nodes drop its rows. A write that has ended stays as it is.

        Raises:
            PermissionDeniedError: it is of another namespace.
        """
        with self._state.changed:
            self._state.writes.abort(write_id, by)
        self._state.notify_listeners()
