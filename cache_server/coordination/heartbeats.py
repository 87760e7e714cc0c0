"""Takes the reports of nodes, and answers what each should hold."""

from __future__ import annotations

import secrets
from dataclasses import replace
from operator import attrgetter

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import ANYONE, Principal
from cache_server.coordination.cache_state import CacheState
from cache_server.coordination.claims import Claims
from cache_server.coordination.draining import Draining
from cache_server.coordination.evictions import Evictions
from cache_server.coordination.members.membership import Answer, Member
from cache_server.coordination.versions.file_fates import Fate, Holder
from cache_server.jobs.jobs import Jobs
from cache_server.jobs.reports import checked_report

_SOON_S = 0.1  # between heartbeats while the commit of a write waits for them


class Heartbeats:
    """Applies heartbeats. Thread-safe.

    Args:
        draining: moves shards away from nodes that leave.
        evictions: make room that nodes ask for.
        jobs: take the reports of readers.
        endpoints: of this coordinator.
        interval_s: of every node.
    """

    def __init__(
        self,
        state: CacheState,
        claims: Claims,
        draining: Draining,
        evictions: Evictions,
        jobs: Jobs,
        endpoints: pb.CoordinatorEndpoints,
        interval_s: float,
    ) -> None:
        self._state = state
        self._claims = claims
        self._draining = draining
        self._evictions = evictions
        self._jobs = jobs
        self._endpoints = endpoints
        self._interval_s = interval_s
        self._answers = secrets.randbits(62)  # numbered; another coordinator uses other numbers

    def apply(
        self, request: pb.HeartbeatRequest, *, by: Principal | None = None, host: str = ""
    ) -> pb.HeartbeatResponse:
        """Applies the report of a node, and answers what it should hold.

        What the node has of the last answer is not sent again. If the report leaves out what this
        coordinator does not know, the answer asks for all of it, and nothing else happens.

        Args:
            by: sent it. The id of the node is theirs until the node counts as lost. None: the node
                of this process, which is believed.
            host: where a new node was called back; empty: it was not.

        Raises:
            ConfigError: another live node has the same id, or there is no place for the node.
            PermissionDeniedError: another principal reported for this id.
            RequestError: a report of a reader is no valid one.
        """
        reports = [checked_report(report) for report in request.reports]
        with self._state.changed:
            reporter = (by or ANYONE).process
            if not self._state.membership.completes(request, reporter):
                return pb.HeartbeatResponse(resend=True, coordinator=self._endpoints)
            returns = self._returns(request.node.id)
            self._state.forgets.require_erasing(request.node)
            member = self._state.membership.apply_heartbeat(
                request, reporter, is_own=by is None, host=host
            )
            self._take(member, believed=returns or member.is_own)
            self._state.settle()
            refused = self._draining.apply_report(member)
            no_room = self._evictions.make_room(member, request.lacks)
            response = self._as_response(
                member,
                known_to_node=request.answer,
                room_may_come=self._evictions.may_come(request.lacks, no_room),
            )
            response.no_room.extend(no_room)
            if (drain := refused or self._draining.progress(request.node.id)) is not None:
                response.drain.CopyFrom(drain)
            must_write = member.has_news and self._claims.has_unwritten()
        self._jobs.apply(reports)
        response.disagreements.extend(self._jobs.disagreements(reports))
        if must_write:
            self._claims.write_proven()
        return response

    def _returns(self, node_id: str) -> bool:
        """Whether a proven node reports for the first time after a restart of the coordinator."""
        known = self._state.membership.members.get(node_id)
        is_new = known is not None and known.reporter is None
        is_alive = node_id in self._state.membership.alive()
        return is_new and is_alive and self._claims.was_proven(node_id)

    def _take(self, member: Member, *, believed: bool) -> None:
        """Takes what a node reports.

        Args:
            believed: its claims count without a look at the files.
        """
        node_id = member.node.id
        if member.has_news:
            self._claims.apply_news(member, believed=believed)
        self._claims.apply_waiting(node_id)
        if member.has_news and not member.untrusted:
            self._state.writes.apply_report(node_id, member.actual, member.changed)
        if member.has_news:
            self._note_running(member)
        now = self._state.clock()
        for key, actual in () if member.untrusted else member.actual.items():
            if actual.HasField("idle_s") and (version := self._state.versions.get(key)):
                version.last_used = max(version.last_used or 0.0, now - actual.idle_s)
                self._state.keepings.note_read(key.dataset, actual.idle_s)
        self._claims.distrust_liar(node_id)

    def _note_running(self, member: Member) -> None:
        """Notes which loads run in the process of a node, by its report alone."""
        running = {} if member.untrusted else member.running
        for key, version in self._state.versions.items():
            loads = running.get(key, frozenset())
            version.ended.apply_report(member.node.id, member.node.process, loads)

    def _answer(self, member: Member, room_may_come: bool) -> Answer:
        """The answer to a node; the last one, if nothing has changed that it follows from."""
        state, last = self._state, member.answer
        as_of = (
            state.num_changes,
            state.writes.num_changes,
            state.clusters.look(),
            state.membership.is_stable(),
            room_may_come,
        )
        if last is not None and last.as_of == as_of and not member.has_news:
            return last
        if not member.has_news:
            self._note_running(member)  # without the loads that the last answer asked for
        wanted = self._wanted(member)
        wanted.room_may_come |= room_may_come
        if last is None or last.content != wanted:
            self._answers += 1
            last = Answer(self._answers, wanted)
        member.answer = replace(last, as_of=as_of)
        return member.answer

    def _wanted(self, member: Member) -> pb.HeartbeatResponse:
        """What a node should hold, and what else it keeps."""
        state, node_id = self._state, member.node.id
        wanted = pb.HeartbeatResponse(
            room_may_come=not state.membership.is_stable(),
            writes=state.writes.messages(state.versions.moving()),
        )
        for write in wanted.writes:
            write.tombstones = state.forgets.number(write.dataset)
        # A node that is not placed yet keeps what it has.
        is_placed = node_id in state.clusters.look().alive and not member.untrusted
        for version in state.versions.values() if is_placed else ():
            if version.state.is_held:
                view = state.holdings(version)
                if asked := view.loads(node_id):
                    version.ended.note_asked(node_id, asked)
                    state.checks.assign(version.pinned.key, node_id, asked)
                wanted.datasets.append(view.desired(node_id))
        holder = Holder.UNTRUSTED if member.untrusted else Holder.JOINING
        holder = Holder.PLACED if is_placed else holder
        # What an untrusted node holds can be examined, so it changes nothing.
        others = [
            key
            for key in member.actual
            if not (is_placed and key in state.versions and state.versions[key].state.is_held)
        ]
        for key in sorted(others, key=attrgetter("dataset", "fingerprint")):
            name = pb.VersionName(dataset=key.dataset, fingerprint=key.fingerprint)
            fate = state.fate(key, holder)
            if fate is Fate.GONE:
                wanted.gone.append(name)
            elif fate is not Fate.WANTED:
                wanted.kept.append(name)
            if fate is Fate.ORPHANED:
                wanted.orphans.append(name)
        return wanted

    def _as_response(
        self, member: Member, *, known_to_node: int, room_may_come: bool
    ) -> pb.HeartbeatResponse:
        """The answer to a node, without what it has of the last one.

        Args:
            known_to_node: the number of that answer, as the node says.
            room_may_come: others may make the room that the node lacks.
        """
        answer = self._answer(member, room_may_come)
        response = pb.HeartbeatResponse(
            interval_s=self._state.membership.interval_s(
                min(self._interval_s, _SOON_S)
                if self._state.versions.are_moving() or self._state.forgets.open_acts
                else self._interval_s
            ),
            coordinator=self._endpoints,
            report=member.report,
            answer=answer.number,
            unchanged=answer.number == known_to_node,
        )
        if not response.unchanged:
            response.MergeFrom(answer.content)
        return response
