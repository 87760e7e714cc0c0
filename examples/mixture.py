"""Train on two tables in given proportions, stop, and resume with other proportions.

Starts a cache on this machine, loads two tables of prices, and fits one line to both:

    python examples/mixture.py
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from cache_client import CacheClient, CacheIterableDataset, CacheMixture, DatasetSpec
from cache_server import LocalCluster

ROWS = {"old": 6_000, "new": 1_000}
BATCH_SIZE = 100


def main() -> None:
    """Runs the example."""
    with tempfile.TemporaryDirectory() as directory, LocalCluster(nodes=1) as cluster:
        client = CacheClient(cluster.endpoint)
        for number, (name, num_rows) in enumerate(ROWS.items()):
            write_houses(Path(directory) / name, num_rows, seed=number)
            client.load(DatasetSpec(name, Path(directory) / name))
        train(cluster.endpoint)


def train(endpoint: str) -> None:
    """Trains for 30 steps on mostly old houses, then to the end of the epoch on half of each."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixture = mix(endpoint, old=0.8, new=0.2)
    seen: Counter[str] = Counter()
    for step, batch in enumerate(mixture.loader(), 1):
        seen.update(batch["source"])
        loss = torch.nn.functional.mse_loss(model(batch["area"][:, None]), batch["price"][:, None])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step == 30:
            break
    print(f"after {step} steps: {dict(seen)}, loss {loss.item():.3f}")
    checkpoint: dict[str, Any] = mixture.state_dict()

    mixture = mix(endpoint, old=0.5, new=0.5)
    mixture.load_state_dict(checkpoint)
    for batch in mixture.loader():
        seen.update(batch["source"])
    print(f"the epoch has {dict(seen)}; it ends with the last old house")


def mix(endpoint: str, *, old: float, new: float) -> CacheMixture:
    """The two tables, shuffled; new houses come again until each old one was there."""
    houses = {
        name: CacheIterableDataset(name, cache=endpoint, batch_size=BATCH_SIZE, shuffle=True)
        for name in ROWS
    }
    return CacheMixture(
        {"old": (houses["old"], old), "new": (houses["new"], new)},
        stop="all_exhausted",
        source_column="source",
    )


def write_houses(folder: Path, num_rows: int, *, seed: int) -> None:
    """A table of areas and prices."""
    area = np.random.default_rng(seed).uniform(0, 1, num_rows).astype(np.float32)
    folder.mkdir()
    pq.write_table(pa.table({"area": area, "price": 3 * area + 1}), folder / "houses.parquet")


if __name__ == "__main__":
    main()
