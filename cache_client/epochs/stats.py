"""What a dataset object has read so far, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cache_protocol.cli.output import size


@dataclass(frozen=True)
class NodeStats:
    """What one node sent.

    Attributes:
        waited_s: for its answers, after the requests to all nodes were sent.
        failures: requests without an answer.
    """

    rows: int
    num_bytes: int
    waited_s: float
    failures: int


@dataclass(frozen=True)
class ReadStats:
    """What one rank has read since its dataset object was made.

    Attributes:
        elapsed_s: since the first batch was asked for.
        waited_s: the training loop waited for batches; 0 with DataLoader workers, unless it reads
            by `CacheIterableDataset.loader`.
        computed_s: the training loop worked between batches; likewise.
        batches, rows: that the loop took; with workers of another DataLoader, that they made.
        local_rows, local_bytes: read from files of this machine.
        nodes: node id -> what it sent; ``""`` stands for nodes that came later.
        fetch_s: waited for rows of nodes and files; with workers, their sum.
        transform_s: spent in ``transform``; with workers, their sum.
        failovers: requests that failed on one node and went to another one.
        refetches: attempts to get a window, beyond the first.
        queue_depth: windows that were ready when one was taken, the mean.
        queue_depths: the last of these, as pairs of elapsed seconds and windows; without workers.
    """

    elapsed_s: float
    waited_s: float
    computed_s: float
    batches: int
    rows: int
    local_rows: int
    local_bytes: int
    nodes: Mapping[str, NodeStats]
    fetch_s: float
    transform_s: float
    failovers: int
    refetches: int
    queue_depth: float
    queue_depths: tuple[tuple[float, int], ...] = ()

    @property
    def wait_share(self) -> float:
        """Share of the time that the training loop waited for data, in [0, 1]."""
        return self.waited_s / max(1e-9, self.waited_s + self.computed_s)

    def __str__(self) -> str:
        """A summary in one line."""
        parts = [
            f"{self.batches:,} batches, {self.rows:,} rows in {self.elapsed_s:.1f} s",
            f"waited {self.waited_s:.2f} s ({self.wait_share:.0%})",
            f"computed {self.computed_s:.2f} s",
        ]
        if self.local_rows:
            parts.append(f"{self.local_rows:,} rows ({size(self.local_bytes)}) from local files")
        parts += [
            f"{node.rows:,} rows ({size(node.num_bytes)}) from node {node_id or 'of later'}"
            for node_id, node in self.nodes.items()
        ]
        if self.failovers or self.refetches:
            parts.append(f"{self.failovers} fail-overs, {self.refetches} refetches")
        return "; ".join(parts)
