"""Train on classes that are equally frequent in every batch, though one is rare in the table.

Starts a cache on this machine, and loads payments: 2% are fraud. A model trains on them as they
are, and another one on balanced classes. The cities are codes of an embedding table, and the
age of the account comes from a second table. Run it:

    python examples/weighted_classes.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from cache_client import CacheClient, CacheIterableDataset, DatasetSpec, Join, View
from cache_server import LocalCluster

ROWS, ACCOUNTS = 20_000, 500
PARTS = {"train": 0.9, "val": 0.1}
CITIES = ["Bergen", "Bonn", "Oslo", "Rome"]


class Detector(nn.Module):
    """A logit from a city, an amount and the age of an account."""

    def __init__(self, num_cities: int) -> None:
        super().__init__()
        self.city = nn.Embedding(num_cities, 4)
        self.rest = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits, shape ``[B]``."""
        numbers = torch.stack([batch["amount"], batch["age"]], 1)
        joined = torch.cat([self.city(batch["city"]), numbers], 1)
        logits: torch.Tensor = self.rest(joined).squeeze(1)
        return logits


def main() -> None:
    """Trains both models; prints how many frauds each one finds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, LocalCluster(nodes=2) as cluster:
        client = CacheClient(cluster.endpoint)
        for name, table in tables().items():
            path = Path(directory) / f"{name}.parquet"
            pq.write_table(table, path)
            client.load(DatasetSpec(name, path))
        for name, options in (("as they are", {}), ("balanced", {"per_class": "fraud"})):
            found = train(cluster.endpoint, arguments.epochs, options)
            print(f"classes {name}: {found:.0%} of the frauds found", flush=True)


def payments(endpoint: str, part: str, **options: Any) -> CacheIterableDataset:
    """The payments of a part, with codes of cities and the age of their account."""
    return CacheIterableDataset(
        "payments",
        cache=endpoint,
        batch_size=256,
        columns=["amount", "fraud"],
        view=View(
            codes=["city"],
            join={"account": Join("accounts", columns=["age"])},
            split=PARTS,
            part=part,
            **options,
        ),
        shuffle=part == "train",
    )


def train(endpoint: str, epochs: int, options: dict[str, Any]) -> float:
    """Trains a model; returns the part of the frauds of other payments that it finds."""
    torch.manual_seed(0)
    data = payments(endpoint, "train", **options)
    model = Detector(len(data.vocabulary("city")))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        data.set_epoch(epoch)
        for batch in data.loader():
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(batch), batch["fraud"].float()
            )
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    found = frauds = 0
    with torch.no_grad():
        for batch in payments(endpoint, "val", where="fraud").loader():
            found += int((model(batch) > 0).sum())
            frauds += len(batch["fraud"])
    return found / frauds


def tables() -> dict[str, pa.Table]:
    """Payments, a few of them fraud, and the accounts that they come from."""
    rng = np.random.default_rng(0)
    account, city = rng.integers(0, ACCOUNTS, ROWS), rng.integers(0, len(CITIES), ROWS)
    age, amount = rng.random(ACCOUNTS), rng.random(ROWS)
    risk = amount - age[account] + 0.3 * (city == 2)
    fraud = risk > np.quantile(risk, 0.98)
    return {
        "payments": pa.table(
            {
                "account": account,
                "amount": amount.astype(np.float32),
                "city": np.array(CITIES)[city],
                "fraud": fraud,
            }
        ),
        "accounts": pa.table({"account": np.arange(ACCOUNTS), "age": age.astype(np.float32)}),
    }


if __name__ == "__main__":
    main()
