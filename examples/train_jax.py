"""Train on a cached table with JAX: one process, or several as Kubeflow Trainer starts them.

    python examples/train_jax.py --endpoint grpc://127.0.0.1:50051

    export JAX_COORDINATOR_ADDRESS=127.0.0.1:29400 JAX_NUM_PROCESSES=2
    JAX_PROCESS_ID=0 python examples/train_jax.py & JAX_PROCESS_ID=1 python examples/train_jax.py

Each process reads different rows as numpy arrays. Together they are one global array, and XLA
averages the gradients. The client needs torch; a build without CUDA is enough.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cache_client import CacheIterableDataset

FEATURES = ["quantity", "discount", "tax", "part"]
NO_KEY = -1


def padded(batch: dict[str, np.ndarray[Any, Any]], size: int) -> dict[str, np.ndarray[Any, Any]]:
    """Pads ``batch`` to ``size`` rows; the added rows have no weight.

    The last step of an epoch may have fewer rows, and not as many on every rank. So no row is left
    out, each process has its equal part of the global array, and XLA compiles one shape.
    """
    rows = len(batch["price"])
    return {
        "features": np.pad(batch["features"], ((0, size - rows), (0, 0))),
        "price": np.pad(batch["price"], (0, size - rows)),
        "weight": np.pad(np.ones(rows, np.float32), (0, size - rows)),
        "row_key": np.pad(batch["row_key"], (0, size - rows), constant_values=NO_KEY),
    }


def as_global(
    by_rank: NamedSharding, batch: dict[str, np.ndarray[Any, Any]]
) -> dict[str, jax.Array]:
    """Joins the batches of all processes to one global array."""
    make: Any = jax.make_array_from_process_local_data
    return {name: make(by_rank, values) for name, values in batch.items()}


def weighted_loss(model: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """The mean squared error of the rows of all processes."""
    hidden = jax.nn.relu(batch["features"] @ model["in"] + model["bias"])
    error = (hidden @ model["out"])[:, 0] - batch["price"]
    return jnp.sum(batch["weight"] * error**2) / jnp.sum(batch["weight"])


@partial(jax.jit, donate_argnums=0)
def train_step(
    model: dict[str, jax.Array], batch: dict[str, jax.Array]
) -> tuple[dict[str, jax.Array], jax.Array]:
    """One step of gradient descent; returns the model after it and the loss before it."""
    loss, gradients = jax.value_and_grad(weighted_loss)(model, batch)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, model, gradients), loss


def main() -> None:
    """Trains for a few epochs; prints the loss and whether every row was seen exactly once."""
    parser = argparse.ArgumentParser(description="Train with JAX")
    parser.add_argument("--endpoint", help="default: CACHE_ENDPOINT")
    parser.add_argument("--dataset", default="lineitem")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1024)
    arguments = parser.parse_args()

    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        num_processes, process_id = (
            int(os.environ[name]) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        )
        jax.distributed.initialize(address, num_processes, process_id)
    # The rank comes from JAX_PROCESS_ID and JAX_NUM_PROCESSES.
    dataset = CacheIterableDataset(
        arguments.dataset,
        cache=arguments.endpoint,
        batch_size=arguments.batch_size,
        batch_format="numpy",
        columns=["row_key", *FEATURES, "price"],
        stack={"features": FEATURES},
        shuffle=True,
        transform=partial(padded, size=arguments.batch_size),
    )
    assert (dataset.rank, dataset.world_size) == (jax.process_index(), jax.process_count())
    mesh = Mesh(jax.devices(), "rank")
    by_rank = NamedSharding(mesh, PartitionSpec("rank"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    one, two = jax.random.split(jax.random.key(0))
    model = {
        "in": jax.random.normal(one, (len(FEATURES), 64)) / 2,
        "bias": jnp.zeros(64),
        "out": jax.random.normal(two, (64, 1)) / 8,
    }
    model = jax.device_put(model, everywhere)
    for epoch in range(arguments.epochs):
        dataset.set_epoch(epoch)
        keys, losses = [], []
        for batch in dataset:
            keys.append(batch.pop("row_key"))
            model, loss = train_step(model, as_global(by_rank, batch))
            losses.append(float(loss))
        once = count_seen_once(np.concatenate(keys))
        if jax.process_index() == 0:
            print(
                f"epoch {epoch}: loss {np.mean(losses):.5f}, {len(losses)} steps, "
                f"{once:,} of {dataset.num_rows:,} rows seen exactly once",
                flush=True,
            )
        if once != dataset.num_rows:
            raise SystemExit("some rows were missed or repeated")


def count_seen_once(keys: np.ndarray[Any, Any]) -> int:
    """Counts the keys that occur exactly once over all processes."""
    halves = process_allgather(keys.view(np.int32))  # JAX has no int64 by default
    unique, counts = np.unique(np.ravel(halves).view(np.int64), return_counts=True)
    return int(((counts == 1) & (unique != NO_KEY)).sum())


if __name__ == "__main__":
    main()
