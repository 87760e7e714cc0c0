"""That the simulated cluster loses no row and no shard, and gives one result for one seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.costs import Costs
from benchmarks.simulated_cluster import Case, Simulation

COSTS = Costs(
    plan_row=20,
    client_request=200_000,
    client_message=20_000,
    client_row=90,
    order_row=30,
    node_request=200_000,
    node_message=90_000,
    node_row=100,
    client_stream=500_000,
    node_stream=500_000,
    node_idle=20_000_000,
    load_byte=4,
    copy_byte=2,
)
TINY = Case("tiny", 10, 100, 16, replicas=2, windows=4, lost_at_s=0.5, sample_windows=8)


def test_one_seed_gives_one_result() -> None:
    lost = replace(TINY, lost=1)

    first = Simulation(lost, COSTS).run()

    assert Simulation(lost, COSTS).run() == first
    assert Simulation(replace(lost, seed=1), COSTS).run() != first


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("lost", [0, 1, 3])
def test_ranks_receive_each_of_their_rows_once(replicas: int, lost: int) -> None:
    simulation = Simulation(replace(TINY, replicas=replicas, lost=lost), COSTS)

    simulation.run()

    rows = TINY.num_ranks * TINY.windows * simulation.plans.steps_per_window * 1024
    assert simulation.received_rows == simulation.sent_rows.sum() == rows


def test_the_shards_of_a_lost_node_are_copied_or_loaded_again() -> None:
    results = {}
    for replicas in (1, 2):
        simulation = Simulation(replace(TINY, replicas=replicas, lost=1), COSTS)
        results[replicas] = simulation.run()
        (lost,) = (simulation.plans.names[index] for index in simulation.plans.lost)
        homes = zip(simulation.plans.homes, simulation.plans.homes_after, strict=True)
        assert all(lost not in after and len(after) == len(before) for before, after in homes)
        lost_shards = sum(lost in before for before in simulation.plans.homes)
        moved = simulation.moved_bytes.values()
        assert sum(moved) == lost_shards * TINY.rows_per_shard * COSTS.row_bytes

    assert results[1]["moved_bytes"]["from a replica"] == 0
    assert results[2]["moved_bytes"]["from the source"] == 0
    assert results[1]["recovery_s"] > 10  # a node is lost after its timeout
    assert results[1]["took_virtual_s"] > 10
    assert results[2]["took_virtual_s"] < 2
