"""Train on a cached table with DeepSpeed, started by MPI.

    mpirun -n 2 python examples/train_deepspeed.py --endpoint grpc://127.0.0.1:50051

Needs DeepSpeed, mpi4py and Open MPI, which are on the Python package index. mpirun sets the rank in
``OMPI_COMM_WORLD_RANK``. DeepSpeed asks MPI for the rank and for the address of rank 0. torchrun
and ``deepspeed`` can start the script too.
"""

from __future__ import annotations

import argparse
import gc

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: see "The end of a rank" in README.md
from deepspeed.accelerator import get_accelerator
from torch import nn

from cache_client import CacheIterableDataset

FEATURES = ["quantity", "discount", "tax", "part"]


def main() -> None:
    """Trains for a few epochs; prints the loss and whether every row was seen exactly once."""
    parser = argparse.ArgumentParser(description="Train with DeepSpeed")
    parser.add_argument("--endpoint", help="default: CACHE_ENDPOINT")
    parser.add_argument("--dataset", default="lineitem")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--port", type=int, default=29500, help="of rank 0, for torch.distributed")
    parser.add_argument("--local_rank", type=int, help="passed by the launcher `deepspeed`")
    arguments = parser.parse_args()

    if not torch.cuda.is_available():
        # Otherwise DeepSpeed compiles a backend for a minute. Gloo is enough for CPUs.
        deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(distributed_port=arguments.port, verbose=False)
    complete = train(arguments)
    gc.collect()  # the engine refers to itself
    deepspeed.comm.destroy_process_group()  # torch's function keeps DeepSpeed's groups
    if not complete:
        raise SystemExit("some rows were missed or repeated")


def train(arguments: argparse.Namespace) -> bool:
    """Whether every row was seen exactly once in every epoch."""
    torch.manual_seed(0)
    dataset = CacheIterableDataset(
        arguments.dataset,
        cache=arguments.endpoint,
        batch_size=arguments.batch_size,
        columns=["row_key", *FEATURES, "price"],
        stack={"features": FEATURES},
        shuffle=True,
        device=get_accelerator().current_device_name(),
    )
    model = nn.Sequential(nn.Linear(len(FEATURES), 64), nn.ReLU(), nn.Linear(64, 1))
    # Without training_data: DeepSpeed would divide the rows again.
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        config={"train_micro_batch_size_per_gpu": arguments.batch_size},
    )
    complete = True
    for epoch in range(arguments.epochs):
        dataset.set_epoch(epoch)
        keys, losses = [], []
        for batch in dataset:
            loss = nn.functional.mse_loss(engine(batch["features"]).squeeze(1), batch["price"])
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
            keys.append(batch["row_key"].cpu())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        once = count_seen_once(torch.cat(keys))
        complete &= once == dataset.num_rows
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch}: loss {float(mean) / dist.get_world_size():.5f}, "
                f"{len(losses)} steps, {once:,} of {dataset.num_rows:,} rows seen exactly once",
                flush=True,
            )
    return complete


def count_seen_once(keys: torch.Tensor) -> int:
    """Counts the keys that occur exactly once over all ranks."""
    everywhere = [keys] * dist.get_world_size()
    dist.all_gather_object(everywhere, keys)
    _, counts = torch.unique(torch.cat(everywhere), return_counts=True)
    return int((counts == 1).sum())


if __name__ == "__main__":
    main()
