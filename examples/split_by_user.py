"""Train on most users and validate on the others, from one cached table.

Starts a cache on this machine, loads ratings of many users, and reads them twice: the training
rows and the validation rows. No user is in both. Run it:

    python examples/split_by_user.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from cache_client import CacheClient, CacheIterableDataset, DatasetSpec, View
from cache_server import LocalCluster

ROWS, USERS = 10_000, 1_000
PARTS = {"train": 0.9, "val": 0.1}
WHERE = "seconds > 5"  # shorter visits say little
FEATURES = ["age", "seconds"]


def main() -> None:
    """Trains for some epochs; prints the losses, and that no user is on both sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, LocalCluster(nodes=2) as cluster:
        client = CacheClient(cluster.endpoint)
        client.load(DatasetSpec("ratings", write_table(Path(directory)), target_shard_bytes=2**18))
        train, val = part(cluster, "train"), part(cluster, "val")
        model = nn.Sequential(nn.Linear(len(FEATURES), 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        users: dict[str, set[int]] = {"train": set(), "val": set()}
        for epoch in range(arguments.epochs):
            train.set_epoch(epoch)
            for batch in train.loader():
                users["train"].update(batch["user"].tolist())
                optimizer.zero_grad()
                error: torch.Tensor = loss(model, batch)
                error.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            val.set_epoch(epoch)
            with torch.no_grad():
                losses = []
                for batch in val.loader():
                    users["val"].update(batch["user"].tolist())
                    losses.append(loss(model, batch))
            print(f"epoch {epoch}: validation loss {torch.stack(losses).mean():.4f}", flush=True)
    print(f"{train.num_samples} rows of {len(users['train'])} users to train")
    print(f"{val.num_samples} rows of {len(users['val'])} users to validate")
    print(f"{len(users['train'] & users['val'])} users on both sides")


def part(cluster: LocalCluster, name: str) -> CacheIterableDataset:
    """The rows of some users."""
    return CacheIterableDataset(
        "ratings",
        cache=cluster.endpoint,
        batch_size=256,
        shuffle=name == "train",
        stack={"features": FEATURES},
        view=View(where=WHERE, split=PARTS, part=name, split_by=["user"]),
    )


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean squared error of the ratings of a batch."""
    return nn.functional.mse_loss(model(batch["features"]).squeeze(1), batch["rating"])


def write_table(directory: Path) -> Path:
    """Writes ratings that depend on the age of a user and the length of a visit."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, USERS, ROWS)
    age = rng.uniform(0, 1, USERS).astype(np.float32)[user]
    seconds = rng.uniform(0, 60, ROWS).astype(np.float32)
    rating = 3 * age + np.sqrt(seconds) / 8 + rng.normal(0, 0.1, ROWS)
    table = pa.table(
        {"user": user, "age": age, "seconds": seconds, "rating": rating.astype(np.float32)}
    )
    for index in range(4):
        pq.write_table(table.slice(index * ROWS // 4, ROWS // 4), directory / f"{index}.parquet")
    return directory


if __name__ == "__main__":
    main()
