"""Jobs, datasets and nodes as a coordinator describes them, for tests of its page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from cache_protocol.v1 import cache_pb2 as pb

NODES = tuple(
    pb.Node(
        id=f"{number:02d}c0ffee{number:04x}", name=f"lineitem-cache-{number}", alive=number != 2,
        flight_location=f"grpc://lineitem-cache-{number}.lineitem-cache:50051",
        memory_limit_bytes=8 << 30, stored_bytes=(3 + number) << 30, stored_shards=40 + number,
    )
    for number in range(3)
)  # fmt: skip


def ages(stop: int = 0, minutes: int = 20, gap: tuple[int, int] = (500, 565)) -> list[int]:
    """Ages of samples, the oldest first, without those in a gap."""
    return [age for age in range(60 * minutes, stop, -5) if not gap[0] < age < gap[1]]


def job(size: int, slow: Iterable[int] = (), **changes: Any) -> pb.JobInfo:
    """A job that runs; slow ranks wait 80% of their time, the others a few."""
    slow, taken = set(slow), ages()

    def share(rank: int, age: int) -> float:
        return (0.75 if rank in slow else 0.04) + 0.03 * math.sin(rank + age / 40)

    verdict = "compute bound: no rank waits more than 7%"
    if slow:
        verdict = f"rank {min(slow)} is slow: 53 ms a step in transform"
    made = pb.JobInfo(
        name="train", dataset="lineitem", live=True, world_size=size, num_ranks=size,
        epoch=3, step=4_210, num_steps=9_800, rows_per_s=11_400.0 * size, local_share=0.25,
        wait_share=0.78 if slow else 0.07, verdict=verdict, verdict_s=312,
        ranks=[
            pb.RankInfo(
                rank=rank, live=True, step=4_210, wait_share=share(rank, 0), step_s=0.088,
                transform_s=0.053 if rank in slow else 0.001, fetch_s=0.0004, rows_per_s=11_400,
                wait_history=[share(rank, age) for age in taken], wait_ages_s=taken,
            )
            for rank in range(size)
        ],
        nodes=[
            pb.NodeShare(node_id=node.id, rows_share=1 / 3, wait_share=1 / 3) for node in NODES
        ],
        history=[
            pb.JobSample(
                age_s=age, rows_per_s=size * (11_000 + 400 * math.sin(age / 30)),
                wait_share=0.06, most_wait_share=share(min(slow, default=0), age),
            )
            for age in taken
        ],
    )  # fmt: skip
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def ended(name: str, end: pb.PassEnd.ValueType, verdict: str, ago_s: float = 60.0) -> pb.JobInfo:
    """A job that has ended."""
    return pb.JobInfo(
        name=name, dataset="lineitem", world_size=8, num_ranks=8, end=end, epoch=4, step=100,
        num_steps=100, verdict=f"{verdict}, {ago_s / 60:.0f} min ago", verdict_s=ago_s,
    )  # fmt: skip


ENDED = (
    *(ended(f"sweep-{n}", pb.PASS_END_FINISHED, "finished epoch 4", 60 * n) for n in range(1, 31)),
    ended("one-step", pb.PASS_END_STOPPED, "stopped at step 5 of 100 of epoch 0", 900),
    ended(
        "bert", pb.PASS_END_UNSPECIFIED,
        "crashed or hangs: rank 3 was last heard of at step 812 of 1,000 of epoch 2", 95,
    ),
    ended("gpt", pb.PASS_END_FAILED, "failed: rank 0 raised an error at step 7 of epoch 0", 1800),
)  # fmt: skip

LOADING = pb.DatasetInfo(
    spec=pb.DatasetSpec(name="orders"),
    state=pb.DATASET_STATE_LOADING,
    progress=pb.LoadProgress(
        rows_done=12_400_000, shards_done=31, shards_total=96, elapsed_s=62.0,
        estimated_rows=37_000_000,
    ),
)  # fmt: skip
READY = pb.DatasetInfo(
    spec=pb.DatasetSpec(name="lineitem"),
    state=pb.DATASET_STATE_READY,
    num_rows=59_986_052,
    num_bytes=7_700_000_000,
    progress=pb.LoadProgress(shards_done=120, shards_total=120),
)
FAILED = pb.DatasetInfo(
    spec=pb.DatasetSpec(name="customers"),
    state=pb.DATASET_STATE_FAILED,
    error=pb.Error(
        message="cannot read s3://bucket/customers/part-0017.parquet: it ends in the middle of a "
        "row group\n" + "\n".join(f"  row group {n}: damaged page header" for n in range(500))
    ),
)
