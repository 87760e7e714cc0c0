"""Train on a table with missing values: masks for a model, and exact nulls for statistics.

Starts a cache on this machine, and fits prices of houses whose rooms, prices of the last sale and
addresses are not all known:

    python examples/missing_values.py
"""

from __future__ import annotations

import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from cache_client import CacheClient, CacheIterableDataset, DatasetSpec
from cache_server import LocalCluster

ROWS, BATCH_SIZE, EPOCHS = 4_000, 200, 5


def main() -> None:
    """Runs the example."""
    with tempfile.TemporaryDirectory() as directory, LocalCluster(nodes=1) as cluster:
        path = Path(directory) / "houses.parquet"
        write_houses(path)
        CacheClient(cluster.endpoint).load(DatasetSpec("houses", path))
        count_missing(cluster.endpoint)
        train(cluster.endpoint)


def count_missing(endpoint: str) -> None:
    """Record batches have the nulls of the table."""
    rows = CacheIterableDataset("houses", cache=endpoint, batch_size=1000, batch_format="arrow")
    for column in ("rooms", "last_sale", "address"):
        missing = sum(batch.column(column).null_count for batch in rows)
        print(f"{column}: {missing} of {ROWS} are missing")


def train(endpoint: str) -> None:
    """Trains with 0 for missing values, and masks that tell the model so."""
    houses = CacheIterableDataset(
        "houses", cache=endpoint, batch_size=BATCH_SIZE, shuffle=True, nulls="mask"
    )
    model = torch.nn.Linear(7, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for epoch in range(EPOCHS):
        houses.set_epoch(epoch)
        for batch in houses.loader():
            loss = torch.nn.functional.mse_loss(model(features(batch))[:, 0], batch["price"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


def features(batch: dict[str, Any]) -> torch.Tensor:
    """``[B, 7]``: the area, and each other value with its mask."""
    values = {
        "rooms": batch["rooms"],  # integers are 0 below a null
        "last_sale": batch["last_sale"].nan_to_num(),  # decimals and floats are NaN
        "address.floor": batch["address"]["floor"],
    }
    known = [batch[f"{name}.valid"] for name in values]
    columns = [batch["area"], *values.values(), *known]
    return torch.stack([column.to(torch.float32) for column in columns], dim=1)


def write_houses(path: Path) -> None:
    """A table with missing values: a column of integers, one of decimals, and a struct."""
    rng = np.random.default_rng(0)
    area = rng.uniform(0, 1, ROWS).astype(np.float32)
    rooms, floor = rng.integers(1, 5, ROWS), rng.integers(0, 4, ROWS)
    sale = [Decimal(cents) / 100 for cents in rng.integers(0, 500, ROWS).tolist()]
    price = 3 * area + 0.2 * rooms + 0.1 * floor
    addresses = [None if n % 5 == 0 else {"floor": f} for n, f in enumerate(floor.tolist())]
    table = pa.table(
        {
            "area": area,
            "rooms": pa.array(rooms, pa.int8(), mask=rng.random(ROWS) < 0.1),
            "last_sale": pc.if_else(pa.array(rng.random(ROWS) < 0.5), pa.array(sale), None),
            "address": pa.array(addresses, pa.struct([("floor", pa.int16())])),
            "price": price.astype(np.float32),
        }
    )
    pq.write_table(table, path)


if __name__ == "__main__":
    main()
