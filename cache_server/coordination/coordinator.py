"""The coordinator: knows every version, and decides what each node should hold.

Heartbeats report what the nodes hold. The coordinator moves no rows. Its decisions follow from the
catalogue, the live nodes and their heartbeats, so a restarted coordinator decides the same. Nothing
here knows gRPC or Flight.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.namespace_shares import NamespaceShare
from cache_server.coordination.cache_state import CacheState
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.claims import Claims
from cache_server.coordination.commits import AskHolder, Commits
from cache_server.coordination.draining import Draining
from cache_server.coordination.evictions import Evictions
from cache_server.coordination.forgetting import FindRows, Forgetting
from cache_server.coordination.heartbeats import Heartbeats
from cache_server.coordination.holdings.holder_checks import HolderChecks
from cache_server.coordination.loads import Loads
from cache_server.coordination.readers import Readers
from cache_server.egress.allowed_sources import AllowedSources
from cache_server.functions.declared import Function
from cache_server.jobs.jobs import Jobs


class Coordinator:
    """Decides for the whole cache. Thread-safe.

    Args:
        catalogue: the state that lasts over a restart.
        endpoints: of this coordinator.
        heartbeat_interval_s: of every node.
        node_timeout_s: a node without a heartbeat for this long counts as lost. After a restart of
            the coordinator, every known node has this long to report again.
        lease_s: how long a replaced version is kept after its last read. A new catalogue also keeps
            unknown versions of the nodes for this long: their specs may be loaded again.
        sources: that it may read.
        functions: that SQL may call; None: those of this package.
        checks: which claims of nodes count; `next_check` must be called for it.
        ask_holder: asks nodes for puts; None: what they reported counts.
        shares: of namespaces.
        find_rows: asks a node for the rows to forget.
        clock: monotonic seconds.

    Attributes:
        state: what it knows.
        evictions: make room.
        jobs: that read from the cache.
        damaged: the catalogue entries that cannot be read.
        create, attach, plan: loads; see `Loads`.
        begin_write, write_schema, commit_write, abort_write: writes; see `Commits`.
        get, failure, datasets, summaries, watch, delete, keep, shares, erased_rows: see `Readers`.
        drain, undrain, nodes: every known node, and their drains; see `Draining`.
        forget, forgotten, tombstones, attestation_key: see `Forgetting`.
        orphans, drop_orphans: files of no known version; see `Readers`.
        heartbeat: the report of a node; see `Heartbeats.apply`.
        next_check, apply_check: the second reader; see `Claims`.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        sources: AllowedSources = AllowedSources([""]),  # noqa: B008  it is immutable
        functions: Mapping[str, Function] | None = None,
        endpoints: pb.CoordinatorEndpoints,
        heartbeat_interval_s: float,
        node_timeout_s: float,
        lease_s: float = 600.0,
        checks: HolderChecks | None = None,
        ask_holder: AskHolder | None = None,
        shares: Iterable[NamespaceShare] = (),
        find_rows: FindRows | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.damaged = catalogue.damaged
        self.jobs = Jobs(clock)
        self.state = CacheState(
            catalogue,
            node_timeout_s=node_timeout_s,
            lease_s=lease_s,
            checks=HolderChecks(0) if checks is None else checks,
            clock=clock,
        )
        self._closed = threading.Event()

        claims = Claims(self.state)
        self.next_check, self.apply_check = claims.next_check, claims.apply_check
        self.evictions = Evictions(self.state, shares)
        loads = Loads(self.state, claims, self.evictions, sources, functions)
        self.create, self.attach, self.plan = loads.create, loads.attach, loads.plan
        commits = Commits(self.state, claims, loads, ask_holder)
        self.begin_write, self.write_schema = commits.begin, commits.schema
        self.commit_write, self.abort_write = commits.commit, commits.abort
        readers = Readers(self.state, self.evictions, heartbeat_interval_s, self._closed)
        self.get, self.failure, self.watch = readers.get, readers.failure, readers.watch
        self.datasets, self.summaries = readers.datasets, readers.summaries
        self.delete, self.keep, self.shares = readers.delete, readers.keep, readers.shares
        self.erased_rows = readers.erased_rows
        self.orphans, self.drop_orphans = readers.orphans, readers.drop_orphans
        forgetting = Forgetting(self.state, self.evictions, find_rows)
        self.forget, self.forgotten = forgetting.begin, forgetting.acts
        self.tombstones, self.attestation_key = forgetting.tombstones, forgetting.public_key
        draining = Draining(self.state)
        self.drain, self.undrain, self.nodes = draining.drain, draining.undrain, draining.nodes
        heartbeats = Heartbeats(
            self.state,
            claims,
            draining,
            self.evictions,
            self.jobs,
            endpoints,
            heartbeat_interval_s,
        )
        self.heartbeat = heartbeats.apply

    def close(self) -> None:
        """Closes the sources of running loads, and ends watches. Nothing is decided after it."""
        self._closed.set()
        with self.state.changed:
            for version in self.state.versions.values():
                version.release()
            self.state.keepings.write()
            self.state.mark_changed()

    def watch_backlog(
        self,
        waiting_since: Callable[[], float],
        unread_at: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """Lets no node count as lost while its report may wait; see `Membership`."""
        self.state.membership.waiting_since = waiting_since
        self.state.membership.unread_at = unread_at

    def listen(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` when the nodes have something new to do."""
        self.state.listeners.append(callback)

    def expect(self, dataset: str) -> None:
        """Says that a load of ``dataset`` will be created: until then it is not ready.

        Clients then wait for it, and do not take its name for a wrong one.
        """
        with self.state.changed:
            self.state.expected = dataset

    def knows(self, node_id: str) -> bool:
        """Whether a node is a member that was called back, or that of this process."""
        with self.state.changed:
            return self.state.membership.knows(node_id)
