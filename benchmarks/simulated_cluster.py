"""A simulated cluster, decided by the real planners: nodes, ranks, network, lost and slow nodes.

Placement, order, routing and window sizes are the code of this project; clock, processors and
network are virtual. One seed gives one result. Knows nothing of this machine.

A queue serves in order of arrival. A processor with several cores is one queue that is as many
times as fast, but work never ends before one core could have done it. A node takes requests and
messages one by one, as Python does; its other work uses all cores. Windows are asked for as by
`fetch_ahead`, on streams that are used as long as those of a reader.

The ranks of a sample have all of their real row ids. Each other rank asks for as many rows of each
node as one of those does.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.costs import Costs
from benchmarks.scale import BATCH_SIZE, ROWS_PER_SHARD, SCHEMA
from cache_client.flight.connections import REQUEST_TIMEOUT_S
from cache_client.flight.routing import NodeRef, Router, ShardMap
from cache_client.order.order import EpochOrder, StepPlan
from cache_client.reading.reader import _FIRST_WAIT_S, _LONGEST_WAIT_S
from cache_client.reading.window_sizes import WindowSizes
from cache_server.config import NodeConfig
from cache_server.coordination.members import placement

Counts = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
NIC_BYTES_PER_S = 100e9 / 8
NIC_SHARE = 0.8  # of a network card, that may be used


@dataclass(frozen=True)
class Machines:
    """What is assumed of the machines; not measured.

    Attributes:
        node_cores, rank_cores: of a node, and of a rank.
        one_machine: all nodes share the cores and the network card.
        ranks_per_host: that share a network card.
    """

    node_cores: float = 16
    rank_cores: float = 2
    one_machine: bool = False
    ranks_per_host: int = 8
    nic_bytes_per_s: float = NIC_BYTES_PER_S
    latency_s: float = 50e-6


@dataclass(frozen=True)
class Case:
    """A table, a cluster, a job, and what happens to them.

    Attributes:
        windows: that each rank reads.
        step_s: of training; then all ranks begin each window together. 0: reads as fast as it can.
        lost: nodes that are killed at ``lost_at_s``.
        slow: nodes whose work takes ``slowdown`` times as long.
        sample_windows: with real row ids.
    """

    name: str
    num_nodes: int = 1_000
    num_shards: int = 100_000
    num_ranks: int = 10_000
    replicas: int = 1
    rows_per_shard: int = ROWS_PER_SHARD
    windows: int = 8
    step_s: float = 0.0
    lost: int = 0
    lost_at_s: float = 2.0
    slow: int = 0
    slowdown: float = 4.0
    seed: int = 0
    sample_windows: int = 128
    machines: Machines = Machines()


class Asked:
    """What some nodes are asked for at once, and what that costs.

    Attributes:
        nodes, rows: their indices, and how many rows of each; of the same length.
        num_rows: of all.
        turn_s, work_s, wire_s: of each node: processor time that is one by one, and all of it; time
            of the network.
    """

    def __init__(self, nodes: Counts, rows: Counts, plans: Plans) -> None:
        costs, slowdown = plans.costs, plans.slowdown[nodes]
        self.nodes, self.rows, self.num_rows = nodes, rows, int(rows.sum())
        messages = -(-rows // plans.rows_per_message)
        self.turn_s = (costs.node_request + messages * costs.node_message) * slowdown / 1e9
        self.work_s = self.turn_s + rows * costs.node_row * slowdown / 1e9
        self.wire_s = rows * costs.row_bytes / plans.case.machines.nic_bytes_per_s


@dataclass(frozen=True)
class Requests:
    """Requests for the rows of one window.

    Attributes:
        before: as long as all nodes answer.
        live: of ``before``, those that no lost node was asked for.
        avoiding: from live nodes, once a reader knows which are lost.
        retried: of ``avoiding``, those that a lost node was asked for.
        waiting: those that no live node has, by the nodes that get them.
        after: when the lost shards are back.
    """

    before: Asked
    live: Asked
    avoiding: Asked
    retried: Asked
    waiting: Asked
    after: Asked


class Plans:
    """What the planners of the project decide for a case. Pure, but for its cache."""

    def __init__(self, case: Case, costs: Costs) -> None:
        self.case, self.costs = case, costs
        self.names = [f"node-{index}" for index in range(case.num_nodes)]
        chance = random.Random(case.seed)
        self.lost = frozenset(chance.sample(range(case.num_nodes), case.lost))
        self.is_lost = np.zeros(case.num_nodes, np.bool_)
        self.is_lost[list(self.lost)] = True
        self.slowdown = np.ones(case.num_nodes)
        self.slowdown[chance.sample(range(case.num_nodes), case.slow)] = case.slowdown
        alive = [name for index, name in enumerate(self.names) if index not in self.lost]
        settings = (f"{case.seed:032x}", case.num_shards, self.names, case.replicas)
        self.homes = placement.place(*settings)
        self.homes_after = placement.place(*settings, alive=alive) if case.lost else self.homes
        self.shards = self._map(self.homes)
        sizes = WindowSizes(self.shards, BATCH_SIZE)
        self.rows_per_message = sizes.rows_per_message()
        self._routers: list[list[Router]] = []
        for offset in range(case.replicas):  # other offsets choose as one of these
            routers = [Router(self.shards, offset)]
            if case.lost:
                routers.append(Router(self.shards, offset, avoid=self.lost))
                routers.append(Router(self._map(self.homes_after), offset))
            self._routers.append(routers)
        self.steps_per_window = sizes.steps_per_window(self._routers[0][0].num_nodes)
        self.windows_ahead = sizes.windows_ahead(self.steps_per_window)
        self._order = EpochOrder(self.shards.num_rows, shuffle=True, seed=case.seed)
        self._steps = StepPlan(self.shards.num_rows, case.num_ranks, BATCH_SIZE)
        sampled = max(1, case.sample_windows // case.windows // case.replicas) * case.replicas
        self.sampled_ranks = min(sampled, case.num_ranks)
        self._requests: dict[tuple[int, int], Requests] = {}

    def _map(self, homes: tuple[tuple[str, ...], ...]) -> ShardMap:
        number = {name: index for index, name in enumerate(self.names)}
        rows = self.case.rows_per_shard
        return ShardMap(
            dataset="table",
            fingerprint="",
            logical=SCHEMA,
            num_rows=len(homes) * rows,
            starts=np.arange(len(homes), dtype=np.int64) * rows,
            nodes=tuple(NodeRef(name, name) for name in self.names),
            replicas=tuple(tuple(number[name] for name in held) for held in homes),
        )

    def requests(self, rank: int, window: int) -> Requests:
        """What a rank asks for in a window; behind the last of an epoch comes its first."""
        windows = max(1, self._steps.num_steps // self.steps_per_window)
        key = rank % self.sampled_ranks, window % windows
        if key not in self._requests:
            self._requests[key] = self._route(*key)
        return self._requests[key]

    def _route(self, rank: int, window: int) -> Requests:
        steps = self.steps_per_window
        found = range(self._steps.num_steps)[window * steps : (window + 1) * steps]
        assert found, f"the epoch has no window {window}"
        row_ids = self._order.row_ids(self._steps.window(found, rank)[0])
        routers = self._routers[rank % self.case.replicas]
        nodes = [self._nodes(router, row_ids) for router in routers]
        before, avoiding, after = nodes if self.case.lost else nodes * 3
        lost = self.is_lost[before], self.is_lost[avoiding]

        def ask(nodes: Counts) -> Asked:
            counts = np.bincount(nodes, minlength=self.case.num_nodes)
            asked = np.flatnonzero(counts)
            return Asked(asked, counts[asked], self)

        return Requests(
            before=ask(before),
            live=ask(before[~lost[0]]),
            avoiding=ask(avoiding[~lost[1]]),
            retried=ask(avoiding[lost[0] & ~lost[1]]),
            waiting=ask(after[lost[1]]),
            after=ask(after),
        )

    def _nodes(self, router: Router, row_ids: Counts) -> Counts:
        nodes = np.empty(len(row_ids), np.int64)
        for part in router.route(row_ids):
            assert part.node is not None
            nodes[slice(None) if part.positions is None else part.positions] = self._index[
                part.node
            ]
        return nodes

    @cached_property
    def _index(self) -> dict[NodeRef, int]:
        return {node: index for index, node in enumerate(self.shards.nodes)}


@dataclass
class _Rank:
    """How far a rank is, in windows."""

    asked: int = 0
    knows: bool = False  # which nodes are lost
    streams_until: float = 0.0  # when its streams to the nodes may no longer be used
    ready: set[int] = field(default_factory=set)
    begins: list[float] = field(default_factory=list)  # of windows: when they are handed out


class Simulation:
    """One case on a virtual clock; used once.

    Args:
        costs: of this machine.
    """

    def __init__(self, case: Case, costs: Costs) -> None:
        self.case, self.costs, self.plans = case, costs, Plans(case, costs)
        self._window_rows = self.plans.steps_per_window * BATCH_SIZE
        self._random = random.Random(case.seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        machines = case.machines
        count = 1 if machines.one_machine else case.num_nodes
        self._cpu_free, self._out_free, self._in_free = np.zeros((3, count))
        self._turn_free = np.zeros(case.num_nodes)  # of Python
        self._rank_free = np.zeros(case.num_ranks)
        self._host_free = np.zeros(-(-case.num_ranks // machines.ranks_per_host))
        self._ranks = [_Rank() for _ in range(case.num_ranks)]
        self._ready_ranks = [0] * case.windows
        self._job_begun, self._job_free = 0, 0.0
        self._recovered_at = math.inf if case.lost else 0.0
        self._waiting: list[tuple[int, int, Asked]] = []
        self._open_parts: dict[tuple[int, int], int] = {}
        self._opening: set[tuple[int, int]] = set()  # windows whose streams are new
        self._ends: list[float] = []  # of windows
        self._marks: list[tuple[float, Counts, Seconds]] = []
        self.sent_rows = np.zeros(case.num_nodes, np.int64)
        self.received_rows = 0
        self.moved_bytes = {"from the source": 0, "from a replica": 0}
        self._node_cpu_s = np.zeros(case.num_nodes)
        self._rank_cpu_s = 0.0

    def run(self) -> dict[str, Any]:
        """The result, for a file."""
        for rank in range(self.case.num_ranks):
            self._at(self._random.random() if self.case.num_ranks > 1 else 0.0, self._start, rank)
        if self.case.lost:
            timeout_s = NodeConfig.model_fields["node_timeout_s"].default
            self._at(self.case.lost_at_s + timeout_s, self._recover)
        now = 0.0
        while self._events:
            now, _, function, arguments = heapq.heappop(self._events)
            function(now, *arguments)
        return self._summary()

    def _at(self, time_s: float, function: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), function, arguments))

    # -- a window, from request to batches -----------------------------------------------------

    def _start(self, now: float, number: int) -> None:
        rank, plans = self._ranks[number], self.plans
        while (
            rank.asked < self.case.windows and rank.asked - len(rank.begins) < plans.windows_ahead
        ):
            planned_s = self._work(now, number, self._window_rows * self.costs.plan_row)
            self._at(planned_s, self._ask, number, rank.asked)
            rank.asked += 1

    def _work(self, now: float, number: int, work_ns: float) -> float:
        """When the processor of a rank has done some work."""
        work_s = work_ns / 1e9
        self._rank_cpu_s += work_s
        free = max(self._rank_free[number], now) + work_s / self.case.machines.rank_cores
        self._rank_free[number] = free
        return max(float(free), now + work_s)

    def _ask(self, now: float, number: int, window: int) -> None:
        rank, requests = self._ranks[number], self.plans.requests(number, window)
        self._open_parts[number, window] = 1
        if rank.streams_until <= now:
            rank.streams_until = now + REQUEST_TIMEOUT_S
            self._opening.add((number, window))
            self._work(now, number, len(requests.before.nodes) * self.costs.client_stream)
        if not self.case.lost or now < self.case.lost_at_s:
            self._send(now, number, window, requests.before)
        elif now >= self._recovered_at:
            self._send(now, number, window, requests.after)
        elif rank.knows:
            self._wait(number, window, requests.waiting)
            self._send(now, number, window, requests.avoiding)
        else:
            self._retry(now, number, window)
            self._send(now, number, window, requests.live)

    def _send(self, now: float, number: int, window: int, asked: Asked) -> None:
        """Asks nodes for rows, and takes their answers unless they are lost meanwhile."""
        if not asked.num_rows:
            self._arrive(now, number, window)
            return
        machines, plans = self.case.machines, self.plans
        begin = now + machines.latency_s
        ends = self._serve(asked, begin, opens=(number, window) in self._opening)
        end = float(ends.max())
        late = ends > self.case.lost_at_s
        if now < self.case.lost_at_s < end and plans.is_lost[asked.nodes[late]].any():
            self._open_parts[number, window] += 1
            self._at(self.case.lost_at_s, self._fail, number, window)
            ends = ends[~plans.is_lost[asked.nodes]]
            asked = plans.requests(number, window).live
            end = float(ends.max(initial=begin))
        self.sent_rows[asked.nodes] += asked.rows
        self.received_rows += asked.num_rows
        host = number // machines.ranks_per_host
        seconds = asked.num_rows * self.costs.row_bytes / machines.nic_bytes_per_s
        self._host_free[host] = max(self._host_free[host], begin) + seconds
        end = max(end, float(self._host_free[host])) + machines.latency_s
        self._at(end, self._arrive, number, window)

    def _serve(self, asked: Asked, begin: float, *, opens: bool) -> Seconds:
        """When each node has answered."""
        nodes, cores = asked.nodes, self.case.machines.node_cores
        turn_s, work_s = asked.turn_s, asked.work_s
        if opens:
            opening_s = self.costs.node_stream * self.plans.slowdown[nodes] / 1e9
            turn_s, work_s = turn_s + opening_s, work_s + opening_s
        self._node_cpu_s[nodes] += work_s
        ends = np.maximum(begin + work_s, _queue(self._turn_free, nodes, begin, turn_s))
        for free, seconds in (
            (self._cpu_free, work_s / cores),
            (self._out_free, asked.wire_s),
        ):
            np.maximum(ends, _queue(free, nodes, begin, seconds), out=ends)
        return ends

    def _arrive(self, now: float, number: int, window: int) -> None:
        self._open_parts[number, window] -= 1
        if self._open_parts[number, window]:
            return
        del self._open_parts[number, window]
        self._opening.discard((number, window))
        costs, parts = self.costs, len(self.plans.requests(number, window).before.nodes)
        work_ns = self._window_rows * costs.client_row + parts * costs.client_request
        if parts > 1:
            work_ns += self._window_rows * costs.order_row
        messages = max(parts, -(-self._window_rows // self.plans.rows_per_message))
        work_ns += messages * costs.client_message
        self._at(self._work(now, number, work_ns), self._end, number, window)

    def _end(self, now: float, number: int, window: int) -> None:
        rank = self._ranks[number]
        rank.ready.add(window)
        self._ends.append(now)
        total = self.case.num_ranks * self.case.windows
        if len(self._ends) in (total // 4, total - total // 4):
            self._marks.append((now, self.sent_rows.copy(), self._node_cpu_s.copy()))
        if self.case.step_s:
            self._ready_ranks[window] += 1
            self._begin_together(now)
        else:
            while len(rank.begins) in rank.ready:
                rank.begins.append(now)
        self._start(now, number)

    def _begin_together(self, now: float) -> None:
        """Begins a window on all ranks, once all have it and have trained the one before."""
        window = self._job_begun
        if window == self.case.windows or now < self._job_free:
            return
        if self._ready_ranks[window] == self.case.num_ranks:
            self._job_begun += 1
            self._job_free = now + self.plans.steps_per_window * self.case.step_s
            self._at(self._job_free, self._begin_together)
            for number, rank in enumerate(self._ranks):
                rank.begins.append(now)
                self._start(now, number)

    # -- lost nodes ----------------------------------------------------------------------------

    def _fail(self, now: float, number: int, window: int) -> None:
        """Lost nodes ended before they answered."""
        self._retry(now, number, window)
        self._arrive(now, number, window)

    def _retry(self, now: float, number: int, window: int) -> None:
        """Other nodes are asked in place of lost ones, after a pause."""
        self._ranks[number].knows = True
        requests = self.plans.requests(number, window)
        self._wait(number, window, requests.waiting)
        if requests.retried.num_rows:
            self._open_parts[number, window] += 1
            self._at(now + _FIRST_WAIT_S, self._send, number, window, requests.retried)

    def _wait(self, number: int, window: int, asked: Asked) -> None:
        if asked.num_rows:
            self._open_parts[number, window] += 1
            self._waiting.append((number, window, asked))

    def _recover(self, now: float) -> None:
        """The coordinator gives the lost shards to other nodes, which copy or load them."""
        plans, costs, machines = self.plans, self.costs, self.case.machines
        interval_s = NodeConfig.model_fields["heartbeat_interval_s"].default
        shard_bytes = self.case.rows_per_shard * costs.row_bytes
        number = {name: index for index, name in enumerate(plans.names)}
        told: dict[int, float] = {}
        recovered_s = now
        for before, after in zip(plans.homes, plans.homes_after, strict=True):
            sources = [number[n] for n in before if number[n] not in plans.lost]
            for name in after:
                if name in before:
                    continue
                node = number[name]
                begin = told.setdefault(node, now + self._random.random() * interval_s)
                copied = bool(sources)
                self.moved_bytes["from a replica" if copied else "from the source"] += shard_bytes
                work_s = shard_bytes * (costs.copy_byte if copied else costs.load_byte) / 1e9
                ends = [begin + work_s]  # one shard is one thread's
                wire_s = shard_bytes / machines.nic_bytes_per_s
                for queues, at, seconds in (
                    (self._cpu_free, node, work_s / machines.node_cores),
                    (self._in_free, node, wire_s),
                    *([(self._out_free, sources[0], wire_s)] if copied else []),
                ):
                    queues[at] = max(queues[at], begin) + seconds
                    ends.append(float(queues[at]))
                recovered_s = max(recovered_s, *ends)
                sources = sources or [node]  # the next home copies it
        self._at(recovered_s, self._send_waiting)
        self.recovery_s = recovered_s - self.case.lost_at_s

    def _send_waiting(self, now: float) -> None:
        self._recovered_at = now
        for number, window, asked in self._waiting:
            pause_s = self._random.random() * _LONGEST_WAIT_S  # between attempts
            self._at(now + pause_s, self._send, number, window, asked)
        self._waiting.clear()

    # -- results -------------------------------------------------------------------------------

    def _summary(self) -> dict[str, Any]:
        case, plans, row_bytes = self.case, self.plans, self.costs.row_bytes
        shard_bytes = [case.rows_per_shard * row_bytes] * case.num_shards
        held = np.zeros(case.num_nodes)
        number = {name: index for index, name in enumerate(plans.names)}
        for name, size in placement.bytes_by_node(plans.homes, shard_bytes).items():
            held[number[name]] = size
        begins = np.array([rank.begins for rank in self._ranks])
        training_s = plans.steps_per_window * case.step_s
        waits = np.diff(begins, axis=1) - training_s
        start = min(plans.windows_ahead, case.windows // 4)  # the first windows meet no queue
        seconds = np.maximum(begins[:, -1] - begins[:, start], 1e-9)
        steps = plans.steps_per_window * (case.windows - 1 - start) / seconds
        (begin, sent, cpu_s), (end, sent_then, cpu_then_s) = self._marks[0], self._marks[-1]
        duration = max(end - begin, 1e-9)
        per_node = (sent_then - sent) * row_bytes / duration * 8e-9
        requests = len(plans.requests(0, 0).before.nodes)
        windows = len(self._ends) - 2 * (len(self._ends) // 4)  # between the marks
        return {
            "case": asdict(case),
            "steps_per_window": plans.steps_per_window,
            "sampled_ranks": plans.sampled_ranks,
            "requests_per_window": requests,
            "steps_per_s_a_rank": _spread(steps, (1, 50, 99)),
            "client_cpu_ns_a_row": self._rank_cpu_s / self.received_rows * 1e9,
            "node_cpu_ns_a_row": float(self._node_cpu_s.sum()) / self.received_rows * 1e9,
            "node_gigabits_per_s": {"mean": float(per_node.mean()), "max": float(per_node.max())},
            "share_of_0.8_nic": float(per_node.max() / (NIC_BYTES_PER_S * 8e-9 * NIC_SHARE)),
            "requests_per_s_a_node": windows / duration * requests / case.num_nodes,
            "streams_of_a_node": case.num_ranks * requests / case.num_nodes,
            "node_cores_used": float(((cpu_then_s - cpu_s) / duration).mean()),
            "held_over_mean": _imbalance(held),
            "served_over_mean": _imbalance(self.sent_rows[~plans.is_lost].astype(float)),
            "longest_wait_s": float(waits.max()),
            "received_bytes": self.received_rows * row_bytes,
            "moved_bytes": self.moved_bytes,
            "recovery_s": getattr(self, "recovery_s", 0.0),
            "took_virtual_s": float(begins.max()),
        }


def _queue(free: Seconds, at: Counts, begin: float, seconds: Seconds) -> Seconds:
    """When queues have done so many seconds of work each; changes when they are free.

    Args:
        free: when each queue is; the only one, or one for each node.
        at: different nodes.
    """
    if len(free) == 1:
        free[0] = max(free[0], begin) + seconds.sum()
        return np.broadcast_to(free, seconds.shape)
    ends: Seconds = np.maximum(free[at], begin) + seconds
    free[at] = ends
    return ends


def _spread(values: Seconds, percentiles: tuple[int, ...]) -> dict[str, float]:
    return {f"p{each}": float(np.percentile(values, each)) for each in percentiles}


def _imbalance(values: Seconds) -> dict[str, float]:
    mean = values.mean()
    return {"max": float(values.max() / mean), "p99": float(np.percentile(values, 99) / mean)}
